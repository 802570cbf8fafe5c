"""Host memory that transfers go through, so that no range call ever points at the KV cache.

Range calls can't be cancelled. One that comes back long after its deadline writes into memory that
belongs to nobody else: its stage stays taken until the call has returned. A stage also lays a layer
of a row out as the object does, so a row is one range, and its checksum that of one buffer.
"""

from __future__ import annotations

import threading
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvformat.stores.protocol import Store

_MIN_NBYTES: Final = 64 << 10


class Stage:
    """``rows`` is ``[num_rows, row_nbytes]`` uint8; ``address`` is that of its first byte."""

    __slots__ = ("_flat", "address", "memory", "row_nbytes", "rows")

    def __init__(self, memory: NDArray[np.uint8], num_rows: int, row_nbytes: int) -> None:
        self.memory = memory
        self.address: int = memory.ctypes.data
        self.row_nbytes = row_nbytes
        flat = memory[: num_rows * row_nbytes]
        self.rows: NDArray[np.uint8] = flat.reshape(num_rows, row_nbytes)
        self._flat = flat.data

    def row(self, index: int) -> memoryview:
        """The bytes of one row."""
        return self._flat[index * self.row_nbytes : (index + 1) * self.row_nbytes]


class Staging:
    """Stages of at most ``max_nbytes`` together, used again and again. Any thread may call."""

    def __init__(self, store: Store, max_nbytes: int) -> None:
        self._store = store
        self.max_nbytes = max_nbytes
        self._changed = threading.Condition()
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._num_taken_nbytes = 0
        self._num_free_nbytes = 0

    def take(self, num_rows: int, row_nbytes: int, timeout_s: float | None = None) -> Stage | None:
        """A stage, once there is room for it; None where there is none in time.

        What alone is more than ``max_nbytes`` is given when nothing else is taken.
        """
        nbytes = _size_class(num_rows * row_nbytes)
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: (
                    not self._num_taken_nbytes or self._num_taken_nbytes + nbytes <= self.max_nbytes
                ),
                timeout_s,
            )
            if not has_room:
                return None
            self._num_taken_nbytes += nbytes
            kept = self._free.get(nbytes)
            memory = kept.pop() if kept else None
            if memory is not None:
                self._num_free_nbytes -= nbytes
            dropped = self._shrink()
        for each in dropped:
            self._store.unregister_memory(each.ctypes.data)
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
            self._store.register_memory(memory.ctypes.data, nbytes)
        return Stage(memory, num_rows, row_nbytes)

    def release(self, stage: Stage) -> None:
        """Give a stage back, when no call points at it any more."""
        nbytes = len(stage.memory)
        with self._changed:
            self._num_taken_nbytes -= nbytes
            self._num_free_nbytes += nbytes
            self._free.setdefault(nbytes, []).append(stage.memory)
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether every stage has come back, waiting for it if need be."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._num_taken_nbytes, max(0.0, deadline - time.monotonic())
            )

    @property
    def num_taken_nbytes(self) -> int:
        """Bytes of stages that are in use, or in a call that doesn't come back."""
        return self._num_taken_nbytes

    def _shrink(self) -> list[NDArray[np.uint8]]:
        """Memory to let go, so that all of it stays within the limit whatever sizes were asked."""
        dropped = []
        while self._num_free_nbytes and (
            self._num_taken_nbytes + self._num_free_nbytes > self.max_nbytes
        ):
            largest = max(size for size, kept in self._free.items() if kept)
            dropped.append(self._free[largest].pop())
            self._num_free_nbytes -= largest
        return dropped


def _size_class(nbytes: int) -> int:
    """The next power of two, or three quarters of it: what is taken can be used by others."""
    power = max(_MIN_NBYTES, 1 << (nbytes - 1).bit_length())
    return power * 3 // 4 if nbytes <= power * 3 // 4 else power
