"""Bytes of any origin are a header or a RemoteDataError, and each rule has its reason."""

from __future__ import annotations

import random
from struct import unpack_from

import pytest
from headers import DIRECTORY_AT, MAPS, encoded, header, many_layers, put_at, put_field, sealed
from hypothesis import given, settings
from hypothesis import strategies as st

from kvformat import (
    HeaderError,
    ObjectHeader,
    Reason,
    RemoteDataError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
    decode_header,
    encode_header,
)
from kvformat.header import _MAX_FOUND_RIGHT, _MAX_FOUND_RIGHT_NBYTES, _found_right

TWO = encoded("two groups")
ONE = encoded("one group")
# two groups: directory 2 entries, 2 completeness words, then 4 offsets, 4 sizes, 4 checksums
WORDS_AT = DIRECTORY_AT + 32
OFFSETS_AT = WORDS_AT + 16
SIZES_AT = OFFSETS_AT + 32


def reason_of(data: bytes | bytearray | memoryview) -> Reason | None:
    """Why bytes are no header; None where they are one. Any other exception goes through."""
    try:
        assert isinstance(decode_header(data), ObjectHeader)
    except RemoteDataError as error:
        return error.reason
    return None


def same(a: ObjectHeader, b: ObjectHeader) -> bool:
    """Every field of two headers is equal."""
    return all(getattr(a, name) == getattr(b, name) for name in ObjectHeader.__struct_fields__)


@pytest.mark.parametrize("data", [TWO, ONE], ids=["two groups", "one group"])
def test_every_truncation_is_refused(data: bytes) -> None:
    """Cut after each byte: truncated, whether or not the length can be read."""
    assert {reason_of(data[:n]) for n in range(len(data))} == {Reason.HEADER_TRUNCATED}
    assert reason_of(data) is None
    assert reason_of(data + b"payload") is None


def test_a_reader_that_knows_the_size_needs_no_more_bytes() -> None:
    """Another length than the layout's is wrong_size, whether or not so many bytes are there."""
    for nbytes in (len(TWO) - 64, len(TWO) + 64, 1 << 20):
        with pytest.raises(RemoteDataError) as raised:
            decode_header(put_field(TWO, "header_nbytes", nbytes), len(TWO))
        assert raised.value.reason is Reason.WRONG_SIZE
    assert same(decode_header(TWO, len(TWO)), decode_header(TWO))


@pytest.mark.parametrize("data", [TWO, ONE], ids=["two groups", "one group"])
def test_every_single_bit_flip_is_refused(data: bytes) -> None:
    """Each bit: in magic, version and length by their own rules, elsewhere by the checksum."""
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        found = reason_of(changed)
        if bit // 8 < 8:
            expected = {Reason.HEADER_MAGIC}
        elif bit // 8 < 10:
            expected = {Reason.HEADER_VERSION}
        elif 12 <= bit // 8 < 16:
            expected = {Reason.HEADER_SIZE, Reason.HEADER_TRUNCATED, Reason.HEADER_CHECKSUM}
        else:
            expected = {Reason.HEADER_CHECKSUM}
        assert found in expected, f"bit {bit}: {found}"


