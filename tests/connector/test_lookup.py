"""Lookup: the longest prefix, in windows that stop at the first miss."""

from __future__ import annotations

import pytest
from faulty_store import FaultyStore

from kvformat.stores.protocol import Code
from kvformat_connector.lookup import Distrusted, PrefixLookup
from kvformat_connector.needs import ObjectNeeds
from kvformat_connector.stats import Counters

HASHES = [bytes([index // 256, index % 256]) for index in range(2000)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fill(store: FaultyStore, num_blocks: int, parts: tuple[str, ...] = ("p/",)) -> None:
    for part in parts:
        for block_hash in HASHES[:num_blocks]:
            store.put("n/" + part + block_hash.hex(), b"x")


def make_lookup(
    store: FaultyStore,
    *,
    window: int = 8,
    parts: tuple[str, ...] = ("p/",),
    distrusted: Distrusted | None = None,
) -> PrefixLookup:
    return PrefixLookup(
        store, [need(parts=parts)], window, distrusted or Distrusted(1000), Counters()
    )


def need(**fields: object) -> ObjectNeeds:
    """Full attention in blocks of one hash each, unless told otherwise."""
    return ObjectNeeds(
        **{
            "object_index": 0,
            "groups": (0,),
            "kind": "full_attention",
            "block_size": 1,
            "hashes_per_block": 1,
            "window": 0,
            "block_nbytes": 1,
            "parts": ("p/",),
            **fields,
        }
    )


@pytest.mark.parametrize("present", [0, 1, 7, 8, 9, 100, 2000])
def test_the_longest_prefix_is_found(store: FaultyStore, present: int) -> None:
    """However many blocks there are, exactly they are found."""
    fill(store, present)
    assert make_lookup(store).end("r", "n/", HASHES, 0, len(HASHES)) == present


def test_a_block_behind_a_gap_does_not_count(store: FaultyStore) -> None:
    """A prefix ends at its first hole, whatever comes after it."""
    fill(store, 100)
    store.remove([f"n/p/{HASHES[40].hex()}"])
    assert make_lookup(store).end("r", "n/", HASHES, 0, 100) == 40


def test_a_block_needs_all_its_shards(store: FaultyStore) -> None:
    """One missing shard object ends the prefix."""
    fill(store, 20, ("p/", "q/"))
    store.remove([f"n/q/{HASHES[5].hex()}"])
    assert make_lookup(store, parts=("p/", "q/")).end("r", "n/", HASHES, 0, 20) == 5


def test_a_missing_first_block_costs_one_call_of_one_window(store: FaultyStore) -> None:
    """Case 32: a long prompt of which nothing is there."""
    assert make_lookup(store).end("r", "n/", HASHES, 0, len(HASHES)) == 0
    assert store.sizes["exists"] == [8]


def test_windows_double_while_blocks_are_there(store: FaultyStore) -> None:
    """A long hit takes few calls."""
    fill(store, 100)
    make_lookup(store).end("r", "n/", HASHES, 0, len(HASHES))
    assert store.sizes["exists"] == [8, 16, 32, 64]


def test_asking_again_costs_nothing(store: FaultyStore) -> None:
    """Case 33: a waiting request that is asked about a hundred times makes no call after the
    first, also where local hits have grown in between."""
    fill(store, 20)
    lookup = make_lookup(store)
    assert lookup.end("r", "n/", HASHES, 0, 30) == 20
    calls = store.calls["exists"]
    for _ in range(95):
        assert lookup.end("r", "n/", HASHES, 3, 30) == 20
    assert store.calls["exists"] == calls
    lookup.forget("r")
    lookup.end("r", "n/", HASHES, 0, 30)
    assert store.calls["exists"] > calls


def test_a_prompt_that_grew_is_asked_from_where_the_last_answer_ended(store: FaultyStore) -> None:
    """After a preemption a request has more blocks: only the new ones are asked for."""
    fill(store, 20)
    lookup = make_lookup(store)
    assert lookup.end("r", "n/", HASHES, 0, 10) == 10
    store.sizes.clear()
    assert lookup.end("r", "n/", HASHES, 0, 14) == 14
    assert store.sizes["exists"] == [4]


def test_a_distrusted_block_ends_the_prefix_until_its_time_is_over(store: FaultyStore) -> None:
    """Case 23: what failed to load isn't promised again for a while, and then is."""
    fill(store, 20)
    clock = Clock()
    distrusted = Distrusted(1000, clock)
    distrusted.add([HASHES[4]])
    lookup = make_lookup(store, distrusted=distrusted)
    assert lookup.end("a", "n/", HASHES, 0, 20) == 4
    clock.now = 1.5
    assert lookup.end("b", "n/", HASHES, 0, 20) == 20
    clock.now = 2.5
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
    assert make_lookup(store).end("r", "n/", HASHES, 0, 20) == 0


def of_kind(kind: str, window: int = 0, **fields: object) -> ObjectNeeds:
    """A second object, of windows or states, under keys of its own."""
    return need(object_index=1, groups=(1,), kind=kind, window=window, parts=("w/",), **fields)


def put(store: FaultyStore, part: str, blocks: range | list[int]) -> None:
    for block in blocks:
        store.put("n/" + part + HASHES[block].hex(), b"x")


def hybrid_lookup(store: FaultyStore, *needs: ObjectNeeds) -> PrefixLookup:
    return PrefixLookup(store, needs, 8, Distrusted(1000), Counters())


def test_a_window_needs_only_what_the_next_token_sees(store: FaultyStore) -> None:
    """Of a window of 4 tokens, the 3 before the end are enough: the object of full attention
    alone needs every block."""
    fill(store, 20)
    put(store, "w/", range(17, 20))
    lookup = hybrid_lookup(store, need(), of_kind("sliding_window", 4))
    assert lookup.end("r", "n/", HASHES, 0, 30) == 20


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (range(20), 20),
        (range(19), 19),
        ([*range(5, 9), *range(18, 20)], 9),
        ([0, 1], 2),
        ([2, 3], 0),
        ([], 0),
    ],
    ids=["all", "one less", "an earlier end", "at the start", "start missing", "none"],
)
def test_the_last_end_that_has_its_window_is_found(
    store: FaultyStore, present: range | list[int], expected: int
) -> None:
    """Where the window at the end of the chain lacks a block, an earlier end is taken; at the
    start a window is as long as the prefix."""
    fill(store, 20)
    put(store, "w/", present)
    lookup = hybrid_lookup(store, need(), of_kind("sliding_window", 4))
    assert lookup.end("r", "n/", HASHES, 0, 30) == expected


def test_blocks_of_a_window_in_memory_are_not_asked_for(store: FaultyStore) -> None:
    """With 18 tokens in memory only the blocks after them must be in the store."""
    fill(store, 20)
    put(store, "w/", [18, 19])
    lookup = hybrid_lookup(store, need(), of_kind("sliding_window", 8))
    assert lookup.end("r", "n/", HASHES, 18, 30) == 20


@pytest.mark.parametrize(("states", "expected"), [([19], 20), ([3, 11], 12), ([25], 0), ([], 0)])
def test_a_state_is_needed_at_the_end_alone(
    store: FaultyStore, states: list[int], expected: int
) -> None:
    """The last end in the chain whose own state is there; states past the chain don't count."""
    fill(store, 20)
    put(store, "w/", states)
    lookup = hybrid_lookup(store, need(), of_kind("recurrent_state"))
    assert lookup.end("r", "n/", HASHES, 0, 30) == expected


def test_local_chunks_need_the_chunk_that_goes_on(store: FaultyStore) -> None:
    """Of chunks of 8 tokens, an end inside of one needs its start; an end between two, nothing."""
    fill(store, 20)
    put(store, "w/", [17, 18, 19])
    lookup = hybrid_lookup(store, need(), of_kind("chunked_local", 8))
    assert lookup.end("r", "n/", HASHES, 0, 30) == 16
    put(store, "w/", [16])
    assert lookup.end("s", "n/", HASHES, 0, 30) == 20


def test_blocks_of_several_sizes_meet_at_common_ends(store: FaultyStore) -> None:
    """Blocks of 2 and 3 hashes: a prefix is a multiple of 6, and hashes are those of its ends."""
    two = need(block_size=2, hashes_per_block=2)
    three = need(object_index=1, block_size=3, hashes_per_block=3, parts=("q/",))
    put(store, "p/", [1, 3, 5, 7, 9, 11, 13])
    put(store, "q/", [2, 5, 8, 11])
    assert hybrid_lookup(store, two, three).end("r", "n/", HASHES, 0, 18) == 12
    store.remove([f"n/q/{HASHES[8].hex()}"])
    assert hybrid_lookup(store, two, three).end("r", "n/", HASHES, 0, 18) == 6


def test_only_windows_are_asked_from_the_end(store: FaultyStore) -> None:
    """Without a chain the search goes backwards, in windows that double."""
    put(store, "w/", range(40, 44))
    lookup = hybrid_lookup(store, of_kind("sliding_window", 4))
    assert lookup.end("r", "n/", HASHES, 0, 200) == 44
    assert len(store.sizes["exists"]) == 6
    calls = store.calls["exists"]
    assert lookup.end("r", "n/", HASHES, 0, 200) == 44
    assert store.calls["exists"] == calls


def test_a_hybrid_miss_costs_one_call(store: FaultyStore) -> None:
    """Case 32 with several groups: nothing of the chain, so nothing else is asked."""
    lookup = hybrid_lookup(store, need(), of_kind("recurrent_state"))
    assert lookup.end("r", "n/", HASHES, 0, len(HASHES)) == 0
    assert store.sizes["exists"] == [8]


def test_a_distrusted_window_block_is_missing(store: FaultyStore) -> None:
    """Case 23 with several groups."""
    fill(store, 20)
    put(store, "w/", range(20))
    distrusted = Distrusted(1000)
    distrusted.add([HASHES[19]])
    lookup = PrefixLookup(store, [need(), of_kind("sliding_window", 2)], 8, distrusted, Counters())
    assert lookup.end("r", "n/", HASHES, 0, 30) == 19
