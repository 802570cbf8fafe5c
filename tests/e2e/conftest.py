"""Real engines for the tests of this folder: one import of vLLM, a fresh process per engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import PROMPTS, Servers, make_models
from topology_engines import Engines

from kvformat_connector.demo.host import EngineHost


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of two checkpoints of one model, by commit."""
    return make_models(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """The process that runs engines."""
    log = tmp_path_factory.mktemp("engines") / "engines.log"
    with EngineHost(log, import_paths=[Path(__file__).parent]) as host:
        yield host


@pytest.fixture(scope="session")
def servers(host: EngineHost, models: dict[str, str]) -> Servers:
    """Runs engines on the first checkpoint unless told otherwise."""
    return Servers(host, models)


@pytest.fixture(scope="session")
def filled(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, object]:
    """A file store that a cold engine has filled with the KV of PROMPTS, and its report. Tests that
    change the store take a copy (``copy_of``)."""
    uri = f"file://{tmp_path_factory.mktemp('filled') / 'store'}"
    return uri, servers.run(store=uri, prompts=PROMPTS)


@pytest.fixture(scope="session")
def engines(host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Runs engines on checkpoints of several architectures."""
    return Engines(host, tmp_path_factory.mktemp("topologies") / "models")


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URI of an empty file store."""
    return f"file://{tmp_path / 'store'}"
