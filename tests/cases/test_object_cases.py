"""Cases 7 and 39: an object is taken only for exactly the one that was asked for."""

from __future__ import annotations

from struct import pack_into, unpack_from

import msgspec
import pytest
import xxhash
from model_layouts import attention, layout, model

from kvformat import (
    ChecksumMismatchError,
    FingerprintMismatchError,
    HeaderError,
    ObjectHeader,
    ObjectMap,
    Reason,
    RemoteDataError,
    Shard,
    check_header,
    check_range,
    check_same_write,
    decode_header,
    encode_header,
    fingerprint,
    new_header,
)
from kvformat.checksum import checksum

LAYOUT = layout(
    [attention(8, num_layers=3), attention(8, num_layers=2)],
    head_shards=2,
    layer_starts=((0, 1), (0, 1)),
)
MAP = ObjectMap(LAYOUT, 0, Shard(1, 0, 0))
HASH = bytes(range(32))
PAYLOADS = [bytes([i]) * r.nbytes for i, r in enumerate(MAP.layers)]


def header_of(
    object_map: ObjectMap = MAP, block_hash: bytes = HASH, write_id: bytes = bytes(16)
) -> ObjectHeader:
    """A right header of an object, as a reader decodes it."""
    checksums = [checksum(bytes([i]) * r.nbytes) for i, r in enumerate(object_map.layers)]
    return decode_header(
        encode_header(
            new_header(object_map, fingerprint(object_map.layout), block_hash, write_id, checksums)
        )
    )


def changed(**fields: object) -> ObjectHeader:
    """A right header with other fields."""
    return msgspec.structs.replace(header_of(), **fields)


def span(**fields: int) -> ObjectHeader:
    """A right header with another group entry."""
    return changed(spans=(msgspec.structs.replace(header_of().spans[0], **fields),))


def refusal(header: ObjectHeader, **options: bool) -> RemoteDataError:
    """Why a header is not that of the object asked for."""
    with pytest.raises(RemoteDataError) as raised:
        check_header(header, MAP, fingerprint(LAYOUT), HASH, **options)
    return raised.value


def test_the_object_asked_for_passes() -> None:
    """What the writer of exactly this object wrote is accepted, layer by layer."""
    header = header_of()

    check_header(header, MAP, fingerprint(LAYOUT), HASH)
    for index, payload in enumerate(PAYLOADS):
        check_range(header, index, payload)


def sibling(**grid: object) -> ObjectMap:
    """The same object of a layout that differs in its grid, its sizes or its block."""
    described = layout([attention(8, num_layers=3), attention(8, num_layers=2)], **grid)  # type: ignore[arg-type]
    return ObjectMap(described, 0, Shard())


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (header_of(block_hash=HASH[::-1]), Reason.WRONG_BLOCK),
        (header_of(block_hash=HASH[:31] + b"\0"), Reason.WRONG_BLOCK),
        (header_of(ObjectMap(LAYOUT, 0, Shard(1, 1, 0))), Reason.WRONG_SHARD),
        (header_of(ObjectMap(LAYOUT, 0, Shard(0, 0, 0))), Reason.WRONG_SHARD),
        (header_of(ObjectMap(LAYOUT, 1, Shard(1, 0, 0))), Reason.WRONG_GROUPS),
        (header_of(sibling(head_shards=2)), Reason.WRONG_FINGERPRINT),
        (header_of(sibling()), Reason.WRONG_FINGERPRINT),
    ],
)
def test_case_7_an_object_under_another_key_is_refused(
    header: ObjectHeader, reason: Reason
) -> None:
    """Copied under another block's, shard's, object's or namespace's key: refused by its header,
    before a byte of its payload is looked at."""
    error = refusal(header)

    assert error.reason is reason
    assert isinstance(error, FingerprintMismatchError) == (reason is Reason.WRONG_FINGERPRINT)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (changed(num_tokens=8), Reason.WRONG_TOKENS),
        (changed(object_nbytes=MAP.nbytes + 1), Reason.WRONG_SIZE),
        (span(first_layer=0), Reason.WRONG_SIZE),
        (changed(table=header_of().table[:8] * 6), Reason.WRONG_SIZE),
        (span(complete=0b01), Reason.INCOMPLETE),
        (span(complete=0), Reason.INCOMPLETE),
    ],
)  # fmt: skip
def test_a_header_that_is_not_the_layouts_is_refused(header: ObjectHeader, reason: Reason) -> None:
    """A right key, and a header whose numbers are not those of the reader's layout."""
    error = refusal(header)

    assert error.reason is reason
    assert isinstance(error, HeaderError)


