"""The objects that one rank reads and writes, and the rows of a step.

A row is one object: a block in one shard. Rows of one template share their ranges, so they are
kept, and moved, together.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvformat.acceptance import UsualHeader
from kvformat.fingerprint import manifest
from kvformat.key import ManifestKey, Namespace, format_key, key_prefix, layout_namespace
from kvformat.layout import Layout
from kvformat.placement import Placement
from kvformat.plan import (
    LayerTemplate,
    Limits,
    RangeTemplate,
    RowTemplate,
    plan_get,
    plan_put,
)
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import Moved
from kvformat_connector.config import Options
from kvformat_connector.device import Device, Piece
from kvformat_connector.engine import LayerAddress, Ranks, Replicas, replicas_of
from kvformat_connector.messages import BlockList, RequestStep
from kvformat_connector.namespaces import Namespaces, Variant
from kvformat_connector.pacing import Pace
from kvformat_connector.sessions import Asking, SessionBook
from kvformat_connector.staging import Stage, Staging

Indices = NDArray[np.int64]

#: A transfer is checked and copied while the next one moves, so no stage takes all of the memory.
_STAGES_PER_STAGING: Final = 4
_HEADER_STAGING_NBYTES: Final = 16 << 20


class ObjectLayer:
    """One (group, layer) of an object: its range, and this rank's part of it, piece by piece."""

    def __init__(self, range_index: int, offset: int, nbytes: int, layer: LayerTemplate) -> None:
        self.range_index = range_index
        self.group = layer.group
        self.layer = layer.layer
        self.offset = offset
        self.nbytes = nbytes
        fragments = layer.fragments
        self.pieces = [
            Piece(address, stride, layer.num_blocks, target - offset, size)
            for address, stride, target, size in zip(
                fragments.source.tolist(),
                fragments.source_strides.tolist(),
                fragments.target.tolist(),
                fragments.nbytes.tolist(),
                strict=True,
            )
        ]


class ObjectTemplate:
    """Objects of one kind: their key prefix and, by layer, their ranges in this rank's memory."""

    def __init__(
        self, namespace: Namespace, template: RangeTemplate, replicas: Replicas | None = None
    ) -> None:
        self.object_map = template.object_map
        self.replicas = replicas or Replicas()
        self._enter(namespace)
        ranges = self.object_map.layers
        self.layers: dict[LayerAddress, ObjectLayer] = {
            LayerAddress(layer.group, layer.layer): ObjectLayer(
                layer.range_index,
                ranges[layer.range_index].offset,
                ranges[layer.range_index].nbytes,
                layer,
            )
            for layer in template.layers
        }

    def under(self, namespace: Namespace) -> ObjectTemplate:
        """The same objects in another namespace."""
        made = copy.copy(self)
        made._enter(namespace)
        return made

    def _enter(self, namespace: Namespace) -> None:
        self.fingerprint = namespace.fingerprint
        self.usual_header = UsualHeader(self.object_map, namespace.fingerprint)
        self.prefix = key_prefix(namespace, self.object_map.group_bitmap, self.object_map.shard)


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


