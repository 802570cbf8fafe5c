"""The connector's options, parsed once into one frozen struct.

Nothing else reads ``kv_connector_extra_config``. An option that is unknown, has a wrong type or
value, or contradicts another stops the start with a ``ConfigError`` that names it and its value.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kvformat.errors import ConfigError, Reason
from kvformat.registry import MAX_INTEGER

#: Store URI of a backend that is named the way vllm-ascend names it.
_BACKEND_URIS: Final = {"mooncake": "mooncake://", "memory": "memory://"}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an operator can say. Field names are the option names.

    ``*_blocks`` and ``*_layers`` count, ``*_bytes`` are bytes, ``*_ms`` milliseconds.
    """

    store: str = ""  #: where objects are kept: file:///path, memory://name, mooncake://
    backend: str = ""  #: vllm-ascend's name for the same; used where ``store`` is not given
    tenant: str = "default"  #: tenants share nothing
    model_name: str = ""  #: name of the model in keys; empty takes it from the engine
    model_identity: str = ""  #: revision or digest of the weights; empty finds it out
    use_layerwise: bool = True
    layerwise_prefetch_layers: int = 2  #: layers read ahead of the one that computes
    layerwise_max_transfer_blocks: int = 256  #: rows of one call to the store
    layerwise_max_transfer_bytes: int = 64 << 20  #: bytes of one call to the store
    verify: Literal["checksum", "header"] = "checksum"
    head_shards: int = 1  #: objects per block along the head axis
    layer_segments: int = 1  #: objects per block along the layer axis
    lookup_window: int = 32  #: blocks of the first lookup call; doubles while all are there
    save_decode_blocks: bool = False  #: also keep blocks that hold generated tokens
    failed_key_retry_ms: int = 30_000  #: how long a key that failed to load isn't promised


#: The least value of each option that is a number; the largest is one that arrays can hold.
_LEAST: Final = {
    "layerwise_prefetch_layers": 1,
    "layerwise_max_transfer_blocks": 1,
    "layerwise_max_transfer_bytes": 1,
    "head_shards": 1,
    "layer_segments": 1,
    "lookup_window": 1,
    "failed_key_retry_ms": 0,
}

#: Options that are named already, with the value that works and why no other does yet.
_FIXED_SO_FAR: Final[dict[str, tuple[object, str]]] = {
    "use_layerwise": (True, "loads in one piece are not built yet"),
    "verify": ("checksum", "reading the header again is for device memory, not built yet"),
    "head_shards": (1, "the connector serves tensor_parallel_size 1 only so far"),
    "layer_segments": (1, "objects are committed whole so far"),
}


def parse_options(extra_config: Mapping[str, Any]) -> Options:
    """Options from ``kv_connector_extra_config``.

    Raises:
        ConfigError: with reason ``config_unknown``, ``config_value``, ``config_conflict``,
            ``config_missing`` or ``config_unsupported``; the text names the option and its value.
    """
    known = Options.__struct_fields__
    for name in extra_config:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ConfigError(
                Reason.CONFIG_UNKNOWN,
                f"unknown option {name!r} (value {extra_config[name]!r}) in "
                f"kv_connector_extra_config; {hint}",
            )
    try:
        # strict: "2" is not a number and 1 is not a boolean; a typo must not be understood.
        options = msgspec.convert(dict(extra_config), Options, strict=True)
    except msgspec.ValidationError as error:
        name = _named_option(str(error))
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option {name!r} has the value {extra_config.get(name)!r}: {error}",
        ) from None
    _check_values(options)
    return msgspec.structs.replace(options, store=_store_uri(options))


def _named_option(text: str) -> str:
    # msgspec ends its text with "- at `$.name`".
    return text.rpartition("$.")[2].rstrip("`") if "$." in text else ""


def _check_values(options: Options) -> None:
    for name, least in _LEAST.items():
        if not least <= (value := getattr(options, name)) <= MAX_INTEGER:
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option {name!r} has the value {value!r}, expected {least} to {MAX_INTEGER}",
            )
    for name, (only, why) in _FIXED_SO_FAR.items():
        if (value := getattr(options, name)) != only:
            raise ConfigError(
                Reason.CONFIG_UNSUPPORTED,
                f"option {name!r} has the value {value!r}, only {only!r} is supported: {why}",
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
    return options.store
