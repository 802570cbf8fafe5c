"""Cases 11, 13 and 15 to 18: the same bytes from whatever memory and whatever parallel sizes."""

from __future__ import annotations

import numpy as np
import pytest
from model_layouts import BLOCK_SIZE, attention, group, layout
from rank_memory import (
    NUM_BLOCKS,
    Objects,
    RankMemory,
    Style,
    get,
    head_rank,
    put,
    reference_objects,
    truth,
    whole_rank,
)

from kvformat import (
    ComponentPlacement,
    Group,
    Layer,
    LayerPlacement,
    Layout,
    ObjectMap,
    Placement,
    PlanError,
    Reason,
    Region,
    Shard,
    component,
    fingerprint,
    new_header,
    object_maps,
    plan_get,
    plan_put,
)
from kvformat.components import split_attention

BLOCKS = range(NUM_BLOCKS)


def written(*ranks: RankMemory, seed: int = 0) -> Objects:
    """What ranks put of the model that they hold together."""
    objects: Objects = {}
    for rank in ranks:
        rank.fill(truth(rank.layout, seed))
        put(rank, objects, BLOCKS)
    return objects


def contents(objects: Objects) -> dict[object, bytes]:
    """Objects in a form that compares."""
    return {key: data.tobytes() for key, data in objects.items()}


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_case_11_axis_order_in_memory_never_changes_the_object(order: str) -> None:
    """The same logical block held as NHD and as HND gives the same object bytes."""
    described = layout(
        [
            group(
                split_attention(
                    num_kv_heads=2,
                    head_size=128,
                    block_size=BLOCK_SIZE,
                    dtype="bfloat16",
                    order=order,  # type: ignore[arg-type]
                )
            )
        ]
    )
    as_declared = written(whole_rank(described))
    exchanged = written(whole_rank(described, style=Style(swap=True)))

    assert contents(as_declared) == contents(exchanged)
    assert contents(as_declared) == contents(reference_objects(described, truth(described)))


def test_case_11_memory_with_another_number_of_axes_is_refused() -> None:
    """A placement whose strides don't name every axis is refused when plans are made."""
    memory = whole_rank(layout([attention()]))
    place = memory.placement()
    first = place.layers[0]
    flat = ComponentPlacement(
        component="k",
        base_address=memory.address,
        block_stride_nbytes=64,
        axis_strides_nbytes=(64, 2),
        head_stop=8,
    )
    layers = (
        LayerPlacement(group=0, layer=0, num_blocks=1, components=(flat, first.components[1])),
    )
    with pytest.raises(PlanError) as raised:
        plan_put(memory.layout, Placement(layers=layers, regions=place.regions))

    assert raised.value.reason is Reason.PLAN_PLACEMENT


def test_case_13_groups_over_shared_physical_layers() -> None:
    """Groups over physical layers {0,2}, {1,2,3} and {0,3}: each is an object with its own
    completeness, counted by index in the group; bytes come back exactly."""
    physical = [(0, 2), (1, 2, 3), (0, 3)]
    kv = attention(2, 4).layers[0].components
    groups = [
        Group(
            kind="full_attention",
            block_size=BLOCK_SIZE,
            layers=tuple(Layer(name=f"model.layers.{n}", components=kv) for n in numbers),
        )
        for numbers in physical
    ]
    described = layout(groups)
    maps = object_maps(described)

    assert [m.groups for m in maps] == [(0,), (1,), (2,)]
    assert [m.spans for m in maps] == [((0, 0, 2),), ((1, 0, 3),), ((2, 0, 2),)]
    for object_map in maps:
        header = new_header(object_map, fingerprint(described), bytes(32), bytes(16), None)
        assert [span.complete for span in header.spans] == [2 ** object_map.spans[0][2] - 1]

    reader = whole_rank(described, style=Style(pad=1))
    get(reader, written(whole_rank(described)), BLOCKS)
    reader.check_filled(truth(described), BLOCKS)


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_case_15_engines_of_other_sizes_share_right_bytes_or_no_key(
    writers: int, readers: int
) -> None:
    """Two engines that each cut by their own size share no namespace; on a grid that both can
    fill, they share one and its bytes are right."""
    own = [layout([attention(8)], head_shards=size) for size in (writers, readers)]
    assert fingerprint(own[0]) != fingerprint(own[1])

    common = layout([attention(8)], head_shards=max(writers, readers))
    objects = written(*(head_rank(common, writers, rank) for rank in range(writers)))
    assert contents(objects) == contents(
        written(*(head_rank(common, readers, rank) for rank in range(readers)))
    )
    for rank in range(readers):
        reader = head_rank(common, readers, rank)
        get(reader, objects, BLOCKS)
        reader.check_filled(truth(common), BLOCKS)


def test_a_writer_that_is_finer_than_its_grid_is_refused() -> None:
    """A rank with half of an object's heads, or half of its layers, can't write it."""
    described = layout([attention(8, num_layers=4)], head_shards=2)
    for rank in (
        head_rank(described, 4, 0),
        head_rank(described, 2, 0, layers=[(0, 0), (0, 1)]),
        RankMemory(described, {(0, n): {"k": (0, 6), "v": (0, 6)} for n in range(4)}),
    ):
        with pytest.raises(PlanError) as raised:
            plan_put(described, rank.placement())
        assert raised.value.reason is Reason.PLAN_COVERAGE


