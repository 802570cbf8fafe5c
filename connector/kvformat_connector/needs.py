"""Which blocks a prefix needs, object by object: of full attention all of them, of a window those
that the next token still sees, of a recurrent state the one that ends where the prefix does.

Source: spec/kvformat.md section 8.4 (lookup); vllm/v1/core/single_type_kv_cache_manager.py
(``get_num_skipped_tokens``), which leaves every other block without memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Final

import msgspec

from kvformat.key import object_part
from kvformat.layout import Layout
from kvformat.objectmap import group_bitmap, object_shards
from kvformat_connector.messages import BlockList

#: The engine's block that stands where a window or a state has none.
_NULL_BLOCK: Final = 0

BlockIds = tuple[list[int], ...]


class ObjectNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a layout's ``objects``: its blocks, and the keys of each.

    ``block_size`` and ``window`` are in tokens; ``block_nbytes`` is the payload of a block in all
    shards. ``parts`` has, for every shard, the part of a key between namespace and block hash: a
    block is in the store when all of its shards are.
    """

    object_index: int
    groups: tuple[int, ...]
    kind: str
    block_size: int
    hashes_per_block: int
    window: int
    block_nbytes: int
    parts: tuple[str, ...]

    @property
    def is_chain(self) -> bool:
        """Whether a prefix needs every block of it."""
        return self.kind == "full_attention"

    def blocks(self, first: int, end: int) -> range:
        """Blocks that must be loaded for a prefix of ``end`` tokens, when the first ``first``
        tokens are in memory. Both are whole numbers of blocks."""
        stop = end // self.block_size
        if self.kind == "recurrent_state":
            return range(max(first // self.block_size, stop - 1), stop)
        seen = 0
        if self.kind == "sliding_window":
            seen = max(0, end - self.window + 1)
        elif self.kind == "chunked_local":
            seen = end // self.window * self.window
        return range(max(first, seen) // self.block_size, stop)

    def block_hash(self, hashes: Sequence[bytes], block: int) -> bytes:
        """The hash of a block: the engine's of the last hash block in it."""
        return hashes[(block + 1) * self.hashes_per_block - 1]

    def block_hashes(self, hashes: Sequence[bytes], blocks: range) -> Sequence[bytes]:
        """The hashes of consecutive blocks; of those at the end that aren't full yet, none."""
        size = self.hashes_per_block
        return hashes[blocks.start * size + size - 1 : blocks.stop * size : size]


def object_needs(layout: Layout) -> list[ObjectNeeds]:
    """The needs of every object of a layout, by object index: the same in every namespace."""
    needs = []
    for index, groups in enumerate(layout.objects):
        # Groups that share an object live and die together: one of them speaks for all.
        group = layout.groups[groups[0]]
        needs.append(
            ObjectNeeds(
                object_index=index,
                groups=groups,
                kind=group.kind,
                block_size=group.block_size,
                hashes_per_block=group.block_size // layout.hash.block_size,
                window=group.window,
                block_nbytes=sum(
                    part.nbytes
                    for index in groups
                    for layer in layout.groups[index].layers
                    for part in layer.components
                ),
                parts=tuple(
                    object_part(group_bitmap(groups), shard)
                    for shard in object_shards(layout, index)
                ),
            )
        )
    return needs


def alignment(needs: Sequence[ObjectNeeds]) -> int:
    """Tokens in the smallest prefix that is whole blocks of every object."""
    return lcm(*(need.block_size for need in needs))


def fails_by_block(layout: Layout) -> bool:
    """Whether an engine can go on from the first block that failed to load.

    Only where there is one group, whose blocks are all in memory: before a window or a state that
    was loaded there is nothing to compute it from, so such a request is computed from its start.
    """
    return len(layout.groups) == 1 and layout.groups[0].kind == "full_attention"


def block_list(
    need: ObjectNeeds, block_hashes: Sequence[bytes], block_ids: BlockIds, blocks: range
) -> BlockList | None:
    """Those of a request's blocks that have a hash and memory; None where there are none.

    ``block_ids[group]`` are the engine's, in token order.
    """
    hashes = need.block_hashes(block_hashes, blocks)
    stop = blocks.start + len(hashes)
    columns = [block_ids[group][blocks.start : stop] for group in need.groups]
    if not need.is_chain:
        rows = [
            (block_hash, *ids)
            for block_hash, *ids in zip(hashes, *columns, strict=False)
            if _NULL_BLOCK not in ids
        ]
        if not rows:
            return None
        hashes, *columns = map(list, zip(*rows, strict=True))
    return (
        BlockList(
            object_index=need.object_index, block_hashes=list(hashes), block_ids=tuple(columns)
        )
        if hashes
        else None
    )
