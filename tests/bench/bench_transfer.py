"""Layerwise puts and gets through the format, with checksums, against the same bytes in the same
range calls made by hand, on a real Mooncake over TCP. Both take turns; medians of the rounds.
Layers are stored as they come, as for an engine that computes on an accelerator."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measure import report, row
from ranks import BenchRank, block_hashes, step

from kvformat.stores import Store, open_store
from kvformat_connector.store.mooncake_services import mooncake_services

NUM_LAYERS = 12
NUM_BLOCKS = 16
NUM_ROUNDS = 7


class RawCalls:
    """A session per block, and per layer one call with one range a block: what a connector that
    knows no format would do."""

    def __init__(self, store: Store, rank: BenchRank) -> None:
        self.store = store
        self.nbytes = rank.layer_nbytes
        self.addresses = [
            [[rank.memory[name][block].data_ptr()] for block in range(NUM_BLOCKS)]
            for name in rank.layer_names
        ]
        self.sizes = [[self.nbytes]] * NUM_BLOCKS

    def _move(self, call: Callable[..., list[int]], keys: list[str]) -> None:
        for layer, addresses in enumerate(self.addresses):
            codes = call(keys, addresses, self.sizes, [[layer * self.nbytes]] * NUM_BLOCKS)
            assert min(codes) == self.nbytes, codes

    def put(self, keys: list[str]) -> None:
        assert not any(self.store.put_start(keys, [self.nbytes * NUM_LAYERS] * NUM_BLOCKS))
        self._move(self.store.put_ranges, keys)
        assert not any(self.store.put_commit(keys))

    def get(self, keys: list[str]) -> None:
        assert not any(self.store.get_start(keys))
        self._move(self.store.get_ranges, keys)
        self.store.get_end(keys)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        mooncake_services(segment_nbytes=3 << 30, log_folder=Path(folder)) as services,
    ):
        store = open_store(services.uri)
        rank = BenchRank(
            store,
            num_layers=NUM_LAYERS,
            num_blocks=NUM_BLOCKS,
            head_size=128,
            overlap_saves=True,
        )
        raw = RawCalls(store, rank)
        total = NUM_LAYERS * NUM_BLOCKS * rank.layer_nbytes
        found: dict[str, list[float]] = {}

        def timed(name: str, call: Callable[[], None]) -> None:
            start = time.perf_counter()
            call()
            found.setdefault(name, []).append(total / (time.perf_counter() - start) / 1e9)

        for turn in range(-1, NUM_ROUNDS):
            hashes = block_hashes(NUM_BLOCKS, f"turn {turn}")
            keys = [f"raw/{turn}/{index}" for index in range(NUM_BLOCKS)]
            if turn < 0:  # fills every buffer and connection once
                rank.save(step(hashes, loads=False))
                rank.load(step(hashes, loads=True))
                raw.put(keys)
                raw.get(keys)
                continue
            timed("raw put", lambda k=keys: raw.put(k))
            timed("put", lambda h=hashes: rank.save(step(h, loads=False)))
            timed("raw get", lambda k=keys: raw.get(k))
            timed("get", lambda h=hashes: rank.load(step(h, loads=True)))
        assert rank.counters.snapshot()["save.blocks"] == NUM_BLOCKS * (NUM_ROUNDS + 1)
        median = {name: statistics.median(rates) for name, rates in found.items()}
        rank.worker.close()
        size = rank.layer_nbytes >> 10
        report(
            "transfer",
            [
                row(
                    f"layerwise {way}, {NUM_BLOCKS} blocks x {NUM_LAYERS} layers of {size} KiB",
                    median[way],
                    "GB/s",
                    floor=median[f"raw {way}"],
                    at_least=0.95,
                )
                for way in ("put", "get")
            ],
        )


if __name__ == "__main__":
    main()
