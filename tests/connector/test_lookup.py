"""Lookup: the longest prefix, in windows that stop at the first miss."""

from __future__ import annotations

import pytest
from faulty_store import FaultyStore

from kvformat.stores.protocol import Code
from kvformat_connector.lookup import Distrusted, PrefixLookup
from kvformat_connector.stats import Counters

HASHES = [bytes([index // 256, index % 256]) for index in range(2000)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def fill(store: FaultyStore, num_blocks: int, prefixes: tuple[str, ...] = ("p/",)) -> None:
    for prefix in prefixes:
        for block_hash in HASHES[:num_blocks]:
            store.put(prefix + block_hash.hex(), b"x")


def make_lookup(
    store: FaultyStore,
    *,
    window: int = 8,
    prefixes: tuple[str, ...] = ("p/",),
    distrusted: Distrusted | None = None,
) -> PrefixLookup:
    return PrefixLookup(store, prefixes, window, distrusted or Distrusted(1000), Counters())


@pytest.mark.parametrize("present", [0, 1, 7, 8, 9, 100, 2000])
def test_the_longest_prefix_is_found(store: FaultyStore, present: int) -> None:
    """However many blocks there are, exactly they are found."""
    fill(store, present)
    assert make_lookup(store).end("r", HASHES, 0, len(HASHES)) == present


def test_a_block_behind_a_gap_does_not_count(store: FaultyStore) -> None:
    """A prefix ends at its first hole, whatever comes after it."""
    fill(store, 100)
    store.remove([f"p/{HASHES[40].hex()}"])
    assert make_lookup(store).end("r", HASHES, 0, 100) == 40


def test_a_block_needs_all_its_shards(store: FaultyStore) -> None:
    """One missing shard object ends the prefix."""
    fill(store, 20, ("p/", "q/"))
    store.remove([f"q/{HASHES[5].hex()}"])
    assert make_lookup(store, prefixes=("p/", "q/")).end("r", HASHES, 0, 20) == 5


def test_a_missing_first_block_costs_one_call_of_one_window(store: FaultyStore) -> None:
    """Case 32: a long prompt of which nothing is there."""
    assert make_lookup(store).end("r", HASHES, 0, len(HASHES)) == 0
    assert store.sizes["exists"] == [8]


def test_windows_double_while_blocks_are_there(store: FaultyStore) -> None:
    """A long hit takes few calls."""
    fill(store, 100)
    make_lookup(store).end("r", HASHES, 0, len(HASHES))
    assert store.sizes["exists"] == [8, 16, 32, 64]


def test_asking_again_costs_nothing(store: FaultyStore) -> None:
    """Case 33: a waiting request that is asked about a hundred times makes no call after the
    first, also where local hits have grown in between."""
    fill(store, 20)
    lookup = make_lookup(store)
    assert lookup.end("r", HASHES, 0, 30) == 20
    calls = store.calls["exists"]
    for _ in range(95):
        assert lookup.end("r", HASHES, 3, 30) == 20
    assert store.calls["exists"] == calls
    lookup.forget("r")
    lookup.end("r", HASHES, 0, 30)
    assert store.calls["exists"] > calls


def test_a_prompt_that_grew_is_asked_from_where_the_last_answer_ended(store: FaultyStore) -> None:
    """After a preemption a request has more blocks: only the new ones are asked for."""
    fill(store, 20)
    lookup = make_lookup(store)
    assert lookup.end("r", HASHES, 0, 10) == 10
    store.sizes.clear()
    assert lookup.end("r", HASHES, 0, 14) == 14
    assert store.sizes["exists"] == [4]


def test_a_distrusted_block_ends_the_prefix_until_its_time_is_over(store: FaultyStore) -> None:
    """Case 23: what failed to load isn't promised again for a while, and then is."""
    fill(store, 20)
    clock = Clock()
    distrusted = Distrusted(1000, clock)
    distrusted.add([HASHES[4]])
    lookup = make_lookup(store, distrusted=distrusted)
    assert lookup.end("a", HASHES, 0, 20) == 4
    clock.now = 1.5
    assert lookup.end("b", HASHES, 0, 20) == 20
    distrusted.add([HASHES[0]])
    assert len(distrusted) == 1  # spent entries don't pile up


@pytest.mark.parametrize(
    "answer",
    [
        lambda codes: [Code.UNAVAILABLE] * len(codes),
        lambda codes: codes[:-1],
        lambda codes: [],
        lambda codes: [*codes, 1],
        lambda codes: 1 / 0,
    ],
    ids=["unreachable", "short", "empty", "long", "raises"],
)
def test_a_store_that_cannot_answer_is_a_miss(store: FaultyStore, answer: object) -> None:
    """No store can end an engine, and no malformed list is read as a hit."""
    fill(store, 20)
    store.bend["exists"] = lambda number, keys, codes: answer(codes)  # type: ignore[operator]
    assert make_lookup(store).end("r", HASHES, 0, 20) == 0
