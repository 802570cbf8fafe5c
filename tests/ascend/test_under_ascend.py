"""The vLLM that vllm-ascend pairs with, in the environment that `make test` makes beside the main
one: vllm-ascend's hooks against our connector, and real engines of that vLLM."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-ascend"
SOURCES = ENVIRONMENT / "vllm_ascend-0.30.0rc2"


def run_tests(*arguments: str) -> int:
    """Run tests there. All of them must pass; answers how many there were."""
    python = ENVIRONMENT / "bin" / "python"
    assert python.exists(), "`make .venv-ascend/.engine` makes the environment"
    result = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "KVFORMAT_VLLM_ASCEND": str(SOURCES)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-20000:] + result.stderr[-2000:]
    found = re.search(r"^(\d+) passed", result.stdout, re.MULTILINE)
    assert found is not None
    assert "skipped" not in result.stdout
    return int(found[1])


@pytest.mark.timeout(900)
def test_hook_contract() -> None:
    """Split K/V tuples, MLA tuples, three components and hooks without a name: vllm-ascend's own
    hook functions, from its source distribution, drive our connector under vLLM 0.30."""
    assert run_tests("tests/ascend/contract") >= 40


@pytest.mark.vllm
@pytest.mark.mooncake
@pytest.mark.timeout(1200)
def test_cold_and_warm_on_the_paired_vllm() -> None:
    """Real engines of vLLM 0.30: cold and warm answers are equal to the bit from a file store and
    from Mooncake, zeroed KV changes them, and a damaged object is recomputed."""
    wanted = "saving_changes or fresh_engine or zeroed_kv or flipped_bit or mooncake"
    assert run_tests("tests/e2e/test_cold_and_warm.py", "-k", wanted) == 6