class Rows:
    """Objects of one template in one step, each once. ``live`` rows have not failed so far.

    A row has one target or more: the blocks that want it. ``target_rows`` is ``[num_targets]``
    ascending, ``block_ids[group]`` is ``[num_targets]``, ``owners`` the request of each target.
    Rows to put have one target each, are those that this rank writes, and leave out keys
    ``without``.
    """

    def __init__(
        self,
        template: ObjectTemplate,
        wanted: Sequence[tuple[str, BlockList]],
        *,
        for_put: bool,
        without: Container[str] = (),
    ) -> None:
        self.template = template
        self.keys: list[str] = []
        groups = template.object_map.groups
        row_of: dict[bytes, int] = {}
        targets: list[int] = []
        owners: list[str] = []
        columns: list[list[int]] = [[] for _ in groups]
        for request_id, blocks in wanted:
            for index, block_hash in enumerate(blocks.block_hashes):
                row = row_of.get(block_hash)
                if row is None:
                    key = template.prefix + block_hash.hex()
                    if for_put and (key in without or not template.replicas.writes(block_hash)):
                        continue
                    row = row_of[block_hash] = len(self.keys)
                    self.keys.append(key)
                elif for_put:
                    continue
                targets.append(row)
                owners.append(request_id)
                for column, ids in zip(columns, blocks.block_ids, strict=True):
                    column.append(ids[index])
        self.block_hashes = list(row_of)
        self._has_one_target_each = len(targets) == len(self.keys)
        self.target_rows: Indices = np.array(targets, np.int64)
        self.owners = owners
        self.block_ids: dict[int, Indices] = {
            group: np.array(column, np.int64) for group, column in zip(groups, columns, strict=True)
        }
        if not self._has_one_target_each:
            order = np.argsort(self.target_rows, kind="stable")
            self.target_rows = self.target_rows[order]
            self.owners = [owners[index] for index in order.tolist()]
            self.block_ids = {group: ids[order] for group, ids in self.block_ids.items()}
        # A search through bytes costs nothing beside an array operation, which lets other threads
        # take the interpreter.
        self._live = bytearray(b"\1" * len(self.keys))
        self.live: NDArray[np.bool_] = np.frombuffer(self._live, bool)
        self._all: Indices = np.arange(len(self.keys))

    @property
    def live_rows(self) -> Indices:
        """Indices of rows that have not failed."""
        return np.flatnonzero(self.live) if 0 in self._live else self._all

    @property
    def num_live(self) -> int:
        """Rows that have not failed."""
        return self._live.count(1)

    def targets_of(self, row: int) -> range:
        """The targets of a row."""
        start, stop = np.searchsorted(self.target_rows, (row, row + 1)).tolist()
        return range(start, stop)

    def block_ids_of(self, row: int) -> list[int]:
        """The blocks that a row belongs in."""
        return [
            int(ids[target]) for target in self.targets_of(row) for ids in self.block_ids.values()
        ]

    def owners_of(self, row: int) -> list[str]:
        """The requests that want a row."""
        return [self.owners[target] for target in self.targets_of(row)]

    def keys_of(self, rows: Indices) -> list[str]:
        """Keys of some rows, given ascending."""
        if len(rows) == len(self.keys):
            return self.keys
        return [self.keys[row] for row in rows.tolist()]

    def first_block_ids(self, group: int, rows: Indices) -> Indices:
        """``[num_rows]``: the first target of each of these rows."""
        ids = self.block_ids[group]
        return (
            ids[rows] if self._has_one_target_each else ids[np.searchsorted(self.target_rows, rows)]
        )

    def destinations(self, group: int, rows: Indices) -> tuple[Indices, Indices | None]:
        """Block ids of all targets of some rows, given ascending, and for each target the position
        of its row in ``rows``; None where target ``i`` belongs to row ``i``."""
        if self._has_one_target_each:
            ids = self.block_ids[group]
            return (ids if len(rows) == len(ids) else ids[rows]), None
        positions = np.full(len(self.keys), -1, np.int64)
        positions[rows] = np.arange(len(rows))
        of_targets = positions[self.target_rows]
        chosen = of_targets >= 0
        return self.block_ids[group][chosen], of_targets[chosen]

    def __len__(self) -> int:
        return len(self.keys)


def make_rows(
    templates: Iterable[ObjectTemplate],
    wanted: Sequence[tuple[str, BlockList]],
    *,
    for_put: bool,
    without: Container[str] = (),
) -> list[Rows]:
    """Rows of every template for the blocks wanted, where there are any."""
    made = []
    for template in templates:
        index = template.object_map.object_index
        mine = [(owner, blocks) for owner, blocks in wanted if blocks.object_index == index]
        rows = Rows(template, mine, for_put=for_put, without=without)
        if len(rows):
            made.append(rows)
    return made


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
        self.load_staging = Staging(store, options.staging_bytes // 2, deadline_s)
        self.save_staging = Staging(store, options.staging_bytes // 2, deadline_s)
        # Apart from the rest: stages of layers may all be held by jobs that wait for a commit.
        self.header_staging = Staging(store, _HEADER_STAGING_NBYTES, deadline_s)
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
