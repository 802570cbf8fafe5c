"""Recurrent state: saved when a step has been computed, though no hook names its layers."""

from __future__ import annotations

import time

import numpy as np
from faulty_store import FaultyStore
from simulated_engine import Tensor

from kvformat.components import recurrent_state
from kvformat.layout import Group, HashRecipe, Identity, Layer, Layout, ShardGrid, component
from kvformat_connector.config import parse_options
from kvformat_connector.messages import BlockList, RequestStep, StepPlan
from kvformat_connector.stats import Counters
from kvformat_connector.worker import Worker

HASH = b"h" * 32
STATE_NBYTES = 96


def make_layout() -> Layout:
    attention = Layer(name="attn", components=(component("kv", "float32", head=2, kv=2, packed=8),))
    state = Layer(name="gdn", components=recurrent_state(STATE_NBYTES))
    return Layout(
        identity=Identity(tenant="t", model="m", weights="w", config={}),
        hash=HashRecipe(algorithm="sha256", seed="", block_size=4, digest_nbytes=32),
        groups=(
            Group(kind="full_attention", block_size=4, layers=(attention,)),
            Group(kind="recurrent_state", block_size=4, layers=(state,)),
        ),
        objects=((0,), (1,)),
        grid=ShardGrid(layer_starts=((0,), (0,))),
    )


def make_worker(store: FaultyStore, value: int) -> tuple[Worker, np.ndarray, np.ndarray]:
    """A worker, its attention memory and its state memory (rows of which are padded)."""
    layout = make_layout()
    options = parse_options({"store": "memory://"})
    worker = Worker(layout, store, options, Counters())
    attention = np.full((4, 2, 4, 4), value, np.float32)
    state = np.full((4, 1, 1, STATE_NBYTES), value, np.int8)
    worker.register({"attn": Tensor(attention), "gdn": Tensor(state)})
    return worker, attention, state


def both(block_id: int) -> list[BlockList]:
    return [
        BlockList(object_index=index, block_hashes=[HASH], block_ids=([block_id],))
        for index in range(2)
    ]


def test_a_state_is_saved_as_it_is_after_the_step_and_loaded_again() -> None:
    """The only hook that comes is the attention layer's. What was written into the state after it
    is what another engine loads."""
    store = FaultyStore()
    writer, attention, state = make_worker(store, 0)
    writer.begin_step(StepPlan(requests=[RequestStep(request_id="r", saves=both(1))]))
    attention[1] = 7
    writer.save_layer("attn")
    state[1] = np.arange(STATE_NBYTES)
    writer.end_step()
    assert writer.settle(10)
    reader, their_attention, their_state = make_worker(store, 3)
    step = RequestStep(request_id="s", loads=both(2), load_mode="bulk")
    reader.begin_step(StepPlan(requests=[step]))
    reader.end_step()
    deadline = time.monotonic() + 10
    while (found := reader.take_received()) == (set(), set()):
        assert time.monotonic() < deadline
    assert found == ({"s"}, set())
    assert np.array_equal(their_attention[2], attention[1])
    assert np.array_equal(their_state[2], state[1])
    assert (their_state[[0, 1, 3]] == 3).all()


def test_a_state_that_failed_to_load_fails_its_request() -> None:
    """There is nothing to compute it from: the whole request is computed, no block is named."""
    reader, _, _ = make_worker(FaultyStore(), 3)
    step = RequestStep(request_id="s", loads=both(2), load_mode="bulk")
    reader.begin_step(StepPlan(requests=[step]))
    reader.end_step()
    deadline = time.monotonic() + 10
    while (found := reader.take_received()) == (set(), set()):
        assert time.monotonic() < deadline
    assert found == ({"s"}, {"s"})
    assert reader.take_failed_block_ids() == set()
    report = reader.take_report()
    assert report is not None
    assert set(report.failed_hashes) == {HASH}
    assert report.failed_block_ids == []
