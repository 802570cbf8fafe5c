"""The objects that one rank reads and writes, and the rows of a step.

A row is one object: a block in one shard. Rows of one template share their ranges, so they are
kept, and moved, together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvformat.fingerprint import manifest
from kvformat.key import ManifestKey, Namespace, format_key, key_prefix
from kvformat.layout import Layout
from kvformat.placement import Placement
from kvformat.plan import LayerTemplate, Limits, RangeTemplate, plan_get, plan_put
from kvformat.stores.protocol import Store
from kvformat_connector.answers import ask
from kvformat_connector.config import Options
from kvformat_connector.device import Device
from kvformat_connector.engine import LayerAddress, Ranks, Replicas, replicas_of
from kvformat_connector.messages import BlockList
from kvformat_connector.transfer import HeaderMemory


class ObjectTemplate:
    """Objects of one kind: their key prefix and, by layer, their ranges in this rank's memory."""

    def __init__(
        self, namespace: Namespace, template: RangeTemplate, replicas: Replicas | None = None
    ) -> None:
        self.object_map = template.object_map
        self.replicas = replicas or Replicas()
        self.prefix = key_prefix(namespace, self.object_map.group_bitmap, self.object_map.shard)
        self.layers: dict[LayerAddress, LayerTemplate] = {
            LayerAddress(layer.group, layer.layer): layer for layer in template.layers
        }


class Rows:
    """Objects of one template in one step. ``live`` rows have not failed so far.

    ``block_ids[group]`` is ``[num_rows]``; ``owners`` names the request of each row.
    """

    def __init__(
        self, template: ObjectTemplate, wanted: Sequence[tuple[str, BlockList]], *, distinct: bool
    ) -> None:
        self.template = template
        groups = template.object_map.groups
        self.keys: list[str] = []
        self.block_hashes: list[bytes] = []
        self.owners: list[str] = []
        columns: list[list[int]] = [[] for _ in groups]
        seen: set[bytes] = set()
        for request_id, blocks in wanted:
            for index, block_hash in enumerate(blocks.block_hashes):
                if distinct and (block_hash in seen or not template.replicas.writes(block_hash)):
                    continue
                seen.add(block_hash)
                self.keys.append(template.prefix + block_hash.hex())
                self.block_hashes.append(block_hash)
                self.owners.append(request_id)
                for column, ids in zip(columns, blocks.block_ids, strict=True):
                    column.append(ids[index])
        self.block_ids: dict[int, NDArray[np.int64]] = {
            group: np.array(column, np.int64) for group, column in zip(groups, columns, strict=True)
        }
        self.live = np.ones(len(self.keys), bool)

    @property
    def live_rows(self) -> NDArray[np.int64]:
        """Indices of rows that have not failed."""
        return np.flatnonzero(self.live)

    def block_ids_of(self, row: int) -> list[int]:
        """The blocks that a row belongs in, one per group."""
        return [int(ids[row]) for ids in self.block_ids.values()]

    def __len__(self) -> int:
        return len(self.keys)


def make_rows(
    templates: Iterable[ObjectTemplate],
    wanted: Sequence[tuple[str, BlockList]],
    *,
    distinct: bool,
) -> list[Rows]:
    """Rows of every template for the blocks wanted; ``distinct`` keeps one row per object."""
    made = []
    for template in templates:
        index = template.object_map.object_index
        mine = [(owner, blocks) for owner, blocks in wanted if blocks.object_index == index]
        if mine:
            made.append(Rows(template, mine, distinct=distinct))
    return made


class Rank:
    """What stays the same from step to step on one rank."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        placement: Placement,
        store: Store,
        device: Device,
        options: Options,
        ranks: Ranks | None = None,
    ) -> None:
        self.namespace = namespace
        self.store = store
        self.device = device
        self.limits = Limits(
            max_rows=options.layerwise_max_transfer_blocks,
            max_nbytes=options.layerwise_max_transfer_bytes,
        )
        piece_nbytes = options.layerwise_max_transfer_bytes
        self.gets = [
            ObjectTemplate(namespace, template)
            for template in plan_get(layout, placement, max_transfer_nbytes=piece_nbytes)
        ]
        self.puts = [
            ObjectTemplate(namespace, template, replicas_of(template.object_map, ranks or Ranks()))
            for template in plan_put(layout, placement, max_transfer_nbytes=piece_nbytes)
        ]
        #: The order in which the engine computes layers.
        self.sequence = [LayerAddress(placed.group, placed.layer) for placed in placement.layers]
        self.load_headers = HeaderMemory(store)
        self.save_headers = HeaderMemory(store)
        self._manifest_key = format_key(ManifestKey(namespace))
        self._manifest = manifest(layout)

    def publish_manifest(self) -> int:
        """Store the manifest of the namespace, so that its keys can be explained by anyone."""

        def put(keys: Sequence[str], data: bytes) -> list[int]:
            return [self.store.put(keys[0], data)]

        return ask(put, [self._manifest_key], self._manifest)[0]


def wanted_blocks(steps: Iterable[Any], field: str) -> list[tuple[str, BlockList]]:
    """``(request_id, blocks)`` of one field (``loads`` or ``saves``) of many request steps."""
    return [(step.request_id, blocks) for step in steps for blocks in getattr(step, field)]
