"""What the connector adds to a decode step with nothing to load or save, through the facade that
the engine calls: 61 layers on the worker's side, 256 running requests on the scheduler's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from measure import Row, best_us, report, row
from ranks import BenchRank, block_hashes

from kvformat.stores.memory import MemoryStore
from kvformat_connector.config import parse_options
from kvformat_connector.connector import KVFormatConnector, StepMetadata
from kvformat_connector.messages import StepPlan
from kvformat_connector.scheduler import Scheduler
from kvformat_connector.stats import Counters

NUM_LAYERS = 61
NUM_REQUESTS = 256
BLOCK_SIZE = 128


def facade(**parts: Any) -> Any:
    """A connector around one side, without an engine to start it."""
    connector: Any = KVFormatConnector.__new__(KVFormatConnector)
    connector._connector_metadata = None
    connector._counters = Counters()
    connector._source = "bench"
    connector._layer = ""
    connector._worker = connector._scheduler = connector._events = None
    for name, part in parts.items():
        setattr(connector, name, part)
    return connector


def measure_worker() -> list[Row]:
    rank = BenchRank(MemoryStore("memory://"), num_layers=NUM_LAYERS, num_blocks=2, head_size=8)
    connector = facade(_worker=rank.worker)
    metadata = StepMetadata(StepPlan())
    names = rank.layer_names

    def step(layers: list[str]) -> None:
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        connector.start_load_kv(None)
        for name in layers:
            connector.wait_for_layer_load(name)
            connector.save_kv_layer(name, None, None)
        connector.wait_for_save()
        connector.get_finished(set())
        connector.get_block_ids_with_load_errors()
        connector.get_kv_connector_stats()
        connector.get_kv_connector_kv_cache_events()
        connector.build_connector_worker_meta()
        connector.clear_connector_metadata()

    empty, whole = best_us(lambda: step([]), lambda: step(names), number=200)
    return [
        row("worker, a step without its layers", empty, "us", at_most=20),
        row("worker, one layer hook", (whole - empty) / (2 * NUM_LAYERS), "us", at_most=2),
    ]


def measure_scheduler() -> Row:
    rank = BenchRank(MemoryStore("memory://"), num_layers=2, num_blocks=2, head_size=8)
    options = parse_options({"store": "memory://"})
    scheduler = Scheduler(rank.layout, MemoryStore("memory://"), options, Counters())
    connector = facade(_scheduler=scheduler)
    num_tokens = 1000
    hashes = block_hashes(num_tokens // BLOCK_SIZE)
    requests = [
        SimpleNamespace(
            request_id=f"r{index}",
            block_hashes=hashes,
            num_tokens=num_tokens,
            num_prompt_tokens=num_tokens,
            lora_request=None,
        )
        for index in range(NUM_REQUESTS)
    ]
    table = list(range(num_tokens // BLOCK_SIZE + 1))
    for request in requests:
        scheduler.match(request, 0)
        scheduler.allocated(request, 0)
    nothing = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    connector.build_connector_meta(
        SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, block_ids=(table,), num_computed_tokens=0)
                for r in requests
            ],
            scheduled_cached_reqs=nothing,
            num_scheduled_tokens={r.request_id: num_tokens for r in requests},
        )
    )
    # Each decodes its next token, far from the end of a block.
    decode = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r.request_id for r in requests],
            new_block_ids=[None] * NUM_REQUESTS,
            num_computed_tokens=[num_tokens] * NUM_REQUESTS,
            resumed_req_ids=set(),
        ),
        num_scheduled_tokens={r.request_id: 1 for r in requests},
    )
    assert connector.build_connector_meta(decode).plan.requests == []
    (found,) = best_us(lambda: connector.build_connector_meta(decode), number=50)
    return row(f"build_connector_meta, {NUM_REQUESTS} running requests", found, "us", at_most=100)


if __name__ == "__main__":
    report("idle_steps", [*measure_worker(), measure_scheduler()])
