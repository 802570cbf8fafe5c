"""One step's loads: headers first, then layer after layer, ahead of the computation.

An object that is not exactly the one asked for is out before any of its payload is read; a layer
whose bytes are not the ones the header describes is out before the engine reads them.

Source: spec/kvformat.md section 8.2 (readers).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from kvformat.acceptance import check_header, range_mismatch
from kvformat.errors import Reason, RemoteDataError
from kvformat.header import ObjectHeader, decode_header
from kvformat_connector.answers import ask, code_name
from kvformat_connector.engine import LayerAddress
from kvformat_connector.objects import Rank, Rows
from kvformat_connector.sessions import GetSessions
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Lane, get_layer

logger = logging.getLogger(__name__)


class _Failure(msgspec.Struct, frozen=True):
    rows: Rows
    row: int
    reason: str
    detail: str


class LoadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What failed, as the engine, the savers and the scheduler need to know it."""

    block_ids: set[int]
    request_ids: set[str]
    block_hashes: list[bytes]


class LoadStep:
    """The loads of one step. ``start``, ``wait`` per layer and ``finish`` are the engine's thread;
    everything else runs on the lane, one job at a time."""

    def __init__(self, rank: Rank, rows: list[Rows], lane: Lane, num_layers_ahead: int) -> None:
        self._rank = rank
        self._rows = rows
        self._lane = lane
        self._num_layers_ahead = num_layers_ahead
        self._sessions = GetSessions(rank.store)
        self._headers: dict[tuple[int, int], ObjectHeader] = {}
        self._failures: list[_Failure] = []
        self._position = {address: index for index, address in enumerate(rank.sequence)}
        self._jobs: list[Future[None]] = []
        self._awaited: set[int] = set()

    def start(self) -> None:
        """Open the objects, check their headers, and read the first layers."""
        self._lane.submit(self._guarded, self._open_objects)
        self._submit_up_to(self._num_layers_ahead)

    def wait(self, address: LayerAddress) -> None:
        """Return when a layer is in memory and verified, or has failed."""
        position = self._position[address]
        self._awaited.add(position)
        self._submit_up_to(position + 1 + self._num_layers_ahead)
        self._jobs[position].result()

    def finish(self, counters: Counters) -> LoadOutcome:
        """End the sessions and say what failed."""
        # The last job of the lane: once it has run, no other one touches what is read here.
        self._lane.submit(self._sessions.close).result()
        self._fail_unawaited()
        for failure in self._failures:
            key = failure.rows.keys[failure.row]
            counters.reject(key, failure.reason, failure.detail)
            logger.warning("rejected %s: %s [%s]", key, failure.detail, failure.reason)
        counters.add("load.blocks", sum(int(rows.live.sum()) for rows in self._rows))
        return LoadOutcome(
            block_ids={id_ for f in self._failures for id_ in f.rows.block_ids_of(f.row)},
            request_ids={f.rows.owners[f.row] for f in self._failures},
            block_hashes=[f.rows.block_hashes[f.row] for f in self._failures],
        )

    def _submit_up_to(self, num_layers: int) -> None:
        for address in self._rank.sequence[len(self._jobs) : num_layers]:
            self._jobs.append(self._lane.submit(self._guarded, self._read_layer, address))

    def _guarded(self, job: Callable[..., object], *arguments: object) -> None:
        # A job that raises has moved nothing that can be trusted; the step goes on without it.
        try:
            job(*arguments)
        except Exception as error:
            logger.exception("loading failed")
            self._fail_all(Reason.TRANSFER_FAILED.value, f"loading raised {error!r}")

    def _open_objects(self) -> None:
        for rows in self._rows:
            codes = self._sessions.open(rows.keys)
            for row, code in enumerate(codes):
                if code < 0:
                    self._fail(rows, row, code_name(code), "the object can't be opened")
            self._read_headers(rows)

    def _read_headers(self, rows: Rows) -> None:
        object_map = rows.template.object_map
        fingerprint = self._rank.namespace.fingerprint
        buffer = self._rank.load_headers.take(len(rows), object_map.header_nbytes)
        live = rows.live_rows.tolist()
        keys = [rows.keys[row] for row in live]
        codes = ask(self._rank.store.get_ranges, keys, *buffer.ranges(live))
        for row, code in zip(live, codes, strict=True):
            if code != object_map.header_nbytes:
                self._fail(rows, row, code_name(min(code, -1)), "the header can't be read")
                continue
            try:
                header = decode_header(buffer.row(row), object_map.header_nbytes)
                check_header(header, object_map, fingerprint, rows.block_hashes[row])
            except RemoteDataError as error:
                self._fail(rows, row, error.reason.value, error.detail)
            else:
                self._headers[id(rows), row] = header

    def _read_layer(self, address: LayerAddress) -> None:
        self._sessions.renew()
        for rows in self._rows:
            template = rows.template.layers.get(address)
            live = rows.live_rows
            if template is None or not len(live):
                continue
            block_ids = rows.block_ids[address.group]
            result = get_layer(
                self._rank.store, self._rank.device, template, rows.keys, block_ids, live,
                self._rank.limits,
            )  # fmt: skip
            where = f"group {address.group} layer {address.layer}"
            for row, code in result.failed.items():
                self._fail(rows, row, code_name(code), f"{where}: the range can't be read")
            for row, found in result.checksums.items():
                header = self._headers[id(rows), row]
                if found != int(header.checksums[template.range_index]):
                    error = range_mismatch(header, template.range_index, found)
                    self._fail(rows, row, error.reason.value, error.detail)

    def _fail_unawaited(self) -> None:
        """A layer that the engine computed without waiting for it was computed on anything."""
        for position, address in enumerate(self._rank.sequence):
            if position not in self._awaited and any(len(rows.live_rows) for rows in self._rows):
                self._fail_all(
                    Reason.TRANSFER_FAILED.value,
                    f"group {address.group} layer {address.layer}: the engine never waited for it",
                )

    def _fail_all(self, reason: str, detail: str) -> None:
        for rows in self._rows:
            for row in rows.live_rows.tolist():
                self._fail(rows, row, reason, detail)

    def _fail(self, rows: Rows, row: int, reason: str, detail: str) -> None:
        rows.live[row] = False
        self._failures.append(_Failure(rows, row, reason, detail))
