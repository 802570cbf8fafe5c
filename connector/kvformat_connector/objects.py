"""The objects that one rank reads and writes, and what stays the same from step to step: its store,
its device, its memory for transfers and their limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, Literal

import numpy as np

from kvformat.fingerprint import manifest
from kvformat.key import ManifestKey, format_key, layout_namespace
from kvformat.layout import Layout
from kvformat.placement import Placement
from kvformat.plan import Limits, RowTemplate, plan_get, plan_put
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import Moved
from kvformat_connector.config import Options
from kvformat_connector.device import Device
from kvformat_connector.engine import LayerAddress, Ranks, replicas_of
from kvformat_connector.messages import BlockList, RequestStep
from kvformat_connector.namespaces import Namespaces, Variant
from kvformat_connector.pacing import Pace
from kvformat_connector.rows import Indices, ObjectTemplate, Rows, make_rows
from kvformat_connector.sessions import Asking, SessionBook
from kvformat_connector.staging import Stage, Staging
from kvformat_connector.transfer import Lane

#: A transfer is checked and copied while the next one moves, so no stage takes all of the memory.
_STAGES_PER_STAGING: Final = 4
_HEADER_STAGING_NBYTES: Final = 16 << 20


class Templates:
    """The objects of one namespace that a rank reads, and that it writes, and the manifest that
    explains them to anyone."""

    def __init__(
        self, layout: Layout, gets: Iterable[ObjectTemplate], puts: Iterable[ObjectTemplate]
    ) -> None:
        namespace = layout_namespace(layout)
        self.gets = [template.under(namespace) for template in gets]
        self.puts = [template.under(namespace) for template in puts]
        self.manifest_key = format_key(ManifestKey(namespace))
        self.manifest = manifest(layout)


class Rank:
    """What stays the same from step to step on one rank."""

    def __init__(
        self,
        layout: Layout,
        placement: Placement,
        store: Store,
        device: Device,
        options: Options,
        ranks: Ranks | None = None,
    ) -> None:
        self.store = store
        self.device = device
        deadline_s = options.transfer_deadline_ms / 1e3
        self.pace = Pace(
            Limits(
                max_rows=options.layerwise_max_transfer_blocks,
                max_nbytes=options.layerwise_max_transfer_bytes,
            ),
            deadline_s,
        )
        namespace = layout_namespace(layout)
        gets = [ObjectTemplate(namespace, template) for template in plan_get(layout, placement)]
        puts = [
            ObjectTemplate(namespace, template, replicas_of(template.object_map, ranks or Ranks()))
            for template in plan_put(layout, placement)
        ]
        self._namespaces = Namespaces(layout, lambda variant: Templates(variant, gets, puts))
        #: Of what the engine started with.
        self.own = self.templates(Variant())
        #: Objects that are opened in one go.
        self.session_window = options.layerwise_session_blocks
        #: By their checksums; else by what their headers say before and after.
        self.verifies_payload = options.verify == "checksum"
        #: The order in which the engine computes layers.
        self.sequence = [LayerAddress(placed.group, placed.layer) for placed in placement.layers]
        self.registrar = Lane("register")
        self.load_staging = Staging(store, options.staging_bytes // 2, self.registrar, deadline_s)
        self.save_staging = Staging(store, options.staging_bytes // 2, self.registrar, deadline_s)
        # Apart from the rest: stages of layers may all be held by jobs that wait for a commit.
        self.header_staging = Staging(store, _HEADER_STAGING_NBYTES, self.registrar, deadline_s)
        #: Whether layers are stored while the next ones are computed. On the processor that also
        #: computes, storing would take from computing what it hides; but whoever cuts objects
        #: along the layers wants them early.
        self.saves_overlap = (
            not device.computes_on_host
            or len({template.object_map.shard.layer for template in puts}) > 1
            if options.overlap_saves == "auto"
            else options.overlap_saves
        )
        self.open_gets = SessionBook()

    def templates(self, variant: Variant) -> Templates:
        """The objects of a variant's namespace."""
        return self._namespaces.of(variant)

    def rows_to_get(self, steps: Iterable[RequestStep]) -> list[Rows]:
        """Rows for what these requests load."""
        return [
            rows
            for variant, wanted in _by_variant(steps, "loads")
            for rows in make_rows(self.templates(variant).gets, wanted, for_put=False)
        ]

    def rows_to_put(self, steps: Iterable[RequestStep], without: Container[str] = ()) -> list[Rows]:
        """Rows for what these requests save, of keys that aren't in ``without``."""
        return [
            rows
            for variant, wanted in _by_variant(steps, "saves")
            for rows in make_rows(
                self.templates(variant).puts, wanted, for_put=True, without=without
            )
        ]

    def chunks(self, rows: Indices, row_nbytes: int, staging: Staging) -> Iterator[Indices]:
        """These rows in parts that fit into one stage each."""
        limits = self.pace.limits
        max_nbytes = min(limits.max_nbytes, staging.max_nbytes // _STAGES_PER_STAGING)
        size = max(1, min(limits.max_rows, max_nbytes // max(1, row_nbytes)))
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def _stage_ranges(self, stage: Stage, offset: int, limits: Limits) -> RowTemplate:
        """Ranges between the rows of a stage and ``offset`` of an object each, in pieces of at
        most the size of one call."""
        starts = np.arange(0, stage.row_nbytes, limits.max_nbytes, dtype=np.int64)
        sizes = np.minimum(stage.row_nbytes - starts, limits.max_nbytes)
        strides = np.full(len(starts), stage.row_nbytes, np.int64)
        return RowTemplate(stage.address + starts, strides, offset + starts, sizes, len(stage.rows))

    def move_stage(
        self,
        asking: Asking,
        call: Callable[..., list[int]],
        keys: list[str],
        stage: Stage,
        stage_rows: Indices | None,
        offset: int,
    ) -> Moved:
        """Range calls between rows of a stage, or all of them where ``stage_rows`` is None, and
        ``offset`` of the objects."""
        limits = self.pace.limits
        nbytes, num_keys = stage.row_nbytes, len(keys)
        fits = num_keys <= limits.max_rows and num_keys * nbytes <= limits.max_nbytes
        if stage_rows is None and fits:
            ranges = stage.row_addresses, [(nbytes,)] * num_keys, [(offset,)] * num_keys
            return self._move(asking, call, keys, *ranges)
        if stage_rows is None:
            stage_rows = np.arange(num_keys)
        totals = [0] * num_keys
        for batch in self._stage_ranges(stage, offset, limits).batches(stage_rows, limits):
            codes, _ = self._move(asking, call, keys[batch.rows], *batch.ranges)
            # A row may come in several calls; one that has failed in one stays failed.
            for row, code in enumerate(codes, batch.rows.start):
                if totals[row] >= 0:
                    totals[row] = code if code < 0 else totals[row] + code
        return Moved(totals, is_whole=totals == [nbytes] * num_keys)

    def _move(
        self,
        asking: Asking,
        call: Callable[..., list[int]],
        keys: list[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> Moved:
        """One range call. The next one is as large as this one was fast."""
        started = time.perf_counter()
        codes = asking.ask(call, keys, addresses, sizes, offsets)
        seconds = time.perf_counter() - started
        nbytes = sum(sizes[0])
        is_whole = codes == [nbytes] * len(keys)
        has_failed = not is_whole and Code.TRANSFER_FAILED in codes
        self.pace.note(len(keys) * nbytes, seconds, has_failed=has_failed)
        return Moved(codes, is_whole)

    def publish_manifest(self, asking: Asking, templates: Templates) -> int:
        """Store the manifest of a namespace, so that its keys can be explained by anyone."""

        def put(keys: Sequence[str], data: bytes) -> list[int]:
            return [self.store.put(keys[0], data)]

        return asking.ask(put, [templates.manifest_key], templates.manifest)[0]


def _by_variant(
    steps: Iterable[RequestStep], field: Literal["loads", "saves"]
) -> Iterable[tuple[Variant, list[tuple[str, BlockList]]]]:
    """By variant, ``(request_id, blocks)`` of one field of many request steps."""
    found: dict[Variant, list[tuple[str, BlockList]]] = {}
    for step in steps:
        for blocks in getattr(step, field):
            found.setdefault(step.variant, []).append((step.request_id, blocks))
    return found.items()
