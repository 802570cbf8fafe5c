"""Loading under a simulated computation: each layer computes for c ms, each layer's transfer takes
g ms. What a step takes longer than its computation alone, against the least that is possible: the
first transfer, and what of the others computing can't hide, ``g + (L - 1) * max(0, g - c)``.

A sleep of 10 ms takes longer than that on a busy machine, so the least is worked out from the times
that the sleeps of the same step took: transfers one after the other, each layer computed when it
and the layers before it are there.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from measure import Row, report, row
from ranks import BenchRank, block_hashes, step

from kvformat.stores.memory import MemoryStore

NUM_LAYERS = 16
NUM_BLOCKS = 8
NUM_ROUNDS = 9


class SlowStore(MemoryStore):
    """A layer's range call takes ``seconds``, the copy that it makes included; headers come at
    once."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.seconds = 0.0
        self.took: list[float] = []

    def get_ranges(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[int]:
        began = time.perf_counter()
        codes = super().get_ranges(keys, addresses, sizes, offsets)
        if offsets[0][0] and self.seconds:
            time.sleep(max(0.0, began + self.seconds - time.perf_counter()))
            self.took.append(time.perf_counter() - began)
        return codes


def measure(compute_ms: float, transfer_ms: float) -> Row:
    """The best of some rounds."""
    store = SlowStore("memory://")
    rank = BenchRank(
        store,
        num_layers=NUM_LAYERS,
        num_blocks=NUM_BLOCKS,
        head_size=8,
        layerwise_prefetch_layers="auto",
    )
    hashes = block_hashes(NUM_BLOCKS)
    rank.save(step(hashes, loads=False))
    store.seconds = transfer_ms / 1e3
    loads = step(hashes, loads=True)
    found: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()  # as in measure.py: of a heap that holds all of torch it takes longer than a step
    for _ in range(NUM_ROUNDS):
        store.took = []
        computed = []
        start = time.perf_counter()
        rank.worker.begin_step(loads)
        for name in rank.layer_names:
            rank.worker.wait_layer(name)
            began = time.perf_counter()
            time.sleep(compute_ms / 1e3)
            computed.append(time.perf_counter() - began)
        rank.worker.end_step()
        exposed = time.perf_counter() - start - sum(computed)
        assert not rank.worker.take_failed_block_ids()
        found.append((exposed * 1e3, least(store.took, computed) * 1e3))
    gc.enable()
    rank.worker.close()
    exposed, bound = min(found, key=lambda pair: pair[0] / pair[1])
    name = f"exposed, c = {compute_ms:g} ms, g = {transfer_ms:g} ms, {NUM_LAYERS} layers"
    return row(name, exposed, "ms", floor=bound, at_most=1.1)


def least(transfers: list[float], computations: list[float]) -> float:
    """Seconds that can't be hidden."""
    arrived = free = 0.0
    for transfer, computation in zip(transfers, computations, strict=True):
        arrived += transfer
        free = max(free, arrived) + computation
    return free - sum(computations)


if __name__ == "__main__":
    cases = ((80, 40), (40, 40), (20, 40), (10, 80), (40, 20))
    report("overlap", [measure(*times) for times in cases])
