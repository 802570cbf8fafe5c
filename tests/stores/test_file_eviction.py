"""The size cap of the file store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance import Memory, kill_a_writer

from kvformat.stores import Code, Store, open_store

CAP = 10_000
Opener = Callable[[], Store]


@pytest.fixture
def open_capped(folder: Path) -> Iterator[Opener]:
    """Opens stores on one folder with a cap of ``CAP`` bytes."""
    opened: list[Store] = []

    def opener() -> Store:
        opened.append(open_store(f"file://{folder}?max_nbytes={CAP}"))
        return opened[-1]

    yield opener
    for store in opened:
        store.close()


@pytest.fixture
def store(open_capped: Opener) -> Store:
    return open_capped()


def count_of(folder: Path) -> int:
    return int.from_bytes((folder / ".store" / "usage").read_bytes(), "little")


def nbytes_of(folder: Path) -> int:
    return sum(
        path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "usage"
    )


def used_in_order(folder: Path, keys: list[str]) -> None:
    """Set the times of last use, oldest first."""
    for index, key in enumerate(keys):
        os.utime(folder / f"{key}+kv", ns=(index * 10**9, 0))


def test_least_recently_used_goes_first(folder: Path, store: Store) -> None:
    """Above the cap the objects used least recently go, down to nine tenths, and no more."""
    keys = [f"k{index}" for index in range(10)]
    assert [store.put(key, bytes(1000)) for key in keys] == [Code.OK] * 10
    order = [keys[index] for index in (3, 1, 4, 5, 9, 2, 6, 8, 7, 0)]
    used_in_order(folder, order)
    assert store.put("new", bytes(1000)) == Code.OK
    assert [key for key in order if store.exists([key]) == [0]] == order[:1]
    assert store.put("newer", bytes(2500)) == Code.OK
    assert [key for key in order if store.exists([key]) == [0]] == order[:4]
    assert count_of(folder) == nbytes_of(folder) <= CAP


def test_reading_is_using(folder: Path, store: Store) -> None:
    """Every way to read an object keeps it from going next."""
    keys = ["session", "whole", "pieces", "idle"]
    assert [store.put(key, bytes(2000)) for key in keys] == [Code.OK] * 4
    used_in_order(folder, keys)
    target = Memory(2000)
    assert store.get_start(["session"]) == [0]
    assert store.get_end(["session"]) == [0]
    assert store.get("whole") is not None
    assert store.get_objects(["pieces"], [[target.address]], [[2000]]) == [2000]
    assert store.put("new", bytes(3000)) == Code.OK
    assert store.exists(keys) == [1, 1, 1, 0]


def test_looking_is_not_using(folder: Path, store: Store) -> None:
    """Asking whether an object is there doesn't keep it."""
    assert [store.put(key, bytes(4000)) for key in ("a", "b")] == [Code.OK] * 2
    used_in_order(folder, ["a", "b"])
    assert store.exists(["a"]) == [1]
    assert store.object_nbytes("a") == 4000
    assert list(store.list("a")) == ["a"]
    assert store.put("c", bytes(4000)) == Code.OK
    assert store.exists(["a", "b", "c"]) == [0, 1, 1]


def test_objects_being_read_stay(folder: Path, open_capped: Opener) -> None:
    """What any store of the folder reads is passed over, and goes when the reader has ended."""
    writer, reader = open_capped(), open_capped()
    assert [writer.put(key, key.encode() * 4000) for key in ("a", "b")] == [Code.OK] * 2
    used_in_order(folder, ["a", "b"])
    assert reader.get_start(["a"]) == [0]
    assert writer.put("c", bytes(4000)) == Code.OK
    assert writer.exists(["a", "b", "c"]) == [1, 0, 1]
    target = Memory(4000)
    assert reader.get_ranges(["a"], [[target.address]], [[4000]], [[0]]) == [4000]
    assert target.bytes() == b"a" * 4000
    assert reader.get_start(["c"]) == [0]
    assert writer.put_start(["d", "small"], [4000, 1000]) == [Code.NO_SPACE, 0]
    assert reader.get_end(["a", "c"]) == [0, 0]
    assert writer.put_start(["d"], [4000]) == [0]
    assert nbytes_of(folder) <= CAP


READER = """
import sys
from kvformat.stores import open_store
store = open_store(sys.argv[1])
assert store.get_start([sys.argv[2]]) == [0]
print("reading", flush=True)
sys.stdin.read()
"""


