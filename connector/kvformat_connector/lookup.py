"""How much of a prompt is in the store: the longest prefix of blocks whose objects all exist.

Source: spec/kvformat.md section 8.4 (lookup).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvformat.key import format_keys
from kvformat.stores.protocol import Store
from kvformat_connector.answers import ask
from kvformat_connector.stats import Counters

#: Keys of one call at most; a window that doubles must end somewhere.
_MAX_WINDOW_KEYS: Final = 4096


class Distrusted:
    """Blocks that were promised and could not be loaded, for a while.

    Without this a request would be promised the same object again and again, load it, fail and
    recompute each time.
    """

    def __init__(self, retry_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_ms / 1e3
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def add(self, block_hashes: Sequence[bytes]) -> None:
        """Start, or start again, the wait for these blocks."""
        now = self._clock()
        self._until = {key: until for key, until in self._until.items() if until > now}
        self._until.update(dict.fromkeys(block_hashes, now + self._retry_s))

    def __contains__(self, block_hash: bytes) -> bool:
        until = self._until.get(block_hash)
        return until is not None and until > self._clock()

    def __len__(self) -> int:
        return len(self._until)


class _Known(msgspec.Struct):
    """What has been asked for a request: blocks ``first`` to ``end`` exist; ``is_final`` if the
    block at ``end`` doesn't."""

    first: int
    end: int
    is_final: bool


class PrefixLookup:
    """Asks the store in windows that stop at the first miss and double while there is none.

    ``prefixes`` are the key prefixes of all objects that a block needs: it is there when all are.
    """

    def __init__(
        self,
        store: Store,
        prefixes: Sequence[str],
        window: int,
        distrusted: Distrusted,
        counters: Counters,
    ) -> None:
        self._store = store
        self._prefixes = list(prefixes)
        self._window = window
        self._max_window = max(window, _MAX_WINDOW_KEYS // len(self._prefixes))
        self._distrusted = distrusted
        self._counters = counters
        self._known: dict[str, _Known] = {}

    def end(self, request_id: str, block_hashes: Sequence[bytes], first: int, limit: int) -> int:
        """Last-plus-one block of the prefix that exists, looked for in ``first`` to ``limit``.

        The answer is kept for the request: one that waits and is asked about again costs nothing.
        """
        known = self._known.get(request_id)
        if known is None or known.first > first or known.end < first:
            known = self._known[request_id] = _Known(first, first, False)
        window = self._window
        while known.end < limit and not known.is_final:
            stop = min(known.end + window, limit)
            known.end += self._num_present(block_hashes[known.end : stop])
            known.is_final = known.end < stop
            window = min(2 * window, self._max_window)
        return max(first, min(known.end, limit))

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._known.pop(request_id, None)

    def _num_present(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these blocks are there, from the first on without a gap."""
        for index, block_hash in enumerate(block_hashes):
            if block_hash in self._distrusted:
                self._counters.add("lookup.distrusted")
                block_hashes = block_hashes[:index]
                break
        if not block_hashes:
            return 0
        rows = format_keys(self._prefixes, block_hashes)
        codes = ask(self._store.exists, [key for row in rows for key in row])
        self._counters.add("lookup.calls")
        if min(codes) < 0:
            self._counters.add("lookup.failed", sum(code < 0 for code in codes))
        num_blocks = len(block_hashes)
        present = num_blocks
        for start in range(0, len(codes), num_blocks):
            row = codes[start : start + present]
            present = next((index for index, code in enumerate(row) if code != 1), len(row))
        return present
