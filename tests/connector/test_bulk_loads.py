"""Loads of requests that wait outside of the batch: whole objects, verified before the release."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from faulty_store import FaultyStore
from simulated_engine import NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.key import key_prefix
from kvformat.objectmap import object_maps
from kvformat.stores.protocol import Code
from kvformat_connector.messages import BlockList, RequestStep, StepPlan


@pytest.fixture
def store(filled: FaultyStore) -> FaultyStore:
    return filled


def start(engine: SimulatedEngine, request: Request, block_ids: list[int]) -> None:
    """A step that starts a bulk load of all full blocks of a request, and computes nothing."""
    blocks = BlockList(
        object_index=0, block_hashes=request.block_hashes, block_ids=(block_ids[:NUM_FULL],)
    )
    step = RequestStep(request_id=request.request_id, loads=[blocks], load_mode="bulk")
    engine.worker.begin_step(StepPlan(requests=[step]))
    engine.worker.end_step()


def received(engine: SimulatedEngine, num_requests: int = 1) -> tuple[set[str], set[int]]:
    """Wait for bulk loads to end: the requests, and the blocks that were reported up to then."""
    requests: set[str] = set()
    failed: set[int] = set()
    deadline = time.monotonic() + 10
    while len(requests) < num_requests:
        assert time.monotonic() < deadline
        requests |= engine.worker.take_received()[0]
        failed |= engine.worker.take_failed_block_ids()
        time.sleep(0.002)
    return requests, failed


@pytest.mark.parametrize(
    "options", [{}, {"layerwise_max_transfer_blocks": 1}, {"staging_bytes": 1}]
)
def test_a_request_is_released_when_its_blocks_are_right(
    store: FaultyStore, expected: list[list[bytes]], options: dict[str, int]
) -> None:
    """Whole objects, in one call or many: the right bytes, one release, no session."""
    engine = SimulatedEngine(store, **options)
    request, table = Request("w", TOKENS), engine.allocate(7)
    store.calls.clear()
    start(engine, request, table)
    assert received(engine) == ({"w"}, set())
    assert engine.kv_of(request, table) == expected
    assert engine.worker.take_received() == (set(), set())
    assert store.calls["get_start"] == 0
    assert engine.counters.snapshot()["load.blocks"] == NUM_FULL


def test_requests_that_want_the_same_blocks_each_get_them(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Case 29, without a batch."""
    engine = SimulatedEngine(store)
    requests = [Request(name, TOKENS) for name in "abc"]
    tables = [engine.allocate(7) for _ in requests]
    for request, table in zip(requests, tables, strict=True):
        start(engine, request, table)
    assert received(engine, 3) == ({"a", "b", "c"}, set())
    for request, table in zip(requests, tables, strict=True):
        assert engine.kv_of(request, table) == expected


@pytest.mark.parametrize("layer_index", [0, 1, 2])
def test_an_object_with_a_wrong_bit_fails_alone_and_reaches_no_block(
    store: FaultyStore, expected: list[list[bytes]], layer_index: int
) -> None:
    """Header and every layer are checked before a byte goes into the cache."""
    engine = SimulatedEngine(store)
    request, table = Request("w", TOKENS), engine.allocate(7)
    (object_map,) = object_maps(engine.layout)
    prefix = key_prefix(engine.namespace, object_map.group_bitmap, object_map.shard)
    key = prefix + request.block_hashes[2].hex()
    data = bytearray(store.get(key) or b"")
    data[object_map.layers[layer_index].offset + 3] ^= 1
    store.inner.remove([key])
    store.put(key, bytes(data))
    start(engine, request, table)
    assert received(engine) == ({"w"}, {table[2]})
    kv = engine.kv_of(request, table)
    assert kv[:2] + kv[3:] == expected[:2] + expected[3:]
    assert not any(any(layer) for layer in kv[2])
    report = engine.worker.take_report()
    assert report is not None
    assert (report.failed_hashes, report.failed_block_ids) == ([request.block_hashes[2]], [])
    assert engine.counters.snapshot()["rejected.checksum_mismatch"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        lambda codes: [Code.NOT_FOUND] * len(codes),
        lambda codes: [Code.TRANSFER_FAILED] * len(codes),
        lambda codes: codes[:-1],
        lambda codes: 1 / 0,
    ],
    ids=["missing", "fails", "short", "raises"],
)
def test_a_request_whose_loads_all_fail_is_released_too(store: FaultyStore, answer: object) -> None:
    """Exactly once, with all of its blocks reported."""
    engine = SimulatedEngine(store)
    store.bend["get_objects"] = lambda number, keys, codes: answer(codes)  # type: ignore[operator]
    request, table = Request("w", TOKENS), engine.allocate(7)
    start(engine, request, table)
    assert received(engine) == ({"w"}, set(table[:NUM_FULL]))
    assert engine.worker.take_received() == (set(), set())


def test_a_request_with_nothing_to_load_here_is_released(store: FaultyStore) -> None:
    """Every rank names every request, also one that has no part of it."""
    engine = SimulatedEngine(store)
    step = RequestStep(request_id="w", load_mode="bulk")
    engine.worker.begin_step(StepPlan(requests=[step]))
    assert received(engine) == ({"w"}, set())


def test_a_bulk_call_that_hangs_is_given_up(store: FaultyStore) -> None:
    """One deadline; the late bytes reach no block; the next request fails at once."""
    opened = threading.Event()

    def hold(keys: Sequence[str]) -> None:
        assert opened.wait(60)

    store.before["get_objects"] = hold
    engine = SimulatedEngine(store, transfer_deadline_ms=100, breaker_retry_ms=60_000)
    request, table = Request("w", TOKENS), engine.allocate(7)
    start(engine, request, table)
    assert received(engine) == ({"w"}, set(table[:NUM_FULL]))
    assert engine.counters.snapshot()["rejected.deadline"] == NUM_FULL
    second = engine.allocate(7)
    start(engine, Request("x", TOKENS), second)
    assert received(engine) == ({"x"}, set(second[:NUM_FULL]))
    opened.set()
    staging = engine.worker._rank.load_staging  # type: ignore[union-attr]
    assert staging.wait_idle(10)
    assert not any(any(layer) for block in engine.kv_of(request, table) for layer in block)


def test_a_request_that_is_aborted_during_its_load_is_released_once(store: FaultyStore) -> None:
    """Case 28: the engine frees its blocks only when they are no longer written to. Nothing of the
    request is kept after that."""
    opened = threading.Event()
    store.before["get_objects"] = lambda keys: opened.wait(60)
    engine = SimulatedEngine(store)
    request, table = Request("w", TOKENS), engine.allocate(7)
    start(engine, request, table)
    engine.scheduler.finished("w")
    assert engine.worker.take_received() == (set(), set())
    opened.set()
    assert received(engine) == ({"w"}, set())
    assert engine.worker.take_received() == (set(), set())
    rank = engine.worker._rank
    assert rank is not None
    assert rank.load_staging.wait_idle(10)
    assert (store.num_open_sessions, engine.scheduler.num_requests) == (0, 0)
