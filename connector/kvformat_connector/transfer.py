"""Threads that execute plans, and report each row.

A lane runs its jobs one after the other; what a job answers, or raises, comes out of its future.
Functions here take rows (one row is one object) and tell which of them failed and why; they never
raise for what a store does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat.plan import LayerTemplate, Limits
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import ask
from kvformat_connector.device import Device

T = TypeVar("T")
Nested = list[list[int]]


class Lane:
    """One thread, started with its first job."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kvformat-{name}")

    def submit(self, job: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a job after all jobs before it."""
        return self._executor.submit(job, *arguments)

    def close(self) -> None:
        """Finish what has been submitted and end the thread."""
        self._executor.shutdown(wait=True)


class HeaderBuffer:
    """Memory ``[num_rows, header_nbytes]`` for headers, one row each."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.array = array
        self._base = array.ctypes.data
        self._nbytes = array.shape[1]

    def ranges(self, rows: Sequence[int]) -> tuple[Nested, Nested, Nested]:
        """Addresses, sizes and offsets of whole headers, as range calls take them."""
        return (
            [[self._base + row * self._nbytes] for row in rows],
            [[self._nbytes]] * len(rows),
            [[0]] * len(rows),
        )

    def row(self, row: int) -> memoryview:
        """The bytes of one header."""
        return memoryview(self.array[row])


class HeaderMemory:
    """Host memory that the store has been told of, for the headers of one lane.

    It grows to the largest step and is used again by the next one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, num_rows: int, header_nbytes: int) -> HeaderBuffer:
        """A buffer, valid until the next one is taken."""
        nbytes = num_rows * header_nbytes
        if nbytes > len(self._memory):
            if len(self._memory):
                self._store.unregister_memory(self._memory.ctypes.data)
            self._memory = np.zeros(2 * nbytes, np.uint8)
            self._store.register_memory(self._memory.ctypes.data, 2 * nbytes)
        return HeaderBuffer(self._memory[:nbytes].reshape(num_rows, header_nbytes))


class LayerResult(msgspec.Struct):
    """What came of one layer: codes below zero by row, and the checksum of every other row."""

    failed: dict[int, int]
    checksums: dict[int, int]


def put_layer(
    store: Store,
    device: Device,
    template: LayerTemplate,
    keys: Sequence[str],
    block_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    limits: Limits,
) -> LayerResult:
    """Write one layer of some rows, and take the checksums of what was written.

    ``keys`` and ``block_ids`` are those of all rows, ``rows`` the indices of those to move.
    """
    return _move(store.put_ranges, device, template, keys, block_ids, rows, limits)


def get_layer(
    store: Store,
    device: Device,
    template: LayerTemplate,
    keys: Sequence[str],
    block_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    limits: Limits,
) -> LayerResult:
    """Read one layer of some rows, and take the checksums of what arrived in memory."""
    return _move(store.get_ranges, device, template, keys, block_ids, rows, limits)


def _move(
    call: Callable[..., list[int]],
    device: Device,
    template: LayerTemplate,
    keys: Sequence[str],
    block_ids: NDArray[np.int64],
    rows: NDArray[np.int64],
    limits: Limits,
) -> LayerResult:
    result = LayerResult({}, {})
    for batch in template.batches(block_ids[rows], limits):
        batch_rows = rows[batch.rows].tolist()
        # A layer may come in several calls; a row that has failed in one stays failed.
        expected = [sum(sizes) for sizes in batch.ranges.sizes]
        codes = ask(call, [keys[row] for row in batch_rows], *batch.ranges)
        for row, code, nbytes in zip(batch_rows, codes, expected, strict=True):
            if code != nbytes:
                result.failed[row] = code if code < 0 else int(Code.TRANSFER_FAILED)
    bound = template.bind(block_ids[rows])
    for row, addresses, sizes in zip(rows.tolist(), bound.addresses, bound.sizes, strict=True):
        if row not in result.failed:
            result.checksums[row] = device.checksum(addresses, sizes)
    return result
