"""From the engine's structures to layouts and placements, with stand-ins for its classes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from simulated_engine import Tensor

from kvformat.errors import ConfigError, HandshakeError, Reason
from kvformat.fingerprint import fingerprint, manifest
from kvformat.layout import Layout
from kvformat.plan import plan_get, plan_put
from kvformat_connector.config import Options, parse_options
from kvformat_connector.engine import derive as engine
from kvformat_connector.engine import derive_layout, derive_placement, require_same_layout
from kvformat_connector.messages import LayoutNotice

NUM_LAYERS = 2
NAMES = [f"model.layers.{index}.attn" for index in range(NUM_LAYERS)]


@dataclass(frozen=True)
class FullAttentionSpec:
    """The fields of vLLM's class of this name that matter here."""

    block_size: int = 32
    num_kv_heads: int = 2
    head_size: int = 16
    head_size_v: int = 16
    dtype: str = "torch.bfloat16"
    kv_quant_mode: object = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int | None = 48
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int | None = 64


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 48
    head_size_v: int = 0
    max_tp_shards: int | None = 1


class RSWASpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class MambaSpec:
    """Two tensors of state, as vLLM describes them."""

    block_size: int = 32
    shapes: tuple[tuple[int, ...], ...] = ((3, 8), (2, 4, 4))
    dtypes: tuple[object, ...] = (SimpleNamespace(itemsize=2), SimpleNamespace(itemsize=4))
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    num_prefill_checkpoint_blocks: int = 0
    tp_replicated: bool = False


STATE_NBYTES = 3 * 8 * 2 + 2 * 4 * 4 * 4


@dataclass
class ModelConfig:
    num_layers: ClassVar[int] = 2
    num_kv_heads: ClassVar[int] = 2

    def get_total_num_hidden_layers(self) -> int:
        return self.num_layers

    def get_total_num_kv_heads(self) -> int:
        return self.num_kv_heads

    model: str = "/no/such/model"
    revision: str | None = None
    dtype: str = "torch.bfloat16"
    rope_theta: float = 1e4


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    prefix_caching_hash_algo: str = "sha256"
    block_size: int = 32
    calculate_kv_scales: bool = False


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    rank: int = 0


@dataclass
class LoadConfig:
    load_format: str = "auto"
    download_dir: str | None = None


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    speculative_config: object = None


def group(spec: object = None, names: list[str] = NAMES) -> SimpleNamespace:
    return SimpleNamespace(layer_names=names, kv_cache_spec=spec or FullAttentionSpec())


