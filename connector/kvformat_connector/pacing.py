"""How much one range call carries: as much as the store moves in a fraction of the deadline."""

from __future__ import annotations

from typing import Final

from kvformat.plan import Limits

#: A first call this large shows how fast the store is.
_FIRST_NBYTES: Final = 16 << 20
_LEAST_NBYTES: Final = 64 << 10
#: Calls that take more of the deadline than this get smaller, those that take a quarter of it
#: get larger.
_MAX_SHARE: Final = 0.1


class Pace:
    """Limits of range calls, within those that are configured. Any thread may call."""

    def __init__(self, configured: Limits, deadline_s: float) -> None:
        self._configured = configured
        self._slow_s = deadline_s * _MAX_SHARE
        self._nbytes = min(configured.max_nbytes, _FIRST_NBYTES)
        self.limits = self._limits()

    def note(self, nbytes: int, seconds: float, *, has_failed: bool) -> None:
        """A call of so many bytes has come back."""
        # What a small call took says nothing about a large one.
        is_telling = 2 * nbytes >= self._nbytes
        if has_failed or seconds > self._slow_s:
            smaller = max(min(nbytes, self._nbytes) // 2, _LEAST_NBYTES)
            self._set(min(self._nbytes, smaller))
        elif is_telling and seconds < self._slow_s / 4:
            self._set(min(2 * self._nbytes, self._configured.max_nbytes))

    def _set(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self.limits = self._limits()

    def _limits(self) -> Limits:
        return Limits(
            max_rows=self._configured.max_rows,
            max_ranges=self._configured.max_ranges,
            max_nbytes=self._nbytes,
        )
