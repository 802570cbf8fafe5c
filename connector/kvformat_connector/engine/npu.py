"""How vllm-ascend keeps a KV cache: a tuple of tensors per layer, with axes that mean something.

``[num_blocks, block, heads, channels]``, or heads before the block where ``VLLM_KV_CACHE_LAYOUT``
is ``HND``: K and V; latent and rope of MLA; keys (and scales) of a sparse-attention indexer. What
the NPU keeps in another order (the fractal NZ formats, packed 8-bit and 4-bit caches) is refused.

Source: vllm-ascend 0.30.0rc2, ``worker/model_runner_v1.py`` (``_reshape_kv_cache_tensors``),
``core/kv_cache_interface.py``, ``attention/sfa_v1.py`` (``_compose_sfa_kv_cache``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NoReturn

from kvformat.components import Order, indexer, latent_attention, split_attention
from kvformat.layout import Component
from kvformat.placement import ComponentPlacement
from kvformat_connector.engine.refusal import refuse

#: Name of the order in which an NPU's kernels keep a block, in a layout's identity: plain axes.
NPU_PACKING: Final = "npu-nd"

_INDEXER_SUFFIX: Final = ".indexer.k_cache"
_ATTENTION_SUFFIX: Final = ".attn"

#: Values of ``VLLM_KV_CACHE_LAYOUT`` that make the attention backend put heads before tokens.
_HEADS_FIRST: Final = ("LBHNC", "HND")

#: Fields of a spec that change what a block holds, with the one value that is described here.
_PLAIN: Final = (
    ("attention_chunk_size", None),
    ("num_head_slots", None),
    ("state_content_bytes", None),
    ("page_size_padded", None),
    ("alignment", None),
    ("tokens_per_state", 1),
    ("storage_block_size", None),
    ("cache_sparse_sfa_c8", False),
    ("cache_sparse_sfa_turboquant", False),
    ("cache_sparse_li_c4", False),
    ("store_on_host", False),
    ("sfa_dcp_replicated_indexer_size", 1),
)


def is_npu() -> bool:
    """Whether vLLM runs on vllm-ascend's platform in this process."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type) == "npu"


def npu_packing(vllm_config: Any) -> str:
    """Name of the order in which kernels keep a block: plain axes, or a refusal."""
    if (vllm_config.additional_config or {}).get("enable_kv_nz"):
        refuse("additional_config.enable_kv_nz", True, "the NZ order of a block isn't described")
    from vllm_ascend.device.device_config import is_310p

    if is_310p():
        refuse("device", "310P", "the NZ order of a block isn't described")
    return NPU_PACKING


def hooked_layer(name: str, names: Iterable[str]) -> str:
    """The layer whose hooks cover this one.

    The cache of an indexer is a layer without hooks: it is written, and read, between the hooks of
    the attention layer that it serves, and so is one layer with it here.
    """
    if not name.endswith(_INDEXER_SUFFIX):
        return name
    owner = name.removesuffix(_INDEXER_SUFFIX) + _ATTENTION_SUFFIX
    if owner not in set(names):
        refuse(f"layer {name}", "an indexer", f"its group has no layer {owner}")
    return owner


