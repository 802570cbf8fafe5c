"""Layouts and placements of several groups, tensor ranks and pipeline stages, with stand-ins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_engine import Tensor
from test_engine_layouts import (
    NAMES,
    STATE_NBYTES,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    ModelConfig,
    ParallelConfig,
    SlidingWindowSpec,
    VllmConfig,
    cache,
    group,
)

from kvformat.errors import ConfigError, HandshakeError, Reason
from kvformat.fingerprint import fingerprint, manifest
from kvformat.layout import Layout
from kvformat.objectmap import object_maps
from kvformat.plan import plan_get, plan_put
from kvformat_connector.config import Options, parse_options
from kvformat_connector.engine import (
    Ranks,
    adopt_layout,
    derive_layout,
    derive_placement,
    describe_stage,
    replicas_of,
)
from kvformat_connector.engine import derive as engine
from kvformat_connector.messages import LayoutNotice

OTHER_NAMES = [f"model.layers.{index}.other" for index in range(2)]
HASHES = [bytes([index] * 32) for index in range(64)]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Options:
    """Options with a given identity; the packing and the seed come from no real engine."""
    monkeypatch.setattr(engine, "_packing", lambda vllm_config, spec: "cpu-vec")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    monkeypatch.setattr(ModelConfig, "num_kv_heads", 4)
    return parse_options({"store": "memory://", "model_identity": "v1"})


def config(tensor_size: int = 1, stages: int = 1, rank: int = 0) -> VllmConfig:
    return VllmConfig(
        parallel_config=ParallelConfig(
            tensor_parallel_size=tensor_size, pipeline_parallel_size=stages, rank=rank
        )
    )


def attention(tensor_size: int, num_heads: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(num_kv_heads=max(1, num_heads // tensor_size))


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (SlidingWindowSpec(), "sliding_window", 48),
        (ChunkedLocalAttentionSpec(), "chunked_local", 64),
        (MambaSpec(), "recurrent_state", 0),
    ],
)
def test_each_kind_of_group_is_an_object_of_its_own(
    options: Options, spec: object, kind: str, window: int
) -> None:
    """Beside a group of full attention: kind and window are the engine's."""
    layout = derive_layout(VllmConfig(), cache(group(), group(spec, OTHER_NAMES)), options)
    assert layout.objects == ((0,), (1,))
    assert (layout.groups[1].kind, layout.groups[1].window) == (kind, window)


def test_groups_that_live_and_die_together_share_an_object(options: Options) -> None:
    """An engine splits layers of one window into groups of one size; their blocks come together."""
    window = SlidingWindowSpec()
    names = [[f"model.layers.{index}.w{part}" for index in range(2)] for part in range(2)]
    groups = [group(window, names[0]), group(), group(window, names[1])]
    assert derive_layout(VllmConfig(), cache(*groups), options).objects == ((0, 2), (1,))


def test_full_attention_that_computes_with_a_window_keeps_every_block(options: Options) -> None:
    """An engine without its hybrid manager says full attention and notes the window."""
    spec = dataclasses.replace(FullAttentionSpec(), sliding_window=64)
    layout = derive_layout(VllmConfig(), cache(group(spec)), options)
    assert (layout.groups[0].kind, layout.groups[0].window) == ("full_attention", 0)


@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8])
def test_the_layout_says_the_whole_model_whatever_the_ranks(
    options: Options, tensor_size: int
) -> None:
    """Four heads on 1 to 8 ranks: one description, cut for each writer."""
    layout = derive_layout(config(tensor_size), cache(group(attention(tensor_size))), options)
    assert layout.groups[0].layers[0].components[0].num_heads == 4
    assert layout.grid.head_shards == min(tensor_size, 4)


def test_ranks_that_are_cut_alike_share_a_namespace(options: Options) -> None:
    """One rank with head_shards 2 and two ranks have one fingerprint; with 1 they don't."""
    two = derive_layout(config(2), cache(group(attention(2))), options)
    plain = derive_layout(config(1), cache(group(attention(1))), options)
    cut = parse_options({"store": "memory://", "model_identity": "v1", "head_shards": 2})
    one = derive_layout(config(1), cache(group(attention(1))), cut)
    assert fingerprint(one) == fingerprint(two) != fingerprint(plain)


def tensors(spec: FullAttentionSpec, num_blocks: int = 4) -> dict[str, Tensor]:
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
    return {name: Tensor(np.zeros(shape, np.uint16)) for name in NAMES}


