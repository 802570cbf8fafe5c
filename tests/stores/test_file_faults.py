"""What the file store answers when the system doesn't do as it's told."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import stat
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conformance import HOSTILE_KEYS, Memory, random_bytes

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores import Code, Store, open_store


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_hostile_keys_stay_in_the_folder(tmp_path: Path, folder: Path, store: Store) -> None:
    """No key puts anything outside the folder or into the store's own files, and when the objects
    go, so do their directories.
    """
    (tmp_path / "beside").write_bytes(b"beside")
    keys = [key for key in HOSTILE_KEYS.values() if len(key) < 4000]
    keys += [".store/usage", ".store/writing/x", "..", ".", "~", "a+kv", "a", "a/b"]
    for key in keys:
        assert store.put(key, b"data") == Code.OK
    assert sorted(store.list()) == sorted(keys)
    assert {path.name for path in tmp_path.iterdir()} == {"beside", "store"}
    assert (tmp_path / "beside").read_bytes() == b"beside"
    assert {path.name for path in (folder / ".store").iterdir()} == {"usage", "writing"}
    assert store.remove(keys) == [Code.OK] * len(keys)
    assert files_of(folder) == {".store/usage"}
    assert [path.name for path in folder.iterdir()] == [".store"]


def test_foreign_files_are_left_alone(folder: Path, store: Store) -> None:
    """Files that the store didn't write are neither listed nor removed."""
    (folder / "notes.txt").write_text("mine")
    (folder / "kvformat1").mkdir()
    (folder / "kvformat1" / "a b+kv").write_text("mine")
    (folder / "link+kv").symlink_to("notes.txt")
    assert store.put("kvformat1/a", b"data") == Code.OK
    assert list(store.list()) == ["kvformat1/a"]
    assert store.get("link") is None
    assert store.remove(["kvformat1/a"]) == [Code.OK]
    assert (folder / "kvformat1" / "a b+kv").exists()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, Code.NO_SPACE),
        (errno.EDQUOT, Code.NO_SPACE),
        (errno.EIO, Code.TRANSFER_FAILED),
        (errno.ENOLCK, Code.INTERNAL),
    ],
)
def test_failing_write(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: Code
) -> None:
    """A write that fails is answered with its code, and what it belonged to is never committed."""

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    source = Memory(b"data")
    assert store.put_start(["key"], [4]) == [0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert store.put_ranges(["key"], [[source.address]], [[4]], [[0]]) == [code]
        assert store.put("other", b"data") == code
    assert store.put_commit(["key"]) == [Code.INVALID]
    assert store.exists(["key", "other"]) == [0, 0]
    assert files_of(folder) == {".store/usage"}


def test_full_disk_for_real(store: Store, folder: Path) -> None:
    """Where the system refuses the file's size, the start answers NO_SPACE and leaves nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert store.put_start(["big", "small"], [100_001, 4]) == [Code.NO_SPACE, 0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.put_revoke(["small"]) == [0]
    assert files_of(folder) == {".store/usage"}
    assert (folder / ".store" / "usage").read_bytes() == bytes(8)


@pytest.mark.parametrize("most", [1, 3, 4096, 5000])
def test_short_reads_and_writes(store: Store, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Calls that move less than they were asked for are carried on, piece by piece."""
    nbytes = min(12_000, 300 * most)
    pieces = 3

    def short(call: Any) -> Any:
        def move(fd: int, buffers: list[Any], offset: int) -> int:
            room, views = most, []
            for buffer in buffers:
                view = memoryview(buffer).cast("B")[:room]
                room -= len(view)
                if len(view):
                    views.append(view)
            return int(call(fd, views, offset))

        return move

    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    source, target = Memory(random_bytes(nbytes)), Memory(nbytes)
    size = nbytes // pieces
    starts = [index * size for index in range(pieces)]
    # The pieces lie in memory from back to front, so that each is one of its own.
    back = starts[::-1]
    rows = ([[source.address + start for start in back]], [[size] * pieces], [starts])
    assert store.put_start(["key"], [nbytes]) == [0]
    assert store.put_ranges(["key"], *rows) == [nbytes]
    assert store.put_commit(["key"]) == [0]
    assert store.get_start(["key"]) == [0]
    into = [[target.address + start for start in back]]
    assert store.get_ranges(["key"], into, *rows[1:]) == [nbytes]
    assert target.bytes() == source.bytes()
    expected = b"".join(source.bytes()[start : start + size] for start in back)
    assert store.get("key") == expected


def test_truncated_under_a_reader(store: Store, folder: Path) -> None:
    """An object that someone cut short is a failed transfer, not other bytes."""
    assert store.put("key", b"0123456789") == Code.OK
    assert store.get_start(["key"]) == [0]
    os.truncate(folder / "key+kv", 5)
    target = Memory(10)
    ranges = (["key"], [[target.address]], [[10]], [[0]])
    assert store.get_ranges(*ranges) == [Code.TRANSFER_FAILED]
    assert store.get_objects(["key"], [[target.address]], [[10]]) == [Code.INVALID]


def test_memory_that_is_not_there(store: Store) -> None:
    """An address outside the process's memory is a failed transfer; the process lives on."""
    source = Memory(b"data")
    assert store.put_start(["key"], [4]) == [0]
    assert store.put_ranges(["key"], [[4096]], [[4]], [[0]]) == [Code.TRANSFER_FAILED]
    assert store.put_commit(["key"]) == [Code.INVALID]
    assert store.put("key", source.bytes()) == Code.OK
    assert store.get_start(["key"]) == [0]
    assert store.get_ranges(["key"], [[4096]], [[4]], [[0]]) == [Code.TRANSFER_FAILED]


def test_too_many_open_files(store: Store, folder: Path) -> None:
    """Sessions beyond the limit of open files are refused one by one; the others go on."""
    keys = [f"key/{index}" for index in range(50)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        codes = store.put_start(keys, [4] * 50)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert set(codes) == {Code.OK, Code.UNAVAILABLE}
    assert codes[0] == Code.OK
    opened = [key for key, code in zip(keys, codes, strict=True) if code == Code.OK]
    assert store.put_revoke(opened) == [Code.OK] * len(opened)
    assert files_of(folder) == {".store/usage"}
    assert (folder / ".store" / "usage").read_bytes() == bytes(8)


def test_nothing_stays_open(folder: Path) -> None:
    """Closing gives back every descriptor, with sessions open or not."""
    before = set(os.listdir("/proc/self/fd"))
    store = open_store(f"file://{folder}")
    assert store.put("there", b"data") == Code.OK
    assert store.put_start(["key"], [4]) == [0]
    assert store.get_start(["there"]) == [0]
    store.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_closing_under_a_start_leaves_nothing_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A get session whose start meets the store's close isn't opened, and holds no descriptor."""
    assert store.put("key", b"data") == Code.OK
    before = set(os.listdir("/proc/self/fd"))
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        store.close()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert store.get_start(["key"]) == [Code.UNAVAILABLE]
    assert set(os.listdir("/proc/self/fd")) < before


def test_sessions_that_end_close_their_files(store: Store) -> None:
    """A thousand sessions, one after another, leave no descriptor behind."""
    before = len(os.listdir("/proc/self/fd"))
    source = Memory(b"data")
    ranges = ([[source.address]], [[4]], [[0]])
    for index in range(1000):
        key = [f"key/{index}"]
        assert store.put_start(key, [4]) == [0]
        assert store.put_ranges(key, *ranges) == [4]
        if index % 3 == 0:
            assert store.put_revoke(key) == [0]
            continue
        assert store.put_commit(key) == [0]
        assert store.get_start(key) == [0]
        assert store.get_ranges(key, *ranges) == [4]
        assert store.get_end(key) == [0]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("file://relative/path", Reason.CONFIG_VALUE),
        ("file://", Reason.CONFIG_VALUE),
        ("file:///", Reason.CONFIG_VALUE),
        ("file:////", Reason.CONFIG_VALUE),
        ("file:///.././", Reason.CONFIG_VALUE),
        ("file:///\ud800", Reason.CONFIG_VALUE),
        pytest.param("file://" + "/a" * 5000, Reason.CONFIG_VALUE, id="too long"),
        ("file://{folder}%00b", Reason.CONFIG_VALUE),
        ("file://{folder}?max_nbytes=0", Reason.CONFIG_VALUE),
        ("file://{folder}?max_nbytes=lots", Reason.CONFIG_VALUE),
        ("file://{folder}?max_bytes=1G", Reason.CONFIG_UNKNOWN),
    ],
)
def test_bad_options(folder: Path, uri: str, reason: Reason) -> None:
    """A URI that this store can't follow is refused before anything is made."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri.format(folder=folder))
    assert caught.value.reason is reason
    assert not folder.exists()


def test_folder_that_can_not_be_one(tmp_path: Path) -> None:
    """A folder that is a file, or lies below one, is an unavailable store."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreUnavailableError) as caught:
            open_store(f"file://{path}")
        assert caught.value.reason is Reason.STORE_UNAVAILABLE


def test_commit_under_a_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit while another thread still writes to the object is refused: the write could change
    what readers see.
    """
    entered, leave = threading.Event(), threading.Event()
    source = Memory(b"data")
    rows = (["key"], [[source.address]], [[4]], [[0]])
    assert store.put_start(["key"], [4]) == [0]
    assert store.put_ranges(*rows) == [4]
    write = os.pwritev

    def slow(*arguments: Any) -> int:
        entered.set()
        assert leave.wait(10)
        return write(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    writer = threading.Thread(target=store.put_ranges, args=rows)
    writer.start()
    assert entered.wait(10)
    assert store.put_commit(["key"]) == [Code.INVALID]
    leave.set()
    writer.join()
    assert store.exists(["key"]) == [0]


@pytest.mark.parametrize("again", [False, True])
def test_removed_while_it_is_opened(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """An object that goes between a reader's open and its lock is a miss, not a lost file's bytes,
    whether or not another one is put in its place.
    """
    assert store.put("key", b"first") == Code.OK
    lock = fcntl.flock

    def late(fd: int, how: int) -> None:
        if how & fcntl.LOCK_SH:
            monkeypatch.setattr(fcntl, "flock", lock)
            assert store.remove(["key"]) == [0]
            if again:
                assert store.put("key", b"other") == Code.OK
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert store.get_start(["key"]) == [Code.NOT_FOUND]
    assert store.get("key") == (b"other" if again else None)


@pytest.mark.parametrize(("module", "name"), [(os, "link"), (fcntl, "flock")])
def test_file_system_that_can_not_hold_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """A file system without hard links or locks is refused at the start, not at each commit."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(module, name, refuse)
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(f"file://{tmp_path}")
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    monkeypatch.undo()
    store = open_store(f"file://{tmp_path}")
    assert files_of(tmp_path) == {".store/usage"}
    store.close()


@pytest.mark.parametrize("whole", [True, False], ids=["the folder", "the store's own files"])
@pytest.mark.parametrize("again", [True, False], ids=["made again", "left away"])
def test_folder_that_is_removed_under_a_store(
    folder: Path, store: Store, whole: bool, again: bool
) -> None:
    """Who clears the cache with ``rm -r`` gets an empty one, which fills again; what was being
    written then is lost, and is no error of any other object.
    """
    assert store.put("old", b"data") == Code.OK
    source = Memory(b"data")
    assert store.put_start(["begun"], [4]) == [Code.OK]
    shutil.rmtree(folder if whole else folder / ".store")
    if again:
        folder.mkdir(exist_ok=True)
    assert store.exists(["old"]) == [0 if whole else 1]
    assert store.put("new", b"data") == Code.OK
    assert store.put_ranges(["begun"], [[source.address]], [[4]], [[0]]) == [4]
    assert store.put_commit(["begun"])[0] < 0
    assert store.put_start(["begun"], [4]) == [Code.OK]
    assert store.put_ranges(["begun"], [[source.address]], [[4]], [[0]]) == [4]
    assert store.put_commit(["begun"]) == [Code.OK]
    other = open_store(f"file://{folder}")
    assert {"new", "begun"} <= set(other.list())
    assert other.get("begun") == store.get("begun") == b"data"
    other.close()


def test_object_is_a_plain_file(store: Store, folder: Path) -> None:
    """What lies in the folder is the object's bytes and nothing more, under a readable path."""
    assert store.put("kvformat1/acme/some%20model/00ff", b"bytes") == Code.OK
    path = folder / "kvformat1" / "acme" / "some%2520model" / "00ff+kv"
    assert path.read_bytes() == b"bytes"
    assert stat.S_ISREG(path.stat().st_mode)
