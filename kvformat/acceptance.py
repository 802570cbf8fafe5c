"""Whether an object is, exactly, the one that a reader asked for.

A decoded header is right by itself (:mod:`~kvformat.header`); here it is held against the reader's
own layout, and the payload against the header. Nothing of an object is used before both.

Source: spec/kvformat.md sections 6.4, 6.5 and 8.3.
"""

from __future__ import annotations

from struct import Struct, calcsize

from xxhash import xxh3_64_intdigest

from kvformat import wire
from kvformat.checksum import checksum
from kvformat.errors import (
    ChecksumMismatchError,
    FingerprintMismatchError,
    HeaderError,
    Reason,
)
from kvformat.header import ObjectHeader, decode_header, encode_header, new_header
from kvformat.objectmap import ObjectMap


def check_header(
    header: ObjectHeader,
    object_map: ObjectMap,
    fingerprint: bytes,
    block_hash: bytes,
    *,
    require_checksums: bool = True,
) -> None:
    """Refuse a header that is not, exactly, that of the object that was asked for.

    Args:
        header: a decoded header.
        object_map: the object asked for, in the reader's own layout.
        fingerprint: the reader's layout fingerprint, 16 bytes.
        block_hash: the full hash of the block asked for.
        require_checksums: refuse objects whose writer gave none.

    Raises:
        FingerprintMismatchError, HeaderError: of another layout, object, shard or block; with
            other ranges; incomplete.
        ChecksumMismatchError: reason ``checksum_absent``.
    """
    check_fingerprint(header, fingerprint)
    for reason, what, found, expected in (
        (Reason.WRONG_GROUPS, "group bitmap", header.group_bitmap, object_map.group_bitmap),
        (Reason.WRONG_SHARD, "shard", header.shard, object_map.shard),
        (Reason.WRONG_BLOCK, "block hash", header.block_hash, block_hash),
        (Reason.WRONG_BLOCK, "hash length", len(block_hash), object_map.layout.hash.digest_nbytes),
        (Reason.WRONG_TOKENS, "token count", header.num_tokens, object_map.block_size),
        (Reason.WRONG_SIZE, "object size", header.object_nbytes, object_map.nbytes),
        (Reason.WRONG_SIZE, "header size", header.header_nbytes, object_map.header_nbytes),
    ):
        if found != expected:
            raise HeaderError(
                reason, f"object has {what} {_show(found)}, expected {_show(expected)}"
            )
    spans = tuple((span.group, span.first_layer, span.num_layers) for span in header.spans)
    if spans != object_map.spans:
        raise HeaderError(
            Reason.WRONG_SIZE, f"object has layers {spans}, expected {object_map.spans}"
        )
    if header.sizes.tobytes() != object_map.sizes.tobytes():
        raise HeaderError(Reason.WRONG_SIZE, "object has layers of other sizes than the layout's")
    for span in header.spans:
        if not span.is_complete:
            raise HeaderError(
                Reason.INCOMPLETE,
                f"group {span.group} has {span.complete.bit_count()} of {span.num_layers} layers",
            )
    if require_checksums and not header.has_checksums:
        raise ChecksumMismatchError(
            Reason.CHECKSUM_ABSENT,
            "the writer gave no range checksums and this reader requires them",
        )


