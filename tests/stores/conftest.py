"""What tests of the file store begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvformat.stores import Store, open_store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the store will be."""
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """An empty store in ``folder``."""
    store = open_store(f"file://{folder}")
    yield store
    store.close()
