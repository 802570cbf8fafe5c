"""The connector's options, parsed once into one frozen struct.

Nothing else reads ``kv_connector_extra_config``. An option that is unknown, has a wrong type or
value, or contradicts another stops the start with a ``ConfigError`` that names it and its value.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlencode

import msgspec

from kvformat.errors import ConfigError, Reason
from kvformat.registry import MAX_INTEGER
from kvformat.stores.file import FileStore
from kvformat.stores.uri import is_readonly, is_text, parse_store_uri
from kvformat_connector.ported import translate
from kvformat_connector.store.mooncake_options import URI_OPTIONS

#: Store URI of a backend that is named the way vllm-ascend names it.
_BACKEND_URIS: Final = {"mooncake": "mooncake://", "memory": "memory://"}

#: More than any call moves: what a limit of 0 stands for.
NO_LIMIT: Final = 1 << 62

#: Writes one JSON line for each store call that touches a key; see :mod:`tracing`.
RANGE_DEBUG_VARIABLE: Final = "KVFORMAT_RANGE_DEBUG"


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator can say. Field names are the option names.

    ``*_blocks`` and ``*_layers`` count, ``*_bytes`` are bytes, ``*_ms`` milliseconds.
    """

    store: str = ""  #: where objects are kept: file:///path, memory://name, mooncake://
    backend: str = ""  #: vllm-ascend's name for the same; used where ``store`` is not given
    tenant: str = "default"  #: tenants share nothing
    model_name: str = ""  #: name of the model in keys; empty takes it from the engine
    model_identity: str = ""  #: revision or digest of the weights; empty finds it out
    model_identity_file: str = ""  #: a file that holds it, read again when the weights change
    use_layerwise: bool | Literal["auto"] = True
    layerwise_prefetch_layers: int | Literal["auto"] = 2  #: read ahead of the one that computes
    layerwise_max_transfer_blocks: int = 1024  #: rows of one call to the store; 0: no limit
    layerwise_max_transfer_bytes: int = 64 << 20  #: bytes of one call to the store; 0: no limit
    layerwise_session_blocks: int = 256  #: objects opened in one go; 0: no limit
    #: every layer by its checksum, or objects by headers that are read again
    verify: Literal["checksum", "header"] = "checksum"
    head_shards: int = 1  #: objects per block along the head axis, at least one a rank
    #: objects per block along the layer axis, or how many layers each of them has
    layer_segments: int | list[int] = 1
    lookup_window: int = 32  #: blocks of the first lookup call; doubles while all are there
    producer_is_to_load: bool = True  #: whether a kv_producer loads from the store
    consumer_is_to_load: bool = True  #: whether a kv_consumer loads from the store
    consumer_is_to_put: bool = False  #: whether a kv_consumer saves to the store
    #: whether each chunk of a prompt loads anew what the chunks before it have stored
    chunk_prefix_reload: bool = False
    overlap_saves: bool | Literal["auto"] = "auto"  #: store layers while others are computed
    save_decode_blocks: bool = False  #: also keep blocks that hold generated tokens
    failed_key_retry_ms: int = 30_000  #: how long a key that failed to load isn't promised
    transfer_deadline_ms: int = 5000  #: a call to the store that takes longer is given up
    breaker_retry_ms: int = 5000  #: how often a store that is left alone is tried again
    staging_bytes: int = 512 << 20  #: host memory that transfers go through
    replica_num: int | None = None  #: copies of each object (Mooncake)
    preferred_segment: bool | str | None = None  #: where the first copy goes; true: this process
    prefer_alloc_in_same_node: bool | None = None  #: all copies on one node (Mooncake)
    soft_pin_ms: int | None = None  #: how long eviction passes an object by (Mooncake)


#: The least value of each option that is a number; the largest is one that arrays can hold.
_LEAST: Final = {
    "layerwise_prefetch_layers": 1,
    "layerwise_max_transfer_blocks": 0,
    "layerwise_max_transfer_bytes": 0,
    "layerwise_session_blocks": 0,
    "head_shards": 1,
    "layer_segments": 1,
    "lookup_window": 1,
    "failed_key_retry_ms": 0,
    "transfer_deadline_ms": 1,
    "breaker_retry_ms": 1,
    "staging_bytes": 1,
    "replica_num": 1,
    "soft_pin_ms": 1,
}

