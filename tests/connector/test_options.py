"""Options: what an operator can say wrongly stops the start, and names the option."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from simulated_engine import make_layout

from kvformat.errors import ConfigError, Reason
from kvformat.stores.file import FileStore
from kvformat_connector.config import NO_LIMIT, Options, directions, parse_options
from kvformat_connector.engine import Ranks
from kvformat_connector.loadpolicy import load_policy
from kvformat_connector.ported import without_effect
from kvformat_connector.store.mooncake_options import parse_mooncake_options

STORE = {"store": "memory://"}


@pytest.mark.parametrize(
    ("options", "reason", "named"),
    [
        ({**STORE, "stor": "x"}, Reason.CONFIG_UNKNOWN, "stor"),
        ({**STORE, "prefetch": 3}, Reason.CONFIG_UNKNOWN, "prefetch"),
        ({**STORE, "layerwise_prefetch_layers": "2"}, Reason.CONFIG_VALUE, "layerwise_prefetch"),
        ({**STORE, "use_layerwise": 1}, Reason.CONFIG_VALUE, "use_layerwise"),
        ({**STORE, "tenant": 7}, Reason.CONFIG_VALUE, "tenant"),
        ({**STORE, "verify": "never"}, Reason.CONFIG_VALUE, "verify"),
        ({**STORE, "lookup_window": 0}, Reason.CONFIG_VALUE, "lookup_window"),
        ({**STORE, "layerwise_max_transfer_blocks": True}, Reason.CONFIG_VALUE, "transfer_blocks"),
        ({**STORE, "layerwise_prefetch_layers": "many"}, Reason.CONFIG_VALUE, "prefetch_layers"),
        ({**STORE, "layerwise_prefetch_layers": 0}, Reason.CONFIG_VALUE, "prefetch_layers"),
        ({**STORE, "tenant": ""}, Reason.CONFIG_VALUE, "tenant"),
        ({**STORE, "replica_num": 2}, Reason.CONFIG_CONFLICT, "replica_num"),
        ({**STORE, "preferred_segment": True}, Reason.CONFIG_CONFLICT, "preferred_segment"),
        ({"backend": "mooncake", "replica_num": 0}, Reason.CONFIG_VALUE, "replica_num"),
        ({"backend": "mooncake", "soft_pin_ms": "1"}, Reason.CONFIG_VALUE, "soft_pin_ms"),
        ({"backend": "mooncake", "prefer_alloc_in_same_node": 1}, Reason.CONFIG_VALUE, "same_node"),
        ({"backend": "memcache"}, Reason.CONFIG_VALUE, "memcache"),
        ({**STORE, "discard_partial_chunks": False}, Reason.CONFIG_UNSUPPORTED, "partial_chunks"),
        (
            {**STORE, "save_decode_cache": True, "save_decode_blocks": False},
            Reason.CONFIG_CONFLICT,
            "save_decode_cache",
        ),
        ({**STORE, "layerwise_max_transfer_bytes": -1}, Reason.CONFIG_VALUE, "transfer_bytes"),
        ({**STORE, "failed_key_retry_ms": -1}, Reason.CONFIG_VALUE, "failed_key_retry_ms"),
        ({**STORE, "layerwise_max_transfer_bytes": 1 << 63}, Reason.CONFIG_VALUE, "transfer_bytes"),
        ({**STORE, "failed_key_retry_ms": 10**400}, Reason.CONFIG_VALUE, "failed_key_retry_ms"),
        ({**STORE, "transfer_deadline_ms": 1 << 53}, Reason.CONFIG_VALUE, "transfer_deadline_ms"),
        ({**STORE, "transfer_deadline_ms": 86_400_001}, Reason.CONFIG_VALUE, "86400000"),
        ({**STORE, "tenant": "\ud800"}, Reason.CONFIG_VALUE, "tenant"),
        ({**STORE, "use_layerwise": "\ud800"}, Reason.CONFIG_VALUE, "use_layerwise"),
        ({**STORE, "lookup_window": "\ud800"}, Reason.CONFIG_VALUE, "lookup_window"),
        ({"store": "file:///\ud800"}, Reason.CONFIG_VALUE, "store"),
        ({"store": "/var/cache"}, Reason.CONFIG_VALUE, "/var/cache"),
        ({"backend": "yuanrong"}, Reason.CONFIG_VALUE, "yuanrong"),
        ({}, Reason.CONFIG_MISSING, "store"),
        ({"store": "file:///a", "backend": "mooncake"}, Reason.CONFIG_CONFLICT, "mooncake"),
        ({**STORE, "use_layerwise": "never"}, Reason.CONFIG_VALUE, "use_layerwise"),
        (
            {**STORE, "model_identity": "v1", "model_identity_file": "/run/v"},
            Reason.CONFIG_CONFLICT,
            "model_identity_file",
        ),
        ({**STORE, "layer_segments": [4, 0]}, Reason.CONFIG_VALUE, "layer_segments"),
        ({**STORE, "layer_segments": []}, Reason.CONFIG_VALUE, "layer_segments"),
        ({**STORE, "preferred_segment": ""}, Reason.CONFIG_VALUE, "preferred_segment"),
        ({**STORE, "max_nbytes": "1GiB"}, Reason.CONFIG_UNKNOWN, "file:///path?max_nbytes=..."),
        (
            {"store": "mooncake://a:1", "readonly": True},
            Reason.CONFIG_UNKNOWN,
            "mooncake://host:port?readonly=...",
        ),
        ({**STORE, "lookup_window": "8"}, Reason.CONFIG_VALUE, "'8', expected a whole number"),
        ({**STORE, "lookup_window": 0}, Reason.CONFIG_VALUE, "expected at least 1"),
        (
            {**STORE, "overlap_saves": 1},
            Reason.CONFIG_VALUE,
            "1, expected true or false or 'auto'",
        ),
        ({**STORE, "Tenant": "a"}, Reason.CONFIG_UNKNOWN, "did you mean 'tenant'"),
        ({"store": "://a"}, Reason.CONFIG_VALUE, "'://a'"),
        ({"store": "file:///a?max_nbytes"}, Reason.CONFIG_VALUE, "max_nbytes"),
        (
            {**STORE, "chunk_prefix_reload": True, "use_layerwise": False},
            Reason.CONFIG_CONFLICT,
            "chunk_prefix_reload",
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    options: dict[str, object], reason: Reason, named: str
) -> None:
    """Every kind of wrong option has its reason, and the text names option or value."""
    with pytest.raises(ConfigError) as caught:
        parse_options(options)
    assert caught.value.reason is reason
    assert named in caught.value.detail


@pytest.mark.parametrize("name", Options.__struct_fields__)
@pytest.mark.parametrize("value", [{"a": 1}, None, 1.5, [[]]])
def test_every_option_refuses_what_is_not_its_type(name: str, value: object) -> None:
    """None of them understands another type, and the text names the option and the value."""
    if value is None and Options.__annotations__[name].endswith("None"):
        assert getattr(parse_options({**STORE, name: value}), name) is None
        return
    with pytest.raises(ConfigError) as caught:
        parse_options({**STORE, name: value})
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert f"option {name!r} has the value {value!r}" in caught.value.detail


NUMBERS = [name for name in Options.__struct_fields__ if "int" in Options.__annotations__[name]]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 1 << 53, -(1 << 70)])
def test_every_number_has_bounds(name: str, value: int) -> None:
    """No option takes a number below zero, or one that arrays and manifests can't hold."""
    with pytest.raises(ConfigError) as caught:
        parse_options({"backend": "mooncake", name: value})
    assert caught.value.reason is Reason.CONFIG_VALUE
    assert f"option {name!r} has the value {value!r}" in caught.value.detail


