"""Real vLLM: what a cold engine saves, a warm one loads, and the answers are equal to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engine import (
    BLOCK_SIZE,
    COMMITS,
    NUM_BLOCKS,
    PROMPTS,
    Servers,
    copy_of,
    hits,
    logprobs,
    tokens,
)

from kvformat_connector.demo.engines import EngineReport
from kvformat_connector.demo.model import make_prompt
from kvformat_connector.demo.storage import compare_namespaces, flip_byte, read_contents
from kvformat_connector.store.mooncake_services import MooncakeServices

pytestmark = pytest.mark.vllm
Filled = tuple[str, EngineReport]


def expect_warm(cold: EngineReport, warm: EngineReport) -> None:
    """A warm engine hit and loaded every whole block, and said the same."""
    assert hits(warm) == [BLOCK_SIZE * blocks for blocks in NUM_BLOCKS]
    assert warm.worker["load.blocks"] == sum(NUM_BLOCKS)
    assert set(warm.worker) == {"load.blocks", "load.nbytes"}
    assert warm.rejections == []
    assert tokens(warm) == tokens(cold)
    assert logprobs(warm) == logprobs(cold)


def test_saving_changes_no_answer(servers: Servers, filled: Filled) -> None:
    """An engine with the connector answers as one without, and every whole block is stored."""
    uri, cold = filled
    plain = servers.run(store=None, prompts=PROMPTS)
    assert tokens(cold) == tokens(plain)
    assert logprobs(cold) == logprobs(plain)
    assert hits(cold) == [0, 0]
    contents = read_contents(uri, cold.namespace)
    assert len(contents.keys) == sum(NUM_BLOCKS) == cold.worker["save.blocks"]
    assert contents.nbytes == cold.worker["save.nbytes"]


def test_a_fresh_engine_answers_from_the_store(servers: Servers, filled: Filled) -> None:
    """Cold in one process, warm in another: tokens equal, logprobs bit-identical."""
    uri, cold = filled
    expect_warm(cold, servers.run(store=uri, prompts=PROMPTS))


def test_bulk_loads_answer_the_same(servers: Servers, filled: Filled, tmp_path: Path) -> None:
    """With ``use_layerwise: false`` whole objects are loaded before a request starts: the same
    answers, and an object with a flipped bit is rejected and its request recomputed."""
    uri, cold = copy_of(filled[0], tmp_path), filled[1]
    bulk = {"use_layerwise": False}
    expect_warm(cold, servers.run(store=uri, prompts=PROMPTS, options=bulk))
    victim = read_contents(uri, cold.namespace).keys[7]
    flip_byte(uri, victim, 5)
    report = servers.run(store=uri, prompts=PROMPTS, options=bulk)
    assert [r["reason"] for r in report.rejections] == ["checksum_mismatch"]
    assert tokens(report) == tokens(cold)


def test_each_request_is_loaded_its_own_way(servers: Servers, tmp_path: Path) -> None:
    """With ``use_layerwise: auto`` a long prompt, whose 28 objects are above 4 MiB, and a short one
    of one batch: the same answers, checked by headers instead of checksums."""
    uri, prompts = f"file://{tmp_path / 'store'}", [make_prompt(900, 7), make_prompt(100, 5)]
    cold = servers.run(store=uri, prompts=prompts)
    options = {"use_layerwise": "auto", "verify": "header"}
    warm = servers.run(store=uri, prompts=prompts, options=options, together=True)
    assert hits(warm) == [28 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert warm.worker["load.blocks"] == 28 + 3
    assert warm.rejections == []
    assert tokens(warm) == tokens(cold)


def test_each_chunk_loads_its_prefix_again(servers: Servers, tmp_path: Path) -> None:
    """With ``chunk_prefix_reload`` the second to fourth chunk load 3, 6 and 9 blocks before they
    compute, in steps of which the engine doesn't know that they load anything."""
    prompts = [make_prompt(300, 7)]
    chunks = {"engine_options": {"max_num_batched_tokens": 3 * BLOCK_SIZE}}
    plain = servers.run(store=None, prompts=prompts, **chunks)
    uri, options = f"file://{tmp_path / 'store'}", {"chunk_prefix_reload": True}
    report = servers.run(store=uri, prompts=prompts, options=options, **chunks)
    assert report.worker["load.blocks"] == 3 + 6 + 9
    assert report.rejections == []
    assert tokens(report) == tokens(plain)
    assert logprobs(report) == logprobs(plain)


def test_zeroed_kv_gives_other_answers(servers: Servers, filled: Filled) -> None:
    """The negative control: hits are claimed and the KV zeroed. Equal tokens would mean that the
    comparison above can't tell right KV from wrong."""
    uri, cold = filled
    zeroed = servers.run(
        store=uri,
        prompts=PROMPTS,
        connector_name="ZeroingConnector",
        connector_module="kvformat_connector.demo.zeroing",
    )
    assert hits(zeroed) == [BLOCK_SIZE * blocks for blocks in NUM_BLOCKS]
    assert all(a != b for a, b in zip(tokens(zeroed), tokens(cold), strict=True))