class UsualHeader:
    """The one form that nearly every header of an object map has: complete, of this minor version,
    with checksums. Such headers differ in write id, block hash and checksums alone, so comparing
    bytes tells, many times faster, what :func:`~kvformat.header.decode_header` and
    :func:`check_header` would."""

    def __init__(self, object_map: ObjectMap, fingerprint: bytes) -> None:
        block_hash = bytes(object_map.layout.hash.digest_nbytes)
        num_ranges = len(object_map.layers)
        sample = encode_header(
            new_header(object_map, fingerprint, block_hash, bytes(16), [0] * num_ranges)
        )
        start, write_id, place, hash_area, extension = (
            calcsize("<" + run) for run in wire.FIXED_RUNS
        )
        tables = extension + sum(
            wire.GROUP.size + wire.WORD_NBYTES * (wire.completeness_words(layers) + 2 * layers)
            for _, _, layers in object_map.spans
        )
        checksums = wire.CHECKSUM.size * num_ranges
        before_rest = start + write_id + place + hash_area + tables + checksums
        rest = len(sample) - before_rest - wire.CHECKSUM.size
        self._hash_area_nbytes = hash_area
        self._unpack = Struct(
            f"<{start}s{write_id}s{place}s{hash_area}s{tables}s{checksums}s{rest}sQ"
        ).unpack
        self._nbytes = len(sample)
        self._start, _, self._place, _, self._tables, _, self._rest, _ = self._unpack(sample)
        self._hash_nbytes = len(block_hash)

    def match(self, header: bytes, block_hash: bytes) -> tuple[bytes, bytes] | None:
        """The write id and the little-endian range checksums of a header of this form, which is
        right; None says nothing of a header."""
        if len(header) != self._nbytes or len(block_hash) != self._hash_nbytes:
            return None
        start, write_id, place, hash_area, tables, checksums, rest, digest = self._unpack(header)
        is_usual = (
            hash_area == block_hash.ljust(self._hash_area_nbytes, b"\0")
            and start == self._start
            and place == self._place
            and tables == self._tables
            and rest == self._rest
            and digest == xxh3_64_intdigest(header[: -wire.CHECKSUM.size])
        )
        return (write_id, checksums) if is_usual else None


def check_fingerprint(header: ObjectHeader, fingerprint: bytes) -> None:
    """Refuse an object of another layout.

    Raises ``FingerprintMismatchError`` with reason ``wrong_fingerprint``.
    """
    if header.fingerprint != fingerprint:
        raise FingerprintMismatchError(
            Reason.WRONG_FINGERPRINT,
            f"object has layout {header.fingerprint.hex()}, expected {fingerprint.hex()}",
        )


def check_range(
    header: ObjectHeader, range_index: int, data: bytes | bytearray | memoryview
) -> None:
    """Refuse bytes that are not those of one (group, layer) range, given in object order.

    Raises ``ChecksumMismatchError`` with the group and layer.
    """
    found, expected = checksum(data), int(header.checksums[range_index])
    if found != expected:
        raise range_mismatch(header, range_index, found)


def check_object(data: bytes, object_map: ObjectMap, fingerprint: bytes, block_hash: bytes) -> None:
    """Refuse bytes that are not, all of them, the object asked for: header, size and every range.

    Raises ``RemoteDataError`` as :func:`check_header` and :func:`check_range` do.
    """
    header = decode_header(data[: object_map.header_nbytes], object_map.header_nbytes)
    check_header(header, object_map, fingerprint, block_hash)
    if len(data) != object_map.nbytes:
        raise HeaderError(
            Reason.WRONG_SIZE, f"object has {len(data)} bytes, expected {object_map.nbytes}"
        )
    view = memoryview(data)
    for index, layer in enumerate(object_map.layers):
        check_range(header, index, view[layer.offset : layer.offset + layer.nbytes])


def range_mismatch(header: ObjectHeader, range_index: int, found: int) -> ChecksumMismatchError:
    """The error for a range whose bytes have the checksum ``found``."""
    index = range_index
    for span in header.spans:
        if index < span.num_layers:
            break
        index -= span.num_layers
    return ChecksumMismatchError(
        Reason.CHECKSUM_MISMATCH,
        f"group {span.group} layer {span.first_layer + index}: bytes have XXH3-64 {found:016x}, "
        f"the header says {int(header.checksums[range_index]):016x}",
        group=span.group,
        layer=span.first_layer + index,
    )


def check_same_write(first: ObjectHeader, second: ObjectHeader) -> None:
    """Refuse an object that was replaced between two reads of its header.

    Raises ``HeaderError`` with reason ``replaced``.
    """
    if first.write_id != second.write_id:
        raise HeaderError(
            Reason.REPLACED,
            f"object was written by {first.write_id.hex()}, later by {second.write_id.hex()}",
        )


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
