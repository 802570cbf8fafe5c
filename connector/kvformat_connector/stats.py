"""What happened: counts by reason, times by phase, and how things stand.

One instance a role. It keeps totals for whoever holds the connector, and what was added since the
last interval for the engine's own metrics (see :mod:`kvformat_connector.metrics`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final, Literal

import msgspec

_MAX_REJECTIONS: Final = 256
#: Times kept for one interval and phase; an engine asks for them after every step.
_MAX_TIMES: Final = 1024

#: What a request may wait for. ``lookup`` is one answer about a prompt, ``header`` opening the
#: objects of a step and checking their headers, ``layer_wait`` all waiting for layers in a step,
#: ``commit`` from the last layer of a step to its objects being visible.
Phase = Literal["lookup", "header", "layer_wait", "commit"]

#: How things stand. ``open_sessions`` counts put and get sessions, ``breaker_open`` is 1 while the
#: store is left alone, ``prefetch_layers`` is the depth in use.
Gauge = Literal["open_sessions", "breaker_open", "prefetch_layers"]


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """One object that was not used. ``reason`` is a ``Reason`` or store ``Code`` name."""

    key: str
    reason: str
    detail: str


class Interval(msgspec.Struct, kw_only=True):
    """What came in since the last one was taken. Times in seconds."""

    counts: dict[str, int] = {}
    times: dict[str, list[float]] = {}
    gauges: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self.counts or self.times or self.gauges)


class Counters:
    """Named counts, times and gauges, and the last rejections. Any thread may write.

    Keeping every rejection would grow without bound, so the last ones stay and the counts hold the
    rest.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        self._interval = Interval()
        self._gauges: dict[str, float] = {}
        self._rejections: deque[Rejection] = deque(maxlen=_MAX_REJECTIONS)

    def add(self, name: str, count: int = 1) -> None:
        """Add to a count. Zero leaves no trace."""
        if count:
            with self._lock:
                self._counts[name] += count
                counts = self._interval.counts
                counts[name] = counts.get(name, 0) + count

    def observe(self, phase: Phase, seconds: float) -> None:
        """Add one time to a phase."""
        with self._lock:
            times = self._interval.times.setdefault(phase, [])
            if len(times) < _MAX_TIMES:
                times.append(seconds)

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[None]:
        """Observe how long the block takes, whatever comes of it."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.observe(phase, time.perf_counter() - start)

    def set(self, gauge: Gauge, value: float) -> None:
        """Say how something stands; only a change is passed on."""
        with self._lock:
            if self._gauges.get(gauge) != value:
                self._gauges[gauge] = self._interval.gauges[gauge] = value

    def reject(self, key: str, reason: str, detail: str) -> None:
        """Count an object that was not used, under ``rejected.<reason>``, and remember why."""
        self.add(f"rejected.{reason}")
        self._rejections.append(Rejection(key=key, reason=reason, detail=detail))

    def take(self) -> Interval | None:
        """What came in since the last call, or None where nothing did."""
        if not self._interval:
            return None
        with self._lock:
            taken, self._interval = self._interval, Interval()
        return taken

    def snapshot(self) -> dict[str, int]:
        """The counts so far."""
        with self._lock:
            return dict(self._counts)

    @property
    def gauges(self) -> dict[str, float]:
        """How things stand."""
        with self._lock:
            return dict(self._gauges)

    @property
    def rejections(self) -> list[Rejection]:
        """The last rejections, oldest first."""
        return list(self._rejections)
