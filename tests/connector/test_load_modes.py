"""``use_layerwise: auto``: decided for each request, both ways in one engine."""

from __future__ import annotations

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, Request, SimulatedEngine, make_layout

from kvformat.stores.protocol import Code
from kvformat_connector import loadpolicy

LAYOUT = make_layout(num_layers=4)
BLOCK_NBYTES = 4 * 2 * BLOCK_SIZE * 16 * 4  # layers, heads, tokens, K and V, float32
SHORT = [(1 + index) % 250 for index in range(2 * BLOCK_SIZE + 1)]
LONG = [(99 + index) % 250 for index in range(6 * BLOCK_SIZE + 3)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FaultyStore:
    """Holds both prompts; loads of fewer than three blocks count as small."""
    monkeypatch.setattr(loadpolicy, "_FEW_NBYTES", 3 * BLOCK_NBYTES)
    store = FaultyStore()
    cold = SimulatedEngine(store, LAYOUT)
    for name, tokens in (("s", SHORT), ("l", LONG)):
        cold.serve(Request(name, tokens))
    store.calls.clear()
    return store


def reference(tokens: list[int]) -> list[list[bytes]]:
    return SimulatedEngine(FaultyStore(), LAYOUT).serve(Request("reference", tokens)).kv


def test_small_loads_wait_outside_of_the_batch_and_others_do_not(store: FaultyStore) -> None:
    """The same engine, one request after the other: whole objects for the short prompt, layers for
    the long one."""
    engine = SimulatedEngine(store, LAYOUT, use_layerwise="auto")
    short = engine.serve(Request("s", SHORT))
    assert (short.num_hit_tokens, short.kv) == (2 * BLOCK_SIZE, reference(SHORT))
    assert (store.calls["get_objects"] > 0, store.calls["get_start"]) == (True, 0)
    store.calls.clear()
    long = engine.serve(Request("l", LONG))
    assert (long.num_hit_tokens, long.kv) == (6 * BLOCK_SIZE, reference(LONG))
    assert (store.calls["get_objects"], store.calls["get_start"]) == (0, 1)
    assert engine.scheduler.num_requests == 0


def test_what_the_engine_is_told_is_told_for_each_request(store: FaultyStore) -> None:
    """Both are asked about before either is scheduled; who isn't asked about waits for nothing."""
    scheduler = SimulatedEngine(store, LAYOUT, use_layerwise="auto").scheduler
    assert scheduler.match(Request("l", LONG), 0) == 6 * BLOCK_SIZE
    assert scheduler.match(Request("s", SHORT), 0) == 2 * BLOCK_SIZE
    assert scheduler.match(Request("tail", LONG), 4 * BLOCK_SIZE) == 2 * BLOCK_SIZE
    waits = {name: scheduler.loads_in_bulk(name) for name in ("s", "l", "tail", "unknown")}
    assert waits == {"s": True, "l": False, "tail": True, "unknown": False}


def test_one_step_loads_both_ways(store: FaultyStore) -> None:
    """While one request's layers are waited for, another one's objects are fetched."""
    engine = SimulatedEngine(store, LAYOUT, use_layerwise="auto")
    short, long = Request("s", SHORT), Request("l", LONG)
    tables = {"s": engine.allocate(3), "l": engine.allocate(7)}
    for request in (short, long):
        hit = engine.scheduler.match(request, 0)
        table = tables[request.request_id]
        engine.scheduler.allocated(request, hit, lambda ids=table: (ids,))
    failed = engine.step([(long, tables["l"], 6 * BLOCK_SIZE, 3)])
    failed |= engine.receive("s")
    assert failed == set()
    assert engine.kv_of(long, tables["l"]) == reference(LONG)
    assert engine.kv_of(short, tables["s"]) == reference(SHORT)


def test_a_small_load_that_fails_is_computed(store: FaultyStore) -> None:
    """Its blocks are told like those of any other load."""
    engine = SimulatedEngine(store, LAYOUT, use_layerwise="auto")
    store.bend["get_objects"] = lambda number, keys, codes: [Code.NOT_FOUND] * len(codes)
    served = engine.serve(Request("s", SHORT))
    assert served.kv == reference(SHORT)
    assert len(served.failed_block_ids) == 2
