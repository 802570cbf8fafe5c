"""The checks of ``kvformat doctor`` that need to know the connector, engines and stores.

Imports no vLLM, which takes ten seconds: what is installed is asked of package metadata, and the
fields of its configuration of its source. Mooncake's client is looked at for its methods, for which
there is no other way.
"""

from __future__ import annotations

import ast
import os
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec

from kvformat.cli.doctor_document import Check, failed_check
from kvformat.errors import (
    ConfigError,
    ConnectorError,
    KVFormatError,
    Reason,
    StoreUnavailableError,
)
from kvformat.stores.opening import open_store
from kvformat.stores.uri import parse_store_uri
from kvformat_connector.config import (
    RANGE_DEBUG_VARIABLE,
    Options,
    closest,
    directions,
    parse_options,
    parse_range_debug,
)
from kvformat_connector.identity import given_identity
from kvformat_connector.ported import without_effect
from kvformat_connector.starting import installed_versions, open_checked_store

_REACH_LIMIT_S: Final = 2.0
_SEED_VARIABLE: Final = "PYTHONHASHSEED"
_ROLES: Final = ("kv_both", "kv_producer", "kv_consumer")
_POLICIES: Final = ("recompute", "fail")

#: Fields of vLLM's ``KVTransferConfig`` (0.30 to 0.32), for where no vLLM is installed.
TRANSFER_FIELDS: Final = (
    "kv_connector",
    "engine_id",
    "kv_buffer_device",
    "kv_buffer_size",
    "kv_role",
    "kv_rank",
    "kv_parallel_size",
    "kv_ip",
    "kv_port",
    "kv_connector_extra_config",
    "kv_connector_module_path",
    "enable_permute_local_kv",
    "kv_load_failure_policy",
)

#: Options that must be the same on two servers for them to share an object.
SHARED_OPTIONS: Final = (
    "store",
    "tenant",
    "model_name",
    "model_identity",
    "head_shards",
    "layer_segments",
)


def check_installation() -> list[Check]:
    """Engine, Mooncake client and block hashes of this interpreter and environment."""
    versions = installed_versions()
    engines = {name: text for name, text in versions.items() if name.startswith("vllm")}
    return [
        Check("engine", "ok", ", ".join(f"{name} {text}" for name, text in engines.items()))
        if engines
        else Check("engine", "skipped", "no vLLM is installed here"),
        _mooncake(),
        _hash_seed(),
        _range_debug(),
    ]


def check_config(path: str, document: object) -> list[Check]:
    """One ``--kv-transfer-config``: what a start would refuse, and what it would warn of."""
    name = f"config {path}"
    if not isinstance(document, Mapping):
        return [Check(name, "failed", "it holds no JSON object", reason="config_value")]
    refused = [
        *_unknown_fields(name, document),
        *_wrong_choices(name, document),
        *_connector_names(name, document),
    ]
    try:
        options = parse_options(_extra(document))
        role = document.get("kv_role")
        if role not in _ROLES:
            return refused
        may_load, may_save = directions(str(role), options)
        given_identity(options)
    except KVFormatError as error:
        return [*refused, failed_check(name, error)]
    does = " and ".join(
        word for word, is_done in (("loads", may_load), ("saves", may_save)) if is_done
    )
    return [
        *refused,
        Check(name, "ok", f"{does}, store {options.store}, tenant {options.tenant}"),
        *(Check(name, "notice", sentence) for sentence in without_effect(_extra(document))),
        *_failure_policy(name, document),
    ]


def option_differences(a: object, b: object) -> list[tuple[str, str, str]] | None:
    """Options of two configurations that keep them from sharing: name and both values.

    None where one of them can't be understood; its own check says why.
    """
    try:
        first, second = _options_of(a), _options_of(b)
    except KVFormatError:
        return None
    if first is None or second is None:
        return None
    return [
        (name, str(ours), str(theirs))
        for name in SHARED_OPTIONS
        for ours, theirs in [(_shared_value(first, name), _shared_value(second, name))]
        if ours != theirs
    ]


