"""The Mooncake store, against what every store promises, on a real master and client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance import ProcessConformance
from kvformat_connector.store.mooncake_services import MooncakeServices

from kvformat.stores import Code, Store, open_store

pytestmark = pytest.mark.mooncake


class Pool:
    """One store for all tests that use it: Mooncake's close takes a second."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.store: Store | None = None

    def take(self) -> Store:
        if self.store is None or self.store.exists(["any"]) == [Code.UNAVAILABLE]:
            self.store = open_store(self.uri)
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


@pytest.fixture(scope="module")
def pools(mooncake: MooncakeServices) -> Iterator[tuple[Pool, Pool]]:
    pools = Pool(mooncake.uri), Pool(mooncake.uri)
    yield pools
    for pool in pools:
        pool.close()


class TestMooncakeStore(ProcessConformance):
    # The master lists one key a line.
    UNLISTABLE = "\n"

    @pytest.fixture
    def uri(self, mooncake: MooncakeServices) -> str:
        return mooncake.uri

    @pytest.fixture
    def store(self, pools: tuple[Pool, Pool]) -> Store:
        return pools[0].take()

    @pytest.fixture
    def other(self, pools: tuple[Pool, Pool]) -> Store:
        return pools[1].take()
