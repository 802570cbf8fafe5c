"""What an operator sees, through vLLM's own statistics and Prometheus classes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from real_engine import BLOCK_SIZE, Servers
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)

from kvformat_connector.demo.model import make_prompt
from kvformat_connector.stats import Counters

pytestmark = pytest.mark.vllm

CONNECTOR = Path(__file__).parents[2] / "connector"


@pytest.fixture
def config() -> Any:
    """As much of a VllmConfig as vLLM's metric classes read."""
    from vllm.config import KVTransferConfig

    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVFormatConnector",
            kv_connector_module_path="kvformat_connector",
            kv_role="kv_both",
        )
    )


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """A registry of the test's own, so that each one registers its metrics anew."""
    registry = CollectorRegistry()
    kinds = {"_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram}
    for name, kind in kinds.items():
        own = type(kind.__name__, (kind,), {"__init__": _registering(kind, registry)})
        monkeypatch.setattr(KVConnectorProm, name, own)
    return registry


def _registering(kind: type, registry: CollectorRegistry) -> Any:
    def init(self: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, *arguments, **{"registry": registry, **options})

    return init


def stats_of(counters: Counters, source: str = "worker 0") -> Any:
    from kvformat_connector.metrics import ConnectorStats

    return ConnectorStats.take(counters, source)


def as_sent(stats: Any) -> Any:
    """What arrives on the other side of a process boundary: JSON of the data."""
    return json.loads(json.dumps(stats.to_dict()))


def test_every_kind_of_number_arrives_in_prometheus(
    config: Any, registry: CollectorRegistry
) -> None:
    """Counts with their reasons, times by phase, gauges over ranks; engines apart; adding up over
    steps; and a count that nobody has thought of yet is exported under its name."""
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    counters = Counters()
    counters.add("lookup.hit_tokens", 64)
    counters.add("lookup.miss_tokens.absent", 32)
    counters.reject("key", "checksum_mismatch", "detail")
    counters.add("load.nbytes", 1000)
    counters.add("save.exists", 2)
    counters.add("something.new", 3)
    counters.observe("header", 0.004)
    counters.set("open_sessions", 5)
    counters.set("breaker_open", 0)
    first = as_sent(stats_of(counters))
    counters.add("lookup.hit_tokens", 32)
    counters.set("breaker_open", 1)
    second = as_sent(stats_of(counters))
    other = Counters()
    other.set("open_sessions", 2)
    other.set("prefetch_layers", 3)
    prom.observe(first, 0)
    prom.observe(second, 0)
    prom.observe(as_sent(stats_of(other, "worker 1")), 0)
    prom.observe(first, 1)

    def value(name: str, engine: int = 0, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:kvformat_{name}", {"model_name": "m", "engine": str(engine), **labels}
        )

    assert value("hit_tokens_total") == 96
    assert value("hit_tokens_total", 1) == 64
    assert value("miss_tokens_total", reason="absent") == 32
    assert value("rejected_objects_total", reason="checksum_mismatch") == 1
    assert value("loaded_bytes_total") == 1000
    assert value("unsaved_objects_total", reason="exists") == 2
    assert value("events_total", event="something.new") == 3
    assert value("phase_seconds_count", phase="header") == 1
    assert value("phase_seconds_sum", phase="header") == 0.004
    assert value("open_sessions") == 7
    assert value("breaker_open") == 1
    assert value("prefetch_layers") == 3
    assert value("breaker_open", 1) == 0


def test_what_has_not_happened_yet_is_zero(config: Any, registry: CollectorRegistry) -> None:
    """A dashboard finds models and engines, and rates have values, before the first request."""
    KVConnectorProm(config, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    for name in ("hit_tokens_total", "lookup_calls_total", "saved_bytes_total", "breaker_open"):
        for engine in ("0", "1"):
            labels = {"model_name": "m", "engine": engine}
            assert registry.get_sample_value(f"vllm:kvformat_{name}", labels) == 0
    for name in ("miss_tokens", "rejected_objects", "prefetch_layers"):  # no reason, no value yet
        [metric] = [each for each in registry.collect() if each.name == f"vllm:kvformat_{name}"]
        assert metric.samples == []


def test_vllm_logs_them(config: Any) -> None:
    """vLLM's log line has sums over ranks and steps, times as means, and the last gauge, once."""
    logging = KVConnectorLogging(config.kv_transfer_config)
    counters = Counters()
    for milliseconds in (2, 4):
        counters.add("load.blocks", 3)
        counters.observe("commit", milliseconds / 1e3)
        counters.set("prefetch_layers", milliseconds)
        logging.observe(as_sent(stats_of(counters)))
    other = Counters()
    other.add("load.blocks", 1)
    logging.observe(as_sent(stats_of(other, "worker 1")))
    lines: list[str] = []
    logging.log(lambda text, *arguments: lines.append(text % arguments))
    assert len(lines) == 1
    fields = lines[0].partition(": ")[2].split(", ")
    assert sorted(fields) == [
        "commit_avg_ms=3.0",
        "commit_count=2",
        "load.blocks=7",
        "prefetch_layers=4",
    ]
    logging.log(lines.append)
    assert len(lines) == 1


def test_ranks_add_up_and_an_idle_step_says_nothing() -> None:
    """Aggregating two ranks as vLLM does loses nothing, and no news is None, not an object."""
    first, second = Counters(), Counters()
    first.add("load.blocks", 2)
    first.observe("header", 0.1)
    second.add("load.blocks", 3)
    second.add("rejected.replaced")
    second.observe("header", 0.3)
    both = stats_of(first, "worker 0").aggregate(stats_of(second, "worker 1"))
    assert both.data["counts"] == {"load.blocks": 5, "rejected.replaced": 1}
    assert both.data["times"] == {"header": [0.1, 0.3]}
    assert not both.is_empty()
    assert stats_of(first) is None
    first.set("open_sessions", 1)
    assert stats_of(first) is not None
    first.set("open_sessions", 1)
    assert stats_of(first) is None


def metric_names() -> set[str]:
    """The names under which Prometheus knows our metrics."""
    from kvformat_connector.metrics import COUNTERS, GAUGES, PHASE_SECONDS

    return {
        *(f"{metric.name}_total" for metric in COUNTERS),
        *(name for name, _, _ in GAUGES.values()),
        PHASE_SECONDS,
    }


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    """Each panel's expression is of metrics and labels that exist, and none is left out."""
    from kvformat_connector.metrics import COUNTERS

    dashboard = json.loads((CONNECTOR / "examples" / "grafana-dashboard.json").read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    found = {name for text in expressions for name in re.findall(r"vllm:\w+", text)}
    assert {name.removesuffix("_bucket") for name in found} == metric_names()
    labels = {metric.label for metric in COUNTERS} | {"", "phase", "le", "engine"}
    for text in expressions:
        for grouped in re.findall(r"by \(([^)]*)\)", text):
            assert set(grouped.split(", ")) <= labels


def test_the_readme_explains_every_metric_and_no_other() -> None:
    """The guide's table and what is exported are one list."""
    section = (CONNECTOR / "README.md").read_text().partition("## What the metrics mean")[2]
    assert set(re.findall(r"`(vllm:\w+)`", section)) == metric_names()


def test_a_real_engine_shows_its_hits(servers: Servers, tmp_path: Path) -> None:
    """A cold and a warm engine export what they saved, hit and loaded, in tokens, blocks, bytes."""
    store = f"file://{tmp_path / 'store'}"
    prompts = [make_prompt(132, 5)]
    stats_on = {"disable_log_stats": False}
    cold = servers.run(store=store, prompts=prompts, engine_options=stats_on).metrics
    warm = servers.run(store=store, prompts=prompts, engine_options=stats_on).metrics
    num_blocks = 132 // BLOCK_SIZE
    assert cold["vllm:kvformat_saved_blocks_total"] == num_blocks
    assert cold["vllm:kvformat_hit_tokens_total"] == 0
    assert warm["vllm:kvformat_hit_tokens_total"] == num_blocks * BLOCK_SIZE
    assert warm["vllm:kvformat_loaded_blocks_total"] == num_blocks


def test_stored_blocks_are_announced_once_they_are_visible() -> None:
    """vLLM's own event for each committed block, with its tokens and parent; a block in two shards
    when both are there; nothing for a block that nobody planned."""
    from vllm.distributed.kv_events import BlockStored
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

    from kvformat_connector.events import StoredEvents
    from kvformat_connector.messages import BlockList, RequestStep, StepPlan, StoredBlock
    from kvformat_connector.needs import ObjectNeeds

    need = ObjectNeeds(
        object_index=0,
        groups=(0,),
        kind="full_attention",
        block_size=4,
        hashes_per_block=2,
        window=0,
        parts=("a/", "b/"),
        block_nbytes=0,
    )
    hashes = [bytes([index]) * 32 for index in range(5)]
    request = SimpleNamespace(
        request_id="r",
        block_hashes=hashes,
        all_token_ids=list(range(100, 111)),
        lora_request=LoRARequest("adapter", 3, "/adapter"),
    )
    events = StoredEvents([need], 2)
    events.track(request)
    saves = [BlockList(object_index=0, block_hashes=[hashes[1], hashes[3]], block_ids=([1, 2],))]
    events.planned(StepPlan(requests=[RequestStep(request_id="r", saves=saves)]))
    events.forget("r")
    events.stored([StoredBlock(0, hashes[3]), StoredBlock(0, hashes[1]), StoredBlock(0, hashes[4])])
    assert events.take() == []
    events.stored([StoredBlock(0, hashes[3]), StoredBlock(0, hashes[1])])
    second, first = events.take()
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [maybe_convert_block_hash(BlockHash(hashes[1]))]
    assert (first.parent_block_hash, first.token_ids) == (None, [100, 101, 102, 103])
    assert second.parent_block_hash == maybe_convert_block_hash(BlockHash(hashes[1]))
    assert (second.token_ids, second.block_size) == ([104, 105, 106, 107], 4)
    assert second.medium == "STORAGE"
    assert (second.lora_id, second.lora_name) == (3, "adapter")
    assert events.take() == []
    # What the weights before an update computed is announced no more.
    events.track(request)
    events.planned(StepPlan(requests=[RequestStep(request_id="r", saves=saves)]))
    events.clear()
    events.stored([StoredBlock(0, hashes[1])] * 2)
    assert events.take() == []
