"""spec/kvformat.ksy, compiled by Kaitai's own compiler, against the vectors."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SPEC = HERE.parents[2] / "spec"
#: What the structure alone can tell; the other rules compare fields, or verify checksums.
STRUCTURAL = {"header_truncated", "header_magic", "header_version", "header_size"}
#: Vectors of H14, which counts the tables; a structure reads as many as there are.
BEYOND_STRUCTURE = {"headers-087", "headers-119"}

Fields = dict[str, Any]


def parse(objects: list[str], *options: str) -> list[Fields]:
    """What Kaitai makes of objects in hex."""
    node = shutil.which("node")
    if node is None or not (HERE / "node_modules").is_dir():
        pytest.fail(f"needs Node and `npm ci --prefix {HERE}`; `make test` installs both")
    done = subprocess.run(
        [node, HERE / "parse.js", SPEC / "kvformat.ksy", *options],
        input="".join(data + "\n" for data in objects),
        capture_output=True,
        encoding="ascii",
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(objects)
    return answers


def vectors(op: str) -> list[Fields]:
    """Every vector of one operation."""
    return [
        case
        for path in sorted((SPEC / "vectors" / "1.0").glob("*.json"))
        for case in json.loads(path.read_text("ascii"))["cases"]
        if case["op"] == op
    ]


def test_headers() -> None:
    """Every valid header of the vectors parses to the vector's fields, 64-bit ones included."""
    cases = [case for case in vectors("header.decode") if "result" in case]
    assert len(cases) > 30
    for case, found in zip(
        cases, parse([case["input"]["data"] for case in cases], "--header"), strict=True
    ):
        checksum = found.pop("header_checksum")
        end = 2 * case["result"]["header_nbytes"]
        assert checksum == case["input"]["data"][end - 16 : end], case["id"]
        assert found == {**case["result"], "ranges": None}, case["id"]


def test_structural_errors() -> None:
    """What the structure rules out doesn't parse: other magic, major, header sizes, cut headers."""
    cases = [
        case
        for case in vectors("header.decode")
        if case.get("error", {}).get("reason") in STRUCTURAL and case["id"] not in BEYOND_STRUCTURE
    ]
    assert {case["error"]["reason"] for case in cases} == STRUCTURAL
    for case, found in zip(
        cases, parse([case["input"]["data"] for case in cases], "--header"), strict=True
    ):
        assert "error" in found, (case["id"], case["about"])


def test_payloads() -> None:
    """The ranges of every valid object are, one after the other, the components of the vector."""
    cases = [case for case in vectors("object.read") if "result" in case]
    assert len(cases) > 30
    for case, found in zip(cases, parse([case["input"]["data"] for case in cases]), strict=True):
        expected: dict[tuple[int, int], str] = {}
        for component in case["result"]["components"]:
            layer = component["group"], component["layer"]
            expected[layer] = expected.get(layer, "") + component["data"]
        assert found["ranges"] == list(expected.values()), case["id"]
