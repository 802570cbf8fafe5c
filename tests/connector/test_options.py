"""Options: what an operator can say wrongly stops the start, and names the option."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvformat.errors import ConfigError, Reason
from kvformat.stores.file import FileStore
from kvformat_connector.config import Options, parse_options

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
        ({**STORE, "layerwise_max_transfer_bytes": -1}, Reason.CONFIG_VALUE, "transfer_bytes"),
        ({**STORE, "failed_key_retry_ms": -1}, Reason.CONFIG_VALUE, "failed_key_retry_ms"),
        ({**STORE, "layerwise_max_transfer_bytes": 1 << 63}, Reason.CONFIG_VALUE, "transfer_bytes"),
        ({**STORE, "failed_key_retry_ms": 10**400}, Reason.CONFIG_VALUE, "failed_key_retry_ms"),
        ({"store": "/var/cache"}, Reason.CONFIG_VALUE, "/var/cache"),
        ({"backend": "yuanrong"}, Reason.CONFIG_VALUE, "yuanrong"),
        ({}, Reason.CONFIG_MISSING, "store"),
        ({"store": "file:///a", "backend": "mooncake"}, Reason.CONFIG_CONFLICT, "mooncake"),
        ({**STORE, "use_layerwise": False}, Reason.CONFIG_UNSUPPORTED, "use_layerwise"),
        ({**STORE, "head_shards": 2}, Reason.CONFIG_UNSUPPORTED, "head_shards"),
        ({**STORE, "layer_segments": 2}, Reason.CONFIG_UNSUPPORTED, "layer_segments"),
        ({**STORE, "verify": "header"}, Reason.CONFIG_UNSUPPORTED, "verify"),
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


def test_a_vllm_ascend_backend_names_a_store() -> None:
    """The option that a vllm-ascend configuration already has is enough."""
    assert parse_options({"backend": "mooncake"}).store == "mooncake://"


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