def test_objects_without_checksums_need_the_readers_consent() -> None:
    """Refused by default; accepted where the reader compares write ids."""
    header = decode_header(
        encode_header(new_header(MAP, fingerprint(LAYOUT), HASH, bytes(16), None))
    )
    error = refusal(header)

    assert isinstance(error, ChecksumMismatchError)
    assert error.reason is Reason.CHECKSUM_ABSENT
    check_header(header, MAP, fingerprint(LAYOUT), HASH, require_checksums=False)


@pytest.mark.parametrize("index", range(len(MAP.layers)))
def test_one_wrong_byte_of_a_layer_is_refused(index: int) -> None:
    """A flipped bit, a byte less, a byte more, nothing: checksum_mismatch, for each layer."""
    header = header_of()
    payload = bytearray(PAYLOADS[index])
    payload[len(payload) // 2] ^= 1
    for wrong in (bytes(payload), PAYLOADS[index][:-1], PAYLOADS[index] + b"\0", b""):
        with pytest.raises(ChecksumMismatchError) as raised:
            check_range(header, index, wrong)
        assert raised.value.reason is Reason.CHECKSUM_MISMATCH
        expected = MAP.layers[index]
        assert (raised.value.group, raised.value.layer) == (expected.group, expected.layer)


def test_a_replaced_object_is_told_by_its_write_id() -> None:
    """Two reads of a header around unverified ranges: another write between them is refused."""
    check_same_write(header_of(), header_of())
    with pytest.raises(HeaderError) as raised:
        check_same_write(header_of(), header_of(write_id=b"\1" * 16))

    assert raised.value.reason is Reason.REPLACED


def test_case_39_objects_of_a_later_minor_are_used_where_the_layout_fits() -> None:
    """Minor 1 with optional bits and extension data in a header of the same size: the ranges are
    the layout's, so the object is used."""
    newer = decode_header(later_minor(), MAP.header_nbytes)

    assert newer.minor == 1
    check_header(newer, MAP, fingerprint(LAYOUT), HASH)
    check_range(newer, 0, PAYLOADS[0])


def test_case_39_a_larger_header_of_a_later_minor_is_refused_never_misread() -> None:
    """A header that grew moved every range: a reader with the layout refuses it by its size, and
    by its object's size where it didn't say which header it expects."""
    data = later_minor()
    larger = bytearray(data[:-8] + bytes(72))
    pack_into("<I", larger, 12, len(larger))
    pack_into("<Q", larger, 48, MAP.nbytes + 64)
    offsets = [offset + 64 for offset in decode_header(data).offsets.tolist()]
    table_at = 192 + 16 + 8
    pack_into(f"<{len(offsets)}Q", larger, table_at, *offsets)
    found = decode_header(sealed(larger))

    assert found.header_nbytes == MAP.header_nbytes + 64
    assert refusal(found).reason is Reason.WRONG_SIZE
    with pytest.raises(RemoteDataError) as raised:
        decode_header(sealed(larger), MAP.header_nbytes)
    assert raised.value.reason is Reason.WRONG_SIZE


def sealed(data: bytearray) -> bytes:
    """A header with the checksum that belongs to its bytes."""
    pack_into("<Q", data, len(data) - 8, xxhash.xxh3_64_intdigest(bytes(data[:-8])))
    return bytes(data)


def later_minor() -> bytes:
    """The header of minor 1: an optional bit that this one doesn't know, and data for it."""
    data = bytearray(encode_header(header_of()))
    pack_into("<H", data, 10, 1)
    pack_into("<Q", data, 24, unpack_from("<Q", data, 24)[0] | 1 << 50)
    data[160:192] = b"\5" * 32
    return sealed(data)


def test_layers_without_bytes_in_a_shard_are_complete_too() -> None:
    """A shard that holds none of an uncut component still lists its layers, with size 0."""
    described = model("sparse with indexer and scales", head_shards=1, context_shards=1)
    mixed = layout(
        [attention(2, num_layers=1), described.groups[0]], objects=((0, 1),), head_shards=2
    )
    second = ObjectMap(mixed, 0, Shard(0, 1, 0))

    assert [r.nbytes for r in second.layers] == [second.layers[0].nbytes, 0, 0]
    header = decode_header(
        encode_header(new_header(second, fingerprint(mixed), HASH, bytes(16), [1, 2, 3]))
    )
    check_header(header, second, fingerprint(mixed), HASH)
