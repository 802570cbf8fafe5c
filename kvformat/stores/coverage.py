"""Which bytes of an object have been written.

A store's commit trusts this and nothing else, so that an object with a hole never becomes visible.

Source: spec/kvformat.md section 8, "Writers".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Coverage:
    """A set of byte positions, kept as sorted, disjoint, non-touching intervals."""

    __slots__ = ("_ends", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add the bytes ``start`` to ``end``, the end not included. ``start < end``."""
        first = bisect_left(self._ends, start)
        behind = bisect_right(self._starts, end)
        if first < behind:
            start = min(start, self._starts[first])
            end = max(end, self._ends[behind - 1])
        self._starts[first:behind] = [start]
        self._ends[first:behind] = [end]

    def add_ranges(self, sizes: Sequence[int], offsets: Sequence[int]) -> None:
        """Add each range. Ranges that follow one another are joined before they are looked up."""
        start = end = -1
        for size, offset in zip(sizes, offsets, strict=True):
            if offset != end:
                if start >= 0:
                    self.add(start, end)
                start = offset
            end = offset + size
        if start >= 0:
            self.add(start, end)

    def is_whole(self, nbytes: int) -> bool:
        """Whether each of the bytes 0 to ``nbytes`` is in the set."""
        return self._starts == [0] and self._ends == [nbytes]
