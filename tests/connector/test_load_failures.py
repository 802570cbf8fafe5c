"""Loads that can't be carried through on this side of the store, layer by layer and in bulk."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from faulty_store import FaultyStore
from simulated_engine import NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat_connector.objects import Rank
from kvformat_connector.staging import Stage

pytestmark = pytest.mark.parametrize("use_layerwise", [True, False])


@pytest.fixture
def store(filled: FaultyStore) -> FaultyStore:
    return filled


def rank_of(engine: SimulatedEngine) -> Rank:
    assert engine.worker._rank is not None
    return engine.worker._rank


def test_blocks_that_the_device_may_still_write_are_not_written(
    store: FaultyStore, expected: list[list[bytes]], use_layerwise: bool
) -> None:
    """Where nobody can tell whether the device is done with the blocks, the load fails and not a
    byte of it arrives in them."""
    engine = SimulatedEngine(store, use_layerwise=use_layerwise)
    device = rank_of(engine).device
    is_read = threading.Event()
    written: list[int] = []

    def note(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        if not use_layerwise or number == 2:  # one header, all others, the first layer
            is_read.set()
        return codes

    def wait(mark: object) -> None:
        if not is_read.is_set():
            assert is_read.wait(10)
            raise RuntimeError("the device is gone")

    def scatter(pieces: object, block_ids: Sequence[int], *rest: object) -> None:
        written.extend(block_ids)

    store.bend["get_ranges" if use_layerwise else "get_objects"] = note
    device.wait = wait  # type: ignore[method-assign]
    device.scatter = scatter  # type: ignore[assignment]
    served = engine.serve(Request("w", TOKENS))
    assert (served.kv, len(served.failed_block_ids)) == (expected, NUM_FULL)
    assert engine.counters.snapshot()["rejected.transfer_failed"] == NUM_FULL
    assert "the device is gone" in engine.counters.rejections[0].detail
    assert written == []
    assert rank_of(engine).load_staging.num_taken_nbytes == 0
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("limit", ["layerwise_session_blocks", "layerwise_max_transfer_blocks"])
def test_a_load_waits_once_for_memory_that_others_hold(
    store: FaultyStore, expected: list[list[bytes]], use_layerwise: bool, limit: str
) -> None:
    """Calls that were left behind hold all stages: the first one that doesn't come free in time
    fails the load, however many windows and calls it would have taken."""
    options = {limit: 1, "transfer_deadline_ms": 100}
    engine = SimulatedEngine(store, use_layerwise=use_layerwise, **options)
    staging = rank_of(engine).load_staging
    held = staging.take(1, staging.max_nbytes)
    assert held is not None
    take, limits = staging.take, []

    def note(num_rows: int, row_nbytes: int, timeout_s: float | None = None) -> Stage | None:
        limits.append(timeout_s)
        return take(num_rows, row_nbytes, timeout_s)

    staging.take = note  # type: ignore[method-assign]
    store.calls.clear()
    served = engine.serve(Request("w", TOKENS))
    assert (served.kv, len(served.failed_block_ids)) == (expected, NUM_FULL)
    assert limits == [0.1]
    assert engine.counters.snapshot()["rejected.deadline"] == NUM_FULL
    assert store.calls["get_start"] <= 1
    assert not engine.worker._breaker.is_proven(60)
    staging.release(held)
    assert staging.num_taken_nbytes == 0
    assert store.num_open_sessions == 0
