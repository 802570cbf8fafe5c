"""Loads of requests that wait outside of the batch: whole objects, verified before the release.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import msgspec

from kvformat.errors import Reason
from kvformat.stores.protocol import Code
from kvformat_connector.answers import Moved, code_name
from kvformat_connector.breaker import Breaker
from kvformat_connector.damaged import suspects_among
from kvformat_connector.loading import count_loads
from kvformat_connector.objectcheck import Checker, Failures, among, expect_nbytes, rows_at
from kvformat_connector.objects import Rank
from kvformat_connector.reading import (
    DEADLINE,
    TRANSPORT_CODES,
    ObjectReader,
    fail_for_staging,
)
from kvformat_connector.rows import Indices, Rows
from kvformat_connector.staging import Stage
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Channel, Channels, Lane

logger = logging.getLogger(__name__)

#: Calls in flight: two keep a storage node busy that one doesn't.
_NUM_CHANNELS: Final = 2
#: Why a row failed whose KV was computed with weights that the engine has no more.
_WEIGHTS_CHANGED: Final = "weights_changed"


class BulkOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request whose loads are over, and what of them failed. ``block_hashes`` name objects that
    can't be trusted."""

    request_id: str
    block_ids: set[int]
    block_hashes: list[bytes]
    suspects: list[str]  #: keys of objects that were rejected for what they hold


class _Load:
    """One request's objects."""

    def __init__(self, request_id: str, rows: list[Rows], rank: Rank) -> None:
        self.request_id = request_id
        self.rows = rows
        self.failures = Failures()
        self.checker = Checker(rows, self.failures, verifies_payload=rank.verifies_payload)
        self.done: Future[None] = Future()
        self.is_given_up = False
        self.channel: Channel | None = None


