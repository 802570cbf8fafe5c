"""Weights that are updated online: nothing from before the update is used after it, or mixed."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, TOKENS, Request, SimulatedEngine, make_layout

from kvformat.errors import ConfigError, Reason
from kvformat.stores.memory import MemoryStore
from kvformat_connector.config import NO_LIMIT
from kvformat_connector.engine import is_unused
from kvformat_connector.identity import NextWeights, read_given
from kvformat_connector.loadpolicy import LoadPolicy
from kvformat_connector.scheduler import Scheduler

NUM_HITS = 6 * BLOCK_SIZE


def hits(engine: SimulatedEngine, name: str) -> int:
    return engine.serve(Request(name, TOKENS)).num_hit_tokens


def test_what_was_stored_before_is_not_loaded_after(store: FaultyStore) -> None:
    """An engine with new weights finds nothing of the old ones, then its own; and an engine that
    still has the old ones keeps finding those."""
    engine, other = SimulatedEngine(store), SimulatedEngine(store)
    assert (hits(engine, "r1"), hits(engine, "r2")) == (0, NUM_HITS)
    before = engine.scheduler.namespace
    engine.scheduler.change_weights("private:1")
    assert engine.scheduler.namespace != before
    assert (hits(engine, "r3"), hits(engine, "r4")) == (0, NUM_HITS)
    assert hits(other, "r5") == NUM_HITS
    assert engine.counters.snapshot()["weights.changed"] == 1


def test_servers_that_are_told_the_same_weights_share(store: FaultyStore) -> None:
    """One that was updated to them, one that started with them, and one that came back to them."""
    updated = SimulatedEngine(store)
    updated.scheduler.change_weights("given:v2")
    assert hits(updated, "r1") == 0
    started = SimulatedEngine(store, make_layout(weights="given:v2"))
    assert hits(started, "r2") == NUM_HITS
    started.scheduler.change_weights("given:v3")
    started.scheduler.change_weights("given:v2")
    assert hits(started, "r3") == NUM_HITS


def test_a_running_request_saves_nothing_after_the_change(store: FaultyStore) -> None:
    """Its blocks hold KV of the old weights: the next chunk would be stored under neither rightly.
    Computed anew, as after a preemption, it is stored like any other."""
    engine = SimulatedEngine(store)
    request = Request("r", TOKENS)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    blocks = engine.allocate(7)
    engine.step([(request, blocks, 0, 9)])
    engine.scheduler.change_weights("private:1")
    engine.step([(request, None, 9, 18)])
    assert engine.counters.snapshot()["save.blocks"] == 2
    assert engine.scheduler.match(request, 0) == 0
    engine.scheduler.allocated(request, 0)
    engine.step([(request, blocks, 0, 27)])
    assert engine.counters.snapshot()["save.blocks"] == 2 + 6


def test_a_promise_from_before_is_not_loaded(store: FaultyStore) -> None:
    """A request that was promised blocks and is scheduled after the change loads none."""
    engine = SimulatedEngine(store)
    hits(engine, "cold")
    request = Request("r", TOKENS)
    promised = engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, promised)
    engine.scheduler.change_weights("private:1")
    assert promised == NUM_HITS
    engine.step([(request, engine.allocate(7), promised, 27 - promised)])
    assert "load.blocks" not in engine.counters.snapshot()


def test_a_waiting_request_is_asked_about_anew(store: FaultyStore) -> None:
    """What was found for it before the change says nothing about the new namespace."""
    engine = SimulatedEngine(store)
    hits(engine, "cold")
    request = Request("r", TOKENS)
    assert engine.scheduler.match(request, 0) == NUM_HITS
    engine.scheduler.change_weights("private:1")
    assert engine.scheduler.match(request, 0) == 0


@pytest.mark.parametrize("num_local_tokens", [0, 2 * BLOCK_SIZE])
def test_a_request_that_was_loaded_before_saves_nothing_after(
    store: FaultyStore, num_local_tokens: int
) -> None:
    """It waited outside of the batch for whole objects, and is scheduled after the change: its
    blocks hold KV of the old weights, which is saved under neither."""
    hits(SimulatedEngine(store), "cold")
    engine = SimulatedEngine(store, use_layerwise=False)
    num_keys = len(list(store.list("")))
    request = Request("r", TOKENS)
    promised = engine.match(request, num_local_tokens)
    assert num_local_tokens + promised == NUM_HITS
    blocks = engine.allocate(7)
    engine.scheduler.allocated(request, promised, lambda: (blocks,))
    assert engine.receive("r") == set()
    engine.scheduler.change_weights("private:1")
    engine.scheduler.allocated(request, 0, lambda: (blocks,))
    engine.step([(request, blocks, num_local_tokens, 27 - num_local_tokens)])
    assert "save.blocks" not in engine.counters.snapshot()
    assert engine.counters.snapshot()["requests.not_stored"] == 1
    assert len(list(store.list(""))) == num_keys


def test_a_reset_that_left_blocks_in_memory_pools_nothing(store: FaultyStore) -> None:
    """Nobody can tell what the engine's own prefix cache serves: nothing is loaded or saved until
    the weights change with a cache that is clear."""
    engine = SimulatedEngine(store)
    assert hits(engine, "r1") == 0
    engine.scheduler.change_weights("given:v2", is_memory_clear=False)
    assert (hits(engine, "r2"), hits(engine, "r3")) == (0, 0)
    counts = engine.counters.snapshot()
    assert (counts["save.blocks"], counts["requests.not_stored"]) == (6, 2)
    assert counts["lookup.miss_tokens.reset_failed"] == 2 * NUM_HITS
    engine.scheduler.change_weights("given:v2")
    assert (hits(engine, "r4"), hits(engine, "r5")) == (0, NUM_HITS)


@pytest.mark.parametrize(("num_free", "expected"), [(9, True), (8, False), (0, False)])
def test_a_cache_is_reset_when_no_request_holds_blocks(num_free: int, expected: bool) -> None:
    """All but the null block are free."""
    pool = SimpleNamespace(num_gpu_blocks=10, get_num_free_blocks=lambda: num_free)
    assert is_unused(pool) is expected


class SlowStore(MemoryStore):
    """Whole objects arrive when the test says so."""

    def __init__(self) -> None:
        super().__init__("memory://")
        self.may_answer = threading.Event()

    def get_objects(self, *arguments: Any) -> list[int]:
        self.may_answer.wait(30)
        return super().get_objects(*arguments)


def test_a_load_that_the_change_overtakes_has_failed() -> None:
    """A request that waits for whole objects gets all of its blocks back as failed, so that the
    engine computes them with the new weights; it is released only when nobody writes to them."""
    store = SlowStore()
    engine = SimulatedEngine(store)
    hits(engine, "cold")
    scheduler = Scheduler(
        engine.layout, store, engine.options, engine.counters, load_policy=LoadPolicy(NO_LIMIT)
    )
    request = Request("r", TOKENS)
    promised = scheduler.match(request, 0)
    block_ids = engine.allocate(7)
    scheduler.allocated(request, promised, lambda: (block_ids,))
    worker = engine.worker
    for weights in ("", "private:1"):
        if weights:
            scheduler.change_weights(weights)
        worker.begin_step(scheduler.plan_step(output()))
        worker.end_step()
        assert worker.take_received() == (set(), set())
    store.may_answer.set()
    received: set[str] = set()
    for _ in range(3000):
        received, _ = worker.take_received()
        if received:
            break
        time.sleep(0.01)
    assert received == {"r"}
    assert worker.take_failed_block_ids() == set(block_ids[:6])
    assert engine.counters.snapshot()["rejected.weights_changed"] == 6
    # The same blocks of the new weights are as good as any.
    report = worker.take_report()
    assert report is not None
    assert report.failed_hashes == []


def output() -> SimpleNamespace:
    """A step in which nothing is scheduled."""
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return SimpleNamespace(
        scheduled_new_reqs=[], scheduled_cached_reqs=cached, num_scheduled_tokens={}
    )


def test_weights_that_nobody_names_are_shared_with_nobody(tmp_path: Path) -> None:
    """Without a file, and with one that wasn't written since, each reset gives an identity that
    was never there before."""
    path = tmp_path / "identity"
    path.write_text("v1")
    found = [NextWeights().take(), NextWeights().take()]
    named = NextWeights(str(path))
    found += [named.take(), named.take()]
    assert all(text.startswith("private:") for text in found)
    assert len(set(found)) == 4


def test_the_operator_names_the_next_weights(tmp_path: Path) -> None:
    """What was written before a reset holds after it, once; the same text written again too."""
    path = tmp_path / "identity"
    path.write_text("v1")
    named = NextWeights(str(path))
    write(path, "v2\n", 1)
    assert named.take() == "given:v2"
    assert named.take().startswith("private:")
    write(path, "v2\n", 2)
    assert named.take() == "given:v2"
    write(path, "", 3)
    assert named.take().startswith("private:")


def write(path: Path, text: str, number: int) -> None:
    path.write_text(text)
    os.utime(path, ns=(number * 10**9, number * 10**9))


@pytest.mark.parametrize("text", [None, "", " \n", "x" * 1025, "\udcff"])
def test_a_file_that_names_nothing_stops_the_start(tmp_path: Path, text: str | None) -> None:
    """Missing, empty, too long, or no text: the error names option and file."""
    path = tmp_path / "identity"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_given(str(path))
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert "'model_identity_file'" in caught.value.detail
    assert str(path) in caught.value.detail


def test_what_is_no_file_names_nothing(tmp_path: Path) -> None:
    """A pipe would hold the start and each reset up; a path may be none at all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (str(pipe), "a\0b", "\ud800"):
        with pytest.raises(ConfigError) as caught:
            read_given(path)
        assert caught.value.reason is Reason.CONFIG_VALUE
        assert NextWeights(path).take().startswith("private:")
