"""The bytes of an object header: field positions, and nothing about what they mean.

All integers are little-endian. Source: spec/kvformat.md section 6 (byte tables).

====== ===== ============================================================================
offset bytes field
====== ===== ============================================================================
0      8     magic
8      2     format major
10     2     format minor
12     4     header_nbytes: the whole header, a multiple of 64
16     8     required features
24     8     optional features
32     16    layout fingerprint
48     8     object_nbytes
56     16    write id
72     8     group bitmap
80     4     num_tokens
84     2     layer shard
86     2     head shard
88     2     context shard
90     1     block hash length
91     1     num_groups: G
92     4     num_ranges: N, the sum of the groups' num_layers
96     64    block hash, zero-padded
160    32    extension: data of feature bits, all zero where none is set
192    16*G  group directory: u16 group, u16 zero, u32 first layer, u32 num_layers, u32 zero
...    8*W   completeness: for each group ceil(num_layers / 64) words, bit i of the words is
             layer first+i
...    8*N   offsets of the (group, layer) ranges
...    8*N   sizes of the ranges
...    8*N   XXH3-64 of the ranges
...          zeros
H-8    8     XXH3-64 of the H-8 bytes before
====== ===== ============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

MAGIC: Final = b"\x8bKVF\r\n\x1a\n"
ALIGNMENT: Final = 64

#: magic, major, minor, header_nbytes: all that is needed to read the rest.
PREAMBLE: Final = Struct("<8sHHI")
#: The fixed part in runs: what comes before the write id, the write id, what names the object's
#: place, the block hash, and the extension.
FIXED_RUNS: Final = ("8sHHIQQ16sQ", "16s", "QIHHHBBI", "64s", "32s")
FIXED: Final = Struct("<" + "".join(FIXED_RUNS))
GROUP: Final = Struct("<HHIII")
CHECKSUM: Final = Struct("<Q")
WORD_NBYTES: Final = 8

MIN_HEADER_NBYTES: Final = 256
#: Header bytes of the largest object (64 groups, 16384 layers) with room for later minors.
MAX_HEADER_NBYTES: Final = 1 << 20


def completeness_words(num_layers: int) -> int:
    """64-bit words of a group's completeness bitmap."""
    return -(-num_layers // 64)


def header_nbytes(num_layers: Iterable[int]) -> int:
    """Bytes of a 1.0 header, from the number of layers of each of its groups."""
    nbytes = FIXED.size + CHECKSUM.size
    for layers in num_layers:
        nbytes += GROUP.size + WORD_NBYTES * (completeness_words(layers) + 3 * layers)
    return align(nbytes)


def align(nbytes: int) -> int:
    """The next multiple of the header alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
