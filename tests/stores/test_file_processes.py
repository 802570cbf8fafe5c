"""Several processes on one file store, some of them killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conformance import Memory, kill_a_writer

from kvformat.stores import Code, open_store

# Puts, gets and removes objects whose every byte follows from the key; ends with a line on faults,
# and not before it has read some, however slow the machine.
WORKER = """
import hashlib, random, sys, time
import numpy
from kvformat.stores import Code, open_store

uri, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
choose = random.Random(seed)
store = open_store(uri)
print("open", flush=True)
deadline = time.monotonic() + seconds
hits = 0
while time.monotonic() < deadline or hits <= 10:
    index = choose.randrange(40)
    key = f"mixed/{index % 4}/{index}"
    nbytes = 1000 + 37 * index
    content = hashlib.shake_128(key.encode()).digest(nbytes)
    source = numpy.frombuffer(content, dtype=numpy.uint8)
    act = choose.random()
    if act < 0.45:
        code = store.put_start([key], [nbytes])[0]
        assert code in (Code.OK, Code.EXISTS, Code.NO_SPACE), code
        if code == Code.OK:
            cut = choose.randrange(1, nbytes)
            for start, end in ((cut, nbytes), (0, cut)):
                rows = [[source.ctypes.data + start]], [[end - start]], [[start]]
                assert store.put_ranges([key], *rows) == [end - start]
            code = store.put_commit([key])[0]
            assert code in (Code.OK, Code.EXISTS), code
    elif act < 0.55:
        code = store.remove([key])[0]
        assert code in (Code.OK, Code.NOT_FOUND, Code.NOT_READY), code
    elif act < 0.58:
        for found in store.list("mixed/1/"):
            assert found.startswith("mixed/1/")
    else:
        code = store.get_start([key])[0]
        assert code in (Code.OK, Code.NOT_FOUND), code
        if code == Code.OK:
            target = numpy.zeros(nbytes, dtype=numpy.uint8)
            half = nbytes // 2
            for start, end in ((0, half), (half, nbytes)):
                rows = [[target.ctypes.data + start]], [[end - start]], [[start]]
                assert store.get_ranges([key], *rows) == [end - start]
            assert store.get_end([key]) == [0]
            assert target.tobytes() == content
            hits += 1
store.close()
"""


def start_worker(uri: str, seed: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, uri, str(seed), str(seconds)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "open\n", worker.communicate()[1]
    return worker


def nbytes_of(folder: Path) -> int:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "usage")
    return sum(path.stat().st_size for path in paths)


def test_writers_readers_and_an_eviction(tmp_path: Path) -> None:
    """Processes that put, get, remove and evict the same keys never see a wrong byte."""
    uri = f"file://{tmp_path}/store?max_nbytes=40000"
    workers = [start_worker(uri, seed, 2.0) for seed in range(3)]
    for worker in workers:
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors
    folder = tmp_path / "store"
    assert nbytes_of(folder) <= 40_000
    count = int.from_bytes((folder / ".store" / "usage").read_bytes(), "little")
    assert count == nbytes_of(folder)


def test_killed_at_any_point(tmp_path: Path) -> None:
    """Workers killed wherever they are leave whole objects, no lock, and nothing that stays."""
    uri = f"file://{tmp_path}/store?max_nbytes=40000"
    choose = random.Random(11)
    survivor = start_worker(uri, 1000, 4.0)
    for seed in range(10):
        worker = start_worker(uri, seed, 60)
        time.sleep(choose.uniform(0, 0.15))
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    _, errors = survivor.communicate(timeout=60)
    assert survivor.returncode == 0, errors
    last = start_worker(uri, 2000, 0.3)
    _, errors = last.communicate(timeout=60)
    assert last.returncode == 0, errors
    folder = tmp_path / "store"
    open_store(uri).close()
    assert list((folder / ".store" / "writing").iterdir()) == []
    assert nbytes_of(folder) <= 40_000


def test_orphans_go_and_living_writers_stay(tmp_path: Path) -> None:
    """Opening a store removes what killed writers left, and nothing of a living one."""
    uri = f"file://{tmp_path}/store"
    writing = tmp_path / "store" / ".store" / "writing"
    living = open_store(uri)
    source = Memory(b"alive")
    assert living.put_start(["alive"], [5]) == [0]
    [mine] = writing.iterdir()
    for written in (0, 1, 5):
        kill_a_writer(uri, "dead", 5, written)
    assert len(list(writing.iterdir())) >= 2
    other = open_store(uri)
    assert list(writing.iterdir()) == [mine]
    assert living.put_ranges(["alive"], [[source.address]], [[5]], [[0]]) == [5]
    assert living.put_commit(["alive"]) == [0]
    assert other.get("alive") == b"alive"
    living.close()
    other.close()


def test_killed_inside_the_commit(tmp_path: Path) -> None:
    """A writer killed between naming the object and dropping the other name leaves a whole object;
    the other name goes, and the bytes count once.
    """
    folder = tmp_path / "store"
    uri = f"file://{folder}"
    store = open_store(uri)
    assert store.put("key", b"whole") == Code.OK
    os.link(folder / "key+kv", folder / ".store" / "writing" / ("0" * 32))
    (folder / ".store" / "usage").unlink()
    other = open_store(uri)
    assert list((folder / ".store" / "writing").iterdir()) == []
    assert (folder / ".store" / "usage").read_bytes() == (5).to_bytes(8, "little")
    assert other.get("key") == b"whole"
    # The same, with the object removed before its other name is found.
    os.link(folder / "key+kv", folder / ".store" / "writing" / ("1" * 32))
    assert store.remove(["key"]) == [0]
    assert (folder / ".store" / "usage").read_bytes() == (5).to_bytes(8, "little")
    open_store(uri).close()
    assert (folder / ".store" / "usage").read_bytes() == bytes(8)
    store.close()
    other.close()


def test_directory_pruned_under_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose directory another process prunes again and again gets there all the same."""
    store = open_store(f"file://{tmp_path}")
    rounds = iter(range(5))
    link = os.link

    def pruned_link(*arguments: Any, **options: Any) -> None:
        if next(rounds, None) is not None:
            for path in (tmp_path / "a" / "b", tmp_path / "a"):
                if path.exists():
                    path.rmdir()
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", pruned_link)
    assert store.put("a/b/key", b"data") == Code.OK
    assert next(rounds, None) is None
    assert list(store.list("a/")) == ["a/b/key"]
    store.close()
