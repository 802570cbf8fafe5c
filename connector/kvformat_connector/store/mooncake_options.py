"""What a ``mooncake://`` URI and Mooncake's own configuration file say, as one struct.

``mooncake://host:port?option=value``; what the URI leaves out is taken from the JSON file that
``MOONCAKE_CONFIG_PATH`` names, if any, so ``mooncake://`` alone is that file. The file belongs to
Mooncake and holds keys for others too: unknown ones are passed over there, and refused in the URI.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import msgspec

from kvformat.errors import ConfigError, Reason
from kvformat.stores.uri import (
    parse_flag,
    parse_nbytes,
    parse_store_uri,
    parse_whole_number,
    refuse_unknown_options,
)

CONFIG_PATH_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"

_MOONCAKE_NAMES = (
    "metadata_server",
    "protocol",
    "device_name",
    "local_hostname",
    "global_segment_size",
    "local_buffer_size",
)
# Where objects are kept. Mooncake's file may hold the first two, as vllm-ascend's users write it.
_REPLICA_NAMES = ("preferred_segment", "prefer_alloc_in_same_node", "replica_num", "soft_pin_ms")
_SWITCHES = ("preferred_segment", "prefer_alloc_in_same_node")
_OWN_NAMES = ("metrics", "put_session_limit_ms", "readonly")
#: What a URI may hold.
URI_OPTIONS: Final = (*_MOONCAKE_NAMES, *_REPLICA_NAMES, *_OWN_NAMES)
# Environment variables that come before the file, as vllm-ascend has them.
_VARIABLES = {
    "MOONCAKE_MASTER": "master_server_address",
    "MOONCAKE_GLOBAL_SEGMENT_SIZE": "global_segment_size",
}


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a Mooncake store. Sizes in bytes, addresses as ``host:port``."""

    master_server_address: str
    #: ``P2PHANDSHAKE``, or the URL of a metadata server.
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    #: RDMA devices, separated by commas.
    device_name: str = ""
    #: This machine as the storage peers see it. Empty: the address that reaches the master.
    local_hostname: str = ""
    #: Memory that this process lends to the store. An engine usually lends none.
    global_segment_size: int = 0
    #: Mooncake's own staging memory. No call of this store needs it.
    local_buffer_size: int = 16 << 20
    #: The master's HTTP port, needed to list keys.
    metrics: str = ""
    #: A put session older than this is given up, long before Mooncake hands its memory to others.
    put_session_limit_ms: int = 20_000
    #: Store and remove nothing, not even the object of the self-test.
    readonly: bool = False
    #: The segment that an object's first copy goes to. ``true``: the memory this process lends.
    preferred_segment: str = ""
    #: Keep the copies of an object on one node. None: as Mooncake would.
    prefer_alloc_in_same_node: bool | None = None
    #: Copies of each object. None: as Mooncake would.
    replica_num: int | None = None
    #: How long after a put eviction passes an object by.
    soft_pin_ms: int | None = None


def parse_mooncake_options(uri: str) -> MooncakeOptions:
    """The options of ``uri``. Raises ``ConfigError`` naming option, value and where it stands."""
    parsed = parse_store_uri(uri)
    refuse_unknown_options(parsed, URI_OPTIONS)
    if parsed.path.strip("/"):
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option store: expected mooncake://host:port without a path, found {uri!r}",
        )
    values = _read_config()
    if parsed.authority:
        values["master_server_address"] = parsed.authority
    values.update(parsed.options)
    master = values.get("master_server_address", "")
    if not master:
        raise ConfigError(
            Reason.CONFIG_MISSING,
            f"option store: {uri!r} names no master; write mooncake://host:port, or "
            f"set {CONFIG_PATH_VARIABLE} to a file with master_server_address",
        )
    split_address("master_server_address", master)
    metrics = values.get("metrics", "")
    if metrics:
        split_address("metrics", metrics)
    defaults = MooncakeOptions(master_server_address=master)
    return MooncakeOptions(
        master_server_address=master,
        metadata_server=values.get("metadata_server") or defaults.metadata_server,
        protocol=values.get("protocol") or defaults.protocol,
        device_name=values.get("device_name", ""),
        local_hostname=values.get("local_hostname", ""),
        global_segment_size=_nbytes(values, "global_segment_size", defaults.global_segment_size),
        local_buffer_size=_nbytes(values, "local_buffer_size", defaults.local_buffer_size),
        metrics=metrics,
        put_session_limit_ms=(
            parse_whole_number("put_session_limit_ms", values["put_session_limit_ms"])
            if "put_session_limit_ms" in values
            else defaults.put_session_limit_ms
        ),
        readonly=bool(_switch(values, "readonly")),
        preferred_segment=_preferred_segment(values),
        prefer_alloc_in_same_node=_switch(values, "prefer_alloc_in_same_node"),
        replica_num=_whole_number(values, "replica_num"),
        soft_pin_ms=_whole_number(values, "soft_pin_ms"),
    )


def split_address(option: str, address: str) -> tuple[str, int]:
    """Host and port. Raises ``ConfigError`` naming ``option`` where it isn't both."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(
            Reason.CONFIG_VALUE, f"option {option}: expected host:port, found {address!r}"
        )
    return host.strip("[]"), int(port)


def _nbytes(values: dict[str, str], option: str, default: int) -> int:
    return parse_nbytes(option, values[option]) if option in values else default


def _preferred_segment(values: dict[str, str]) -> str:
    text = values.get("preferred_segment", "")
    return "" if text == "false" else text


def _switch(values: dict[str, str], option: str) -> bool | None:
    return parse_flag(option, values[option]) if option in values else None


def _whole_number(values: dict[str, str], option: str) -> int | None:
    return parse_whole_number(option, values[option]) if option in values else None


def _read_config() -> dict[str, str]:
    """What Mooncake's file says, and the environment variables that come before it."""
    values = _read_config_file()
    for variable, option in _VARIABLES.items():
        if text := os.environ.get(variable, ""):
            values[option] = text
    return values


def _read_config_file() -> dict[str, str]:
    path = os.environ.get(CONFIG_PATH_VARIABLE, "")
    if not path:
        return {}
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            Reason.CONFIG_VALUE, f"{CONFIG_PATH_VARIABLE}: {path!r} can't be read: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(
            Reason.CONFIG_VALUE, f"{CONFIG_PATH_VARIABLE}: {path!r} holds no JSON object"
        )
    values: dict[str, str] = {}
    for name in ("master_server_address", *_MOONCAKE_NAMES, *_REPLICA_NAMES):
        value = content.get(name)
        if value is None:
            continue
        if isinstance(value, bool) and name in _SWITCHES:
            value = "true" if value else "false"
        elif isinstance(value, bool) or not isinstance(value, (str, int)):
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option {name} in {path!r}: expected text or a whole number, found {value!r}",
            )
        values[name] = str(value)
    return values
