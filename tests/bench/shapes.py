"""Layouts of the sizes that models have, and memory for them that is only addresses."""

from __future__ import annotations

from kvformat import (
    Component,
    ComponentPlacement,
    Group,
    HashRecipe,
    Identity,
    Layer,
    LayerPlacement,
    Layout,
    Placement,
    Region,
    ShardGrid,
)
from kvformat.components import indexer, latent_attention, split_attention

BLOCK_SIZE = 128
MLA = latent_attention(
    latent_size=512, rope_size=64, block_size=BLOCK_SIZE, dtype="bfloat16", fused=True
)
GQA = split_attention(num_kv_heads=8, head_size=128, block_size=BLOCK_SIZE, dtype="bfloat16")
SPARSE = (
    *latent_attention(
        latent_size=512, rope_size=64, block_size=BLOCK_SIZE, dtype="bfloat16", fused=False
    ),
    *indexer(head_size=128, block_size=BLOCK_SIZE, dtype="bfloat16"),
)


def model(num_layers: int, components: tuple[Component, ...], head_shards: int = 1) -> Layout:
    """A model of equal layers in one group."""
    layers = tuple(
        Layer(name=f"model.layers.{i}.self_attn.attn", components=components)
        for i in range(num_layers)
    )
    return Layout(
        identity=Identity(
            tenant="default",
            model="org/model",
            weights="0123456789abcdef",
            config={f"option.{i}": f"value {i}" for i in range(40)},
        ),
        hash=HashRecipe(algorithm="sha256_cbor", seed="00" * 32, block_size=128, digest_nbytes=32),
        groups=(Group(kind="full_attention", block_size=BLOCK_SIZE, layers=layers),),
        objects=((0,),),
        grid=ShardGrid(head_shards=head_shards, layer_starts=((0,),)),
    )


def placement(layout: Layout, num_blocks: int, heads: tuple[int, int] | None = None) -> Placement:
    """Every layer with each component in an array of its own: ``[blocks, *axes]``, packed."""
    address = 1 << 40
    layers = []
    for index, layer in enumerate(layout.groups[0].layers):
        components = []
        for c in layer.components:
            start, stop = (0, c.num_heads) if heads is None else heads
            strides = []
            stride = c.item_nbytes
            for axis, size in zip(reversed(c.axes), reversed(c.byte_sizes), strict=True):
                strides.append(stride)
                stride *= stop - start if axis == "head" else size
            components.append(
                ComponentPlacement(
                    component=c.name,
                    base_address=address,
                    block_stride_nbytes=stride,
                    axis_strides_nbytes=tuple(reversed(strides)),
                    head_start=start,
                    head_stop=stop,
                )
            )
            address += num_blocks * stride + 4096
        layers.append(
            LayerPlacement(
                group=0, layer=index, num_blocks=num_blocks, components=tuple(components)
            )
        )
    return Placement(layers=tuple(layers), regions=(Region(1 << 40, address - (1 << 40)),))
