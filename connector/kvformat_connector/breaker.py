"""Whether the pool is used at all: a store that hangs costs one deadline, not one a request.

Closed, the store is used. A call past its deadline, or a canary that can't be read, opens it:
requests are then served without the pool. While open, a probe on a thread of its own reads through
the store from time to time; when one succeeds, the breaker closes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvformat_connector.stats import Counters

logger = logging.getLogger(__name__)

_MAX_SUSPICIOUS_PROBES: Final = 3


class Breaker:
    """``trip`` and ``is_open`` for any thread; ``poll`` once a step, on the engine's."""

    def __init__(
        self,
        probe: Callable[[Sequence[str]], bool],
        retry_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._probe = probe
        self._retry_s = retry_s
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._is_open = False
        self._is_probing = False
        self._probe_at = 0.0
        self._suspects: list[str] = []
        self._num_failed_probes = 0
        self._last_success_at = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether the store is left alone for now."""
        return self._is_open

    def succeeded(self) -> None:
        """A range call has just moved what it was asked to."""
        self._last_success_at = self._clock()

    def is_proven(self, within_s: float) -> bool:
        """Whether a range call succeeded so lately that no canary is needed."""
        return self._clock() - self._last_success_at < within_s

    def trip(self, why: str, suspects: Sequence[str] = ()) -> None:
        """Leave the store alone until a probe succeeds, also on these keys if they're there."""
        with self._lock:
            self._suspects = list(suspects) or self._suspects
            self._probe_at = self._clock() + self._retry_s
            if self._is_open:
                return
            self._is_open = True
        self._last_success_at = float("-inf")
        self._counters.add("breaker.opened")
        self._counters.set("breaker_open", 1)
        logger.warning("the KV store is left alone for a while: %s", why)

    def poll(self) -> bool:
        """Whether the store may be used; starts a probe where one is due."""
        if not self._is_open:
            return True
        with self._lock:
            is_due = self._is_open and not self._is_probing and self._clock() >= self._probe_at
            if is_due:
                self._is_probing = True
        if is_due:
            # Daemon: a probe that hangs with the store must not keep the process.
            threading.Thread(target=self._run_probe, name="kvformat-probe", daemon=True).start()
        return not self._is_open

    def _run_probe(self) -> None:
        is_back = False
        try:
            is_back = self._probe(self._suspects)
        except Exception:
            logger.exception("probing the KV store failed")
        with self._lock:
            self._is_probing = False
            self._probe_at = self._clock() + self._retry_s
            self._num_failed_probes = 0 if is_back else self._num_failed_probes + 1
            if is_back:
                self._is_open = False
            if is_back or self._num_failed_probes >= _MAX_SUSPICIOUS_PROBES:
                # An object that stays unreadable must not keep the store closed for all others.
                self._suspects = []
        self._counters.add("breaker.probes")
        if is_back:
            self._counters.add("breaker.closed")
            self._counters.set("breaker_open", 0)
            logger.warning("the KV store answers again and is used")
