"""Real vLLM with every kind of cache that it has on a CPU: windows, recurrent state, drafts, 8-bit
floats, and other block sizes."""

from __future__ import annotations

from typing import Any

import pytest
from real_engine import hits, tokens
from topology_engines import (
    DIGESTING,
    FIRST,
    SECOND,
    STATEFUL,
    ZEROING,
    Engines,
    expect_equal,
    expect_other,
    zeroing,
)

from kvformat_connector.demo.storage import compare_namespaces

pytestmark = pytest.mark.vllm

BFLOAT16 = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("name", "engine", "kinds", "num_objects"),
    [
        ("Gemma3", {}, ["sliding_window", "full_attention"], 8 + 4 + 2 + 2),
        ("GptOss", BFLOAT16, ["sliding_window", "full_attention"], 8 + 4 + 2 + 2),
        ("Mistral", {}, ["sliding_window"], 2 + 2),
    ],
    ids=["sliding and full", "sliding and full with sinks", "sliding"],
)
def test_windows(
    engines: Engines,
    store: str,
    name: str,
    engine: dict[str, Any],
    kinds: list[str],
    num_objects: int,
) -> None:
    """A window of 64 tokens is loaded as its last two blocks, groups of one window in one object
    each; answers are equal to the bit, and others where the KV of either kind is zeroed."""
    cold = engines.run(name, store, FIRST, SECOND, engine=engine)
    warm = engines.run(name, store, FIRST, SECOND, engine=engine)
    assert hits(warm) == [256, 128]
    assert warm.worker["load.blocks"] == num_objects
    expect_equal(warm, cold)
    for kind in kinds:
        zeroed = engines.run(name, store, FIRST, SECOND, engine=engine, **zeroing(kind))
        expect_other(zeroed, cold)


def test_recurrent_state_and_full_attention(engines: Engines, store: str) -> None:
    """Gated delta nets beside full attention, in blocks of 1056 tokens that the engine chose: the
    blocks of attention and one state, all three groups of states in one object, are loaded.
    Answers are equal to the bit, and others where the KV of either kind is zeroed."""
    engine = {**BFLOAT16, "max_model_len": 4096}
    cold = engines.run("Qwen3Next", store, STATEFUL, engine=engine)
    assert cold.worker["save.blocks"] == 2 + 1
    warm = engines.run("Qwen3Next", store, STATEFUL, engine=engine)
    assert hits(warm) == [2112]
    assert warm.worker["load.blocks"] == 2 + 1
    expect_equal(warm, cold)
    for kind in ("recurrent_state", "full_attention"):
        zeroed = engines.run("Qwen3Next", store, STATEFUL, engine=engine, **zeroing(kind))
        expect_other(zeroed, cold)


@pytest.mark.parametrize(
    ("method", "model", "draft_layer"),
    [
        ("draft_model", "LlamaDraft", "draft_model.model.layers.0.self_attn.attn"),
        ("eagle", "LlamaEagle", "model.layers.4.self_attn.attn"),
    ],
)
def test_layers_of_a_draft_are_in_the_object(
    engines: Engines, store: str, method: str, model: str, draft_layer: str
) -> None:
    """Speculative decoding: the draft's layer joins the group, is saved and loaded byte by byte,
    and answers are those of an engine without a draft and without a cache."""
    draft = {"model": engines.model(model), "method": method, "num_speculative_tokens": 2}
    engine = {"speculative_config": draft}
    plain = engines.run("Llama", None, FIRST, SECOND)
    cold = engines.run("Llama", store, FIRST, SECOND, engine=engine, **DIGESTING)
    warm = engines.run("Llama", store, FIRST, SECOND, engine=engine, **DIGESTING)
    assert hits(warm) == [256, 128]
    assert tokens(warm) == tokens(cold) == tokens(plain)
    written = cold.ranks[0].digests
    assert len(written) == (8 + 4) * (4 + 1)
    assert sum(key.endswith(f"/{draft_layer}") for key in written) == 8 + 4
    assert warm.ranks[0].digests == written


def test_engines_that_agree_on_nothing_share_nothing(engines: Engines, store: str) -> None:
    """One store, three engines: 32 tokens a block of 32-bit floats, 64 of one 8-bit float, 128 of
    the other. None hits what another wrote, each hits what it wrote itself, answers are equal to
    the bit, and others where the KV is zeroed."""
    kinds: list[dict[str, Any]] = [
        {"block_size": 32},
        {"block_size": 64, "kv_cache_dtype": "fp8"},
        {"block_size": 128, "kv_cache_dtype": "fp8_e5m2"},
    ]
    cold = [engines.run("Llama", store, FIRST, engine=engine) for engine in kinds]
    assert [hits(report) for report in cold] == [[0], [0], [0]]
    assert len({report.namespace for report in cold}) == 3
    differing = compare_namespaces(store, cold[1].namespace, cold[2].namespace)
    assert {path for path, _, _ in differing} >= {
        "groups[0].block_size",
        "groups[0].layers[0..3].components[kv].dtype",
        "hash.block_size",
    }
    for engine, computed in zip(kinds, cold, strict=True):
        warm = engines.run("Llama", store, FIRST, engine=engine)
        assert hits(warm) == [256]
        assert warm.worker["load.blocks"] == 256 // engine["block_size"]
        expect_equal(warm, computed)
    for engine, computed in zip(kinds[1:], cold[1:], strict=True):
        expect_other(engines.run("Llama", store, FIRST, engine=engine, **ZEROING), computed)