#: What is wrong -> the bytes, with a right checksum, and the reason.
BROKEN = {
    "empty": (b"", Reason.HEADER_TRUNCATED),
    "magic": (put_field(TWO, "magic", b"\x89PNG\r\n\x1a\n"), Reason.HEADER_MAGIC),
    "major 0": (put_field(TWO, "major", 0), Reason.HEADER_VERSION),
    "major 2": (put_field(TWO, "major", 2), Reason.HEADER_VERSION),
    "length 0": (put_field(TWO, "header_nbytes", 0), Reason.HEADER_SIZE),
    "length of a fixed part alone": (put_field(TWO, "header_nbytes", 192), Reason.HEADER_SIZE),
    "length not aligned": (put_field(TWO, "header_nbytes", len(TWO) + 1), Reason.HEADER_SIZE),
    "length 4 GiB": (put_field(TWO, "header_nbytes", 2**32 - 64), Reason.HEADER_SIZE),
    "length past the end": (put_field(TWO, "header_nbytes", 1 << 20), Reason.HEADER_TRUNCATED),
    "length shorter than its tables": (
        put_field(TWO, "header_nbytes", 256), Reason.HEADER_SIZE),
    "length longer than its tables": (
        put_field(TWO + bytes(64), "header_nbytes", len(TWO) + 64), Reason.HEADER_SIZE),
    "checksum": (TWO[:-8] + bytes(8), Reason.HEADER_CHECKSUM),
    "required bit 0": (put_field(TWO, "required", 1), Reason.HEADER_FEATURE),
    "required bit 63": (put_field(TWO, "required", 1 << 63), Reason.HEADER_FEATURE),
    "extension without a bit": (
        put_field(TWO, "extension", b"\0" * 31 + b"\1"), Reason.HEADER_RESERVED),
    "no hash": (put_field(TWO, "hash_nbytes", 0), Reason.HEADER_HASH),
    "no hash, nor any bytes of one": (
        put_field(put_field(TWO, "hash_nbytes", 0), "hash", bytes(64)), Reason.HEADER_HASH),
    "hash of 65 bytes": (put_field(TWO, "hash_nbytes", 65), Reason.HEADER_HASH),
    "hash of 255 bytes": (put_field(TWO, "hash_nbytes", 255), Reason.HEADER_HASH),
    "hash padded with ones": (put_field(TWO, "hash", b"\1" * 64), Reason.HEADER_HASH),
    "hash longer than said": (put_field(TWO, "hash_nbytes", 31), Reason.HEADER_HASH),
    "no tokens": (put_field(TWO, "num_tokens", 0), Reason.HEADER_TOKENS),
    "no groups": (put_field(TWO, "num_groups", 0), Reason.HEADER_GROUPS),
    "fewer groups than the bitmap": (put_field(TWO, "num_groups", 1), Reason.HEADER_GROUPS),
    "more groups than the bitmap": (put_field(TWO, "num_groups", 3), Reason.HEADER_GROUPS),
    "255 groups": (put_field(TWO, "num_groups", 255), Reason.HEADER_GROUPS),
    "bitmap empty": (put_field(TWO, "bitmap", 0), Reason.HEADER_GROUPS),
    "bitmap of others": (put_field(TWO, "bitmap", 0b101), Reason.HEADER_GROUPS),
    "bitmap full": (put_field(TWO, "bitmap", 2**64 - 1), Reason.HEADER_GROUPS),
    "no ranges": (put_field(TWO, "num_ranges", 0), Reason.HEADER_GROUPS),
    "more ranges than layers": (put_field(TWO, "num_ranges", 5), Reason.HEADER_GROUPS),
    "ranges 4 G": (put_field(TWO, "num_ranges", 2**32 - 1), Reason.HEADER_GROUPS),
    "groups swapped": (
        put_at(TWO, DIRECTORY_AT, "HHIIIHHIII", 1, 0, 0, 2, 0, 0, 0, 0, 2, 0),
        Reason.HEADER_GROUPS),
    "group twice": (put_at(TWO, DIRECTORY_AT + 16, "H", 0), Reason.HEADER_GROUPS),
    "group 65535": (put_at(TWO, DIRECTORY_AT + 16, "H", 65535), Reason.HEADER_GROUPS),
    "group entry, reserved u16": (
        put_at(TWO, DIRECTORY_AT + 2, "H", 1), Reason.HEADER_RESERVED),
    "group entry, reserved u32": (
        put_at(TWO, DIRECTORY_AT + 12, "I", 1), Reason.HEADER_RESERVED),
    "layers 4 G": (put_at(TWO, DIRECTORY_AT + 8, "I", 2**32 - 1), Reason.HEADER_GROUPS),
    "first layer past the limit": (
        put_at(TWO, DIRECTORY_AT + 4, "I", 16384), Reason.HEADER_GROUPS),
    "first layer wraps": (put_at(TWO, DIRECTORY_AT + 4, "I", 2**32 - 1), Reason.HEADER_GROUPS),
    "layers moved to another group": (
        put_at(TWO, DIRECTORY_AT, "HHIIIHHIII", 0, 0, 0, 1, 0, 1, 0, 0, 2, 0),
        Reason.HEADER_GROUPS),
    "completeness past the layers": (put_at(TWO, WORDS_AT, "Q", 0b111), Reason.HEADER_COMPLETENESS),
    "completeness bit 63": (
        put_at(TWO, WORDS_AT + 8, "Q", 1 << 63 | 0b11), Reason.HEADER_COMPLETENESS),
    "padding": (put_at(TWO, len(TWO) - 9, "B", 1), Reason.HEADER_RESERVED),
    "first offset": (put_at(TWO, OFFSETS_AT, "Q", len(TWO) - 1), Reason.HEADER_RANGES),
    "first offset 0": (put_at(TWO, OFFSETS_AT, "Q", 0), Reason.HEADER_RANGES),
    "offset 2^64-1": (put_at(TWO, OFFSETS_AT + 8, "Q", 2**64 - 1), Reason.HEADER_RANGES),
    "ranges overlap": (
        put_at(TWO, OFFSETS_AT + 8, "Q", unpack_from("<Q", TWO, OFFSETS_AT + 8)[0] - 1),
        Reason.HEADER_RANGES),
    "ranges apart": (
        put_at(TWO, OFFSETS_AT + 8, "Q", unpack_from("<Q", TWO, OFFSETS_AT + 8)[0] + 1),
        Reason.HEADER_RANGES),
    "size 0": (put_at(TWO, SIZES_AT, "Q", 0), Reason.HEADER_RANGES),
    "size 2^64-1": (put_at(TWO, SIZES_AT, "Q", 2**64 - 1), Reason.HEADER_RANGES),
    "object ends early": (
        put_field(TWO, "object_nbytes", unpack_from("<Q", TWO, 48)[0] - 1),
        Reason.HEADER_RANGES),
    "object 2^64-1": (put_field(TWO, "object_nbytes", 2**64 - 1), Reason.HEADER_RANGES),
    "object 0": (put_field(TWO, "object_nbytes", 0), Reason.HEADER_RANGES),
    "checksums without their bit": (put_field(TWO, "optional", 0), Reason.HEADER_RESERVED),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_has_its_reason(name: str) -> None:
    """One field at a time, in an otherwise right header with a right checksum."""
    data, reason = BROKEN[name]

    assert reason_of(data) is reason


def test_errors_have_the_class_of_their_cause() -> None:
    """An unknown major or feature is told from a wrong header by its class."""
    for name, error in (
        ("major 2", UnsupportedVersionError),
        ("required bit 0", UnsupportedFeatureError),
        ("checksum", HeaderError),
    ):
        with pytest.raises(error):
            decode_header(BROKEN[name][0])


def test_sizes_that_add_up_by_wrapping_are_refused() -> None:
    """Sizes above 2^48 whose sum comes back to the object's end modulo 2^64."""
    offsets = list(unpack_from("<4Q", TWO, OFFSETS_AT))
    sizes = list(unpack_from("<4Q", TWO, SIZES_AT))
    for shift in (2**63, 2**56, 2**48):
        wrapped = [sizes[0] + shift, sizes[1] - shift, *sizes[2:]]
        moved = [offsets[0], offsets[1] + shift, *offsets[2:]]
        numbers = [number % 2**64 for number in moved + wrapped]
        assert reason_of(put_at(TWO, OFFSETS_AT, "8Q", *numbers)) is Reason.HEADER_RANGES


def test_a_range_ends_at_2_to_the_48() -> None:
    """The largest size is read; one byte more is refused though every end fits its neighbour."""
    offsets, sizes = unpack_from("<4Q", TWO, OFFSETS_AT), unpack_from("<4Q", TWO, SIZES_AT)
    for size, reason in ((2**48 - 1, None), (2**48, Reason.HEADER_RANGES)):
        end = offsets[3] + size
        large = put_at(put_field(TWO, "object_nbytes", end), SIZES_AT, "4Q", *sizes[:3], size)
        assert reason_of(large) is reason


def test_a_header_found_right_before_is_not_taken_for_another() -> None:
    """The memory of checked range tables never lets a wrong one through, in either order."""
    wrong = put_at(TWO, SIZES_AT, "Q", 1)
    shifted = put_field(TWO, "object_nbytes", unpack_from("<Q", TWO, 48)[0] + 64)
    for _ in range(3):
        assert reason_of(TWO) is None
        assert reason_of(wrong) is Reason.HEADER_RANGES
        assert reason_of(shifted) is Reason.HEADER_RANGES


def test_the_memory_of_checked_tables_is_bounded() -> None:
    """More layouts than it holds, and tables larger than it takes, are still judged rightly."""
    for num_layers in (*range(1, 300), 2000):
        data = encode_header(header(many_layers(num_layers)))
        table_at = 192 + 16 + 8 * (-(-num_layers // 64))
        assert reason_of(data) is None
        assert reason_of(put_at(data, table_at, "Q", 1)) is Reason.HEADER_RANGES
    assert len(_found_right) <= _MAX_FOUND_RIGHT
    assert max(map(len, _found_right.values())) <= _MAX_FOUND_RIGHT_NBYTES


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("checksums", [(), None], ids=["with checksums", "without"])
def test_a_header_decodes_to_what_was_encoded(name: str, checksums: tuple[()] | None) -> None:
    """decode(encode(h)) == h in every field, from bytes, bytearray and a view into a buffer."""
    made = header(MAPS[name], checksums)
    data = encode_header(made)

    assert len(data) == MAPS[name].header_nbytes
    for source in (data, bytearray(data), memoryview(b"x" + data + b"payload")[1:]):
        found = decode_header(source)
        assert same(found, made)
        assert found.is_complete
        assert found.has_checksums == (checksums == ())
        assert found.offsets.tolist() == [r.offset for r in MAPS[name].layers]
        assert found.sizes.tolist() == [r.nbytes for r in MAPS[name].layers]
        present = 1 if found.has_checksums else 0
        assert found.checksums.tolist() == [present * (i + 1) for i in range(found.num_ranges)]


def test_a_header_does_not_change_with_the_buffer_it_came_from() -> None:
    """A decoded header is a private copy of shared memory."""
    buffer = bytearray(TWO)
    found = decode_header(buffer)
    before = found.sizes.tolist(), found.block_hash, found.write_id
    buffer[:] = b"\xff" * len(buffer)

    assert (found.sizes.tolist(), found.block_hash, found.write_id) == before


def test_newer_minors_are_read_and_older_ones_stay_strict() -> None:
    """Case 39: what a later 1.x may add (bytes after the tables, optional bits with data in the
    extension) is read by this one; the same bytes under minor 0 are refused."""
    longer = bytearray(TWO[:-8] + b"\x77" * 64 + bytes(8))
    longer[12:16] = len(longer).to_bytes(4, "little")
    end = unpack_from("<Q", TWO, 48)[0]
    offsets = [offset + 64 for offset in unpack_from("<4Q", TWO, OFFSETS_AT)]
    newer = put_at(put_field(longer, "object_nbytes", end + 64), OFFSETS_AT, "4Q", *offsets)
    assert reason_of(newer) is Reason.HEADER_SIZE

    newer = put_field(newer, "minor", 1)
    found = decode_header(newer)
    assert (found.minor, found.header_nbytes) == (1, len(TWO) + 64)
    assert found.sizes.tolist() == decode_header(TWO).sizes.tolist()

    extended = put_field(put_field(newer, "optional", 1 | 1 << 40), "extension", b"new data" * 4)
    found = decode_header(extended)
    assert (found.optional_features, found.extension) == (1 | 1 << 40, b"new data" * 4)
    assert reason_of(put_field(extended, "required", 1 << 40)) is Reason.HEADER_FEATURE
    assert reason_of(put_field(put_field(TWO, "minor", 65535), "num_tokens", 1)) is None


def test_unknown_optional_bits_are_ignored_in_this_minor_too() -> None:
    """An optional bit that nobody knows, alone, makes no header unreadable."""
    found = decode_header(put_field(TWO, "optional", 1 | 1 << 63))

    assert found.optional_features == 1 | 1 << 63
    assert found.has_checksums


@settings(max_examples=300)
@given(st.binary(max_size=600))
def test_any_bytes_are_a_header_or_remote_data_error(data: bytes) -> None:
    """Arbitrary bytes; and behind a right magic, version and length, with a right checksum."""
    reason_of(data)
    reason_of(sealed(TWO[:16] + data.ljust(len(TWO) - 16, b"\0")))
    reason_of(sealed((TWO[:16] + data).ljust(len(TWO), b"\xff")))


@settings(max_examples=500)
@given(
    st.sampled_from([TWO, ONE]),
    st.lists(
        st.tuples(
            st.integers(8, len(TWO) - 9),
            st.sampled_from("BHIQ"),
            st.one_of(
                st.integers(0, 3),
                st.integers(0, 2**64 - 1),
                st.sampled_from([2**63, 2**48, 2**48 - 1, 2**32 - 1, 16384, 16385, 64, 65]),
            ),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_changed_numbers_with_a_right_checksum_reach_every_rule(
    data: bytes, changes: list[tuple[int, str, int]]
) -> None:
    """Random numbers anywhere: refused, or a header that spells itself in the same bytes."""
    changed = bytearray(data)
    for offset, code, value in changes:
        size = {"B": 1, "H": 2, "I": 4, "Q": 8}[code]
        if offset + size <= len(changed) - 8:
            changed[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    hostile = sealed(changed)
    try:
        found = decode_header(hostile)
    except RemoteDataError:
        return
    assert encode_header(found) == hostile or found.minor > 0
    assert found.offsets[0] == found.header_nbytes
    assert (
        found.offsets.tolist()[1:]
        == [int(o) + int(s) for o, s in zip(found.offsets, found.sizes, strict=True)][:-1]
    )
    assert sum(map(int, found.sizes)) + found.header_nbytes == found.object_nbytes


def test_random_bits_in_every_part() -> None:
    """Ten thousand headers with one to three bits flipped and the checksum made right again."""
    source = random.Random(20)
    for _ in range(10_000):
        changed = bytearray(TWO)
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(16, len(TWO) - 8)] ^= 1 << source.randrange(8)
        reason_of(sealed(changed))