def _shared_value(options: Options, name: str) -> object:
    if name == "store":
        return _place(options.store)
    if name != "model_identity":
        return getattr(options, name)
    try:
        return given_identity(options)
    except KVFormatError:  # a file of another machine
        return f"what {options.model_identity_file} says"


def _place(uri: str) -> str:
    """Where a store keeps its objects. Its options say how a server uses it, which may differ."""
    parsed = parse_store_uri(uri)
    if parsed.scheme == "mooncake":
        return f"mooncake://{parsed.authority or _configured_master(uri)}".lower()
    path = os.path.normpath(f"/{parsed.path.lstrip('/')}") if parsed.path else ""
    return f"{parsed.scheme}://{parsed.authority.lower()}{path}"


def _configured_master(uri: str) -> str:
    from kvformat_connector.store.mooncake_options import parse_mooncake_options

    try:
        return parse_mooncake_options(uri).master_server_address
    except KVFormatError:  # the check of the store says why
        return ""


def store_of(document: object) -> str | None:
    """The store of a configuration, or None where it can't be understood."""
    try:
        options = _options_of(document)
    except KVFormatError:
        return None
    return None if options is None else options.store


def check_store(uri: str) -> list[Check]:
    """Ports, and an object that goes in, comes back and is removed."""
    try:
        parsed = parse_store_uri(uri)
    except KVFormatError as error:
        return [failed_check("store", error)]
    makes_folder = parsed.scheme == "file" and parsed.options.get("readonly") != "true"
    if makes_folder and not os.path.isdir(parsed.path):
        # Opening it would make the folder, and who only asks must not leave one behind.
        return [_missing_folder(uri, parsed.path)]
    checks = list(_ports(uri))
    if any(check.status in ("failed", "unreachable") for check in checks):
        return checks
    try:
        store, had_room = open_checked_store(uri, "doctor")
    except KVFormatError as error:
        return [*checks, failed_check("store", error)]
    store.close()
    if not had_room:
        text = f"{uri}: no room for a test object: it is full, or nobody lends it memory"
        return [*checks, Check("store", "notice", text)]
    return [*checks, Check("store", "ok", f"{uri}: put, get, compare and remove work")]


def _missing_folder(uri: str, path: str) -> Check:
    """Whether a server could make a folder that isn't there."""
    try:
        open_store(uri, readonly=True).close()
    except ConfigError as error:
        return failed_check("store", error)
    except KVFormatError:  # it isn't there, or no folder
        pass
    found = path
    while not os.path.lexists(found):
        found = os.path.dirname(found)
    if os.path.isdir(found) and os.access(found, os.W_OK | os.X_OK):
        return Check("store", "skipped", f"{uri}: there is no such folder; a server makes it")
    why = "can't be written to" if os.path.isdir(found) else "is no folder"
    return failed_check(
        "store",
        StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: folder {path!r} isn't there and can't be made: {found!r} {why}",
        ),
    )


def _mooncake() -> Check:
    from kvformat_connector.store.mooncake_client import find_versions, missing_session_methods

    try:
        versions = find_versions("")
    except ConnectorError:
        return Check("mooncake client", "skipped", "no Mooncake is installed here")
    name = f"{versions.distribution} {versions.version}"
    try:
        missing = missing_session_methods()
    except ImportError as error:
        return Check(
            "mooncake client",
            "failed",
            f"{name} can't be imported: {error}",
            reason="store_unavailable",
        )
    if missing:
        return Check(
            "mooncake client",
            "failed",
            f"{name} lacks {', '.join(missing)}",
            "Install 0.3.13.post1 or later.",
            "store_unsupported",
        )
    return Check("mooncake client", "ok", f"{name} with all session methods")


