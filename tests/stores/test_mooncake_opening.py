"""How a Mooncake store is opened and refused. A stand-in for the client where a real one can't be
made to fail; the real one is in ``test_mooncake_store``.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from conformance import Memory

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores import Code, Store, open_store
from kvformat_connector.store import (
    mooncake_client,
    mooncake_puts,
    mooncake_reach,
    mooncake_self_test,
)
from kvformat_connector.store.mooncake import MooncakeStore
from kvformat_connector.store.mooncake_options import (
    CONFIG_PATH_VARIABLE,
    MooncakeOptions,
    parse_mooncake_options,
)

pytestmark = pytest.mark.usefixtures("without_config_file")


class Client:
    """Answers like Mooncake's client on a store of its own. ``answers`` replaces calls by name."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.calls: list[str] = []
        self.data: dict[str, bytearray] = {}
        self.committed: set[str] = set()
        for name in CALLS:
            setattr(self, name, partial(self.call, name, getattr(self, name)))

    def call(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(name)
        answer = self.answers.get(name, real)
        return answer(*arguments) if callable(answer) else answer

    def setup(self, *arguments: Any) -> int:
        return 0

    def close(self) -> int:
        return 0

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def get_size(self, key: str) -> int:
        if key in self.committed:
            return len(self.data[key])
        return -703 if key in self.data else -704

    def remove(self, key: str, force: bool = False) -> int:
        self.committed.discard(key)
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [int(key in self.committed) for key in keys]

    def batch_remove(self, keys: list[str]) -> list[int]:
        return [self.remove(key) for key in keys]

    def batch_put_session_start(self, keys: list[str], sizes: list[int]) -> list[int]:
        self.data.update((key, bytearray(size)) for key, size in zip(keys, sizes, strict=True))
        return [0] * len(keys)

    def batch_put_from_multi_buffer_ranges(self, keys: list[str], *rows: Any) -> list[int]:
        return [self.move(True, *row) for row in zip(keys, *rows, strict=True)]

    def batch_get_into_multi_buffer_ranges(self, keys: list[str], *rows: Any) -> list[int]:
        return [self.move(False, *row) for row in zip(keys, *rows, strict=True)]

    def move(self, is_put: bool, key: str, *row: list[int]) -> int:
        for address, size, offset in zip(*row, strict=True):
            memory = (ctypes.c_char * size).from_address(address)
            if is_put:
                self.data[key][offset : offset + size] = memory.raw
            else:
                memory.raw = bytes(self.data[key][offset : offset + size])
        return sum(row[1])

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        self.committed.update(keys)
        return [0] * len(keys)

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        return [0] * len(keys)

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        return [0 if key in self.committed else -704 for key in keys]

    def batch_get_session_end(self, keys: list[str]) -> int:
        return 0

    def batch_put_from_multi_buffers(self, keys: list[str], *rows: Any) -> list[int]:
        return [0] * len(keys)

    def batch_get_into_multi_buffers(self, keys: list[str], *rows: Any) -> list[int]:
        return [-704] * len(keys)


CALLS = [
    name
    for name in vars(Client)
    if name.startswith("batch_") or name in ("setup", "close", "remove", "register_buffer")
] + ["unregister_buffer", "get_size"]


@pytest.fixture
def without_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG_PATH_VARIABLE, raising=False)


@pytest.fixture
def master() -> Iterator[str]:
    """A listener that answers each connection with one byte."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(b"\x15")

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def install(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Make ``kind`` what Mooncake's module has as its client."""
    module = ModuleType("mooncake.store")
    module.MooncakeDistributedStore = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.setattr(mooncake_client, "packages_distributions", lambda: {"mooncake": ["moon"]})
    monkeypatch.setattr(mooncake_client, "version", lambda name: "0.3.12")
    monkeypatch.setattr(mooncake_self_test, "_ROOM_LIMIT_S", 0.2)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()

    class Kind(Client):
        def __new__(cls) -> Any:
            return client

    install(monkeypatch, Kind)
    return client


@pytest.fixture
def store(client: Client, master: str) -> Iterator[Store]:
    store = open_store(f"mooncake://{master}")
    yield store
    store.close()


def refusal(uri: str) -> StoreUnavailableError:
    with pytest.raises(StoreUnavailableError) as caught:
        open_store(uri)
    return caught.value


