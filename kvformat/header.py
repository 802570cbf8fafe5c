"""The object header: what an object says of itself, as bytes and back.

:func:`decode_header` trusts no length before it has been checked, and raises nothing but
:class:`~kvformat.errors.RemoteDataError`. It judges bytes by themselves; whether they are the
object that a reader wants is for :mod:`~kvformat.acceptance`.

Source: spec/kvformat.md sections 6.1 to 6.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvformat import registry, wire
from kvformat.errors import (
    HeaderError,
    LayoutError,
    Reason,
    UnsupportedFeatureError,
    UnsupportedVersionError,
)
from kvformat.key import Shard
from kvformat.objectmap import ObjectMap

_NO_EXTENSION: Final = bytes(32)
_U64: Final = np.dtype("<u8")

# A decode takes a few microseconds, and looking these up in their modules is part of it.
_FEATURES_UNKNOWN: Final = ~registry.KNOWN_REQUIRED_FEATURES
_OPTIONAL_UNKNOWN: Final = ~registry.KNOWN_OPTIONAL_FEATURES
_CHECKSUMS: Final = registry.OPTIONAL_PAYLOAD_XXH3
_MAX_HASH_NBYTES: Final = registry.MAX_HASH_NBYTES
_MAX_LAYERS: Final = registry.MAX_OBJECT_LAYERS
_DIRECTORY_AT: Final = wire.FIXED.size
_GROUP_NBYTES: Final = wire.GROUP.size
_unpack_preamble: Final = wire.PREAMBLE.unpack_from
_unpack_fixed: Final = wire.FIXED.unpack_from
_unpack_groups: Final = wire.GROUP.iter_unpack
_unpack_word: Final = wire.CHECKSUM.unpack_from
_pack_word: Final = wire.CHECKSUM.pack

#: Offsets and sizes that were checked before, by the numbers they were checked against. They are
#: the same in every object of a layout and shard, and comparing bytes beats checking them again.
_found_right: dict[tuple[int, int, int], bytes] = {}
_MAX_FOUND_RIGHT: Final = 256
_MAX_FOUND_RIGHT_NBYTES: Final = 16384


class GroupSpan(msgspec.Struct, frozen=True, gc=False):
    """The layers of one group in an object, and which of them are complete.

    Bit ``i`` of ``complete`` stands for layer ``first_layer + i`` of the group.
    """

    group: int
    first_layer: int
    num_layers: int
    complete: int

    @property
    def is_complete(self) -> bool:
        """Every layer of the group that belongs to the object is written."""
        return self.complete == (1 << self.num_layers) - 1


class ObjectHeader(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """A decoded header.

    ``table`` is the range table as it stands in the header: the ``[num_ranges]`` little-endian
    uint64 offsets, then the sizes, then the checksums of the (group, layer) ranges.
    """

    minor: int = registry.FORMAT_MINOR
    header_nbytes: int
    required_features: int = 0
    optional_features: int = registry.OPTIONAL_PAYLOAD_XXH3
    fingerprint: bytes
    object_nbytes: int
    write_id: bytes
    group_bitmap: int
    num_tokens: int
    shard: Shard
    block_hash: bytes
    spans: tuple[GroupSpan, ...]
    table: bytes
    extension: bytes = _NO_EXTENSION

    @property
    def num_ranges(self) -> int:
        """Number of (group, layer) ranges."""
        return len(self.table) // 24

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """``[num_ranges]`` bytes from the object's start to each range; read-only."""
        return self._column(0)

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """``[num_ranges]`` bytes of each range; read-only."""
        return self._column(1)

    @property
    def checksums(self) -> NDArray[np.uint64]:
        """``[num_ranges]`` XXH3-64 of each range, zero without :attr:`has_checksums`; read-only."""
        return self._column(2)

    def _column(self, index: int) -> NDArray[np.uint64]:
        num_ranges = self.num_ranges
        return np.frombuffer(self.table, _U64, num_ranges, 8 * num_ranges * index)

    @property
    def has_checksums(self) -> bool:
        """The writer filled the range checksums in."""
        return bool(self.optional_features & registry.OPTIONAL_PAYLOAD_XXH3)

    @property
    def is_complete(self) -> bool:
        """Every layer of every group of the object is written."""
        return all(span.is_complete for span in self.spans)


