"""Calls that don't come back: one bounded delay, then requests go on without the pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.stores.protocol import Code
from kvformat_connector import scheduler, worker

DEADLINE_MS = 150
FAST = {"transfer_deadline_ms": DEADLINE_MS, "breaker_retry_ms": 20}


class Valve:
    """Holds calls back while it's closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_held = 0

    def __call__(self, keys: Sequence[str]) -> None:
        self.num_held += not self.opened.is_set()
        assert self.opened.wait(60)


@pytest.fixture
def valve() -> Iterator[Valve]:
    valve = Valve()
    yield valve
    valve.opened.set()


def until(condition: object, limit_s: float = 10.0) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def run_idle_steps(engine: SimulatedEngine) -> None:
    """Steps without requests, as an engine that serves others makes them: the breaker probes."""

    def is_closed() -> bool:
        engine.step([])
        return not engine.worker._breaker.is_open

    until(is_closed)


@pytest.mark.parametrize("method", ["get_start", "get_ranges"])
def test_a_load_that_hangs_costs_one_deadline_and_the_next_requests_nothing(
    store: FaultyStore, valve: Valve, expected: list[list[bytes]], method: str
) -> None:
    """A frozen store: the request recomputes after one deadline, the breaker opens, and whoever
    comes next isn't promised anything; when the store is back, it is used again."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store, failed_key_retry_ms=0, **FAST)
    store.before[method] = valve
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert served.num_hit_tokens == NUM_FULL * BLOCK_SIZE
    counts = warm.counters.snapshot()
    assert counts["rejected.deadline"] == NUM_FULL
    assert counts["breaker.opened"] == 1
    num_held = valve.num_held
    assert warm.serve(Request("next", TOKENS)).num_hit_tokens == 0
    # Nothing but a probe may have asked meanwhile.
    assert valve.num_held <= num_held + 1
    assert warm.counters.snapshot()["save.breaker_open"] > 0
    valve.opened.set()
    run_idle_steps(warm)
    assert warm.counters.snapshot()["breaker.closed"] == 1
    again = warm.serve(Request("again", TOKENS))
    assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, expected)
    until(lambda: not store.num_open_sessions)


def without_room(store: FaultyStore) -> None:
    [manifest] = [key for key in store.list() if key.endswith("manifest")]
    store.inner.remove([manifest])
    store.inner.put = lambda key, data: Code.NO_SPACE  # type: ignore[method-assign]


def only_read(store: FaultyStore) -> None:
    store.uri = "memory://?readonly=true"
    store.inner.put = lambda key, data: Code.UNAVAILABLE  # type: ignore[method-assign]


@pytest.mark.parametrize("bend", [without_room, only_read])
def test_a_store_that_takes_nothing_is_used_again_when_it_is_back(
    filled: FaultyStore,
    valve: Valve,
    expected: list[list[bytes]],
    bend: Callable[[FaultyStore], None],
) -> None:
    """Where the probe finds no room for a manifest, or may put nothing at all, it reads: the store
    answers, and its objects can be read."""
    bend(filled)
    warm = SimulatedEngine(filled, failed_key_retry_ms=0, **FAST)
    filled.before["get_ranges"] = valve
    assert warm.serve(Request("w", TOKENS)).kv == expected
    assert warm.counters.snapshot()["breaker.opened"] == 1
    valve.opened.set()
    run_idle_steps(warm)
    again = warm.serve(Request("again", TOKENS))
    assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, expected)


def test_a_store_that_is_slow_but_in_time_is_used(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Every call takes a while, none too long: all is saved, all is loaded, the breaker stays
    closed."""
    for method in ("exists", "put_start", "put_ranges", "put_commit", "get_start", "get_ranges"):
        store.before[method] = lambda keys: time.sleep(0.03)
    cold = SimulatedEngine(store)
    assert cold.serve(Request("c", TOKENS)).kv == expected
    assert cold.counters.snapshot()["save.blocks"] == NUM_FULL
    warm = SimulatedEngine(store)
    served = warm.serve(Request("w", TOKENS))
    assert (served.num_hit_tokens, served.kv) == (NUM_FULL * BLOCK_SIZE, expected)
    assert served.failed_block_ids == set()
    assert "breaker.opened" not in warm.counters.snapshot()
    assert store.num_open_sessions == 0


def test_calls_that_are_each_just_in_time_hold_a_step_up_twice_a_deadline(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A step loads by many calls, each of which takes a good part of its deadline: when they have
    taken two deadlines together, the rest is computed, and the store is left alone."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(
        store, layerwise_max_transfer_blocks=1, transfer_deadline_ms=400, breaker_retry_ms=60_000
    )
    store.before["get_ranges"] = lambda keys: time.sleep(0.1)
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    counts = warm.counters.snapshot()
    assert counts["rejected.deadline"] == len(served.failed_block_ids) == NUM_FULL
    assert counts["breaker.opened"] == 1
    until(lambda: not store.num_open_sessions)


