"""Copies between cache memory and stages: the right bytes of the right blocks, and no others."""

from __future__ import annotations

import numpy as np
import pytest
from kvformat_connector.device import HostDevice, Piece

from kvformat.errors import PlanError, Reason
from kvformat.placement import Region

NUM_BLOCKS, BLOCK_NBYTES = 40, 24


def memory() -> np.ndarray:
    return np.arange(NUM_BLOCKS * BLOCK_NBYTES, dtype=np.uint32).astype(np.uint8)


def device_of(array: np.ndarray) -> tuple[HostDevice, list[Piece]]:
    """Two pieces of a block, in a row the other way round, with a gap between them."""
    base = array.ctypes.data
    pieces = [
        Piece(base + 2, BLOCK_NBYTES, NUM_BLOCKS, 10, 8),
        Piece(base + 14, BLOCK_NBYTES, NUM_BLOCKS, 0, 10),
    ]
    return HostDevice([Region(base, array.nbytes)]), pieces


BLOCK_IDS = [
    [5],
    [0, 1, 2, 3],
    [39, 3, 17, 8, 21],
    [*range(10, 20), *range(30, 40), 2],
    [7, 6, 5, 4],
    [],
]


@pytest.mark.parametrize("block_ids", BLOCK_IDS)
def test_gather_fills_rows_and_scatter_puts_them_back(block_ids: list[int]) -> None:
    """Neighbours, scattered blocks, and blocks in descending order."""
    source = memory()
    device, pieces = device_of(source)
    ids = np.array(block_ids, np.int64)
    stage = np.full((len(ids), 20), 255, np.uint8)
    device.gather(pieces, ids, stage)
    blocks = source.reshape(NUM_BLOCKS, BLOCK_NBYTES)
    assert (stage[:, 10:18] == blocks[ids, 2:10]).all()
    assert (stage[:, :10] == blocks[ids, 14:24]).all()
    assert (stage[:, 18:] == 255).all()
    target = np.zeros_like(source)
    device, pieces = device_of(target)
    device.scatter(pieces, ids, stage, None)
    expected = np.zeros_like(blocks)
    expected[ids, 2:10], expected[ids, 14:24] = blocks[ids, 2:10], blocks[ids, 14:24]
    assert (target.reshape(NUM_BLOCKS, BLOCK_NBYTES) == expected).all()


def test_a_row_may_go_to_several_blocks() -> None:
    """What several requests want is read once."""
    target = np.zeros(NUM_BLOCKS * BLOCK_NBYTES, np.uint8)
    device, pieces = device_of(target)
    stage = np.arange(40, dtype=np.uint8).reshape(2, 20)
    device.scatter(pieces, np.array([4, 5, 9]), stage, np.array([1, 0, 1]))
    blocks = target.reshape(NUM_BLOCKS, BLOCK_NBYTES)
    assert blocks[4, 14] == blocks[9, 14] == 20
    assert (blocks[5, 14:24] == stage[0, :10]).all()


@pytest.mark.parametrize("block_ids", [[-1], [NUM_BLOCKS], [38, 39, 40]])
def test_blocks_outside_the_memory_are_refused(block_ids: list[int]) -> None:
    """A block id that is no block's moves nothing."""
    array = memory()
    device, pieces = device_of(array)
    before = array.copy()
    with pytest.raises(PlanError) as error:
        device.scatter(pieces, np.array(block_ids), np.zeros((len(block_ids), 20), np.uint8), None)
    assert error.value.reason == Reason.PLAN_BOUNDS
    assert (array == before).all()


def test_a_piece_outside_the_regions_is_refused() -> None:
    """Nothing outside of the cache's memory is ever read."""
    array = memory()
    device, [piece, _] = device_of(array)
    with pytest.raises(PlanError) as error:
        device.gather(
            [piece._replace(num_blocks=NUM_BLOCKS + 1)],
            np.array([0]),
            np.zeros((1, 20), np.uint8),
        )
    assert error.value.reason == Reason.PLAN_BOUNDS
