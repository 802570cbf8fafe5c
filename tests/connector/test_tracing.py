"""KVFORMAT_RANGE_DEBUG: a JSON line for every call that touches a key."""

from __future__ import annotations

import json
from typing import Any

import pytest
from faulty_store import FaultyStore
from simulated_engine import Request, SimulatedEngine

from kvformat.errors import ConfigError, Reason
from kvformat.stores.memory import MemoryStore
from kvformat_connector.config import parse_range_debug
from kvformat_connector.tracing import TracedStore


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_a_request_leaves_one_line_a_call(capfd: pytest.CaptureFixture[str]) -> None:
    """Lookup, session starts, each layer's range call, header and commit are all told, with keys,
    bytes and codes that are the calls' own."""
    store = FaultyStore()
    traced = TracedStore(store, "worker")
    engine = SimulatedEngine(traced)
    engine.serve(Request("a", list(range(9))))
    found = lines(capfd.readouterr().err)
    calls = [line["call"] for line in found]
    assert {name: calls.count(name) for name in store.calls} == dict(store.calls)
    assert calls.count("put_ranges") == len(engine.memory) + 1  # each layer, and the headers
    (commit,) = (line for line in found if line["call"] == "put_commit")
    assert (len(commit["keys"]), commit["codes"]) == (2, [0, 0])
    (layer, *_) = (line for line in found if line["call"] == "put_ranges")
    assert layer["codes"] == layer["nbytes"]
    assert {"time", "pid", "ms"} <= layer.keys()
    assert layer["role"] == "worker"


def test_a_call_that_raises_is_told_and_still_raises(capfd: pytest.CaptureFixture[str]) -> None:
    """The line of a failed call has the error instead of codes."""
    store = FaultyStore()

    def fail(*_: object) -> list[int]:
        raise RuntimeError("no")

    store.bend["exists"] = fail
    with pytest.raises(RuntimeError):
        TracedStore(store, "scheduler").exists(["a"])
    (line,) = lines(capfd.readouterr().err)
    assert "RuntimeError" in line["raised"]
    assert "codes" not in line


def test_whole_objects_are_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    """Calls about one key have one key and one code: the size where an object came back."""
    traced = TracedStore(MemoryStore("memory://"), "worker")
    assert traced.put("k", b"abc") == 0
    assert traced.get("k") == b"abc"
    assert traced.get("none") is None
    found = [(line["call"], line["keys"], line["codes"]) for line in lines(capfd.readouterr().err)]
    assert found == [("put", ["k"], [0]), ("get", ["k"], [3]), ("get", ["none"], [-1])]


@pytest.mark.parametrize("value", ["", "2", "true", "01", " 1", "on"])
def test_the_switch_is_0_or_1_and_nothing_else(value: str) -> None:
    """Anything else stops the start and is named, with the variable."""
    with pytest.raises(ConfigError) as caught:
        parse_range_debug({"KVFORMAT_RANGE_DEBUG": value})
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert "KVFORMAT_RANGE_DEBUG" in caught.value.detail
    assert repr(value) in caught.value.detail


def test_the_switch_is_off_unless_it_is_on() -> None:
    """Absent and 0 are off, 1 is on."""
    assert parse_range_debug({}) is False
    assert parse_range_debug({"KVFORMAT_RANGE_DEBUG": "0"}) is False
    assert parse_range_debug({"KVFORMAT_RANGE_DEBUG": "1"}) is True