@pytest.mark.parametrize(
    "engine_options",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}],
    ids=["bfloat16", "fp8_e4m3"],
)
def test_other_dtypes(servers: Servers, tmp_path: Path, engine_options: dict[str, str]) -> None:
    """Caches that the kernels pack otherwise (bf16 in pairs on AMX) or quantise: a hit in the store
    answers to the bit as a hit in the engine's own prefix cache does. (The cold answer is no
    measure here: kernels for few and for many tokens round bf16 differently.)"""
    uri = f"file://{tmp_path / 'store'}"
    twice = [prompt for prompt in PROMPTS for _ in range(2)]
    plain = servers.run(store=None, prompts=twice, engine_options=engine_options)
    local = EngineReport(answers=plain.answers[1::2])
    servers.run(store=uri, prompts=PROMPTS, engine_options=engine_options)
    expect_warm(local, servers.run(store=uri, prompts=PROMPTS, engine_options=engine_options))


@pytest.mark.mooncake
def test_mooncake(servers: Servers, mooncake: MooncakeServices) -> None:
    """The same through a real Mooncake master and storage client."""
    options = {"tenant": "test_mooncake"}
    cold = servers.run(store=mooncake.uri, prompts=PROMPTS, options=options)
    assert cold.worker == {
        "save.blocks": sum(NUM_BLOCKS),
        "save.nbytes": read_contents(mooncake.uri, cold.namespace).nbytes,
    }
    expect_warm(cold, servers.run(store=mooncake.uri, prompts=PROMPTS, options=options))


def test_requests_of_one_batch_share_blocks(
    servers: Servers, filled: Filled, tmp_path: Path
) -> None:
    """Prompts with a common prefix, all at once and in small chunks: each block is stored once, and
    a fresh engine that is asked all at once answers the same."""
    prefix = make_prompt(200, 11)
    prompts = [[*prefix, *make_prompt(100, stride)] for stride in (3, 13, 17)]
    uri = f"file://{tmp_path / 'store'}"
    options = {"engine_options": {"max_num_batched_tokens": 96}, "together": True}
    plain = servers.run(store=None, prompts=prompts, **options)
    cold = servers.run(store=uri, prompts=prompts, **options)
    warm = servers.run(store=uri, prompts=prompts, **options)
    assert tokens(cold) == tokens(plain) == tokens(warm)
    # 300 tokens are 9 whole blocks, 6 of them common.
    assert cold.worker["save.blocks"] == 6 + 3 * 3
    assert hits(warm) == [9 * BLOCK_SIZE] * 3
    assert warm.rejections == []
    assert "save.blocks" not in warm.worker


@pytest.mark.parametrize("layer_index", [0, 5])
def test_a_flipped_bit_is_rejected_and_recomputed(
    servers: Servers, filled: Filled, tmp_path: Path, layer_index: int
) -> None:
    """The object is named with group, layer and reason; the others are used; tokens are equal."""
    uri, cold = copy_of(filled[0], tmp_path), filled[1]
    keys = read_contents(uri, cold.namespace).keys
    victim = keys[7]
    flip_byte(uri, victim, layer_index)
    report = servers.run(store=uri, prompts=PROMPTS)
    [rejection] = report.rejections
    assert (rejection["key"], rejection["reason"]) == (victim, "checksum_mismatch")
    assert f"group 0 layer {layer_index}:" in rejection["detail"]
    assert report.worker["load.blocks"] == sum(NUM_BLOCKS) - 1
    assert report.scheduler["lookup.broken_promises"] == 1
    assert tokens(report) == tokens(cold)


def test_the_failure_policy_of_vllm_decides(
    servers: Servers, filled: Filled, tmp_path: Path
) -> None:
    """With policy ``fail`` the request that met a damaged object ends with an error, and the engine
    answers the next one."""
    uri, cold = copy_of(filled[0], tmp_path), filled[1]
    for key in read_contents(uri, cold.namespace).keys:
        flip_byte(uri, key, 0)
    report = servers.run(
        store=uri, prompts=[PROMPTS[0], make_prompt(60, 19)], load_failure_policy="fail"
    )
    assert [answer.finish_reason for answer in report.answers] == ["error", "length"]


@pytest.mark.parametrize(
    ("fields", "differing"),
    [
        ({"commit": COMMITS[1]}, {"identity.weights"}),
        (
            {"engine_options": {"kv_cache_dtype": "fp8_e4m3"}},
            {
                "identity.config.cache_config.cache_dtype",
                "groups[0].layers[0..7].components[kv].dtype",
            },
        ),
        (
            {"engine_options": {"hf_overrides": {"rope_parameters": {
                "rope_type": "default", "rope_theta": 5e5}}}},
            {
                "identity.config.model_config.hf_config.rope_parameters.rope_theta",
                "identity.config.model_config.hf_overrides",
                "identity.config.model_config.hf_overrides.rope_parameters.rope_theta",
                "identity.config.model_config.hf_overrides.rope_parameters.rope_type",
            },
        ),
    ],
    ids=["revision", "kv cache dtype", "rope override"],
)  # fmt: skip
def test_a_server_that_differs_hits_nothing(
    servers: Servers, filled: Filled, tmp_path: Path, fields: dict[str, object],
    differing: set[str],
) -> None:  # fmt: skip
    """Cases 3 and 4 on real engines: another revision, KV dtype or rope setting shares no block,
    and the stored manifests name exactly the fields."""
    uri, cold = copy_of(filled[0], tmp_path), filled[1]
    report = servers.run(store=uri, prompts=PROMPTS, **fields)
    assert hits(report) == [0, 0]
    assert report.worker["save.blocks"] == sum(NUM_BLOCKS)
    found = compare_namespaces(uri, cold.namespace, report.namespace)
    assert {path for path, _, _ in found} == differing
