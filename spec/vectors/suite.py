"""Vector files as they are written."""

from __future__ import annotations

import json


class Suite:
    """The cases of one file, numbered in the order in which they are added."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about, self.cases = name, about, []

    def add(self, kind: str, op: str, about: str, given: dict, *, result=None, error=None) -> None:
        """One case; ``error`` is a reason code, or the fields of an error."""
        outcome = {"result": result}
        if error is not None:
            outcome = {"error": {"reason": error} if isinstance(error, str) else error}
        self.cases.append(
            {
                "id": f"{self.name}-{len(self.cases) + 1:03}",
                "class": kind,
                "op": op,
                "about": about,
                "input": given,
                **outcome,
            }
        )

    def text(self) -> str:
        """The file: one case a line, ASCII, so that a difference is a line."""
        lines = ",\n".join(json.dumps(case) for case in self.cases)
        about = json.dumps(self.about)
        return f'{{"format": "1.0", "about": {about}, "cases": [\n{lines}\n]}}\n'


def shard_fields(shard) -> dict:
    return dict(zip(("layer", "head", "context"), shard, strict=True))
