"""The file store, against what every store promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance import ProcessConformance

from kvformat.stores import open_store


class TestFileStore(ProcessConformance):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> Iterator[str]:
        uri = f"file://{tmp_path}/store"
        yield uri
        # The longest keys lie deeper than Python can remove a tree.
        store = open_store(uri)
        store.remove(list(store.list()))
        store.close()
