"""A mapping that forgets its oldest entries."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """At most ``max_kept`` entries: those that were kept last. Setting an item as a dictionary does
    leaves its place in the order."""

    def __init__(self, max_kept: int) -> None:
        super().__init__()
        self._max_kept = max_kept

    def keep(self, key: K, value: V) -> None:
        """Make this the newest entry, and forget the oldest where there are too many."""
        self.pop(key, None)
        self[key] = value
        if len(self) > self._max_kept:
            del self[next(iter(self))]