def test_what_a_late_call_brings_reaches_no_block(store: FaultyStore, valve: Valve) -> None:
    """The call of layer 1 comes back when the engine has given its blocks to another request: not
    one byte of the cache changes."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store, **FAST)
    hold_layer_1 = iter(range(99))

    def hold(keys: Sequence[str]) -> None:
        if next(hold_layer_1) == 3:  # canary, headers, layer 0, layer 1
            valve(keys)

    store.before["get_ranges"] = hold
    request = Request("w", TOKENS)
    hit = warm.scheduler.match(request, 0)
    table = warm.allocate(7)
    warm.scheduler.allocated(request, hit)
    assert warm.step([(request, table, hit, 3)]) == set(table[:NUM_FULL])
    for array in warm.memory.values():
        array[:] = 7
    before = {name: array.tobytes() for name, array in warm.memory.items()}
    valve.opened.set()
    until(lambda: not store.num_open_sessions)
    warm.step([])
    assert {name: array.tobytes() for name, array in warm.memory.items()} == before
    until(lambda: not warm.worker._rank.load_staging.num_taken_nbytes)  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["put_start", "put_ranges", "put_commit"])
def test_a_save_that_hangs_holds_no_step_up(
    store: FaultyStore, valve: Valve, expected: list[list[bytes]], method: str
) -> None:
    """The step ends while the put hangs; later saves are left out; the objects are given up, and
    nothing of them is seen but what the hanging call itself did."""
    store.before[method] = valve
    engine = SimulatedEngine(store, **FAST)
    settle = engine.worker.settle
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    assert engine.serve(Request("c", TOKENS)).kv == expected
    until(lambda: valve.num_held)
    until(lambda: engine.step([]) == set() and engine.worker._breaker.is_open)
    engine.serve(Request("d", [9, *TOKENS]))
    assert engine.counters.snapshot()["save.breaker_open"] == 7
    assert settle(10)
    assert engine.worker.num_left_behind == 1
    valve.opened.set()
    until(lambda: not store.num_open_sessions and not engine.worker.num_left_behind)
    assert engine.worker.num_open_sessions == 0
    stored = [key for key in store.list() if not key.endswith("manifest")]
    assert len(stored) == (NUM_FULL if method == "put_commit" else 0)


def test_a_step_whose_channel_is_left_behind_while_it_computes_ends_too(
    store: FaultyStore, valve: Valve
) -> None:
    """An earlier save hangs, and is found to between two layers. When the call has come back,
    nothing of either step is open, or waits for a thread that has ended."""
    store.before["put_ranges"] = valve
    engine = SimulatedEngine(store, **FAST)
    settle = engine.worker.settle
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    engine.serve(Request("c", TOKENS))
    until(lambda: valve.num_held)

    def before_layer(layer_index: int) -> None:
        if layer_index == 1:
            assert settle(10)
            assert engine.worker.num_left_behind == 1
            valve.opened.set()
            until(lambda: not engine.worker.num_left_behind)

    engine.before_layer = before_layer  # type: ignore[assignment]
    engine.serve(Request("d", [9, *TOKENS]))
    assert settle(10)
    staging = engine.worker._rank.save_staging  # type: ignore[union-attr]
    until(lambda: not staging.num_taken_nbytes)
    until(lambda: settle(0.0) and not engine.worker._saving)
    assert (store.num_open_sessions, engine.worker.num_open_sessions) == (0, 0)


def test_a_save_reads_nothing_that_changed_after_its_step(
    store: FaultyStore, valve: Valve, expected: list[list[bytes]]
) -> None:
    """Blocks are the engine's again when the step ends: a slow put stores what was computed."""
    store.before["put_ranges"] = valve
    engine = SimulatedEngine(store)
    settle = engine.worker.settle
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    engine.serve(Request("c", TOKENS))
    for array in engine.memory.values():
        array[:] = 3
    valve.opened.set()
    assert settle(10)
    assert engine.counters.snapshot()["save.blocks"] == NUM_FULL
    assert SimulatedEngine(store).serve(Request("w", TOKENS)).kv == expected


