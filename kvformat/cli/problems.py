"""What a command found wrong: a stable code, a sentence, and the key it is about.

``reason`` is a code of spec/registry.md "Reason codes", or, where a store had no bytes to judge,
the store's answer in lower case: ``not_found``, ``transfer_failed``, and the like (see
:class:`~kvformat.stores.protocol.Code`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvformat.errors import KVFormatError
from kvformat.stores import Code

#: Exit codes of every command.
EXIT_FINE: Final = 0
EXIT_FOUND: Final = 1
EXIT_UNUSABLE: Final = 2


class Problem(msgspec.Struct, frozen=True):
    """One finding."""

    reason: str
    detail: str
    key: str | None = None

    @classmethod
    def from_error(cls, error: KVFormatError, key: str | None = None) -> Problem:
        """The finding that an error of the library stands for."""
        return cls(error.reason.value, error.detail, key)


class StoreAnswerError(Exception):
    """A store's negative answer for one key."""

    def __init__(self, code: int, key: str, what: str) -> None:
        super().__init__(code, key, what)
        self.code = code
        self.key = key
        self.what = what

    def finding(self) -> Problem:
        """The answer as a finding. Raises the error itself where the store is out of reach."""
        if self.code == Code.UNAVAILABLE:
            raise self
        return self.problem

    @property
    def problem(self) -> Problem:
        """The answer in words."""
        name = Code(self.code).name.lower() if self.code in set(Code) else str(self.code)
        if self.code == Code.NOT_FOUND:
            return Problem(name, f"the store has no {self.what} under this key", self.key)
        return Problem(name, f"the store can't give the {self.what}: it answers {name}", self.key)


def exit_code(problems: list[Problem]) -> int:
    """1 where something was found."""
    return EXIT_FOUND if problems else EXIT_FINE