def _hash_seed() -> Check:
    seed = os.environ.get(_SEED_VARIABLE)
    if seed is None:
        return Check(
            "block hashes",
            "ok",
            f"{_SEED_VARIABLE} is not set: vLLM's sha256 hashes agree everywhere, its xxhash ones "
            "with no other process",
        )
    return Check(
        "block hashes",
        "notice",
        f"{_SEED_VARIABLE} is {seed!r}",
        f"Every server that is to share needs {_SEED_VARIABLE}={seed}.",
    )


def _range_debug() -> Check:
    try:
        is_on = parse_range_debug()
    except KVFormatError as error:
        return failed_check("trace", error)
    if is_on:
        return Check(
            "trace",
            "notice",
            f"{RANGE_DEBUG_VARIABLE} is 1: every store call writes a line",
            f"Unset {RANGE_DEBUG_VARIABLE} where speed matters.",
        )
    return Check("trace", "ok", "off")


def _connector_names(name: str, document: Mapping[str, Any]) -> Sequence[Check]:
    expected = {
        "kv_connector": "KVFormatConnector",
        "kv_connector_module_path": "kvformat_connector",
    }
    return [
        Check(
            name,
            "failed",
            f"{field} is {document.get(field)!r}, expected {value!r}",
            reason="config_value",
        )
        for field, value in expected.items()
        if document.get(field) != value
    ]


def _unknown_fields(name: str, document: Mapping[str, Any]) -> Sequence[Check]:
    """What vLLM refuses at its command line, before it asks the connector."""
    known = transfer_fields()
    found: list[Check] = []
    for field in document:
        if field not in known:
            hint = closest(str(field), known)
            error = ConfigError(
                Reason.CONFIG_UNKNOWN,
                f"vLLM has no field {field!r} in --kv-transfer-config; {hint}",
            )
            found.append(failed_check(name, error))
    return found


def transfer_fields() -> Sequence[str]:
    """Those of the vLLM that is installed here, else of the versions that are supported."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return TRANSFER_FIELDS
    source = Path(spec.origin).with_name("config") / "kv_transfer.py"
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return TRANSFER_FIELDS
    found = [
        line.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "KVTransferConfig"
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]
    return found or TRANSFER_FIELDS


def _wrong_choices(name: str, document: Mapping[str, Any]) -> Sequence[Check]:
    choices = (
        ("kv_role", document.get("kv_role"), _ROLES),
        ("kv_load_failure_policy", document.get("kv_load_failure_policy", "fail"), _POLICIES),
    )
    return [
        Check(
            name,
            "failed",
            f"{field} is {value!r}, expected one of {', '.join(expected)}",
            reason=Reason.CONFIG_VALUE.value,
        )
        for field, value, expected in choices
        if value not in expected
    ]


def _failure_policy(name: str, document: Mapping[str, Any]) -> Sequence[Check]:
    if document.get("kv_load_failure_policy", "fail") != "fail":
        return []
    return [
        Check(
            name,
            "notice",
            "kv_load_failure_policy is 'fail': a request whose KV can't be loaded ends with an "
            "error",
            "Set it to 'recompute'.",
        )
    ]


def _extra(document: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = document.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}


def _options_of(document: object) -> Options | None:
    return parse_options(_extra(document)) if isinstance(document, Mapping) else None


def _ports(uri: str) -> Sequence[Check]:
    if not uri.startswith("mooncake://"):
        return []
    from kvformat_connector.store.mooncake_options import parse_mooncake_options

    try:
        options = msgspec.structs.asdict(parse_mooncake_options(uri))
    except KVFormatError as error:
        return [failed_check("store", error)]
    return [
        _port(what, options[field])
        for what, field in (("master port", "master_server_address"), ("metrics port", "metrics"))
        if options[field]
    ]


def _port(what: str, address: str) -> Check:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_LIMIT_S).close()
    except OSError as error:
        return Check(what, "unreachable", f"{address}: {error}", reason="store_unavailable")
    return Check(what, "ok", f"{address} takes connections")
