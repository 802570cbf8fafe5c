"""A vLLM V1 KV connector that saves and loads KV cache as kvformat objects.

vLLM finds the class with ``kv_connector="KVFormatConnector"`` and
``kv_connector_module_path="kvformat_connector"``. Importing this package imports neither vLLM nor
torch; asking for the class does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvformat_connector.connector import KVFormatConnector

__all__ = ["KVFormatConnector"]


def __getattr__(name: str) -> object:
    if name == "KVFormatConnector":
        from kvformat_connector.connector import KVFormatConnector

        return KVFormatConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
