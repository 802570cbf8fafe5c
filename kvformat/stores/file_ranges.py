"""Move bytes between memory addresses and positions of a file, many ranges a system call."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import lru_cache

#: ``os.preadv`` or ``os.pwritev``.
Mover = Callable[[int, "list[ctypes.Array[ctypes.c_char]]", int], int]
_Piece = tuple[int, int]

_MAX_PIECES = os.sysconf("SC_IOV_MAX")


def move_ranges(
    mover: Mover, fd: int, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
) -> None:
    """Move each range in order. The ranges have been checked and have at least one byte each.

    Neighbours in the file go in one call; neighbours in memory as well are one piece of it. Raises
    ``OSError``; EINTR never comes here (PEP 475), and memory that isn't there is EFAULT.
    """
    pieces: list[_Piece] = []
    start = file_end = memory_end = -1
    for address, size, offset in zip(addresses, sizes, offsets, strict=True):
        if offset != file_end:
            if pieces:
                _move_pieces(mover, fd, start, pieces)
            pieces = [(address, size)]
            start = offset
        elif address == memory_end:
            first, length = pieces[-1]
            pieces[-1] = (first, length + size)
        else:
            pieces.append((address, size))
        file_end = offset + size
        memory_end = address + size
    if pieces:
        _move_pieces(mover, fd, start, pieces)


def move_pieces(mover: Mover, fd: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """Move memory pieces from or to the file, one behind the other from its start."""
    _move_pieces(mover, fd, 0, list(zip(addresses, sizes, strict=True)))


def _move_pieces(mover: Mover, fd: int, offset: int, pieces: list[_Piece]) -> None:
    while pieces:
        call, pieces = pieces[:_MAX_PIECES], pieces[_MAX_PIECES:]
        done = mover(fd, [_array(size).from_address(address) for address, size in call], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file ended early")
        offset += done
        pieces = _behind(call, done) + pieces


def _behind(pieces: list[_Piece], nbytes: int) -> list[_Piece]:
    """What is left of ``pieces`` behind their first ``nbytes``."""
    for index, (address, size) in enumerate(pieces):
        if nbytes < size:
            return [(address + nbytes, size - nbytes), *pieces[index + 1 :]]
        nbytes -= size
    return []


@lru_cache(maxsize=1024)
def _array(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    # A new array type costs more than moving 64 KiB; plans have few different sizes.
    return ctypes.c_char * nbytes
