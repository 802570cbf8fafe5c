"""vLLM's KV cache events for blocks that this server put into the store.

The workers tell which objects they committed; only the scheduler knows which tokens a block holds.
A block is announced when every object of it that this server writes is visible: as vLLM announces
its own, with the tokens and the parent, and ``medium`` ``STORAGE``.

Source: vllm/distributed/kv_events.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from kvformat_connector.messages import StepPlan, StoredBlock
from kvformat_connector.needs import ObjectNeeds
from kvformat_connector.recent import Recent

#: Blocks that are planned and never reported (given up, there already) must not pile up.
_MAX_PLANNED: Final = 1 << 16
#: vLLM's name for what is neither an accelerator's memory nor the host's.
_MEDIUM: Final = "STORAGE"


class _Tracked(msgspec.Struct):
    """A request, and the block index of each of its hashes seen so far."""

    request: Any
    index_of: dict[bytes, int] = {}


class _Planned(msgspec.Struct):
    """A block on its way: how many of its objects are still to be committed."""

    num_missing: int
    parent: bytes | None
    token_ids: list[int]
    lora_request: Any


class StoredEvents:
    """Collects events until the engine takes them."""

    def __init__(self, needs: Sequence[ObjectNeeds], hash_block_size: int) -> None:
        self._needs = {need.object_index: need for need in needs}
        self._hash_block_size = hash_block_size
        self._requests: dict[str, _Tracked] = {}
        self._planned: Recent[StoredBlock, _Planned] = Recent(_MAX_PLANNED)
        self._events: list[Any] = []

    def track(self, request: Any) -> None:
        """A request that has blocks from now on."""
        self._requests.setdefault(request.request_id, _Tracked(request))

    def forget(self, request_id: str) -> None:
        """A request that is over; what it saved may still be on its way."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Announce nothing of what was planned so far."""
        self._requests.clear()
        self._planned.clear()

    def planned(self, plan: StepPlan) -> None:
        """A step is about to save these blocks."""
        for step in plan.requests:
            tracked = self._requests.get(step.request_id)
            if tracked is None:
                continue
            for blocks in step.saves:
                for block_hash in blocks.block_hashes:
                    self._plan(tracked, blocks.object_index, block_hash)

    def stored(self, blocks: Iterable[StoredBlock]) -> None:
        """Workers have committed these objects."""
        for block in blocks:
            planned = self._planned.get(block)
            if planned is None:
                continue
            planned.num_missing -= 1
            if not planned.num_missing:
                del self._planned[block]
                self._events.append(self._event(block, planned))

    def take(self) -> list[Any]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def _plan(self, tracked: _Tracked, object_index: int, block_hash: bytes) -> None:
        hashes = tracked.request.block_hashes
        for index in range(len(tracked.index_of), len(hashes)):
            tracked.index_of[hashes[index]] = index
        last = tracked.index_of.get(block_hash)
        if last is None:
            return
        need = self._needs[object_index]
        first = last + 1 - need.hashes_per_block
        size = self._hash_block_size
        planned = _Planned(
            num_missing=len(need.parts),
            parent=hashes[first - 1] if first else None,
            token_ids=list(tracked.request.all_token_ids[first * size : (last + 1) * size]),
            lora_request=tracked.request.lora_request,
        )
        self._planned.keep(StoredBlock(object_index, block_hash), planned)

    def _event(self, block: StoredBlock, planned: _Planned) -> Any:
        from vllm.distributed.kv_events import BlockStored
        from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

        need = self._needs[block.object_index]
        parent, lora = planned.parent, planned.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(block.block_hash))],
            parent_block_hash=(
                None if parent is None else maybe_convert_block_hash(BlockHash(parent))
            ),
            token_ids=planned.token_ids,
            block_size=need.block_size,
            lora_id=None if lora is None else lora.lora_int_id,
            medium=_MEDIUM,
            lora_name=None if lora is None else lora.lora_name,
            # Older engines know no groups.
            **(
                {"group_idx": need.groups[0]}
                if "group_idx" in BlockStored.__struct_fields__
                else {}
            ),
        )
