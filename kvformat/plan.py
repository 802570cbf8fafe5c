"""Plans: byte ranges between a rank's memory and objects, or between two ranks' memories.

A template is built once from a layout and placements; binding it to block ids is one vector
operation a fragment and gives the nested lists that range calls take. Sizes and offsets are the
same for every block, so their rows are shared, never rebuilt.

Source: spec/kvformat.md section 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat.boxes import Fragments, concatenate, intersect, placement_box, shard_box, split
from kvformat.errors import PlanError, Reason
from kvformat.layout import Layout
from kvformat.objectmap import ObjectMap, object_maps
from kvformat.placement import LayerPlacement, Placement, check_regions, placed_components

Array = NDArray[np.int64]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one call may carry. A row is one block (one key); a range is one piece of a row."""

    max_rows: int = 1024
    max_ranges: int = 65536
    max_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        if min(self.max_rows, self.max_ranges, self.max_nbytes) < 1:
            raise PlanError(Reason.PLAN_LIMIT, f"{self}: every limit is at least 1")


class Ranges(NamedTuple):
    """Nested lists, one row a block: what a store's range calls take after the keys."""

    addresses: list[tuple[int, ...]]
    sizes: list[tuple[int, ...]]
    offsets: list[tuple[int, ...]]


class Batch(NamedTuple):
    """One call's share of a bound template: rows ``rows`` of the block ids, and their ranges."""

    rows: slice
    ranges: Ranges


class RowTemplate:
    """The ranges of one row: some bytes of one object against one rank's memory.

    Arrays are ``[num_ranges]`` int64: ``offsets`` in the object, ``nbytes``, and ``bases`` and
    ``strides``, so that range ``i`` of block ``b`` lies at ``bases[i] + b * strides[i]``.
    """

    def __init__(
        self, bases: Array, strides: Array, offsets: Array, nbytes: Array, num_blocks: int
    ) -> None:
        self.bases, self.strides, self.offsets, self.nbytes = bases, strides, offsets, nbytes
        self.num_blocks = num_blocks
        self.row_nbytes = int(nbytes.sum())
        self._columns = list(zip(bases.tolist(), strides.tolist(), strict=True))
        self._sizes = tuple(nbytes.tolist())
        self._offsets = tuple(offsets.tolist())

    def bind(self, block_ids: Array) -> Ranges:
        """Ranges of the given blocks, one row each.

        Args:
            block_ids: ``[num_rows]`` integers.

        Raises ``PlanError`` with reason ``plan_bounds`` for a block id outside the memory.
        """
        # Narrower integers would wrap when multiplied by a stride.
        block_ids = np.asarray(block_ids, np.int64)
        num_rows = len(block_ids)
        self._check_bounds(block_ids)
        columns = []
        scaled, scaled_by = block_ids, 1
        for base, stride in self._columns:
            if stride != scaled_by:
                scaled, scaled_by = block_ids * stride, stride
            columns.append((scaled + base).tolist())
        addresses: list[tuple[int, ...]] = (
            list(zip(*columns, strict=True)) if columns else [()] * num_rows
        )
        return Ranges(addresses, [self._sizes] * num_rows, [self._offsets] * num_rows)

    def batches(self, block_ids: Array, limits: Limits) -> Iterator[Batch]:
        """The same ranges in calls that stay within all three limits at once.

        A range alone over ``max_nbytes`` raises ``PlanError``: give ``max_transfer_nbytes`` when
        the template is built.
        """
        for columns in self._column_slices(limits):
            part = self if len(self._sizes) == columns.stop - columns.start else self._cut(columns)
            num_ranges = max(1, columns.stop - columns.start)
            rows = min(
                limits.max_rows,
                limits.max_ranges // num_ranges,
                limits.max_nbytes // max(1, part.row_nbytes),
            )
            for start in range(0, len(block_ids), rows):
                chunk = slice(start, min(start + rows, len(block_ids)))
                yield Batch(chunk, part.bind(block_ids[chunk]))

    def _column_slices(self, limits: Limits) -> Iterator[slice]:
        start = total = 0
        for index, nbytes in enumerate(self._sizes):
            if nbytes > limits.max_nbytes:
                raise PlanError(
                    Reason.PLAN_LIMIT,
                    f"a range of {nbytes} bytes in a call of at most {limits.max_nbytes}",
                )
            if total + nbytes > limits.max_nbytes or index - start == limits.max_ranges:
                yield slice(start, index)
                start, total = index, 0
            total += nbytes
        yield slice(start, len(self._sizes))

    def _cut(self, columns: slice) -> RowTemplate:
        return RowTemplate(
            self.bases[columns],
            self.strides[columns],
            self.offsets[columns],
            self.nbytes[columns],
            self.num_blocks,
        )

    def _check_bounds(self, block_ids: Array) -> None:
        if len(block_ids) and not (
            np.minimum.reduce(block_ids) >= 0 and np.maximum.reduce(block_ids) < self.num_blocks
        ):
            raise PlanError(
                Reason.PLAN_BOUNDS,
                f"block ids {int(block_ids.min())}..{int(block_ids.max())} leave the "
                f"{self.num_blocks} blocks of the memory",
            )


