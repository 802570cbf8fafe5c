"""Registered KV tensors, turned into placements: where one rank holds its part of each block.

The order of a tensor's axes is the engine's word, which the layout's sizes must bear out; any other
shape is refused, never guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvformat.layout import Component, Layout
from kvformat.placement import ComponentPlacement, LayerPlacement, Placement, Region
from kvformat_connector.engine.npu import NPU_PACKING, place_layer, registered_tensors
from kvformat_connector.engine.ranks import Ranks, local_heads
from kvformat_connector.engine.refusal import refuse


class LayerAddress(msgspec.Struct, frozen=True):
    """Where a layer is in a layout: the group, and the layer's index in it."""

    group: int
    layer: int


def is_unused(block_pool: Any) -> bool:
    """Whether no request holds blocks of a ``BlockPool``, which is when its prefix cache can be
    reset (``BlockPool.reset_prefix_cache``). The null block is always taken."""
    return int(block_pool.num_gpu_blocks - block_pool.get_num_free_blocks()) == 1


def layer_addresses(layout: Layout) -> dict[str, LayerAddress]:
    """The address of each layer by the engine's name for it."""
    return {
        layer.name: LayerAddress(group_index, layer_index)
        for group_index, group in enumerate(layout.groups)
        for layer_index, layer in enumerate(group.layers)
    }


def derive_placement(
    layout: Layout, kv_caches: Mapping[str, Any], ranks: Ranks | None = None
) -> Placement:
    """Where registered KV tensors hold the layout's blocks.

    Args:
        layout: the engine's.
        kv_caches: per layer name a tensor ``[num_blocks, num_kv_heads, block_size, channels]``
            with K and V side by side in the last axis; recurrent state ``[num_blocks, 1, 1,
            nbytes]``; on an NPU what :mod:`kvformat_connector.engine.npu` says.
        ranks: this process; None is the only one.

    Raises ``ConfigError`` with reason ``config_unsupported`` for a tensor that is not what the
    layout says.
    """
    ranks = ranks or Ranks()
    is_npu = layout.identity.config.get("kv_packing") == NPU_PACKING
    regions: dict[int, Region] = {}
    placed = []
    for name, address in layer_addresses(layout).items():
        if not ranks.has_layer(name):
            continue
        if name not in kv_caches:
            refuse("kv cache", f"no tensor for layer {name}", "the engine didn't register it")
        group = layout.groups[address.group]
        described = group.layers[address.layer].components
        tensors = registered_tensors(name, kv_caches)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes())
        if is_npu:
            start, stop = local_heads(described[0], ranks)
            num_blocks, components = place_layer(
                name,
                described,
                tensors,
                block_size=group.block_size,
                head_start=start,
                head_stop=stop,
            )
        elif len(tensors) != 1:
            refuse(f"kv cache of layer {name}", f"{len(tensors)} tensors", "expected one")
        else:
            num_blocks = tensors[0].shape[0]
            components = (_place(name, described[0], tensors[0], group.block_size, ranks),)
        placed.append(
            LayerPlacement(
                group=address.group,
                layer=address.layer,
                num_blocks=num_blocks,
                components=components,
            )
        )
    return Placement(layers=tuple(placed), regions=tuple(regions.values()))


def _place(
    name: str, described: Component, tensor: Any, block_size: int, ranks: Ranks
) -> ComponentPlacement:
    start, stop = local_heads(described, ranks)
    strides = [stride * tensor.element_size() for stride in tensor.stride()]
    axes = _axes_of(described, tensor, stop - start, block_size)
    if axes is None or strides[-1] != tensor.element_size():
        sizes = dict(zip(described.axes, described.byte_sizes, strict=True))
        refuse(
            f"kv cache tensor of layer {name}",
            f"{tuple(tensor.shape)} of {tensor.element_size()} bytes with strides "
            f"{tuple(tensor.stride())}",
            f"expected component {described.name!r}: [num_blocks, {stop - start} heads, "
            f"{block_size} tokens, channels] with items of {described.item_nbytes} bytes, rows "
            f"without gaps, and in a block of the whole model {sizes}",
        )
    by_axis = {axis: strides[dim] for axis, dim in axes.items()}
    if "packed" in described.axes:
        sizes = dict(zip(described.axes, described.byte_sizes, strict=True))
        by_axis["packed"] = described.item_nbytes
        by_axis["kv"] = sizes["packed"] * described.item_nbytes
    return ComponentPlacement(
        component=described.name,
        base_address=tensor.data_ptr(),
        block_stride_nbytes=strides[0],
        axis_strides_nbytes=tuple(by_axis[axis] for axis in described.axes),
        head_start=start,
        head_stop=stop,
    )


def _axes_of(
    described: Component, tensor: Any, num_heads: int, block_size: int
) -> dict[str, int] | None:
    """The tensor's dimension of each axis, or None where the tensor is not the component."""
    shape = tuple(tensor.shape)
    if len(shape) != 4:
        return None
    sizes = dict(zip(described.axes, described.byte_sizes, strict=True))
    if "byte" in sizes:
        fits = shape[1:3] == (1, 1) and shape[3] * tensor.element_size() == sizes["byte"]
        return {"head": 1, "byte": 3} if fits else None
    if tensor.element_size() != described.item_nbytes:
        return None
    if "packed" in sizes:
        channels, rest = divmod(2 * sizes["packed"], block_size)
        fits = rest == 0 and shape[1:] == (num_heads, block_size, channels)
        # A head's planes are one run: rows of tokens that lie apart would cut through them.
        return {"head": 1} if fits and tensor.stride()[2] == channels else None
    fits = shape[1:] == (num_heads, block_size, sizes["channel"])
    return {"head": 1, "token": 2, "channel": 3} if fits else None
