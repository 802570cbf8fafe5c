"""The memory store, against what every store promises."""

from __future__ import annotations

import uuid

import pytest
from conformance import StoreConformance

from kvformat.errors import ConfigError, Reason
from kvformat.stores import open_store


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def uri(self) -> str:
        return f"memory://{uuid.uuid4().hex}"


def test_without_a_name_nothing_is_shared() -> None:
    """memory:// is private to its instance."""
    one, two = open_store("memory://"), open_store("memory://")
    assert one.put("key", b"data") == 0
    assert two.exists(["key"]) == [0]


def test_path_is_refused() -> None:
    """A path in the URI is a mistake, and is named as one."""
    with pytest.raises(ConfigError) as caught:
        open_store("memory://name/path")
    assert caught.value.reason is Reason.CONFIG_VALUE
