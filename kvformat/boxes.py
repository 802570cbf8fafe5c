"""The one mechanism: a component's bytes are a box, and a transfer is where two boxes meet.

A box says which heads and tokens of a component some bytes hold, and by which strides. An object
shard is a box, a rank's memory is a box, and :func:`intersect` of any two of them gives the
fragments to move. Tensor, pipeline and context parallel sizes that differ, replication, and other
axis orders are all just other boxes.

Source: spec/kvformat.md section 7.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat import registry
from kvformat.errors import PlanError, Reason
from kvformat.key import Shard
from kvformat.layout import Component, Layout
from kvformat.objectmap import context_tokens, head_interval, shard_sizes
from kvformat.placement import ADDRESS_LIMIT, ComponentPlacement, Placement

Indices = NDArray[np.int64]


class Box(NamedTuple):
    """Part of a component, in every block, and where its bytes are.

    ``heads`` is first and last-plus-one; ``tokens`` is (context shards, index, interleave) as in
    :func:`~kvformat.objectmap.context_tokens`. ``strides`` has one entry an axis of the component,
    ``block_stride`` leads from one block to the next; both in bytes. An object holds one block: its
    block stride is 0.
    """

    heads: tuple[int, int]
    tokens: tuple[int, int, int]
    strides: tuple[int, ...]
    block_stride: int

    def indices(self, component: Component) -> tuple[Indices, ...]:
        """The ascending indices held along each axis; all empty where the box holds nothing."""
        heads = np.arange(*self.heads)
        tokens = context_tokens(component.num_tokens, *self.tokens)
        # A component without a cut axis counts as one index of it: held, or the box is empty.
        empty = not (len(heads) and len(tokens))
        cut = {registry.HEAD_AXIS: heads, registry.TOKEN_AXIS: tokens}
        return tuple(
            np.arange(0) if empty else cut.get(axis, np.arange(size))
            for axis, size in zip(component.axes, component.byte_sizes, strict=True)
        )

    def nbytes(self, component: Component) -> int:
        """Bytes of one block's part."""
        return prod(map(len, self.indices(component))) * component.item_nbytes


class Fragments(NamedTuple):
    """Runs of bytes that lie together on both sides, in the component's own order.

    Five int64 arrays ``[num_fragments]``: where block 0's run starts on either side, how far apart
    the runs of neighbouring blocks are, and the run's size, all in bytes.
    """

    source: Indices
    source_strides: Indices
    target: Indices
    target_strides: Indices
    nbytes: Indices

    def shifted(self, source: int, target: int) -> Fragments:
        """The same runs, with both sides moved by so many bytes."""
        return self._replace(source=self.source + source, target=self.target + target)


def shard_box(layout: Layout, component: Component, shard: Shard) -> Box:
    """A component's part of an object: packed, row-major in the component's axis order."""
    grid = layout.grid
    strides = []
    stride = component.item_nbytes
    for size in reversed(shard_sizes(layout, component, shard)):
        strides.append(stride)
        stride *= size
    return Box(
        head_interval(component.num_heads, grid.head_shards, shard.head),
        (grid.context_shards, shard.context, grid.context_interleave),
        tuple(reversed(strides)),
        0,
    )


def placement_box(component: Component, placed: ComponentPlacement, placement: Placement) -> Box:
    """A component's part of a rank's memory. Raises ``PlanError`` where the two don't fit."""
    if len(placed.axis_strides_nbytes) != len(component.axes):
        raise PlanError(
            Reason.PLAN_PLACEMENT,
            f"component {component.name!r} has axes {component.axes}, the placement "
            f"{len(placed.axis_strides_nbytes)} strides",
        )
    if not 0 <= placed.head_start < placed.head_stop <= component.num_heads:
        raise PlanError(
            Reason.PLAN_PLACEMENT,
            f"component {component.name!r}: heads {placed.head_start}..{placed.head_stop} of "
            f"{component.num_heads}",
        )
    reach = placed.base_address + sum(
        abs(stride) * (size - 1)
        for stride, size in zip(placed.axis_strides_nbytes, component.byte_sizes, strict=True)
    )
    if (
        min(placed.base_address, placed.block_stride_nbytes) < 0
        or max(reach, placed.block_stride_nbytes) >= ADDRESS_LIMIT
    ):
        raise PlanError(
            Reason.PLAN_PLACEMENT,
            f"component {component.name!r}: base address {placed.base_address}, block stride "
            f"{placed.block_stride_nbytes} and axis strides {placed.axis_strides_nbytes} are not "
            f"those of memory",
        )
    return Box(
        (placed.head_start, placed.head_stop),
        (placement.context_shards, placement.context_index, placement.context_interleave),
        placed.axis_strides_nbytes,
        placed.block_stride_nbytes,
    )


@lru_cache(maxsize=1024)  # the layers of a model share their boxes
def intersect(component: Component, source: Box, target: Box) -> Fragments:
    """The fragments of the elements that both boxes hold, joined wherever both sides touch."""
    zero = np.zeros(1, np.int64)
    fragments = Fragments(zero, zero, zero, zero, np.full(1, component.item_nbytes))
    # From the innermost axis outwards, joining at once, so that what is contiguous stays one
    # fragment and nothing is ever as long as the number of elements.
    held = list(zip(source.indices(component), target.indices(component), strict=True))
    for axis in reversed(range(len(held))):
        _common, at_source, at_target = np.intersect1d(
            *held[axis], assume_unique=True, return_indices=True
        )
        repeats = np.tile(np.arange(len(fragments.nbytes)), len(at_source))
        fragments = join(
            Fragments(
                np.add.outer(at_source * source.strides[axis], fragments.source).ravel(),
                fragments.source_strides[repeats],
                np.add.outer(at_target * target.strides[axis], fragments.target).ravel(),
                fragments.target_strides[repeats],
                fragments.nbytes[repeats],
            )
        )
    num_fragments = len(fragments.nbytes)
    return fragments._replace(
        source_strides=np.full(num_fragments, source.block_stride),
        target_strides=np.full(num_fragments, target.block_stride),
    )


def concatenate(parts: Sequence[Fragments]) -> Fragments:
    """Several lists as one, in order, neighbours joined. No parts give no fragments."""
    if not parts:
        none = np.zeros(0, np.int64)
        return Fragments(none, none, none, none, none)
    return join(Fragments(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def join(fragments: Fragments) -> Fragments:
    """Neighbours in the list that touch on both sides, in every block, made one."""
    source, source_strides, target, target_strides, nbytes = fragments
    if len(nbytes) < 2:
        return fragments
    apart = (
        (source[1:] != source[:-1] + nbytes[:-1])
        | (target[1:] != target[:-1] + nbytes[:-1])
        | (source_strides[1:] != source_strides[:-1])
        | (target_strides[1:] != target_strides[:-1])
    )
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(apart) + 1))
    return Fragments(
        source[starts],
        source_strides[starts],
        target[starts],
        target_strides[starts],
        np.add.reduceat(nbytes, starts),
    )


def split(fragments: Fragments, max_nbytes: int) -> Fragments:
    """Fragments of more than ``max_nbytes``, cut into pieces of at most that."""
    counts = -(-fragments.nbytes // max_nbytes)
    which = np.repeat(np.arange(len(counts)), counts)
    pieces = Fragments(*(column[which] for column in fragments))
    firsts = np.cumsum(counts) - counts
    skipped = (np.arange(len(which)) - firsts[which]) * max_nbytes
    return pieces._replace(
        source=pieces.source + skipped,
        target=pieces.target + skipped,
        nbytes=np.minimum(pieces.nbytes - skipped, max_nbytes),
    )