def test_options_are_parsed_once_into_a_frozen_struct() -> None:
    """Given values arrive, the others have defaults, and nobody can change them later."""
    options = parse_options({"store": "file:///a", "tenant": "a", "layerwise_prefetch_layers": 4})
    assert (options.store, options.tenant, options.layerwise_prefetch_layers) == (
        "file:///a",
        "a",
        4,
    )
    assert options.layerwise_max_transfer_blocks == Options().layerwise_max_transfer_blocks
    with pytest.raises(AttributeError):
        options.tenant = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("use_layerwise", "num_layers", "nbytes", "expected"),
    [
        (True, 1, 1, "layerwise"),
        (True, 8, 1 << 40, "layerwise"),
        (False, 8, 1 << 40, "bulk"),
        ("auto", 3, 1 << 40, "bulk"),
        ("auto", 4, (4 << 20) - 1, "bulk"),
        ("auto", 4, 4 << 20, "layerwise"),
    ],
)
def test_how_requests_are_loaded(
    use_layerwise: object, num_layers: int, nbytes: int, expected: str
) -> None:
    """As the option says; ``auto`` takes bulk loads where layers are few, and for small loads."""
    options = parse_options({**STORE, "use_layerwise": use_layerwise})
    policy = load_policy(make_layout(num_layers=num_layers), Ranks(), options)
    assert policy.mode(nbytes) == expected


