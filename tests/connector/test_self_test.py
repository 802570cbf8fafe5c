"""The check that a store works, made before an engine uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.stores.memory import MemoryStore
from kvformat.stores.protocol import Code
from kvformat_connector.starting import check_by_use, open_checked_store


def test_a_store_that_works_is_left_as_it_was(tmp_path: Path) -> None:
    """An object goes in, comes back, and is removed."""
    store, had_room = open_checked_store(f"file://{tmp_path / 'store'}", "worker")
    assert had_room
    assert list(store.list()) == []
    store.close()


@pytest.mark.parametrize(
    ("option", "expected_room", "put"),
    [("max_nbytes=1000", False, Code.NO_SPACE), ("readonly=true", True, Code.UNAVAILABLE)],
)
def test_a_store_that_takes_nothing_is_still_read(
    tmp_path: Path, option: str, expected_room: bool, put: Code
) -> None:
    """The start goes on, and knows where there is no room; what is in the store can be read."""
    uri = f"file://{tmp_path / 'store'}"
    store, _ = open_checked_store(uri, "worker")
    assert store.put("key", b"data") == Code.OK
    store.close()
    store, had_room = open_checked_store(f"{uri}?{option}", "worker")
    assert had_room == expected_room
    assert store.put("other", b"x" * 4096) == put
    assert store.get("key") == b"data"
    store.close()


@pytest.mark.parametrize(
    ("method", "answer", "step", "found"),
    [
        ("put", Code.UNAVAILABLE, "put", "unavailable"),
        ("put", -1234, "put", "code_other -1234"),
        ("get", b"other bytes", "get", "other bytes"),
        ("get", None, "get", "nothing"),
        ("remove", [Code.TRANSFER_FAILED], "remove", "transfer_failed"),
    ],
)
def test_a_store_that_does_not_work_stops_the_start(
    method: str, answer: Any, step: str, found: str
) -> None:
    """The error names the step, and the store's answer by its name."""
    store = MemoryStore("memory://")
    setattr(store, method, lambda *arguments: answer)
    with pytest.raises(StoreUnavailableError) as caught:
        check_by_use(store)
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    assert repr(step) in caught.value.detail
    assert f"found {found}" in caught.value.detail