def new_header(
    object_map: ObjectMap,
    fingerprint: bytes,
    block_hash: bytes,
    write_id: bytes,
    checksums: Sequence[int] | NDArray[np.uint64] | None,
) -> ObjectHeader:
    """The header of a complete object.

    Args:
        object_map: the object's place in its layout.
        fingerprint: the layout's, 16 bytes.
        block_hash: the engine's full hash, ``layout.hash.digest_nbytes`` bytes.
        write_id: 16 random bytes, fresh for each put.
        checksums: XXH3-64 per entry of ``object_map.layers``, or None where the writer can't
            compute them.

    Raises ``LayoutError`` where an argument has the wrong length: ``header_hash`` for the block
    hash, ``header_size`` for the others.
    """
    num_ranges = len(object_map.layers)
    digest_nbytes = object_map.layout.hash.digest_nbytes
    if len(block_hash) != digest_nbytes:
        raise LayoutError(
            Reason.HEADER_HASH,
            f"block_hash has length {len(block_hash)}, hash.digest_nbytes is {digest_nbytes}",
        )
    for name, found, expected in (
        ("fingerprint", len(fingerprint), 16),
        ("write_id", len(write_id), 16),
        ("checksums", num_ranges if checksums is None else len(checksums), num_ranges),
    ):
        if found != expected:
            raise LayoutError(Reason.HEADER_SIZE, f"{name} has length {found}, expected {expected}")
    return ObjectHeader(
        header_nbytes=object_map.header_nbytes,
        optional_features=0 if checksums is None else registry.OPTIONAL_PAYLOAD_XXH3,
        fingerprint=fingerprint,
        object_nbytes=object_map.nbytes,
        write_id=write_id,
        group_bitmap=object_map.group_bitmap,
        num_tokens=object_map.block_size,
        shard=object_map.shard,
        block_hash=block_hash,
        spans=tuple(
            GroupSpan(group, first, num_layers, (1 << num_layers) - 1)
            for group, first, num_layers in object_map.spans
        ),
        table=object_map.offsets.tobytes()
        + object_map.sizes.tobytes()
        + (bytes(8 * num_ranges) if checksums is None else np.asarray(checksums, _U64).tobytes()),
    )


def encode_header(header: ObjectHeader) -> bytes:
    """The bytes of a header. Writes what it is given: :func:`new_header` is what makes it right."""
    directory, words = [], []
    for span in header.spans:
        directory.append(wire.GROUP.pack(span.group, 0, span.first_layer, span.num_layers, 0))
        num_words = wire.completeness_words(span.num_layers)
        words.append(span.complete.to_bytes(num_words * wire.WORD_NBYTES, "little"))
    body = b"".join(
        (
            wire.FIXED.pack(
                wire.MAGIC,
                registry.FORMAT_MAJOR,
                header.minor,
                header.header_nbytes,
                header.required_features,
                header.optional_features,
                header.fingerprint,
                header.object_nbytes,
                header.write_id,
                header.group_bitmap,
                header.num_tokens,
                header.shard.layer,
                header.shard.head,
                header.shard.context,
                len(header.block_hash),
                len(header.spans),
                header.num_ranges,
                header.block_hash,
                header.extension,
            ),
            *directory,
            *words,
            header.table,
        )
    )
    body = body.ljust(header.header_nbytes - wire.CHECKSUM.size, b"\0")
    return body + wire.CHECKSUM.pack(xxh3_64_intdigest(body))


