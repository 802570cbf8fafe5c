"""The example configurations are ones that start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvformat_connector.config import parse_options
from kvformat_connector.store.mooncake_options import parse_mooncake_options

EXAMPLES = Path(__file__).parents[2] / "connector" / "examples"
CONNECTORS = sorted(EXAMPLES.glob("vllm*.json"))


@pytest.mark.parametrize("path", CONNECTORS, ids=lambda path: path.name)
def test_an_example_has_only_options_that_exist(path: Path) -> None:
    """Each example passes the parser that a start runs, and recomputes what it can't load."""
    config = json.loads(path.read_text())
    assert config["kv_connector"] == "KVFormatConnector"
    assert config["kv_connector_module_path"] == "kvformat_connector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert parse_options(config["kv_connector_extra_config"]).store


def test_there_are_examples() -> None:
    """vLLM with a folder, with Mooncake, as prefill and as decode; vllm-ascend with Mooncake."""
    assert len(CONNECTORS) == 5


def test_the_readme_names_every_example() -> None:
    """No file of the folder is left for the reader to find."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert f"examples/{path.name}" in readme or f"[{path.name}]" in readme, path.name


def test_the_mooncake_file_is_one_that_the_store_understands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``mooncake://`` alone is what the file says."""
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(EXAMPLES / "mooncake.json"))
    assert parse_mooncake_options("mooncake://").master_server_address == "127.0.0.1:50051"
