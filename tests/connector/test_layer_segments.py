"""Layer segments: objects that are complete before the model is through."""

from __future__ import annotations

import time

import msgspec
import numpy as np
from faulty_store import FaultyStore
from simulated_engine import Request, SimulatedEngine, Tensor, make_layout

from kvformat.key import key_prefix
from kvformat.layout import Layout, ShardGrid
from kvformat.objectmap import object_maps
from kvformat_connector.engine import Ranks
from kvformat_connector.messages import BlockList, RequestStep, StepPlan
from kvformat_connector.stats import Counters
from kvformat_connector.worker import Worker

TOKENS = list(range(19))
NUM_FULL = 4


def two_segments() -> Layout:
    """Four layers in two segments."""
    layout = make_layout(num_layers=4)
    return msgspec.structs.replace(layout, grid=ShardGrid(layer_starts=((0, 2),)))


def load_first_segment(engine: SimulatedEngine, store: FaultyStore, request: Request) -> set[int]:
    """What another worker, that has the first segment's layers only, finds wrong with them."""
    names = ["layer0", "layer1"]
    reader = Worker(
        engine.layout,
        store,
        engine.options,
        Counters(),
        ranks=Ranks(num_stages=2, layer_names=frozenset(names)),
    )
    memory = {name: np.zeros_like(engine.memory[name]) for name in names}
    reader.register({name: Tensor(array) for name, array in memory.items()})
    ids = list(range(NUM_FULL))
    blocks = BlockList(
        object_index=0, block_hashes=request.block_hashes[:NUM_FULL], block_ids=(ids,)
    )
    reader.begin_step(StepPlan(requests=[RequestStep(request_id="reader", loads=[blocks])]))
    for name in names:
        reader.wait_layer(name)
    reader.end_step()
    failed = reader.take_failed_block_ids()
    for name in names:
        written = engine.memory[name][engine.tables["r"][:NUM_FULL]]
        if not failed:
            assert np.array_equal(memory[name][:NUM_FULL], written)
    return failed


def test_a_segment_can_be_loaded_while_the_next_one_is_computed() -> None:
    """When the writer has computed half of its layers a reader loads them, before the writer
    computes another one."""
    store = FaultyStore()
    engine = SimulatedEngine(store, two_segments())
    request = Request("r", TOKENS)
    seen: list[set[int]] = []

    def look(layer_index: int) -> None:
        if layer_index == 2:
            # The commit is another thread's; nothing else moves until this returns.
            deadline = time.monotonic() + 10
            while load_first_segment(engine, store, request):
                assert time.monotonic() < deadline
            seen.append(set())

    engine.before_layer = look
    engine.serve(request)
    assert seen == [set()]


def test_both_segments_are_needed_for_a_promise() -> None:
    """A block whose second segment is missing is not in the store, for a model of one stage."""
    store = FaultyStore()
    engine = SimulatedEngine(store, two_segments())
    request = Request("r", TOKENS)
    expected = engine.serve(request).kv
    warm = SimulatedEngine(store, two_segments()).serve(Request("w", TOKENS))
    assert (warm.kv, warm.num_hit_tokens) == (expected, 16)
    [_, second] = object_maps(engine.layout)
    prefix = key_prefix(engine.namespace, second.group_bitmap, second.shard)
    store.remove([prefix + request.block_hashes[1].hex()])
    cold = SimulatedEngine(store, two_segments()).serve(Request("x", TOKENS))
    assert (cold.kv, cold.num_hit_tokens) == (expected, 4)
