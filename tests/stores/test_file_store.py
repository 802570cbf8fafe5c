"""The file store, against what every store promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import ProcessConformance


class TestFileStore(ProcessConformance):
    @pytest.fixture
    def uri(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/store"
