"""What a start does with a store: it opens and proves itself in time, or the start ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores.memory import MemoryStore
from kvformat.stores.protocol import Code
from kvformat_connector import starting
from kvformat_connector.config import parse_options
from kvformat_connector.starting import open_checked_store


class Store(MemoryStore):
    """Does what a test puts in place of a call, and tells when it is closed."""

    def __init__(self, **calls: Callable[..., Any]) -> None:
        super().__init__("memory://")
        self.is_closed = threading.Event()
        vars(self).update(calls)

    def close(self) -> None:
        super().close()
        self.is_closed.set()


@pytest.fixture
def is_over() -> Iterator[threading.Event]:
    """What a call that hangs waits for; the test's end ends it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize(("policy", "number"), [("recompute", 1), ("fail", 0)])
def test_reloading_and_recomputing_for_ever_is_warned_of(policy: str, number: int) -> None:
    """A prefix that is needed in each chunk, and computed again where it can't be loaded, may keep
    a request for ever; the operator is told which setting ends it."""
    transfer = SimpleNamespace(kv_load_failure_policy=policy)
    options = parse_options({"store": "memory://", "chunk_prefix_reload": True})
    said = starting.warnings_at_start(SimpleNamespace(kv_transfer_config=transfer), options)
    assert sum("chunk_prefix_reload" in sentence for sentence in said) == number


def use(monkeypatch: pytest.MonkeyPatch, opening: Callable[[str], Any]) -> None:
    monkeypatch.setattr(starting, "open_store", opening)


def refusal() -> StoreUnavailableError:
    with pytest.raises(StoreUnavailableError) as caught:
        open_checked_store("memory://", "worker")
    return caught.value


def test_a_store_that_does_not_open_in_time_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, is_over: threading.Event
) -> None:
    """Whatever kind of store it is: the start ends, and a store that opens later is closed."""
    store = Store()
    monkeypatch.setattr(starting, "_OPEN_LIMIT_S", 0.2)
    use(monkeypatch, lambda uri: is_over.wait(30) and store)
    error = refusal()
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "'memory://'" in error.detail
    assert not store.is_closed.is_set()
    is_over.set()
    assert store.is_closed.wait(30)


@pytest.mark.parametrize("call", ["put", "get", "remove"])
def test_a_store_that_hangs_in_the_self_test_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, is_over: threading.Event, call: str
) -> None:
    """Each of its steps counts against the same deadline."""
    monkeypatch.setattr(starting, "_OPEN_LIMIT_S", 0.2)
    use(monkeypatch, lambda uri: Store(**{call: lambda *arguments: is_over.wait(30)}))
    assert refusal().reason is Reason.STORE_UNAVAILABLE


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("put", Code.TRANSFER_FAILED),
        ("get", None),
        ("get", b"other bytes"),
        ("remove", [Code.UNAVAILABLE]),
    ],
)
def test_a_store_that_fails_the_self_test_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, call: str, answer: object
) -> None:
    """The error names the step, and the store is closed."""
    store = Store(**{call: lambda *arguments: answer})
    use(monkeypatch, lambda uri: store)
    error = refusal()
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert repr(call) in error.detail
    assert store.is_closed.is_set()


def test_a_wrong_option_of_a_store_arrives_as_such() -> None:
    """An error of opening keeps its kind and reason."""
    with pytest.raises(ConfigError) as caught:
        open_checked_store("gopher://nowhere", "worker")
    assert caught.value.reason is Reason.CONFIG_VALUE
