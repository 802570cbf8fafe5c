"""One step's loads: headers first, then layer after layer, ahead of the computation.

An object that is not exactly the one asked for is out before any of its payload is read; a layer
whose bytes are not the ones the header describes is out before the engine reads them. Bytes arrive
in a stage; what is right goes on to the cache. One thread waits for the store while another one
checks and copies what came before.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np

from kvformat.errors import Reason
from kvformat.stores.protocol import Code
from kvformat_connector.answers import code_name
from kvformat_connector.breaker import Breaker
from kvformat_connector.damaged import suspects_among
from kvformat_connector.depth import Depth
from kvformat_connector.engine import LayerAddress
from kvformat_connector.objectcheck import Checker, Failures, expect_nbytes
from kvformat_connector.objects import Indices, ObjectLayer, Rank, Rows
from kvformat_connector.sessions import GetSessions
from kvformat_connector.staging import Stage
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Channels, Lane

logger = logging.getLogger(__name__)

#: Why a row failed whose call was given up.
DEADLINE: Final = "deadline"
#: Without a range call that succeeded in this time, one header is read alone before all others.
_CANARY_AFTER_S: Final = 2.0
_NUM_CANARIES: Final = 2
#: Answers that may mean a node that is gone, and not an object that is.
TRANSPORT_CODES: Final = (Code.TRANSFER_FAILED, Code.UNAVAILABLE, Code.INTERNAL)
#: Answers of a range call to a session whose lease has run out.
_LAPSED_CODES: Final = (Code.LEASE_EXPIRED, Code.INVALID)


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
        self._sessions = GetSessions(rank.store, self._channel, rank.open_gets)
        self._failures = Failures()
        self._checker = Checker(rows, self._failures)
        self._position = {address: index for index, address in enumerate(rank.sequence)}
        self._layers: list[Future[None]] = []
        self._awaited: set[int] = set()
        self._waited_s = 0.0
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
        self._lane.submit(self._guarded, self._rank.device.wait, self._rank.device.mark())
        self._channel.submit(self._guarded, self._open_objects)
        self._submit_up_to(self._depth.num_layers)

    def wait(self, address: LayerAddress) -> None:
        """Return when a layer is in memory and verified, or has failed."""
        position = self._position[address]
        self._awaited.add(position)
        if self._is_given_up:
            return
        self._depth.computed()
        self._submit_up_to(position + 1 + self._depth.num_layers)
        self._wait_for(self._layers[position])
        self._depth.waited()

    def finish(self) -> LoadOutcome:
        """End the sessions and say what failed."""
        if self._awaited and not self._is_given_up:
            # Layers after the last one that was waited for may yet be computed, such as a draft
            # model's: they are waited for now.
            self._submit_up_to(len(self._rank.sequence))
        for layer in self._layers:
            self._wait_for(layer)
        # The channel's last job: once it has run, no other one touches what is read here.
        ended = self._channel.submit(self._sessions.close)
        if not self._is_given_up:
            self._wait_for(ended)
        self._fail_unawaited()
        failures = self._failures.seal()
        self._count(failures)
        return LoadOutcome(
            block_ids={id_ for f in failures for id_ in f.rows.block_ids_of(f.row)},
            request_ids={owner for f in failures for owner in f.rows.owners_of(f.row)},
            block_hashes=[f.rows.block_hashes[f.row] for f in failures],
            suspects=suspects_among(failures),
        )

    def _count(self, failures: Sequence[object]) -> None:
        count_failures(self._counters, self._failures)
        self._counters.observe("layer_wait", self._waited_s)
        for rows in self._rows:
            num_loaded = int(rows.live.sum())
            self._counters.add("load.blocks", num_loaded)
            self._counters.add("load.nbytes", num_loaded * rows.template.object_map.nbytes)

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

    def _submit_up_to(self, num_layers: int) -> None:
        for address in self._rank.sequence[len(self._layers) : num_layers]:
            done: Future[None] = Future()
            self._layers.append(done)
            self._channel.submit(self._read_layer, address, done)

    def _guarded(self, job: Callable[..., None], *arguments: object) -> None:
        # A job that raises has moved nothing that can be trusted; the step goes on without it.
        try:
            job(*arguments)
        except Exception as error:
            logger.exception("loading failed")
            reason = Reason.TRANSFER_FAILED.value
            self._failures.add_all(self._rows, reason, f"loading raised {error!r}")

    def _open_objects(self) -> None:
        with self._counters.timed("header"):
            for rows in self._rows:
                header_nbytes = rows.template.object_map.header_nbytes
                staging = self._rank.load_staging
                for chunk in self._rank.chunks(rows.live_rows, header_nbytes, staging):
                    self._open_chunk(rows, chunk)

    def _open_chunk(self, rows: Rows, chunk: Indices) -> None:
        codes = self._sessions.open([rows.keys[row] for row in chunk.tolist()])
        for row, code in zip(chunk.tolist(), codes, strict=True):
            if code < 0:
                self._failures.add(rows, row, code_name(code), "the object can't be opened")
        if min(codes) == max(codes) == Code.UNAVAILABLE and not self._channel.is_abandoned:
            self._breaker.trip("loading: the store doesn't answer")
        chunk = chunk[rows.live[chunk]]
        tried: list[str] = []
        while len(chunk) and not self._breaker.is_proven(_CANARY_AFTER_S):
            if len(tried) == _NUM_CANARIES:
                reason = code_name(Code.UNAVAILABLE)
                self._breaker.trip("loading: no header can be read", tried)
                self._failures.add_all(self._rows, reason, "no header can be read")
                return
            if self._read_headers(rows, chunk[:1]):
                self._breaker.succeeded()
            tried.append(rows.keys[int(chunk[0])])
            chunk = chunk[1:]
        self._read_headers(rows, chunk)

    def _read_headers(self, rows: Rows, chunk: Indices) -> bool:
        """Read and judge headers. False where the store could not be read from."""
        if not len(chunk):
            return True
        nbytes = rows.template.object_map.header_nbytes
        stage = self._take_stage(rows, chunk, nbytes)
        if stage is None:
            return True
        try:
            codes = self._read(rows, chunk, stage, 0)
            what = "the header can't be read"
            for position in expect_nbytes(self._failures, rows, chunk, codes, nbytes, what):
                self._checker.take_header(rows, int(chunk[position]), stage.row(position))
        finally:
            self._rank.load_staging.release(stage)
        return not all(code in TRANSPORT_CODES for code in codes)

    def _read_layer(self, address: LayerAddress, done: Future[None]) -> None:
        self._guarded(self._read_layer_now, address)
        # After the checks of all its parts, which the lane has been given.
        self._lane.submit(done.set_result, None)

    def _read_layer_now(self, address: LayerAddress) -> None:
        self._sessions.renew()
        for rows in self._rows:
            layer = rows.template.layers.get(address)
            if layer is None:
                continue
            staging = self._rank.load_staging
            for chunk in self._rank.chunks(rows.live_rows, layer.nbytes, staging):
                if self._is_given_up:
                    return
                stage = self._take_stage(rows, chunk, layer.nbytes)
                if stage is None:
                    continue
                started = time.perf_counter()
                try:
                    codes = get_layer(self._read, rows, chunk, stage, layer)
                except BaseException:
                    staging.release(stage)
                    raise
                self._depth.transferred(time.perf_counter() - started)
                self._lane.submit(self._guarded, self._check, rows, layer, chunk, stage, codes)

    def _take_stage(self, rows: Rows, chunk: Indices, nbytes: int) -> Stage | None:
        # Calls that were given up may still hold all of it.
        stage = self._rank.load_staging.take(len(chunk), nbytes, self._deadline_s)
        if stage is None:
            for row in chunk.tolist():
                self._failures.add(rows, row, DEADLINE, "no staging memory is free")
        return stage

    def _read(self, rows: Rows, chunk: Indices, stage: Stage, offset: int) -> list[int]:
        """Fill a stage from ``offset`` of the objects on; bytes read by row, or a code."""
        keys = rows.keys_of(chunk)
        call = self._rank.store.get_ranges
        codes = self._rank.move_stage(self._channel, call, keys, stage, None, offset)
        if min(codes) < 0:
            codes = self._read_lapsed(keys, codes, stage, offset)
        if max(codes) > 0:
            self._breaker.succeeded()
        return codes

    def _read_lapsed(
        self, keys: list[str], codes: list[int], stage: Stage, offset: int
    ) -> list[int]:
        """Codes after reading rows again whose lease ran out, which starting the session again
        mends; what the key holds by now is for the checksum to say."""
        lapsed = [row for row, code in enumerate(codes) if code in _LAPSED_CODES]
        opened = self._sessions.reopen([keys[row] for row in lapsed])
        again = [row for row, code in zip(lapsed, opened, strict=True) if code == Code.OK]
        if not again:
            return codes
        self._counters.add("load.reopened", len(again))
        retried = self._rank.move_stage(
            self._channel,
            self._rank.store.get_ranges,
            [keys[row] for row in again],
            stage,
            np.array(again, np.int64),
            offset,
        )
        codes = list(codes)
        for row, code in zip(again, retried, strict=True):
            codes[row] = code
        return codes

    def _check(
        self, rows: Rows, layer: ObjectLayer, chunk: Indices, stage: Stage, codes: list[int]
    ) -> None:
        try:
            what = f"group {layer.group} layer {layer.layer}: the range can't be read"
            arrived = expect_nbytes(self._failures, rows, chunk, codes, layer.nbytes, what)
            right = arrived[
                self._checker.check_layer(
                    rows, layer, chunk[arrived], lambda index: stage.row(int(arrived[index]))
                )
            ]
            block_ids, positions = rows.destinations(layer.group, chunk[right])
            if len(right) < len(chunk):
                positions = right if positions is None else right[positions]
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


def get_layer(
    read: Callable[[Rows, Indices, Stage, int], list[int]],
    rows: Rows,
    chunk: Indices,
    stage: Stage,
    layer: ObjectLayer,
) -> list[int]:
    """Read one layer of some rows to a stage."""
    return read(rows, chunk, stage, layer.offset)


def count_failures(counters: Counters, failures: Failures) -> None:
    """Count what was not used, by reason, and tell the operator."""
    for failure in failures.seal():
        key = failure.rows.keys[failure.row]
        counters.reject(key, failure.reason, failure.detail)
        logger.warning("rejected %s: %s [%s]", key, failure.detail, failure.reason)
