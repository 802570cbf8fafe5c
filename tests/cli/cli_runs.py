"""What a run of the command is, to the tests that start one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

COMMAND = [sys.executable, "-m", "kvformat.cli"]


class Outcome(NamedTuple):
    """What a run left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)


Run = Callable[..., Outcome]
