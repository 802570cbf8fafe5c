"""Placements: how one rank's memory holds its own box of every block.

Source: spec/kvformat.md section 7.1.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat import registry
from kvformat.errors import PlanError, Reason
from kvformat.layout import Component, Layout

Array = NDArray[np.int64]

#: No address, stride or extent reaches it, so that no int64 sum of a few of them can wrap and
#: come back inside a region: placements come from peers, too.
ADDRESS_LIMIT: Final = 1 << 61


class ComponentPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One component of one layer in one rank's memory.

    ``base_address`` is that of the first element of block 0 that this rank holds.
    ``axis_strides_nbytes`` gives the bytes from one index to the next for each axis of the
    component, in the component's own order, whatever the order in memory. The rank holds the heads
    ``head_start <= h < head_stop`` of the whole model, the first of them at the base address.
    """

    component: str
    base_address: int
    block_stride_nbytes: int
    axis_strides_nbytes: tuple[int, ...]
    head_start: int = 0
    head_stop: int = 1


class LayerPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """One layer in one rank's memory; ``num_blocks`` bounds the block ids of its group."""

    group: int
    layer: int
    num_blocks: int
    components: tuple[ComponentPlacement, ...]


class Region(msgspec.Struct, frozen=True):
    """Memory that belongs to the cache: nothing outside a region is ever read or written."""

    address: int
    nbytes: int


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of one rank's cache memory.

    A rank that holds every token of its blocks has ``context_shards`` 1; else it holds the tokens
    of context shard ``context_index``, dealt in runs of ``context_interleave``, one after the
    other.
    """

    layers: tuple[LayerPlacement, ...]
    regions: tuple[Region, ...]
    context_shards: int = 1
    context_index: int = 0
    context_interleave: int = 1

    def __post_init__(self) -> None:
        if not (
            0 <= self.context_index < self.context_shards <= registry.MAX_SHARDS
            and 0 < self.context_interleave < 1 << 32
        ):
            raise PlanError(
                Reason.PLAN_PLACEMENT,
                f"context shard {self.context_index} of {self.context_shards}, runs of "
                f"{self.context_interleave}",
            )
        seen: set[tuple[int, int]] = set()
        for layer in self.layers:
            if (layer.group, layer.layer) in seen:
                raise PlanError(
                    Reason.PLAN_PLACEMENT,
                    f"group {layer.group} layer {layer.layer} is placed twice",
                )
            seen.add((layer.group, layer.layer))


def placed_components(
    layout: Layout, place: LayerPlacement
) -> list[tuple[Component, ComponentPlacement]]:
    """A layer's components beside their placements, matched by name, in the layout's order.

    Raises ``PlanError`` that names what one side has and the other hasn't, or blocks that are none
    or reach too far.
    """
    if not (
        0 <= place.group < len(layout.groups)
        and 0 <= place.layer < len(layout.groups[place.group].layers)
    ):
        raise PlanError(
            Reason.PLAN_PLACEMENT, f"the layout has no group {place.group} layer {place.layer}"
        )
    layer = layout.groups[place.group].layers[place.layer]
    memories = {memory.component: memory for memory in place.components}
    names = [component.name for component in layer.components]
    if len(memories) != len(place.components) or sorted(memories) != sorted(names):
        raise PlanError(
            Reason.PLAN_PLACEMENT,
            f"layer {layer.name!r} has components {names} in the layout, "
            f"{[memory.component for memory in place.components]} in memory",
        )
    extent = (place.num_blocks - 1) * max(m.block_stride_nbytes for m in place.components)
    if place.num_blocks < 1 or extent >= ADDRESS_LIMIT:
        raise PlanError(
            Reason.PLAN_PLACEMENT,
            f"layer {layer.name!r}: {place.num_blocks} blocks over {extent} bytes",
        )
    return [(component, memories[component.name]) for component in layer.components]


def check_regions(
    bases: Array, strides: Array, nbytes: Array, place: LayerPlacement, placement: Placement
) -> None:
    """Every range of every block lies in one of the placement's regions, or ``PlanError``.

    Stores read and write whatever address they are given, so this is the only place where a wrong
    stride or address can be noticed.
    """
    ends = bases + (place.num_blocks - 1) * strides + nbytes
    inside = np.zeros(len(bases), np.bool_)
    for region in placement.regions:
        inside |= (bases >= region.address) & (ends <= region.address + region.nbytes)
    if not inside.all():
        raise PlanError(
            Reason.PLAN_BOUNDS,
            f"group {place.group} layer {place.layer}: {place.num_blocks} blocks leave the "
            "registered memory",
        )
