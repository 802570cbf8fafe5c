"""What ``kvformat doctor`` finds, as data."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvformat.cli.diff import DiffDocument
from kvformat.cli.problems import Problem
from kvformat.errors import KVFormatError, Reason

#: ``ok``; ``notice``: works, and an operator should know; ``failed``: a server would not start, or
#: would share nothing; ``unreachable``: failed because something out there doesn't answer;
#: ``skipped``: can't be checked here.
Status = Literal["ok", "notice", "failed", "unreachable", "skipped"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at. ``found`` says what is there, ``advice`` what to do about it.

    ``reason`` is a code of spec/registry.md for a check that failed.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    reason: str | None = None


def failed_check(name: str, error: KVFormatError) -> Check:
    """The check that an error of the library stands for."""
    status: Status = "unreachable" if error.reason is Reason.STORE_UNAVAILABLE else "failed"
    return Check(name, status, error.detail, reason=error.reason.value)


class OptionDifference(msgspec.Struct, frozen=True):
    """An option on which two configuration files don't agree, although sharing needs it."""

    option: str
    a: str
    b: str


class Diagnosis(msgspec.Struct, kw_only=True):
    """The document of ``doctor --json``. ``layouts`` is there where two were given, and
    ``option_differences`` where two configuration files were."""

    checks: list[Check]
    layouts: DiffDocument | None = None
    option_differences: list[OptionDifference] | None = None
    problems: list[Problem] = []