class BulkLoads:
    """``start`` and ``poll`` are the engine's thread; channels call the store, the lane checks and
    copies."""

    def __init__(
        self,
        rank: Rank,
        lane: Lane,
        breaker: Breaker,
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._rank = rank
        self._lane = lane
        self._breaker = breaker
        self._counters = counters
        self._deadline_s = deadline_s
        self._channels = [Channels(f"bulk{index}") for index in range(_NUM_CHANNELS)]
        self._num_started = 0
        self._loads: list[_Load] = []

    def start(self, request_id: str, rows: list[Rows]) -> None:
        """Load a request's blocks. It is over when :meth:`poll` names it."""
        load = _Load(request_id, rows, self._rank)
        self._loads.append(load)
        if self._breaker.is_open:
            reason = code_name(Code.UNAVAILABLE)
            load.failures.add_all(rows, reason, "the breaker is open")
            load.done.set_result(None)
            return
        load.channel = self._channels[self._num_started % _NUM_CHANNELS].current
        self._num_started += 1
        # The engine may still be writing to blocks that it has dealt out again.
        self._lane.post(self._guarded, load, self._rank.device.wait, self._rank.device.mark())
        load.channel.post(self._run, load)

    def poll(self) -> list[BulkOutcome]:
        """Requests whose loads have ended since the last call. Waits for nothing."""
        if not self._loads:
            return []
        for load in self._loads:
            channel = load.channel
            if channel is not None and channel.call_age_s > self._deadline_s:
                self._give_up(channel)
        over = [load for load in self._loads if load.done.done() or load.is_given_up]
        self._loads = [load for load in self._loads if load not in over]
        return [self._outcome(load) for load in over]

    def void_all(self) -> None:
        """The engine has other weights: no load that isn't over is of any use. Each is still named
        when it is over: until then its blocks may be written to."""
        for load in self._loads:
            detail = "the weights were changed meanwhile"
            load.failures.add_all(load.rows, _WEIGHTS_CHANGED, detail)

    @property
    def num_loads(self) -> int:
        """Requests whose loads are not over."""
        return len(self._loads)

    @property
    def num_left_behind(self) -> int:
        """Calls that were given up and have not come back."""
        return sum(channels.num_left_behind for channels in self._channels)

    def close(self, timeout_s: float) -> None:
        """End the threads."""
        for channels in self._channels:
            channels.close(timeout_s)

    def _outcome(self, load: _Load) -> BulkOutcome:
        failures = load.failures.seal()
        count_loads(self._counters, load.rows, load.failures)
        return BulkOutcome(
            request_id=load.request_id,
            block_ids={id_ for f in failures for id_ in f.rows.block_ids_of(f.row)},
            # Other objects of that name, of the weights since, are as good as any.
            block_hashes=[
                f.rows.block_hashes[f.row] for f in failures if f.reason != _WEIGHTS_CHANGED
            ],
            suspects=suspects_among(failures),
        )

    def _give_up(self, channel: Channel) -> None:
        detail = f"a call took more than {self._deadline_s:g} s"
        suspects: list[str] = []
        # The lane's next job comes after a copy in progress, so none is when it has run.
        mine = [load for load in self._loads if load.channel is channel]
        for load in mine:
            load.is_given_up = True
        self._lane.drain()
        for load in mine:
            load.failures.add_all(load.rows, DEADLINE, detail)
            suspects += [rows.keys[0] for rows in load.rows]
        for channels in self._channels:
            if channels.current is channel:
                channels.leave(channel)
        self._breaker.trip(f"loading: {detail}", suspects[:1])

    def _run(self, load: _Load) -> None:
        self._guarded(load, self._read_objects, load)
        if not self._rank.verifies_payload:
            self._guarded(load, self._confirm, load)
        # After the checks of all its parts, which the lane has been given.
        self._lane.post(load.done.set_result, None)

    def _guarded(self, load: _Load, job: Callable[..., None], *arguments: object) -> None:
        try:
            job(*arguments)
        except Exception as error:
            logger.exception("loading failed")
            reason = Reason.TRANSFER_FAILED.value
            load.failures.add_all(load.rows, reason, f"loading raised {error!r}")

    def _read_objects(self, load: _Load) -> None:
        for rows in load.rows:
            nbytes = rows.template.object_map.nbytes
            staging = self._rank.load_staging
            for chunk in self._rank.chunks(rows.live_rows, nbytes, staging):
                stage = staging.take(len(chunk), nbytes, self._deadline_s)
                if stage is None:
                    fail_for_staging(load.failures, load.rows)
                    return
                try:
                    moved = self._read_chunk(load, rows, chunk, stage)
                except BaseException:
                    staging.release(stage)
                    raise
                self._lane.post(self._guarded, load, self._check, load, rows, chunk, stage, moved)

    def _confirm(self, load: _Load) -> None:
        """What was read is still there when it has been read."""
        assert load.channel is not None
        # The first headers are the lane's to judge.
        self._lane.drain()
        reader = ObjectReader(
            self._rank, load.rows, load.channel, self._breaker, self._counters, load.checker,
            load.failures, self._deadline_s,
        )  # fmt: skip
        try:
            for rows in load.rows:
                reader.confirm(rows)
        finally:
            reader.close()

    def _read_chunk(self, load: _Load, rows: Rows, chunk: Indices, stage: Stage) -> Moved:
        assert load.channel is not None
        start, nbytes = stage.address, stage.row_nbytes
        keys = [rows.keys[row] for row in chunk.tolist()]
        addresses = [[start + position * nbytes] for position in range(len(chunk))]
        sizes = [[nbytes]] * len(chunk)
        codes = load.channel.ask(self._rank.store.get_objects, keys, addresses, sizes)
        if len(codes) > 1 and all(code in TRANSPORT_CODES for code in codes):
            self._breaker.trip("loading: no object can be read", keys[:1])
        elif any(code > 0 for code in codes):
            self._breaker.succeeded()
        return Moved(codes, is_whole=codes == [nbytes] * len(codes))

    def _check(self, load: _Load, rows: Rows, chunk: Indices, stage: Stage, moved: Moved) -> None:
        try:
            if not rows.num_live:
                return
            what = "the object can't be read"
            arrived = expect_nbytes(load.failures, rows, chunk, moved, stage.row_nbytes, what)
            found = chunk if arrived is None else chunk[arrived]
            header_bytes = rows_at(stage, arrived, slice(rows.template.object_map.header_nbytes))
            right = among(arrived, load.checker.take_headers(rows, found, header_bytes))
            for layer in rows.template.layers.values():
                found = chunk if right is None else chunk[right]
                part = slice(layer.offset, layer.offset + layer.nbytes)
                is_right = load.checker.check_layer(rows, layer, found, rows_at(stage, right, part))
                right = among(right, is_right)
            loaded = chunk if right is None else chunk[right]
            for layer in rows.template.layers.values():
                if load.is_given_up:
                    return
                block_ids, targets = rows.destinations(layer.group, loaded)
                staged = stage.rows[:, layer.offset : layer.offset + layer.nbytes]
                self._rank.device.scatter(layer.pieces, block_ids, staged, among(right, targets))
        finally:
            self._rank.load_staging.release(stage)
