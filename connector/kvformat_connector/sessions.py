"""Open put and get sessions of one step. None outlives it.

A put session that has grown old is given up: a store may hand its memory to another writer, and
would then take our bytes for that writer's (Mooncake does after 30 s). A get session is renewed
before its lease can end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import ask

#: Two thirds of the time after which Mooncake lets another writer take a session over.
MAX_PUT_SESSION_S: Final = 20.0
#: Half of Mooncake's default lease.
RENEW_GET_SESSION_S: Final = 5.0


class PutSessions:
    """Objects being written. Only keys that were opened here are ever committed or revoked."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._opened_at = 0.0
        self._open: set[str] = set()

    def open(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        """Open a session per key; answers a code per key."""
        if not self._open:
            self._opened_at = self._clock()
        codes = ask(self._store.put_start, keys, nbytes)
        # After an internal error nobody knows whether a session is open; revoking tells.
        self._open.update(
            key for key, code in zip(keys, codes, strict=True) if code in (Code.OK, Code.INTERNAL)
        )
        return codes

    @property
    def are_too_old(self) -> bool:
        """Whether another writer may soon own what these sessions write to."""
        return self._clock() - self._opened_at > MAX_PUT_SESSION_S

    def commit(self, keys: Sequence[str]) -> list[int]:
        """Make objects visible; what can't be committed is revoked. Answers a code per key."""
        codes = ask(self._store.put_commit, keys)
        self._open.difference_update(
            key for key, code in zip(keys, codes, strict=True) if code == Code.OK
        )
        self.revoke(key for key, code in zip(keys, codes, strict=True) if code != Code.OK)
        return codes

    def revoke(self, keys: Iterable[str]) -> None:
        """Give sessions up. A store that can't do it now lets them expire."""
        mine = [key for key in keys if key in self._open]
        ask(self._store.put_revoke, mine)
        self._open.difference_update(mine)

    def close(self) -> None:
        """Give up whatever is still open."""
        self.revoke(list(self._open))

    def __len__(self) -> int:
        return len(self._open)


class GetSessions:
    """Objects being read, each opened once however many blocks want it."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._opened_at = 0.0
        self._open: dict[str, None] = {}

    def open(self, keys: Sequence[str]) -> list[int]:
        """Open a session per distinct key; answers a code per key as given."""
        self._opened_at = self._clock()
        distinct = list(dict.fromkeys(keys))
        codes = dict(zip(distinct, ask(self._store.get_start, distinct), strict=True))
        # All of them: a call that failed may have opened some, and ending none is no error.
        self._open.update(dict.fromkeys(distinct))
        return [codes[key] for key in keys]

    def renew(self) -> None:
        """Prolong the leases where they have run for a while. A failure shows at the next read."""
        if self._open and self._clock() - self._opened_at > RENEW_GET_SESSION_S:
            self._opened_at = self._clock()
            ask(self._store.get_start, list(self._open))

    def close(self) -> None:
        """End every session."""
        ask(self._store.get_end, list(self._open))
        self._open.clear()

    def __len__(self) -> int:
        return len(self._open)
