"""Components of the attention kinds in use, so that layouts of one model are spelt alike.

Each function returns the components of one layer for one whole block, over all heads, in the order
in which the object holds them. ``order`` is that of the object's bytes: ``HND`` (head, token) keeps
a head shard together, ``NHD`` (token, head) keeps a token together.

Source: spec/registry.md "Component names", spec/kvformat.md section 3.4.
"""

from __future__ import annotations

from typing import Literal

from kvformat.errors import LayoutError, Reason
from kvformat.layout import Component, component

Order = Literal["HND", "NHD"]


def split_attention(
    *,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    dtype: str,
    order: Order = "HND",
    head_size_v: int | None = None,
) -> tuple[Component, ...]:
    """K and V as two components: ``[heads, tokens, channels]`` or ``[tokens, heads, channels]``."""
    outer = _outer(order, num_kv_heads, block_size)
    return (
        component("k", dtype, **outer, channel=head_size),
        component("v", dtype, **outer, channel=head_size if head_size_v is None else head_size_v),
    )


def fused_attention(
    *, num_kv_heads: int, head_size: int, block_size: int, dtype: str, order: Order = "HND"
) -> tuple[Component, ...]:
    """K and V packed beside each other for each head and token: last axes ``[2, channels]``."""
    outer = _outer(order, num_kv_heads, block_size)
    return (component("kv", dtype, **outer, kv=2, channel=head_size),)


def attention_scales(
    names: tuple[str, ...], *, num_kv_heads: int, block_size: int, dtype: str = "float32"
) -> tuple[Component, ...]:
    """Scales a head and token (``[heads, tokens]``) of components such as ``k`` and ``v``."""
    return tuple(
        component(f"{name}_scale", dtype, head=num_kv_heads, token=block_size) for name in names
    )


def latent_attention(
    *, latent_size: int, rope_size: int, block_size: int, dtype: str, fused: bool
) -> tuple[Component, ...]:
    """MLA, without a head axis: ``[tokens, latent + rope]``, or latent and rope apart."""
    if fused:
        return (component("latent_rope", dtype, token=block_size, channel=latent_size + rope_size),)
    return (
        component("latent", dtype, token=block_size, channel=latent_size),
        component("rope", dtype, token=block_size, channel=rope_size),
    )


def indexer(
    *, head_size: int, block_size: int, dtype: str, scale_dtype: str | None = None
) -> tuple[Component, ...]:
    """Keys of a sparse-attention indexer, ``[tokens, channels]``, and ``[tokens]`` of scales."""
    keys = component("indexer_k", dtype, token=block_size, channel=head_size)
    if scale_dtype is None:
        return (keys,)
    return (keys, component("indexer_scale", scale_dtype, token=block_size))


def recurrent_state(nbytes: int, *, num_heads: int = 1) -> tuple[Component, ...]:
    """Opaque state of a recurrent layer (Mamba, GDN): ``[heads, bytes of one head]``.

    ``num_heads`` counts the parts into which tensor parallelism cuts the state; ``nbytes`` is all
    of them.
    """
    if num_heads < 1 or nbytes % num_heads:
        raise LayoutError(
            Reason.LAYOUT_COMPONENT,
            f"a state of {nbytes} bytes can't be cut into {num_heads} equal heads",
        )
    return (component("state", "uint8", head=num_heads, byte=nbytes // num_heads),)


def _outer(order: Order, num_kv_heads: int, block_size: int) -> dict[str, int]:
    sizes = {"head": num_kv_heads, "token": block_size}
    if order == "HND":
        return sizes
    if order == "NHD":
        return {"token": block_size, "head": num_kv_heads}
    raise LayoutError(Reason.LAYOUT_COMPONENT, f"order {order!r} is neither HND nor NHD")