def test_mooncake_is_imported_late() -> None:
    """Importing the store's module, and finding it by its scheme, doesn't import Mooncake."""
    code = (
        "import sys, kvformat_connector.store.mooncake; "
        "sys.exit(any(name.split('.')[0] == 'mooncake' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_not_installed(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    """Without the package the error says which one to install."""
    monkeypatch.setattr(mooncake_client, "packages_distributions", dict)
    error = refusal(f"mooncake://{master}")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "mooncake-transfer-engine" in error.detail


def test_too_old_a_client(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    """A client without session calls is refused by the names of what it lacks, with the version
    found and the version needed.
    """
    install(monkeypatch, Client)
    monkeypatch.delattr(Client, "batch_put_session_start")
    monkeypatch.delattr(Client, "batch_get_session_end")
    error = refusal(f"mooncake://{master}")
    assert error.reason is Reason.STORE_UNSUPPORTED
    for word in ("batch_put_session_start", "batch_get_session_end", "0.3.12", "0.3.13.post1"):
        assert word in error.detail
    assert "batch_put_session_end" not in error.detail


def test_no_master(client: Client, master: str) -> None:
    """A port where nothing listens is refused before setup is tried, and the address is named."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    error = refusal(f"mooncake://{address}")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert address in error.detail
    assert client.calls == []


def test_silent_listener(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that takes connections and says nothing never meets setup, which would hang."""
    monkeypatch.setattr(mooncake_reach, "_REACH_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        error = refusal(f"mooncake://127.0.0.1:{silent.getsockname()[1]}")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert client.calls == []


def test_a_black_hole(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that swallows what it is sent: connecting has a deadline, so the start has one."""
    limits = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        limits.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(mooncake_reach.socket, "create_connection", connect)
    error = refusal("mooncake://192.0.2.1:50051")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "192.0.2.1:50051" in error.detail
    assert limits == [2.0]
    assert client.calls == []


def test_a_name_server_that_does_not_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding the address of a name, which has no deadline of its own, has one too."""
    is_over = threading.Event()
    monkeypatch.setattr(mooncake_reach, "_NAME_LIMIT_S", 0.2)
    monkeypatch.setattr(
        mooncake_reach.socket, "getaddrinfo", lambda *args, **kwargs: is_over.wait(30)
    )
    try:
        error = refusal("mooncake://master.example:50051")
    finally:
        is_over.set()
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "master.example" in error.detail
    assert client.calls == []


SCHEMES = ["http://", "https://", "etcd://", "redis://", ""]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_no_metadata_server(
    client: Client, master: str, monkeypatch: pytest.MonkeyPatch, scheme: str, kind: str
) -> None:
    """A metadata server that isn't there, or says nothing, never meets setup, which would hang
    before some and end the process before others; the option and the address are named."""
    monkeypatch.setattr(mooncake_reach, "_REACH_LIMIT_S", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    if kind == "closed":
        listener.close()
    uri = f"mooncake://{master}?metadata_server={quote(f'{scheme}{address}/metadata', safe='')}"
    error = refusal(uri)
    listener.close()
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "metadata_server" in error.detail
    assert address in error.detail
    assert client.calls == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_metadata_server_that_answers(client: Client, master: str, scheme: str) -> None:
    """One of several that answers is enough, and setup gets the text as it was given."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    given: list[Any] = []
    client.answers["setup"] = lambda *args: given.append(args[1]) or 0
    text = f"{scheme}{address};{master}/metadata"
    open_store(f"mooncake://{master}?metadata_server={quote(text, safe='')}").close()
    assert given == [text]


def test_a_metadata_server_of_no_known_kind(client: Client, master: str) -> None:
    """A scheme that Mooncake doesn't have is a wrong value, not a server that is down."""
    with pytest.raises(ConfigError) as caught:
        open_store(f"mooncake://{master}?metadata_server={quote('ftp://host', safe='')}")
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert "'ftp://host'" in caught.value.detail


def test_setup_code(client: Client, master: str) -> None:
    """A code other than 0 from setup is an error that names the code and what setup was given."""
    client.answers["setup"] = -600
    error = refusal(f"mooncake://{master}?protocol=rdma&device_name=mlx5_9")
    assert error.reason is Reason.STORE_UNAVAILABLE
    for word in ("-600", master, "rdma", "mlx5_9"):
        assert word in error.detail


@pytest.mark.parametrize(
    ("call", "answer", "step"),
    [
        ("batch_put_session_start", [-900], "put start"),
        ("batch_put_session_start", [], "put start"),
        ("batch_put_from_multi_buffer_ranges", [-800], "put"),
        ("batch_put_from_multi_buffer_ranges", [4095], "put"),
        ("batch_put_session_end", [-900], "commit"),
        ("batch_get_session_start", [-704], "get start"),
        ("batch_get_into_multi_buffer_ranges", [], "get"),
        ("batch_get_into_multi_buffer_ranges", [4096], "compare"),
        ("remove", -900, "remove"),
    ],
)
def test_self_test_names_the_step(
    client: Client, master: str, call: str, answer: Any, step: str
) -> None:
    """A client and a master that don't work together are found at the start, step by step."""
    client.answers[call] = answer
    error = refusal(f"mooncake://{master}")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert repr(step) in error.detail


@pytest.mark.parametrize(
    ("call", "answer", "found"),
    [
        ("batch_put_from_multi_buffer_ranges", [-800], "transfer_failed"),
        ("batch_put_from_multi_buffer_ranges", [-600], "invalid"),
        ("batch_get_into_multi_buffer_ranges", [-600], "invalid"),
    ],
)
def test_a_storage_node_that_is_gone_is_told(
    client: Client, master: str, call: str, answer: list[int], found: str
) -> None:
    """Versions aren't suspected where no bytes move: the answer has its name, the node is named."""
    client.answers[call] = answer
    error = refusal(f"mooncake://{master}")
    assert f"found {found};" in error.detail
    assert "storage node" in error.detail
    assert "version?" not in error.detail


def test_no_room_in_the_store(client: Client, master: str) -> None:
    """A pool without room says so a while, and opens all the same: it can be read. Where nobody can
    tell whether it has memory at all, that is assumed."""
    client.answers["batch_put_session_start"] = [-200]
    for options in ("", f"?metrics={master}"):  # nobody speaks HTTP there
        client.calls.clear()
        store = open_store(f"mooncake://{master}{options}")
        assert isinstance(store, MooncakeStore)
        assert not store.had_room
        assert client.calls.count("batch_put_session_start") > 1
        store.close()


def test_no_memory_in_the_store(client: Client, master: str) -> None:
    """A store that nobody lends memory, as the master's HTTP port tells, is refused with what lends
    it some."""

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            assert self.path == "/get_all_segments"

        def log_message(self, *arguments: object) -> None:
            pass

    client.answers["batch_put_session_start"] = [-200]
    with HTTPServer(("127.0.0.1", 0), Pages) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        error = refusal(f"mooncake://{master}?metrics=127.0.0.1:{server.server_port}")
    assert error.reason is Reason.STORE_UNAVAILABLE
    assert "global_segment_size" in error.detail


def test_lost_client(store: Store, client: Client) -> None:
    """Empty lists, which a client that lost its set-up gives, are UNAVAILABLE for every key."""
    memory = Memory(4)
    keys, rows = ["a", "b"], ([[memory.address]] * 2, [[4]] * 2, [[0]] * 2)
    lost = [Code.UNAVAILABLE] * 2
    assert store.put_start(keys, [4, 4]) == [0, 0]
    client.answers["batch_put_from_multi_buffer_ranges"] = []
    assert store.put_ranges(keys, *rows) == lost
    del client.answers["batch_put_from_multi_buffer_ranges"]
    assert store.put_ranges(keys, *rows) == [4, 4]
    client.answers["batch_put_session_end"] = []
    assert store.put_commit(keys) == lost
    client.answers.update((name, []) for name in CALLS if name.startswith("batch_"))
    assert store.put_start(keys, [4, 4]) == lost
    assert store.get_start(keys) == lost
    assert store.exists(keys) == lost
    assert store.remove(keys) == lost
    assert store.put_objects(keys, *rows[:2]) == lost
    assert store.get_objects(keys, *rows[:2]) == lost


def test_sessions_of_a_master_that_is_gone(
    store: Store, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that was started again doesn't know the object: nothing more is written, for the
    memory may be another object's, and the sessions are over. One that can't be asked may yet be
    the same."""
    monkeypatch.setattr(mooncake_puts, "CONFIRM_AFTER_S", -1.0)
    memory = Memory(4)
    keys, rows = ["a", "b"], ([[memory.address]] * 2, [[4]] * 2, [[0]] * 2)
    assert store.put_start(keys, [4, 4]) == [0, 0]
    assert store.put_start(["c"], [4]) == [0]
    assert store.put_ranges(keys, *rows) == [4, 4]
    client.calls.clear()
    client.answers["get_size"] = -900
    assert store.put_ranges(keys, *rows) == [Code.UNAVAILABLE] * 2
    del client.answers["get_size"]
    assert store.put_ranges(keys, *rows) == [4, 4]
    client.answers["get_size"] = lambda key: -703 if key == "c" else -704
    assert store.put_ranges(keys, *rows) == [Code.INVALID] * 2
    # Asked once for both, which were opened together.
    assert client.calls.count("get_size") == 3
    assert client.calls.count("batch_put_from_multi_buffer_ranges") == 1
    assert store.put_commit(keys) == [Code.INVALID] * 2
    assert store.put_ranges(["c"], [[memory.address]], [[4]], [[0]]) == [4]
    assert store.put_commit(["c"]) == [0]


def test_failed_commit_is_revoked(store: Store, client: Client) -> None:
    """A commit that fails is revoked, and the session is over here as well."""
    memory = Memory(4)
    assert store.put_start(["a"], [4]) == [0]
    assert store.put_ranges(["a"], [[memory.address]], [[4]], [[0]]) == [4]
    client.answers["batch_put_session_end"] = [-900]
    client.calls.clear()
    assert store.put_commit(["a"]) == [Code.UNAVAILABLE]
    assert client.calls == ["batch_put_session_end", "batch_put_session_revoke"]
    assert store.put_commit(["a"]) == [Code.INVALID]


def test_commit_under_a_write(store: Store, client: Client) -> None:
    """A commit while another thread still writes to the object is refused and revoked."""
    entered, leave = threading.Event(), threading.Event()
    memory = Memory(4)
    rows = (["a"], [[memory.address]], [[4]], [[0]])
    assert store.put_start(["a"], [4]) == [0]
    assert store.put_ranges(*rows) == [4]

    def slow(*arguments: Any) -> list[int]:
        entered.set()
        assert leave.wait(10)
        return [4]

    client.answers["batch_put_from_multi_buffer_ranges"] = slow
    writer = threading.Thread(target=store.put_ranges, args=rows)
    writer.start()
    assert entered.wait(10)
    client.calls.clear()
    assert store.put_commit(["a"]) == [Code.INVALID]
    assert client.calls == ["batch_put_session_revoke"]
    leave.set()
    writer.join()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (-200, Code.NO_SPACE),
        (-703, Code.NOT_READY),
        (-705, Code.EXISTS),
        (-900, Code.UNAVAILABLE),
        (-901, Code.UNAVAILABLE),
        (-600, Code.EXISTS),
        (-123456, Code.INTERNAL),
    ],
)
def test_codes_of_a_start(store: Store, client: Client, theirs: int, ours: Code) -> None:
    """Mooncake's codes come out as this project's; a failed start opens no session."""
    client.answers["batch_put_session_start"] = [0, theirs]
    assert store.put_start(["a", "b"], [4, 4]) == [0, ours]
    assert store.put_revoke(["a", "b"]) == [0, Code.INVALID]


def test_registration_where_it_is_needed(client: Client, master: str) -> None:
    """Memory is announced to the client with any protocol but tcp."""
    store = open_store(f"mooncake://{master}?protocol=rdma")
    client.answers["register_buffer"] = -600
    assert store.register_memory(4096, 4096) == Code.INVALID
    del client.answers["register_buffer"]
    client.calls.clear()
    assert store.register_memory(4096, 4096) == Code.OK
    assert store.unregister_memory(4096) == Code.OK
    assert client.calls == ["register_buffer", "unregister_buffer"]
    store.close()


def test_close_waits_for_calls(store: Store, client: Client) -> None:
    """The client isn't closed under a call that another thread is in."""
    entered, leave = threading.Event(), threading.Event()
    order: list[str] = []

    def slow(keys: list[str]) -> list[int]:
        entered.set()
        leave.wait(10)
        order.append("call left")
        return [1] * len(keys)

    client.answers["batch_is_exist"] = slow
    client.answers["close"] = lambda: order.append("closed")
    reader = threading.Thread(target=store.exists, args=[["a"]])
    reader.start()
    assert entered.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    leave.set()
    reader.join()
    closer.join()
    assert order == ["call left", "closed"]


# Options


def test_defaults() -> None:
    """A master is all that has to be said."""
    options = parse_mooncake_options("mooncake://master:50051")
    assert options == MooncakeOptions(master_server_address="master:50051")
    assert options.metadata_server == "P2PHANDSHAKE"
    assert options.put_session_limit_ms == 20_000


def test_options_of_the_uri() -> None:
    """Every option can stand in the URI."""
    assert parse_mooncake_options(
        "mooncake://[::1]:50051?metadata_server=http://meta:8080/metadata&protocol=rdma"
        "&device_name=mlx5_0,mlx5_1&global_segment_size=4GB&local_buffer_size=1GiB"
        "&local_hostname=10.0.0.7&metrics=master:9003&put_session_limit_ms=5000"
    ) == MooncakeOptions(
        master_server_address="[::1]:50051",
        metadata_server="http://meta:8080/metadata",
        protocol="rdma",
        device_name="mlx5_0,mlx5_1",
        local_hostname="10.0.0.7",
        global_segment_size=4 << 30,
        local_buffer_size=1 << 30,
        metrics="master:9003",
        put_session_limit_ms=5000,
    )


def test_options_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's file gives what the URI leaves out, and may hold keys that aren't ours."""
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "master_server_address": "master:50051",
                "metadata_server": "P2PHANDSHAKE",
                "protocol": "rdma",
                "device_name": "mlx5_0",
                "global_segment_size": 1024,
                "local_buffer_size": "2MB",
                "mode": "embedded",
                "tenant_id": None,
            }
        )
    )
    monkeypatch.setenv(CONFIG_PATH_VARIABLE, str(path))
    expected = MooncakeOptions(
        master_server_address="master:50051",
        protocol="rdma",
        device_name="mlx5_0",
        global_segment_size=1024,
        local_buffer_size=2 << 20,
    )
    assert parse_mooncake_options("mooncake://") == expected
    changed = parse_mooncake_options("mooncake://other:1?protocol=tcp")
    assert changed.master_server_address == "other:1"
    assert changed.protocol == "tcp"
    assert changed.device_name == "mlx5_0"


def test_the_environment_comes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file as vllm-ascend's users have it: switches for placement, and variables that win."""
    path = tmp_path / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "master_server_address": "master:50051",
                "preferred_segment": True,
                "prefer_alloc_in_same_node": False,
            }
        )
    )
    monkeypatch.setenv(CONFIG_PATH_VARIABLE, str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", "other:1")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2GB")
    assert parse_mooncake_options("mooncake://") == MooncakeOptions(
        master_server_address="other:1",
        global_segment_size=2 << 30,
        preferred_segment="true",
        prefer_alloc_in_same_node=False,
    )
    assert parse_mooncake_options("mooncake://third:1").master_server_address == "third:1"


