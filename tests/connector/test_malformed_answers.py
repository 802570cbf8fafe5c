"""Stores that answer nonsense: the engine goes on, its bytes are right, and nothing stays open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.stores.protocol import Code
from kvformat_connector.answers import ask, code_name

NONSENSE: dict[str, Callable[[list[int]], Any]] = {
    "empty": lambda codes: [],
    "short": lambda codes: codes[:-1],
    "long": lambda codes: [*codes, 0],
    "none": lambda codes: None,
    "a number": lambda codes: 0,
    "a hole": lambda codes: [*codes[:-1], None],
    "text": lambda codes: ["0"] * len(codes),
    "fractions": lambda codes: [0.5] * len(codes),
    "lists": lambda codes: [[code] for code in codes],
    "raises": lambda codes: 1 / 0,
}


def expect_idle(store: FaultyStore, engine: SimulatedEngine) -> None:
    rank = engine.worker._rank
    assert rank is not None
    assert rank.load_staging.num_taken_nbytes + rank.save_staging.num_taken_nbytes == 0
    assert (store.num_open_sessions, engine.worker.num_open_sessions) == (0, 0)
    assert engine.scheduler.num_requests == 0


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_nonsense_fails_each_key_of_its_call(nonsense: str) -> None:
    """Case 34: one pass over the answer, and a code for each key whatever it is."""
    keys = ["a", "b"]
    codes = ask(lambda keys: NONSENSE[nonsense]([0, 0]), keys)
    assert codes == [Code.INTERNAL] * 2


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("method", ["put_start", "put_ranges", "put_commit", "put_revoke"])
def test_saves_through_a_store_that_answers_nonsense(
    store: FaultyStore, expected: list[list[bytes]], method: str, nonsense: str
) -> None:
    """Nothing is stored that isn't whole; what is stored is right."""
    engine = SimulatedEngine(store)
    store.bend[method] = lambda number, keys, codes: NONSENSE[nonsense](codes)
    assert engine.serve(Request("c", TOKENS)).kv == expected
    num_failed = engine.counters.snapshot().get("save.internal", 0)
    assert num_failed == (0 if method == "put_revoke" else NUM_FULL)
    store.bend.clear()
    expect_idle(store, engine)
    warm = SimulatedEngine(store)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    assert not warm.counters.rejections


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("method", ["exists", "get_start", "get_ranges", "get_end"])
def test_loads_from_a_store_that_answers_nonsense(
    store: FaultyStore, expected: list[list[bytes]], method: str, nonsense: str
) -> None:
    """A lookup is a miss, a load is computed; in every call, or in one of them."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    calls = {"get_ranges": 5}.get(method, 1)  # canary, headers, three layers
    for chosen in (None, *range(calls)):
        store.calls.clear()
        warm = SimulatedEngine(store, breaker_retry_ms=60_000)
        store.bend[method] = lambda number, keys, codes, chosen=chosen: (  # type: ignore[misc]
            NONSENSE[nonsense](codes) if chosen in (None, number) else codes
        )
        served = warm.serve(Request("w", TOKENS))
        assert served.kv == expected
        assert served.num_hit_tokens == (0 if method == "exists" else NUM_FULL * BLOCK_SIZE)
        num_rejected = warm.counters.snapshot().get("rejected.internal", 0)
        assert bool(num_rejected) == (method in ("get_start", "get_ranges"))
        store.bend.clear()
        expect_idle(store, warm)


@pytest.mark.parametrize("victim", range(NUM_FULL))
@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.NOT_READY, Code.TRANSFER_FAILED])
def test_an_object_that_cannot_be_opened_fails_alone(
    store: FaultyStore, expected: list[list[bytes]], victim: int, code: Code
) -> None:
    """Case 24: gone between lookup and load. That block is computed anew, the others are loaded."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)

    def fail(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        codes[victim] = code
        return codes

    store.bend["get_start"] = fail
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    counts = warm.counters.snapshot()
    assert counts[f"rejected.{code.name.lower()}"] == 1
    assert counts["load.blocks"] == NUM_FULL - 1
    store.bend.clear()
    expect_idle(store, warm)


def test_codes_that_a_store_made_up_are_counted_as_one() -> None:
    """Names of counters end in a server's metrics: a store can't make up any number of them."""
    assert {code_name(code) for code in (-10, -4711, -(2**40))} == {"code_other"}
    assert code_name(Code.NOT_FOUND) == "not_found"
