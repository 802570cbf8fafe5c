"""Runs the vectors of spec/vectors against an implementation.

``python -m tests.vectors.run [-- COMMAND ...]``: COMMAND speaks the contract of
spec/CONFORMANCE.md; without one, the Python library is tested in this process. Ends with 1 if a
vector fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Fields = dict[str, Any]

VECTORS = Path(__file__).parents[2] / "spec" / "vectors"


def load(version: str = "1.0") -> list[Fields]:
    """Every case of a format version, in the order of files and cases."""
    return [
        case
        for path in sorted((VECTORS / version).glob("*.json"))
        for case in json.loads(path.read_text("ascii"))["cases"]
    ]


def request(case: Fields) -> Fields:
    """What an implementation is given of a case."""
    return {"id": case["id"], "op": case["op"], "input": case["input"]}


def problem(case: Fields, answer: Fields) -> str | None:
    """What is wrong with an answer, or None."""
    expected = {"id": case["id"], **{k: case[k] for k in ("result", "error") if k in case}}
    if _plain(answer) == _plain(expected):
        return None
    title = f"{case['id']} ({case['op']}: {case['about']})"
    return f"{title}\n  expected {_short(expected)}\n  found    {_short(answer)}"


def _plain(answer: Fields) -> Fields:
    """An answer with what the contract leaves open brought into one form."""
    result = answer.get("result")
    if not isinstance(result, dict):
        return answer
    result = dict(result)
    for name in ("objects", "layers"):
        if name in result and all("rows" in entry for entry in result[name]):
            result[name] = [
                {**entry, "rows": [_joined(row) for row in entry["rows"]]} for entry in result[name]
            ]
    if "differences" in result:
        # By type too: true is not 1 here, but it is for Python.
        result["differences"] = sorted(
            [d["path"], json.dumps(d["a"]), json.dumps(d["b"])] for d in result["differences"]
        )
    return {**answer, "result": result}


def _joined(row: list[list[str]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, second, nbytes in sorted((list(map(int, r)) for r in row), key=lambda r: r[1]):
        if joined and [joined[-1][0] + joined[-1][2], joined[-1][1] + joined[-1][2]] == [
            first,
            second,
        ]:
            joined[-1][2] += nbytes
        else:
            joined.append([first, second, nbytes])
    return joined


def _short(value: Fields) -> str:
    text = json.dumps(value)
    return text if len(text) <= 600 else f"{text[:600]}… ({len(text)} characters)"


class Command:
    """An implementation in another process."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )

    def __call__(self, asked: Fields) -> Fields:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"no answer to {asked['id']}; ended with {self._process.wait()}")
        answer: Fields = json.loads(line)
        return answer

    def close(self) -> int:
        """Ends the input and gives the exit status."""
        self._process.communicate()
        return self._process.returncode


def failures(ask: Callable[[Fields], Fields], counts: Counter[str]) -> Iterator[str]:
    """What fails of the classes that an implementation claims; counts vectors a class."""
    claimed = ask({"id": "hello", "op": "hello", "input": {}})["result"]["classes"]
    for case in load():
        if case["class"] in claimed:
            counts[case["class"]] += 1
            found = problem(case, ask(request(case)))
            if found is not None:
                yield found


def main() -> int:
    arguments = sys.argv[1:]
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    counts: Counter[str] = Counter()
    if command:
        implementation = Command(command)
        failed = list(failures(implementation, counts))
        if status := implementation.close():
            failed.append(f"{command} ended with status {status}")
    else:
        from tests.vectors.adapter import answer

        failed = list(failures(answer, counts))
    print("\n".join(failed), end="\n" if failed else "")
    print(f"{sum(counts.values())} vectors, {len(failed)} failed: {dict(counts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
