"""The object map: where everything lies in an object, computed from the layout alone.

Source: spec/kvformat.md sections 3.6 (shards) and 6 (payload order).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat import registry
from kvformat.errors import LayoutError, Reason
from kvformat.key import Shard
from kvformat.layout import Component, Layout
from kvformat.wire import header_nbytes


class ComponentRange(msgspec.Struct, frozen=True):
    """Where one component of one layer lies: ``nbytes`` bytes at ``offset`` of the object."""

    group: int
    layer: int
    component: Component
    offset: int
    nbytes: int


class LayerRange(msgspec.Struct, frozen=True):
    """Where one layer lies: the unit of completeness and of checksums."""

    group: int
    layer: int
    offset: int
    nbytes: int


def head_interval(num_heads: int, num_shards: int, index: int) -> tuple[int, int]:
    """First and last-plus-one head of a head shard. Shards are as even as whole heads allow."""
    return -(-index * num_heads // num_shards), -(-(index + 1) * num_heads // num_shards)


def context_tokens(
    num_tokens: int, num_shards: int, index: int, interleave: int
) -> NDArray[np.int64]:
    """Ascending indices of the tokens of a context shard: runs of ``interleave``, dealt in turn."""
    tokens = np.arange(num_tokens, dtype=np.int64)
    return tokens.compress(tokens // interleave % num_shards == index)


def num_context_tokens(num_tokens: int, num_shards: int, index: int, interleave: int) -> int:
    """How many tokens :func:`context_tokens` gives."""
    rounds, rest = divmod(num_tokens, num_shards * interleave)
    return rounds * interleave + min(max(rest - index * interleave, 0), interleave)


def layer_interval(layout: Layout, group: int, layer_shard: int) -> tuple[int, int]:
    """First and last-plus-one layer, by index in the group, of a layer shard."""
    starts = layout.grid.layer_starts[group]
    is_last = layer_shard + 1 == len(starts)
    stop = len(layout.groups[group].layers) if is_last else starts[layer_shard + 1]
    return starts[layer_shard], stop


def group_bitmap(groups: tuple[int, ...]) -> int:
    """The bitmap of a set of group indices: bit i for group i."""
    return sum(1 << group for group in groups)


def shard_sizes(layout: Layout, component: Component, shard: Shard) -> tuple[int, ...]:
    """``component.byte_sizes`` cut down to one head and context shard, in the same axis order."""
    grid = layout.grid
    start, stop = head_interval(component.num_heads, grid.head_shards, shard.head)
    tokens = num_context_tokens(
        component.num_tokens, grid.context_shards, shard.context, grid.context_interleave
    )
    sizes = dict(zip(component.axes, component.byte_sizes, strict=True))
    # A component without a cut axis has one head or token there: all of it, or nothing.
    sizes[registry.HEAD_AXIS] = stop - start
    sizes[registry.TOKEN_AXIS] = tokens
    present = tuple(sizes[axis] for axis in component.axes)
    whole = (stop > start) and tokens > 0
    return present if whole else tuple(0 for _ in present)


class ObjectMap:
    """All ranges of one object: one entry of ``layout.objects``, in one shard.

    Raises ``LayoutError`` where the layout has no such entry (``layout_objects``), or the shard is
    outside the grid or holds no bytes (``layout_grid``): there is no such object.
    """

    def __init__(self, layout: Layout, object_index: int, shard: Shard) -> None:
        grid = layout.grid
        groups = _object_groups(layout, object_index)
        for name, index, size in (
            ("layer", shard.layer, grid.layer_shards),
            ("head", shard.head, grid.head_shards),
            ("context", shard.context, grid.context_shards),
        ):
            if index >= size:
                raise LayoutError(
                    Reason.LAYOUT_GRID, f"{name} shard {index} of a grid with {size} of them"
                )
        self.layout = layout
        self.object_index = object_index
        self.shard = shard
        self.groups = groups
        self.group_bitmap = group_bitmap(self.groups)
        self.block_size = layout.groups[self.groups[0]].block_size
        #: Per group of the object: (group, first layer, number of layers), as in the header.
        self.spans = tuple(
            (group, first, stop - first)
            for group in self.groups
            for first, stop in [layer_interval(layout, group, shard.layer)]
        )
        self.header_nbytes = header_nbytes([num_layers for _, _, num_layers in self.spans])
        self.layers, self.components = self._ranges()
        self.nbytes = self.header_nbytes + sum(r.nbytes for r in self.layers)
        if self.nbytes == self.header_nbytes:
            raise LayoutError(
                Reason.LAYOUT_GRID,
                f"object {list(self.groups)} has no bytes in shard {shard}: there is none",
            )

    def _ranges(self) -> tuple[tuple[LayerRange, ...], tuple[ComponentRange, ...]]:
        # Layers of a model share their components, so each shape is worked out once.
        nbytes_of: dict[Component, int] = {}
        layers: list[LayerRange] = []
        components: list[ComponentRange] = []
        offset = self.header_nbytes
        for group, first, num_layers in self.spans:
            for layer in range(first, first + num_layers):
                start = offset
                for component in self.layout.groups[group].layers[layer].components:
                    if component not in nbytes_of:
                        sizes = shard_sizes(self.layout, component, self.shard)
                        nbytes_of[component] = prod(sizes) * component.item_nbytes
                    nbytes = nbytes_of[component]
                    components.append(ComponentRange(group, layer, component, offset, nbytes))
                    offset += nbytes
                layers.append(LayerRange(group, layer, start, offset - start))
        return tuple(layers), tuple(components)

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Offsets of ``layers``, as in the header."""
        return np.array([r.offset for r in self.layers], dtype="<u8")

    @cached_property
    def sizes(self) -> NDArray[np.uint64]:
        """Sizes of ``layers`` in bytes, as in the header."""
        return np.array([r.nbytes for r in self.layers], dtype="<u8")