def header_nbytes_of(preamble: bytes | bytearray | memoryview) -> int:
    """How many bytes the header has that starts with these 16 or more bytes.

    For readers without the layout. Raises like :func:`decode_header`.
    """
    if len(preamble) < wire.PREAMBLE.size:
        raise HeaderError(
            Reason.HEADER_TRUNCATED, f"{len(preamble)} bytes are no header; at least 16 are needed"
        )
    magic, major, _minor, nbytes = _unpack_preamble(preamble)
    if magic != wire.MAGIC:
        raise HeaderError(
            Reason.HEADER_MAGIC, f"starts with {magic.hex()}, expected {wire.MAGIC.hex()}"
        )
    if major != registry.FORMAT_MAJOR:
        raise UnsupportedVersionError(
            Reason.HEADER_VERSION,
            f"header has format major {major}, this library knows {registry.FORMAT_MAJOR}",
        )
    if nbytes % wire.ALIGNMENT or not (wire.MIN_HEADER_NBYTES <= nbytes <= wire.MAX_HEADER_NBYTES):
        raise HeaderError(
            Reason.HEADER_SIZE,
            f"header claims {nbytes} bytes; a multiple of {wire.ALIGNMENT} in "
            f"{wire.MIN_HEADER_NBYTES}..{wire.MAX_HEADER_NBYTES} is allowed",
        )
    return int(nbytes)


def decode_header(
    data: bytes | bytearray | memoryview, expected_nbytes: int | None = None
) -> ObjectHeader:
    """The header at the start of ``data``, which may go on after it.

    Args:
        data: bytes of any origin.
        expected_nbytes: the layout's ``header_nbytes``, where the reader knows which object it
            wants and so may have read no more than this.

    Raises:
        HeaderError: not a valid header; ``reason`` tells the first rule that is broken.
        UnsupportedVersionError: another format major.
        UnsupportedFeatureError: an unknown required feature bit.
    """
    nbytes = header_nbytes_of(data)
    if expected_nbytes is not None and nbytes != expected_nbytes:
        raise HeaderError(
            Reason.WRONG_SIZE, f"header claims {nbytes} bytes, the layout's has {expected_nbytes}"
        )
    if len(data) < nbytes:
        raise HeaderError(
            Reason.HEADER_TRUNCATED, f"header has {nbytes} bytes, {len(data)} are there"
        )
    # A private copy: a shared buffer must not change between a check and the use of what it
    # checked.
    header = bytes(data[:nbytes])
    if xxh3_64_intdigest(header[:-8]) != _unpack_word(header, nbytes - 8)[0]:
        raise HeaderError(Reason.HEADER_CHECKSUM, "header checksum does not match its bytes")
    (
        _magic, _major, minor, _nbytes, required, optional, fingerprint, object_nbytes, write_id,
        bitmap, num_tokens, layer_shard, head_shard, context_shard, hash_nbytes, num_groups,
        num_ranges, hash_area, extension,
    ) = _unpack_fixed(header)  # fmt: skip
    if required & _FEATURES_UNKNOWN:
        raise UnsupportedFeatureError(
            Reason.HEADER_FEATURE,
            f"required feature bits {required & _FEATURES_UNKNOWN:#x} are unknown",
        )
    if extension != _NO_EXTENSION and not optional & _OPTIONAL_UNKNOWN:
        raise HeaderError(Reason.HEADER_RESERVED, "extension bytes without a feature bit")
    block_hash = hash_area[:hash_nbytes]
    if not 0 < hash_nbytes <= _MAX_HASH_NBYTES or block_hash.ljust(64, b"\0") != hash_area:
        raise HeaderError(
            Reason.HEADER_HASH, f"block hash of {hash_nbytes} bytes, 1 to 64 and zero-padded needed"
        )
    if num_tokens == 0:
        raise HeaderError(Reason.HEADER_TOKENS, "a block of 0 tokens")
    spans, table_at = _decode_spans(header, bitmap, num_groups, num_ranges)
    table_end = table_at + 24 * num_ranges
    needed = wire.align(table_end + 8)
    if needed > nbytes or (minor == 0 and needed != nbytes):
        raise HeaderError(
            Reason.HEADER_SIZE, f"header claims {nbytes} bytes, its tables need {needed}"
        )
    for span in spans:
        if span.complete >> span.num_layers:
            raise HeaderError(
                Reason.HEADER_COMPLETENESS,
                f"group {span.group}: completeness bits past its {span.num_layers} layers",
            )
    if minor == 0 and any(header[table_end:-8]):
        raise HeaderError(Reason.HEADER_RESERVED, "non-zero bytes after the range table")
    table = header[table_at:table_end]
    _check_ranges(table, num_ranges, nbytes, object_nbytes)
    if not optional & _CHECKSUMS and any(table[16 * num_ranges :]):
        raise HeaderError(Reason.HEADER_RESERVED, "range checksums without their feature bit")
    return ObjectHeader(
        minor=minor,
        header_nbytes=nbytes,
        required_features=required,
        optional_features=optional,
        fingerprint=fingerprint,
        object_nbytes=object_nbytes,
        write_id=write_id,
        group_bitmap=bitmap,
        num_tokens=num_tokens,
        shard=Shard(layer_shard, head_shard, context_shard),
        block_hash=block_hash,
        spans=tuple(spans),
        table=table,
        extension=extension,
    )


