"""Real vLLM on a Mooncake that breaks: every answer is the one without a cache."""

from __future__ import annotations

import signal

import pytest
from real_engine import NUM_BLOCKS, PROMPTS, Servers, hits, tokens

from kvformat_connector.store.mooncake_services import mooncake_services

pytestmark = [pytest.mark.vllm, pytest.mark.mooncake]


def test_storage_that_freezes_in_the_middle_of_a_load(servers: Servers) -> None:
    """SIGSTOP between two layers: the request recomputes after one deadline, the next one is served
    without the pool, and the tokens are those of the cold run."""
    with mooncake_services() as services:
        options = {
            "tenant": f"freezes-{services.client.pid}",
            "transfer_deadline_ms": 2000,
            "layerwise_prefetch_layers": 1,
        }
        cold = servers.run(store=services.uri, prompts=PROMPTS, options=options)
        assert cold.worker["save.blocks"] == sum(NUM_BLOCKS)
        try:
            warm = servers.run(
                store=services.uri,
                prompts=PROMPTS,
                options=options,
                connector_name="FreezingConnector",
                connector_module="freezing",
            )
        finally:
            services.client.send_signal(signal.SIGCONT)
    assert tokens(warm) == tokens(cold)
    assert warm.worker["rejected.deadline"] == NUM_BLOCKS[0]
    assert warm.worker["breaker.opened"] == 1
    assert "load.blocks" not in warm.worker
    assert hits(warm)[1] == 0
