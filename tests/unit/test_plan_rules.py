"""What plans refuse, and the exact ranges of plans that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_layouts import BLOCK_SIZE, attention, group, layout
from rank_memory import head_rank, whole_rank

from kvformat import (
    ComponentPlacement,
    LayerPlacement,
    Layout,
    LayoutError,
    Limits,
    ObjectMap,
    Placement,
    PlanError,
    Reason,
    Region,
    Shard,
    component,
    object_maps,
    plan_get,
    plan_put,
    plan_transfer,
)
from kvformat.boxes import Fragments, concatenate, join, split
from kvformat.objectmap import context_tokens, head_interval, num_context_tokens

ONE = layout([group((component("latent", "bfloat16", token=BLOCK_SIZE, channel=8),), 2)])
ROW = BLOCK_SIZE * 16


def place(
    num_blocks: int = 4, nbytes: int = 1 << 20, layer: int = 0, group_index: int = 0, **fields: Any
) -> Placement:
    """One layer of :data:`ONE` at address 4096, with other fields."""
    given = {
        "component": "latent",
        "base_address": 4096,
        "block_stride_nbytes": ROW,
        "axis_strides_nbytes": (16, 2),
        **fields,
    }
    return Placement(
        layers=(
            LayerPlacement(
                group=group_index,
                layer=layer,
                num_blocks=num_blocks,
                components=(ComponentPlacement(**given),),
            ),
        ),
        regions=(Region(4096, nbytes),),
    )


def test_the_ranges_of_a_plain_layer() -> None:
    """One range a block, at base + id x stride, from the layer's offset in the object."""
    object_map = ObjectMap(ONE, 0, Shard())
    (template,) = plan_get(ONE, place())
    (layer,) = template.layers
    ranges = layer.bind(np.array([3, 0]))

    assert ranges.addresses == [(4096 + 3 * ROW,), (4096,)]
    assert ranges.sizes == [(ROW,), (ROW,)]
    assert ranges.offsets == [(object_map.header_nbytes,)] * 2
    assert (layer.group, layer.layer, layer.range_index, layer.is_whole) == (0, 0, 0, True)
    assert not template.is_whole
    assert layer.bind(np.array([], np.int64)) == ([], [], [])


def test_rows_of_neighbouring_layers_are_one_range() -> None:
    """Layers that lie together in memory and in the object are joined in rows()."""
    strided = layout([attention(2, 4, num_layers=3)])
    nbytes = strided.groups[0].layers[0].components[0].nbytes
    layers = tuple(
        LayerPlacement(
            group=0,
            layer=n,
            num_blocks=2,
            components=tuple(
                ComponentPlacement(
                    component=name,
                    base_address=(2 * n + i) * nbytes,
                    block_stride_nbytes=6 * nbytes,
                    axis_strides_nbytes=(BLOCK_SIZE * 8, 8, 2),
                    head_stop=2,
                )
                for i, name in enumerate("kv")
            ),
        )
        for n in range(3)
    )
    (template,) = plan_put(strided, Placement(layers=layers, regions=(Region(0, 12 * nbytes),)))
    header_nbytes = template.object_map.header_nbytes

    assert template.rows().bind(np.array([1])) == (
        [(6 * nbytes,)],
        [(6 * nbytes,)],
        [(header_nbytes,)],
    )


@pytest.mark.parametrize(
    "placement",
    [
        place(nbytes=4 * ROW - 1),
        place(num_blocks=5, nbytes=4 * ROW),
        place(base_address=4095),
        place(axis_strides_nbytes=(-16, 2)),
        place(axis_strides_nbytes=(1 << 40, 2)),
        place(block_stride_nbytes=1 << 40),
        place(base_address=1 << 60),
    ],
)
def test_memory_outside_the_regions_is_refused(placement: Placement) -> None:
    """The last block's last byte, a negative stride, a far address: plan_bounds."""
    for plan in (plan_put, plan_get):
        with pytest.raises(PlanError) as raised:
            plan(ONE, placement)
        assert raised.value.reason is Reason.PLAN_BOUNDS


