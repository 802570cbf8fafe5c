"""One step's loads: layer after layer, ahead of the computation.

Bytes arrive in a stage; a layer whose bytes are not the ones that its object's header describes is
out before the engine reads it, and what is right goes on to the cache. One thread waits for the
store while another one checks and copies what came before.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec

from kvformat.errors import Reason
from kvformat.stores.protocol import Code
from kvformat_connector.answers import code_name
from kvformat_connector.breaker import Breaker
from kvformat_connector.damaged import suspects_among
from kvformat_connector.depth import Depth
from kvformat_connector.engine import LayerAddress
from kvformat_connector.objectcheck import Checker, Failures, among, expect_nbytes, rows_at
from kvformat_connector.objects import Rank
from kvformat_connector.reading import DEADLINE, ObjectReader, ReadLayer
from kvformat_connector.rows import Indices, ObjectLayer, Rows
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Channels, Lane

logger = logging.getLogger(__name__)

#: A call is late when it has taken a fifth of the deadline: a store that works takes a tenth of it,
#: for calls are made smaller until it does. Of so many deadlines together the late calls of a step
#: take its last chance: a store whose every call is only just in time would hold the batch up for
#: as long as there are calls.
LATE_SHARE: Final = 0.2
_MAX_LATE_DEADLINES: Final = 2


class LoadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What failed, as the engine, the savers and the scheduler need to know it."""

    block_ids: set[int]
    request_ids: set[str]
    block_hashes: list[bytes]
    suspects: list[str]  #: keys of objects that were rejected for what they hold


