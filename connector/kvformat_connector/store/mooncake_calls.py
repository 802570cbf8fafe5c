"""Calls to Mooncake's client whose answers can be trusted to be answers.

A client that is closed or lost answers session calls with an empty list, crashes the process in
other calls, and has codes of its own. Here each batch gets one code of this project per key, and no
call runs into a closing client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvformat.stores.protocol import Code
from kvformat_connector.store.mooncake_client import Client

_CODES = {
    -1: Code.INTERNAL,
    -200: Code.NO_SPACE,
    -600: Code.INVALID,
    -601: Code.INVALID,  # the session was taken over by another client
    -702: Code.TRANSFER_FAILED,
    -703: Code.NOT_READY,
    -704: Code.NOT_FOUND,
    -705: Code.EXISTS,
    -706: Code.NOT_READY,
    -707: Code.LEASE_EXPIRED,
    -800: Code.TRANSFER_FAILED,
    -900: Code.UNAVAILABLE,
    -901: Code.UNAVAILABLE,
    -1700: Code.NO_SPACE,  # the tenant's quota
}


class MooncakeCalls:
    """A client, the number of calls inside it, and whether more may enter."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether every call answers ``UNAVAILABLE`` from now on."""
        return self._closed

    def one(self, call: Callable[..., int], *arguments: Any) -> int:
        """One call with one answer."""
        if not self._enter():
            return Code.UNAVAILABLE
        try:
            answer = call(*arguments)
        finally:
            self._leave()
        return answer if answer >= 0 else _CODES.get(answer, Code.INTERNAL)

    def batch(
        self, call: Callable[..., list[int]], keys: Sequence[str], *columns: Sequence[Any]
    ) -> list[int]:
        """One call about a batch of keys: one answer per key, or ``UNAVAILABLE`` for each."""
        if not keys:
            return []
        if not self._enter():
            return [Code.UNAVAILABLE] * len(keys)
        try:
            answers = call(keys, *columns)
        finally:
            self._leave()
        if len(answers) != len(keys):
            return [Code.UNAVAILABLE] * len(keys)
        if min(answers) >= 0:
            return answers
        return [a if a >= 0 else _CODES.get(a, Code.INTERNAL) for a in answers]

    def fill(
        self,
        codes: list[int],
        chosen: Sequence[int],
        call: Callable[..., list[int]],
        keys: Sequence[str],
        *columns: Sequence[Any],
    ) -> None:
        """Ask about the keys at the ``chosen`` positions and put the answers there in ``codes``."""
        asked = [[column[index] for index in chosen] for column in (keys, *columns)]
        for index, answer in zip(chosen, self.batch(call, *asked), strict=True):
            codes[index] = answer

    def close(self, limit_s: float) -> None:
        """Let no call in any more, and close the client when the last one has left.

        Where a call doesn't come back within ``limit_s`` the client stays as it is: closing it
        would crash that call.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            is_empty = self._changed.wait_for(lambda: not self._num_inside, timeout=limit_s)
        if is_empty:
            self.client.close()

    def _enter(self) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._num_inside += 1
            return True

    def _leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()
