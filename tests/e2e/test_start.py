"""Real vLLM: what must stop a start stops it, and says why."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_engine import PROMPTS, Servers, hits, tokens

from kvformat.errors import ConfigError, Reason

pytestmark = pytest.mark.vllm


def test_a_configuration_that_changed_on_the_way_to_the_worker_stops_the_start(
    servers: Servers, tmp_path: Path
) -> None:
    """Case 8: scheduler and worker compare layouts; the error names the field and both values."""
    report = servers.run(
        store=f"file://{tmp_path / 'store'}",
        prompts=[],
        connector_name="MutatingConnector",
        connector_module="mutating",
    )
    assert report.error_reason == "handshake_refused"
    assert "model_config.hf_config.rope_parameters.rope_theta" in report.error
    assert "10000.0" in report.error
    assert "500000.0" in report.error


def test_made_up_weights_need_an_identity(servers: Servers, tmp_path: Path) -> None:
    """Case 9: dummy weights stop the start and name the option; with it they are stored."""
    store = f"file://{tmp_path / 'store'}"
    dummy = {"load_format": "dummy"}
    report = servers.run(store=store, prompts=[], engine_options=dummy)
    assert report.error_reason == "config_missing"
    assert "'model_identity'" in report.error
    given = {"model_identity": "dummy-seed-1"}
    cold = servers.run(store=store, prompts=PROMPTS[1:], engine_options=dummy, options=given)
    warm = servers.run(store=store, prompts=PROMPTS[1:], engine_options=dummy, options=given)
    assert (hits(cold), hits(warm)) == ([0], [128])
    assert tokens(cold) == tokens(warm)


@pytest.mark.parametrize(
    ("store", "options", "reason"),
    [
        ("file:///nowhere", {"tenants": "a"}, "config_unknown"),
        ("file:///nowhere", {"lookup_window": "32"}, "config_value"),
        ("file:///nowhere", {"replica_num": 2}, "config_conflict"),
        ("file:///nowhere", {"discard_partial_chunks": False}, "config_unsupported"),
        ("gopher://nowhere", {}, "config_value"),
        ("mooncake://127.0.0.1:1", {}, "store_unavailable"),
    ],
    ids=[
        "unknown option",
        "wrong type",
        "contradiction",
        "unsupported value",
        "unknown store",
        "unreachable store",
    ],
)
def test_a_configuration_that_cannot_work_stops_the_start(
    servers: Servers, store: str, options: dict[str, object], reason: str
) -> None:
    """Case 37: the engine doesn't come up with a cache that will never work."""
    report = servers.run(store=store, prompts=[], options=options)
    assert report.error_reason == reason


@pytest.mark.parametrize(
    ("extra_config", "range_debug", "reason"),
    [
        ({"store": "memory://", "stor": "x"}, None, Reason.CONFIG_UNKNOWN),
        ({"store": "memory://", "lookup_window": "32"}, None, Reason.CONFIG_VALUE),
        ({"store": "memory://", "replica_num": 2}, None, Reason.CONFIG_CONFLICT),
        ({}, None, Reason.CONFIG_MISSING),
        ({"store": "memory://"}, "yes", Reason.CONFIG_VALUE),
        ({"store": "memory://"}, None, None),
    ],
)
def test_where_engines_have_graphs_options_are_read_before_the_model(
    monkeypatch: pytest.MonkeyPatch,
    extra_config: dict[str, object],
    range_debug: str | None,
    reason: Reason | None,
) -> None:
    """vLLM asks whether the connector can be captured as soon as it has a configuration, so a wrong
    option needs no minutes of loading weights. (It doesn't ask on a CPU, which has no graphs.)"""
    from vllm.config import CompilationConfig, KVTransferConfig, VllmConfig
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "support_static_graph_mode", lambda: True, raising=False)
    transfer = KVTransferConfig(
        kv_connector="KVFormatConnector",
        kv_connector_module_path="kvformat_connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra_config,
    )
    if range_debug is not None:
        monkeypatch.setenv("KVFORMAT_RANGE_DEBUG", range_debug)
    found = None
    try:
        VllmConfig(
            kv_transfer_config=transfer,
            compilation_config=CompilationConfig(cudagraph_mode="FULL"),
        )
    except ConfigError as error:
        found = error.reason
    assert found is reason


@pytest.mark.parametrize(
    ("policy", "weight_transfer", "named"),
    [
        ("recompute", None, []),
        ("fail", None, ["kv_load_failure_policy"]),
        ("recompute", "ipc", ["weight_transfer_config"]),
        ("fail", "ipc", ["kv_load_failure_policy", *2 * ["weight_transfer_config"]]),
    ],
)
def test_what_an_operator_must_know_is_said_at_the_start(
    policy: str, weight_transfer: str | None, named: list[str]
) -> None:
    """A warning for the policy that ends requests with an error, one for weights that will be
    updated, and one for both together; none where there is nothing to say."""
    from vllm.config import KVTransferConfig, VllmConfig, WeightTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvformat_connector import KVFormatConnector

    transfer = KVTransferConfig(
        kv_connector="KVFormatConnector",
        kv_connector_module_path="kvformat_connector",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"store": "memory://"},
    )
    config = VllmConfig(
        kv_transfer_config=transfer,
        weight_transfer_config=(
            None if weight_transfer is None else WeightTransferConfig(backend=weight_transfer)
        ),
    )
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("kvformat_connector").addHandler(listener)
    try:
        KVFormatConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[]))
    finally:
        logging.getLogger("kvformat_connector").removeHandler(listener)
    assert [text.split(" ")[0] for text in said] == named
