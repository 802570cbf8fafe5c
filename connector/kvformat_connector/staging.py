"""Host memory that transfers go through, so that no range call ever points at the KV cache.

Range calls can't be cancelled. One that comes back long after its deadline writes into memory that
belongs to nobody else: its stage stays taken until the call has returned. A stage also lays a layer
of a row out as the object does, so a row is one range, and its checksum that of one buffer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import Reason, TransferError
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import code_name
from kvformat_connector.transfer import Lane

_MIN_NBYTES: Final = 64 << 10
_MAX_ROW_SIZES: Final = 8


class _Memory:
    """One allocation, and for each size of a row the addresses of rows that were asked for."""

    __slots__ = ("_row_addresses", "address", "array", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.array: NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        self.address: int = self.array.ctypes.data
        self._row_addresses: dict[int, list[tuple[int]]] = {}

    def row_addresses(self, num_rows: int, row_nbytes: int) -> list[tuple[int]]:
        """Rows of a range call. A layer's are the same for every step, so they're kept."""
        known = self._row_addresses.get(row_nbytes)
        if known is None or len(known) < num_rows:
            if len(self._row_addresses) >= _MAX_ROW_SIZES:
                self._row_addresses.clear()
            starts = range(self.address, self.address + num_rows * row_nbytes, row_nbytes)
            known = self._row_addresses[row_nbytes] = list(zip(starts, strict=True))
        return known if len(known) == num_rows else known[:num_rows]


class Stage:
    """``rows`` is ``[num_rows, row_nbytes]`` uint8; ``address`` is that of its first byte."""

    __slots__ = ("_flat", "address", "memory", "row_nbytes", "rows")

    def __init__(self, memory: _Memory, num_rows: int, row_nbytes: int) -> None:
        self.memory = memory
        self.address = memory.address
        self.row_nbytes = row_nbytes
        flat = memory.array[: num_rows * row_nbytes]
        self.rows: NDArray[np.uint8] = flat.reshape(num_rows, row_nbytes)
        self._flat = flat.data

    @property
    def row_addresses(self) -> list[tuple[int]]:
        """The address of each row, as range calls take them."""
        return self.memory.row_addresses(len(self.rows), self.row_nbytes)

    def row(self, index: int) -> memoryview:
        """The bytes of one row."""
        return self._flat[index * self.row_nbytes : (index + 1) * self.row_nbytes]


class Staging:
    """Stages of at most ``max_nbytes`` together, used again and again. Any thread may call."""

    def __init__(self, store: Store, max_nbytes: int, registrar: Lane, deadline_s: float) -> None:
        """``registrar`` tells the store of new memory, which may take ``deadline_s``: a call that
        may hang, and has no channel that watches it."""
        self._store = store
        self.max_nbytes = max_nbytes
        self._deadline_s = deadline_s
        self._registrar = registrar
        self._stuck: Future[int] | None = None
        self._changed = threading.Condition()
        self._free: dict[int, list[_Memory]] = {}
        self._num_taken_nbytes = 0
        self._num_free_nbytes = 0

    def take(self, num_rows: int, row_nbytes: int, timeout_s: float | None = None) -> Stage | None:
        """A stage, once there is room for it; None where there is none in time.

        What alone is more than ``max_nbytes`` is given when nothing else is taken. Raises
        ``TransferError`` where the store can't use the memory.
        """
        nbytes = _size_class(num_rows * row_nbytes)
        with self._changed:
            if not self._has_room(nbytes) and not self._changed.wait_for(
                lambda: self._has_room(nbytes), timeout_s
            ):
                return None
            self._num_taken_nbytes += nbytes
            kept = self._free.get(nbytes)
            memory = kept.pop() if kept else None
            if memory is not None:
                self._num_free_nbytes -= nbytes
            dropped = self._shrink()
        try:
            self._forget(dropped)
            if memory is None:
                memory = _Memory(nbytes)
                self._announce(memory)
        except BaseException:
            with self._changed:
                self._num_taken_nbytes -= nbytes
                self._changed.notify_all()
            raise
        return Stage(memory, num_rows, row_nbytes)

    def _announce(self, memory: _Memory) -> None:
        """Tell the store of new memory. Raises ``TransferError`` where it can't use it, or doesn't
        say so in time."""
        with self._changed:
            job = None
            if self._stuck is None or self._stuck.done():
                job = self._registrar.submit(
                    self._store.register_memory, memory.address, memory.nbytes
                )
        found = "an earlier call for other memory hangs"
        if job is not None:
            if wait([job], self._deadline_s).done:
                code = job.result()
                if code == Code.OK:
                    return
                found = code_name(code)
            else:
                self._stuck = job
                # It stays allocated while the call may still use it.
                job.add_done_callback(lambda _: self._forget([memory]))
                found = f"the call took more than {self._deadline_s:g} s"
        raise TransferError(
            Reason.TRANSFER_FAILED,
            f"the store can't use {memory.nbytes} bytes of staging memory: {found}",
        )

    def _forget(self, memories: Sequence[_Memory]) -> None:
        for memory in memories:
            self._registrar.post(self._unregister, memory)

    def _unregister(self, memory: _Memory) -> None:
        self._store.unregister_memory(memory.address)

    def release(self, stage: Stage) -> None:
        """Give a stage back, when no call points at it any more."""
        nbytes = stage.memory.nbytes
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

    def _has_room(self, nbytes: int) -> bool:
        return not self._num_taken_nbytes or self._num_taken_nbytes + nbytes <= self.max_nbytes

    def _shrink(self) -> list[_Memory]:
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