@pytest.mark.parametrize("tensor_size", [1, 2, 4, 8])
@pytest.mark.parametrize("head_shards", [1, 2, 4])
def test_every_block_of_every_head_has_one_writer(
    options: Options, tensor_size: int, head_shards: int
) -> None:
    """Case 14: over all ranks, each object of each block is written once; each rank's objects
    fill its memory."""
    if head_shards < min(tensor_size, 4):
        head_shards = min(tensor_size, 4)
    wanted = {"store": "memory://", "model_identity": "v1", "head_shards": head_shards}
    spec = attention(tensor_size)
    layout = derive_layout(config(tensor_size), cache(group(spec)), parse_options(wanted))
    written = []
    for rank in range(tensor_size):
        ranks = Ranks(tensor_size=tensor_size, tensor_rank=rank)
        placement = derive_placement(layout, tensors(spec), ranks)  # type: ignore[arg-type]
        for template in plan_put(layout, placement):
            replicas = replicas_of(template.object_map, ranks)
            written += [
                (template.object_map.shard.head, block_hash)
                for block_hash in HASHES
                if replicas.writes(block_hash)
            ]
        plan_get(layout, placement)
    assert len(written) == len(set(written)) == head_shards * len(HASHES)


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
def test_a_latent_cache_is_spread_over_its_replicas(options: Options, tensor_size: int) -> None:
    """MLA: every rank holds all of it, and each block has one writer."""
    spec = MLAAttentionSpec()
    layout = derive_layout(config(tensor_size), cache(group(spec)), options)
    assert layout.grid.head_shards == 1
    [component] = layout.groups[0].layers[0].components
    assert (component.name, component.sizes) == ("latent_rope", (32, 48))
    arrays = {name: Tensor(np.zeros((4, 1, 32, 48), np.uint16)) for name in NAMES}
    shares = []
    for rank in range(tensor_size):
        ranks = Ranks(tensor_size=tensor_size, tensor_rank=rank)
        [put] = plan_put(layout, derive_placement(layout, arrays, ranks))  # type: ignore[arg-type]
        replicas = replicas_of(put.object_map, ranks)
        shares.append(sum(replicas.writes(block_hash) for block_hash in HASHES))
    assert sum(shares) == len(HASHES)
    assert min(shares) > 0


@pytest.mark.parametrize(("head_shards", "tensor_size"), [(3, 2), (5, 4)])
def test_shards_that_cut_through_a_rank_stop_the_start(
    options: Options, head_shards: int, tensor_size: int
) -> None:
    """Three shards of eight heads on two ranks: the second shard would have two writers, so the
    option, its value and one that works are named."""
    wanted = {"store": "memory://", "model_identity": "v1", "head_shards": head_shards}
    with pytest.raises(ConfigError) as caught:
        derive_layout(
            config(tensor_size), cache(group(attention(tensor_size, 8))), parse_options(wanted)
        )
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert f"'head_shards' has the value {head_shards}" in caught.value.detail
    assert f"a multiple of {tensor_size}" in caught.value.detail


@pytest.mark.parametrize("head_shards", [2, 4, 6, 8, 1 << 16])
def test_multiples_of_the_ranks_never_cut_through_one(options: Options, head_shards: int) -> None:
    """Eight heads and a group of four on two ranks: accepted, however many shards are empty."""
    wanted = {"store": "memory://", "model_identity": "v1", "head_shards": head_shards}
    groups = cache(group(attention(2, 8)), group(attention(2, 4), OTHER_NAMES))
    layout = derive_layout(config(2), groups, parse_options(wanted))
    assert layout.grid.head_shards == head_shards


class PartOfTensor(Tensor):
    """A view of some columns: its storage is that of the whole."""

    def untyped_storage(self) -> SimpleNamespace:
        return Tensor(self.array.base).untyped_storage()


def test_recurrent_state_has_a_padded_row_and_a_part_per_rank(options: Options) -> None:
    """Case 18: the row's own bytes travel; each of two ranks writes its part."""
    layout = derive_layout(config(2), cache(group(MambaSpec())), options)
    whole = np.zeros((4, 1, 1, STATE_NBYTES + 64), np.int8)
    arrays = {name: PartOfTensor(whole[..., :STATE_NBYTES]) for name in NAMES}
    heads = set()
    for rank in range(2):
        ranks = Ranks(tensor_size=2, tensor_rank=rank)
        placement = derive_placement(layout, arrays, ranks)  # type: ignore[arg-type]
        [put] = plan_put(layout, placement)
        heads.add(put.object_map.shard.head)
        bound = put.layers[0].bind(np.array([2]))
        assert bound.sizes == [(STATE_NBYTES,)]
        assert bound.addresses == [(whole[2].ctypes.data,)]
    assert heads == {0, 1}


