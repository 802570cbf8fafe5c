"""One step's saves: each layer as it is computed, the header last, then the commit.

An object is committed only if every byte of it was written in this step, from a computation that
rests on no failed load; else it is revoked and nobody ever sees it.

Source: spec/kvformat.md section 8.1 (writers).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvformat.header import encode_header, new_header
from kvformat.stores.protocol import Code
from kvformat_connector.answers import ask, code_name
from kvformat_connector.engine import LayerAddress
from kvformat_connector.objects import Rank, Rows
from kvformat_connector.sessions import PutSessions
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Lane, put_layer

logger = logging.getLogger(__name__)

_WRITE_ID_NBYTES = 16


class SaveStep:
    """The saves of one step. ``start``, ``put`` per layer and ``finish`` are the engine's thread;
    everything else runs on the lane, one job at a time."""

    def __init__(self, rank: Rank, rows: list[Rows], lane: Lane) -> None:
        self._rank = rank
        self._rows = rows
        self._lane = lane
        self._sessions = PutSessions(rank.store)
        self._counts: Counter[str] = Counter()
        #: Per list of rows ``[num_rows, num_ranges]``, and which ranges have been written.
        self._checksums: list[NDArray[np.uint64]] = []
        self._written: list[NDArray[np.bool_]] = []
        for row_list in rows:
            num_ranges = len(row_list.template.object_map.layers)
            self._checksums.append(np.zeros((len(row_list), num_ranges), np.uint64))
            self._written.append(np.zeros(num_ranges, bool))

    def start(self) -> None:
        """Open the objects."""
        self._lane.submit(self._guarded, self._open_objects)

    def put(self, address: LayerAddress) -> None:
        """Write one layer, now that the engine has computed it."""
        mark = self._rank.device.mark()
        self._lane.submit(self._guarded, self._write_layer, address, mark)

    def finish(self, tainted: set[str], counters: Counters) -> None:
        """Commit what is whole, revoke the rest and all objects of ``tainted`` requests."""
        self._lane.submit(self._guarded, self._commit_objects, tainted)
        self._lane.submit(self._guarded, self._sessions.close).result()
        for name, count in self._counts.items():
            counters.add(name, count)

    def _guarded(self, job: Callable[..., object], *arguments: object) -> None:
        # What a job that raised has written is unknown, so nothing of this step is committed.
        try:
            job(*arguments)
        except Exception:
            logger.exception("saving failed")
            self._counts["save.raised"] += 1
            for rows in self._rows:
                rows.live[:] = False

    def _open_objects(self) -> None:
        for rows in self._rows:
            nbytes = [rows.template.object_map.nbytes] * len(rows)
            codes = self._sessions.open(rows.keys, nbytes)
            self._drop(rows, {row: code for row, code in enumerate(codes) if code != Code.OK})

    def _write_layer(self, address: LayerAddress, mark: object) -> None:
        if self._sessions.are_too_old:
            self._give_up()
            return
        self._rank.device.wait(mark)
        for rows, checksums, written in zip(
            self._rows, self._checksums, self._written, strict=True
        ):
            template = rows.template.layers.get(address)
            if template is None:
                continue
            written[template.range_index] = True
            live = rows.live_rows
            if not len(live):
                continue
            result = put_layer(
                self._rank.store, self._rank.device, template, rows.keys,
                rows.block_ids[address.group], live, self._rank.limits,
            )  # fmt: skip
            self._drop(rows, result.failed)
            for row, found in result.checksums.items():
                checksums[row, template.range_index] = found

    def _commit_objects(self, tainted: set[str]) -> None:
        if self._sessions.are_too_old:
            self._give_up()
        for rows, checksums, written in zip(
            self._rows, self._checksums, self._written, strict=True
        ):
            live = rows.live_rows.tolist()
            if not written.all():
                self._counts["save.incomplete"] += len(live)
                live = []
            clean = [row for row in live if rows.owners[row] not in tainted]
            self._counts["save.tainted"] += len(live) - len(clean)
            whole = self._write_headers(rows, checksums, clean)
            codes = self._sessions.commit([rows.keys[row] for row in whole])
            self._drop(
                rows,
                {row: code for row, code in zip(whole, codes, strict=True) if code != Code.OK},
            )
            num_saved = sum(code == Code.OK for code in codes)
            self._counts["save.blocks"] += num_saved
            self._counts["save.nbytes"] += num_saved * rows.template.object_map.nbytes

    def _write_headers(
        self, rows: Rows, checksums: NDArray[np.uint64], clean: list[int]
    ) -> list[int]:
        """Write the headers of these rows; answers the rows whose header is written."""
        object_map = rows.template.object_map
        buffer = self._rank.save_headers.take(len(rows), object_map.header_nbytes)
        write_ids = os.urandom(_WRITE_ID_NBYTES * len(rows))
        for row in clean:
            header = new_header(
                object_map,
                self._rank.namespace.fingerprint,
                rows.block_hashes[row],
                write_ids[row * _WRITE_ID_NBYTES : (row + 1) * _WRITE_ID_NBYTES],
                checksums[row],
            )
            buffer.row(row)[:] = encode_header(header)
        keys = [rows.keys[row] for row in clean]
        codes = ask(self._rank.store.put_ranges, keys, *buffer.ranges(clean))
        failed = {
            row: min(code, int(Code.TRANSFER_FAILED))
            for row, code in zip(clean, codes, strict=True)
            if code != object_map.header_nbytes
        }
        self._drop(rows, failed)
        return [row for row in clean if row not in failed]

    def _give_up(self) -> None:
        for rows in self._rows:
            self._counts["save.too_old"] += len(rows.live_rows)
            rows.live[:] = False
        self._sessions.close()

    def _drop(self, rows: Rows, codes: dict[int, int]) -> None:
        for row, code in codes.items():
            rows.live[row] = False
            self._counts[f"save.{code_name(code)}"] += 1
