"""Each kind of cache that an engine can say, described, placed or refused by name: drafts, groups
that alias one memory, padded pages, a spec per layer. With stand-ins for the engine's classes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_engine import Tensor
from test_engine_layouts import (
    NAMES,
    CacheConfig,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    ModelConfig,
    SlidingWindowSpec,
    VllmConfig,
    cache,
    group,
)
from test_engine_parallel import OTHER_NAMES, PartOfTensor, config

from kvformat.errors import ConfigError, Reason
from kvformat.fingerprint import fingerprint
from kvformat.layout import Layout
from kvformat.objectmap import object_maps
from kvformat.plan import plan_get, plan_put
from kvformat_connector.config import Options, parse_options
from kvformat_connector.engine import Ranks, derive_layout, derive_placement
from kvformat_connector.engine import derive as engine
from kvformat_connector.namespaces import Variant, layout_of

DRAFT_MODEL = "draft_model.model.layers.0.attn"
#: How EAGLE and multi-token predictors count: on from the model's two layers.
PREDICTOR = "model.layers.2.attn"


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Options with a given identity; the packing and the seed come from no real engine."""
    monkeypatch.setattr(engine, "_packing", lambda vllm_config, spec: "cpu-vec")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    return parse_options({"store": "memory://", "model_identity": "v1"})


def drafting(tensor_size: int = 1, draft_heads: int = 2) -> VllmConfig:
    """An engine of that many ranks with a draft of that many KV heads."""
    draft = ModelConfig()
    draft.get_total_num_kv_heads = lambda: draft_heads  # type: ignore[method-assign]
    made = config(tensor_size)
    made.speculative_config = SimpleNamespace(draft_model_config=draft)
    return made


@pytest.mark.parametrize("draft_layer", [DRAFT_MODEL, PREDICTOR])
def test_layers_of_a_draft_are_in_the_layout(options: Options, draft_layer: str) -> None:
    """They join the model's group, so its objects hold them; the draft's weights are part of the
    identity, and an engine without a draft shares nothing with one that has it."""
    names = [*NAMES, draft_layer]
    layout = derive_layout(drafting(), cache(group(names=names)), options)
    assert [layer.name for layer in layout.groups[0].layers] == names
    assert layout.identity.config["draft_weights"] == "given:v1"
    [whole] = object_maps(layout)
    assert len(whole.layers) == 3
    assert fingerprint(layout) != fingerprint(derive_layout(VllmConfig(), cache(), options))


def test_updated_weights_are_those_of_the_draft_too(options: Options) -> None:
    """A server that was updated to what an operator named has the namespace of one that started
    with it. A draft that was told by its own files keeps them."""
    groups = cache(group(names=[*NAMES, DRAFT_MODEL]))
    started = derive_layout(
        drafting(), groups, msgspec.structs.replace(options, model_identity="v2")
    )
    first = derive_layout(drafting(), groups, options)
    updated = layout_of(first, Variant(weights="given:v2"))
    assert updated == started != first
    assert layout_of(first, Variant()) == first
    identity = msgspec.structs.replace(
        first.identity, config={**first.identity.config, "draft_weights": "digest:0"}
    )
    alone = layout_of(
        msgspec.structs.replace(first, identity=identity), Variant(weights="given:v2")
    )
    assert alone.identity.config["draft_weights"] == "digest:0"


@pytest.mark.parametrize("draft_layer", [DRAFT_MODEL, PREDICTOR])
def test_heads_of_a_draft_are_its_own(options: Options, draft_layer: str) -> None:
    """Four heads and a draft of two on four ranks, one on each: ranks alone can't tell them apart,
    each model's configuration does."""
    per_layer = {name: FullAttentionSpec(num_kv_heads=1) for name in [*NAMES, draft_layer]}
    merged = SimpleNamespace(kv_cache_specs=per_layer, block_size=32)
    made = drafting(tensor_size=4, draft_heads=2)
    made.model_config.get_total_num_kv_heads = lambda: 4  # type: ignore[method-assign]
    layout = derive_layout(made, cache(group(merged, list(per_layer))), options)
    heads = {layer.name: layer.components[0].num_heads for layer in layout.groups[0].layers}
    assert heads == {NAMES[0]: 4, NAMES[1]: 4, draft_layer: 2}


@pytest.mark.parametrize("draft_layer", [DRAFT_MODEL, PREDICTOR])
def test_a_draft_is_in_the_last_segment(options: Options, draft_layer: str) -> None:
    """Its layers are computed after the model's, whether they count from 0 again or go on."""
    two = parse_options({"store": "memory://", "model_identity": "v1", "layer_segments": [1, 1]})
    layout = derive_layout(drafting(), cache(group(names=[*NAMES, draft_layer])), two)
    assert layout.grid.layer_starts == ((0, 1),)


def addresses(layout: Layout, tensors: dict[str, Any], block_id: int) -> dict[str, list[int]]:
    """Where each layer's fragments of one block begin, by layer name."""
    found = {}
    for template in plan_get(layout, derive_placement(layout, tensors)):
        for layer in template.layers:
            name = layout.groups[layer.group].layers[layer.layer].name
            [found[name]] = map(list, layer.bind(np.array([block_id])).addresses)
    return found


