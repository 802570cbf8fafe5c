"""Sessions that several hold, and that are only ended by those who opened them."""

from __future__ import annotations

import pytest
from faulty_store import FaultyStore

from kvformat.stores.arguments import address_of
from kvformat.stores.protocol import Code
from kvformat_connector.sessions import GetSessions, PutSessions, SessionBook

KEYS = ["a", "b", "c"]


@pytest.fixture
def store() -> FaultyStore:
    store = FaultyStore()
    for key in KEYS:
        store.put(key, key.encode() * 8)
    return store


def read(store: FaultyStore, key: str) -> bytes | int:
    data = bytearray(8)
    [code] = store.get_ranges([key], [[address_of(data)]], [[8]], [[0]])
    return bytes(data) if code == 8 else int(code)


def test_a_reader_that_ends_early_ends_nobody_elses_session(store: FaultyStore) -> None:
    """Case 29: a store counts no holders, so the last one to leave ends the session."""
    book = SessionBook()
    first, second = GetSessions(store, book=book), GetSessions(store, book=book)
    assert first.open(KEYS) == [Code.OK] * 3
    assert second.open(KEYS[1:]) == [Code.OK] * 2
    first.close()
    assert [read(store, key) for key in KEYS] == [Code.INVALID, b"b" * 8, b"c" * 8]
    second.end(["b"])
    assert [read(store, key) for key in KEYS[1:]] == [Code.INVALID, b"c" * 8]
    second.close()
    assert (store.num_open_sessions, len(book)) == (0, 0)


def test_what_was_not_opened_here_is_neither_committed_nor_revoked(store: FaultyStore) -> None:
    """Case 22: another writer's session of a key, or its object, stays as it is."""
    store.put_start(["theirs"], [8])
    mine = PutSessions(store)
    assert mine.open(["theirs", "a", "mine"], [8] * 3) == [Code.EXISTS, Code.EXISTS, Code.OK]
    mine.revoke(["theirs", "a", "mine"])
    mine.close()
    assert store.exists(["a"]) == [1]
    data = bytearray(b"t" * 8)
    assert store.put_ranges(["theirs"], [[address_of(data)]], [[8]], [[0]]) == [8]
    assert store.put_commit(["theirs"]) == [Code.OK]


@pytest.mark.parametrize("code", [Code.INTERNAL, Code.UNAVAILABLE])
def test_a_session_of_which_nobody_knows_is_revoked(store: FaultyStore, code: Code) -> None:
    """A start that fails may have opened the session all the same."""
    store.bend["put_start"] = lambda number, keys, codes: [code] * len(keys)
    mine = PutSessions(store)
    assert mine.open(["x", "y"], [8, 8]) == [code] * 2
    assert store.num_open_sessions == 2
    mine.close()
    assert store.num_open_sessions == 0
