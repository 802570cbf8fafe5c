"""Stores: where objects live. One protocol, found by URI scheme."""

from kvformat.stores.opening import open_store
from kvformat.stores.protocol import Code, Store

__all__ = ["Code", "Store", "open_store"]
