"""XXH3-64 of ranges, in pieces and at once."""

from __future__ import annotations

import random

import pytest
import xxhash

from kvformat.checksum import PIECE_NBYTES, checksum, checksum_pieces

SIZES = [0, 1, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 5 * PIECE_NBYTES + 7]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_pieces_have_the_checksum_of_the_whole(nbytes: int, kind: type) -> None:
    """Whatever the size, and however it is cut, the value is XXH3-64 with seed 0."""
    data = random.Random(nbytes).randbytes(nbytes)
    expected = xxhash.xxh3_64(data, seed=0).intdigest()
    cut = nbytes // 3

    assert checksum(kind(data)) == expected
    assert checksum_pieces([kind(data[:cut]), kind(b""), kind(data[cut:])]) == expected


def test_known_values() -> None:
    """Values that XXH3's own test vectors give for no bytes, and for "abc"."""
    assert checksum(b"") == 0x2D06800538D394C2
    assert checksum(b"abc") == 0x78AF5F94892F3950
    assert checksum_pieces([]) == 0x2D06800538D394C2
