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
    even out times that vary, and queues: as many as the slowest layer lately, or all that are
    queued, take computations of a layer. Free buffers bound that: what can't be staged now only
    holds up what is read before it.
    """

    def __init__(
        self, num_layers: int | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._is_fixed = num_layers is not None
        self.num_layers = 2 if num_layers is None else num_layers
        self._clock = clock
        #: What to ask for when fewer than ``num_layers`` are ahead: asking wakes a thread, which
        #: isn't worth it for each layer.
        self.num_layers_at_once = self.num_layers
        self._waited_at: float | None = None
        self._compute_s = 0.0
        self._transfer_s = 0.0
        self._peak_s = 0.0
        self._layer_nbytes = 0

    def waited(self) -> None:
        """A layer has been waited for: it computes from now on."""
        self._waited_at = self._clock()

    def computed(self) -> None:
        """The next layer is asked for."""
        if self._waited_at is not None:
            elapsed = self._clock() - self._waited_at
            self._compute_s += _WEIGHT * (elapsed - self._compute_s)
            self._waited_at = None

    def transferred(self, nbytes: int, seconds: float) -> None:
        """A layer of so many bytes has arrived, after so long."""
        self._layer_nbytes = nbytes
        self._transfer_s += _WEIGHT * (seconds - self._transfer_s)
        self._peak_s = max(seconds, self._peak_s + _WEIGHT * (self._transfer_s - self._peak_s))

    def pause(self) -> None:
        """What comes between two steps is no computation of a layer."""
        self._waited_at = None

    def adapt(self, num_queued: int, free_nbytes: int) -> None:
        """Follow what was measured, while ``num_queued`` layers are yet to arrive and
        ``free_nbytes`` of staging memory are free."""
        if self._is_fixed or not self._compute_s:
            return
        needed_s = max(self._peak_s, num_queued * self._transfer_s)
        ahead = math.ceil(needed_s / self._compute_s)
        num_free = free_nbytes // max(self._layer_nbytes, 1)
        self.num_layers = min(max(min(ahead, num_free), _MIN_LAYERS) + 1, _MAX_LAYERS)
        more = min(self.num_layers, max(0, num_free - self.num_layers))
        self.num_layers_at_once = min(self.num_layers + more, _MAX_LAYERS)