class LayerTemplate(RowTemplate):
    """The ranges of one (group, layer) of one object.

    ``range_index`` is the layer's entry in the header's range table; ``is_whole`` tells that the
    ranges cover all bytes of that entry, so that its checksum can be computed.
    """

    def __init__(
        self,
        object_map: ObjectMap,
        range_index: int,
        fragments: Fragments,
        num_blocks: int,
    ) -> None:
        super().__init__(
            fragments.source,
            fragments.source_strides,
            fragments.target,
            fragments.nbytes,
            num_blocks,
        )
        layer_range = object_map.layers[range_index]
        self.range_index = range_index
        self.group, self.layer = layer_range.group, layer_range.layer
        self.is_whole = self.row_nbytes == layer_range.nbytes
        self.fragments = fragments


class RangeTemplate:
    """All ranges of one object against one rank's memory, layer by layer.

    ``layers`` holds the layers that both have bytes of, in the order of the header's range table.
    Ranges of more than ``max_transfer_nbytes`` are split.

    Raises ``PlanError`` where the placement doesn't fit the layout, or leaves its regions.
    """

    def __init__(
        self, object_map: ObjectMap, placement: Placement, *, max_transfer_nbytes: int | None = None
    ) -> None:
        layout = object_map.layout
        self.object_map = object_map
        self._max_nbytes = max_transfer_nbytes
        placed = {(layer.group, layer.layer): layer for layer in placement.layers}
        ranges = {(r.group, r.layer, r.component.name): r for r in object_map.components}
        layers = []
        num_missing = num_cut = 0
        for index, layer_range in enumerate(object_map.layers):
            place = placed.get((layer_range.group, layer_range.layer))
            if place is None:
                num_missing += layer_range.nbytes > 0
                continue
            parts = []
            for component, memory in placed_components(layout, place):
                target = ranges[layer_range.group, layer_range.layer, component.name]
                part = intersect(
                    component,
                    placement_box(component, memory, placement),
                    shard_box(layout, component, object_map.shard),
                )
                num_cut += 0 < int(part.nbytes.sum()) < target.nbytes
                parts.append(part.shifted(memory.base_address, target.offset))
            if not any(len(part.nbytes) for part in parts):
                continue
            fragments = concatenate(parts)
            check_regions(
                fragments.source, fragments.source_strides, fragments.nbytes, place, placement
            )
            layers.append(
                LayerTemplate(object_map, index, self._split(fragments), place.num_blocks)
            )
        self.layers = tuple(layers)
        #: The placement lacks whole layers of the object, or holds a part of some component's
        #: bytes: its edge runs through the object, not along a replica.
        self.is_cut = bool(num_missing or num_cut)

    @property
    def is_whole(self) -> bool:
        """The rank holds all of the object: it can write it alone."""
        return sum(layer.row_nbytes for layer in self.layers) == sum(
            layer.nbytes for layer in self.object_map.layers
        )

    def rows(self) -> RowTemplate:
        """All layers as one row, neighbouring ranges joined: for calls that move whole objects."""
        fragments = self._split(concatenate([layer.fragments for layer in self.layers]))
        return RowTemplate(
            fragments.source,
            fragments.source_strides,
            fragments.target,
            fragments.nbytes,
            min((layer.num_blocks for layer in self.layers), default=0),
        )

    def _split(self, fragments: Fragments) -> Fragments:
        return split(fragments, self._max_nbytes) if self._max_nbytes else fragments


def plan_put(
    layout: Layout, placement: Placement, *, max_transfer_nbytes: int | None = None
) -> list[RangeTemplate]:
    """Templates of the objects that this rank writes: those that it holds whole.

    Where each component is held whole or not at all, as by a rank with its own heads of K and a
    replica of what has no heads, an object that is not whole here is another rank's.

    Raises ``PlanError`` with reason ``plan_coverage`` for an object that the rank's box cuts
    through: an object has one writer.
    """
    templates = _plan(layout, placement, max_transfer_nbytes)
    for template in templates:
        if template.is_cut:
            object_map = template.object_map
            raise PlanError(
                Reason.PLAN_COVERAGE,
                f"the rank holds only a part of object {list(object_map.groups)} in shard "
                f"{object_map.shard}: cut the shard grid at least as finely as the writers' ranks",
            )
    return [template for template in templates if template.is_whole]


