"""What each step loads and saves, of the requests that have blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvformat.layout import Layout
from kvformat_connector.messages import BlockList, RequestStep
from kvformat_connector.namespaces import Variant
from kvformat_connector.needs import BlockIds, ObjectNeeds, alignment, block_list
from kvformat_connector.stats import Counters


class TrackedRequest(msgspec.Struct):
    """A request that has blocks. ``block_ids[group]`` are the engine's, in token order."""

    block_hashes: Sequence[bytes]  #: the engine's own list: it grows as tokens come
    variant: Variant
    adapter_number: int
    num_saved_tokens_max: int
    block_ids: BlockIds = ()
    #: Tokens ``first_loaded`` to ``end_loaded`` are loaded by the next step; after it, tokens up to
    #: ``num_reloaded_tokens_max`` of what is in the store by then, again.
    first_loaded: int = 0
    end_loaded: int = 0
    num_reloaded_tokens_max: int = 0


class StepPlanner:
    """The requests that have blocks, and what they do step by step."""

    def __init__(self, layout: Layout, needs: Sequence[ObjectNeeds], counters: Counters) -> None:
        self._needs = needs
        self._counters = counters
        self._hash_block_size = layout.hash.block_size
        #: Tokens of which a prefix that is loaded is a multiple.
        self._unit = alignment(needs)
        #: The engine moves blocks of several groups about in its tables, so they are asked for.
        self._tables_move = len(layout.groups) > 1
        self._requests: dict[str, TrackedRequest] = {}
        #: Blocks in memory that hold garbage under a hash that the engine may still serve from its
        #: own prefix cache, when the request that was to recompute them is gone.
        self._garbage: set[int] = set()

    def track(self, request_id: str, request: TrackedRequest) -> None:
        """Plan for a request from now on, and for what it was before no more."""
        self._requests[request_id] = request

    def forget(self, request_id: str) -> None:
        """Plan nothing for a request any more."""
        self._requests.pop(request_id, None)

    def clear(self) -> None:
        """Plan nothing for all of them."""
        self._requests.clear()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def distrust(self, block_ids: Iterable[int]) -> None:
        """These blocks hold garbage until they are written anew."""
        self._garbage.update(block_ids)

    def plan(self, output: Any) -> list[RequestStep]:
        """What requests load and save in the step that ``output``, a ``SchedulerOutput``,
        describes."""
        cached = output.scheduled_cached_reqs
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._set_blocks(new.req_id, new.block_ids)
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        resumed = cached.resumed_req_ids
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if resumed and request_id in resumed:
                self._set_blocks(request_id, block_ids or ())
            elif block_ids is not None:
                self._add_blocks(request_id, block_ids)
        if self._garbage:
            for request_id, num_tokens in output.num_scheduled_tokens.items():
                self._note_rewritten(request_id, computed[request_id], num_tokens)
        tables = getattr(output, "kv_connector_block_state", None) if self._tables_move else None
        steps = []
        requests, hash_block_size = self._requests, self._hash_block_size
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = requests.get(request_id)
            if request is None:
                continue
            # Most requests decode inside of a block, and nothing is to be done for them.
            num_computed = computed[request_id]
            if (
                num_computed % hash_block_size + num_tokens >= hash_block_size
                or request.end_loaded > request.first_loaded
            ):
                step = self._plan_request(request_id, request, num_computed, num_tokens, tables)
                if step is not None:
                    steps.append(step)
        return self._with_shared_blocks(steps)

    def loads(
        self, request: TrackedRequest, block_ids: BlockIds, first: int, end: int
    ) -> list[BlockList]:
        """What a prefix of ``end`` tokens needs, when ``first`` tokens are in memory."""
        lists = (
            block_list(need, request.block_hashes, block_ids, need.blocks(first, end))
            for need in self._needs
        )
        return [made for made in lists if made is not None]

    def _set_blocks(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.block_ids = tuple(list(ids) for ids in block_ids)

    def _add_blocks(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        if (request := self._requests.get(request_id)) is not None:
            for known, added in zip(request.block_ids, block_ids, strict=True):
                known.extend(added)

    def _plan_request(
        self,
        request_id: str,
        request: TrackedRequest,
        num_computed: int,
        num_tokens: int,
        tables: Any,
    ) -> RequestStep | None:
        end = min(num_computed + num_tokens, request.num_saved_tokens_max)
        first_loaded, end_loaded = request.first_loaded, min(request.end_loaded, num_computed)
        is_filling = end // self._hash_block_size > num_computed // self._hash_block_size
        if first_loaded >= end_loaded and not is_filling:
            return None
        block_ids = (tables and tables.get_block_ids(request_id)) or request.block_ids
        loads = self.loads(request, block_ids, first_loaded, end_loaded)
        saves = self._saves(request, block_ids, num_computed, end, num_computed + num_tokens)
        if saves and self._rests_on_garbage(request, num_computed):
            self._counters.add("save.on_garbage", sum(len(made.block_hashes) for made in saves))
            saves = []
        self._plan_reload(request, num_computed, num_tokens, end if saves else 0)
        if not loads and not saves:
            return None
        return RequestStep(
            request_id=request_id,
            variant=request.variant,
            loads=loads,
            saves=saves,
            adapter_number=request.adapter_number,
        )

    def _plan_reload(
        self, request: TrackedRequest, num_computed: int, num_tokens: int, end_saved: int
    ) -> None:
        """What later chunks of a prefill load again, because an engine that uses a layer's memory
        for other layers has it no more: all that was loaded or saved so far, without a gap."""
        known = request.end_loaded
        if num_computed < known + self._unit:
            known = max(known, end_saved // self._unit * self._unit)
        end = request.num_reloaded_tokens_max
        request.end_loaded = min(known, end) if num_computed + num_tokens < end else 0

    def _saves(
        self, request: TrackedRequest, block_ids: BlockIds, first: int, end: int, last: int
    ) -> list[BlockList]:
        """The blocks that tokens ``first`` to ``end`` fill, in a step that computes up to
        ``last``."""
        made = []
        for need in self._needs:
            blocks = range(first // need.block_size, end // need.block_size)
            if need.kind == "recurrent_state":
                # A step leaves the state after its last token, and nothing of those before it.
                blocks = blocks[-1:] if end == last and last % need.block_size == 0 else range(0)
            made.append(block_list(need, request.block_hashes, block_ids, blocks))
        return [blocks for blocks in made if blocks is not None]

    def _note_rewritten(self, request_id: str, num_computed: int, num_tokens: int) -> None:
        """Blocks that are loaded anew, or computed to their end, hold garbage no more."""
        request = self._requests.get(request_id)
        if request is None:
            return
        for need in self._needs:
            is_loaded = request.end_loaded > request.first_loaded
            first = (request.first_loaded if is_loaded else num_computed) // need.block_size
            end = (num_computed + num_tokens) // need.block_size
            for group in need.groups:
                self._garbage.difference_update(request.block_ids[group][first:end])

    def _rests_on_garbage(self, request: TrackedRequest, num_computed: int) -> bool:
        return bool(self._garbage) and not all(
            self._garbage.isdisjoint(request.block_ids[group][: num_computed // need.block_size])
            for need in self._needs
            for group in need.groups
        )

    def _with_shared_blocks(self, steps: list[RequestStep]) -> list[RequestStep]:
        loaded = {
            block_id: step.request_id
            for step in steps
            for blocks in step.loads
            for ids in blocks.block_ids
            for block_id in ids
        }
        if not loaded:
            return steps
        return [
            msgspec.structs.replace(
                step,
                shared_block_ids=[
                    block_id
                    for ids in self._requests[step.request_id].block_ids
                    for block_id in ids
                    if loaded.get(block_id, step.request_id) != step.request_id
                ],
            )
            for step in steps
        ]