@pytest.mark.parametrize(
    ("uri", "reason", "named"),
    [
        ("mooncake://", Reason.CONFIG_MISSING, "master_server_address"),
        ("mooncake://master", Reason.CONFIG_VALUE, "master_server_address"),
        ("mooncake://:1", Reason.CONFIG_VALUE, "master_server_address"),
        ("mooncake://master:0", Reason.CONFIG_VALUE, "master_server_address"),
        ("mooncake://master:x", Reason.CONFIG_VALUE, "master_server_address"),
        ("mooncake://master:1/path", Reason.CONFIG_VALUE, "path"),
        ("mooncake://master:1?metrics=9003", Reason.CONFIG_VALUE, "metrics"),
        ("mooncake://master:1?global_segment_size=lots", Reason.CONFIG_VALUE, "lots"),
        ("mooncake://master:1?put_session_limit_ms=0", Reason.CONFIG_VALUE, "put_session_limit_ms"),
        ("mooncake://master:1?replica_num=0", Reason.CONFIG_VALUE, "replica_num"),
        ("mooncake://master:1?prefer_alloc_in_same_node=1", Reason.CONFIG_VALUE, "same_node"),
        ("mooncake://master:1?ttl=1", Reason.CONFIG_UNKNOWN, "ttl"),
    ],
)
def test_bad_options(uri: str, reason: Reason, named: str) -> None:
    """A wrong option is refused before anything is opened, and named."""
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert caught.value.reason is reason
    assert named in caught.value.detail


