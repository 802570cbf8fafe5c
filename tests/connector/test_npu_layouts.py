"""What vllm-ascend registers, described and placed, with stand-ins for its specs and tensors."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_engine import Tensor as HostTensor

from kvformat.errors import ConfigError, Reason
from kvformat.layout import Component
from kvformat.placement import ComponentPlacement
from kvformat_connector.engine.npu import (
    attention_first,
    hooked_layer,
    npu_components,
    npu_packing,
    place_layer,
    registered_tensors,
)

BLOCK_SIZE = 8
NAME = "model.layers.0.self_attn.attn"
INDEXER = "model.layers.0.self_attn.indexer.k_cache"
MODEL = SimpleNamespace(kv_lora_rank=32, qk_rope_head_dim=8)


@dataclass(frozen=True)
class FullAttentionSpec:
    """The fields of vLLM's class of this name that matter here."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 16
    tokens_per_state: int = 1
    state_content_bytes: int | None = None
    page_size_padded: int | None = None


@dataclass(frozen=True)
class AscendMLAAttentionSpec:
    """The fields of vllm-ascend's class of this name that matter here."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = 1
    head_size: int = 40
    scale_dim: int = 0
    tokens_per_state: int = 1
    cache_sparse_sfa_c8: bool = False
    cache_sparse_sfa_turboquant: bool = False
    store_on_host: bool = False
    alignment: int | None = None


@dataclass(frozen=True)
class AscendSFAIndexerCacheSpec:
    """The fields of vllm-ascend's class of this name that matter here."""

    block_size: int = BLOCK_SIZE
    num_kv_heads: int = 1
    head_size: int = 16
    scale_dim: int = 0
    scale_dtype: str = "torch.float16"
    cache_sparse_li_c4: bool = False
    sfa_dcp_replicated_indexer_size: int = 1


class AscendIndexerKPoolTailSpec(FullAttentionSpec):
    pass


class Tensor(HostTensor):
    """A tensor that says its dtype."""

    def __init__(self, array: np.ndarray, dtype: str = "torch.bfloat16") -> None:
        super().__init__(array)
        self.dtype = dtype


def describe(spec: Any, num_kv_heads: int = 2) -> tuple[Component, ...]:
    return npu_components(NAME, spec, "bfloat16", num_kv_heads=num_kv_heads, hf_text_config=MODEL)


def zeros(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.uint16))


def place(
    components: tuple[Component, ...], *tensors: Tensor, heads: tuple[int, int] = (0, 2)
) -> tuple[int, tuple[ComponentPlacement, ...]]:
    return place_layer(
        NAME, components, tensors, block_size=BLOCK_SIZE, head_start=heads[0], head_stop=heads[1]
    )


def summary(
    components: tuple[Component, ...],
) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    return [(part.name, part.axes, part.sizes) for part in components]


def test_each_kind_has_the_components_of_its_tuple() -> None:
    """K and V, latent and rope, keys and scales of an indexer: names, axes and sizes."""
    assert summary(describe(FullAttentionSpec())) == [
        ("k", ("token", "head", "channel"), (8, 2, 16)),
        ("v", ("token", "head", "channel"), (8, 2, 16)),
    ]
    assert summary(describe(AscendMLAAttentionSpec())) == [
        ("latent", ("token", "channel"), (8, 32)),
        ("rope", ("token", "channel"), (8, 8)),
    ]
    keys, scale = describe(AscendSFAIndexerCacheSpec(scale_dim=1))
    assert summary((keys, scale)) == [
        ("indexer_k", ("token", "channel"), (8, 16)),
        ("indexer_scale", ("token",), (8,)),
    ]
    assert (keys.dtype, scale.dtype) == ("bfloat16", "float16")


def test_the_order_of_heads_and_tokens_is_that_of_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With VLLM_KV_CACHE_LAYOUT=HND heads come first in memory and in objects; caches without
    heads stay as they are."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    components = describe(FullAttentionSpec())
    assert components[0].axes == ("head", "token", "channel")
    _, (k, _) = place(components, zeros(4, 2, 8, 16), zeros(4, 2, 8, 16))
    assert k.axis_strides_nbytes == (8 * 16 * 2, 16 * 2, 2)
    latent = describe(AscendMLAAttentionSpec())
    assert place(latent, zeros(4, 8, 1, 32), zeros(4, 8, 1, 8))[0] == 4
    with pytest.raises(ConfigError):
        place(components, zeros(4, 8, 2, 16), zeros(4, 8, 2, 16))


def test_an_indexer_is_covered_by_the_hooks_of_its_attention_layer() -> None:
    """It has no hooks of its own: its tensors come after those of the layer that it serves, in
    whatever order the engine names them."""
    specs = {INDEXER: AscendSFAIndexerCacheSpec(), NAME: AscendMLAAttentionSpec()}
    assert [name for name, _ in attention_first(specs)] == [NAME, INDEXER]
    assert hooked_layer(INDEXER, specs) == NAME == hooked_layer(NAME, specs)
    latent, rope, keys = zeros(4, 8, 1, 32), zeros(4, 8, 1, 8), zeros(4, 8, 1, 16)
    caches = {INDEXER: (keys,), "another": (zeros(1),), NAME: [latent, rope]}
    assert registered_tensors(NAME, caches) == [latent, rope, keys]
    with pytest.raises(ConfigError) as caught:
        hooked_layer(INDEXER, [INDEXER])
    assert NAME in caught.value.detail


