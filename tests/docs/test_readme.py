"""What the README shows works: the library example, and each command about a pool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import kvformat
from kvformat.cli import main

README = Path(__file__).resolve().parents[2] / "README.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def test_library_example_runs() -> None:
    """Proves that the example stores an object that passes every check on the way back, and brings
    it to its block of a cache and to no other."""
    names: dict[str, Any] = {}
    exec(compile(example(), str(README), "exec"), names)
    assert names["found"].block_hash == names["block_hash"]
    assert names["data"][names["found"].header_nbytes :] == b"".join(names["payload"])
    assert names["cache"][5].tobytes() == b"".join(names["payload"])
    assert not names["cache"][4].any()


def test_library_example_would_notice_a_flipped_byte() -> None:
    """Proves that the checks of the example are real: one byte off, and it raises."""
    spoiled = example().replace(
        "data = store.get(key)", "data = bytearray(store.get(key)); data[-1] ^= 1"
    )
    with pytest.raises(kvformat.ChecksumMismatchError) as caught:
        exec(compile(spoiled, str(README), "exec"), {})
    assert caught.value.reason is kvformat.Reason.CHECKSUM_MISMATCH


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``kvformat`` line, on a pool that holds what the library example stores, finds nothing
    wrong; ``diff`` says that two layouts differ."""
    names: dict[str, Any] = {}
    uri = f"file://{tmp_path}/kv"
    exec(compile(example().replace("memory://example", uri), str(README), "exec"), names)
    layout, key = names["layout"], names["key"]
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_bytes(kvformat.manifest(layout))
    Path("b.json").write_bytes(kvformat.manifest(layout).replace(b"3f9c1e", b"3f9c1f"))
    transfer = {
        "kv_connector": "KVFormatConnector",
        "kv_connector_module_path": "kvformat_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": uri},
    }
    Path("kv-transfer.json").write_text(json.dumps(transfer))

    lines = re.findall(r"^kvformat (.*?)(?: +#.*)?$", README.read_text(), re.MULTILINE)
    assert {line.split()[0] for line in lines} == set(main.commands)
    for line in lines:
        words = [{"KEY": key, "file:///var/cache/kv": uri}.get(w, w) for w in line.split()]
        result = CliRunner().invoke(main, words)
        assert (result.exit_code, result.stderr) == (int(words[0] == "diff"), ""), line
        assert result.stdout
