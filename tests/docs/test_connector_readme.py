"""The connector's guide lists what the connector counts."""

from __future__ import annotations

import re
from pathlib import Path

CONNECTOR = Path(__file__).parents[2] / "connector"


def test_every_counter_is_listed_and_no_other() -> None:
    """A counter that an operator sees has its line; codes of reasons and stores stand in <>."""
    counted = {
        name
        for source in CONNECTOR.glob("kvformat_connector/*.py")
        for name in re.findall(
            r'"((?:lookup|load|save|requests)\.[a-z_]+)"', source.read_text("utf-8")
        )
    }
    section = (CONNECTOR / "README.md").read_text("utf-8").partition("## What the counters mean")[2]
    listed = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`([a-z_.]+)`", row)
    }
    # The name of a store's answer, spelt out because it is the usual one.
    assert listed - {"save.exists"} == counted
