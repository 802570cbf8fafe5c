"""The README's library example runs as it stands, and its checks are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvformat

README = Path(__file__).resolve().parents[2] / "README.md"


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return code


def test_library_example_runs() -> None:
    """Proves that the example stores an object that passes every check on the way back."""
    names: dict[str, Any] = {}
    exec(compile(example(), str(README), "exec"), names)
    assert names["found"].block_hash == names["block_hash"]
    assert names["data"][names["found"].header_nbytes :] == b"".join(names["payload"])


def test_library_example_would_notice_a_flipped_byte() -> None:
    """Proves that the checks of the example are real: one byte off, and it raises."""
    spoiled = example().replace(
        "data = store.get(key)", "data = bytearray(store.get(key)); data[-1] ^= 1"
    )
    with pytest.raises(kvformat.ChecksumMismatchError) as caught:
        exec(compile(spoiled, str(README), "exec"), {})
    assert caught.value.reason is kvformat.Reason.CHECKSUM_MISMATCH
