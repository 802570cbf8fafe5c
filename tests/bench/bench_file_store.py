"""The file store against plain system calls on the same bytes; prints one JSON object.

Run: ``python tests/bench/bench_file_store.py [folder]``. The page cache is warm throughout.

* get, plain: open, one ``pread`` per range into its place in memory, close.
  get, store: ``get_start``, ``get_ranges``, ``get_end``, a batch of objects a call.
* put, plain: open a file with another name, one ``pwrite`` per range, rename.
  put, store: ``put_start``, ``put_ranges``, ``put_commit``, a batch of objects a call.

Ranges follow one another in the object and lie apart in memory. Plain calls and store take turns;
each number is the median of the rounds, in GB/s. Puts are removed between rounds, untimed. The
target is a ratio, store to plain, of at least 0.7.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy
from measure import Row, report, row

from kvformat.stores import Store, open_store

TARGET_RATIO = 0.7
ROUND_NBYTES = 64 << 20
NUM_ROUNDS = 9
BATCH = 16
KIB = 1024
RANGE_NBYTES = (64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)


class Case:
    """Objects of one shape, the memory they come from and go to, and both ways to move them."""

    def __init__(self, folder: Path, range_nbytes: int, ranges_per_object: int) -> None:
        object_nbytes = range_nbytes * ranges_per_object
        num_objects = max(1, ROUND_NBYTES // object_nbytes)
        stride = range_nbytes + 4096  # apart in memory, so that nothing is joined there
        # Mapped and touched before the clock runs. All objects use the same memory: what is
        # compared is the way to the page cache.
        self.memory = mmap.mmap(-1, stride * ranges_per_object)
        view = numpy.frombuffer(self.memory, dtype=numpy.uint8)
        view[:] = 7
        self.pieces = [
            memoryview(self.memory)[index * stride : index * stride + range_nbytes]
            for index in range(ranges_per_object)
        ]
        self.addresses = [view.ctypes.data + index * stride for index in range(ranges_per_object)]
        self.sizes = [range_nbytes] * ranges_per_object
        self.offsets = [range_nbytes * index for index in range(ranges_per_object)]
        self.object_nbytes = object_nbytes
        self.num_objects = num_objects
        self.plain = folder / "plain"
        (self.plain / "new").mkdir(parents=True)
        self.store: Store = open_store(f"file://{folder}/store?max_nbytes=100G")
        self.keys = [f"bench/namespace/{index:064x}" for index in range(num_objects)]

    def plain_put(self) -> None:
        for index in range(self.num_objects):
            name = self.plain / "new" / str(index)
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            for piece, offset in zip(self.pieces, self.offsets, strict=True):
                os.pwrite(fd, piece, offset)
            os.close(fd)
            os.rename(name, self.plain / str(index))

    def plain_get(self) -> None:
        for index in range(self.num_objects):
            fd = os.open(self.plain / str(index), os.O_RDONLY)
            for piece, offset in zip(self.pieces, self.offsets, strict=True):
                os.preadv(fd, [piece], offset)
            os.close(fd)

    def plain_remove(self) -> None:
        for index in range(self.num_objects):
            os.unlink(self.plain / str(index))

    def store_put(self) -> None:
        for keys in self._batches():
            rows = len(keys)
            codes = self.store.put_start(keys, [self.object_nbytes] * rows)
            codes += self.store.put_ranges(
                keys, [self.addresses] * rows, [self.sizes] * rows, [self.offsets] * rows
            )
            codes += self.store.put_commit(keys)
            assert min(codes) >= 0, codes

    def store_get(self) -> None:
        for keys in self._batches():
            rows = len(keys)
            codes = self.store.get_start(keys)
            codes += self.store.get_ranges(
                keys, [self.addresses] * rows, [self.sizes] * rows, [self.offsets] * rows
            )
            codes += self.store.get_end(keys)
            assert min(codes) >= 0, codes

    def store_remove(self) -> None:
        assert max(map(abs, self.store.remove(self.keys))) == 0

    def _batches(self) -> list[list[str]]:
        return [self.keys[start : start + BATCH] for start in range(0, len(self.keys), BATCH)]

    def gb_per_s(self, call: Callable[[], None]) -> float:
        start = time.perf_counter()
        call()
        return self.num_objects * self.object_nbytes / (time.perf_counter() - start) / 1e9


def measure(range_nbytes: int, ranges_per_object: int, parent: str | None) -> list[Row]:
    """Both directions of one shape."""
    found: dict[str, list[float]] = {way: [] for way in ("p_put", "s_put", "p_get", "s_get")}
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        case = Case(Path(folder), range_nbytes, ranges_per_object)
        for _ in range(NUM_ROUNDS):
            found["p_put"].append(case.gb_per_s(case.plain_put))
            case.plain_get()
            found["p_get"].append(case.gb_per_s(case.plain_get))
            case.plain_remove()
            found["s_put"].append(case.gb_per_s(case.store_put))
            case.store_get()
            found["s_get"].append(case.gb_per_s(case.store_get))
            case.store_remove()
        case.store.close()
    median = {way: statistics.median(values) for way, values in found.items()}
    return [
        row(
            f"file store {way}, {ranges_per_object} x {range_nbytes // KIB} KiB an object",
            median[f"s_{way}"],
            "GB/s",
            floor=median[f"p_{way}"],
            at_least=TARGET_RATIO,
        )
        for way in ("put", "get")
    ]


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else None
    report(
        "file_store",
        [
            found
            for range_nbytes in RANGE_NBYTES
            for ranges_per_object in (1, 8)
            for found in measure(range_nbytes, ranges_per_object, parent)
        ],
    )


if __name__ == "__main__":
    main()