#: Times that threads wait, which an operating system must be able to count: a day at most.
_WAITS: Final = ("transfer_deadline_ms", "breaker_retry_ms", "failed_key_retry_ms")
_MAX_MS: Final = 86_400_000

_KINDS: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    str: "a text",
    list[int]: "a list of whole numbers",
}

#: Options of stores, by how a URI begins: they stand in the URI.
_OF_STORES: Final = {
    "file:///path": FileStore.options,
    "mooncake://host:port": URI_OPTIONS,
}

#: Texts that mean nothing when they are empty.
_NEVER_EMPTY: Final = ("tenant", "preferred_segment")

_UNLIMITED_AT_ZERO: Final = (
    "layerwise_max_transfer_blocks",
    "layerwise_max_transfer_bytes",
    "layerwise_session_blocks",
)

#: Where Mooncake keeps an object: told to the store, in its URI.
_REPLICA_OPTIONS: Final = (
    "replica_num",
    "preferred_segment",
    "prefer_alloc_in_same_node",
    "soft_pin_ms",
)


def parse_options(extra_config: Mapping[str, Any]) -> Options:
    """Options from ``kv_connector_extra_config``.

    Raises:
        ConfigError: with reason ``config_unknown``, ``config_value``, ``config_conflict``,
            ``config_missing`` or ``config_unsupported``; the text names the option and its value.
    """
    given = translate(extra_config)
    known = Options.__struct_fields__
    for name in given:
        if name not in known:
            raise ConfigError(
                Reason.CONFIG_UNKNOWN,
                f"unknown option {name!r} (value {given[name]!r}) in "
                f"kv_connector_extra_config; {_hint(str(name), given)}",
            )
    for name, value in given.items():
        if isinstance(value, str) and not is_text(value):
            raise ConfigError(
                Reason.CONFIG_VALUE, f"option {name!r} has the value {value!r}, which is no text"
            )
    try:
        # strict: "2" is not a number and 1 is not a boolean; a typo must not be understood.
        options = msgspec.convert(given, Options, strict=True)
    except msgspec.ValidationError as error:
        name = _named_option(str(error))
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option {name!r} has the value {given.get(name)!r}, expected {_expected(name)}",
        ) from None
    _check_values(options)
    return msgspec.structs.replace(
        options,
        store=_with_replica_options(_store_uri(options), options),
        **{name: NO_LIMIT for name in _UNLIMITED_AT_ZERO if not getattr(options, name)},
    )


