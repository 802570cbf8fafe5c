"""Real vLLM in its topologies: ranks, stages and kinds of layers, one store between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from real_engine import hits, logprobs, tokens
from topology_models import make_topology_model

from kvformat_connector.demo.engines import EngineReport, EngineSpec
from kvformat_connector.demo.host import EngineHost
from kvformat_connector.demo.model import make_prompt

pytestmark = pytest.mark.vllm

#: Eight whole blocks and four tokens, four blocks and four, of 32 tokens.
FIRST, SECOND = make_prompt(260, 7), make_prompt(132, 5)

TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


class Engines:
    """Runs engines on one of the tiny checkpoints."""

    def __init__(self, host: EngineHost, models: Path) -> None:
        self._host = host
        self._models = models

    def model(self, name: str) -> str:
        return make_topology_model(self._models, name)

    def run(
        self,
        name: str,
        store: str | None,
        *prompts: list[int],
        engine: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> EngineReport:
        """``engine`` are options of vLLM, ``options`` the connector's, ``fields`` EngineSpec's."""
        report = self._host.run(
            EngineSpec(
                model=self.model(name),
                prompts=list(prompts),
                connector_options=None if store is None else {"store": store, **(options or {})},
                engine_options=engine or {},
                **fields,
            )
        )
        assert report.error == ""
        assert report.rejections == []
        return report


@pytest.fixture(scope="session")
def engines(host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(host, tmp_path_factory.mktemp("topologies"))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def ranks(size: int, **more: Any) -> dict[str, Any]:
    """Fields of an engine of several workers."""
    return {
        "engine": {"tensor_parallel_size": size, **more},
        "environment": TWO_RANKS,
        "timeout_s": 600,
    }


def expect_equal(loaded: EngineReport, computed: EngineReport) -> None:
    assert tokens(loaded) == tokens(computed)
    assert logprobs(loaded) == logprobs(computed)


@pytest.mark.timeout(900)
def test_one_rank_and_two_share_heads(engines: Engines, store: str) -> None:
    """TP=1 writes and TP=2 reads, and the reverse: with two head shards both have one namespace,
    each of two ranks writes one object a block and reads its own, and answers are those of a
    computation without a cache."""
    one_rank = {"options": {"head_shards": 2}}
    plain = engines.run("Llama", None, FIRST, SECOND)
    cold = engines.run("Llama", store, FIRST, **one_rank)
    assert cold.worker["save.blocks"] == 2 * 8
    both = engines.run("Llama", store, FIRST, SECOND, **ranks(2))
    assert both.namespace == cold.namespace
    assert hits(both) == [256, 0]
    assert [rank.counters["load.blocks"] for rank in both.ranks] == [8, 8]
    assert [rank.counters["save.blocks"] for rank in both.ranks] == [4, 4]
    assert tokens(both) == tokens(plain)
    warm = engines.run("Llama", store, SECOND, **one_rank)
    assert hits(warm) == [128]
    assert warm.worker["load.blocks"] == 2 * 4
    assert tokens(warm) == tokens(plain)[1:]


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
    have one namespace."""
    one_stage = {"options": {"layer_segments": [3, 1]}}
    plain = engines.run("Llama", None, FIRST, SECOND)
    cold = engines.run("Llama", store, FIRST, **one_stage)
    both = engines.run("Llama", store, FIRST, SECOND, **STAGES)
    assert both.namespace == cold.namespace
    assert hits(both) == [256, 0]
    assert [rank.counters["load.blocks"] for rank in both.ranks] == [8, 8]
    assert [rank.counters["save.blocks"] for rank in both.ranks] == [4, 4]
    assert tokens(both) == tokens(plain)
    warm = engines.run("Llama", store, SECOND, **one_stage)
    assert hits(warm) == [128]
    assert tokens(warm) == tokens(plain)[1:]


@pytest.mark.parametrize(
    ("name", "num_objects"),
    [("Gemma3", 8 + 4 + 2 + 2), ("Mistral", 2 + 2)],
    ids=["sliding and full", "sliding"],
)
def test_windows(engines: Engines, store: str, name: str, num_objects: int) -> None:
    """A window of 64 tokens is loaded as its last two blocks, groups of one window in one object
    each; answers are equal to the bit."""
    cold = engines.run(name, store, FIRST, SECOND)
    warm = engines.run(name, store, FIRST, SECOND)
    assert hits(warm) == [256, 128]
    assert warm.worker["load.blocks"] == num_objects
    expect_equal(warm, cold)


def test_recurrent_state_and_full_attention(engines: Engines, store: str) -> None:
    """Gated delta nets beside full attention, in blocks of 1056 tokens that the engine chose: the
    blocks of attention and one state, all three groups of states in one object, are loaded."""
    prompt = make_prompt(2200, 7)
    engine = {"dtype": "bfloat16", "max_model_len": 4096}
    cold = engines.run("Qwen3Next", store, prompt, engine=engine)
    assert cold.worker["save.blocks"] == 2 + 1
    warm = engines.run("Qwen3Next", store, prompt, engine=engine)
    assert hits(warm) == [2112]
    assert warm.worker["load.blocks"] == 2 + 1
    assert tokens(warm) == tokens(cold)
