"""The engine's cache specs, turned into groups of layers and components.

A spec is known by the name of its class: what a subclass of another name does with its bytes is
not known here, so it is refused by that name.

Source: vllm/v1/kv_cache_interface.py.
"""

from __future__ import annotations

from math import prod
from typing import Any, Final

from kvformat.components import recurrent_state
from kvformat.layout import Component, Group, Layer, component
from kvformat_connector.engine.npu import attention_first, hooked_layer, npu_components
from kvformat_connector.engine.ranks import Ranks, num_kv_heads_of_model
from kvformat_connector.engine.refusal import refuse

#: What a cache of 8-bit floats that torch sees as uint8 holds, by the engine's name for the dtype.
_QUANTISED_DTYPES: Final = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

_ATTENTION: Final = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
}
_LATENT: Final = frozenset({"MLAAttentionSpec", "AscendMLAAttentionSpec"})
_INDEXER: Final = "AscendSFAIndexerCacheSpec"
_RECURRENT: Final = "MambaSpec"

#: Fields of a spec that change the meaning of its bytes, with the value that is described here.
_PLAIN_FIELDS: Final[tuple[tuple[str, object], ...]] = (
    ("num_head_slots", None),
    ("state_content_bytes", None),
    ("tokens_per_state", 1),
    ("extra_retained_tokens", 0),
    ("bounded_replay", False),
)


def describe_group(
    vllm_config: Any, group: Any, ranks: Ranks, device: str, known: Group | None = None
) -> Group | None:
    """One KV cache group, or None where this pipeline stage has no layer of it.

    Args:
        vllm_config, group: the engine's ``VllmConfig`` and ``KVCacheGroupSpec``.
        device: ``cpu`` or ``npu``; their kernels order the elements of a block differently.
        known: what a worker says of the group. Its components are taken, because the scheduler is
            told the spec of a group's first layer only, whatever the others have.

    Raises ``ConfigError`` with reason ``config_unsupported`` that names layer and field.
    """
    specs = {name: spec_of(group, name) for name in group.layer_names}
    if not specs:
        return None
    for field, plain in (("enable_kv_transfer", True), ("host_resident", False)):
        if (value := getattr(group, field, plain)) != plain:
            refuse("kv_cache_groups", f"{field}={value}", f"only {field}={plain} is described")
    first_name, first = next(iter(specs.items()))
    kind, window = _kind(first_name, first)
    told = {} if known is None else {layer.name: layer.components for layer in known.layers}
    parts: dict[str, tuple[Component, ...]] = {}
    for name, spec in specs.items() if device != "npu" else attention_first(specs):
        if _kind(name, spec) != (kind, window):
            refuse(
                f"kv cache spec of layer {name}",
                type(spec).__name__,
                f"layer {first_name} of the same group has {type(first).__name__}",
            )
        layer = hooked_layer(name, specs) if device == "npu" else name
        parts[layer] = told.get(layer) or parts.get(layer, ()) + _components(
            vllm_config, name, spec, ranks, device
        )
    layers = tuple(Layer(name=name, components=components) for name, components in parts.items())
    return Group(kind=kind, block_size=first.block_size, window=window, layers=layers)


def spec_of(group: Any, layer_name: str) -> Any:
    """The spec of one layer, whether the group has one merged spec or one per layer."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if per_layer is None else per_layer[layer_name]


def is_packed(spec: Any) -> bool:
    """Whether CPU kernels order the elements of its blocks to suit the instruction set."""
    return type(spec).__name__ in _ATTENTION


def _kind(name: str, spec: Any) -> tuple[str, int]:
    """Kind and window, in tokens, of a spec."""
    class_name = type(spec).__name__
    if class_name in _LATENT or class_name == _INDEXER:
        return "full_attention", 0
    if class_name == _RECURRENT:
        return "recurrent_state", 0
    kind = _ATTENTION.get(class_name)
    if kind is None:
        known = ", ".join([*_ATTENTION, *sorted(_LATENT), _INDEXER, _RECURRENT])
        refuse(f"kv cache spec of layer {name}", class_name, f"described are {known}")
    if kind == "sliding_window":
        return kind, spec.sliding_window
    return kind, spec.attention_chunk_size if kind == "chunked_local" else 0


def _components(
    vllm_config: Any, name: str, spec: Any, ranks: Ranks, device: str
) -> tuple[Component, ...]:
    what = f"kv cache spec of layer {name}"
    class_name = type(spec).__name__
    if class_name == _RECURRENT:
        return _state(what, spec, ranks)
    dtype = _dtype(vllm_config, spec)
    num_heads = num_kv_heads_of_model(vllm_config, name, spec, ranks)
    if device == "npu":
        return npu_components(
            name,
            spec,
            dtype,
            num_kv_heads=num_heads,
            hf_text_config=vllm_config.model_config.hf_text_config,
        )
    for field, plain in _PLAIN_FIELDS:
        if (value := getattr(spec, field, plain)) != plain:
            refuse(what, f"{field}={value}", f"only {field}={plain} is described")
    if class_name in _LATENT:
        role = getattr(getattr(spec, "cache_role", None), "value", "sparse")
        if role != "sparse":
            refuse(what, f"cache_role={role}", "an indexer's cache isn't described here")
        # Latent and rope lie side by side in a token's row.
        return (component("latent_rope", dtype, token=spec.block_size, channel=spec.head_size),)
    if (size_v := spec.head_size_v) not in (None, spec.head_size):
        refuse(what, f"head_size_v={size_v}", f"only head_size_v={spec.head_size} is described")
    # The CPU kernels see a (block, head) as a plane of keys and a plane of values, each of
    # block_size x head_size elements, and order the elements of a plane to suit the instruction
    # set (cpu_attn.py: view(num_blocks, heads, 2 * block_size, head_size).chunk(2)). The last axis
    # is therefore opaque, and the identity names the packing that fills it.
    packed = spec.block_size * spec.head_size
    return (component("kv", dtype, head=num_heads, kv=2, packed=packed),)


def _state(what: str, spec: Any, ranks: Ranks) -> tuple[Component, ...]:
    if spec.mamba_cache_mode == "none":
        refuse(
            what,
            "mamba_cache_mode=none",
            "no state is kept at block boundaries; enable_prefix_caching keeps it",
        )
    for field in ("num_speculative_blocks", "num_prefill_checkpoint_blocks"):
        if value := getattr(spec, field, 0):
            refuse(what, f"{field}={value}", "the state of drafted tokens isn't described")
    nbytes = sum(
        prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    # How a rank's part lies in the whole state is the kernel's business: each rank's part is a
    # head, so that a rank reads back its own, and another tensor parallel size shares none.
    num_parts = 1 if getattr(spec, "tp_replicated", False) else ranks.tensor_size
    return recurrent_state(num_parts * nbytes, num_heads=num_parts)


def _dtype(vllm_config: Any, spec: Any) -> str:
    name = str(spec.dtype).removeprefix("torch.")
    quantisation = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if name != "uint8" and quantisation == "NONE":
        return name
    cache_dtype = vllm_config.cache_config.cache_dtype
    if quantisation != "FP8_PER_TENSOR" or cache_dtype not in _QUANTISED_DTYPES:
        refuse("kv_cache_dtype", f"{cache_dtype} ({quantisation})", "it isn't described")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        refuse("calculate_kv_scales", True, "every process finds its own scales, so none can share")
    return _QUANTISED_DTYPES[cache_dtype]