def parse_range_debug(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``KVFORMAT_RANGE_DEBUG`` asks for a line per store call; absent means no.

    Raises ``ConfigError`` for anything but 0 and 1: a typo must not leave a trace unwritten.
    """
    value = environ.get(RANGE_DEBUG_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"environment variable {RANGE_DEBUG_VARIABLE} has the value {value!r}, expected 0 or 1",
        )
    return value == "1"


def directions(kv_role: str, options: Options) -> tuple[bool, bool]:
    """Whether a server of this role loads from the store, and whether it saves to it. Nobody saves
    to a store that is opened to be read.

    Raises ``ConfigError`` with reason ``config_conflict`` for a server that does neither.
    """
    can_save = not is_readonly(options.store)
    if kv_role == "kv_both":
        return True, can_save
    if kv_role == "kv_producer":
        # As in vllm-ascend and vLLM's own pool: prompts of a prefill server share prefixes too.
        if not options.producer_is_to_load and not can_save:
            raise ConfigError(
                Reason.CONFIG_CONFLICT,
                f"kv_role is {kv_role!r}, option 'producer_is_to_load' has the value False and the "
                f"store {options.store!r} is readonly: nothing is left to do",
            )
        return options.producer_is_to_load, can_save
    may_save = options.consumer_is_to_put and can_save
    if not options.consumer_is_to_load and not may_save:
        raise ConfigError(
            Reason.CONFIG_CONFLICT,
            f"kv_role is {kv_role!r}, option 'consumer_is_to_load' has the value False and "
            + (
                f"the store {options.store!r} is readonly"
                if options.consumer_is_to_put
                else "option 'consumer_is_to_put' has the value False"
            )
            + ": nothing is left to do",
        )
    return options.consumer_is_to_load, may_save


def _named_option(text: str) -> str:
    # msgspec ends its text with "- at `$.name`", or "$.name[0]" inside of a list.
    return text.rpartition("$.")[2].rstrip("`").partition("[")[0] if "$." in text else ""


def _expected(name: str) -> str:
    """What an option may be, in words."""
    hint = get_type_hints(Options)[name]
    words: list[str] = []
    for part in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        if get_origin(part) is Literal:
            words += map(repr, get_args(part))
        elif part in _KINDS:
            words.append(_KINDS[part])
    return " or ".join(words)


def _hint(name: str, given: Mapping[str, Any]) -> str:
    """What somebody who gave an option that isn't there has probably meant."""
    uris = [uri for uri, options in _OF_STORES.items() if name in options]
    if uris:
        scheme = str(given.get("store") or given.get("backend") or "").partition(":")[0]
        uri = next((uri for uri in uris if uri.startswith(f"{scheme}:")), uris[0])
        return f"it is one of the store: put it into option 'store', as in {uri}?{name}=..."
    return closest(name, Options.__struct_fields__)


def closest(name: str, known: Sequence[str]) -> str:
    """What somebody who wrote ``name`` may have meant."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _check_values(options: Options) -> None:
    for name, least in _LEAST.items():
        value = getattr(options, name)
        most = _MAX_MS if name in _WAITS else MAX_INTEGER
        if isinstance(value, int) and not least <= value <= most:
            bound = f"{least} to {most}" if name in _WAITS or value > most else f"at least {least}"
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option {name!r} has the value {value!r}, expected {bound}",
            )
    if isinstance(options.layer_segments, list) and min(options.layer_segments, default=0) < 1:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option 'layer_segments' has the value {options.layer_segments!r}, expected at least "
            "1 layer in each",
        )
    for name in _NEVER_EMPTY:
        if getattr(options, name) == "":
            raise ConfigError(
                Reason.CONFIG_VALUE, f"option {name!r} has the value '', expected a text"
            )
    if options.model_identity and options.model_identity_file:
        raise ConfigError(
            Reason.CONFIG_CONFLICT,
            f"option 'model_identity' has the value {options.model_identity!r} and option "
            f"'model_identity_file' has the value {options.model_identity_file!r}; set one of them",
        )
    if options.chunk_prefix_reload and options.use_layerwise is False:
        raise ConfigError(
            Reason.CONFIG_CONFLICT,
            "option 'chunk_prefix_reload' has the value True and option 'use_layerwise' has the "
            "value False: a prefix is loaded again layer by layer",
        )


def _store_uri(options: Options) -> str:
    named = _BACKEND_URIS.get(options.backend)
    if options.backend and named is None:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option 'backend' has the value {options.backend!r}, expected one of "
            f"{', '.join(sorted(_BACKEND_URIS))}; other stores are named by option 'store'",
        )
    if not options.store:
        if named is None:
            raise ConfigError(
                Reason.CONFIG_MISSING,
                "no store: set option 'store' to file:///path or mooncake://, or option 'backend' "
                f"to {' or '.join(sorted(_BACKEND_URIS))}",
            )
        return named
    scheme, separator, _ = options.store.partition("://")
    if not separator or not scheme:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option 'store' has the value {options.store!r}, expected scheme://..., for example "
            "file:///var/cache/kv",
        )
    if named is not None and scheme != named.partition("://")[0]:
        raise ConfigError(
            Reason.CONFIG_CONFLICT,
            f"option 'store' is {options.store!r} but option 'backend' is {options.backend!r}; "
            "set one of them",
        )
    parse_store_uri(options.store)
    return options.store


def _with_replica_options(uri: str, options: Options) -> str:
    """``uri`` with the replica options that were given; its store refuses one given twice."""
    given = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name in _REPLICA_OPTIONS
        if (value := getattr(options, name)) is not None
    }
    if not given:
        return uri
    if not uri.startswith("mooncake://"):
        name = next(iter(given))
        raise ConfigError(
            Reason.CONFIG_CONFLICT,
            f"option {name!r} has the value {getattr(options, name)!r}, but only a mooncake:// "
            f"store places replicas; the store is {uri!r}",
        )
    return f"{uri}{'&' if '?' in uri else '?'}{urlencode(given)}"
