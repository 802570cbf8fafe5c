"""A look at a store that is left alone: does it move bytes again?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvformat.stores.protocol import Code
from kvformat.stores.uri import is_readonly
from kvformat_connector.answers import ask
from kvformat_connector.objects import Rank
from kvformat_connector.sessions import Direct, GetSessions

#: Every header is longer.
_NUM_BYTES_READ: Final = 64


def probe_store(rank: Rank, suspects: Sequence[str]) -> bool:
    """Whether the namespace's manifest can be put and read back through the calls that loads use,
    and so can those suspects that are still there. A store that is too full for a manifest answers,
    and is as good to load from as any. In a store that is only read, nothing is put."""
    own = rank.own
    if is_readonly(rank.store.uri):
        suspects = (own.manifest_key, *suspects)
        return all(_read(rank, key, _NUM_BYTES_READ) != b"" for key in suspects)
    code = rank.publish_manifest(Direct(), own)
    if code != Code.NO_SPACE:
        if code not in (Code.OK, Code.EXISTS):
            return False
        if _read(rank, own.manifest_key, len(own.manifest)) != own.manifest:
            return False
    return all(_read(rank, key, _NUM_BYTES_READ) != b"" for key in suspects)


def _read(rank: Rank, key: str, nbytes: int) -> bytes | None:
    """The first bytes of an object; None where there is none, empty where it can't be read."""
    sessions = GetSessions(rank.store, book=rank.open_gets)
    memory = np.zeros(nbytes, np.uint8)
    address = memory.ctypes.data
    rank.store.register_memory(address, nbytes)
    try:
        [code] = sessions.open([key])
        if code != Code.OK:
            return None if code == Code.NOT_FOUND else b""
        [code] = ask(rank.store.get_ranges, [key], [[address]], [[nbytes]], [[0]])
        return memory.tobytes() if code == nbytes else b""
    finally:
        sessions.close()
        rank.store.unregister_memory(address)
