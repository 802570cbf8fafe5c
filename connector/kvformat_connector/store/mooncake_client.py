"""Mooncake's client: what this project calls of it, and how one is opened with every check.

Mooncake is imported when a client is opened, never before.
"""

from __future__ import annotations

import importlib
import os
from importlib.metadata import packages_distributions, version
from typing import Any, NamedTuple, Protocol, cast

from kvformat.errors import Reason, StoreUnavailableError
from kvformat_connector.store.mooncake_options import MooncakeOptions
from kvformat_connector.store.mooncake_reach import reach_master, reach_metadata_server

#: The first release whose wheels have the session calls and import on any machine.
NEEDED_VERSION = "0.3.13.post1"
_SESSION_METHODS = (
    "batch_put_session_start",
    "batch_put_from_multi_buffer_ranges",
    "batch_put_session_end",
    "batch_put_session_revoke",
    "batch_get_session_start",
    "batch_get_into_multi_buffer_ranges",
    "batch_get_session_end",
)
_RPC_LIMIT_MS = 3000

_Rows = list[list[int]]


class Client(Protocol):
    """The calls of ``MooncakeDistributedStore`` that this project uses."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...
    def close(self) -> int: ...
    def register_buffer(self, address: int, nbytes: int) -> int: ...
    def unregister_buffer(self, address: int) -> int: ...
    def get_size(self, key: str) -> int: ...
    def remove(self, key: str, force: bool = False) -> int: ...
    def batch_is_exist(self, keys: list[str]) -> list[int]: ...
    def batch_remove(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: Any = ...
    ) -> list[int]: ...
    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: _Rows, sizes: _Rows, offsets: _Rows
    ) -> list[int]: ...
    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...
    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...
    def batch_get_session_start(self, keys: list[str]) -> list[int]: ...
    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], addresses: _Rows, sizes: _Rows, offsets: _Rows
    ) -> list[int]: ...
    def batch_get_session_end(self, keys: list[str]) -> int: ...
    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: _Rows, sizes: _Rows, config: Any = ...
    ) -> list[int]: ...
    def get_hostname(self) -> str: ...
    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: _Rows, sizes: _Rows
    ) -> list[int]: ...


class MooncakeVersions(NamedTuple):
    """Which Mooncake a store talks through. The master doesn't tell its version."""

    distribution: str
    version: str
    master_server_address: str


def find_versions(master_server_address: str) -> MooncakeVersions:
    """The installed distribution: its name differs by accelerator, so it's looked up by module."""
    names = packages_distributions().get("mooncake")
    if not names:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: no Mooncake is installed; install "
            f"'mooncake-transfer-engine-non-cuda>={NEEDED_VERSION}' or the build for your device",
        )
    return MooncakeVersions(names[0], version(names[0]), master_server_address)


def open_client(options: MooncakeOptions, versions: MooncakeVersions) -> Client:
    """A client that is set up. Raises ``StoreUnavailableError`` within about six seconds.

    The order matters: before a listener that takes connections and says nothing, ``setup`` stands
    for ten minutes, and the whole interpreter with it. So the services are spoken to by hand first.
    """
    client = _new_client(versions)
    local_hostname = reach_master(options.master_server_address)
    reach_metadata_server(options.metadata_server)
    code = client.setup(
        options.local_hostname or local_hostname,
        options.metadata_server,
        options.global_segment_size,
        options.local_buffer_size,
        options.protocol,
        options.device_name,
        options.master_server_address,
    )
    if code != 0:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: Mooncake's setup answered {code} (found master "
            f"{options.master_server_address!r}, metadata_server {options.metadata_server!r}, "
            f"protocol {options.protocol!r}, device_name {options.device_name!r})",
        )
    return client


def replica_arguments(client: Client, options: MooncakeOptions) -> dict[str, Any]:
    """What puts are called with beside keys and sizes: nothing where nothing was asked for."""
    asked = (
        options.preferred_segment,
        options.prefer_alloc_in_same_node,
        options.replica_num,
        options.soft_pin_ms,
    )
    if asked == ("", None, None, None):
        return {}
    module = _import_mooncake()
    config: Any = module.ReplicateConfig()
    if options.preferred_segment:
        own = options.preferred_segment == "true"
        config.preferred_segment = client.get_hostname() if own else options.preferred_segment
    if options.prefer_alloc_in_same_node is not None:
        config.prefer_alloc_in_same_node = options.prefer_alloc_in_same_node
    if options.replica_num is not None:
        config.replica_num = options.replica_num
    if options.soft_pin_ms is not None:
        config.soft_pin_action = module.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = options.soft_pin_ms
    return {"config": config}


def missing_session_methods() -> list[str]:
    """What the installed Mooncake lacks. Raises ``ImportError`` where it can't be imported."""
    return _missing(_import_mooncake().MooncakeDistributedStore)


def _missing(kind: Any) -> list[str]:
    return [name for name in _SESSION_METHODS if not hasattr(kind, name)]


def _import_mooncake() -> Any:
    """Mooncake's module. What it reads from the environment, it reads when it's first imported."""
    # Mooncake's own limit of 30 s would stop an engine that asks a frozen master.
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(_RPC_LIMIT_MS))
    # Its notes to itself, a page for each client, hide what an engine or a command says.
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    return importlib.import_module("mooncake.store")


def _new_client(versions: MooncakeVersions) -> Client:
    found = f"found {versions.distribution} {versions.version}"
    try:
        module = _import_mooncake()
    except ImportError as error:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: Mooncake can't be imported ({found}): {error}",
        ) from error
    kind: Any = module.MooncakeDistributedStore
    if missing := _missing(kind):
        raise StoreUnavailableError(
            Reason.STORE_UNSUPPORTED,
            f"option store: Mooncake >= {NEEDED_VERSION} is needed, {found}, "
            f"which lacks {', '.join(missing)}",
        )
    return cast("Client", kind())