def test_a_store_too_slow_for_the_saves_bounds_memory_and_delay(
    store: FaultyStore, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back-pressure: with the staging memory full, what finds no room in time isn't saved."""
    import kvformat_connector.worker as worker

    monkeypatch.setattr(worker, "_SAVE_WAIT_S", 0.01)
    store.before["put_ranges"] = valve
    engine = SimulatedEngine(store, staging_bytes=1)
    settle = engine.worker.settle
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    engine.serve(Request("c", TOKENS))
    # The first object's first layer has the memory; its second layer finds none either.
    assert engine.counters.snapshot()["save.no_staging"] == NUM_FULL
    valve.opened.set()
    assert settle(10)
    assert engine.worker._rank.save_staging.num_taken_nbytes == 0  # type: ignore[union-attr]
    until(lambda: not store.num_open_sessions)


def test_memory_of_puts_that_wait_behind_a_hanging_one_is_used_again(
    store: FaultyStore, valve: Valve
) -> None:
    """Only the stage in the call itself is kept: a store that is back isn't short of memory."""
    store.before["put_ranges"] = valve
    engine = SimulatedEngine(store, **FAST)
    engine.worker.settle = lambda timeout_s: True  # type: ignore[method-assign]
    engine.serve(Request("c", TOKENS))
    staging = engine.worker._rank.save_staging  # type: ignore[union-attr]
    until(lambda: valve.num_held)
    before = staging.num_taken_nbytes
    until(lambda: engine.step([]) == set() and engine.worker._breaker.is_open)
    assert staging.num_taken_nbytes == before // 3  # three layers, one of them in the call
    valve.opened.set()
    until(lambda: not staging.num_taken_nbytes)


def test_two_canaries_that_cannot_be_read_open_the_breaker(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A dead node fails each range after a while: two ranges are tried, not one per block."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store, breaker_retry_ms=60_000)
    store.sizes.clear()
    store.bend["get_ranges"] = lambda number, keys, codes: [Code.TRANSFER_FAILED] * len(codes)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    assert store.sizes["get_ranges"] == [1, 1]
    assert warm.counters.snapshot()["breaker.opened"] == 1


def test_one_unreadable_object_leaves_the_breaker_closed(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """The canary is the object that can't be read: the next one shows that the store can."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    victim: list[str] = []

    def fail(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        if not victim:
            victim.append(keys[0])
        return [
            Code.TRANSFER_FAILED if key in victim else code
            for key, code in zip(keys, codes, strict=True)
        ]

    store.bend["get_ranges"] = fail
    assert warm.serve(Request("w", TOKENS)).kv == expected
    counts = warm.counters.snapshot()
    assert counts["rejected.transfer_failed"] == 1
    assert "breaker.opened" not in counts


def test_a_lease_that_runs_out_between_two_layers_is_renewed(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Case 25: the session is started again, the layer read again, and nothing recomputed."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)

    def lapse(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        return [Code.LEASE_EXPIRED] * len(codes) if number == 3 else codes

    store.calls.clear()
    store.bend["get_ranges"] = lapse
    served = warm.serve(Request("w", TOKENS))
    assert (served.kv, served.failed_block_ids) == (expected, set())
    assert warm.counters.snapshot()["load.reopened"] == NUM_FULL


def test_an_object_that_is_evicted_between_two_layers_is_recomputed(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Case 24: the session can't be started again; that block fails, the others load."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    victim = sorted(key for key in store.list() if not key.endswith("manifest"))[2]
    warm = SimulatedEngine(store)

    def lapse(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        return [
            Code.LEASE_EXPIRED if number >= 3 and key == victim else code
            for key, code in zip(keys, codes, strict=True)
        ]

    def gone(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        return [Code.NOT_FOUND] * len(codes) if number else codes

    store.calls.clear()
    store.bend.update(get_ranges=lapse, get_start=gone)
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert warm.counters.snapshot()["rejected.lease_expired"] == 1


def test_leases_are_renewed_before_they_end(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each session that has run for a while is started again before the next layer is read."""
    import kvformat_connector.sessions as sessions

    SimulatedEngine(store).serve(Request("c", TOKENS))
    monkeypatch.setattr(sessions, "RENEW_GET_SESSION_S", -1.0)
    store.sizes.clear()
    SimulatedEngine(store).serve(Request("w", TOKENS))
    assert store.sizes["get_start"] == [NUM_FULL] * 4
    assert store.num_open_sessions == 0


def test_a_store_that_tells_nothing_is_asked_again_only_when_a_probe_succeeds(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A dead master answers each question after seconds: one is asked, not one per request."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store, breaker_retry_ms=20)
    store.calls.clear()
    store.bend["exists"] = lambda number, keys, codes: [Code.UNAVAILABLE] * len(codes)
    for name in "abcdef":
        assert warm.scheduler.match(Request(name, TOKENS), 0) == 0
    lookups = warm.counters.snapshot()["lookup.calls"]
    assert lookups == 1
    del store.bend["exists"]
    numbers = iter(range(10_000))
    until(lambda: warm.scheduler.match(Request(f"w{next(numbers)}", TOKENS), 0))
    assert warm.serve(Request("w", TOKENS)).kv == expected


def test_keys_that_cannot_be_told_about_are_misses_alone(store: FaultyStore) -> None:
    """Some keys that can't be told about are no reason to leave the store alone."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    store.bend["exists"] = lambda number, keys, codes: [*codes[:3], *[Code.UNAVAILABLE] * 3]
    assert warm.scheduler.match(Request("a", TOKENS), 0) == 3 * BLOCK_SIZE
    assert warm.scheduler.match(Request("b", TOKENS), 0) == 3 * BLOCK_SIZE
    assert warm.counters.snapshot()["lookup.calls"] == 2


def test_a_store_that_does_not_close_is_left_behind(
    store: FaultyStore, valve: Valve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose end hangs, as Mooncake's does behind a frozen node, doesn't keep the process
    that ends: it is waited for as long as threads are."""
    monkeypatch.setattr(worker, "_CLOSE_LIMIT_S", 0.05)
    monkeypatch.setattr(scheduler, "_CLOSE_LIMIT_S", 0.05)
    engine = SimulatedEngine(store)
    store.close = lambda: valve([])  # type: ignore[attr-defined]
    engine.worker.close()
    engine.scheduler.close()
    assert valve.num_held == 2
