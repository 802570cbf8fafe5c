"""What differs between kinds of memory that hold a KV cache. One class a kind; CPU so far."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvformat.checksum import checksum, checksum_pieces
from kvformat.errors import PlanError, Reason
from kvformat.placement import Region


class Device(Protocol):
    """The memory of one worker's KV cache."""

    def mark(self) -> object:
        """A point in the engine's work: everything that has been given to the device so far."""
        ...

    def wait(self, mark: object) -> None:
        """Return once the device has done everything before the mark."""
        ...

    def checksum(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        """XXH3-64 of pieces of cache memory, one after the other."""
        ...


class HostDevice:
    """Memory that this process can read, filled by code that has returned when it has run."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = [(region.address, _view(region)) for region in regions]

    def mark(self) -> object:
        return None

    def wait(self, mark: object) -> None:
        pass

    def checksum(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        if len(addresses) == 1:
            return checksum(self._piece(addresses[0], sizes[0]))
        return checksum_pieces(map(self._piece, addresses, sizes))

    def _piece(self, address: int, nbytes: int) -> memoryview:
        for base, view in self._regions:
            start = address - base
            if start >= 0 and start + nbytes <= len(view):
                return view[start : start + nbytes]
        raise PlanError(
            Reason.PLAN_BOUNDS, f"{nbytes} bytes at {address:#x} are outside the cache memory"
        )


def _view(region: Region) -> memoryview:
    pointer = ctypes.cast(region.address, ctypes.POINTER(ctypes.c_uint8))
    array: NDArray[np.uint8] = np.ctypeslib.as_array(pointer, (region.nbytes,))
    return array.data
