"""Real vLLM in its topologies: tensor, pipeline and data parallel ranks, one store between them."""

from __future__ import annotations

import pytest
from data_parallel import run_data_parallel
from real_engine import hits, tokens
from topology_engines import (
    DIGESTING,
    FIRST,
    SECOND,
    STATEFUL,
    TWO_RANKS,
    Engines,
    expect_equal,
    ranks,
)

from kvformat.errors import Reason
from kvformat.stores.opening import open_store
from kvformat_connector.demo.engines import ChildError
from kvformat_connector.demo.model import make_prompt
from kvformat_connector.demo.storage import flip_byte, read_contents

pytestmark = pytest.mark.vllm

#: Eight whole blocks and four tokens, of which another server knows the first four blocks.
LONG = make_prompt(260, 11)
KNOWN = LONG[:132]


def damage(uri: str, namespace: str, part: str) -> dict[str, bytes]:
    """Flip a bit of each object with ``part`` in its key; answers what they were."""
    keys = [key for key in read_contents(uri, namespace).keys if part in key]
    store = open_store(uri)
    try:
        whole = {key: bytes(store.get(key) or b"") for key in keys}
    finally:
        store.close()
    for key in keys:
        flip_byte(uri, key, 0)
    return whole


def put_objects(uri: str, objects: dict[str, bytes]) -> None:
    """Put objects in the place of what is there."""
    store = open_store(uri)
    try:
        store.remove(list(objects))
        for key, data in objects.items():
            store.put(key, data)
    finally:
        store.close()


@pytest.mark.timeout(900)
def test_one_rank_and_two_share_heads(engines: Engines, store: str) -> None:
    """TP=1 writes and TP=2 reads, and the reverse: with two head shards both have one namespace,
    each of two ranks writes one object a block and reads its own, and answers are those of a
    computation without a cache.

    Objects of the second rank are damaged on the way: it alone rejects them, neither rank saves
    what was computed on the other's garbage, and both save it when it has been computed again."""
    one_rank = {"options": {"head_shards": 2}}
    plain = engines.run("Llama", None, FIRST, SECOND, LONG)
    cold = engines.run("Llama", store, KNOWN, **one_rank)
    damaged = damage(store, cold.namespace, "h0001c")
    assert engines.run("Llama", store, FIRST, **one_rank).worker["save.blocks"] == 2 * 8
    both = engines.run("Llama", store, FIRST, SECOND, LONG, num_rejections=4, **ranks(2))
    assert both.namespace == cold.namespace
    assert tokens(both) == tokens(plain)
    assert hits(both)[:2] == [256, 0]
    assert both.scheduler["lookup.broken_promises"] == 4
    first, second = (rank.counters for rank in both.ranks)
    assert first["load.blocks"] == 8 + 4
    assert second["load.blocks"] == 8
    assert second["rejected.checksum_mismatch"] == 4
    assert "rejected.checksum_mismatch" not in first
    assert {rejection["key"] for rejection in both.ranks[1].rejections} == set(damaged)
    assert first["save.tainted"] == second["save.tainted"] == 4
    assert (first["save.blocks"], first["save.exists"]) == (4 + 4, 4)
    # What is proven damaged is removed, and may have been written again.
    assert second["save.blocks"] + second.get("save.exists", 0) == 4 + 8

    put_objects(store, damaged)
    warm = engines.run("Llama", store, SECOND, LONG, **one_rank)
    assert hits(warm) == [128, 256]
    assert warm.worker["load.blocks"] == 2 * (4 + 8)
    assert tokens(warm) == tokens(plain)[1:]


@pytest.mark.timeout(900)
def test_windows_on_two_ranks(engines: Engines, store: str) -> None:
    """Sliding and full attention at TP=2, loaded in bulk: each rank loads its heads of the windows
    and of all blocks. What one rank alone can't load, neither uses, and both compute."""
    one_rank = {"options": {"head_shards": 2}}
    plain = engines.run("Gemma3", None, FIRST, LONG)
    cold = engines.run("Gemma3", store, KNOWN, **one_rank)
    damaged = damage(store, cold.namespace, "h0001c")
    engines.run("Gemma3", store, FIRST, **one_rank)
    both = engines.run("Gemma3", store, FIRST, LONG, num_rejections=4 + 2, **ranks(2))
    assert both.namespace == cold.namespace
    assert tokens(both) == tokens(plain)
    assert hits(both)[0] == 256
    first, second = both.ranks
    assert first.counters["load.blocks"] == 8 + 2 + 4 + 2
    assert second.counters["load.blocks"] == 8 + 2
    assert {rejection["key"] for rejection in second.rejections} <= set(damaged)


@pytest.mark.timeout(900)
def test_recurrent_state_on_two_ranks(engines: Engines, store: str) -> None:
    """Gated delta nets at TP=2: each rank saves and loads its part of a state and its heads of
    attention; answers are equal to the bit."""
    two_ranks = ranks(2, dtype="bfloat16", max_model_len=4096)
    cold = engines.run("Qwen3Next", store, STATEFUL, **two_ranks)
    assert [rank.counters["save.blocks"] for rank in cold.ranks] == [2 + 1, 2 + 1]
    warm = engines.run("Qwen3Next", store, STATEFUL, **two_ranks)
    assert hits(warm) == [2112]
    assert [rank.counters["load.blocks"] for rank in warm.ranks] == [2 + 1, 2 + 1]
    expect_equal(warm, cold)


