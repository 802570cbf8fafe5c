"""The connector's own work for one layer of 1024 blocks, as CPU time of all its threads: binding
ranges, judging results, bookkeeping. The store answers at once and moves nothing, the device copies
nothing, and checksums cost nothing; what is left is ours.

The nearest peer (vllm-ascend 0.30.0rc2's layerwise path on a null store) needs 2.5 ms for a layer
of this size on the machine on which the limit was set: 1/20 of that is the limit.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from measure import report, row
from ranks import BenchRank, block_hashes, step

from kvformat.header import encode_header, new_header
from kvformat.objectmap import object_maps
from kvformat_connector import objectcheck, saving, worker

NUM_BLOCKS = 1024
NUM_LAYERS = 61
NUM_ROUNDS = 7
#: A layer of one latent cache: few ranges a row, as the peer's number has.
SHAPE = {"num_heads": 1, "head_size": 8}


class NullStore:
    """Every call works and moves nothing, except that headers are there to be read."""

    uri = "null://"

    def __init__(self) -> None:
        self.headers: dict[str, bytes] = {}
        self._zeros = [0] * (1 << 16)

    def _zero(self, keys: Sequence[str], *rest: object) -> list[int]:
        return self._zeros[: len(keys)]

    put_start = put_commit = put_revoke = get_start = get_end = _zero

    def put(self, key: str, data: object) -> int:
        return 0

    def put_ranges(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[int]:
        return [sizes[0][0]] * len(keys)

    def get_ranges(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[int]:
        if not offsets[0][0]:
            for key, (address, *_) in zip(keys, addresses, strict=True):
                header = self.headers[key]
                ctypes.memmove(address, header, len(header))
        return [sizes[0][0]] * len(keys)

    def register_memory(self, address: int, nbytes: int) -> int:
        return 0

    unregister_memory = register_memory


class NullDevice:
    """Nothing to wait for, nothing to copy."""

    computes_on_host = False

    def mark(self) -> object:
        return None

    def wait(self, mark: object) -> None:
        pass

    def gather(self, *arguments: object) -> None:
        pass

    def scatter(self, *arguments: object) -> None:
        pass


def cpu_ms(call: Callable[[], object]) -> float:
    """CPU time of all threads of the process in milliseconds; the best of some rounds."""
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best * 1e3


def per_layer(which: str, **options: Any) -> float:
    """Milliseconds a layer: what a step of many layers takes more than a step of few."""
    found = []
    for num_layers in (1, NUM_LAYERS):
        store = NullStore()
        rank = BenchRank(
            store,  # type: ignore[arg-type]
            num_layers=num_layers,
            num_blocks=NUM_BLOCKS,
            **SHAPE,
            **options,
        )
        hashes = block_hashes(NUM_BLOCKS)
        (object_map,) = object_maps(rank.layout)
        checksums = np.zeros(num_layers, np.uint64)
        assert rank.worker._rank is not None
        prefix = rank.worker._rank.own.gets[0].prefix
        for block_hash in hashes:
            header = new_header(
                object_map, rank.namespace.fingerprint, block_hash, bytes(16), checksums
            )
            store.headers[prefix + block_hash.hex()] = encode_header(header)
        plan = step(hashes, loads=which == "load")
        found.append(cpu_ms(lambda r=rank, p=plan: getattr(r, which)(p)))
    return (found[1] - found[0]) / (NUM_LAYERS - 1)


if __name__ == "__main__":
    worker.device_for = lambda *arguments: NullDevice()  # type: ignore[assignment]
    # Checksums, and the loops that take them, are another bench's.
    objectcheck.Checker.check_layer = lambda *arguments: None  # type: ignore[method-assign]
    saving.SaveStep._take_checksums = lambda *arguments: None  # type: ignore[method-assign]
    limit = {"at_most": 2.5 / 20}
    unlimited = {"layerwise_max_transfer_blocks": 0, "layerwise_max_transfer_bytes": 0}
    report(
        "host_work",
        [
            row(f"load, host work a layer, {NUM_BLOCKS} blocks", per_layer("load"), "ms", **limit),
            row(f"save, host work a layer, {NUM_BLOCKS} blocks", per_layer("save"), "ms", **limit),
            row("load, without limits of a call", per_layer("load", **unlimited), "ms"),
            row("save, without limits of a call", per_layer("save", **unlimited), "ms"),
        ],
    )