def test_a_prefix_is_reloaded_only_where_layers_can_be_waited_for() -> None:
    """A pipeline with the option doesn't start; otherwise every load is layer by layer with it."""
    options = parse_options({**STORE, "use_layerwise": "auto", "chunk_prefix_reload": True})
    assert load_policy(make_layout(), Ranks(), options).mode(1) == "layerwise"
    with pytest.raises(ConfigError) as caught:
        load_policy(make_layout(), Ranks(num_stages=2), options)
    assert caught.value.reason is Reason.CONFIG_UNSUPPORTED
    assert "chunk_prefix_reload" in caught.value.detail


def test_a_vllm_ascend_backend_names_a_store() -> None:
    """The option that a vllm-ascend configuration already has is enough."""
    assert parse_options({"backend": "mooncake"}).store == "mooncake://"


def test_replica_options_reach_the_store_in_its_uri() -> None:
    """What Mooncake does with copies is an option here and part of the URI there, given once."""
    options = {
        "backend": "mooncake",
        "replica_num": 2,
        "preferred_segment": True,
        "prefer_alloc_in_same_node": False,
        "soft_pin_ms": 60_000,
    }
    uri = parse_options(options).store
    found = parse_mooncake_options(uri.replace("://", "://master:1"))
    assert (
        found.replica_num,
        found.preferred_segment,
        found.prefer_alloc_in_same_node,
        found.soft_pin_ms,
    ) == (2, "true", False, 60_000)
    twice = {"store": "mooncake://master:1?replica_num=3", "replica_num": 2}
    with pytest.raises(ConfigError) as caught:
        parse_mooncake_options(parse_options(twice).store)
    assert caught.value.reason is Reason.CONFIG_CONFLICT


def test_a_transfer_limit_of_zero_is_no_limit() -> None:
    """As in vllm-ascend, whose default it is."""
    options = parse_options({**STORE, "layerwise_max_transfer_blocks": 0})
    assert options.layerwise_max_transfer_blocks == NO_LIMIT
    assert options.layerwise_max_transfer_bytes == Options().layerwise_max_transfer_bytes


#: Options that a configuration for vllm-ascend's AscendStoreConnector may hold.
ASCEND = {
    "backend": "mooncake",
    "use_layerwise": True,
    "layerwise_prefetch_layers": 1,
    "layerwise_max_transfer_blocks": 64,
    "layerwise_max_transfer_bytes": 16777216,
    "lookup_rpc_port": "0",
    "mooncake_rpc_port": 0,
    "load_async": False,
    "consumer_is_to_load": True,
    "consumer_is_to_put": True,
    "save_decode_cache": True,
    "discard_partial_chunks": True,
    "h2d_stagger_us": 0,
    "qos_priority": 3,
    "prefill": {"tp_size": 2, "dp_size": 1},
    "decode": {"tp_size": 2, "dp_size": 1},
    "prefill_pp_size": 1,
    "layerwise_num_shared_buffers": 3,
}


