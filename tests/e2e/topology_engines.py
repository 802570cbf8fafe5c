"""What the tests of topologies share: prompts, engines on tiny checkpoints, and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from real_engine import logprobs, tokens
from topology_models import topology_model

from kvformat_connector.demo.engines import EngineReport, EngineSpec
from kvformat_connector.demo.host import EngineHost
from kvformat_connector.demo.model import make_prompt

#: Eight whole blocks and four tokens, four blocks and four, of 32 tokens.
FIRST, SECOND = make_prompt(260, 7), make_prompt(132, 5)

#: Two whole blocks of 1056 tokens, and so few after them that a state is not yet forgotten.
STATEFUL = make_prompt(2116, 7)

#: Fields of engines whose connector clears what it loads, or notes digests of it.
ZEROING: Final = {
    "connector_name": "ZeroingConnector",
    "connector_module": "kvformat_connector.demo.zeroing",
}
DIGESTING: Final = {"connector_name": "DigestingConnector", "connector_module": "digesting"}


def zeroing(kind: str) -> dict[str, Any]:
    """Fields of an engine whose connector clears what it loads of one kind of group."""
    return {
        "connector_name": "ZeroingKindConnector",
        "connector_module": "zeroing_kinds",
        "environment": {"ZEROED_KIND": kind},
    }


#: Each of two processes on a core of its own.
TWO_RANKS: Final = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


class Engines:
    """Runs engines on one of the tiny checkpoints."""

    def __init__(self, host: EngineHost, models: Path) -> None:
        self._host = host
        self._models = models

    def model(self, name: str) -> str:
        return topology_model(self._models, name)

    def run(
        self,
        name: str,
        store: str | None,
        *prompts: list[int],
        engine: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        num_rejections: int = 0,
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
        assert len(report.rejections) == num_rejections
        return report


def ranks(size: int, **more: Any) -> dict[str, Any]:
    """Fields of an engine of several workers."""
    return {
        "engine": {"tensor_parallel_size": size, **more},
        "environment": TWO_RANKS,
        "timeout_s": 600,
    }


def expect_equal(loaded: EngineReport, computed: EngineReport) -> None:
    """Answers are equal to the bit, and not one token over and over, which anything may give."""
    assert tokens(loaded) == tokens(computed)
    assert logprobs(loaded) == logprobs(computed)
    assert all(len(set(answer)) > 2 for answer in tokens(computed))


def expect_other(zeroed: EngineReport, computed: EngineReport) -> None:
    """No answer is the same: the comparison can tell right KV from wrong."""
    assert all(a != b for a, b in zip(tokens(zeroed), tokens(computed), strict=True))
