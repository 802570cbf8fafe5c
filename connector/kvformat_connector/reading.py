"""What a load asks of a store: objects opened window by window, their headers, and their layers.

An object that is not exactly the one asked for is out before any of its payload is read. One that
is open is started again before its lease can end.

Source: spec/kvformat.md sections 8.2 and 8.3 (readers).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvformat.stores.protocol import Code
from kvformat_connector.answers import Moved, code_name
from kvformat_connector.breaker import Breaker
from kvformat_connector.objectcheck import Checker, Failures, RowBytes, expect_nbytes, rows_at
from kvformat_connector.objects import Rank
from kvformat_connector.rows import Indices, ObjectLayer, Rows
from kvformat_connector.sessions import GetSessions
from kvformat_connector.staging import Stage
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Channel

#: Why a row failed whose call was given up.
DEADLINE: Final = "deadline"
#: Without a range call that succeeded in this time, one header is read alone before all others.
_CANARY_AFTER_S: Final = 2.0
_NUM_CANARIES: Final = 2
#: Answers that may mean a node that is gone, and not an object that is.
TRANSPORT_CODES: Final = (Code.TRANSFER_FAILED, Code.UNAVAILABLE, Code.INTERNAL)
#: Answers of a range call to a session whose lease has run out.
_LAPSED_CODES: Final = (Code.LEASE_EXPIRED, Code.INVALID)


class ReadLayer(NamedTuple):
    """One layer of some rows in a stage, one a row, and what of it arrived."""

    stage: Stage
    moved: Moved


class ObjectReader:
    """The objects of one load. Every method waits for the store, on the channel's thread."""

    def __init__(
        self,
        rank: Rank,
        rows: Sequence[Rows],
        channel: Channel,
        breaker: Breaker,
        counters: Counters,
        checker: Checker,
        failures: Failures,
        deadline_s: float,
    ) -> None:
        self._rank = rank
        self._rows = rows
        self._channel = channel
        self._breaker = breaker
        self._counters = counters
        self._checker = checker
        self._failures = failures
        self._deadline_s = deadline_s
        self._sessions = GetSessions(rank.store, channel, rank.open_gets)
        #: Seconds that went into opening objects and reading their headers.
        self.header_s = 0.0

    def open(self, rows: Rows) -> Iterator[Indices]:
        """Open objects and check their headers, one window after the other; gives the rows of each
        that are right. The next window is opened when the caller asks for it."""
        for window in self._windows(rows):
            started = time.perf_counter()
            for chunk in self._header_chunks(rows, window):
                self._open_chunk(rows, chunk)
            self.header_s += time.perf_counter() - started
            yield _live(rows, window)

    def read_layer(self, rows: Rows, chunk: Indices, layer: ObjectLayer) -> ReadLayer | None:
        """One layer of some rows, in a stage that the caller releases. None where no stage came
        free in time, so that the load has failed."""
        self._sessions.renew(self._rank.session_window)
        stage = self._take_stage(chunk, layer.nbytes)
        if stage is None:
            return None
        try:
            return ReadLayer(stage, self._read(rows, chunk, stage, layer.offset))
        except BaseException:
            self._rank.load_staging.release(stage)
            raise

    def confirm(self, rows: Rows) -> None:
        """Read the headers again, now that everything else was read: what was replaced meanwhile
        has another write id. Each object is opened anew, so that a session which points at memory
        that the store has dealt out again can't answer for it."""
        for window in self._windows(rows):
            for chunk in self._header_chunks(rows, window):
                self._read_headers(rows, self._start(rows, chunk), self._checker.confirm_headers)

    def close(self) -> None:
        """End every session."""
        self._sessions.close()

    def _windows(self, rows: Rows) -> Iterator[Indices]:
        indices, size = rows.live_rows, self._rank.session_window
        for start in range(0, len(indices), size):
            yield indices[start : start + size]

    def _header_chunks(self, rows: Rows, window: Indices) -> Iterator[Indices]:
        nbytes = rows.template.object_map.header_nbytes
        for chunk in self._rank.chunks(_live(rows, window), nbytes, self._rank.load_staging):
            # All of the load may have failed by now.
            live = _live(rows, chunk)
            if len(live):
                yield live

    def _start(self, rows: Rows, chunk: Indices) -> Indices:
        """Open, or open again; the rows that could be."""
        codes = self._sessions.open(rows.keys_of(chunk))
        for row, code in zip(chunk.tolist(), codes, strict=True):
            if code < 0:
                self._failures.add(rows, row, code_name(code), "the object can't be opened")
        if min(codes) == max(codes) == Code.UNAVAILABLE and not self._channel.is_abandoned:
            self._breaker.trip("loading: the store doesn't answer")
        return _live(rows, chunk)

    def _open_chunk(self, rows: Rows, chunk: Indices) -> None:
        chunk = self._start(rows, chunk)
        tried: list[str] = []
        while len(chunk) and not self._breaker.is_proven(_CANARY_AFTER_S):
            if len(tried) == _NUM_CANARIES:
                reason = code_name(Code.UNAVAILABLE)
                self._breaker.trip("loading: no header can be read", tried)
                self._failures.add_all(self._rows, reason, "no header can be read")
                return
            if self._read_headers(rows, chunk[:1], self._checker.take_headers):
                self._breaker.succeeded()
            tried.append(rows.keys[int(chunk[0])])
            chunk = _live(rows, chunk[1:])
        self._read_headers(rows, chunk, self._checker.take_headers)

    def _read_headers(
        self, rows: Rows, chunk: Indices, judge: Callable[[Rows, Indices, RowBytes], object]
    ) -> bool:
        """Read and judge headers. False where nothing was read."""
        if not len(chunk):
            return True
        nbytes = rows.template.object_map.header_nbytes
        stage = self._take_stage(chunk, nbytes)
        if stage is None:
            return False
        try:
            moved = self._read(rows, chunk, stage, 0)
            what = "the header can't be read"
            arrived = expect_nbytes(self._failures, rows, chunk, moved, nbytes, what)
            judge(rows, chunk if arrived is None else chunk[arrived], rows_at(stage, arrived))
        finally:
            self._rank.load_staging.release(stage)
        return not all(code in TRANSPORT_CODES for code in moved.codes)

    def _take_stage(self, chunk: Indices, nbytes: int) -> Stage | None:
        stage = self._rank.load_staging.take(len(chunk), nbytes, self._deadline_s)
        if stage is None:
            fail_for_staging(self._failures, self._rows)
        return stage

    def _read(self, rows: Rows, chunk: Indices, stage: Stage, offset: int) -> Moved:
        """Fill a stage from ``offset`` of the objects on."""
        keys = rows.keys_of(chunk)
        call = self._rank.store.get_ranges
        moved = self._rank.move_stage(self._channel, call, keys, stage, None, offset)
        if not moved.is_whole and min(moved.codes) < 0:
            moved = self._read_lapsed(keys, moved, stage, offset)
        if moved.is_whole or max(moved.codes) > 0:
            self._breaker.succeeded()
        return moved

    def _read_lapsed(self, keys: list[str], moved: Moved, stage: Stage, offset: int) -> Moved:
        """What is moved after reading rows again whose lease ran out, which starting the session
        again mends; what the key holds by now is for the checksum to say."""
        lapsed = [row for row, code in enumerate(moved.codes) if code in _LAPSED_CODES]
        opened = self._sessions.open([keys[row] for row in lapsed])
        again = [row for row, code in zip(lapsed, opened, strict=True) if code == Code.OK]
        if not again:
            return moved
        self._counters.add("load.reopened", len(again))
        retried = self._rank.move_stage(
            self._channel,
            self._rank.store.get_ranges,
            [keys[row] for row in again],
            stage,
            np.array(again, np.int64),
            offset,
        )
        codes = list(moved.codes)
        for row, code in zip(again, retried.codes, strict=True):
            codes[row] = code
        return Moved(codes, is_whole=codes == [stage.row_nbytes] * len(codes))


def fail_for_staging(failures: Failures, all_rows: Sequence[Rows]) -> None:
    """Fail a whole load that got no stage in time. Calls that were given up may hold all of the
    memory for long, so no other row of it waits for any."""
    failures.add_all(all_rows, DEADLINE, "no staging memory is free")


def _live(rows: Rows, indices: Indices) -> Indices:
    live: Indices = indices[rows.live[indices]]
    return live
