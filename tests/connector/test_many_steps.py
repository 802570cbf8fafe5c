"""What an engine holds over a long life, and when requests end at awkward moments."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from itertools import count

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.stores.protocol import Code
from kvformat_connector.messages import BlockList, RequestStep, StepPlan


def test_a_hundred_thousand_blocks_leave_nothing_behind() -> None:
    """Case 30: saved by one engine, each under its own key, a tenth of them failing: memory and
    sessions are the same after 40,000 blocks and after 100,000."""
    store = FaultyStore()

    def forget(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        # What is stored is the store's memory, not the engine's.
        for key in keys:
            store.inner._objects.by_key.pop(key, None)
        return codes

    store.bend["put_commit"] = forget
    store.bend["put_ranges"] = lambda number, keys, codes: (
        [Code.TRANSFER_FAILED, *codes[1:]] if number % 7 == 0 else codes
    )
    engine = SimulatedEngine(store)
    hashes = count()
    num_blocks = 50
    held = []
    for step_number in range(2000):
        blocks = BlockList(
            object_index=0,
            block_hashes=[next(hashes).to_bytes(32, "big") for _ in range(num_blocks)],
            block_ids=(list(range(num_blocks)),),
        )
        request = RequestStep(request_id=f"r{step_number}", saves=[blocks])
        engine.worker.begin_step(StepPlan(requests=[request]))
        for name in engine.memory:
            engine.worker.save_layer(name)
        engine.worker.end_step()
        if step_number % 50 == 49:
            # On a busy machine the store's thread would fall behind, and saves be left out.
            assert engine.worker.settle(60)
        if step_number in (799, 1999):
            store.sizes.clear()
            gc.collect()
            held.append(sys.getallocatedblocks())
    counts = engine.counters.snapshot()
    assert counts["save.blocks"] + counts["save.transfer_failed"] == 2000 * num_blocks
    assert store.num_open_sessions == 0
    assert engine.worker.num_open_sessions == 0
    # A leak of one object per block would be 60,000.
    assert held[1] - held[0] < 3000


def test_a_request_that_comes_back_while_its_old_put_is_pending() -> None:
    """Case 28: preempted, its blocks given to others, and resumed under the same id in other
    blocks, while the first put still runs. The object is what was computed; nothing stays open."""
    store = FaultyStore()
    opened = threading.Event()
    store.before["put_ranges"] = lambda keys: opened.wait(60)
    engine = SimulatedEngine(store)
    settle = engine.worker.settle
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    expected = SimulatedEngine(FaultyStore()).serve(Request("reference", TOKENS)).kv
    request = Request("same", TOKENS)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    engine.step([(request, engine.allocate(7), 0, 27)])
    for array in engine.memory.values():
        array[:] = 5
    table = engine.allocate(7)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    engine.step([(request, table, 0, 27)])
    engine.scheduler.finished("same")
    opened.set()
    assert settle(10)
    assert engine.counters.snapshot()["save.blocks"] == NUM_FULL
    assert SimulatedEngine(store).serve(Request("w", TOKENS)).kv == expected
    assert (store.num_open_sessions, engine.worker.num_open_sessions) == (0, 0)
    assert engine.scheduler.num_requests == 0


@pytest.mark.parametrize("point", ["matched", "allocated", "first chunk", "loaded"])
def test_a_request_that_is_aborted_at_any_point_holds_nothing(point: str) -> None:
    """Case 28: no session, no request, no stage at idle, wherever it ends."""
    store = FaultyStore()
    SimulatedEngine(store).serve(Request("c", TOKENS[: 3 * BLOCK_SIZE]))
    engine = SimulatedEngine(store)
    request = Request("w", TOKENS)
    hit = engine.scheduler.match(request, 0)
    if point != "matched":
        engine.scheduler.allocated(request, hit)
        table = engine.allocate(7)
        if point != "allocated":
            engine.step([(request, table, hit, 4)])
        if point == "loaded":
            engine.step([(request, None, hit + 4, 8)])
    engine.scheduler.finished("w")
    engine.step([])
    assert engine.worker.settle(10)
    assert (store.num_open_sessions, engine.worker.num_open_sessions) == (0, 0)
    assert engine.scheduler.num_requests == 0
    rank = engine.worker._rank
    assert rank is not None
    assert rank.load_staging.num_taken_nbytes + rank.save_staging.num_taken_nbytes == 0
