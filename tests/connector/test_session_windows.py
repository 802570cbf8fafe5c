"""Objects are opened in windows; the first layer of one moves before the next one is opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from faulty_store import FaultyStore
from simulated_engine import NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.stores.protocol import Code

NUM_LAYERS = 3


class RecordingStore(FaultyStore):
    """``events`` lists what loads ask for: sessions opened, headers and layers read, ends."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.most_sessions = 0

    def __getattr__(self, name: str) -> Any:
        call = super().__getattr__(name)
        if name not in ("get_start", "get_ranges", "get_end"):
            return call

        def recorded(keys: Sequence[str], *arguments: Any) -> list[int]:
            what = name
            if name == "get_ranges":
                what = "layer" if arguments[2][0][0] else "header"
            self.events.append((what, len(keys)))
            codes = call(keys, *arguments)
            self.most_sessions = max(self.most_sessions, self.num_open_sessions)
            return codes

        return recorded


@pytest.fixture
def store() -> RecordingStore:
    store = RecordingStore()
    SimulatedEngine(store).serve(Request("c", TOKENS))
    # Proves that the store can be read from: no canary comes before the headers of the next load.
    store.events.clear()
    return store


def load(store: RecordingStore, **options: object) -> list[list[bytes]]:
    engine = SimulatedEngine(store, **options)
    engine.worker._breaker.succeeded()
    return engine.serve(Request("w", TOKENS)).kv


def test_the_first_layer_of_a_window_moves_before_the_next_window_opens(
    store: RecordingStore, expected: list[list[bytes]]
) -> None:
    """Of a long prompt neither every session nor every header comes before the first payload, and
    every header comes before its own payload; later layers move all rows at once."""
    assert load(store, layerwise_session_blocks=4) == expected
    assert store.events == [
        *[("get_start", 4), ("header", 4), ("layer", 4)],
        *[("get_start", 2), ("header", 2), ("layer", 2)],
        *[("layer", NUM_FULL)] * (NUM_LAYERS - 1),
        ("get_end", NUM_FULL),
    ]
    assert store.most_sessions == NUM_FULL
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("window", [0, 6, 256])
def test_a_load_that_fits_a_window_is_opened_at_once(
    store: RecordingStore, expected: list[list[bytes]], window: int
) -> None:
    """One call for its sessions, one for its headers; 0 is no limit."""
    assert load(store, layerwise_session_blocks=window) == expected
    assert store.events[:2] == [("get_start", NUM_FULL), ("header", NUM_FULL)]


def test_what_is_wrong_in_a_later_window_fails_alone(
    store: RecordingStore, expected: list[list[bytes]]
) -> None:
    """An object of the last window that is gone costs its own block, before its payload."""
    store.bend["get_start"] = lambda number, keys, codes: [
        Code.NOT_FOUND if len(keys) == 2 else code for code in codes
    ]
    engine = SimulatedEngine(store, layerwise_session_blocks=4)
    engine.worker._breaker.succeeded()
    served = engine.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert engine.counters.snapshot()["rejected.not_found"] == 2
    assert engine.counters.snapshot()["load.blocks"] == 4
    assert ("layer", 2) not in store.events


def test_leases_are_renewed_a_window_at_a_time(
    store: RecordingStore, expected: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest sessions first, and no call renews more than a window."""
    import kvformat_connector.sessions as sessions

    monkeypatch.setattr(sessions, "RENEW_GET_SESSION_S", -1.0)
    assert load(store, layerwise_session_blocks=4) == expected
    assert [count for what, count in store.events if what == "get_start"] == [4, 4, 2, 4, 4, 4]


def test_sessions_end_when_the_last_layer_has_been_read(store: RecordingStore) -> None:
    """Not when it has been computed: the step has nothing left to wait for."""
    engine = SimulatedEngine(store, layerwise_prefetch_layers=NUM_LAYERS)
    request = Request("w", TOKENS)
    hit = engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, hit)
    seen: list[int] = []

    def look(layer_index: int) -> None:
        if layer_index == NUM_LAYERS - 1:
            assert engine.worker._loads is not None
            assert engine.worker._loads._ended is not None
            engine.worker._loads._ended.result(10)
            seen.append(store.num_open_sessions)

    engine.before_layer = look
    assert engine.step([(request, engine.allocate(7), hit, 3)]) == set()
    assert seen == [0]
