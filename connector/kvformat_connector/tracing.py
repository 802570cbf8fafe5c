"""A store that tells of every call that touches a key: one JSON line each on standard error.

Switched on by ``KVFORMAT_RANGE_DEBUG=1``. A line has ``time`` (seconds since 1970), ``pid``,
``role``, ``call`` (the name in :mod:`kvformat.stores.protocol`), ``ms``, ``keys`` and ``codes`` (or
``raised``), and for range calls ``ranges`` and ``nbytes``, one number a key.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvformat.stores.protocol import Store

_BATCH_CALLS: Final = frozenset(
    {
        "exists",
        "put_start",
        "put_ranges",
        "put_commit",
        "put_revoke",
        "get_start",
        "get_ranges",
        "get_end",
        "put_objects",
        "get_objects",
        "remove",
    }
)
_SINGLE_CALLS: Final = frozenset({"put", "get", "object_nbytes"})
#: Where the sizes of each key's pieces stand among a call's arguments after the keys.
_SIZES_AT: Final = 1
_HAVE_SIZES: Final = frozenset({"put_ranges", "get_ranges", "put_objects", "get_objects"})


class TracedStore:
    """``store``, with a line for every call; everything else passes through."""

    def __init__(self, store: Store, role: str) -> None:
        self._store = store
        self._role = role

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name in _BATCH_CALLS:
            return self._traced(name, attribute, list)
        if name in _SINGLE_CALLS:
            return self._traced(name, attribute, lambda key: [key])
        return attribute

    def _traced(
        self, name: str, call: Callable[..., Any], keys_of: Callable[[Any], Sequence[str]]
    ) -> Callable[..., Any]:
        def traced(keys: Any, *arguments: Any) -> Any:
            line: dict[str, object] = {
                "time": time.time(),
                "pid": os.getpid(),
                "role": self._role,
                "call": name,
                "keys": keys_of(keys),
            }
            if name in _HAVE_SIZES:
                line["ranges"] = [len(row) for row in arguments[_SIZES_AT]]
                line["nbytes"] = [sum(row) for row in arguments[_SIZES_AT]]
            start = time.perf_counter()
            try:
                answer = call(keys, *arguments)
            except BaseException as error:
                line["raised"] = repr(error)
                raise
            else:
                line["codes"] = _codes(answer)
            finally:
                line["ms"] = round((time.perf_counter() - start) * 1e3, 3)
                _write(line)
            return answer

        return traced


def _codes(answer: Any) -> list[int]:
    if isinstance(answer, list):
        return [int(code) for code in answer]
    if answer is None or isinstance(answer, bytes):  # a whole object, or none
        return [-1 if answer is None else len(answer)]
    return [int(answer)]


def _write(line: dict[str, object]) -> None:
    # The descriptor itself, because an engine puts its own words before what a stream is given;
    # and in one call, so that lines of several threads and processes don't mix.
    os.write(2, json.dumps(line).encode() + b"\n")