def plan_get(
    layout: Layout, placement: Placement, *, max_transfer_nbytes: int | None = None
) -> list[RangeTemplate]:
    """Templates of the objects that hold bytes of this rank's box: together they fill it once.

    Raises ``PlanError`` with reason ``plan_coverage`` should they not.
    """
    templates = _plan(layout, placement, max_transfer_nbytes)
    filled = sum(layer.row_nbytes for template in templates for layer in template.layers)
    needed = sum(
        placement_box(component, memory, placement).nbytes(component)
        for layer in placement.layers
        for component, memory in placed_components(layout, layer)
    )
    if filled != needed:
        raise PlanError(
            Reason.PLAN_COVERAGE, f"objects give {filled} bytes of the rank's {needed} a block"
        )
    return templates


def _plan(
    layout: Layout, placement: Placement, max_transfer_nbytes: int | None
) -> list[RangeTemplate]:
    _check_placement(layout, placement)
    templates = (
        RangeTemplate(object_map, placement, max_transfer_nbytes=max_transfer_nbytes)
        for object_map in object_maps(layout)
    )
    return [template for template in templates if template.layers]


def _check_placement(layout: Layout, placement: Placement) -> None:
    """Every layer fits the layout, also those of which a plan moves nothing."""
    for layer in placement.layers:
        for component, memory in placed_components(layout, layer):
            placement_box(component, memory, placement)


class TransferTemplate:
    """Ranges from one rank's memory to another's, for one (group, layer) that both have."""

    def __init__(
        self, source: LayerPlacement, target: LayerPlacement, fragments: Fragments
    ) -> None:
        self.group, self.layer = source.group, source.layer
        self._source = RowTemplate(
            fragments.source,
            fragments.source_strides,
            fragments.target,
            fragments.nbytes,
            source.num_blocks,
        )
        self._target = RowTemplate(
            fragments.target,
            fragments.target_strides,
            fragments.source,
            fragments.nbytes,
            target.num_blocks,
        )
        self.row_nbytes = self._source.row_nbytes

    def bind(
        self, source_blocks: Array, target_blocks: Array
    ) -> tuple[list[int], list[int], list[int]]:
        """Three flat lists: source addresses, target addresses, sizes in bytes.

        Args:
            source_blocks, target_blocks: ``[num_blocks]`` int64, block ids on either side.

        Raises ``PlanError`` for arrays of different length or block ids outside the memory.
        """
        if len(source_blocks) != len(target_blocks):
            raise PlanError(
                Reason.PLAN_BOUNDS,
                f"{len(source_blocks)} source blocks, {len(target_blocks)} target blocks",
            )
        source, target = self._source.bind(source_blocks), self._target.bind(target_blocks)
        return (
            list(chain.from_iterable(source.addresses)),
            list(chain.from_iterable(target.addresses)),
            list(chain.from_iterable(source.sizes)),
        )


def plan_transfer(
    layout: Layout,
    source: Placement,
    target: Placement,
    *,
    max_transfer_nbytes: int | None = None,
) -> list[TransferTemplate]:
    """Templates for every layer that both ranks have bytes of, in the order of ``source.layers``.

    ``layout`` is either side's: their content fingerprints must be equal.
    """
    _check_placement(layout, source)
    _check_placement(layout, target)
    theirs = {(layer.group, layer.layer): layer for layer in target.layers}
    templates = []
    for ours in source.layers:
        other = theirs.get((ours.group, ours.layer))
        if other is None:
            continue
        fragments = concatenate(
            [
                intersect(
                    component,
                    placement_box(component, our_memory, source),
                    placement_box(component, their_memory, target),
                ).shifted(our_memory.base_address, their_memory.base_address)
                for (component, our_memory), (_, their_memory) in zip(
                    placed_components(layout, ours), placed_components(layout, other), strict=True
                )
            ]
        )
        check_regions(fragments.source, fragments.source_strides, fragments.nbytes, ours, source)
        check_regions(fragments.target, fragments.target_strides, fragments.nbytes, other, target)
        if len(fragments.nbytes):
            if max_transfer_nbytes:
                fragments = split(fragments, max_transfer_nbytes)
            templates.append(TransferTemplate(ours, other, fragments))
    return templates
