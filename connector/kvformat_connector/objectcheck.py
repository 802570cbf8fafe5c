"""Is an object the one that was asked for? Judged in a stage, before its bytes go anywhere else.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvformat.acceptance import check_header, range_mismatch
from kvformat.checksum import checksum
from kvformat.errors import RemoteDataError
from kvformat.header import ObjectHeader, decode_header
from kvformat_connector.answers import code_name
from kvformat_connector.objects import Indices, ObjectLayer, Rows

Buffer = bytes | bytearray | memoryview


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


class Checker:
    """The headers of a load's rows, and whether what arrives is what they describe."""

    def __init__(self, all_rows: Sequence[Rows], failures: Failures) -> None:
        self._failures = failures
        self._headers: dict[int, list[ObjectHeader | None]] = {}
        self._checksums: dict[int, NDArray[np.uint64]] = {}
        for rows in all_rows:
            self._headers[id(rows)] = [None] * len(rows)
            num_ranges = len(rows.template.object_map.layers)
            self._checksums[id(rows)] = np.zeros((len(rows), num_ranges), np.uint64)

    def take_header(self, rows: Rows, row: int, data: Buffer) -> bool:
        """Judge the header of a row. False where the row has failed by it."""
        try:
            template = rows.template
            header = decode_header(data, template.object_map.header_nbytes)
            check_header(header, template.object_map, template.fingerprint, rows.block_hashes[row])
        except RemoteDataError as error:
            self._failures.add(rows, row, error.reason.value, error.detail)
            return False
        self._headers[id(rows)][row] = header
        self._checksums[id(rows)][row] = header.checksums
        return True

    def check_layer(
        self, rows: Rows, layer: ObjectLayer, chunk: Indices, row_bytes: Callable[[int], Buffer]
    ) -> Indices:
        """Positions in ``chunk`` whose bytes of one layer, ``row_bytes(position)``, are right.
        The others fail."""
        expected = self._checksums[id(rows)][chunk, layer.range_index]
        found = np.fromiter(
            (checksum(row_bytes(position)) for position in range(len(chunk))),
            np.uint64,
            len(chunk),
        )
        is_right = found == expected
        if not is_right.all():
            for position in np.flatnonzero(~is_right).tolist():
                row = int(chunk[position])
                header = self._headers[id(rows)][row]
                assert header is not None
                error = range_mismatch(header, layer.range_index, int(found[position]))
                self._failures.add(rows, row, error.reason.value, error.detail)
        return np.flatnonzero(is_right)


def expect_nbytes(
    failures: Failures,
    rows: Rows,
    chunk: Indices,
    codes: Sequence[int],
    nbytes: int,
    what: str,
) -> Indices:
    """Positions in ``chunk`` whose code is ``nbytes``, the size asked for. The others fail."""
    if codes == [nbytes] * len(codes):
        return np.arange(len(chunk))
    for position, code in enumerate(codes):
        if code != nbytes:
            failures.add(rows, int(chunk[position]), code_name(min(code, -1)), what)
    return np.flatnonzero(np.asarray(codes, np.int64) == nbytes)