def attention_first(specs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The layers of a group, those that others' hooks cover last: the order of components."""
    return sorted(specs.items(), key=lambda item: item[0].endswith(_INDEXER_SUFFIX))


def memory_order() -> Order:
    """Which of tokens and heads comes first in a block: objects keep what memory has."""
    return "HND" if os.environ.get("VLLM_KV_CACHE_LAYOUT") in _HEADS_FIRST else "NHD"


def npu_components(
    name: str, spec: Any, dtype: str, *, num_kv_heads: int, hf_text_config: Any
) -> tuple[Component, ...]:
    """The components of one layer, in the order in which the engine lists its tensors.

    Args:
        name: the engine's name of the layer.
        spec: its cache spec.
        dtype: the format's name of what the spec's tensors hold.
        num_kv_heads: of the whole model, whatever the tensor parallel size.
        hf_text_config: the model's configuration, which alone tells latent from rope.
    """
    what = f"kv cache spec of layer {name}"
    for field, plain in _PLAIN:
        if (value := getattr(spec, field, plain)) != plain:
            refuse(what, f"{field}={value}", f"only {field}={plain} is described for an NPU")
    kind = type(spec).__name__
    if kind in ("FullAttentionSpec", "SlidingWindowSpec"):
        return split_attention(
            num_kv_heads=num_kv_heads,
            head_size=spec.head_size,
            head_size_v=getattr(spec, "head_size_v", spec.head_size),
            block_size=spec.block_size,
            dtype=dtype,
            order=memory_order(),
        )
    if kind in ("MLAAttentionSpec", "AscendMLAAttentionSpec"):
        return _latent(what, spec, dtype, hf_text_config)
    if kind != "AscendSFAIndexerCacheSpec":
        refuse(what, kind, "it isn't described for an NPU")
    return _indexer(what, spec, dtype)


def _latent(what: str, spec: Any, dtype: str, hf_text_config: Any) -> tuple[Component, ...]:
    if scale_dim := getattr(spec, "scale_dim", 0):
        refuse(what, f"scale_dim={scale_dim}", "scales beside a latent cache aren't described")
    latent_size = getattr(hf_text_config, "kv_lora_rank", 0)
    rope_size = getattr(hf_text_config, "qk_rope_head_dim", 0)
    if not latent_size or not rope_size or latent_size + rope_size != spec.head_size:
        refuse(
            what,
            f"head_size={spec.head_size}",
            f"expected kv_lora_rank + qk_rope_head_dim, {latent_size} + {rope_size}",
        )
    return latent_attention(
        latent_size=latent_size,
        rope_size=rope_size,
        block_size=spec.block_size,
        dtype=dtype,
        fused=False,
    )


def _indexer(what: str, spec: Any, dtype: str) -> tuple[Component, ...]:
    if spec.scale_dim not in (0, 1):
        refuse(what, f"scale_dim={spec.scale_dim}", "only one scale a token is described")
    return indexer(
        head_size=spec.head_size,
        block_size=spec.block_size,
        dtype=dtype,
        scale_dtype=str(spec.scale_dtype).removeprefix("torch.") if spec.scale_dim else None,
    )


def registered_tensors(name: str, kv_caches: Mapping[str, Any]) -> list[Any]:
    """The tensors of one layer and of the layers that its hooks cover, in component order."""
    tensors: list[Any] = []
    for registered in sorted(kv_caches, key=lambda other: (other != name, other)):
        if registered == name or (
            registered.endswith(_INDEXER_SUFFIX)
            and registered.removesuffix(_INDEXER_SUFFIX) + _ATTENTION_SUFFIX == name
        ):
            value = kv_caches[registered]
            tensors.extend(value if isinstance(value, list | tuple) else [value])
    return tensors


def place_layer(
    name: str,
    components: Sequence[Component],
    tensors: Sequence[Any],
    *,
    block_size: int,
    head_start: int,
    head_stop: int,
) -> tuple[int, tuple[ComponentPlacement, ...]]:
    """How many blocks the tensors of a layer have, and where each component of a block lies.

    Raises ``ConfigError`` with reason ``config_unsupported`` that names layer, shape and strides
    for anything but the components of the layout, in their order.
    """
    if len(tensors) != len(components):
        refuse(
            f"kv cache of layer {name}",
            f"{len(tensors)} tensors",
            f"expected {', '.join(component.name for component in components)}",
        )
    placed = [
        _place(name, component, tensor, block_size, head_start, head_stop)
        for component, tensor in zip(components, tensors, strict=True)
    ]
    num_blocks = {count for count, _ in placed}
    if len(num_blocks) != 1:
        refuse(f"kv cache of layer {name}", f"{sorted(num_blocks)} blocks", "they must agree")
    return num_blocks.pop(), tuple(component for _, component in placed)


def _place(
    name: str, described: Component, tensor: Any, block_size: int, head_start: int, head_stop: int
) -> tuple[int, ComponentPlacement]:
    num_heads = head_stop - head_start if "head" in described.axes else 1
    num_channels = dict(zip(described.axes, described.sizes, strict=True)).get("channel", 1)
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    item_nbytes = tensor.element_size()
    heads_first = memory_order() == "HND" and "head" in described.axes

    def refuse_tensor(why: str) -> NoReturn:
        refuse(
            f"kv cache tensor {described.name!r} of layer {name}",
            f"{shape} with strides {strides} of {tensor.dtype}",
            why,
        )

    if len(shape) != 4 or str(tensor.dtype).removeprefix("torch.") not in _dtypes(described):
        refuse_tensor(f"expected four axes of {described.dtype}")
    token_at, head_at = (2, 1) if heads_first else (1, 2)
    num_tokens = shape[token_at]
    if shape[head_at] != num_heads or shape[3] != num_channels or block_size % num_tokens:
        order = "heads, block" if heads_first else "block, heads"
        refuse_tensor(
            f"expected [num_blocks, {order}, channels] with {num_heads} heads, {block_size} "
            f"tokens and {num_channels} channels"
        )
    if shape[3] > 1 and strides[3] != 1:
        refuse_tensor("expected channels without gaps")
    pieces = block_size // num_tokens
    if pieces > 1 and (heads_first or strides[0] != num_tokens * strides[1]):
        refuse_tensor(
            f"a block is kept in {pieces} pieces that aren't neighbours; set block_size to "
            f"{num_tokens}"
        )
    by_axis = {"token": strides[token_at], "head": strides[head_at], "channel": 1}
    return shape[0] // pieces, ComponentPlacement(
        component=described.name,
        base_address=tensor.data_ptr(),
        block_stride_nbytes=pieces * strides[0] * item_nbytes,
        axis_strides_nbytes=tuple(by_axis[axis] * item_nbytes for axis in described.axes),
        head_start=head_start if "head" in described.axes else 0,
        head_stop=head_stop if "head" in described.axes else 1,
    )


def _dtypes(described: Component) -> tuple[str, ...]:
    """What torch may call the elements of a component: 8-bit floats may be bytes to it."""
    if described.dtype.startswith("float8"):
        return (described.dtype, "uint8", "int8")
    return (described.dtype,)