def test_a_vllm_ascend_configuration_is_understood_whole() -> None:
    """Every option that such a configuration may hold is taken, renamed, or named as having no
    effect: nothing of it stops the start, nothing is passed over in silence."""
    options = parse_options(ASCEND)
    assert options.layerwise_max_transfer_blocks == 64
    assert options.save_decode_blocks is True
    assert options.consumer_is_to_put is True
    told = "\n".join(without_effect(ASCEND))
    for name in ASCEND:
        taken = name in Options.__struct_fields__ or name == "save_decode_cache"
        assert (f"option {name!r} (value" in told) != taken, name


@pytest.mark.parametrize(
    ("role", "options", "expected"),
    [
        ("kv_both", {}, (True, True)),
        ("kv_producer", {}, (True, True)),
        ("kv_producer", {"producer_is_to_load": False}, (False, True)),
        ("kv_consumer", {}, (True, False)),
        ("kv_consumer", {"consumer_is_to_put": True}, (True, True)),
        ("kv_consumer", {"consumer_is_to_load": False, "consumer_is_to_put": True}, (False, True)),
    ],
)
def test_roles_load_and_save(
    role: str, options: dict[str, object], expected: tuple[bool, bool]
) -> None:
    """What a role does, and how a consumer's options change it."""
    assert directions(role, parse_options({**STORE, **options})) == expected


@pytest.mark.parametrize(
    ("role", "options"),
    [("kv_both", {}), ("kv_producer", {}), ("kv_consumer", {"consumer_is_to_put": True})],
)
def test_nobody_saves_to_a_store_that_is_only_read(role: str, options: dict[str, object]) -> None:
    """A put that is refused would count as a failure of the store, and end its loads as well."""
    given = {"store": "file:///kv?readonly=true", **options}
    assert directions(role, parse_options(given)) == (True, False)


@pytest.mark.parametrize(
    ("role", "options"),
    [
        ("kv_producer", {"producer_is_to_load": False}),
        ("kv_consumer", {"consumer_is_to_load": False, "consumer_is_to_put": True}),
    ],
)
def test_a_store_that_is_only_read_and_not_loaded_from_is_refused(
    role: str, options: dict[str, object]
) -> None:
    """Contradictory: it would neither load nor save."""
    with pytest.raises(ConfigError) as caught:
        directions(role, parse_options({"store": "file:///kv?readonly=true", **options}))
    assert caught.value.reason is Reason.CONFIG_CONFLICT


def test_a_consumer_with_nothing_to_do_is_refused() -> None:
    """Contradictory: it would neither load nor save."""
    with pytest.raises(ConfigError) as caught:
        directions("kv_consumer", parse_options({**STORE, "consumer_is_to_load": False}))
    assert caught.value.reason is Reason.CONFIG_CONFLICT
    assert "consumer_is_to_load" in caught.value.detail


def listed_options(kind: str) -> list[tuple[str, str]]:
    """Name and second column of each row in the guide's table of options of this kind."""
    readme = Path(__file__).parents[2] / "connector" / "README.md"
    section = readme.read_text().partition("## Options")[2].partition("\n## ")[0]
    connector, _, store = section.partition("\n### Of the store")
    rows = {"connector": connector, "store": store}[kind].splitlines()
    cells = [row.split("|") for row in rows if row.startswith("| `")]
    return [(row[1].strip(" `"), row[2].strip(" `")) for row in cells]


def test_the_readme_lists_every_option() -> None:
    """No option is undocumented, none is documented that doesn't exist."""
    listed = [name for name, _ in listed_options("connector")]
    assert listed == [field.name for field in msgspec.structs.fields(Options)]


def test_the_readme_lists_every_option_of_the_file_store() -> None:
    """The same for what follows the URI of the default store."""
    listed = [name for name, scheme in listed_options("store") if scheme == "file"]
    assert listed == list(FileStore.options)
