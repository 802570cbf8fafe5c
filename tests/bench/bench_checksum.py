"""Checksum of a layer's ranges in pieces of 64 KiB, against xxh3_64 over the same bytes at once."""

from __future__ import annotations

import random

import xxhash
from measure import Row, best_us, report, row

from kvformat.checksum import PIECE_NBYTES, checksum, checksum_pieces

#: So many that together they don't fit the nearest caches: loaded bytes come from memory.
TOTAL_NBYTES = 32 << 20
LAYERS = {
    "one piece": PIECE_NBYTES,
    "MLA, 128 tokens": 128 * 576 * 2,
    "K and V of 8 heads, 128 tokens": 2 * 8 * 128 * 128 * 2,
    "1 MiB": 1 << 20,
}


def measure(name: str, nbytes: int) -> list[Row]:
    """One layer of many blocks."""
    num_blocks = TOTAL_NBYTES // nbytes
    buffers = [memoryview(random.Random(i).randbytes(nbytes)) for i in range(num_blocks)]
    pieces = [
        [b[start : start + PIECE_NBYTES] for start in range(0, nbytes, PIECE_NBYTES)]
        for b in buffers
    ]
    raw_value = xxhash.xxh3_64_intdigest(buffers[0])
    assert checksum_pieces(pieces[0]) == checksum(buffers[0]) == raw_value
    times = best_us(
        lambda: [checksum_pieces(ranges) for ranges in pieces],
        lambda: [checksum(b) for b in buffers],
        lambda: [xxhash.xxh3_64_intdigest(b) for b in buffers],
        number=1,
    )
    ranges, whole, raw = (num_blocks * nbytes / us / 1000 for us in times)
    return [
        row(f"checksum of a layer in ranges, {name}", ranges, "GB/s", floor=raw, at_least=0.8),
        row(f"checksum of a layer in one buffer, {name}", whole, "GB/s", floor=raw, at_least=0.8),
    ]


if __name__ == "__main__":
    report("checksum", [r for name, nbytes in LAYERS.items() for r in measure(name, nbytes)])
