"""Plans of random layouts, shard grids and placements move every byte to its place, once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layout_strategies import layouts
from model_layouts import attention
from model_layouts import layout as make_layout
from numpy.typing import NDArray
from rank_memory import (
    NUM_BLOCKS,
    Objects,
    RankMemory,
    Style,
    all_layers,
    get,
    head_rank,
    heads_of_rank,
    put,
    reference_objects,
    shard_heads,
    transfer,
    truth,
)

from kvformat import (
    Layout,
    Limits,
    PlanError,
    Reason,
    plan_get,
)
from kvformat.plan import RowTemplate

STYLES = st.builds(
    Style,
    rotate=st.integers(0, 3),
    swap=st.booleans(),
    block_inner=st.integers(0, 2),
    pad=st.integers(0, 2),
)


def blocks_in_memory(draw: st.DrawFn) -> dict[str, object]:
    """Where a rank's engine put the model's blocks."""
    num_blocks = draw(st.integers(NUM_BLOCKS, 6))
    ids = draw(st.permutations(range(num_blocks)))[:NUM_BLOCKS]
    return {"num_blocks": num_blocks, "block_ids": tuple(ids), "style": draw(STYLES)}


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """An interval from 0 to ``size``, cut anywhere."""
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=3)) if size > 1 else set()
    bounds = [0, *sorted(inner), size]
    return list(pairwise(bounds))


def held_heads(num_heads: int, num_shards: int, first: int, stop: int) -> tuple[int, int]:
    """Heads of shards ``first`` to ``stop``, or where these have none a replica of one."""
    heads = shard_heads(num_heads, num_shards, first, stop)
    replica = min(heads[0], num_heads - 1)
    return heads if heads[0] < heads[1] else (replica, replica + 1)


@st.composite
def writers(draw: st.DrawFn, layout: Layout) -> list[RankMemory]:
    """Ranks that together hold the model, cut nowhere but where its grid is cut."""
    grid = layout.grid
    whole_context = draw(st.booleans())
    contexts = (
        [(1, 0, 1)]
        if whole_context
        else [(grid.context_shards, c, grid.context_interleave) for c in range(grid.context_shards)]
    )
    ranks = []
    for first_stage, last_stage in draw(cuts(grid.layer_shards)):
        layers = [
            (g, n)
            for g, n in all_layers(layout)
            for starts in [(*grid.layer_starts[g], len(layout.groups[g].layers))]
            if starts[first_stage] <= n < starts[last_stage]
        ]
        for first, stop in draw(cuts(grid.head_shards)):
            held = {
                (g, n): {
                    c.name: held_heads(c.num_heads, grid.head_shards, first, stop)
                    for c in layout.groups[g].layers[n].components
                }
                for g, n in layers
            }
            for context in contexts:
                ranks.append(RankMemory(layout, held, context, **blocks_in_memory(draw)))  # type: ignore[arg-type]
    return ranks


@st.composite
def readers(draw: st.DrawFn, layout: Layout) -> RankMemory:
    """A rank with any layers, any heads and any of the tokens."""
    layers = draw(st.lists(st.sampled_from(all_layers(layout)), unique=True, min_size=1))
    held = {}
    for g, n in layers:
        held[g, n] = {}
        for c in layout.groups[g].layers[n].components:
            first = draw(st.integers(0, c.num_heads - 1))
            held[g, n][c.name] = (first, draw(st.integers(first + 1, c.num_heads)))
    shards = draw(st.integers(1, 3))
    context = (shards, draw(st.integers(0, shards - 1)), draw(st.integers(1, 3)))
    return RankMemory(layout, held, context, **blocks_in_memory(draw))  # type: ignore[arg-type]


BLOCKS = st.permutations(range(NUM_BLOCKS)).flatmap(
    lambda order: st.integers(0, NUM_BLOCKS).map(lambda count: order[:count])
)
PIECES = st.one_of(st.none(), st.integers(1, 64))


@settings(max_examples=4 * settings().max_examples)
@given(st.data())
def test_what_is_written_through_plans_is_what_is_read_through_plans(data: st.DataObject) -> None:
    """Cases 14 to 18: whatever the grid, the writers and the reader, objects hold the declared
    bytes, every byte is written and read once, and no range leaves its buffer or its object."""
    layout = data.draw(layouts())
    blocks: Sequence[int] = data.draw(BLOCKS)
    values = truth(layout)
    objects: Objects = {}
    for writer in data.draw(writers(layout)):
        writer.fill(values)
        put(writer, objects, blocks, data.draw(PIECES))

    expected = {k: v for k, v in reference_objects(layout, values).items() if k[2] in blocks}
    assert objects.keys() == expected.keys() or not blocks
    for key, found in objects.items():
        assert found.tobytes() == expected[key].tobytes()

    reader = data.draw(readers(layout))
    get(reader, objects, blocks, data.draw(PIECES))
    reader.check_filled(values, blocks)


@settings(max_examples=4 * settings().max_examples)
@given(st.data())
def test_ranks_that_hold_the_model_fill_any_rank(data: st.DataObject) -> None:
    """Transfers from ranks that together hold the model write each byte of any rank once."""
    layout = data.draw(layouts())
    blocks: Sequence[int] = data.draw(BLOCKS)
    values = truth(layout)
    target = data.draw(readers(layout))
    contexts, interleave = data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    #: Into how many ranks the heads of each layer are cut.
    parts = {
        (g, n): data.draw(st.integers(1, min(c.num_heads for c in layer.components)))
        for g, group in enumerate(layout.groups)
        for n, layer in enumerate(group.layers)
    }
    for rank in range(max(parts.values())):
        held = {
            (g, n): {
                c.name: shard_heads(c.num_heads, size, rank)
                for c in layout.groups[g].layers[n].components
            }
            for (g, n), size in parts.items()
            if rank < size
        }
        for index in range(contexts):
            context = (contexts, index, interleave)
            source = RankMemory(layout, held, context, **blocks_in_memory(data.draw))  # type: ignore[arg-type]
            source.fill(values)
            transfer(source, target, blocks, data.draw(PIECES))

    target.check_filled(values, blocks)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("source_size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("target_size", [1, 2, 4, 8, 16])
def test_every_pair_of_tensor_parallel_sizes(
    num_kv_heads: int, source_size: int, target_size: int
) -> None:
    """Case 14: each rank of one engine is filled by the ranks of another, in either direction and
    with KV heads replicated, each byte once; through objects the same."""
    layout = make_layout(
        [attention(num_kv_heads, num_layers=1)], head_shards=min(source_size, num_kv_heads)
    )
    values = truth(layout)
    sources = {}
    objects: Objects = {}
    for rank in range(source_size):
        source = head_rank(layout, source_size, rank, style=Style(pad=1))
        source.fill(values)
        put(source, objects, range(NUM_BLOCKS))
        # Of ranks that hold the same heads, one sends.
        sources[heads_of_rank(num_kv_heads, source_size, rank)] = source
    for rank in range(target_size):
        for style in (Style(), Style(swap=True)):
            sent = head_rank(layout, target_size, rank, style=style)
            for source in sources.values():
                transfer(source, sent, range(NUM_BLOCKS))
            sent.check_filled(values, range(NUM_BLOCKS))

            loaded = head_rank(layout, target_size, rank, style=style)
            get(loaded, objects, range(NUM_BLOCKS))
            loaded.check_filled(values, range(NUM_BLOCKS))


def addresses_of(template: RowTemplate, ids: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """(address, size, offset) of every range, row by row."""
    ranges = template.bind(ids)
    return [r for row in zip(*ranges, strict=True) for r in zip(*row, strict=True)]


def bytes_of(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """(address, offset) of every single byte."""
    return sorted((a + i, o + i) for a, size, o in ranges for i in range(size))


@given(st.data())
def test_joining_and_splitting_change_no_byte(data: st.DataObject) -> None:
    """Ranges of one row for the whole object, in pieces of any size, and layer by layer, name the
    same bytes; rows have no more ranges than the layers together."""
    layout = data.draw(layouts())
    memory = data.draw(readers(layout))
    ids = memory.ids([1])
    pieces = data.draw(st.integers(1, 64))
    plain = plan_get(layout, memory.placement())
    cut = plan_get(layout, memory.placement(), max_transfer_nbytes=pieces)
    for whole, small in zip(plain, cut, strict=True):
        layers = [r for layer in whole.layers for r in addresses_of(layer, ids)]
        rows = addresses_of(whole.rows(), ids)
        assert len(rows) <= len(layers)
        assert bytes_of(rows) == bytes_of(layers)
        for split in (
            [r for layer in small.layers for r in addresses_of(layer, ids)],
            addresses_of(small.rows(), ids),
        ):
            assert max(size for _, size, _ in split) <= pieces
            assert bytes_of(split) == bytes_of(layers)


@given(st.data())
def test_batches_stay_within_every_limit_and_leave_nothing_out(data: st.DataObject) -> None:
    """Rows, ranges and bytes of each call are within the limits at once; the calls together are
    the bound template."""
    layout = data.draw(layouts())
    memory = data.draw(readers(layout))
    largest = data.draw(st.integers(1, 64))
    templates = plan_get(layout, memory.placement(), max_transfer_nbytes=largest)
    assume(templates)
    template = data.draw(st.sampled_from(templates)).rows()
    blocks = data.draw(st.lists(st.integers(0, memory.num_blocks - 1), max_size=12))
    ids = np.array(blocks, np.int64)
    limits = Limits(
        max_rows=data.draw(st.integers(1, 12)),
        max_ranges=data.draw(st.integers(1, 100)),
        max_nbytes=data.draw(st.integers(largest, 4096)),
    )
    seen: list[list[tuple[int, int, int]]] = [[] for _ in ids]
    for batch in template.batches(ids, limits):
        rows = list(zip(*batch.ranges, strict=True))
        assert 0 < len(rows) <= limits.max_rows
        assert sum(len(sizes) for _, sizes, _ in rows) <= limits.max_ranges
        assert sum(sum(sizes) for _, sizes, _ in rows) <= limits.max_nbytes
        for index, row in zip(range(len(ids))[batch.rows], rows, strict=True):
            seen[index] += zip(*row, strict=True)

    assert list(chain.from_iterable(seen)) == addresses_of(template, ids)


@given(st.data())
def test_block_ids_outside_the_memory_are_refused(data: st.DataObject) -> None:
    """No block id, of any integer width, gives an address outside the rank's memory."""
    layout = data.draw(layouts())
    memory = data.draw(readers(layout))
    templates = plan_get(layout, memory.placement())
    assume(templates)
    template = data.draw(st.sampled_from(templates)).layers[0]
    wrong = data.draw(
        st.one_of(st.integers(-(2**63), -1), st.integers(memory.num_blocks, 2**63 - 1))
    )
    with pytest.raises(PlanError) as raised:
        template.bind(np.array([0, wrong]))

    assert raised.value.reason is Reason.PLAN_BOUNDS
    narrow = template.bind(np.array([memory.num_blocks - 1], np.uint8))
    assert narrow == template.bind(np.array([memory.num_blocks - 1], np.int64))
