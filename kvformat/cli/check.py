"""Judge one object: its header, its place in a layout, and every checksum.

Unlike a reader, which stops at the first thing that is wrong, this goes on and reports them all.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvformat.acceptance import range_mismatch
from kvformat.checksum import checksum_pieces
from kvformat.cli.header_document import bitmap_groups, format_shard
from kvformat.cli.problems import Problem
from kvformat.cli.sources import ObjectBytes, read
from kvformat.errors import Reason, RemoteDataError
from kvformat.fingerprint import fingerprint
from kvformat.header import ObjectHeader, decode_header, header_nbytes_of
from kvformat.identify import identify_object
from kvformat.key import BlockKey
from kvformat.layout import Layout
from kvformat.wire import PREAMBLE


class RangeDocument(msgspec.Struct, frozen=True):
    """One (group, layer) range. ``status`` is ``ok`` or ``mismatch`` where the bytes were read.

    Otherwise it says why there was nothing to compare: ``unread``, ``incomplete``, ``absent`` (the
    writer gave no checksum). ``checksum`` is the header's, ``found`` that of the bytes.
    """

    group: int
    layer: int
    offset: int
    nbytes: int
    checksum: str | None
    found: str | None
    status: str


class Examination(msgspec.Struct, frozen=True):
    """All that was found out about one object."""

    header: ObjectHeader | None
    ranges: list[RangeDocument]
    problems: list[Problem]


def examine(
    data: ObjectBytes, key: BlockKey | None, layout: Layout | None, *, verify: bool
) -> Examination:
    """Check an object by itself, against its key, and against its layout, as far as given.

    ``verify`` reads the payload and checks its checksums too. Raises what ``data`` raises.
    """
    try:
        header = read_header(data)
    except RemoteDataError as error:
        return Examination(None, [], [Problem.from_error(error)])
    problems = [] if key is None else list(_other_than_key(header, key))
    if not problems:
        problems += _other_than_layout(header, layout)
    if header.object_nbytes != data.nbytes:
        problems.append(
            _problem(
                Reason.WRONG_SIZE,
                f"{data.nbytes} bytes are there, the header says {header.object_nbytes}",
            )
        )
    ranges = list(_ranges(header, data, verify=verify))
    if verify:
        problems += _payload_problems(header, ranges)
    return Examination(header, ranges, problems)


def read_header(data: ObjectBytes) -> ObjectHeader:
    """The header at the start of an object. Raises ``RemoteDataError`` where it isn't valid."""
    nbytes = header_nbytes_of(read(data, 0, min(PREAMBLE.size, data.nbytes)))
    return decode_header(read(data, 0, min(nbytes, data.nbytes)))


def _other_than_key(header: ObjectHeader, key: BlockKey) -> Iterator[Problem]:
    for reason, what, found, expected in (
        (
            Reason.WRONG_FINGERPRINT,
            "fingerprint",
            header.fingerprint.hex(),
            key.namespace.fingerprint.hex(),
        ),
        (
            Reason.WRONG_GROUPS,
            "groups",
            bitmap_groups(header.group_bitmap),
            bitmap_groups(key.group_bitmap),
        ),
        (Reason.WRONG_SHARD, "shard", format_shard(header.shard), format_shard(key.shard)),
        (Reason.WRONG_BLOCK, "block hash", header.block_hash.hex(), key.block_hash.hex()),
    ):
        if found != expected:
            yield _problem(reason, f"the header has {what} {found}, the key says {expected}")


def _other_than_layout(header: ObjectHeader, layout: Layout | None) -> Iterator[Problem]:
    """At most one problem: what is wrong with a header whose sizes are off is anyone's guess."""
    if layout is not None:
        try:
            identify_object(header, layout, fingerprint(layout), require_checksums=False)
        except RemoteDataError as error:
            yield Problem.from_error(error)
    elif not header.is_complete:
        missing = sum(span.num_layers - span.complete.bit_count() for span in header.spans)
        yield _problem(
            Reason.INCOMPLETE, f"{missing} of {len(header.offsets)} layers are not written"
        )


def _ranges(header: ObjectHeader, data: ObjectBytes, *, verify: bool) -> Iterator[RangeDocument]:
    rows = zip(
        (
            (span.group, span.first_layer + index, bool(span.complete >> index & 1))
            for span in header.spans
            for index in range(span.num_layers)
        ),
        header.offsets.tolist(),
        header.sizes.tolist(),
        header.checksums.tolist(),
        strict=True,
    )
    for (group, layer, is_complete), offset, nbytes, expected in rows:
        found = None
        if not header.has_checksums:
            status = "absent"
        elif not is_complete:
            status = "incomplete"
        elif not verify:
            status = "unread"
        else:
            available = max(0, min(nbytes, data.nbytes - offset))
            found = checksum_pieces(data.pieces(offset, available))
            status = "ok" if found == expected else "mismatch"
        yield RangeDocument(
            group,
            layer,
            offset,
            nbytes,
            f"{expected:016x}" if header.has_checksums else None,
            None if found is None else f"{found:016x}",
            status,
        )


def _payload_problems(header: ObjectHeader, ranges: list[RangeDocument]) -> Iterator[Problem]:
    if not header.has_checksums:
        yield _problem(
            Reason.CHECKSUM_ABSENT,
            "the writer gave no range checksums: the payload can't be judged",
        )
    for index, row in enumerate(ranges):
        if row.status == "mismatch" and row.found is not None:
            yield Problem.from_error(range_mismatch(header, index, int(row.found, 16)))


def _problem(reason: Reason, detail: str) -> Problem:
    return Problem(reason.value, detail)
