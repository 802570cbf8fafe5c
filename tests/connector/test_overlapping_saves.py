"""When layers are stored: while the next ones are computed, or when the step has been computed."""

from __future__ import annotations

import time

import pytest
from faulty_store import FaultyStore
from simulated_engine import Request, SimulatedEngine

from kvformat_connector import sessions

TOKENS = list(range(19))
NUM_FULL = 4


def stored_before_the_last_layer(engine: SimulatedEngine, store: FaultyStore, *, least: int) -> int:
    """Range calls that the store has seen when the last layer is about to be computed, after a
    while in which ``least`` of them may come."""
    seen = []

    def look(layer_index: int) -> None:
        if layer_index == len(engine.memory) - 1:
            deadline = time.monotonic() + 10
            while store.calls["put_ranges"] < least and time.monotonic() < deadline:
                time.sleep(0.001)
            # Copies are over, so whatever is to be stored by now has been handed on.
            engine.worker._copy_lane.submit(int).result()
            engine.worker._save_channels.current.submit(int).result()
            seen.append(store.calls["put_ranges"])

    engine.before_layer = look
    engine.serve(Request("r", TOKENS))
    (number,) = seen
    return number


@pytest.mark.parametrize(("overlap", "expected"), [(True, 2), (False, 0), ("auto", 0)])
def test_layers_are_stored_at_once_or_after_the_step(overlap: object, expected: int) -> None:
    """With overlap both layers before the last are in the store while the last one is computed;
    without, and by default where the host computes, none is. All blocks are stored in the end,
    with the same bytes."""
    store = FaultyStore()
    engine = SimulatedEngine(store, overlap_saves=overlap)
    assert stored_before_the_last_layer(engine, store, least=expected) == expected
    assert engine.counters.snapshot()["save.blocks"] == NUM_FULL
    cold = SimulatedEngine(FaultyStore()).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store).serve(Request("w", TOKENS))
    assert (warm.kv, warm.num_hit_tokens) == (cold.kv, NUM_FULL * 4)


def test_what_is_held_makes_room_for_the_rest_of_the_step() -> None:
    """Staging memory for less than the layers of one step: what is held goes to the store early,
    and nothing is given up."""
    store = FaultyStore()
    # Half of it is for saves, and the smallest stage has 64 KiB.
    engine = SimulatedEngine(store, staging_bytes=2 * (64 << 10))
    assert stored_before_the_last_layer(engine, store, least=1) >= 1
    counts = engine.counters.snapshot()
    assert counts["save.blocks"] == NUM_FULL
    assert "save.no_staging" not in counts
    assert engine.worker.num_open_sessions == 0
    assert engine.worker._rank is not None
    assert engine.worker._rank.save_staging.wait_idle(10)


def test_a_step_may_last_longer_than_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is stored while the step is computed, nothing is opened either: no other
    writer is kept out meanwhile, and a step longer than a put session may last is saved."""
    monkeypatch.setattr(sessions, "MAX_PUT_SESSION_S", 0.2)
    store = FaultyStore()
    engine = SimulatedEngine(store)
    opened = []

    def look(layer_index: int) -> None:
        time.sleep(0.1)
        opened.append(store.calls["put_start"])

    engine.before_layer = look
    engine.serve(Request("r", TOKENS))
    assert opened == [0, 0, 0]
    counts = engine.counters.snapshot()
    assert counts["save.blocks"] == NUM_FULL
    assert "save.too_old" not in counts