@pytest.mark.parametrize(
    "placement",
    [
        # Each of these sums, taken modulo 2^64, would come back into the region.
        place(num_blocks=2, block_stride_nbytes=2**64),
        place(num_blocks=2**32 + 1, block_stride_nbytes=2**32),
        place(num_blocks=3, block_stride_nbytes=2**63),
        place(base_address=2**64 + 4096),
        place(base_address=-(2**64) + 4096),
        place(axis_strides_nbytes=(2**60, 2)),
        place(axis_strides_nbytes=(-(2**60), 2)),
        place(axis_strides_nbytes=(2**64, 2)),
        place(block_stride_nbytes=-ROW),
        place(num_blocks=0),
        place(num_blocks=-1),
        place(axis_strides_nbytes=(16,)),
        place(axis_strides_nbytes=(16, 2, 2)),
        place(head_start=0, head_stop=2),
        place(head_start=1, head_stop=1),
        place(head_start=-1, head_stop=1),
        place(component="rope"),
        place(layer=2),
        place(layer=-1),
        place(group_index=1),
    ],
)
def test_placements_that_can_not_be_memory_are_refused(placement: Placement) -> None:
    """Numbers from a peer that would wrap, and layers, components, heads or axes that the layout
    hasn't: plan_placement, in every planner."""
    for plan in (plan_put, plan_get):
        with pytest.raises(PlanError) as raised:
            plan(ONE, placement)
        assert raised.value.reason is Reason.PLAN_PLACEMENT
    for pair in ((placement, place()), (place(), placement)):
        with pytest.raises(PlanError) as raised:
            plan_transfer(ONE, *pair)
        assert raised.value.reason is Reason.PLAN_PLACEMENT


@pytest.mark.parametrize(
    "context", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0), (65537, 0, 1), (2, 0, 1 << 32)]
)
def test_impossible_context_shards_are_refused(context: tuple[int, int, int]) -> None:
    """A context shard outside its number, or a number outside the limits."""
    with pytest.raises(PlanError) as raised:
        Placement(
            layers=(),
            regions=(),
            context_shards=context[0],
            context_index=context[1],
            context_interleave=context[2],
        )

    assert raised.value.reason is Reason.PLAN_PLACEMENT


def test_a_layer_placed_twice_is_refused() -> None:
    """Which of two memories is meant can't be told."""
    with pytest.raises(PlanError) as raised:
        Placement(layers=place().layers * 2, regions=())

    assert raised.value.reason is Reason.PLAN_PLACEMENT


@pytest.mark.parametrize("ids", [[4], [-1], [0, 4], [2**63 - 1], [-(2**63)]])
def test_block_ids_outside_the_memory_are_refused(ids: list[int]) -> None:
    """Four blocks: 0 to 3."""
    (template,) = plan_get(ONE, place())
    (transfer,) = plan_transfer(ONE, place(), place())
    for bind in (
        template.layers[0].bind,
        template.rows().bind,
        lambda wrong: transfer.bind(wrong, np.zeros(len(wrong), np.int64)),
        lambda wrong: transfer.bind(np.zeros(len(wrong), np.int64), wrong),
    ):
        with pytest.raises(PlanError) as raised:
            bind(np.array(ids))
        assert raised.value.reason is Reason.PLAN_BOUNDS


def test_a_transfer_needs_as_many_blocks_on_either_side() -> None:
    """Two lists of block ids that don't pair up."""
    (template,) = plan_transfer(ONE, place(), place())
    with pytest.raises(PlanError) as raised:
        template.bind(np.arange(2), np.arange(3))

    assert raised.value.reason is Reason.PLAN_BOUNDS


