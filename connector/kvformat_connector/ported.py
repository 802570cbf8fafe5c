"""Options of vllm-ascend's AscendStoreConnector, as this connector understands them.

A configuration written for it works here when ``kv_connector`` and ``kv_connector_module_path``
are changed, so every option that it may hold is known: most under their own name
(:class:`~kvformat_connector.config.Options`), one under another, the rest because they have
nothing left to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvformat.errors import ConfigError, Reason

#: Their name, ours.
_RENAMED: Final = {"save_decode_cache": "save_decode_blocks"}

#: Options without an effect here, and why.
WITHOUT_EFFECT: Final[dict[str, str]] = {
    "lookup_rpc_port": "the scheduler asks the store itself; there is no lookup server",
    "mooncake_rpc_port": "the scheduler asks the store itself; there is no lookup server",
    "load_async": "'use_layerwise' says how blocks are loaded",
    "h2d_stagger_us": "'layerwise_max_transfer_bytes' bounds what is moved at once",
    "qos_priority": "set store.comm_resource_config.qos in ASCEND_GLOBAL_RESOURCE_CONFIG",
    "layerwise_num_shared_buffers": "only the memcache backend shares buffers between layers",
    "layerwise_independent_layers": "only the memcache backend shares buffers between layers",
    "memcache_dp_init_barrier": "only the memcache backend has it",
    "prefill": "a reader finds out from the layout how a writer cut its blocks",
    "decode": "a reader finds out from the layout how a writer cut its blocks",
    "prefill_pp_size": "a reader finds out from the layout how a writer cut its blocks",
    "prefill_pp_layer_partition": "a reader finds out from the layout how a writer cut its blocks",
    "discard_partial_chunks": "only full blocks are stored",
}


def translate(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration in this connector's own options.

    Raises ``ConfigError``: ``config_conflict`` where an option is there under both names,
    ``config_unsupported`` for partial blocks.
    """
    if extra_config.get("discard_partial_chunks") is False:
        raise ConfigError(
            Reason.CONFIG_UNSUPPORTED,
            "option 'discard_partial_chunks' has the value False, only True is supported: "
            + WITHOUT_EFFECT["discard_partial_chunks"],
        )
    options = {name: value for name, value in extra_config.items() if name not in WITHOUT_EFFECT}
    for theirs, ours in _RENAMED.items():
        if theirs in options:
            value = options.pop(theirs)
            if ours in options:
                raise ConfigError(
                    Reason.CONFIG_CONFLICT,
                    f"option {theirs!r} has the value {value!r} and option {ours!r}, which means "
                    f"the same, has the value {options[ours]!r}; set one of them",
                )
            options[ours] = value
    return options


def without_effect(extra_config: Mapping[str, Any]) -> list[str]:
    """A sentence for each option that is there and does nothing."""
    return [
        f"option {name!r} (value {extra_config[name]!r}) has no effect: {why}"
        for name, why in WITHOUT_EFFECT.items()
        if name in extra_config
    ]