def cache(*groups: SimpleNamespace, hash_block_size: int = 32) -> SimpleNamespace:
    return SimpleNamespace(
        kv_cache_groups=list(groups) or [group()], hash_block_size=hash_block_size
    )


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Options with a given identity; the packing and the seed come from no real engine."""
    monkeypatch.setattr(engine, "_packing", lambda vllm_config, spec: "cpu-vec")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    return parse_options({"store": "memory://", "model_identity": "v1"})


def test_the_layout_says_what_the_engine_has(options: Options) -> None:
    """Group, components, hash recipe and identity of one full-attention group."""
    layout = derive_layout(VllmConfig(), cache(hash_block_size=16), options)
    [made] = layout.groups
    assert (made.kind, made.block_size) == ("full_attention", 32)
    assert [layer.name for layer in made.layers] == NAMES
    [component] = made.layers[0].components
    # A plane of keys and a plane of values per head, each opaque inside.
    assert (component.axes, component.sizes) == (("head", "kv", "packed"), (2, 2, 32 * 16))
    assert (component.dtype, component.nbytes) == ("bfloat16", 2 * 2 * 32 * 16 * 2)
    assert (layout.hash.algorithm, layout.hash.block_size) == ("sha256", 16)
    assert layout.identity.weights == "given:v1"
    assert layout.identity.config["kv_packing"] == "cpu-vec"
    assert layout.identity.config["model_config.rope_theta"] == "10000.0"


def test_one_merged_spec_and_one_per_layer_are_one_layout(options: Options) -> None:
    """Case 8: the engine describes the same group in two ways."""
    per_layer = SimpleNamespace(
        kv_cache_specs={name: FullAttentionSpec() for name in NAMES}, block_size=32
    )
    merged = derive_layout(VllmConfig(), cache(), options)
    apart = derive_layout(VllmConfig(), cache(group(per_layer)), options)
    assert fingerprint(merged) == fingerprint(apart)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: setattr(c.model_config, "rope_theta", 5e5), "model_config.rope_theta"),
        (lambda c: setattr(c.cache_config, "cache_dtype", "fp8"), "cache_config.cache_dtype"),
        (lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"), "hash.algorithm"),
    ],
    ids=["rope", "cache dtype", "hash"],
)
def test_a_worker_with_another_configuration_is_refused(
    options: Options, change: Any, named: str
) -> None:
    """Case 8: the error names the field that was changed between scheduler and worker."""
    ours = derive_layout(VllmConfig(), cache(), options)
    changed = VllmConfig()
    change(changed)
    theirs = derive_layout(changed, cache(), options)
    notices = {0: LayoutNotice(rank=0, manifest=manifest(ours))}
    require_same_layout(ours, notices)
    notices[1] = LayoutNotice(rank=1, manifest=manifest(theirs))
    with pytest.raises(HandshakeError) as caught:
        require_same_layout(ours, notices)
    assert caught.value.reason is Reason.HANDSHAKE_REFUSED
    assert named in caught.value.detail
    assert "rank 1" in caught.value.detail


def spec(**fields: object) -> SimpleNamespace:
    return cache(group(dataclasses.replace(FullAttentionSpec(), **fields)))


FP8 = SimpleNamespace(name="FP8_PER_TENSOR")


@pytest.mark.parametrize(
    ("config", "kv_cache", "named"),
    [
        (
            {"parallel_config": ParallelConfig(tensor_parallel_size=8)},
            cache(group(FullAttentionSpec(num_kv_heads=1))),
            "the model has 99",
        ),
        (
            {"parallel_config": ParallelConfig(decode_context_parallel_size=2)},
            cache(),
            "decode_context_parallel_size",
        ),
        (
            {"parallel_config": ParallelConfig(prefill_context_parallel_size=2)},
            cache(),
            "prefill_context_parallel_size",
        ),
        ({}, cache(group(RSWASpec())), "RSWASpec"),
        ({}, cache(group(SlidingWindowSpec(extra_retained_tokens=1))), "extra_retained_tokens=1"),
        ({}, cache(group(MambaSpec(mamba_cache_mode="none"))), "mamba_cache_mode=none"),
        ({}, cache(group(MambaSpec(num_speculative_blocks=1))), "num_speculative_blocks=1"),
        ({}, cache(group(names=[])), "group 0 without a layer"),
        ({}, spec(head_size_v=8), "head_size_v=8"),
        ({}, spec(tokens_per_state=4), "tokens_per_state=4"),
        ({}, spec(dtype="torch.uint8", kv_quant_mode=SimpleNamespace(name="NVFP4")), "NVFP4"),
        (
            {"cache_config": CacheConfig(cache_dtype="fp8", calculate_kv_scales=True)},
            spec(dtype="torch.uint8", kv_quant_mode=FP8),
            "calculate_kv_scales",
        ),
        ({"cache_config": CacheConfig(prefix_caching_hash_algo="md5")}, cache(), "md5"),
    ],
)
def test_what_is_not_described_is_refused_by_name(
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    kv_cache: SimpleNamespace,
    named: str,
) -> None:
    """A guess about bytes is never better than a miss: the start stops, and names what it met."""
    monkeypatch.setattr(ModelConfig, "num_kv_heads", 99)
    with pytest.raises(ConfigError) as caught:
        derive_layout(VllmConfig(**config), kv_cache, options)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert named in caught.value.detail


def test_a_random_hash_seed_is_refused(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """xxhash without PYTHONHASHSEED differs from process to process: nothing could be shared."""
    monkeypatch.delenv("PYTHONHASHSEED")
    config = VllmConfig(cache_config=CacheConfig(prefix_caching_hash_algo="xxhash"))
    with pytest.raises(ConfigError) as caught:
        derive_layout(config, cache(), options)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert "PYTHONHASHSEED" in caught.value.detail


def test_another_hash_seed_is_another_namespace(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes whose block hashes can't match share no namespace."""
    first = derive_layout(VllmConfig(), cache(), options)
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert derive_layout(VllmConfig(), cache(), options).hash.seed != first.hash.seed


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"), [("fp8", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_a_quantised_cache_has_the_dtype_that_its_bytes_have(
    options: Options, cache_dtype: str, dtype: str
) -> None:
    """torch sees uint8; the layout says which of the two 8-bit floats it is."""
    config = VllmConfig(cache_config=CacheConfig(cache_dtype=cache_dtype))
    layout = derive_layout(config, spec(dtype="torch.uint8", kv_quant_mode=FP8), options)
    assert layout.groups[0].layers[0].components[0].dtype == dtype


def one_storage(num_blocks: int = 8) -> dict[str, Tensor]:
    """Both layers in one allocation, as vLLM has them."""
    whole = np.zeros((NUM_LAYERS, num_blocks, 2, 32, 32), np.uint16)
    return {name: Tensor(whole[index]) for index, name in enumerate(NAMES)}


def test_a_placement_covers_each_block_once(options: Options) -> None:
    """This rank can write every object alone, in one fragment a layer, and objects fill it."""
    layout: Layout = derive_layout(VllmConfig(), cache(), options)
    tensors = one_storage()
    placement = derive_placement(layout, tensors)  # type: ignore[arg-type]
    [put] = plan_put(layout, placement)
    [get] = plan_get(layout, placement)
    assert put.is_whole
    for index, layer in enumerate(get.layers):
        bound = layer.bind(np.array([3]))
        block = tensors[NAMES[index]].array[3]
        assert bound.addresses == [(block.ctypes.data,)]
        assert bound.sizes == [(block.nbytes,)]


def _transposed() -> dict[str, Tensor]:
    array = np.zeros((8, 32, 2, 32), np.uint16).transpose(0, 2, 1, 3)
    return {name: Tensor(array) for name in NAMES}


@pytest.mark.parametrize(
    "tensors",
    [
        {NAMES[0]: Tensor(np.zeros((8, 2, 32, 32), np.uint16))},
        {name: Tensor(np.zeros((8, 2, 16, 32), np.uint16)) for name in NAMES},
        {name: Tensor(np.zeros((8, 4, 32, 32), np.uint16)) for name in NAMES},
        {name: Tensor(np.zeros((8, 2, 32, 32), np.float32)) for name in NAMES},
        _transposed(),
    ],
    ids=["layer missing", "block size", "heads", "item size", "token before head"],
)
def test_tensors_that_are_not_what_the_layout_says_are_refused(
    options: Options, tensors: dict[str, Tensor]
) -> None:
    """Case 11: another order or shape in memory is a refusal at start, never other bytes."""
    layout = derive_layout(VllmConfig(), cache(), options)
    with pytest.raises(ConfigError) as caught:
        derive_placement(layout, tensors)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert NAMES[0] in caught.value.detail or NAMES[1] in caught.value.detail