@pytest.mark.parametrize("limit", ["max_rows", "max_ranges", "max_nbytes"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    """Each limit is at least 1."""
    with pytest.raises(PlanError) as raised:
        Limits(**{limit: 0})

    assert raised.value.reason is Reason.PLAN_LIMIT


def test_a_range_larger_than_a_call_is_refused() -> None:
    """A call of fewer bytes than one range can't be made; in pieces it can."""
    limits = Limits(max_nbytes=ROW - 1)
    with pytest.raises(PlanError) as raised:
        list(plan_get(ONE, place())[0].layers[0].batches(np.arange(4), limits))
    assert raised.value.reason is Reason.PLAN_LIMIT

    (template,) = plan_get(ONE, place(), max_transfer_nbytes=100)
    batches = list(template.layers[0].batches(np.arange(4), limits))
    assert sum(size for b in batches for row in b.ranges.sizes for size in row) == 4 * ROW


def test_shared_rows_are_not_built_for_each_block() -> None:
    """Sizes and offsets of all blocks are the same objects."""
    ranges = plan_get(ONE, place())[0].layers[0].bind(np.arange(4))

    assert len({id(row) for row in ranges.sizes}) == 1
    assert len({id(row) for row in ranges.offsets}) == 1


def test_a_rank_with_no_token_of_a_context_plans_nothing() -> None:
    """Fewer tokens than ranks: nothing to move, and no error."""
    short = layout([group((component("s", "int8", byte=4),), 1, kind="recurrent_state")])
    idle = whole_rank(short, context=(2, 1, 1))

    assert plan_put(short, idle.placement()) == []
    assert plan_get(short, idle.placement()) == []


def test_a_replica_beside_own_heads_is_written_once() -> None:
    """Rank 1 of 2 holds its heads of K and a copy of what has no heads: the copy is rank 0's to
    write, in the object that rank 1 has no heads for."""
    mixed = layout(
        [
            group(
                (
                    component("k", "bfloat16", head=2, token=BLOCK_SIZE, channel=2),
                    component("indexer_k", "bfloat16", token=BLOCK_SIZE, channel=2),
                )
            )
        ],
        head_shards=2,
    )
    plans = [plan_put(mixed, head_rank(mixed, 2, rank).placement()) for rank in range(2)]

    assert [[t.object_map.shard.head for t in plan] for plan in plans] == [[0], [1]]
    assert [m.nbytes - m.header_nbytes for m in object_maps(mixed)] == [256, 128]
    read = plan_get(mixed, head_rank(mixed, 2, 1).placement())
    assert [t.object_map.shard.head for t in read] == [0, 1]


@pytest.mark.parametrize("shard", [Shard(1, 0, 0), Shard(0, 1, 0), Shard(0, 0, 1)])
def test_an_object_outside_the_grid_has_no_map(shard: Shard) -> None:
    """Each coordinate is checked against its own size."""
    with pytest.raises(LayoutError) as raised:
        ObjectMap(ONE, 0, shard)

    assert raised.value.reason is Reason.LAYOUT_GRID


@pytest.mark.parametrize("index", [1, -1])
def test_an_entry_that_the_layout_has_not_has_no_map(index: int) -> None:
    """One entry of objects: 0."""
    with pytest.raises(LayoutError) as raised:
        ObjectMap(ONE, index, Shard())

    assert raised.value.reason is Reason.LAYOUT_OBJECTS


def test_an_object_without_bytes_does_not_exist() -> None:
    """A head shard that holds no head of any component has no map and no key."""
    cut: Layout = layout([attention(2)], head_shards=4)

    assert [m.shard.head for m in object_maps(cut)] == [0, 2]
    with pytest.raises(LayoutError) as raised:
        ObjectMap(cut, 0, Shard(0, 1, 0))
    assert raised.value.reason is Reason.LAYOUT_GRID


@pytest.mark.parametrize("num_heads", range(1, 18))
@pytest.mark.parametrize("num_shards", range(1, 18))
def test_head_shards_part_the_heads(num_heads: int, num_shards: int) -> None:
    """Every head is in one shard, in order, and no shard has two more than another."""
    cuts = [head_interval(num_heads, num_shards, index) for index in range(num_shards)]

    assert [h for start, stop in cuts for h in range(start, stop)] == list(range(num_heads))
    sizes = {stop - start for start, stop in cuts}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("interleave", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_context_shards_part_the_tokens(num_shards: int, interleave: int) -> None:
    """Every token is in one shard; the number of tokens is counted right without listing them."""
    for num_tokens in range(40):
        dealt = [context_tokens(num_tokens, num_shards, i, interleave) for i in range(num_shards)]
        assert sorted(np.concatenate(dealt).tolist()) == list(range(num_tokens))
        assert [len(tokens) for tokens in dealt] == [
            num_context_tokens(num_tokens, num_shards, i, interleave) for i in range(num_shards)
        ]


def fragments(*rows: tuple[int, int, int]) -> Fragments:
    """Fragments of (source, target, nbytes), 100 bytes from block to block."""
    source, target, nbytes = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    strides = np.full(len(rows), 100)
    return Fragments(source, strides, target, strides, nbytes)


def listed(found: Fragments) -> list[tuple[int, int, int]]:
    """Back to (source, target, nbytes)."""
    return list(zip(*(c.tolist() for c in (found.source, found.target, found.nbytes)), strict=True))


def test_only_what_touches_on_both_sides_is_joined() -> None:
    """Neighbours on one side alone stay apart, and so do those that part from block to block."""
    assert listed(join(fragments((0, 50, 4), (4, 54, 4), (8, 60, 4), (20, 64, 4)))) == [
        (0, 50, 8),
        (8, 60, 4),
        (20, 64, 4),
    ]
    parted = fragments((0, 0, 4), (4, 4, 4))._replace(source_strides=np.array([100, 200]))
    assert listed(join(parted)) == [(0, 0, 4), (4, 4, 4)]
    assert listed(concatenate([])) == []


def test_a_split_leaves_no_piece_larger_and_no_byte_out() -> None:
    """Pieces follow one another on both sides; the last is what is left."""
    assert listed(split(fragments((0, 50, 10), (40, 90, 4)), 4)) == [
        (0, 50, 4),
        (4, 54, 4),
        (8, 58, 2),
        (40, 90, 4),
    ]
