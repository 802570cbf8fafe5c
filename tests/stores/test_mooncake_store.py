"""The Mooncake store, against what every store promises, on a real master and client."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from conformance import Memory, ProcessConformance

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.stores import Code, Store, open_store
from kvformat_connector.store.mooncake import MooncakeStore
from kvformat_connector.store.mooncake_client import replica_arguments
from kvformat_connector.store.mooncake_options import parse_mooncake_options
from kvformat_connector.store.mooncake_services import MooncakeServices, mooncake_services

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


def test_versions(mooncake: MooncakeServices, pools: tuple[Pool, Pool]) -> None:
    """The store tells which Mooncake it goes through."""
    store = pools[0].take()
    assert isinstance(store, MooncakeStore)
    assert store.versions.distribution.startswith("mooncake-transfer-engine")
    assert store.versions.version == version(store.versions.distribution)
    assert store.versions.master_server_address == mooncake.master_server_address


def test_late_put_session_is_given_up(mooncake: MooncakeServices, pools: tuple[Pool, Pool]) -> None:
    """A put session older than its limit writes nothing, commits nothing, and frees the key."""
    store = open_store(f"{mooncake.uri}&put_session_limit_ms=300")
    other = pools[1].take()
    keys = [f"late/{uuid.uuid4().hex}" for _ in range(3)]
    source = Memory(b"data")
    rows = [[source.address]], [[4]], [[0]]
    assert store.put_start(keys, [4, 4, 4]) == [0, 0, 0]
    for key in keys:
        assert store.put_ranges([key], *rows) == [4]
    time.sleep(0.4)
    assert store.put_ranges(keys[:1], *rows) == [Code.INVALID]
    assert store.put_commit(keys[:2]) == [Code.INVALID, Code.INVALID]
    assert other.put(keys[0], b"other") == Code.OK
    assert other.put(keys[1], b"other") == Code.OK
    # A new start of a late session's key is a new session, without the old one's bytes.
    assert store.put_start(keys[2:], [4]) == [0]
    assert store.put_commit(keys[2:]) == [Code.INVALID]
    assert other.exists(keys) == [1, 1, 0]
    store.close()


def test_lease_runs_out(pools: tuple[Pool, Pool]) -> None:
    """Case 25: a lease that ran out says so once, then the session is gone; a second start in time
    renews it.
    """
    store = pools[0].take()
    renewed, expired = (f"lease/{uuid.uuid4().hex}" for _ in range(2))
    assert [store.put(key, b"data") for key in (renewed, expired)] == [0, 0]
    target = Memory(4)
    rows = [[target.address]], [[4]], [[0]]
    assert store.get_start([renewed, expired]) == [0, 0]
    time.sleep(1.2)
    assert store.get_start([renewed]) == [0]
    time.sleep(1.2)
    assert store.get_ranges([expired], *rows) == [Code.LEASE_EXPIRED]
    assert store.get_ranges([expired], *rows) == [Code.INVALID]
    assert store.get_ranges([renewed], *rows) == [4]
    assert store.get_end([renewed, expired]) == [0, Code.INVALID]
    assert store.get_start([expired]) == [0]
    assert store.get_ranges([expired], *rows) == [4]


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [("", Reason.STORE_UNSUPPORTED), ("&metrics=127.0.0.1:1", Reason.STORE_UNAVAILABLE)],
)
def test_list_needs_the_http_port(mooncake: MooncakeServices, metrics: str, reason: Reason) -> None:
    """Without the master's HTTP port a listing is refused, and the option is named."""
    store = open_store(f"mooncake://{mooncake.master_server_address}?protocol=tcp{metrics}")
    with pytest.raises(StoreUnavailableError) as caught:
        store.list()
    assert caught.value.reason is reason
    assert "metrics" in caught.value.detail
    store.close()


def test_services_end_with_their_context() -> None:
    """Both services run in the context and are gone when it ends, also when it ends by an error."""
    running: list[MooncakeServices] = []

    def fail() -> None:
        with mooncake_services(segment_nbytes=64 << 20) as services:
            running.append(services)
            assert services.master.poll() is None
            assert services.client.poll() is None
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert running[0].master.returncode is not None
    assert running[0].client.returncode is not None


def test_replica_options_reach_mooncake(mooncake: MooncakeServices) -> None:
    """Each option is a field of what puts are called with; nothing asked for is nothing said; and
    a real master takes them, in sessions and for whole objects."""

    class Named:
        def get_hostname(self) -> str:
            return "me:1"

    def config(query: str) -> object:
        options = parse_mooncake_options(f"mooncake://master:1{query}")
        return replica_arguments(Named(), options).get("config")  # type: ignore[arg-type]

    assert config("") is None
    found: Any = config(
        "?replica_num=2&preferred_segment=true&prefer_alloc_in_same_node=true&soft_pin_ms=900"
    )
    assert (found.replica_num, found.preferred_segment) == (2, "me:1")
    assert (found.prefer_alloc_in_same_node, found.soft_pin_ttl_ms) == (True, 900)
    assert found.soft_pin_action.name == "ENABLE"
    named: Any = config("?preferred_segment=10.0.0.7:5")
    assert (named.preferred_segment, named.replica_num) == ("10.0.0.7:5", 1)

    store = open_store(f"{mooncake.uri}&replica_num=1&soft_pin_ms=1000&preferred_segment=true")
    key = f"replica/{uuid.uuid4().hex}"
    assert store.put(key, b"data") == Code.OK
    assert store.get(key) == b"data"
    store.close()


def test_a_reader_needs_no_room_and_changes_nothing(tmp_path: Path) -> None:
    """A pool without any memory refuses an engine, and still opens for who only looks: lists, reads
    nothing, and takes neither puts nor removals."""
    with mooncake_services(segment_nbytes=16 << 20, log_folder=tmp_path) as services:
        services.client.terminate()
        services.client.wait(10)
        with pytest.raises(StoreUnavailableError):
            open_store(services.uri)
        store = open_store(services.uri, readonly=True)
        assert list(store.list()) == []
        assert store.get("absent") is None
        assert store.put("key", b"data") == Code.UNAVAILABLE
        assert store.put_start(["key"], [4]) == [Code.UNAVAILABLE]
        assert store.remove(["key"]) == [Code.UNAVAILABLE]
        assert store.exists(["key"]) == [0]
        store.close()
