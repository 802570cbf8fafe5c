"""The demo's exit status: 0 exactly if everything that it shows holds."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvformat.stores.uri import parse_store_uri
from kvformat_connector.config import parse_options
from kvformat_connector.demo import __main__ as demo
from kvformat_connector.demo.scenes import COMMITS, Stage


@pytest.mark.parametrize(
    ("outcomes", "status"), [([True, True], 0), ([True, False], 1), ([False], 1)]
)
def test_one_statement_that_does_not_hold_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, outcomes: list[bool], status: int
) -> None:
    """Whichever scene it is in, and whatever holds besides."""
    monkeypatch.setenv("STORE", "file")
    monkeypatch.setattr(demo, "import_vllm", lambda: None)

    def play(stage: Stage, *arguments: object) -> None:
        for outcome in outcomes:
            stage.check("a statement", outcome)

    for scene in ("cold_and_warm", "other_servers", "damaged_object"):
        monkeypatch.setattr(demo, scene, lambda *arguments: None)
    monkeypatch.setattr(demo, "damaged_object", play)
    assert demo.main() == status


def test_a_store_that_the_demo_does_not_know_ends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A typing error in STORE is not taken for the default, and leaves no folder behind."""
    monkeypatch.setenv("STORE", "mooncak")
    monkeypatch.setenv("KEEP", str(tmp_path / "kept"))
    monkeypatch.setattr(demo, "import_vllm", lambda: None)
    with pytest.raises(SystemExit) as caught:
        demo.main()
    assert caught.value.code not in (0, None)
    assert not (tmp_path / "kept").exists()


def test_a_kept_demo_says_how_it_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command line, whose model and store are those that were kept."""
    monkeypatch.setenv("STORE", "file")
    monkeypatch.setenv("KEEP", str(tmp_path / "kept here"))
    monkeypatch.setattr(demo, "import_vllm", lambda: None)
    for scene in ("cold_and_warm", "other_servers", "damaged_object"):
        monkeypatch.setattr(demo, scene, lambda *arguments: None)
    demo.main()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "api_server" in line]
    words = shlex.split(line)
    model = Path(words[words.index("--model") + 1])
    assert model.parents[2] == (tmp_path / "kept here" / "hub").resolve()
    assert model.name == COMMITS[0]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    options = parse_options(transfer["kv_connector_extra_config"])
    assert parse_store_uri(options.store).path == str((tmp_path / "kept here" / "store").resolve())
