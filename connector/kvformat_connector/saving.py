"""One step's saves: each layer as it is computed, the header last, then the commit.

A layer is copied to a stage as soon as it is computed, and stored from there. So a step ends when
its bytes are copied, not when they are stored; the engine may use its blocks again at once; and a
call that hangs reads nothing that has changed meanwhile. Where the engine computes on the same
processor that would do the storing, stages are held until the step has been computed.

An object is committed only if every byte of it was written, from a computation that rests on no
failed load; else it is revoked and nobody ever sees it.

Source: spec/kvformat.md section 8.1 (writers).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Set
from concurrent.futures import Future
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvformat.checksum import checksum
from kvformat.header import encode_header, new_header
from kvformat.stores.protocol import Code
from kvformat_connector.answers import code_name
from kvformat_connector.breaker import Breaker
from kvformat_connector.engine import LayerAddress
from kvformat_connector.messages import StoredBlock
from kvformat_connector.objects import Rank
from kvformat_connector.rows import Indices, ObjectLayer, Rows
from kvformat_connector.sessions import PutSessions
from kvformat_connector.staging import Stage
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Channel, Lane

logger = logging.getLogger(__name__)

_WRITE_ID_NBYTES: Final = 16
#: Only calls that were left behind hold stages of headers for long.
_HEADER_WAIT_S: Final = 1.0


class _Copied(NamedTuple):
    """One layer of some rows, in a stage."""

    rows: Rows
    layer: ObjectLayer
    chunk: Indices
    stage: Stage


class SaveStep:
    """The saves of one step. ``start``, ``put`` per layer, ``end`` and ``is_done`` are the engine's
    thread; the lane copies, the channel calls the store."""

    def __init__(
        self,
        rank: Rank,
        rows: list[Rows],
        channel: Channel,
        lane: Lane,
        breaker: Breaker,
        counters: Counters,
        wait_s: float,
        *,
        may_commit_early: bool = False,
    ) -> None:
        """``may_commit_early``: nothing in this step can taint what it computes, so an object is
        committed as soon as its own last layer is written."""
        self._rank = rank
        self._rows = rows
        self._channel = channel
        self._lane = lane
        self._breaker = breaker
        self._counters = counters
        #: How long this step may wait for stages that earlier puts still hold.
        self._wait_left_s = wait_s
        self._sessions = PutSessions(rank.store, channel)
        self._is_opened = False
        self._may_commit_early = may_commit_early
        self._committed: set[int] = set()
        self._copied: list[Future[None]] = []
        self._put: set[LayerAddress] = set()
        self._done: Future[None] = Future()
        self._ended_at = 0.0
        #: Object index and block hash of what has been committed.
        self.committed: list[StoredBlock] = []
        self._found_no_stage = False
        #: Copies that are stored when the step has been computed; the lane's.
        self._held: list[_Copied] = []
        #: Stages that no call has been given yet.
        self._queued: dict[int, Stage] = {}
        self._lock = threading.Lock()
        #: Per list of rows ``[num_rows, num_ranges]``, and which ranges have been copied.
        self._checksums: dict[int, NDArray[np.uint64]] = {}
        self._written: dict[int, NDArray[np.bool_]] = {}
        for row_list in rows:
            num_ranges = len(row_list.template.object_map.layers)
            self._checksums[id(row_list)] = np.zeros((len(row_list), num_ranges), np.uint64)
            self._written[id(row_list)] = np.zeros(num_ranges, bool)

    def start(self) -> None:
        """Open the objects, where they are stored while the step is computed."""
        if self._rank.saves_overlap:
            self._open_once()

    def put(self, address: LayerAddress) -> None:
        """Write one layer, now that the engine has computed it. Doing it twice is fine."""
        if address in self._put:
            return
        self._put.add(address)
        mark = self._rank.device.mark()
        self._copied.append(self._lane.submit(self._guarded, self._copy_layer, address, mark))

    def end(self, tainted: set[str]) -> None:
        """Let the engine use its blocks again: return when everything is copied. What is whole is
        committed after that, the rest revoked, and all objects of ``tainted`` requests."""
        for copied in self._copied:
            copied.result()
        self._ended_at = time.perf_counter()
        self._lane.post(self._finish, tainted)

    @property
    def is_done(self) -> bool:
        """Whether every object is committed or given up, and every session ended."""
        return self._done.done()

    @property
    def is_left_behind(self) -> bool:
        """Whether nobody waits any more for the calls of this step."""
        return self._channel.is_abandoned

    def give_back_stages(self) -> None:
        """Free stages that no call has been given, because none will be: the channel was left
        behind, or the step is over. The stage in a call that hangs stays where it is."""
        with self._lock:
            queued, self._queued = list(self._queued.values()), {}
        for stage in queued:
            self._rank.save_staging.release(stage)

    @property
    def found_no_stage(self) -> bool:
        """Whether objects were given up because earlier puts held all of the staging memory."""
        return self._found_no_stage

    @property
    def num_open_sessions(self) -> int:
        """Objects that are being written."""
        return len(self._sessions)

    @property
    def keys(self) -> list[str]:
        """What this step writes."""
        return [key for rows in self._rows for key in rows.keys]

    def _guarded(self, job: Callable[..., object], *arguments: object) -> None:
        # What a job that raised has written is unknown, so nothing of this step is committed.
        try:
            job(*arguments)
        except Exception:
            logger.exception("saving failed")
            self._counters.add("save.raised")
            for rows in self._rows:
                rows.live[:] = False

    def _open_once(self) -> None:
        # As late as may be: an open session keeps other writers out, and has an end.
        if not self._is_opened:
            self._is_opened = True
            self._channel.post(self._guarded, self._open_objects)

    def _open_objects(self) -> None:
        for rows in self._rows:
            nbytes = [rows.template.object_map.nbytes] * len(rows)
            codes = self._sessions.open(rows.keys, nbytes)
            self._drop(rows, {row: code for row, code in enumerate(codes) if code != Code.OK})
            if min(codes) == max(codes) == Code.UNAVAILABLE and not self._channel.is_abandoned:
                self._breaker.trip("saving: the store doesn't answer")

    def _copy_layer(self, address: LayerAddress, mark: object) -> None:
        self._rank.device.wait(mark)
        staging = self._rank.save_staging
        for rows in self._rows:
            layer = rows.template.layers.get(address)
            if layer is None:
                continue
            self._written[id(rows)][layer.range_index] = True
            for chunk in self._rank.chunks(rows.live_rows, layer.nbytes, staging):
                stage = self._take_stage(len(chunk), layer.nbytes)
                if stage is None:
                    # The store is slower than the engine for too long: these objects are not
                    # stored, and the engine doesn't wait for them.
                    num_dropped = int(rows.live[chunk].sum())
                    rows.live[chunk] = False
                    self._found_no_stage = True
                    self._counters.add("save.no_staging", num_dropped)
                    continue
                try:
                    block_ids = rows.first_block_ids(layer.group, chunk)
                    self._rank.device.gather(layer.pieces, block_ids, stage.rows)
                except BaseException:
                    staging.release(stage)
                    raise
                with self._lock:
                    self._queued[id(stage)] = stage
                self._held.append(_Copied(rows, layer, chunk, stage))
            if self._rank.saves_overlap:
                self._store_held()
                if self._may_commit_early and self._written[id(rows)].all():
                    self._channel.post(self._guarded, self._commit_rows, rows, frozenset())

    def _take_stage(self, num_rows: int, row_nbytes: int) -> Stage | None:
        staging = self._rank.save_staging
        stage = staging.take(num_rows, row_nbytes, 0.0)
        if stage is None:
            # What is held takes the room that it waits for.
            self._store_held()
            started = time.perf_counter()
            stage = staging.take(num_rows, row_nbytes, max(0.0, self._wait_left_s))
            self._wait_left_s -= time.perf_counter() - started
        return stage

    def _store_held(self) -> None:
        held, self._held = self._held, []
        if held:
            self._open_once()
        for copied in held:
            self._take_checksums(copied)
            self._channel.post(self._guarded, self._put_stage, copied)

    def _take_checksums(self, copied: _Copied) -> None:
        rows, layer, chunk, stage = copied
        self._checksums[id(rows)][chunk, layer.range_index] = np.fromiter(
            (checksum(stage.row(position)) for position in range(len(chunk))),
            np.uint64,
            len(chunk),
        )

    def _finish(self, tainted: set[str]) -> None:
        self._guarded(self._store_held)
        self._channel.post(self._guarded, self._commit_objects, tainted)
        self._channel.post(self._end)

    def _end(self) -> None:
        try:
            self._guarded(self._sessions.close)
            self.give_back_stages()
        finally:
            self._done.set_result(None)

    def _put_stage(self, copied: _Copied) -> None:
        rows, layer, chunk, stage = copied
        with self._lock:
            if self._queued.pop(id(stage), None) is None:
                return
        try:
            if self._sessions.are_too_old:
                self._give_up()
            is_live = rows.live[chunk]
            if is_live.any():
                positions = None if is_live.all() else np.flatnonzero(is_live)
                self._write(rows, chunk, positions, stage, layer.offset)
        finally:
            self._rank.save_staging.release(stage)

    def _write(
        self, rows: Rows, chunk: Indices, positions: Indices | None, stage: Stage, offset: int
    ) -> None:
        """Store rows of a stage, those at ``positions`` or all; rows that fail are dropped."""
        moved = chunk if positions is None else chunk[positions]
        keys = rows.keys_of(moved)
        codes, is_whole = self._rank.move_stage(
            self._channel, self._rank.store.put_ranges, keys, stage, positions, offset
        )
        if is_whole:
            return
        self._drop(
            rows,
            {
                row: min(code, int(Code.TRANSFER_FAILED)) if code >= 0 else code
                for row, code in zip(moved.tolist(), codes, strict=True)
                if code != stage.row_nbytes
            },
        )

    def _commit_objects(self, tainted: set[str]) -> None:
        if self._sessions.are_too_old:
            self._give_up()
        for rows in self._rows:
            if id(rows) in self._committed:
                continue
            if self._written[id(rows)].all():
                self._commit_rows(rows, tainted)
            else:
                self._counters.add("save.incomplete", len(rows.live_rows))
        self._counters.observe("commit", time.perf_counter() - self._ended_at)

    def _commit_rows(self, rows: Rows, tainted: Set[str]) -> None:
        if self._sessions.are_too_old:
            self._give_up()
        self._committed.add(id(rows))
        live = rows.live_rows
        clean = [row for row in live.tolist() if tainted.isdisjoint(rows.owners_of(row))]
        self._counters.add("save.tainted", len(live) - len(clean))
        object_map = rows.template.object_map
        staging = self._rank.header_staging
        indices = np.array(clean, np.int64)
        for chunk in self._rank.chunks(indices, object_map.header_nbytes, staging):
            self._commit_chunk(rows, chunk)

    def _commit_chunk(self, rows: Rows, chunk: Indices) -> None:
        self._write_headers(rows, chunk)
        whole = chunk[rows.live[chunk]].tolist()
        codes = self._sessions.commit([rows.keys[row] for row in whole])
        self._drop(
            rows, {row: code for row, code in zip(whole, codes, strict=True) if code != Code.OK}
        )
        object_index = rows.template.object_map.object_index
        saved = [row for row, code in zip(whole, codes, strict=True) if code == Code.OK]
        self.committed += [StoredBlock(object_index, rows.block_hashes[row]) for row in saved]
        num_saved = len(saved)
        self._counters.add("save.blocks", num_saved)
        self._counters.add("save.nbytes", num_saved * rows.template.object_map.nbytes)

    def _write_headers(self, rows: Rows, chunk: Indices) -> None:
        object_map = rows.template.object_map
        stage = self._rank.header_staging.take(len(chunk), object_map.header_nbytes, _HEADER_WAIT_S)
        if stage is None:
            self._drop(rows, dict.fromkeys(chunk.tolist(), int(Code.NO_SPACE)))
            return
        try:
            write_ids = os.urandom(_WRITE_ID_NBYTES * len(chunk))
            checksums = self._checksums[id(rows)]
            for position, row in enumerate(chunk.tolist()):
                header = new_header(
                    object_map,
                    rows.template.fingerprint,
                    rows.block_hashes[row],
                    write_ids[position * _WRITE_ID_NBYTES : (position + 1) * _WRITE_ID_NBYTES],
                    checksums[row],
                )
                stage.row(position)[:] = encode_header(header)
            self._write(rows, chunk, None, stage, 0)
        finally:
            self._rank.header_staging.release(stage)

    def _give_up(self) -> None:
        for rows in self._rows:
            if id(rows) not in self._committed:
                self._counters.add("save.too_old", len(rows.live_rows))
                rows.live[:] = False
        self._sessions.close()

    def _drop(self, rows: Rows, codes: dict[int, int]) -> None:
        for row, code in codes.items():
            rows.live[row] = False
            self._counters.add(f"save.{code_name(code)}")
