"""``chunk_prefix_reload``: each chunk of a prompt loads anew what the chunks before it stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, TOKENS, Request, SimulatedEngine

from kvformat.stores.protocol import Code
from kvformat_connector import worker
from kvformat_connector.messages import StepPlan

CHUNK = 2 * BLOCK_SIZE


def forgetful(store: FaultyStore, **options: object) -> SimulatedEngine:
    """An engine whose memory holds something else by the next step, as one has that uses a layer's
    memory for other layers."""
    engine = SimulatedEngine(store, **options)
    engine.forgets = True
    return engine


def waits_of(engine: SimulatedEngine) -> list[tuple[float, bool]]:
    """From now on the connector waits for commits, and the engine doesn't; its waits: the limit,
    and whether all was settled by then."""
    begin_step, settle = engine.worker.begin_step, engine.worker.settle
    waits: list[tuple[float, bool]] = []

    def settle_and_note(timeout_s: float) -> bool:
        is_settled = settle(timeout_s)
        waits.append((timeout_s, is_settled))
        return is_settled

    def begin(plan: StepPlan) -> None:
        engine.worker.settle = settle_and_note  # type: ignore[method-assign]
        begin_step(plan)
        engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]

    engine.worker.begin_step = begin  # type: ignore[method-assign]
    return waits


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What a call that hangs waits for; the test's end ends it."""
    event = threading.Event()
    yield event
    event.set()


def step_until(engine: SimulatedEngine, condition: Callable[[], object]) -> None:
    """Steps of others, until something has happened beside them."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        engine.step([])
        time.sleep(0.005)


def test_a_chunk_finds_the_chunks_before_it(expected: list[list[bytes]]) -> None:
    """The prefix is there and right in each chunk, from the pool alone; without the option the
    same engine computes on whatever its memory holds."""
    engine = forgetful(FaultyStore(), chunk_prefix_reload=True)
    assert engine.serve(Request("r", TOKENS), chunk=CHUNK).kv == expected
    # Chunks 2, 3 and 4 load 2, 4 and 6 blocks.
    assert engine.counters.snapshot()["load.blocks"] == 2 + 4 + 6
    without = forgetful(FaultyStore())
    assert without.serve(Request("r", TOKENS), chunk=CHUNK).kv != expected
    assert "load.blocks" not in without.counters.snapshot()


def test_what_a_request_was_promised_is_loaded_again_too(expected: list[list[bytes]]) -> None:
    """A prefix that was in the pool already, then chunks of its own."""
    store = FaultyStore()
    SimulatedEngine(store).serve(Request("c", TOKENS[: 3 * BLOCK_SIZE]))
    engine = forgetful(store, chunk_prefix_reload=True)
    served = engine.serve(Request("r", TOKENS), chunk=CHUNK)
    assert (served.num_hit_tokens, served.kv) == (3 * BLOCK_SIZE, expected)
    assert engine.counters.snapshot()["load.blocks"] == 3 + 5


@pytest.mark.parametrize("chunk", [1, 3, 5, 9])
def test_an_engine_that_forgets_nothing_computes_the_same(
    expected: list[list[bytes]], chunk: int
) -> None:
    """Chunks that end inside blocks load whole blocks alone."""
    engine = SimulatedEngine(FaultyStore(), chunk_prefix_reload=True)
    assert engine.serve(Request("r", TOKENS), chunk=chunk).kv == expected


def test_a_chunk_waits_for_what_the_chunk_before_stores(
    expected: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits come after the step: the next one opens nothing before they are done on every tensor
    rank, because ranks that hold the same bytes store them in turns."""
    barriers: list[int] = []
    monkeypatch.setattr(worker, "wait_for_tensor_ranks", lambda ranks: barriers.append(len(waits)))
    engine = forgetful(FaultyStore(), chunk_prefix_reload=True)
    waits = waits_of(engine)
    assert engine.serve(Request("r", TOKENS), chunk=CHUNK).kv == expected
    assert waits == [(5.0, True)] * 3
    # One after each wait.
    assert barriers == [1, 2, 3]


