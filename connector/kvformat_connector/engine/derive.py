"""From the engine's cache structures to layouts and placements.

The only file that knows how vLLM describes and lays out a KV cache. What it can't describe it
refuses by name: a guess about bytes is never better than a miss.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec

from kvformat.errors import ConfigError, HandshakeError, Reason
from kvformat.fingerprint import parse_manifest
from kvformat.layout import (
    Component,
    Group,
    HashRecipe,
    Identity,
    Layer,
    Layout,
    ShardGrid,
    component,
)
from kvformat.placement import ComponentPlacement, LayerPlacement, Placement, Region
from kvformat_connector.config import Options
from kvformat_connector.identity import model_name, weights_identity
from kvformat_connector.messages import LayoutNotice
from kvformat_connector.resolved import config_values

_HASH_NBYTES: Final = {"sha256": 32, "sha256_cbor": 32, "xxhash": 16, "xxhash_cbor": 16}

#: What an 8-bit cache that torch sees as uint8 holds, by the engine's name for the cache dtype.
_QUANTISED_DTYPES: Final = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


class LayerAddress(msgspec.Struct, frozen=True):
    """Where a layer is in a layout: the group, and the layer's index in it."""

    group: int
    layer: int


def derive_layout(vllm_config: Any, kv_cache_config: Any, options: Options) -> Layout:
    """The layout of an engine, from a ``VllmConfig`` and a ``KVCacheConfig``.

    The scheduler and every worker call it with their own copies and must get the same.

    Raises ``ConfigError``: ``config_unsupported`` for what can't be described yet,
    ``config_missing`` where the weights can't be identified.
    """
    _refuse_parallel(vllm_config.parallel_config)
    if vllm_config.speculative_config is not None:
        _refuse("speculative_config", "set", "the layers of a draft model aren't described yet")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        _refuse("kv_cache_groups", f"{len(groups)} ({kinds})", "only one group is described so far")
    packing = _packing(vllm_config, _spec_of(groups[0], groups[0].layer_names[0]))
    model = vllm_config.model_config
    return Layout(
        identity=Identity(
            tenant=options.tenant,
            model=model_name(model.model, options.model_name),
            weights=weights_identity(
                model.model,
                given=options.model_identity,
                load_format=str(vllm_config.load_config.load_format),
                revision=model.revision,
                download_dir=vllm_config.load_config.download_dir,
            ),
            config={**config_values(vllm_config), "kv_packing": packing},
        ),
        hash=_hash_recipe(vllm_config.cache_config, kv_cache_config),
        groups=tuple(_group(vllm_config, group) for group in groups),
        objects=tuple((index,) for index in range(len(groups))),
        grid=ShardGrid(head_shards=options.head_shards, layer_starts=tuple((0,) for _ in groups)),
    )


def layer_addresses(layout: Layout) -> dict[str, LayerAddress]:
    """The address of each layer by the engine's name for it."""
    return {
        layer.name: LayerAddress(group_index, layer_index)
        for group_index, group in enumerate(layout.groups)
        for layer_index, layer in enumerate(group.layers)
    }


def derive_placement(layout: Layout, kv_caches: Mapping[str, Any]) -> Placement:
    """Where registered KV tensors hold the layout's blocks.

    Args:
        layout: the engine's.
        kv_caches: per layer name a tensor ``[num_blocks, num_kv_heads, block_size, K|V]``.

    Raises ``ConfigError`` with reason ``config_unsupported`` for a tensor that is not what the
    layout says.
    """
    regions: dict[int, Region] = {}
    placed = []
    for name, address in layer_addresses(layout).items():
        if name not in kv_caches:
            _refuse("kv cache", f"no tensor for layer {name}", "the engine didn't register it")
        tensor = kv_caches[name]
        (described,) = layout.groups[address.group].layers[address.layer].components
        storage = tensor.untyped_storage()
        regions[storage.data_ptr()] = Region(storage.data_ptr(), storage.nbytes())
        placed.append(
            LayerPlacement(
                group=address.group,
                layer=address.layer,
                num_blocks=tensor.shape[0],
                components=(_place_packed(name, described, tensor),),
            )
        )
    return Placement(layers=tuple(placed), regions=tuple(regions.values()))


def require_same_layout(layout: Layout, notices: Mapping[Any, LayoutNotice]) -> None:
    """Refuse to start with workers whose layout is not the scheduler's.

    Raises ``HandshakeError`` that names each differing field with both values.
    """
    from kvformat.diff import diff

    for notice in notices.values():
        theirs = parse_manifest(notice.manifest)
        if theirs != layout:
            named = "; ".join(str(difference) for difference in diff(layout, theirs))
            raise HandshakeError(
                Reason.HANDSHAKE_REFUSED,
                f"worker of rank {notice.rank} has another KV layout than the scheduler "
                f"(scheduler, worker): {named}",
            )


def _refuse(name: str, value: object, why: str) -> NoReturn:
    raise ConfigError(Reason.CONFIG_UNSUPPORTED, f"{name} is {value}: {why}")


def _refuse_parallel(parallel_config: Any) -> None:
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if (size := getattr(parallel_config, name, 1)) != 1:
            _refuse(name, size, "only 1 is supported so far")


