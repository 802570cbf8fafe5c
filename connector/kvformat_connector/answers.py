"""Answers of a store, made safe: whatever a store does, a batch call gives one code per key.

A store that raises, or answers with anything but as many whole numbers as there are keys, has
failed every key of that call and nothing else: no store may end an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.stores.protocol import Code

logger = logging.getLogger(__name__)


def ask(call: Callable[..., list[int]], keys: Sequence[str], *arguments: Any) -> list[int]:
    """One code per key from a batch call of a store; ``Code.INTERNAL`` where it gave none."""
    if not keys:
        return []
    try:
        codes = call(keys, *arguments)
        # One pass, without a look at each item: what isn't a number can't be added, and what isn't
        # whole shows in the sum.
        is_right = len(codes) == len(keys) and type(sum(codes)) is int
    except Exception:
        logger.exception("store call %s failed", getattr(call, "__name__", call))
        return [Code.INTERNAL] * len(keys)
    if not is_right:
        logger.error(
            "store call %s answered something else than %d codes",
            getattr(call, "__name__", call),
            len(keys),
        )
        return [Code.INTERNAL] * len(keys)
    return codes


class Moved(NamedTuple):
    """What range calls moved: by key the bytes, or a code. ``is_whole`` where that is every byte
    of every key."""

    codes: list[int]
    is_whole: bool


def code_name(code: int) -> str:
    """The name under which a negative code is counted; one for all that a store made up, so that
    it can't make up any number of counters."""
    try:
        return Code(code).name.lower()
    except ValueError:
        return "code_other"


def answer_name(answer: int) -> str:
    """An answer to people: the name of a code, with the number of one that a store made up."""
    if answer > 0:
        return str(answer)
    name = code_name(answer)
    return f"{name} {answer}" if name == "code_other" else name


def self_test_failed(
    uri: str, step: str, expected: str, found: str, hint: str = ""
) -> StoreUnavailableError:
    """The error for a store that doesn't do what every store must."""
    return StoreUnavailableError(
        Reason.STORE_UNAVAILABLE,
        f"option store: the self-test on {uri!r} failed at {step!r}: expected {expected}, "
        f"found {found}{hint}",
    )
