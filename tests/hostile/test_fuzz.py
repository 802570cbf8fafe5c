"""A bounded run of each fuzz target; :mod:`fuzz` itself can run longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 12


@pytest.mark.parametrize("target", ["header", "key", "manifest"])
def test_a_search_finds_nothing_but_values_and_remote_data_errors(target: str) -> None:
    """Coverage-guided search from valid inputs on raises nothing else and never hangs."""
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("fuzz.py"), target, str(SECONDS)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 60,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    runs = re.search(r"number_of_executed_units: (\d+)", run.stderr)
    assert runs is not None
    assert int(runs[1]) > 1000