def test_k_and_v_of_one_allocation_are_placed_by_their_strides() -> None:
    """Views that take turns in one allocation: each block of K is followed by one of V."""
    both = np.zeros((4, 2, BLOCK_SIZE, 2, 16), np.uint16)
    num_blocks, (k, v) = place(
        describe(FullAttentionSpec()), Tensor(both[:, 0]), Tensor(both[:, 1])
    )
    block_nbytes = BLOCK_SIZE * 2 * 16 * 2
    assert num_blocks == 4
    assert k.block_stride_nbytes == v.block_stride_nbytes == 2 * block_nbytes
    assert v.base_address - k.base_address == block_nbytes
    assert k.axis_strides_nbytes == (2 * 16 * 2, 16 * 2, 2)


def test_a_tensor_rank_places_its_own_heads() -> None:
    """The layout has the whole model's heads, a rank's tensors its own."""
    components = describe(FullAttentionSpec(), num_kv_heads=8)
    assert components[0].sizes == (8, 8, 16)
    _, (k, _) = place(components, zeros(4, 8, 2, 16), zeros(4, 8, 2, 16), heads=(4, 6))
    assert (k.head_start, k.head_stop) == (4, 6)


def test_blocks_kept_in_pieces_are_joined_where_they_are_neighbours() -> None:
    """Kernels with smaller blocks than the scheduler's: one block is as many pieces in a row."""
    latent = describe(AscendMLAAttentionSpec())
    num_blocks, (first, _) = place(latent, zeros(8, 4, 1, 32), zeros(8, 4, 1, 8))
    assert num_blocks == 4
    assert first.block_stride_nbytes == 8 * 32 * 2
    both = np.zeros((8, 2, 4, 2, 16), np.uint16)
    with pytest.raises(ConfigError) as caught:
        place(describe(FullAttentionSpec()), Tensor(both[:, 0]), Tensor(both[:, 1]))
    assert "set block_size to 4" in caught.value.detail


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (AscendMLAAttentionSpec(cache_sparse_sfa_c8=True), "cache_sparse_sfa_c8=True"),
        (AscendMLAAttentionSpec(cache_sparse_sfa_turboquant=True), "turboquant=True"),
        (AscendMLAAttentionSpec(scale_dim=1), "scale_dim=1"),
        (AscendMLAAttentionSpec(head_size=41), "head_size=41"),
        (AscendMLAAttentionSpec(tokens_per_state=4), "tokens_per_state=4"),
        (AscendMLAAttentionSpec(store_on_host=True), "store_on_host=True"),
        (AscendSFAIndexerCacheSpec(cache_sparse_li_c4=True), "cache_sparse_li_c4=True"),
        (AscendSFAIndexerCacheSpec(scale_dim=4), "scale_dim=4"),
        (AscendSFAIndexerCacheSpec(sfa_dcp_replicated_indexer_size=2), "indexer_size=2"),
        (FullAttentionSpec(state_content_bytes=33), "state_content_bytes=33"),
        (FullAttentionSpec(page_size_padded=1 << 20), "page_size_padded"),
        (AscendIndexerKPoolTailSpec(), "AscendIndexerKPoolTailSpec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_an_npu_keeps_otherwise_is_refused_by_name(spec: Any, named: str) -> None:
    """Packed, compressed and padded caches: a refusal that names layer and field, never a guess."""
    with pytest.raises(ConfigError) as caught:
        describe(spec)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert named in caught.value.detail
    assert NAME in caught.value.detail


GQA = FullAttentionSpec()


@pytest.mark.parametrize(
    "tensors",
    [
        [zeros(4, 8, 2, 16)],
        [zeros(4, 8, 2, 16), zeros(4, 8, 2, 16), zeros(4, 8, 2, 16)],
        [zeros(4, 8, 2, 16), zeros(5, 8, 2, 16)],
        [zeros(4, 2, 8, 16), zeros(4, 2, 8, 16)],
        [zeros(4, 8, 2, 8), zeros(4, 8, 2, 8)],
        [zeros(4, 3, 2, 16), zeros(4, 3, 2, 16)],
        [zeros(4, 8 * 2 * 16), zeros(4, 8 * 2 * 16)],
        [Tensor(np.zeros((4, 8, 2, 16), np.uint16), "torch.float16")] * 2,
        [Tensor(np.zeros((4, 8, 2, 32), np.uint16)[..., ::2])] * 2,
    ],
    ids=[
        "one tensor", "three tensors", "block counts", "heads first", "channels", "block size",
        "flat", "dtype", "gaps between channels",
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_components_are_refused(tensors: list[Tensor]) -> None:
    """Another number, shape, order or type stops the start and names the layer."""
    with pytest.raises(ConfigError) as caught:
        place(describe(GQA), *tensors)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert NAME in caught.value.detail


@pytest.mark.parametrize(
    ("additional_config", "is_310p", "named"),
    [({"enable_kv_nz": True}, False, "enable_kv_nz"), (None, True, "310P")],
)
def test_the_fractal_order_of_a_block_is_refused(
    monkeypatch: pytest.MonkeyPatch, additional_config: Any, is_310p: bool, named: str
) -> None:
    """NZ caches have the shapes of others and other bytes: the option, and the chip, are named."""
    name = "vllm_ascend.device.device_config"
    for parent in ("vllm_ascend", "vllm_ascend.device"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    module = ModuleType(name)
    vars(module)["is_310p"] = lambda: is_310p
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError) as caught:
        npu_packing(SimpleNamespace(additional_config=additional_config))
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert named in caught.value.detail


def test_a_spec_of_a_whole_group_and_of_a_layer_are_described_alike() -> None:
    """Case 8: nothing but the fields of the spec counts."""
    assert describe(GQA) == describe(dataclasses.replace(GQA))
