"""Layer by layer: what is read, in what order, and what has happened when a wait returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from faulty_store import FaultyStore
from simulated_engine import NUM_FULL, TOKENS, Request, SimulatedEngine, make_layout

from kvformat.objectmap import object_maps
from kvformat.stores.protocol import Code
from kvformat_connector.messages import BlockList, RequestStep, StepPlan
from kvformat_connector.objectcheck import Checker

NUM_LAYERS = 8
LAYOUT = make_layout(num_layers=NUM_LAYERS)


@pytest.fixture
def store() -> FaultyStore:
    store = FaultyStore()
    SimulatedEngine(store, LAYOUT).serve(Request("c", TOKENS))
    store.sizes.clear()
    return store


@pytest.fixture
def expected() -> list[list[bytes]]:
    return SimulatedEngine(FaultyStore(), LAYOUT).serve(Request("reference", TOKENS)).kv


def loads(request_id: str, block_ids: Sequence[int]) -> RequestStep:
    blocks = BlockList(
        object_index=0,
        block_hashes=Request(request_id, TOKENS).block_hashes,
        block_ids=(list(block_ids),),
    )
    return RequestStep(request_id=request_id, loads=[blocks])


def flip(store: FaultyStore, engine: SimulatedEngine, block: int, layer: int) -> None:
    """Change a bit of one layer of a stored object."""
    (object_map,) = object_maps(LAYOUT)
    template = engine.worker._rank.own.gets[0]  # type: ignore[union-attr]
    key = template.prefix + Request("r", TOKENS).block_hashes[block].hex()
    data = bytearray(store.get(key) or b"")
    data[object_map.layers[layer].offset] ^= 1
    store.inner.remove([key])
    assert store.put(key, bytes(data)) == Code.OK


def test_a_layer_is_in_the_cache_and_verified_when_its_wait_returns(
    store: FaultyStore, expected: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long checks take: every block of the layer is right at that moment, but one whose
    bytes are wrong, which isn't in the cache at all."""
    engine = SimulatedEngine(store, LAYOUT)
    check_layer = Checker.check_layer

    def check_slowly(self: Checker, *arguments: Any) -> Any:
        time.sleep(0.02)
        return check_layer(self, *arguments)

    monkeypatch.setattr(Checker, "check_layer", check_slowly)

    damaged_block, damaged_layer = 3, 5
    flip(store, engine, damaged_block, damaged_layer)
    table = list(range(10, 10 + NUM_FULL))
    engine.worker.begin_step(StepPlan(requests=[loads("r", table)]))
    for index, (name, array) in enumerate(engine.memory.items()):
        engine.worker.wait_layer(name)
        found = [array[block].tobytes() for block in table]
        right = [kv[index] for kv in expected]
        if index == damaged_layer:
            right[damaged_block] = bytes(len(right[0]))
        elif index > damaged_layer:
            # Right bytes of it may have been under way; none is waited for.
            del found[damaged_block], right[damaged_block]
        assert found == right
    engine.worker.end_step()
    assert engine.worker.take_failed_block_ids() == {table[damaged_block]}


def test_what_several_requests_want_is_opened_and_read_once(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Three requests of a step, one set of objects: a session, a header and a range a layer each,
    copied to three places."""
    engine = SimulatedEngine(store, LAYOUT)
    engine.worker._breaker.succeeded()
    tables = [range(start, start + NUM_FULL) for start in (1, 11, 21)]
    steps = [loads(f"r{index}", table) for index, table in enumerate(tables)]
    engine.worker.begin_step(StepPlan(requests=steps))
    for name in engine.memory:
        engine.worker.wait_layer(name)
    engine.worker.end_step()
    assert engine.worker.take_failed_block_ids() == set()
    assert store.sizes["get_start"] == [NUM_FULL]
    assert store.sizes["get_ranges"] == [NUM_FULL] * (1 + NUM_LAYERS)
    for table in tables:
        assert engine.kv_of(Request("r", TOKENS), list(table)) == expected


def test_an_object_that_fails_fails_for_every_request_that_wants_it(store: FaultyStore) -> None:
    """All of their blocks are told to the engine."""
    engine = SimulatedEngine(store, LAYOUT)
    store.bend["get_start"] = lambda number, keys, codes: [Code.NOT_FOUND, *codes[1:]]
    tables = [range(start, start + NUM_FULL) for start in (1, 11)]
    steps = [loads(f"r{index}", table) for index, table in enumerate(tables)]
    engine.worker.begin_step(StepPlan(requests=steps))
    for name in engine.memory:
        engine.worker.wait_layer(name)
    engine.worker.end_step()
    assert engine.worker.take_failed_block_ids() == {1, 11}


@pytest.mark.parametrize("num_ahead", [1, 2, 5])
def test_a_fixed_number_of_layers_is_read_ahead(store: FaultyStore, num_ahead: int) -> None:
    """While layer i computes, layers up to i + n are read and not one more."""
    engine = SimulatedEngine(store, LAYOUT, layerwise_prefetch_layers=num_ahead)
    engine.worker._breaker.succeeded()
    table = list(range(10, 10 + NUM_FULL))
    engine.worker.begin_step(StepPlan(requests=[loads("r", table)]))
    for index, name in enumerate(engine.memory):
        engine.worker.wait_layer(name)
        num_expected = min(index + 1 + num_ahead, NUM_LAYERS)
        engine.worker._loads._wait_ready(num_expected)  # type: ignore[union-attr]
        assert len(store.sizes["get_ranges"]) == 1 + num_expected  # the first reads headers
    engine.worker.end_step()


def test_a_second_step_of_the_same_request_shares_nothing_with_the_first(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A request that comes back under its id, after a load that failed, loads into its new blocks;
    what failed before neither fails now nor is told again."""
    engine = SimulatedEngine(store, LAYOUT)
    store.bend["get_ranges"] = lambda number, keys, codes: [Code.INTERNAL] * len(codes)
    for table, failed in ((range(1, 7), set(range(1, 7))), (range(31, 37), set())):
        engine.worker._breaker.succeeded()
        engine.worker.begin_step(StepPlan(requests=[loads("r", table)]))
        for name in engine.memory:
            engine.worker.wait_layer(name)
        engine.worker.end_step()
        assert engine.worker.take_failed_block_ids() == failed
        store.bend.clear()
    assert engine.kv_of(Request("r", TOKENS), list(range(31, 37))) == expected
    assert store.num_open_sessions == 0


def test_layers_that_nobody_waits_for_are_read_before_the_step_ends(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A draft model's layers have no hook of their own in the step: their blocks are right too."""
    engine = SimulatedEngine(store, LAYOUT)
    table = list(range(10, 10 + NUM_FULL))
    engine.worker.begin_step(StepPlan(requests=[loads("r", table)]))
    for name in list(engine.memory)[: NUM_LAYERS - 3]:
        engine.worker.wait_layer(name)
    engine.worker.end_step()
    assert engine.worker.take_failed_block_ids() == set()
    assert engine.kv_of(Request("r", TOKENS), table) == expected
