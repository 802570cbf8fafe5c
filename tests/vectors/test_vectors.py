"""The Python library against the released vectors, in this process and as a command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvformat.errors import Reason
from tests.vectors import run
from tests.vectors.adapter import CLASSES, OPERATIONS, answer

ROOT = Path(__file__).parents[2]
CASES = run.load()
#: Codes of stores, peers and options: no rule of the format uses them.
LIBRARY_CODES = ("store_", "handshake_", "transfer_", "config_")


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_vector(case: run.Fields) -> None:
    """The library gives the result or the reason code of every vector."""
    assert run.problem(case, answer(run.request(case))) is None


def test_contract() -> None:
    """The contract's text names the classes and operations that there are, and no others."""
    text = (ROOT / "spec" / "CONFORMANCE.md").read_text("utf-8")
    assert tuple(re.findall(r"^\| `(\w+)` +\| ", text, re.MULTILINE)[: len(CLASSES)]) == CLASSES
    named = {
        operation
        for line in re.findall(r"^\* (`.*?) \{", text, re.MULTILINE)
        for operation in re.findall(r"`(\w+\.\w+)`", line)
    }
    assert named == OPERATIONS.keys() - {"hello"}
    assert {case["op"] for case in CASES} == named


def test_command() -> None:
    """The contract works between processes, for an implementation that is a command."""
    asked = [{"id": "hello", "op": "hello", "input": {}}, *map(run.request, CASES[::25])]
    asked.append({"id": "x", "op": "no.such", "input": {}})
    done = subprocess.run(
        [sys.executable, "-m", "tests.vectors.adapter"],
        input="".join(json.dumps(line) + "\n" for line in asked),
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        check=True,
    )
    hello, *answers, unknown = map(json.loads, done.stdout.splitlines())
    assert hello["result"]["format"] == "1.0"
    assert unknown == {"id": "x", "unsupported": True}
    assert [run.problem(c, a) for c, a in zip(CASES[::25], answers, strict=True)] == [
        None for _ in answers
    ]


def test_frozen() -> None:
    """The generator gives the released files byte by byte."""
    done = subprocess.run(
        [sys.executable, ROOT / "spec" / "vectors" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_generator_is_independent() -> None:
    """No part of the generator imports the library, so its expected values prove something."""
    sources = list((ROOT / "spec" / "vectors").glob("*.py"))
    assert len(sources) > 5
    for source in sources:
        for line in source.read_text().splitlines():
            assert not (line.lstrip().startswith(("import", "from")) and "kvformat" in line), source


def test_extent() -> None:
    """Ids are unique, each reason code of the format occurs, a third of the cases are errors."""
    assert len({case["id"] for case in CASES}) == len(CASES) >= 100
    reasons = Counter(case["error"]["reason"] for case in CASES if "error" in case)
    assert 3 * reasons.total() >= len(CASES)
    of_format = {r.value for r in Reason if not r.value.startswith(LIBRARY_CODES)}
    assert set(reasons) == of_format


@pytest.mark.parametrize(
    "spoil",
    [
        lambda answer: {**answer, "id": "another"},
        lambda answer: {"id": answer["id"], "unsupported": True},
        lambda answer: {"id": answer["id"], "error": {"reason": "key_text"}},
        lambda answer: {**answer, "result": {**answer["result"], "more": 1}},
        lambda answer: {**answer, "result": {}},
    ],
)
def test_runner_refuses(spoil: object) -> None:
    """A wrong answer is a failure: the runner doesn't pass whatever it is given."""
    case = next(case for case in CASES if case["op"] == "key.parse" and "result" in case)
    assert callable(spoil)
    assert run.problem(case, spoil(answer(run.request(case)))) is not None
