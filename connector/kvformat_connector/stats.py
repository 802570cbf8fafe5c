"""What happened, counted by reason."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import msgspec

_MAX_REJECTIONS: Final = 256


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """One object that was not used. ``reason`` is a ``Reason`` or store ``Code`` name."""

    key: str
    reason: str
    detail: str


class Counters:
    """Named counts and the last rejections.

    Only the engine's thread writes: transfer threads answer through their futures. Keeping every
    rejection would grow without bound, so the last ones stay and the counts hold the rest.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._rejections: deque[Rejection] = deque(maxlen=_MAX_REJECTIONS)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count. Zero leaves no trace."""
        if count:
            self._counts[name] += count

    def reject(self, key: str, reason: str, detail: str) -> None:
        """Count an object that was not used, under ``rejected.<reason>``, and remember why."""
        self.add(f"rejected.{reason}")
        self._rejections.append(Rejection(key=key, reason=reason, detail=detail))

    def snapshot(self) -> dict[str, int]:
        """The counts so far."""
        return dict(self._counts)

    @property
    def rejections(self) -> list[Rejection]:
        """The last rejections, oldest first."""
        return list(self._rejections)
