"""What differs between kinds of memory that hold a KV cache. One class a kind."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvformat.errors import PlanError, Reason
from kvformat.placement import Region

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]

#: Blocks in a row that are worth a copy of their own.
_LEAST_RUN: Final = 4


class Piece(NamedTuple):
    """Bytes of a layer that lie together in a block of the cache and in a row of a stage.

    They start at ``address + block_id * block_stride`` of the cache, one of ``num_blocks`` blocks,
    and at byte ``position`` of the row.
    """

    address: int
    block_stride: int
    num_blocks: int
    position: int
    nbytes: int


class Device(Protocol):
    """The memory of one worker's KV cache."""

    #: Whether the engine computes on the processor that this process runs on.
    computes_on_host: bool

    def mark(self) -> object:
        """A point in the engine's work: everything that has been given to the device so far."""
        ...

    def wait(self, mark: object) -> None:
        """Return once the device has done everything before the mark."""
        ...

    def gather(self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes) -> None:
        """Copy blocks ``block_ids`` (``[num_rows]``) of the cache to ``stage``
        (``[num_rows, row_nbytes]``), one block a row. Returns when the stage is filled."""
        ...

    def scatter(
        self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes, rows: Indices | None
    ) -> None:
        """Copy row ``rows[i]`` of ``stage`` to block ``block_ids[i]`` of the cache, or row ``i``
        where ``rows`` is None. Returns when whatever is computed next sees it."""
        ...


class HostDevice:
    """Memory that this process can read, filled by code that has returned when it has run."""

    computes_on_host = True

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = [(region.address, _view(region)) for region in regions]
        self._views: dict[Piece, Bytes] = {}

    def mark(self) -> object:
        return None

    def wait(self, mark: object) -> None:
        pass

    def gather(self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes) -> None:
        for piece in pieces:
            check_bounds(piece, block_ids)
            stop = piece.position + piece.nbytes
            stage[:, piece.position : stop] = self._blocks(piece)[block_ids]

    def scatter(
        self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes, rows: Indices | None
    ) -> None:
        for piece in pieces:
            check_bounds(piece, block_ids)
            part = stage[:, piece.position : piece.position + piece.nbytes]
            self._blocks(piece)[block_ids] = part if rows is None else part[rows]

    def _blocks(self, piece: Piece) -> Bytes:
        """``[num_blocks, nbytes]``: the piece in every block."""
        found = self._views.get(piece)
        if found is None:
            found = self._views[piece] = self._make_view(piece)
        return found

    def _make_view(self, piece: Piece) -> Bytes:
        extent = piece.block_stride * (piece.num_blocks - 1) + piece.nbytes
        for base, memory in self._regions:
            start = piece.address - base
            if start >= 0 and start + extent <= len(memory):
                return np.lib.stride_tricks.as_strided(
                    memory[start:], (piece.num_blocks, piece.nbytes), (piece.block_stride, 1)
                )
        raise PlanError(
            Reason.PLAN_BOUNDS, f"{extent} bytes at {piece.address:#x} are outside the cache memory"
        )


def check_bounds(piece: Piece, block_ids: Indices) -> None:
    """Refuse block ids that the memory doesn't have. Raises ``PlanError``."""
    if len(block_ids) and not (
        np.minimum.reduce(block_ids) >= 0 and np.maximum.reduce(block_ids) < piece.num_blocks
    ):
        raise PlanError(
            Reason.PLAN_BOUNDS,
            f"block ids {int(block_ids.min())}..{int(block_ids.max())} leave the "
            f"{piece.num_blocks} blocks of the memory",
        )


def _view(region: Region) -> Bytes:
    pointer = ctypes.cast(region.address, ctypes.POINTER(ctypes.c_uint8))
    array: Bytes = np.ctypeslib.as_array(pointer, (region.nbytes,))
    return array
