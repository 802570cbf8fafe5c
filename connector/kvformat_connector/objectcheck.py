"""Is an object the one that was asked for? Judged in a stage, before its bytes go anywhere else.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat.acceptance import check_header, check_same_write, range_mismatch
from kvformat.checksum import checksum
from kvformat.errors import RemoteDataError
from kvformat.header import decode_header
from kvformat_connector.answers import Moved, code_name
from kvformat_connector.rows import Indices, ObjectLayer, Rows
from kvformat_connector.staging import Stage

#: The bytes of a row, by its position in what is checked.
RowBytes = Callable[[int], memoryview]


class Failure(msgspec.Struct, frozen=True):
    """A row that was not loaded, and why."""

    rows: Rows
    row: int
    reason: str
    detail: str


class Failures:
    """What failed so far. Any thread may add; a row fails once, for its first reason."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: list[Failure] = []
        self._is_sealed = False

    def add(self, rows: Rows, row: int, reason: str, detail: str) -> None:
        """This row isn't loaded."""
        with self._lock:
            if rows.live[row] and not self._is_sealed:
                rows.live[row] = False
                self._failures.append(Failure(rows, row, reason, detail))

    def add_all(self, all_rows: Sequence[Rows], reason: str, detail: str) -> None:
        """No row that has not failed yet is loaded."""
        for rows in all_rows:
            for row in rows.live_rows.tolist():
                self.add(rows, row, reason, detail)

    def seal(self) -> list[Failure]:
        """All of them; what a thread that was left behind finds later changes nothing."""
        with self._lock:
            self._is_sealed = True
            return list(self._failures)


class _Taken(NamedTuple):
    """A header that is right."""

    data: bytes
    write_id: bytes
    checksums: bytes


class Checker:
    """The headers of a load's rows, and whether what arrives is what they describe."""

    def __init__(
        self,
        all_rows: Sequence[Rows],
        failures: Failures,
        *,
        verifies_payload: bool = True,
    ) -> None:
        """``verifies_payload``: by checksums; else every header is to be confirmed at the end."""
        self._failures = failures
        self._verifies_payload = verifies_payload
        #: By row, the header as it was read, and its write id.
        self._headers: dict[int, list[_Taken | None]] = {}
        self._checksums: dict[int, NDArray[np.uint64]] = {}
        for rows in all_rows:
            self._headers[id(rows)] = [None] * len(rows)
            num_ranges = len(rows.template.object_map.layers)
            self._checksums[id(rows)] = np.zeros((len(rows), num_ranges), np.uint64)

    def take_headers(self, rows: Rows, chunk: Indices, row_bytes: RowBytes) -> Indices | None:
        """Judge the headers of some rows, ``row_bytes(position)``. Positions in ``chunk`` that are
        right; None where all are. The others fail."""
        headers = self._headers[id(rows)]
        right, found = [], []
        for position, row in enumerate(chunk.tolist()):
            taken = self._take(rows, row, bytes(row_bytes(position)))
            if taken is not None:
                headers[row] = taken
                right.append(position)
                found.append(taken.checksums)
        is_right = None if len(right) == len(chunk) else np.array(right, np.int64)
        if found:
            table = np.frombuffer(b"".join(found), "<u8").reshape(len(found), -1)
            self._checksums[id(rows)][chunk if is_right is None else chunk[is_right]] = table
        return is_right

    def confirm_headers(self, rows: Rows, chunk: Indices, row_bytes: RowBytes) -> None:
        """Judge headers that were read again: each must still be that of the same write."""
        for position, row in enumerate(chunk.tolist()):
            again = self._take(rows, row, bytes(row_bytes(position)))
            first = self._headers[id(rows)][row]
            if again is None or first is None or again.write_id == first.write_id:
                continue
            try:
                check_same_write(decode_header(first.data), decode_header(again.data))
            except RemoteDataError as error:
                self._failures.add(rows, row, error.reason.value, error.detail)

    def _take(self, rows: Rows, row: int, data: bytes) -> _Taken | None:
        template, block_hash = rows.template, rows.block_hashes[row]
        usual = template.usual_header.match(data, block_hash)
        if usual is not None:
            return _Taken(data, *usual)
        try:
            header = decode_header(data, template.object_map.header_nbytes)
            check_header(
                header,
                template.object_map,
                template.fingerprint,
                block_hash,
                require_checksums=self._verifies_payload,
            )
        except RemoteDataError as error:
            self._failures.add(rows, row, error.reason.value, error.detail)
            return None
        return _Taken(data, header.write_id, header.checksums.tobytes())

    def check_layer(
        self, rows: Rows, layer: ObjectLayer, chunk: Indices, row_bytes: RowBytes
    ) -> Indices | None:
        """Positions in ``chunk`` whose bytes of one layer, ``row_bytes(position)``, are right;
        None where all are. The others fail."""
        if not self._verifies_payload:
            return None
        expected = self._checksums[id(rows)][chunk, layer.range_index]
        found = np.fromiter(
            (checksum(row_bytes(position)) for position in range(len(chunk))),
            np.uint64,
            len(chunk),
        )
        is_right = found == expected
        if is_right.all():
            return None
        for position in np.flatnonzero(~is_right).tolist():
            row = int(chunk[position])
            taken = self._headers[id(rows)][row]
            assert taken is not None
            header = decode_header(taken.data)
            error = range_mismatch(header, layer.range_index, int(found[position]))
            self._failures.add(rows, row, error.reason.value, error.detail)
        return np.flatnonzero(is_right)


def expect_nbytes(
    failures: Failures,
    rows: Rows,
    chunk: Indices,
    moved: Moved,
    nbytes: int,
    what: str,
) -> Indices | None:
    """Positions in ``chunk`` of which all ``nbytes`` were moved; None where all are. The others
    fail."""
    codes, is_whole = moved
    if is_whole:
        return None
    for position, code in enumerate(codes):
        if code != nbytes:
            failures.add(rows, int(chunk[position]), code_name(min(code, -1)), what)
    return np.flatnonzero(np.asarray(codes, np.int64) == nbytes)


def among(positions: Indices | None, chosen: Indices | None) -> Indices | None:
    """Those of these positions that are ``chosen`` by their place among them; None means all."""
    if positions is None or chosen is None:
        return chosen if positions is None else positions
    found: Indices = positions[chosen]
    return found


def rows_at(stage: Stage, positions: Indices | None, part: slice = slice(None)) -> RowBytes:
    """The bytes ``part`` of the stage's row at ``positions[index]``, by ``index``; None means all
    rows."""
    if positions is None:
        return lambda index: stage.row(index)[part]
    return lambda index: stage.row(int(positions[index]))[part]