def test_groups_that_alias_one_memory_are_told_apart_by_their_blocks(options: Options) -> None:
    """Layers of both groups are views of one storage, as the engine has them: one region, one
    address for a block id whichever group it belongs to, and an object for each group."""
    kv_cache = cache(group(), group(SlidingWindowSpec(), OTHER_NAMES))
    layout = derive_layout(VllmConfig(), kv_cache, options)
    shared = {name: Tensor(np.zeros((8, 2, 32, 32), np.uint16)[:]) for name in NAMES}
    aliases = dict(zip(OTHER_NAMES, shared.values(), strict=True))
    tensors = {**shared, **aliases}
    assert len(derive_placement(layout, tensors).regions) == len(shared)
    assert [put.is_whole for put in plan_put(layout, derive_placement(layout, tensors))] == [
        True,
        True,
    ]
    found = addresses(layout, tensors, 3)
    assert [found[name] for name in OTHER_NAMES] == [found[name] for name in NAMES]
    assert found[NAMES[0]] == [shared[NAMES[0]].array[3].ctypes.data]


def test_what_pads_a_page_stays_out_of_the_object(options: Options) -> None:
    """Pages of attention that were made as large as a neighbour's: blocks are where the stride
    says, and an object has the bytes of the block alone."""
    layout = derive_layout(VllmConfig(), cache(), options)
    block_nbytes = 2 * 32 * 32 * 2
    pages = np.zeros((8, block_nbytes // 2 + 640), np.uint16)
    view = pages[:, : block_nbytes // 2].reshape(8, 2, 32, 32)
    tensors = {name: PartOfTensor(view) for name in NAMES}
    found = addresses(layout, tensors, 5)
    assert found == {name: [pages[5].ctypes.data] for name in NAMES}
    [whole] = object_maps(layout)
    assert whole.sizes.tolist() == [block_nbytes] * 2


def test_a_spec_per_layer_may_differ_where_the_kind_is_one(options: Options) -> None:
    """Layers of one group with other numbers of heads are described each by its own spec."""
    per_layer = {NAMES[0]: FullAttentionSpec(), NAMES[1]: FullAttentionSpec(num_kv_heads=8)}
    merged = SimpleNamespace(kv_cache_specs=per_layer, block_size=32)
    layout = derive_layout(VllmConfig(), cache(group(merged)), options)
    assert [layer.components[0].num_heads for layer in layout.groups[0].layers] == [2, 8]


def changed(spec: object, **fields: object) -> SimpleNamespace:
    """A group whose spec has other values, or fields that the stand-in lacks."""
    vars(spec).update(fields)
    return group(spec)


def mixed() -> SimpleNamespace:
    """A group of two kinds."""
    specs = {NAMES[0]: FullAttentionSpec(), NAMES[1]: SlidingWindowSpec()}
    return group(SimpleNamespace(kv_cache_specs=specs, block_size=32))


def marked(**fields: object) -> SimpleNamespace:
    made = group()
    vars(made).update(fields)
    return made


INDEXER = SimpleNamespace(value="indexer")


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (changed(FullAttentionSpec(), num_head_slots=4), "num_head_slots=4"),
        (changed(FullAttentionSpec(), state_content_bytes=64), "state_content_bytes=64"),
        (changed(FullAttentionSpec(), bounded_replay=True), "bounded_replay=True"),
        (marked(host_resident=True), "host_resident=True"),
        (marked(enable_kv_transfer=False), "enable_kv_transfer=False"),
        (group(MambaSpec(num_prefill_checkpoint_blocks=1)), "num_prefill_checkpoint_blocks=1"),
        (changed(MLAAttentionSpec(), cache_role=INDEXER), "cache_role=indexer"),
        (mixed(), "SlidingWindowSpec"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_else_an_engine_can_say_is_refused_by_name(
    options: Options, said: SimpleNamespace, named: str
) -> None:
    """Fields that change what a block's bytes mean stop the start, named."""
    with pytest.raises(ConfigError) as caught:
        derive_layout(VllmConfig(), cache(said), options)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert named in caught.value.detail


@pytest.mark.parametrize("cache_dtype", ["fp8_ds_mla", "int4", "turboquant"])
def test_bytes_whose_meaning_is_unknown_are_refused_by_name(
    options: Options, cache_dtype: str
) -> None:
    """A cache of bytes that is neither of the two 8-bit floats."""
    spec = dataclasses.replace(MLAAttentionSpec(), dtype="torch.uint8")
    with pytest.raises(ConfigError) as caught:
        derive_layout(
            VllmConfig(cache_config=CacheConfig(cache_dtype=cache_dtype)),
            cache(group(spec)),
            options,
        )
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert f"kv_cache_dtype is {cache_dtype}" in caught.value.detail


def test_several_tensors_for_a_layer_of_one_are_refused(options: Options) -> None:
    """K and V apart, where this device's engine keeps them in one tensor."""
    layout = derive_layout(VllmConfig(), cache(), options)
    half = Tensor(np.zeros((8, 2, 32, 16), np.uint16))
    with pytest.raises(ConfigError) as caught:
        derive_placement(layout, dict.fromkeys(NAMES, (half, half)), Ranks())
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert NAMES[0] in caught.value.detail
    assert "2 tensors" in caught.value.detail


def test_a_device_that_is_not_described_is_refused(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of a block's elements is the device's: a device that isn't known stops the start,
    named."""
    gpu = SimpleNamespace(is_cpu=lambda: False, device_name="cuda", device_type="cuda")
    monkeypatch.setattr("vllm.platforms.current_platform", gpu)
    with pytest.raises(ConfigError) as caught:
        derive_layout(VllmConfig(), cache(), options)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert "device is cuda" in caught.value.detail