def test_a_save_that_hangs_delays_no_later_chunk(
    expected: list[list[bytes]], stuck: threading.Event
) -> None:
    """A put that never returns is left behind when its deadline is over. It still counts as a call,
    a session and a stage, but nobody waits for it again."""
    store = FaultyStore()
    store.before["put_ranges"] = lambda keys: stuck.wait(60)
    engine = SimulatedEngine(
        store, chunk_prefix_reload=True, transfer_deadline_ms=150, breaker_retry_ms=1
    )
    settle = engine.worker.settle
    waits = waits_of(engine)
    other = Request("other", [99, *TOKENS[:8]])
    engine.scheduler.match(other, 0)
    engine.scheduler.allocated(other, 0)
    engine.step([(other, engine.allocate(3), 0, 9)])
    step_until(engine, lambda: engine.worker.num_left_behind)
    del store.before["put_ranges"]
    step_until(engine, lambda: not engine.worker._breaker.is_open)
    assert engine.serve(Request("r", TOKENS), chunk=CHUNK).kv == expected
    assert waits == [(0.15, True)] * 3
    assert engine.counters.snapshot()["load.blocks"] == 2 + 4 + 6
    assert settle(10)
    assert (engine.worker.num_left_behind, engine.worker.num_open_sessions) == (1, 2)
    assert engine.worker._rank is not None
    assert engine.worker._rank.save_staging.num_taken_nbytes > 0


def test_a_chunk_that_finds_the_store_hanging_leaves_it_alone(stuck: threading.Event) -> None:
    """The wait for the chunk before opens the breaker: that step, too, saves nothing."""
    store = FaultyStore()
    is_called = threading.Event()
    store.before["put_ranges"] = lambda keys: (is_called.set(), stuck.wait(60))
    engine = SimulatedEngine(
        store, chunk_prefix_reload=True, transfer_deadline_ms=150, breaker_retry_ms=60_000
    )
    waits = waits_of(engine)
    request = Request("r", TOKENS)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    table = engine.allocate(7)
    engine.step([(request, table, 0, CHUNK)])
    assert is_called.wait(10)
    assert engine.step([(request, None, CHUNK, CHUNK)]) == set(table[:2])
    assert len(waits) == 1
    counts = engine.counters.snapshot()
    assert (counts["breaker.opened"], counts["rejected.unavailable"]) == (1, 2)
    assert counts["save.breaker_open"] == 2
    assert store.calls["put_start"] == 1


def test_a_reload_that_fails_is_computed_and_loaded_again(expected: list[list[bytes]]) -> None:
    """The engine goes back to the block; later chunks load all of the prefix."""
    store = FaultyStore()
    engine = forgetful(store, chunk_prefix_reload=True)

    def lose_once(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        return [codes[0], Code.NOT_FOUND, *codes[2:]] if number == 1 else codes

    store.bend["get_start"] = lose_once
    served = engine.serve(Request("r", TOKENS), chunk=CHUNK)
    assert served.kv == expected
    assert len(served.failed_block_ids) == 1
    assert engine.counters.snapshot()["rejected.not_found"] == 1


def test_what_a_preempted_request_had_generated_is_loaded_again_too(
    expected: list[list[bytes]],
) -> None:
    """Its prompt and the tokens since are computed in chunks that need each other alike."""
    engine = forgetful(FaultyStore(), chunk_prefix_reload=True)
    preempted = Request("r", TOKENS, num_prompt_tokens=CHUNK + 1)
    assert engine.serve(preempted, chunk=CHUNK).kv == expected
    assert engine.counters.snapshot()["load.blocks"] == 2 + 4 + 6


def test_nothing_is_loaded_again_when_the_prompt_is_computed() -> None:
    """Steps that generate tokens load and save nothing."""
    engine = SimulatedEngine(FaultyStore(), chunk_prefix_reload=True)
    request, hashes = Request("r", TOKENS[: 2 * CHUNK]), Request("all", TOKENS).block_hashes
    engine.scheduler.match(request, 0)
    table = engine.allocate(7)
    engine.scheduler.allocated(request, 0)
    for computed in range(0, 2 * CHUNK, CHUNK):
        engine.step([(request, None if computed else table, computed, CHUNK)])
    before = engine.counters.snapshot()
    assert (before["load.blocks"], before["save.blocks"]) == (2, 4)
    for computed in range(2 * CHUNK, len(TOKENS)):
        request.tokens.append(TOKENS[computed])
        request.block_hashes[:] = hashes[: len(request.tokens) // BLOCK_SIZE]
        engine.step([(request, None, computed, 1)])
    after = engine.counters.snapshot()
    assert (after["load.blocks"], after["save.blocks"]) == (2, 4)