def _check_ranges(table: bytes, num_ranges: int, first: int, end: int) -> None:
    """Refuse ranges that do not lie one after the other from ``first`` to ``end``."""
    sizes_at, checksums_at = 8 * num_ranges, 16 * num_ranges
    columns = table[:checksums_at]
    key = (num_ranges, first, end)
    if _found_right.get(key) == columns:
        return
    numbers = np.frombuffer(columns, _U64)
    # The end of each range is the start of the next one, and of the last the object's: one
    # comparison of bytes is several times faster than one of elements. No sum can wrap, because
    # no size has one of its two high bytes set.
    ends = _pack_word(first) + (numbers[:num_ranges] + numbers[num_ranges:]).tobytes()
    zeros = bytes(num_ranges)
    if not (
        ends.startswith(columns[:sizes_at])
        and ends.endswith(_pack_word(end))
        and columns[sizes_at + 6 :: 8] == zeros
        and columns[sizes_at + 7 :: 8] == zeros
    ):
        raise HeaderError(
            Reason.HEADER_RANGES,
            f"ranges do not lie one after the other from {first} to {end}, each below 2^48 bytes",
        )
    if len(_found_right) >= _MAX_FOUND_RIGHT:  # more only for a moment, by several threads
        _found_right.clear()
    if checksums_at <= _MAX_FOUND_RIGHT_NBYTES:
        _found_right[key] = columns


def _decode_spans(
    header: bytes, bitmap: int, num_groups: int, num_ranges: int
) -> tuple[list[GroupSpan], int]:
    """The group directory with its completeness words, and where the range table starts.

    Nothing tells yet that the words lie within the header, nor which of their bits are set.
    """
    words_at = _DIRECTORY_AT + num_groups * _GROUP_NBYTES
    if bitmap.bit_count() != num_groups or not num_groups or words_at > len(header):
        raise HeaderError(
            Reason.HEADER_GROUPS, f"{num_groups} groups, the bitmap has {bitmap.bit_count()}"
        )
    spans = []
    seen = layers = 0
    for group, zero, first, num_layers, zero2 in _unpack_groups(header[_DIRECTORY_AT:words_at]):
        if zero or zero2:
            raise HeaderError(Reason.HEADER_RESERVED, "non-zero reserved bytes in a group entry")
        if seen >> group or first + num_layers > _MAX_LAYERS:
            raise HeaderError(
                Reason.HEADER_GROUPS,
                f"group {group} is out of order, or its {num_layers} layers from {first} are over "
                f"the limit of {_MAX_LAYERS}",
            )
        seen |= 1 << group
        layers += num_layers
        words_from, words_at = words_at, words_at + (num_layers + 63 >> 6 << 3)
        complete = int.from_bytes(header[words_from:words_at], "little")
        spans.append(GroupSpan(group, first, num_layers, complete))
    if seen != bitmap or not 0 < layers == num_ranges <= _MAX_LAYERS:
        raise HeaderError(
            Reason.HEADER_GROUPS,
            f"groups {seen:#x} with {layers} layers, the header says {bitmap:#x} and {num_ranges}",
        )
    return spans, words_at