def _spec_of(group: Any, layer_name: str) -> Any:
    """The spec of one layer, whether the group has one merged spec or one per layer."""
    per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if per_layer is None else per_layer[layer_name]


def _group(vllm_config: Any, group: Any) -> Group:
    layers = []
    for name in group.layer_names:
        spec = _spec_of(group, name)
        _refuse_spec(name, spec)
        layers.append(Layer(name=name, components=(_component(vllm_config, spec),)))
    return Group(
        kind="full_attention",
        block_size=_spec_of(group, group.layer_names[0]).block_size,
        layers=tuple(layers),
    )


def _refuse_spec(name: str, spec: Any) -> None:
    what = f"kv cache spec of layer {name}"
    if type(spec).__name__ != "FullAttentionSpec":
        _refuse(what, type(spec).__name__, "only FullAttentionSpec is described so far")
    for field, plain in (
        ("sliding_window", None),
        ("attention_chunk_size", None),
        ("num_head_slots", None),
        ("state_content_bytes", None),
        ("tokens_per_state", 1),
        ("head_size_v", spec.head_size),
    ):
        if (value := getattr(spec, field, plain)) != plain:
            _refuse(what, f"{field}={value}", f"only {field}={plain} is described so far")


def _component(vllm_config: Any, spec: Any) -> Component:
    # The CPU kernels see a (block, head) as a plane of keys and a plane of values, each of
    # block_size x head_size elements, and order the elements of a plane to suit the instruction
    # set (cpu_attn.py: view(num_blocks, heads, 2 * block_size, head_size).chunk(2)). The last axis
    # is therefore opaque, and the identity names the packing that fills it.
    return component(
        "kv",
        _dtype(vllm_config, spec),
        head=spec.num_kv_heads,
        kv=2,
        packed=spec.block_size * spec.head_size,
    )


def _dtype(vllm_config: Any, spec: Any) -> str:
    name = str(spec.dtype).removeprefix("torch.")
    quantisation = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if name != "uint8" and quantisation == "NONE":
        return name
    cache_dtype = vllm_config.cache_config.cache_dtype
    if quantisation != "FP8_PER_TENSOR" or cache_dtype not in _QUANTISED_DTYPES:
        _refuse("kv_cache_dtype", f"{cache_dtype} ({quantisation})", "it isn't described yet")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        _refuse(
            "calculate_kv_scales", True, "every process finds its own scales, so none can share"
        )
    return _QUANTISED_DTYPES[cache_dtype]


def _packing(vllm_config: Any, spec: Any) -> str:
    """Name of the order in which kernels keep a plane's elements: part of the identity."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        _refuse("device", current_platform.device_name, "only the CPU backend is described so far")
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    instructions = _get_attn_isa(
        vllm_config.model_config.dtype,
        spec.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
    )
    return f"cpu-{instructions}"


def _hash_recipe(cache_config: Any, kv_cache_config: Any) -> HashRecipe:
    algorithm = str(cache_config.prefix_caching_hash_algo)
    if algorithm not in _HASH_NBYTES:
        _refuse("prefix_caching_hash_algo", algorithm, f"known: {', '.join(_HASH_NBYTES)}")
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if algorithm.startswith("xxhash"):
            _refuse(
                "prefix_caching_hash_algo",
                algorithm,
                "without PYTHONHASHSEED its seed is random in every process, so no two share a "
                "block; set PYTHONHASHSEED to one value everywhere, or use sha256",
            )
        from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

        seed = DEFAULT_NONE_HASH_SEED
    block_size = (
        getattr(kv_cache_config, "hash_block_size", None)
        or getattr(cache_config, "hash_block_size", None)
        or cache_config.block_size
    )
    return HashRecipe(
        algorithm=algorithm,
        seed=hashlib.sha256(seed.encode()).hexdigest(),
        block_size=block_size,
        digest_nbytes=_HASH_NBYTES[algorithm],
    )


def _place_packed(name: str, described: Component, tensor: Any) -> ComponentPlacement:
    num_heads, _, packed = described.byte_sizes
    plane_nbytes = packed * described.item_nbytes
    _, heads, tokens, channels = tensor.shape if tensor.dim() == 4 else (0, 0, 0, 0)
    item_nbytes = tensor.element_size()
    block_stride, head_stride, token_stride, channel_stride = (
        stride * item_nbytes for stride in tensor.stride()
    )
    if (
        heads != num_heads
        or tokens * channels * item_nbytes != 2 * plane_nbytes
        or channel_stride != item_nbytes
        or token_stride != channels * item_nbytes
    ):
        _refuse(
            f"kv cache tensor of layer {name}",
            f"{tuple(tensor.shape)} with strides {tuple(tensor.stride())}",
            f"expected [num_blocks, {num_heads}, block_size, K|V] with {2 * plane_nbytes} bytes "
            "without gaps per head",
        )
    return ComponentPlacement(
        component=described.name,
        base_address=tensor.data_ptr(),
        block_stride_nbytes=block_stride,
        axis_strides_nbytes=(head_stride, plane_nbytes, described.item_nbytes),
        head_start=0,
        head_stop=num_heads,
    )