def stages(options: Options, *parts: list[str]) -> list[object]:
    return [
        describe_stage(config(1, len(parts), stage), cache(group(names=names)))
        for stage, names in enumerate(parts)
    ]


NAMES_8 = [f"model.layers.{index}.attn" for index in range(8)]


@pytest.fixture
def eight_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelConfig, "num_layers", 8)


@pytest.mark.usefixtures("eight_layers")
def test_uneven_stages_are_joined_and_cut_where_they_end(options: Options) -> None:
    """Case 16: 5 + 3 layers; one stage that is told the same cut shares objects with the two."""
    parts = stages(options, NAMES_8[:5], NAMES_8[5:])
    two = derive_layout(config(1, 2), cache(group(names=NAMES_8[:5])), options, parts)
    assert [layer.name for layer in two.groups[0].layers] == NAMES_8
    assert two.grid.layer_starts == ((0, 5),)
    cut = parse_options({"store": "memory://", "model_identity": "v1", "layer_segments": [5, 3]})
    one = derive_layout(config(), cache(group(names=NAMES_8)), cut)
    assert fingerprint(one) == fingerprint(two)


@pytest.mark.usefixtures("eight_layers")
def test_a_stage_without_a_layer_of_a_group(options: Options) -> None:
    """A group whose layers are all on the second stage: the first has no shard of it."""
    first = describe_stage(config(1, 2), cache(group(names=NAMES_8[:4]), group(names=[])))
    second = describe_stage(
        config(1, 2, 1), cache(group(names=NAMES_8[4:]), group(MambaSpec(), ["model.layers.7.m"]))
    )
    layout = derive_layout(
        config(1, 2),
        cache(group(names=NAMES_8[:4]), group(names=[])),
        options,
        [first, second],
    )
    assert layout.grid.layer_starts == ((0, 4), (0, 0))
    assert {(m.object_index, m.shard.layer) for m in object_maps(layout)} == {
        (0, 0),
        (0, 1),
        (1, 1),
    }


@pytest.mark.usefixtures("eight_layers")
def test_a_stage_that_ends_inside_of_a_segment_is_refused(options: Options) -> None:
    """A stage writes whole segments: the option that cuts through one is named."""
    three = parse_options({"store": "memory://", "model_identity": "v1", "layer_segments": 4})
    with pytest.raises(ConfigError) as caught:
        derive_layout(
            config(1, 2),
            cache(group(names=NAMES_8[:5])),
            three,
            stages(options, NAMES_8[:5], NAMES_8[5:]),  # type: ignore[arg-type]
        )
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert "layer_segments" in caught.value.detail


@pytest.mark.usefixtures("eight_layers")
def test_segments_must_add_up(options: Options) -> None:
    """Sizes of another model are a wrong value, named."""
    wrong = parse_options({"store": "memory://", "model_identity": "v1", "layer_segments": [5, 4]})
    with pytest.raises(ConfigError) as caught:
        derive_layout(config(), cache(group(names=NAMES_8)), wrong)
    assert caught.value.reason is Reason.CONFIG_VALUE


def notices(*layouts: Layout) -> dict[int, LayoutNotice]:
    return {
        rank: LayoutNotice(rank=rank, manifest=manifest(layout))
        for rank, layout in enumerate(layouts)
    }


@pytest.mark.usefixtures("eight_layers")
def test_the_scheduler_learns_the_other_stages_from_the_workers(options: Options) -> None:
    """Its own configuration lists the first stage only; it takes the rest, and checks its part."""
    parts = stages(options, NAMES_8[:5], NAMES_8[5:])
    first = cache(group(names=NAMES_8[:5]))
    workers = derive_layout(config(1, 2), first, options, parts)  # type: ignore[arg-type]
    assert adopt_layout(config(1, 2), first, options, notices(workers, workers)) == workers
    changed = config(1, 2)
    changed.model_config.rope_theta = 5e5
    with pytest.raises(HandshakeError) as caught:
        adopt_layout(changed, first, options, notices(workers, workers))
    assert "rope_theta" in caught.value.detail
    with pytest.raises(HandshakeError):
        adopt_layout(config(1, 2), first, options, {})
