"""How much of a prompt is in the store: the longest prefix that could be loaded from it.

Source: spec/kvformat.md section 8.4 (lookup).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvformat.key import format_keys
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import ask
from kvformat_connector.breaker import Breaker
from kvformat_connector.needs import ObjectNeeds, alignment
from kvformat_connector.stats import Counters

#: Keys of one call at most; a window that doubles must end somewhere.
_MAX_WINDOW_KEYS: Final = 4096
#: The longest wait for a block that can't be loaded, in waits of ``failed_key_retry_ms``.
_MAX_WAITS: Final = 32


#: Why a prefix ends where it ends: its next object isn't there, or failed to load lately, or the
#: store couldn't tell.
ABSENT: Final = "absent"
DISTRUSTED: Final = "distrusted"
STORE_FAILED: Final = "store_failed"


class Distrusted:
    """Blocks that were promised and could not be loaded, for a while.

    Without this a request would be promised the same object again and again, load it, fail and
    recompute each time. A block that fails again soon after its wait waits twice as long.
    """

    def __init__(self, retry_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_s = retry_ms / 1e3
        self._clock = clock
        #: When a wait ends, and how long it is. Kept for as long again, to know the next failure.
        self._waits: dict[bytes, tuple[float, float]] = {}

    def add(self, block_hashes: Sequence[bytes]) -> None:
        """Start, or start again, the wait for these blocks."""
        now = self._clock()
        self._waits = {key: wait for key, wait in self._waits.items() if sum(wait) > now}
        for block_hash in set(block_hashes):
            wait_s = self._retry_s
            if (known := self._waits.get(block_hash)) is not None:
                until, wait_s = known
                if until <= now:
                    wait_s = min(2 * wait_s, _MAX_WAITS * self._retry_s)
            self._waits[block_hash] = now + wait_s, wait_s

    def __contains__(self, block_hash: bytes) -> bool:
        wait = self._waits.get(block_hash)
        return wait is not None and wait[0] > self._clock()

    def __len__(self) -> int:
        return len(self._waits)


class _Known(msgspec.Struct):
    """What has been asked for a request in a namespace, whose prefix is ``namespace``.

    Units ``first`` to ``end`` of the chain exist; ``is_final`` if the unit at ``end`` doesn't.
    ``present[object][block]`` tells of single blocks. ``answer`` is the end found for the last
    question, ``(first, limit)``, and ``reason`` says why it isn't ``limit``.
    """

    namespace: str
    first: int
    end: int
    is_final: bool
    present: dict[int, dict[int, bool]] = {}
    question: tuple[int, int] | None = None
    answer: int = 0
    reason: str = ABSENT


class PrefixLookup:
    """Asks the store in windows that stop at the first miss and double while there is none.

    Objects of which a prefix needs every block form a chain, asked from its start. Objects of
    windows and states are asked at the end of that chain, and at earlier ends while they lack
    something there.
    """

    def __init__(
        self,
        store: Store,
        needs: Sequence[ObjectNeeds],
        window: int,
        distrusted: Distrusted,
        counters: Counters,
        breaker: Breaker | None = None,
    ) -> None:
        self._store = store
        self._breaker = breaker
        self._chain = [need for need in needs if need.is_chain]
        self._ends = [need for need in needs if not need.is_chain]
        #: Tokens of one step of the search: a prefix is a whole number of such units.
        self._unit = alignment(needs)
        keys_per_unit = sum(
            len(need.parts) * (self._unit // need.block_size) for need in self._chain
        )
        self._window = window
        self._max_window = max(window, _MAX_WINDOW_KEYS // max(1, keys_per_unit))
        self._distrusted = distrusted
        self._counters = counters
        self._known: dict[str, _Known] = {}
        self._reason = ABSENT

    def end(
        self, request_id: str, namespace: str, hashes: Sequence[bytes], first: int, limit: int
    ) -> int:
        """Tokens of the longest prefix that can be loaded, looked for from ``first`` to ``limit``.

        Args:
            namespace: prefix of the keys of the request's namespace.
            hashes: the engine's, one for each hash block of the request.
            first, limit: tokens; whole numbers of blocks of every object.

        The answer is kept for the request: one that waits and is asked about again costs nothing.
        """
        unit = self._unit
        known = self._known.get(request_id)
        if (
            known is None
            or known.namespace != namespace
            or known.first > first // unit
            or known.end < first // unit
        ):
            known = self._known[request_id] = _Known(namespace, first // unit, first // unit, False)
        question = (first, limit)
        if question != known.question:
            self._reason = known.reason
            with self._counters.timed("lookup"):
                end = limit
                if self._chain:
                    end = self._chain_end(known, hashes, first // unit, limit // unit) * unit
                if self._ends:
                    end = self._end_that_has_all(known, hashes, first, end)
            known.question, known.answer, known.reason = question, end, self._reason
        return known.answer

    def reason(self, request_id: str) -> str:
        """Why the last answer for a request wasn't more."""
        known = self._known.get(request_id)
        return ABSENT if known is None else known.reason

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request."""
        self._known.pop(request_id, None)

    def _chain_end(self, known: _Known, hashes: Sequence[bytes], first: int, limit: int) -> int:
        window = self._window
        while known.end < limit and not known.is_final:
            stop = min(known.end + window, limit)
            known.end += self._num_present(known.namespace, hashes, known.end, stop)
            known.is_final = known.end < stop
            window = min(2 * window, self._max_window)
        return max(first, min(known.end, limit))

    def _num_present(self, namespace: str, hashes: Sequence[bytes], first: int, stop: int) -> int:
        """How many of these units are there, from the first on without a gap."""
        present = stop - first
        asked: list[tuple[ObjectNeeds, Sequence[bytes]]] = []
        for need in self._chain:
            per_unit = self._unit // need.block_size
            blocks = need.block_hashes(hashes, range(first * per_unit, stop * per_unit))
            present = min(present, self._num_trusted(blocks) // per_unit)
            asked.append((need, blocks))
        if not present:
            return 0
        keys: list[str] = []
        for need, blocks in asked:
            num_blocks = present * (self._unit // need.block_size)
            for row in format_keys(_prefixes(namespace, need), blocks[:num_blocks]):
                keys += row
        codes = self._ask(keys)
        start = 0
        num_units = present
        for need in self._chain:
            per_unit = self._unit // need.block_size
            for _ in need.parts:
                found = codes[start : start + num_units * per_unit][: present * per_unit]
                start += num_units * per_unit
                missing = next((index for index, code in enumerate(found) if code != 1), len(found))
                present = missing // per_unit
        return present

    def _num_trusted(self, block_hashes: Sequence[bytes]) -> int:
        if len(self._distrusted):
            for index, block_hash in enumerate(block_hashes):
                if block_hash in self._distrusted:
                    self._counters.add("lookup.distrusted")
                    self._reason = DISTRUSTED
                    return index
        return len(block_hashes)

    def _end_that_has_all(
        self, known: _Known, hashes: Sequence[bytes], first: int, end: int
    ) -> int:
        """The last end, from ``end`` down to ``first``, whose windows and states are there."""
        window = 1
        while end > first:
            stop = max(first, end - window * self._unit)
            ends = range(end, stop, -self._unit)
            self._look_up(known, hashes, first, ends)
            for at in ends:
                if all(
                    known.present[need.object_index][block]
                    for need in self._ends
                    for block in need.blocks(first, at)
                ):
                    return at
            end = stop
            window = min(2 * window if window > 1 else self._window, self._max_window)
        return first

    def _look_up(self, known: _Known, hashes: Sequence[bytes], first: int, ends: range) -> None:
        """Find out about every block that one of these ends needs, in one call."""
        asked: list[tuple[dict[int, bool], list[int], int]] = []
        keys: list[str] = []
        for need in self._ends:
            present = known.present.setdefault(need.object_index, {})
            wanted = {block for at in ends for block in need.blocks(first, at)}
            blocks = sorted(wanted - present.keys())
            for block in blocks:
                present[block] = need.block_hash(hashes, block) not in self._distrusted
            blocks = [block for block in blocks if present[block]]
            rows = format_keys(
                _prefixes(known.namespace, need), [need.block_hash(hashes, at) for at in blocks]
            )
            for row in rows:
                keys += row
            asked.append((present, blocks, len(rows)))
        if not keys:
            return
        codes = iter(self._ask(keys))
        for present, blocks, num_rows in asked:
            for _ in range(num_rows):
                for block in blocks:
                    present[block] &= next(codes) == 1

    def _ask(self, keys: list[str]) -> list[int]:
        if self._breaker is not None and not self._breaker.poll():
            self._reason = STORE_FAILED
            return [Code.UNAVAILABLE] * len(keys)
        codes = ask(self._store.exists, keys)
        self._counters.add("lookup.calls")
        if self._breaker is not None and max(codes) == min(codes) == Code.UNAVAILABLE:
            # Each further question would take seconds, on the engine's thread.
            self._breaker.trip("lookup: the store doesn't answer")
        if min(codes) < 0:
            self._counters.add("lookup.failed", sum(code < 0 for code in codes))
            self._reason = STORE_FAILED
        return codes


def _prefixes(namespace: str, need: ObjectNeeds) -> list[str]:
    return [namespace + part for part in need.parts]