def object_shards(layout: Layout, object_index: int) -> Iterator[Shard]:
    """The shards of an object that hold bytes, ascending: the objects that exist for a block.

    Only shards with bytes are visited: a foreign layout can have 65536 of them, each of components
    that are in few.

    Raises ``LayoutError`` with reason ``layout_objects`` where the layout has no such entry.
    """
    grid = layout.grid
    groups = _object_groups(layout, object_index)
    for layer_shard in range(grid.layer_shards):
        used = {
            component
            for group in groups
            for layer in layout.groups[group].layers[
                slice(*layer_interval(layout, group, layer_shard))
            ]
            for component in layer.components
        }
        # Tokens are dealt in turn, so the context shards with bytes are the first ones, and the
        # longest component of a head shard says how many.
        longest: dict[int, int] = {}
        for component in used:
            heads, tokens = component.num_heads, component.num_tokens
            longest[heads] = max(longest.get(heads, 0), tokens)
        num_tokens = np.zeros(grid.head_shards, np.int64)
        for heads, tokens in longest.items():
            held = _head_shards(heads, grid.head_shards)
            num_tokens[held] = np.maximum(num_tokens[held], tokens)
        for head_shard in np.flatnonzero(num_tokens).tolist():
            runs = -(-int(num_tokens[head_shard]) // grid.context_interleave)
            for context_shard in range(min(runs, grid.context_shards)):
                yield Shard(layer_shard, head_shard, context_shard)


def _object_groups(layout: Layout, object_index: int) -> tuple[int, ...]:
    if not 0 <= object_index < len(layout.objects):
        raise LayoutError(
            Reason.LAYOUT_OBJECTS,
            f"object {object_index} of a layout whose blocks have {len(layout.objects)} of them",
        )
    return layout.objects[object_index]


def _head_shards(num_heads: int, num_shards: int) -> slice | NDArray[np.int64]:
    """The head shards that hold a head: all of them, or the one of each head."""
    if num_heads >= num_shards:
        return slice(None)
    return np.arange(num_heads, dtype=np.int64) * num_shards // num_heads


def object_maps(layout: Layout) -> list[ObjectMap]:
    """The map of every object that a block of this layout can have.

    For layouts of one's own: a foreign one can have 65536 shards, each with all of its components.
    """
    return [
        ObjectMap(layout, object_index, shard)
        for object_index in range(len(layout.objects))
        for shard in object_shards(layout, object_index)
    ]
