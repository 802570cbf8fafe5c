"""Layouts of every kind of KV cache in use, small enough to move in a test."""

from __future__ import annotations

from collections.abc import Sequence

from kvformat import Component, Group, HashRecipe, Identity, Layer, Layout, ShardGrid, component
from kvformat.components import (
    attention_scales,
    fused_attention,
    indexer,
    latent_attention,
    recurrent_state,
    split_attention,
)

BLOCK_SIZE = 16

IDENTITY = Identity(
    tenant="acme",
    model="org/model-7b",
    weights="sha256:5a0f",
    config={"kv_cache_dtype": "bfloat16", "rope_theta": 10000, "tied": True},
)
HASH = HashRecipe(algorithm="sha256_cbor", seed="00" * 32, block_size=BLOCK_SIZE, digest_nbytes=32)


def group(
    components: tuple[Component, ...],
    num_layers: int = 2,
    *,
    kind: str = "full_attention",
    block_size: int = BLOCK_SIZE,
    window: int = 0,
    prefix: str = "layers",
) -> Group:
    """A group of equal layers."""
    return Group(
        kind=kind,
        block_size=block_size,
        window=window,
        layers=tuple(Layer(name=f"{prefix}.{i}", components=components) for i in range(num_layers)),
    )


def layout(
    groups: Sequence[Group],
    *,
    objects: tuple[tuple[int, ...], ...] | None = None,
    head_shards: int = 1,
    context_shards: int = 1,
    context_interleave: int = 1,
    layer_starts: tuple[tuple[int, ...], ...] | None = None,
    identity: Identity = IDENTITY,
    hash_recipe: HashRecipe = HASH,
) -> Layout:
    """A layout; by default each group is an object of its own, and nothing is cut."""
    return Layout(
        identity=identity,
        hash=hash_recipe,
        groups=tuple(groups),
        objects=tuple((i,) for i in range(len(groups))) if objects is None else objects,
        grid=ShardGrid(
            head_shards=head_shards,
            context_shards=context_shards,
            context_interleave=context_interleave,
            layer_starts=((0,),) * len(groups) if layer_starts is None else layer_starts,
        ),
    )


def attention(num_kv_heads: int = 8, head_size: int = 4, **options: object) -> Group:
    """Split K and V in bfloat16."""
    return group(
        split_attention(
            num_kv_heads=num_kv_heads, head_size=head_size, block_size=BLOCK_SIZE, dtype="bfloat16"
        ),
        **options,  # type: ignore[arg-type]
    )


def _pair(builder, **options: object) -> tuple[Component, ...]:  # type: ignore[no-untyped-def]
    return builder(num_kv_heads=4, head_size=6, block_size=BLOCK_SIZE, **options)


_MLA = latent_attention(
    latent_size=12, rope_size=4, block_size=BLOCK_SIZE, dtype="bfloat16", fused=False
)
_FP8_MLA = latent_attention(
    latent_size=12, rope_size=4, block_size=BLOCK_SIZE, dtype="float8_e4m3fn", fused=True
)
_GQA = _pair(split_attention, dtype="bfloat16")

#: Kind of model -> its groups, and which of them share an object.
MODELS: dict[str, tuple[list[Group], tuple[tuple[int, ...], ...]]] = {
    "gqa split HND": ([group(_GQA)], ((0,),)),
    "gqa split NHD": ([group(_pair(split_attention, dtype="bfloat16", order="NHD"))], ((0,),)),
    "gqa fused HND": ([group(_pair(fused_attention, dtype="float16"))], ((0,),)),
    "gqa fused NHD": ([group(_pair(fused_attention, dtype="float16", order="NHD"))], ((0,),)),
    "k and v of different size": (
        [group(_pair(split_attention, dtype="bfloat16", head_size_v=2))],
        ((0,),),
    ),
    "mla": ([group(_MLA, 3)], ((0,),)),
    "mla fused fp8": ([group(_FP8_MLA, 3)], ((0,),)),
    "sparse with indexer and scales": (
        [
            group(_MLA, 2),
            group(
                indexer(
                    head_size=8, block_size=BLOCK_SIZE, dtype="float8_e4m3fn", scale_dtype="float32"
                ),
                2,
                prefix="indexers",
            ),
        ],
        ((0, 1),),
    ),
    "sparse in one group": (
        [
            group(
                (
                    *_FP8_MLA,
                    component("latent_scale", "float32", token=BLOCK_SIZE),
                    *indexer(head_size=8, block_size=BLOCK_SIZE, dtype="bfloat16"),
                )
            )
        ],
        ((0,),),
    ),
    "sliding window beside full": (
        [group(_GQA), group(_GQA, 3, kind="sliding_window", window=128, prefix="local")],
        ((0,), (1,)),
    ),
    "chunked local beside full": (
        [group(_GQA), group(_GQA, 3, kind="chunked_local", window=8192, prefix="local")],
        ((0,), (1,)),
    ),
    "draft layers": (
        [
            Group(
                kind="full_attention",
                block_size=BLOCK_SIZE,
                layers=(
                    *group(_GQA, 2).layers,
                    Layer(
                        name="mtp.0",
                        components=split_attention(
                            num_kv_heads=2, head_size=10, block_size=BLOCK_SIZE, dtype="bfloat16"
                        ),
                    ),
                ),
            )
        ],
        ((0,),),
    ),
    "recurrent hybrid": (
        [
            attention(4, 4, num_layers=1, block_size=BLOCK_SIZE),
            group(
                recurrent_state(4096, num_heads=8),
                3,
                kind="recurrent_state",
                block_size=BLOCK_SIZE * 4,
                prefix="mamba",
            ),
        ],
        ((0,), (1,)),
    ),
    "two recurrent states": (
        [
            group(
                (
                    component("conv_state", "bfloat16", channel=3, head=8, byte=5),
                    component("ssm_state", "float32", head=4, channel=6, state=2),
                ),
                2,
                kind="recurrent_state",
                block_size=BLOCK_SIZE * 2,
            )
        ],
        ((0,),),
    ),
    "fp8 with scales": (
        [
            group(
                (
                    *_pair(split_attention, dtype="float8_e5m2"),
                    *attention_scales(("k", "v"), num_kv_heads=4, block_size=BLOCK_SIZE),
                )
            )
        ],
        ((0,),),
    ),
    "int8 with one scale a block": (
        [
            group(
                (
                    *_pair(split_attention, dtype="int8"),
                    component("k_scale", "float32", channel=1),
                    component("v_scale", "float32", channel=1),
                )
            )
        ],
        ((0,),),
    ),
    "int4": ([group(_pair(split_attention, dtype="int4"))], ((0,),)),
    "head sizes and block sizes that differ": (
        [
            attention(2, 8, num_layers=2),
            group(
                split_attention(num_kv_heads=1, head_size=16, block_size=64, dtype="bfloat16"),
                1,
                block_size=64,
                kind="sliding_window",
                window=512,
                prefix="wide",
            ),
        ],
        ((0,), (1,)),
    ),
    "compressed tokens": (
        [
            group(
                (
                    component("latent", "bfloat16", token=BLOCK_SIZE // 4, channel=8),
                    component("rope", "bfloat16", token=BLOCK_SIZE, channel=4),
                )
            )
        ],
        ((0,),),
    ),
}


def model(name: str, **grid: object) -> Layout:
    """The layout of one of :data:`MODELS`."""
    groups, objects = MODELS[name]
    return layout(groups, objects=objects, **grid)  # type: ignore[arg-type]