def stages(described: Layout, *starts: int) -> list[RankMemory]:
    """Pipeline ranks that begin at the given layers of group 0."""
    num_layers = len(described.groups[0].layers)
    bounds = [*starts, num_layers]
    return [
        head_rank(described, 1, 0, layers=[(0, n) for n in range(bounds[i], bounds[i + 1])])
        for i in range(len(starts))
    ]


@pytest.mark.parametrize(
    ("writer", "reader"), [((0, 5), (0,)), ((0,), (0, 5)), ((0, 5), (0, 2, 7))]
)
def test_case_16_uneven_pipeline_stages(writer: tuple[int, ...], reader: tuple[int, ...]) -> None:
    """Stages of 5 + 3 layers on one side, one or three on the other, in both directions."""
    described = layout([attention(2, num_layers=8)], layer_starts=((0, 5),))
    objects = written(*stages(described, *writer))
    assert contents(objects) == contents(reference_objects(described, truth(described)))

    for stage in stages(described, *reader):
        get(stage, objects, BLOCKS)
        stage.check_filled(truth(described), BLOCKS)


def test_case_17_k_and_v_in_one_tensor_are_placed_by_name() -> None:
    """One side registers K and V jointly ([blocks, 2, tokens, heads, channels]): placed by name
    inside that tensor, they give the objects of the side that registers them apart."""
    components = split_attention(
        num_kv_heads=2, head_size=4, block_size=BLOCK_SIZE, dtype="float16", order="NHD"
    )
    described = layout([group(components, 1)])
    values = truth(described)
    joint = np.zeros((NUM_BLOCKS, 2, BLOCK_SIZE, 2, 4, 2), np.uint8)
    for index, name in enumerate(("k", "v")):
        joint[:, index] = values[0, 0, name]
    address = joint.ctypes.data
    placement = Placement(
        layers=(
            LayerPlacement(
                group=0,
                layer=0,
                num_blocks=NUM_BLOCKS,
                components=tuple(
                    ComponentPlacement(
                        component=name,
                        base_address=address + index * joint.strides[1],
                        block_stride_nbytes=joint.strides[0],
                        axis_strides_nbytes=joint.strides[2:5],
                        head_stop=2,
                    )
                    for index, name in ((1, "v"), (0, "k"))  # in any order
                ),
            ),
        ),
        regions=(Region(address, joint.nbytes),),
    )
    (template,) = plan_put(described, placement)
    (layer,) = template.layers

    # K and V of a block lie together on both sides: one range a block.
    ranges = layer.bind(np.arange(NUM_BLOCKS))
    assert ranges.addresses == [(address + b * joint.strides[0],) for b in range(NUM_BLOCKS)]
    assert ranges.sizes == [(joint.strides[0],)] * NUM_BLOCKS
    for block, expected in enumerate(written(whole_rank(described)).values()):
        assert joint[block].tobytes() == expected[template.object_map.header_nbytes :].tobytes()


@pytest.mark.parametrize("names", [("kv",), ("k",), ("k", "v", "k_scale"), ("k", "k")])
def test_case_17_other_names_are_refused_by_name(names: tuple[str, ...]) -> None:
    """A placement of other components than the layout's is refused as such, by both planners."""
    memory = whole_rank(layout([attention(num_layers=1)]))
    known = memory.placement().layers[0].components[0]
    components = tuple(
        ComponentPlacement(
            component=name,
            base_address=known.base_address,
            block_stride_nbytes=known.block_stride_nbytes,
            axis_strides_nbytes=known.axis_strides_nbytes,
            head_stop=8,
        )
        for name in names
    )
    place = LayerPlacement(group=0, layer=0, num_blocks=1, components=components)
    for plan in (plan_put, plan_get):
        with pytest.raises(PlanError) as raised:
            plan(memory.layout, Placement(layers=(place,), regions=memory.placement().regions))
        assert raised.value.reason is Reason.PLAN_PLACEMENT


def test_case_18_only_the_bytes_of_a_row_travel() -> None:
    """Rows padded to a larger stride: the object has no padding, none is read, none written."""
    described = layout([group((component("latent", "bfloat16", token=BLOCK_SIZE, channel=9),), 2)])
    padded = whole_rank(described, style=Style(pad=7))
    objects = written(padded)
    object_map = ObjectMap(described, 0, Shard())

    assert object_map.nbytes - object_map.header_nbytes == 2 * BLOCK_SIZE * 9 * 2
    (template,) = plan_put(described, padded.placement())
    assert template.layers[0].bind(np.array([0])).sizes == [(9 * 2,) * BLOCK_SIZE]

    reader = whole_rank(described, style=Style(pad=3))
    get(reader, objects, BLOCKS)
    reader.check_filled(truth(described), BLOCKS)
