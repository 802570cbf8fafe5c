"""What the arguments of store calls must be like, the same for every store.

Source: spec/kvformat.md section 8.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from operator import add

import numpy

from kvformat.stores.protocol import Code

#: The longest key a store must take, in bytes of UTF-8.
MAX_KEY_NBYTES = 128 * 1024
#: The largest size that any store can name.
MAX_NBYTES = 2**63 - 1


def is_key(key: str) -> bool:
    """Whether ``key`` can name an object: 1 to ``MAX_KEY_NBYTES`` bytes of UTF-8."""
    if not key or len(key) > MAX_KEY_NBYTES:
        return False
    try:
        return len(key.encode()) <= MAX_KEY_NBYTES
    except UnicodeEncodeError:
        return False


def same_length(keys: Sized, *others: Sized) -> bool:
    """Whether each argument of a batch has one entry per key."""
    return all(len(other) == len(keys) for other in others)


def check_nbytes(nbytes: int) -> int:
    """``OK`` for a size that an object may have: at least one byte, and nameable."""
    if nbytes < 1:
        return Code.INVALID
    return Code.OK if nbytes <= MAX_NBYTES else Code.NO_SPACE


def check_pieces(addresses: Sequence[int], sizes: Sequence[int]) -> int:
    """The bytes of a list of memory pieces, or ``Code.INVALID``. A piece has at least one byte."""
    if len(addresses) != len(sizes):
        return Code.INVALID
    if not len(sizes):
        return 0
    return sum(sizes) if min(sizes) > 0 and min(addresses) > 0 else Code.INVALID


def check_ranges(
    addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], nbytes: int
) -> int:
    """The bytes of a list of ranges inside an object of ``nbytes``, or ``Code.INVALID``."""
    total = check_pieces(addresses, sizes)
    if len(offsets) != len(sizes):
        return Code.INVALID
    if total > 0 and (min(offsets) < 0 or max(map(add, offsets, sizes)) > nbytes):
        return Code.INVALID
    return total


def address_of(data: bytes | bytearray | memoryview) -> int:
    """Where ``data`` lies. Valid while the caller holds ``data``; it must be contiguous."""
    address: int = numpy.frombuffer(data, dtype=numpy.uint8).ctypes.data
    return address