class LoadStep:
    """The loads of one step. ``start``, ``wait`` per layer and ``finish`` are the engine's thread;
    the channel's calls the store, the lane's checks and copies."""

    def __init__(
        self,
        rank: Rank,
        rows: list[Rows],
        channels: Channels,
        lane: Lane,
        depth: Depth,
        breaker: Breaker,
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._rank = rank
        self._rows = rows
        self._channels = channels
        self._channel = channels.current
        self._lane = lane
        self._depth = depth
        self._breaker = breaker
        self._counters = counters
        self._deadline_s = deadline_s
        self._failures = Failures()
        self._checker = Checker(rows, self._failures, verifies_payload=rank.verifies_payload)
        self._reader = ObjectReader(
            rank, rows, self._channel, breaker, counters, self._checker, self._failures, deadline_s
        )
        #: Rows whose objects are still to be opened; the channel's thread.
        self._unopened = list(rows)
        self._position = {address: index for index, address in enumerate(rank.sequence)}
        #: Layers that may be read, that were begun, and that are in memory and verified or failed.
        self._num_allowed = 0
        self._num_begun = 0
        self._num_ready = 0
        self._is_reading = False
        #: The engine's thread waits until so many layers are ready.
        self._awaiting: tuple[int, Future[None]] | None = None
        self._turn = threading.Lock()
        self._ended: Future[None] | None = None
        self._awaited: set[int] = set()
        self._waited_s = 0.0
        self._late_before_s = self._channel.late_s
        # Nothing lands in the cache once the engine has given the load up.
        self._gate = threading.Lock()
        self._is_given_up = False

    def start(self) -> None:
        """Open the objects, check their headers, and read the first layers."""
        self._depth.pause()
        if self._breaker.is_open:
            self._failures.add_all(self._rows, code_name(Code.UNAVAILABLE), "the breaker is open")
            self._is_given_up = True
            return
        # The engine may still be writing to blocks that it has dealt out again.
        self._lane.post(self._guarded, self._rank.device.wait, self._rank.device.mark())
        self._allow(self._depth.num_layers)

    def wait(self, address: LayerAddress) -> None:
        """Return when a layer is in memory and verified, or has failed."""
        position = self._position[address]
        self._awaited.add(position)
        if self._is_given_up:
            return
        depth = self._depth
        depth.computed()
        if position + 1 + depth.num_layers > self._num_allowed:
            staging = self._rank.load_staging
            depth.adapt(
                num_queued=self._num_allowed - self._num_ready,
                free_nbytes=staging.max_nbytes - staging.num_taken_nbytes,
            )
            self._allow(position + 1 + depth.num_layers_at_once)
        if self._num_ready <= position:
            self._wait_ready(position + 1)
        depth.waited()

    def finish(self) -> LoadOutcome:
        """Say what failed, when everything has been read and every session ended."""
        if self._awaited and not self._is_given_up:
            # Layers after the last one that was waited for may yet be computed, such as a draft
            # model's: they are waited for now.
            self._allow(len(self._rank.sequence))
        self._submit_end()
        self._wait_ready(self._num_allowed)
        # The channel's last job: once it has run, no other one touches what is read here.
        assert self._ended is not None
        self._wait_for(self._ended)
        self._fail_unawaited()
        failures = self._failures.seal()
        self._count()
        return LoadOutcome(
            block_ids={id_ for f in failures for id_ in f.rows.block_ids_of(f.row)},
            request_ids={owner for f in failures for owner in f.rows.owners_of(f.row)},
            block_hashes=[f.rows.block_hashes[f.row] for f in failures],
            suspects=suspects_among(failures),
        )

    def _count(self) -> None:
        count_loads(self._counters, self._rows, self._failures)
        self._counters.observe("header", self._reader.header_s)
        self._counters.observe("layer_wait", self._waited_s)

    def _wait_for(self, job: Future[None]) -> None:
        if job.done() or self._is_given_up:
            return
        started = time.perf_counter()
        is_done = self._channel.wait(job, self._deadline_s)
        self._waited_s += time.perf_counter() - started
        if not is_done:
            self._give_up()

    def _give_up(self) -> None:
        with self._gate:
            self._is_given_up = True
        self._channels.leave(self._channel)
        detail = f"a call took more than {self._deadline_s:g} s"
        self._failures.add_all(self._rows, DEADLINE, detail)
        self._breaker.trip(f"loading: {detail}", [rows.keys[0] for rows in self._rows[:1]])

    def _wait_ready(self, num_layers: int) -> None:
        with self._turn:
            if self._num_ready >= num_layers:
                return
            ready: Future[None] = Future()
            self._awaiting = num_layers, ready
        self._wait_for(ready)

    def _note_ready(self) -> None:
        with self._turn:
            self._num_ready += 1
            awaiting = self._awaiting
            if awaiting is None or self._num_ready < awaiting[0]:
                return
            self._awaiting = None
        awaiting[1].set_result(None)

    def _allow(self, num_layers: int) -> None:
        """Have so many layers read. A thread that reads goes on by itself."""
        last = len(self._rank.sequence)
        with self._turn:
            self._num_allowed = max(self._num_allowed, min(num_layers, last))
            if not self._is_reading and self._num_begun < self._num_allowed:
                self._is_reading = True
                self._channel.post(self._read_allowed)
        if self._num_allowed == last:
            self._submit_end()

    def _read_allowed(self) -> None:
        while True:
            with self._turn:
                position = self._num_begun
                if position == self._num_allowed:
                    self._is_reading = False
                    return
                self._num_begun += 1
            self._read_layer(self._rank.sequence[position])

    def _submit_end(self) -> None:
        """Nothing more is read: sessions end while the last layers are computed."""
        if self._ended is None:
            self._ended = self._channel.submit(self._end)

    def _end(self) -> None:
        if not self._rank.verifies_payload and not self._is_given_up:
            for rows in self._rows:
                self._guarded(self._reader.confirm, rows)
        self._reader.close()

    def _guarded(self, job: Callable[..., None], *arguments: object) -> None:
        # A job that raises has moved nothing that can be trusted; the step goes on without it.
        try:
            job(*arguments)
        except Exception as error:
            logger.exception("loading failed")
            reason = Reason.TRANSFER_FAILED.value
            self._failures.add_all(self._rows, reason, f"loading raised {error!r}")

    def _read_layer(self, address: LayerAddress) -> None:
        self._guarded(self._read_layer_now, address)
        # After the checks of all its parts, which the lane has been given.
        self._lane.post(self._note_ready)
        if self._unopened:
            # Objects that hold none of the first layer have waited for it.
            self._guarded(self._open_others)

    def _read_layer_now(self, address: LayerAddress) -> None:
        num_nbytes, seconds = 0, 0.0
        for rows in self._rows:
            layer = rows.template.layers.get(address)
            if layer is None:
                continue
            for window in self._opened(rows):
                started = time.perf_counter()
                for chunk in self._rank.chunks(window, layer.nbytes, self._rank.load_staging):
                    self._read_chunk(rows, layer, chunk)
                seconds += time.perf_counter() - started
                num_nbytes += len(window) * layer.nbytes
        self._depth.transferred(num_nbytes, seconds)

    def _opened(self, rows: Rows) -> Iterator[Indices]:
        """Live rows whose objects are open: of the first layer window by window, as they're
        opened, else all together."""
        if rows not in self._unopened:
            return iter([rows.live_rows])
        self._unopened.remove(rows)
        return self._reader.open(rows)

    def _open_others(self) -> None:
        for rows in list(self._unopened):
            for _ in self._opened(rows):
                if self._is_given_up:
                    return

    def _read_chunk(self, rows: Rows, layer: ObjectLayer, chunk: Indices) -> None:
        if self._is_given_up or not rows.num_live:
            return
        read = self._reader.read_layer(rows, chunk, layer)
        if read is not None:
            self._lane.post(self._guarded, self._check, rows, layer, chunk, read)
        self._give_up_late()

    def _give_up_late(self) -> None:
        """Give the rest up where calls, each of them in time, hold the step up all the same."""
        late_s = self._channel.late_s - self._late_before_s
        if late_s > _MAX_LATE_DEADLINES * self._deadline_s:
            detail = f"late calls took {late_s:g} s together"
            self._failures.add_all(self._rows, DEADLINE, detail)
            self._breaker.trip(f"loading: {detail}", [rows.keys[0] for rows in self._rows[:1]])

    def _check(self, rows: Rows, layer: ObjectLayer, chunk: Indices, read: ReadLayer) -> None:
        stage = read.stage
        try:
            if not rows.num_live:
                return
            what = f"group {layer.group} layer {layer.layer}: the range can't be read"
            arrived = expect_nbytes(self._failures, rows, chunk, read.moved, layer.nbytes, what)
            found = chunk if arrived is None else chunk[arrived]
            row_bytes = rows_at(stage, arrived)
            right = among(arrived, self._checker.check_layer(rows, layer, found, row_bytes))
            loaded = chunk if right is None else chunk[right]
            block_ids, positions = rows.destinations(layer.group, loaded)
            positions = among(right, positions)
            with self._gate:
                if not self._is_given_up:
                    self._rank.device.scatter(layer.pieces, block_ids, stage.rows, positions)
        finally:
            self._rank.load_staging.release(stage)

    def _fail_unawaited(self) -> None:
        """A layer that the engine computed without waiting for it was computed on anything."""
        last = max(self._awaited, default=len(self._rank.sequence))
        for position, address in enumerate(self._rank.sequence[:last]):
            if position not in self._awaited:
                self._failures.add_all(
                    self._rows,
                    Reason.TRANSFER_FAILED.value,
                    f"group {address.group} layer {address.layer}: the engine never waited for it",
                )


def count_loads(counters: Counters, loaded: Sequence[Rows], failures: Failures) -> None:
    """Count what was loaded, and what was not used by reason; the operator is told of that."""
    for rows in loaded:
        counters.add("load.blocks", rows.num_live)
        counters.add("load.nbytes", rows.num_live * rows.template.object_map.nbytes)
    for failure in failures.seal():
        key = failure.rows.keys[failure.row]
        counters.reject(key, failure.reason, failure.detail)
        logger.warning("rejected %s: %s [%s]", key, failure.detail, failure.reason)