@pytest.mark.timeout(900)
def test_ranks_that_hold_the_same_latent_share_the_writing(engines: Engines, store: str) -> None:
    """MLA at TP=2, with a layer that predicts a second token: both ranks load every block and hold
    the bytes that TP=1 wrote; what they write they share, each block once. (KV bytes are compared,
    because vLLM's MLA on a CPU doesn't give one answer itself.)"""
    engine = {
        "dtype": "bfloat16",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    cold = engines.run("DeepseekV3", store, FIRST, engine=engine, **DIGESTING)
    both = engines.run("DeepseekV3", store, FIRST, SECOND, **DIGESTING, **ranks(2, **engine))
    assert both.namespace == cold.namespace
    assert hits(both) == [256, 0]
    written = cold.ranks[0].digests
    assert len(written) == 8 * (3 + 1)
    for rank in both.ranks:
        assert written.items() <= rank.digests.items()
        assert rank.counters["load.blocks"] == 8
    assert sum(rank.counters.get("save.blocks", 0) for rank in both.ranks) == 4
    assert len(read_contents(store, cold.namespace).keys) == 8 + 4


@pytest.mark.timeout(900)
def test_data_parallel_ranks_write_the_same_prompts(engines: Engines, store: str) -> None:
    """DP=2, both ranks handed the same prompts at once: one object a block whoever was first, no
    error, right answers, and a third engine answers from what they wrote. (A dense model: with
    experts, vLLM on a CPU ends under DP, connector or not.)"""
    both = run_data_parallel(engines.model("Llama"), store, [FIRST, SECOND])
    plain = engines.run("Llama", None, FIRST, SECOND)
    assert both.answers == [tokens(plain), tokens(plain)]
    counters = [rank.counters for rank in both.ranks]
    assert sum(found.get("save.blocks", 0) for found in counters) == 8 + 4
    for found in counters:
        # A rank has written each block, or found it written, or has loaded it.
        assert sum(found.get(way, 0) for way in ("save.blocks", "save.exists", "load.blocks")) == 12
        assert set(found) <= {
            "save.blocks", "save.nbytes", "save.exists", "load.blocks", "load.nbytes",
        }  # fmt: skip
    reader = engines.run("Llama", store, FIRST, SECOND)
    assert len(read_contents(store, reader.namespace).keys) == 8 + 4
    assert hits(reader) == [256, 128]
    assert tokens(reader) == tokens(plain)


STAGES = {
    "engine": {
        "pipeline_parallel_size": 2,
        "enforce_eager": False,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
    "environment": {**TWO_RANKS, "TORCH_COMPILE_DISABLE": "0", "VLLM_PP_LAYER_PARTITION": "3,1"},
    "timeout_s": 600,
}


@pytest.mark.timeout(900)
def test_two_stages_and_one_share_layers(engines: Engines, store: str) -> None:
    """PP=2 of 3 + 1 layers writes and PP=1 reads, and the reverse: cut at the same layers, both
    have one namespace. What the second stage alone can't load is computed by both."""
    one_stage = {"options": {"layer_segments": [3, 1]}}
    plain = engines.run("Llama", None, FIRST, SECOND, LONG)
    cold = engines.run("Llama", store, KNOWN, **one_stage)
    damaged = damage(store, cold.namespace, "/l0001h")
    engines.run("Llama", store, FIRST, **one_stage)
    both = engines.run("Llama", store, FIRST, SECOND, LONG, num_rejections=4, **STAGES)
    assert both.namespace == cold.namespace
    assert tokens(both) == tokens(plain)
    assert hits(both)[:2] == [256, 0]
    first, second = both.ranks
    assert first.counters["load.blocks"] == 8 + 4
    assert second.counters["load.blocks"] == 8
    assert {rejection["key"] for rejection in second.rejections} == set(damaged)
    assert first.counters["save.blocks"] == 4 + 4
    put_objects(store, damaged)
    warm = engines.run("Llama", store, SECOND, LONG, **one_stage)
    assert hits(warm) == [128, 256]
    assert tokens(warm) == tokens(plain)[1:]


def test_context_parallelism_is_refused_by_name(engines: Engines, store: str) -> None:
    """The start stops with option, value and reason. (vLLM can't run it on a CPU either: its
    attention there doesn't give what partial results are joined by.)"""
    engine = {"dtype": "bfloat16", "decode_context_parallel_size": 2}
    with pytest.raises(ChildError) as caught:
        engines.run("DeepseekV3", store, SECOND, **ranks(2, **engine))
    assert "decode_context_parallel_size is 2" in str(caught.value)
    assert f"[{Reason.CONFIG_UNSUPPORTED.value}]" in str(caught.value)
