"""The wheel holds two import packages, nothing named ``connector``, and works where it is alone."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution alone, as an index's users may have to."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel and its hard dependencies only."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True)
    path = folder / "bin" / "python"
    subprocess.run(
        [str(path), "-m", "pip", "install", "--quiet", str(wheel)], check=True, capture_output=True
    )
    return path


def run(python: Path, code: str) -> str:
    result = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, check=True, cwd="/"
    )
    return result.stdout.strip()


def test_top_level_names(wheel: Path) -> None:
    """Proves that no module named connector, tests or spec reaches site-packages."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kvformat",
        "kvformat_connector",
    }


def test_hard_dependencies_are_light(python: Path) -> None:
    """Proves that neither the format layer nor the connector's import pulls in an engine."""
    code = (
        "import importlib.util, kvformat, kvformat_connector;"
        "print([n for n in ('torch', 'vllm', 'mooncake', 'connector')"
        " if importlib.util.find_spec(n)])"
    )
    assert run(python, code) == "[]"


def test_typed_marker_and_entry_points_are_installed(python: Path) -> None:
    """Proves that type checkers see the types and that stores are found by scheme."""
    code = (
        "import importlib.metadata as m, importlib.resources as r;"
        "print(r.files('kvformat').joinpath('py.typed').is_file(),"
        " sorted(e.name for e in m.entry_points(group='kvformat.stores')))"
    )
    assert run(python, code) == "True ['file', 'memory', 'mooncake']"


def test_command_runs_alone(python: Path) -> None:
    """Proves that the installed command explains a key with nothing but the hard dependencies."""
    key = (
        "kvformat1/acme/llama%2F8b/000102030405060708090a0b0c0d0e0f/g0000000000000001/"
        "l0000h0000c0000/00ff"
    )
    result = subprocess.run(
        [str(python.with_name("kvformat")), "describe", key, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"llama/8b"' in result.stdout
