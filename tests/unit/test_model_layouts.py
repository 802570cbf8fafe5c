"""Layouts of every kind of cache, and plans that move their bytes: to objects and back."""

from __future__ import annotations

import pytest
from model_layouts import MODELS, model
from rank_memory import (
    NUM_BLOCKS,
    Objects,
    RankMemory,
    Style,
    get,
    head_rank,
    put,
    reference_objects,
    transfer,
    truth,
    whole_rank,
)

from kvformat import manifest, parse_manifest

BLOCKS = (2, 0)
IN_MEMORY = {
    "packed": Style(),
    "axes turned": Style(rotate=1),
    "axes exchanged": Style(swap=True),
    "padded pages": Style(pad=3),
    "planes of all blocks": Style(block_inner=1, swap=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_manifest_gives_back_its_layout(name: str) -> None:
    """Every kind of layout survives being written down."""
    layout = model(name)

    assert parse_manifest(manifest(layout)) == layout


@pytest.mark.parametrize("style", IN_MEMORY)
@pytest.mark.parametrize("name", MODELS)
def test_objects_hold_the_declared_bytes_and_give_them_back(name: str, style: str) -> None:
    """Cases 11, 12, 18: whatever the memory looks like, the object is what the layout declares,
    and a reader with other strides gets every component exactly."""
    layout = model(name)
    values = truth(layout)
    writer = whole_rank(layout, style=IN_MEMORY[style], block_ids=(4, 1, 3), num_blocks=5)
    writer.fill(values)
    objects: Objects = {}
    put(writer, objects, BLOCKS)

    expected = reference_objects(layout, values)
    assert objects.keys() == {key for key in expected if key[2] in BLOCKS}
    for key, data in objects.items():
        assert data.tobytes() == expected[key].tobytes()

    reader = whole_rank(layout, style=Style(pad=1, rotate=2))
    get(reader, objects, BLOCKS)
    reader.check_filled(values, BLOCKS)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_write_what_one_reads(name: str, size: int) -> None:
    """Cases 12, 14: ranks with their own heads, or replicas of what can't be cut, together write
    every object; one rank reads them all."""
    layout = model(name, head_shards=size)
    values = truth(layout)
    objects: Objects = {}
    for rank in range(size):
        writer = head_rank(layout, size, rank, style=Style(pad=rank % 2))
        writer.fill(values)
        put(writer, objects, BLOCKS)

    expected = reference_objects(layout, values)
    assert objects.keys() == {key for key in expected if key[2] in BLOCKS}

    reader = whole_rank(layout, style=Style(swap=True))
    get(reader, objects, BLOCKS)
    reader.check_filled(values, BLOCKS)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_moves_from_rank_to_rank(name: str) -> None:
    """The same kinds of cache, between two ranks' memories without an object."""
    layout = model(name)
    values = truth(layout)
    source = whole_rank(layout, style=Style(pad=2), block_ids=(1, 2, 0))
    source.fill(values)
    target: RankMemory = whole_rank(
        layout, style=Style(rotate=1), block_ids=(0, 3, 4), num_blocks=5
    )
    transfer(source, target, range(NUM_BLOCKS))

    target.check_filled(values, range(NUM_BLOCKS))
