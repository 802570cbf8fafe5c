"""Open put and get sessions, and who holds them. None outlives the step that opened it.

A put session that has grown old is given up: a store may hand its memory to another writer, and
would then take our bytes for that writer's (Mooncake does after 30 s). A get session is renewed
before its lease can end. Every operation is linear in the keys it is given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import ask

#: Two thirds of the time after which Mooncake lets another writer take a session over.
MAX_PUT_SESSION_S: Final = 20.0
#: A third of Mooncake's default lease; a store that grants less shows it at the next read.
RENEW_GET_SESSION_S: Final = 3.0


class Asking(Protocol):
    """How a store is called: a code per key, whatever it does."""

    def ask(
        self, call: Callable[..., list[int]], keys: Sequence[str], *rest: object
    ) -> list[int]: ...

    def ask_anyway(
        self, call: Callable[..., list[int]], keys: Sequence[str], *rest: object
    ) -> list[int]: ...


class Direct:
    """Calls on the caller's own thread."""

    def ask(self, call: Callable[..., list[int]], keys: Sequence[str], *rest: object) -> list[int]:
        return ask(call, keys, *rest)

    ask_anyway = ask


class SessionBook:
    """How many holders each open session has. A store counts none: one end ends it for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders: dict[str, int] = {}

    def hold(self, keys: Iterable[str]) -> None:
        """Count one more holder for each key."""
        with self._lock:
            for key in keys:
                self._num_holders[key] = self._num_holders.get(key, 0) + 1

    def release(self, keys: Iterable[str]) -> list[str]:
        """Count one holder less; answers the keys that have none left."""
        left = []
        with self._lock:
            for key in keys:
                num_holders = self._num_holders.pop(key) - 1
                if num_holders:
                    self._num_holders[key] = num_holders
                else:
                    left.append(key)
        return left

    def __len__(self) -> int:
        return len(self._num_holders)


class PutSessions:
    """Objects being written. Only keys that were opened here are ever committed or revoked."""

    def __init__(
        self,
        store: Store,
        asking: Asking | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._asking = asking or Direct()
        self._clock = clock
        self._opened_at = 0.0
        self._open: set[str] = set()

    def open(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        """Open a session per key; answers a code per key."""
        if not self._open:
            self._opened_at = self._clock()
        codes = self._asking.ask(self._store.put_start, keys, nbytes)
        # After an internal error nobody knows whether a session is open; revoking tells.
        self._open.update(
            key
            for key, code in zip(keys, codes, strict=True)
            if code in (Code.OK, Code.INTERNAL, Code.UNAVAILABLE)
        )
        return codes

    @property
    def are_too_old(self) -> bool:
        """Whether another writer may soon own what these sessions write to."""
        return bool(self._open) and self._clock() - self._opened_at > MAX_PUT_SESSION_S

    def commit(self, keys: Sequence[str]) -> list[int]:
        """Make objects visible; what can't be committed is revoked. Answers a code per key."""
        codes = self._asking.ask(self._store.put_commit, keys)
        self._open.difference_update(
            key for key, code in zip(keys, codes, strict=True) if code == Code.OK
        )
        self.revoke(key for key, code in zip(keys, codes, strict=True) if code != Code.OK)
        return codes

    def revoke(self, keys: Iterable[str]) -> None:
        """Give sessions up. A store that can't do it now lets them expire."""
        mine = [key for key in keys if key in self._open]
        self._asking.ask_anyway(self._store.put_revoke, mine)
        self._open.difference_update(mine)

    def close(self) -> None:
        """Give up whatever is still open."""
        self.revoke(list(self._open))

    def __len__(self) -> int:
        return len(self._open)


class GetSessions:
    """Objects being read, each opened once however many blocks want it."""

    def __init__(
        self,
        store: Store,
        asking: Asking | None = None,
        book: SessionBook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._asking = asking or Direct()
        self._book = SessionBook() if book is None else book
        self._clock = clock
        #: When each session was opened or renewed, the oldest first.
        self._opened_at: dict[str, float] = {}

    def open(self, keys: Sequence[str]) -> list[int]:
        """Open a session per key; one that is open is started again, which renews its lease.
        Answers a code per key."""
        now = self._clock()
        new = []
        for key in keys:
            if self._opened_at.pop(key, None) is None:
                new.append(key)
            self._opened_at[key] = now
        # All of them: a call that failed may have opened some, and ending none is no error.
        self._book.hold(new)
        return self._asking.ask(self._store.get_start, keys)

    def renew(self, num_keys: int) -> None:
        """Prolong the leases that have run for a while, the oldest ``num_keys`` at most. A failure
        shows at the next read."""
        due_before = self._clock() - RENEW_GET_SESSION_S
        due: list[str] = []
        for key, opened_at in self._opened_at.items():
            if opened_at >= due_before or len(due) == num_keys:
                break
            due.append(key)
        self.open(due)

    def end(self, keys: Iterable[str]) -> None:
        """End some sessions, those that nobody else holds for good."""
        mine = [key for key in keys if self._opened_at.pop(key, None) is not None]
        self._asking.ask_anyway(self._store.get_end, self._book.release(mine))

    def close(self) -> None:
        """End every session."""
        self.end(list(self._opened_at))

    def __len__(self) -> int:
        return len(self._opened_at)
