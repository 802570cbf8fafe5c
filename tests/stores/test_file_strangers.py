"""What lies in a file store's folder that no store put there."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import Memory

from kvformat.errors import StoreUnavailableError
from kvformat.stores import Code, Store, file_usage, open_store

#: A user who owns no file here fills a store past its cap and prints what is left.
USE_AS_A_STRANGER = """
import os, sys
from kvformat.stores.file import FileStore
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
store = FileStore(sys.argv[1])
assert [store.put(f"k{n}", b"1234") for n in range(5)] == [0] * 5
print(*store.list())
"""


def make_socket(path: Path) -> None:
    # A socket's address is shorter than most paths of a test.
    with socket.socket(socket.AF_UNIX) as made:
        here = os.open(path.parent, os.O_PATH)
        made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


def finishes(call: Callable[[], None]) -> bool:
    """Whether a call comes back. One that doesn't is left behind in its thread."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout=20)
    return not thread.is_alive()


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        make_socket,
        Path.mkdir,
        lambda path: path.symlink_to("/etc/hostname"),
        lambda path: path.symlink_to("nowhere"),
    ],
    ids=["fifo", "socket", "directory", "link", "dangling link"],
)
def test_only_a_regular_file_is_an_object(
    folder: Path, store: Store, make: Callable[[Path], None]
) -> None:
    """Where something else has an object's name the key is a miss, no call waits for it or follows
    it, and it stays as it is.
    """
    path = folder / "key+kv"
    make(path)
    before = path.lstat()
    target = Memory(4)

    def use() -> None:
        assert store.exists(["key"]) == [0]
        assert store.object_nbytes("key") == Code.NOT_FOUND
        assert store.get_start(["key"]) == [Code.NOT_FOUND]
        assert store.get("key") is None
        assert store.get_objects(["key"], [[target.address]], [[4]]) == [Code.NOT_FOUND]
        assert store.remove(["key"]) == [Code.NOT_FOUND]
        assert store.put("key", b"data") == Code.EXISTS
        assert list(store.list()) == []
        done.append(True)

    done: list[bool] = []
    assert finishes(use)
    assert done
    assert os.path.samestat(path.lstat(), before)


def test_names_that_are_no_text(folder: Path, store: Store) -> None:
    """Names of files and directories that aren't UTF-8 are no keys, and hide none."""
    (folder / "kvformat1").mkdir()
    for name in (b"\xff+kv", b"kvformat1/\xfe\xff+kv"):
        (Path(os.fsdecode(os.fsencode(folder) + b"/" + name))).write_bytes(b"x")
    os.mkdir(os.fsencode(folder) + b"/\xff")
    assert store.put("kvformat1/a", b"data") == Code.OK
    assert list(store.list()) == ["kvformat1/a"]


def test_size_that_no_memory_holds(folder: Path, store: Store) -> None:
    """A sparse file of any size is an object that can't be read whole, and no reason to raise."""
    with (folder / "key+kv").open("wb") as file:
        file.truncate(1 << 40)
    target = Memory(4)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, hard))
    try:
        assert store.get("key") is None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert store.get_start(["key"]) == [Code.OK]
    assert store.get_ranges(["key"], [[target.address]], [[4]], [[1 << 39]]) == [4]


def test_more_bytes_than_the_count_holds(folder: Path, store: Store) -> None:
    """A count that is at its end, whatever brought it there, stays there; nothing raises."""
    (folder / ".store" / "usage").write_bytes(b"\xff" * 8)
    assert store.put("a", b"data") == Code.OK
    assert store.put_start(["b"], [100]) == [Code.OK]
    assert store.put_revoke(["b"]) == [Code.OK]
    assert store.remove(["a"]) == [Code.OK]


def test_lock_that_never_comes(folder: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody keeps the lock on the count, every key is answered, and nothing raises."""
    monkeypatch.setattr(file_usage, "_LOCK_LIMIT_S", 0.05)
    with (folder / ".store" / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        assert store.put_start(["a", "b"], [4, 0]) == [Code.UNAVAILABLE, Code.INVALID]
        assert store.put("a", b"data") == Code.UNAVAILABLE
        assert store.remove(["a"]) == [Code.UNAVAILABLE]
        with pytest.raises(StoreUnavailableError):
            open_store(f"file://{folder}")
    assert store.put("a", b"data") == Code.OK


def test_directories_of_the_file_system() -> None:
    """The root of a mounted disk has a directory that only root may open: a store of another user
    can still be there.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/lost+found", 0)
        os.chmod(folder, 0o777)
        found = subprocess.run(
            [sys.executable, "-c", USE_AS_A_STRANGER, f"file://{folder}?max_nbytes=10"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert found.returncode == 0, found.stderr
    assert "k4" in found.stdout.split()
