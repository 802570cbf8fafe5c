"""What an operator does about a field in which two layouts differ."""

from __future__ import annotations

import re
from typing import Final

_HINTS: Final = (
    (
        r"identity\.tenant",
        "Tenants never share. Give both servers one tenant if they belong to one.",
    ),
    (r"identity\.model", "The served models have different names."),
    (
        r"identity\.weights",
        "The weights are not the same: another revision, or other files under the same name.",
    ),
    (r"identity\.adapter", "Other LoRA adapters, or one server without: their KV differs."),
    (
        r"identity\.config\.",
        "A setting that may change KV bytes. Start both servers with the same value.",
    ),
    (
        r"hash\.seed",
        "Block hashes start from different seeds. Set the same PYTHONHASHSEED on both servers.",
    ),
    (r"hash\.", "Block hashes are made in different ways, so that no block could be found."),
    (r"groups\[\d+\]\.block_size", "Other block sizes: start both servers with the same one."),
    (r".*\.dtype", "KV is held in different dtypes: compare dtype and KV cache dtype of both."),
    (
        r".*\.(axes|sizes|component_order)",
        "KV blocks have other shapes or orders: compare block size, KV cache layout and model.",
    ),
    (
        r"grid\.",
        "The servers cut blocks differently (tensor, pipeline or context parallel sizes).",
    ),
)


def find_hint(field: str) -> str | None:
    """The advice for a field, or None where the field says it all."""
    for pattern, hint in _HINTS:
        if re.match(pattern, field):
            return hint
    return None
