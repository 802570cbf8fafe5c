"""How many layers are read ahead of the one that computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

_MIN_LAYERS: Final = 1
_MAX_LAYERS: Final = 16
#: Weight of the newest of a series of times.
_WEIGHT: Final = 0.25


class Depth:
    """A fixed number of layers, or one that follows what was measured.

    Reads happen one after the other, so one layer ahead keeps a steady store busy. More of them
    even out times that vary: as many as the slowest layer lately takes computations of a layer.
    """

    def __init__(
        self, num_layers: int | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._is_fixed = num_layers is not None
        self.num_layers = 2 if num_layers is None else num_layers
        self._clock = clock
        self._waited_at: float | None = None
        self._compute_s = 0.0
        self._transfer_s = 0.0
        self._peak_s = 0.0

    def waited(self) -> None:
        """A layer has been waited for: it computes from now on."""
        self._waited_at = self._clock()

    def computed(self) -> None:
        """The next layer is asked for."""
        if self._waited_at is not None:
            elapsed = self._clock() - self._waited_at
            self._compute_s += _WEIGHT * (elapsed - self._compute_s)
            self._waited_at = None
            self._adapt()

    def transferred(self, seconds: float) -> None:
        """A layer has arrived, after so long."""
        self._transfer_s += _WEIGHT * (seconds - self._transfer_s)
        self._peak_s = max(seconds, self._peak_s + _WEIGHT * (self._transfer_s - self._peak_s))

    def pause(self) -> None:
        """What comes between two steps is no computation of a layer."""
        self._waited_at = None

    def _adapt(self) -> None:
        if not self._is_fixed:
            ahead = math.ceil(self._peak_s / max(self._compute_s, 1e-6))
            self.num_layers = min(max(ahead, _MIN_LAYERS) + 1, _MAX_LAYERS)