def test_objects_read_by_another_process_stay(folder: Path, store: Store) -> None:
    """A reader in another process keeps its object; a killed one keeps nothing."""
    assert store.put("a", bytes(6000)) == Code.OK
    command = [sys.executable, "-c", READER, f"file://{folder}", "a"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        try:
            assert reader.stdout.readline() == "reading\n"
            assert store.remove(["a"]) == [Code.NOT_READY]
            assert store.put("b", bytes(6000)) == Code.NO_SPACE
        finally:
            reader.kill()
    assert store.put("b", bytes(6000)) == Code.OK
    assert store.exists(["a", "b"]) == [0, 1]


def test_larger_than_the_cap(folder: Path, store: Store) -> None:
    """An object that can never fit is refused and costs no other object its place."""
    assert store.put("a", bytes(5000)) == Code.OK
    assert store.put("b", bytes(CAP + 1)) == Code.NO_SPACE
    assert store.put_start(["b", "c"], [CAP + 1, 5000]) == [Code.NO_SPACE, 0]
    assert store.exists(["a"]) == [1]
    assert store.put_revoke(["c"]) == [0]
    assert store.put("whole", bytes(CAP)) == Code.OK
    assert store.exists(["a", "whole"]) == [0, 1]
    assert count_of(folder) == CAP


def test_open_sessions_take_their_bytes(folder: Path, open_capped: Opener) -> None:
    """What is being written counts from the start of its session, for all stores of the folder."""
    one, two = open_capped(), open_capped()
    assert one.put_start(["a"], [6000]) == [0]
    assert two.put_start(["b"], [6000]) == [Code.NO_SPACE]
    assert count_of(folder) == 6000
    assert one.put_revoke(["a"]) == [0]
    assert two.put_start(["b"], [6000]) == [0]
    assert one.put_start(["c"], [4001]) == [Code.NO_SPACE]
    assert one.put_start(["c"], [4000]) == [0]


def test_killed_writer_gives_its_bytes_back(folder: Path, store: Store) -> None:
    """An eviction takes back what a killed writer left, before it takes any object."""
    assert store.put("a", bytes(1000)) == Code.OK
    kill_a_writer(f"file://{folder}?max_nbytes={CAP}", "dead", 8000, 4000)
    assert count_of(folder) == 9000
    assert store.put("b", bytes(5000)) == Code.OK
    assert store.exists(["a", "b"]) == [1, 1]
    assert list((folder / ".store" / "writing").iterdir()) == []
    assert count_of(folder) == nbytes_of(folder) == 6000


def test_every_removal_gives_its_bytes_back(folder: Path, open_capped: Opener) -> None:
    """The count equals the bytes after each way an object or a session can end."""
    one, two = open_capped(), open_capped()
    source = Memory(1000)
    assert one.put("removed", bytes(500)) == Code.OK
    assert one.put("kept", bytes(300)) == Code.OK
    assert two.remove(["removed", "none"]) == [0, Code.NOT_FOUND]
    assert one.put_start(["revoked", "unfinished", "late", "closed"], [1000] * 4) == [0] * 4
    assert count_of(folder) == nbytes_of(folder) == 4300
    assert one.put_revoke(["revoked"]) == [0]
    assert one.put_commit(["unfinished"]) == [Code.INVALID]
    assert one.put_ranges(["late"], [[source.address]], [[1000]], [[0]]) == [1000]
    assert two.put("late", bytes(7)) == Code.OK
    assert one.put_commit(["late"]) == [Code.EXISTS]
    one.close()
    assert count_of(folder) == nbytes_of(folder) == 307


@pytest.mark.parametrize("wrong", [0, 3, 10**9])
def test_wrong_count_is_set_right(folder: Path, open_capped: Opener, wrong: int) -> None:
    """A count that a killed process left too high costs one look at the folder, no object; a folder
    without a count is counted when it's opened.
    """
    store = open_capped()
    assert store.put("a", bytes(4000)) == Code.OK
    if wrong:
        (folder / ".store" / "usage").write_bytes((4000 + wrong).to_bytes(8, "little"))
    else:
        (folder / ".store" / "usage").unlink()
        store = open_capped()
        assert count_of(folder) == 4000
    assert store.put("b", bytes(6000)) == Code.OK
    assert store.exists(["a", "b"]) == [1, 1]
    assert nbytes_of(folder) == CAP


def test_without_a_cap_nothing_goes(folder: Path) -> None:
    """Without max_nbytes nothing is evicted; a cap set later counts what is there."""
    store = open_store(f"file://{folder}")
    keys = [f"k{index}" for index in range(20)]
    assert [store.put(key, bytes(1000)) for key in keys] == [Code.OK] * 20
    assert store.exists(keys) == [1] * 20
    store.close()
    capped = open_store(f"file://{folder}?max_nbytes={CAP}")
    assert capped.put("new", bytes(1000)) == Code.OK
    assert count_of(folder) == nbytes_of(folder) <= CAP
    capped.close()
