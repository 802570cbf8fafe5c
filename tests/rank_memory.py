"""Memory of a rank as an engine would lay it out, and the moving of bytes that plans describe.

Nothing here uses the code under test to work out where a byte belongs: what a rank holds is
indexed with plain lists, and its memory is a strided view.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvformat import (
    Component,
    ComponentPlacement,
    LayerPlacement,
    Layout,
    Placement,
    Region,
    Shard,
    object_maps,
    plan_get,
    plan_put,
    plan_transfer,
)

Bytes = NDArray[np.uint8]
Slot = tuple[int, int, str]
Heads = tuple[int, int]
#: (object index, shard, block) -> the object's bytes, header included and left zero.
Objects = dict[tuple[int, Shard, int], Bytes]

NUM_BLOCKS = 3


def all_slots(layout: Layout) -> list[tuple[int, int, Component]]:
    """(group, layer, component) of everything in a layout."""
    return [
        (g, n, c)
        for g, group in enumerate(layout.groups)
        for n, layer in enumerate(group.layers)
        for c in layer.components
    ]


def all_layers(layout: Layout) -> list[tuple[int, int]]:
    """(group, layer) of everything in a layout."""
    return [(g, n) for g, group in enumerate(layout.groups) for n in range(len(group.layers))]


def truth(layout: Layout, seed: int = 0) -> dict[Slot, Bytes]:
    """The bytes of the whole model: ``[NUM_BLOCKS, *component axes, item bytes]`` each."""
    random = np.random.default_rng(seed)
    return {
        (g, n, c.name): random.integers(
            0, 256, (NUM_BLOCKS, *c.byte_sizes, c.item_nbytes), dtype=np.uint8
        )
        for g, n, c in all_slots(layout)
    }


def shard_heads(num_heads: int, num_shards: int, first: int, stop: int | None = None) -> Heads:
    """Heads of shards ``first`` to ``stop``: one begins at the first whole head after its cut."""
    stop = first + 1 if stop is None else stop
    begins, ends = (
        next(head for head in range(num_heads + 1) if head * num_shards >= shard * num_heads)
        for shard in (first, stop)
    )
    return begins, ends


def dealt_tokens(num_tokens: int, context: tuple[int, int, int]) -> list[int]:
    """Tokens of a context shard (shards, index, interleave)."""
    shards, index, interleave = context
    return [t for t in range(num_tokens) if t // interleave % shards == index]


def select(whole: Bytes, c: Component, heads: Heads, context: tuple[int, int, int]) -> Bytes:
    """The given heads and tokens of blocks of a component, packed."""
    tokens = dealt_tokens(c.num_tokens, context)
    cut = {"head": list(range(*heads)), "token": tokens}
    if not (cut["head"] and tokens):
        return np.zeros(0, np.uint8)
    for position, axis in enumerate(c.axes):
        if axis in cut:
            whole = whole.take(cut[axis], axis=position + 1)
    return np.ascontiguousarray(whole)


@dataclass(frozen=True)
class Style:
    """How a rank lays a component out: the order of its axes, gaps after them, one page a block.

    ``rotate`` turns the axis order, ``swap`` exchanges its first two axes, ``block_inner`` puts
    that many axes outside the block axis, ``pad`` leaves so many items free after each axis.
    """

    rotate: int = 0
    swap: bool = False
    block_inner: int = 0
    pad: int = 0


@dataclass
class RankMemory:
    """One rank's cache: ``held`` maps (group, layer) to the heads of each component."""

    layout: Layout
    held: Mapping[tuple[int, int], Mapping[str, Heads]]
    context: tuple[int, int, int] = (1, 0, 1)
    style: Style = Style()
    #: This rank's id of each of the model's blocks.
    block_ids: tuple[int, ...] = tuple(range(NUM_BLOCKS))
    num_blocks: int = NUM_BLOCKS
    views: dict[Slot, Bytes] = field(default_factory=dict)
    counts: dict[Slot, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spans = {}
        total = 64
        for g, n, c in all_slots(self.layout):
            if (g, n) in self.held:
                shape, strides, nbytes = self._arrange(c, self.held[g, n][c.name])
                spans[g, n, c.name] = (total, shape, strides)
                total += nbytes + 64
        self.buffer = np.full(total, 0xEE, np.uint8)
        self.touched = np.zeros(total, np.uint8)
        for slot, (start, shape, strides) in spans.items():
            for views, buffer in ((self.views, self.buffer), (self.counts, self.touched)):
                views[slot] = np.ndarray(shape, np.uint8, buffer.data, start, strides)
        self.spans = spans

    def _arrange(self, c: Component, heads: Heads) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        sizes = dict(zip(c.axes, c.byte_sizes, strict=True))
        if "head" in sizes:
            sizes["head"] = heads[1] - heads[0]
        num_tokens = len(dealt_tokens(c.num_tokens, self.context))
        if "token" in sizes:
            sizes["token"] = num_tokens
        order = list(c.axes)
        if self.style.swap and len(order) > 1:
            order[0], order[1] = order[1], order[0]
        turn = self.style.rotate % len(order)
        order = order[turn:] + order[:turn]
        order.insert(min(self.style.block_inner, len(order)), "block")
        sizes["block"] = self.num_blocks
        strides = {}
        stride = c.item_nbytes
        for axis in reversed(order):
            strides[axis] = stride
            stride = stride * sizes[axis] + self.style.pad * c.item_nbytes
        axes = ("block", *c.axes)
        shape = (*(sizes[a] for a in axes), c.item_nbytes)
        return shape, (*(strides[a] for a in axes), 1), stride

    @property
    def address(self) -> int:
        """Of the buffer's first byte."""
        return int(self.buffer.ctypes.data)

    def placement(self) -> Placement:
        """What an engine would say of this memory."""
        layers = []
        for (g, n), heads in self.held.items():
            layers.append(
                LayerPlacement(
                    group=g,
                    layer=n,
                    num_blocks=self.num_blocks,
                    components=tuple(
                        ComponentPlacement(
                            component=c.name,
                            base_address=self.address + self.spans[g, n, c.name][0],
                            block_stride_nbytes=self.spans[g, n, c.name][2][0],
                            axis_strides_nbytes=self.spans[g, n, c.name][2][1:-1],
                            head_start=heads[c.name][0],
                            head_stop=heads[c.name][1],
                        )
                        for c in self.layout.groups[g].layers[n].components
                    ),
                )
            )
        return Placement(
            layers=tuple(layers),
            regions=(Region(self.address, len(self.buffer)),),
            context_shards=self.context[0],
            context_index=self.context[1],
            context_interleave=self.context[2],
        )

    def part(self, values: Mapping[Slot, Bytes], g: int, n: int, c: Component) -> Bytes:
        """What this rank should hold of a component, for every block of the model."""
        return select(values[g, n, c.name], c, self.held[g, n][c.name], self.context)

    def slots(self) -> list[tuple[int, int, Component]]:
        """What this rank holds any byte of."""
        return [
            (g, n, c)
            for g, n, c in all_slots(self.layout)
            if (g, n) in self.held and dealt_tokens(c.num_tokens, self.context)
        ]

    def fill(self, values: Mapping[Slot, Bytes]) -> None:
        """As if the engine had computed the model's blocks."""
        for g, n, c in self.slots():
            self.views[g, n, c.name][list(self.block_ids)] = self.part(values, g, n, c)

    def check_filled(self, values: Mapping[Slot, Bytes], blocks: Sequence[int]) -> None:
        """The given blocks hold the right bytes, each written once, and nothing else was."""
        ids = [self.block_ids[b] for b in blocks]
        expected = 0
        for g, n, c in self.slots():
            part = self.part(values, g, n, c)[list(blocks)]
            np.testing.assert_array_equal(self.views[g, n, c.name][ids], part)
            assert (self.counts[g, n, c.name][ids] == 1).all(), "a byte was not written once"
            expected += part.size
        assert int(self.touched.sum()) == expected, "a byte outside the blocks was written"

    def check_inside(self, address: int, nbytes: int) -> int:
        """The index in the buffer, after a check that all of the range lies in it."""
        start = address - self.address
        assert start >= 0
        assert 0 < nbytes <= len(self.buffer) - start
        return start

    def ids(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """This rank's ids of the given blocks."""
        return np.array([self.block_ids[b] for b in blocks], np.int64)


def copy(target: int, source: int, nbytes: int) -> None:
    """What a transfer engine does with one range."""
    ctypes.memmove(target, source, nbytes)


def put(
    memory: RankMemory, objects: Objects, blocks: Sequence[int], max_nbytes: int | None = None
) -> None:
    """Write every object of a rank, layer by layer, and check that each byte is written once."""
    for template in plan_put(memory.layout, memory.placement(), max_transfer_nbytes=max_nbytes):
        object_map = template.object_map
        written = np.zeros((len(blocks), object_map.nbytes), np.uint8)
        rows = []
        for block in blocks:
            key = (object_map.object_index, object_map.shard, block)
            rows.append(objects.setdefault(key, np.zeros(object_map.nbytes, np.uint8)))
        for layer in template.layers:
            assert layer.is_whole
            ranges = layer.bind(memory.ids(blocks))
            for i, row in enumerate(zip(*ranges, strict=True)):
                for address, nbytes, offset in zip(*row, strict=True):
                    assert object_map.header_nbytes <= offset <= object_map.nbytes - nbytes
                    assert max_nbytes is None or nbytes <= max_nbytes
                    memory.check_inside(address, nbytes)
                    copy(rows[i].ctypes.data + offset, address, nbytes)
                    written[i, offset : offset + nbytes] += 1
        assert (written[:, : object_map.header_nbytes] == 0).all()
        assert (written[:, object_map.header_nbytes :] == 1).all()


def get(
    memory: RankMemory, objects: Objects, blocks: Sequence[int], max_nbytes: int | None = None
) -> None:
    """Read every object that a rank needs."""
    for template in plan_get(memory.layout, memory.placement(), max_transfer_nbytes=max_nbytes):
        object_map = template.object_map
        for layer in template.layers:
            ranges = layer.bind(memory.ids(blocks))
            for block, *row in zip(blocks, *ranges, strict=True):
                data = objects[object_map.object_index, object_map.shard, block]
                for address, nbytes, offset in zip(*row, strict=True):
                    assert object_map.header_nbytes <= offset <= len(data) - nbytes
                    assert max_nbytes is None or nbytes <= max_nbytes
                    start = memory.check_inside(address, nbytes)
                    copy(address, data.ctypes.data + offset, nbytes)
                    memory.touched[start : start + nbytes] += 1


def transfer(
    source: RankMemory, target: RankMemory, blocks: Sequence[int], max_nbytes: int | None = None
) -> None:
    """Move what both ranks hold from one to the other."""
    for template in plan_transfer(
        source.layout, source.placement(), target.placement(), max_transfer_nbytes=max_nbytes
    ):
        bound = template.bind(source.ids(blocks), target.ids(blocks))
        for from_address, to_address, nbytes in zip(*bound, strict=True):
            assert max_nbytes is None or nbytes <= max_nbytes
            source.check_inside(from_address, nbytes)
            start = target.check_inside(to_address, nbytes)
            copy(to_address, from_address, nbytes)
            target.touched[start : start + nbytes] += 1


def whole_rank(layout: Layout, **options: object) -> RankMemory:
    """A rank that holds everything."""
    return head_rank(layout, 1, 0, **options)


def head_rank(
    layout: Layout,
    size: int,
    rank: int,
    *,
    layers: Iterable[tuple[int, int]] | None = None,
    **options: object,
) -> RankMemory:
    """Rank ``rank`` of a tensor-parallel group: its heads, or a replica where there are too few."""
    held = {}
    for g, n in all_layers(layout) if layers is None else layers:
        held[g, n] = {
            c.name: heads_of_rank(c.num_heads, size, rank)
            for c in layout.groups[g].layers[n].components
        }
    return RankMemory(layout, held, **options)  # type: ignore[arg-type]


def heads_of_rank(num_heads: int, size: int, rank: int) -> Heads:
    """A tensor-parallel rank's heads; ranks share a head where there are more ranks than heads."""
    if size > num_heads:
        head = rank * num_heads // size
        return head, head + 1
    return shard_heads(num_heads, size, rank)


def reference_objects(layout: Layout, values: Mapping[Slot, Bytes]) -> Objects:
    """Every object of every block, packed as the specification words it."""
    grid = layout.grid
    objects: Objects = {}
    for object_map in object_maps(layout):
        shard = object_map.shard
        context = (grid.context_shards, shard.context, grid.context_interleave)
        for block in range(NUM_BLOCKS):
            data = bytes(object_map.header_nbytes)
            for g in sorted(object_map.groups):
                starts = (*grid.layer_starts[g], len(layout.groups[g].layers))
                for n in range(starts[shard.layer], starts[shard.layer + 1]):
                    for c in layout.groups[g].layers[n].components:
                        heads = shard_heads(c.num_heads, grid.head_shards, shard.head)
                        whole = values[g, n, c.name][block : block + 1]
                        data += select(whole, c, heads, context).tobytes()
            key = (object_map.object_index, shard, block)
            objects[key] = np.frombuffer(data, np.uint8)
    return objects
