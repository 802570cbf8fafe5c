"""Objects of one kind in a rank's memory, and those of them that a step moves.

A row is one object: a block in one shard. Rows of one template share their ranges, so they are
kept, and moved, together.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvformat.acceptance import UsualHeader
from kvformat.key import Namespace, key_prefix
from kvformat.plan import LayerTemplate, RangeTemplate
from kvformat_connector.device import Piece
from kvformat_connector.engine import LayerAddress, Replicas
from kvformat_connector.messages import BlockList

Indices = NDArray[np.int64]


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
