"""A file store that is only read, and what counts as a use of an object."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import Memory

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores import Code, Store, open_store

LONG_AGO = 10**9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the object ``key``, last used long ago."""
    store = open_store(f"file://{tmp_path}")
    assert store.put("key", b"data") == Code.OK
    store.close()
    os.utime(tmp_path / "key+kv", ns=(LONG_AGO, LONG_AGO))
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    store = open_store(f"file://{folder}", readonly=True)
    yield store
    store.close()


def test_reads_all_and_changes_nothing(folder: Path, store: Store) -> None:
    """Every read works, and neither the tree nor the time of an object's last use changes."""
    before = {path: path.stat() for path in [folder, *folder.rglob("*")]}
    target = Memory(4)
    assert list(store.list()) == ["key"]
    assert store.exists(["key", "other"]) == [1, 0]
    assert store.get("key") == b"data"
    assert store.get_start(["key"]) == [Code.OK]
    assert store.get_ranges(["key"], [[target.address]], [[4]], [[0]]) == [4]
    assert store.get_end(["key"]) == [Code.OK]
    assert {path: path.stat() for path in [folder, *folder.rglob("*")]} == before


def test_every_write_is_refused(store: Store) -> None:
    """Calls that would change something answer UNAVAILABLE for each key."""
    source = Memory(b"data")
    one = [[source.address]], [[4]]
    assert store.put("new", b"data") == Code.UNAVAILABLE
    assert store.put_start(["new", "key"], [4, 4]) == [Code.UNAVAILABLE] * 2
    assert store.put_ranges(["new"], *one, [[0]]) == [Code.UNAVAILABLE]
    assert store.put_commit(["new"]) == [Code.UNAVAILABLE]
    assert store.put_revoke(["new"]) == [Code.UNAVAILABLE]
    assert store.put_objects(["new"], *one) == [Code.UNAVAILABLE]
    assert store.remove(["key"]) == [Code.UNAVAILABLE]
    assert store.get("key") == b"data"


def test_an_object_that_is_read_stays(folder: Path, store: Store) -> None:
    """A reader that changes nothing still keeps an object from being removed."""
    writer = open_store(f"file://{folder}")
    assert store.get_start(["key"]) == [Code.OK]
    assert writer.remove(["key"]) == [Code.NOT_READY]
    assert store.get_end(["key"]) == [Code.OK]
    assert writer.remove(["key"]) == [Code.OK]
    writer.close()


def test_folder_without_a_store(tmp_path: Path) -> None:
    """A folder that no store has used is empty, and stays so; one that isn't there is an error."""
    store = open_store(f"file://{tmp_path}?readonly=true")
    assert list(store.list()) == []
    store.close()
    assert list(store.exists(["key"])) == [Code.UNAVAILABLE]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(f"file://{tmp_path}/missing?readonly=true")
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", ["", "?", "?max_nbytes=1MiB", "?readonly=true", "?max_nbytes=1MiB&readonly=true"]
)
def test_asked_for_beside_other_options(folder: Path, options: str) -> None:
    """Who only looks can give the URI that the servers have, whatever its options."""
    store = open_store(f"file://{folder}{options}", readonly=True)
    assert store.put("new", b"data") == Code.UNAVAILABLE
    store.close()


def test_what_the_uri_says_decides(folder: Path) -> None:
    """``readonly=false`` in the URI holds, no store without the option is given it, and a value
    that is neither is refused.
    """
    store = open_store(f"file://{folder}?readonly=false", readonly=True)
    assert store.put("new", b"data") == Code.OK
    store.close()
    memory = open_store("memory://", readonly=True)
    assert memory.put("new", b"data") == Code.OK
    with pytest.raises(ConfigError) as caught:
        open_store(f"file://{folder}?readonly=yes")
    assert caught.value.reason is Reason.CONFIG_VALUE


def test_put_again_is_used_again(folder: Path) -> None:
    """Who offers an object that is there keeps it from being the next to be evicted."""
    store = open_store(f"file://{folder}?max_nbytes=12")
    assert store.put("other", b"data") == Code.OK
    os.utime(folder / "other+kv", ns=(2 * LONG_AGO, 2 * LONG_AGO))
    assert store.put("key", b"data") == Code.EXISTS
    assert store.put("new", b"12345678") == Code.OK
    assert sorted(store.list()) == ["key", "new"]
    store.close()
