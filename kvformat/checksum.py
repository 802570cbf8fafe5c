"""XXH3-64 of ranges, and when not to trust one.

A buffer is fed in pieces of at most 64 KiB. xxhash keeps the interpreter lock for those; above, it
releases the lock, and a thread that competes with compute can then wait a whole switch interval to
get it back.

Source: spec/kvformat.md section 6.5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from xxhash import xxh3_64, xxh3_64_intdigest

PIECE_NBYTES: Final = 65536


def checksum(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64, seed 0, of one contiguous buffer of bytes."""
    nbytes = len(data)
    if nbytes <= PIECE_NBYTES:
        return xxh3_64_intdigest(data)
    view = memoryview(data)
    state = xxh3_64(view[:PIECE_NBYTES])
    for start in range(PIECE_NBYTES, nbytes, PIECE_NBYTES):
        state.update(view[start : start + PIECE_NBYTES])
    return state.intdigest()


def checksum_pieces(buffers: Iterable[bytes | bytearray | memoryview]) -> int:
    """XXH3-64, seed 0, of the concatenation of buffers of bytes, which is never built."""
    state = xxh3_64()
    for buffer in buffers:
        nbytes = len(buffer)
        if nbytes <= PIECE_NBYTES:
            state.update(buffer)
        else:
            view = memoryview(buffer)
            for start in range(0, nbytes, PIECE_NBYTES):
                state.update(view[start : start + PIECE_NBYTES])
    return state.intdigest()