@pytest.mark.parametrize("content", [None, "{", "[]", '{"protocol": 1.5}', '{"protocol": true}'])
def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    """A configuration file that is missing or no such thing is refused."""
    path = tmp_path / "mooncake.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(CONFIG_PATH_VARIABLE, str(path))
    with pytest.raises(ConfigError) as caught:
        open_store("mooncake://master:1")
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert str(path) in caught.value.detail


def test_what_mooncake_reads_when_it_is_imported_is_set_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whoever imports it first, such as ``kvformat doctor`` that looks for methods alone; and
    what an operator has set stays."""
    found: list[tuple[str | None, str | None]] = []

    class Finder:
        @staticmethod
        def import_module(name: str) -> Any:
            assert name == "mooncake.store"
            found.append((os.environ.get("MC_RPC_TIMEOUT_MS"), os.environ.get("MC_LOG_LEVEL")))
            return SimpleNamespace(MooncakeDistributedStore=Client)

    monkeypatch.setattr(mooncake_client, "importlib", Finder)
    for name in ("MC_RPC_TIMEOUT_MS", "MC_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set here goes with the test
        monkeypatch.delenv(name)
    mooncake_client.missing_session_methods()
    monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
    mooncake_client.missing_session_methods()
    assert found == [("3000", "WARNING"), ("3000", "INFO")]
