"""The scheduler's side: what a request is promised, and what each step loads and saves.

It never touches KV memory and never opens a session; the worker's side does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvformat.key import Namespace, key_prefix
from kvformat.layout import Layout
from kvformat.objectmap import group_bitmap, object_shards
from kvformat.stores.protocol import Store
from kvformat_connector.config import Options
from kvformat_connector.lookup import Distrusted, PrefixLookup
from kvformat_connector.messages import BlockList, RequestStep, StepPlan, WorkerReport
from kvformat_connector.stats import Counters


class _Request(msgspec.Struct):
    """A request that has blocks. ``block_ids[group]`` are the engine's, in token order."""

    block_hashes: Sequence[bytes]  #: the engine's own list: it grows as tokens come
    num_saved_tokens_max: int
    block_ids: tuple[list[int], ...] = ()
    num_promised_tokens: int = 0  #: to be loaded in the step that schedules it


class Scheduler:
    """Lookup and request life. Requests are the engine's objects; only what is named is read."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        store: Store,
        options: Options,
        counters: Counters,
        *,
        may_load: bool = True,
        may_save: bool = True,
    ) -> None:
        # One object that joins all groups: what the engine's side describes so far.
        self._block_size = layout.groups[0].block_size
        self._hashes_per_block = self._block_size // layout.hash.block_size
        self._options = options
        self._counters = counters
        self._store = store
        self._may_load = may_load
        self._may_save = may_save
        self._distrusted = Distrusted(options.failed_key_retry_ms)
        self._lookup = PrefixLookup(
            store,
            [
                key_prefix(namespace, group_bitmap(groups), shard)
                for index, groups in enumerate(layout.objects)
                for shard in object_shards(layout, index)
            ],
            options.lookup_window,
            self._distrusted,
            counters,
        )
        self._requests: dict[str, _Request] = {}
        self._acknowledged: dict[int, int] = {}
        #: By rank: whether it leaves the store alone, so that nothing may be promised.
        self._store_down: dict[int, bool] = {}
        #: Blocks in memory that hold garbage under a hash that the engine may still serve from its
        #: own prefix cache, when the request that was to recompute them is gone.
        self._garbage: set[int] = set()

    def match(self, request: Any, num_local_tokens: int) -> int:
        """Tokens after the first ``num_local_tokens`` that can be loaded: whole blocks, and never
        the last token, which the engine must compute to have something to sample from."""
        if not self._may_load or not self._is_stored(request):
            return 0
        if any(self._store_down.values()):
            self._counters.add("lookup.store_down")
            return 0
        hashes = self._hashes_of_blocks(request.block_hashes)
        limit = min(len(hashes), (request.num_tokens - 1) // self._block_size)
        first = num_local_tokens // self._block_size
        if num_local_tokens % self._block_size or first >= limit:
            return 0
        end = self._lookup.end(request.request_id, hashes, first, limit)
        return (end - first) * self._block_size

    def allocated(self, request: Any, num_external_tokens: int) -> None:
        """The engine gave the request blocks, ``num_external_tokens`` of them to be loaded."""
        if not self._is_stored(request):
            self._counters.add("requests.not_stored")
            return
        # What was asked while it waited is spent; after a preemption it is asked anew.
        self._lookup.forget(request.request_id)
        self._requests[request.request_id] = _Request(
            block_hashes=request.block_hashes,
            num_saved_tokens_max=self._num_saved_tokens_max(request),
            num_promised_tokens=num_external_tokens,
        )
        self._counters.add("lookup.hit_tokens", num_external_tokens)

    def plan_step(self, output: Any) -> StepPlan:
        """What the worker does in the step that ``output``, a ``SchedulerOutput``, describes."""
        cached = output.scheduled_cached_reqs
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._set_blocks(new.req_id, new.block_ids)
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            computed[request_id] = num_computed
            if request_id in cached.resumed_req_ids:
                self._set_blocks(request_id, block_ids or ())
            elif block_ids is not None:
                self._add_blocks(request_id, block_ids)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._note_rewritten(request_id, computed[request_id], num_tokens)
        steps = [
            step
            for request_id, num_tokens in output.num_scheduled_tokens.items()
            if (step := self._plan_request(request_id, computed[request_id], num_tokens))
        ]
        return StepPlan(
            requests=self._with_shared_blocks(steps), acknowledged=dict(self._acknowledged)
        )

    def finished(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self._lookup.forget(request_id)
        self._requests.pop(request_id, None)

    def reported(self, report: WorkerReport) -> None:
        """Workers could not load what a request had been promised."""
        self._acknowledged.update(report.numbers)
        self._distrusted.add(report.failed_hashes)
        self._store_down.update(report.store_down)
        self._garbage.update(report.failed_block_ids)
        self._counters.add("lookup.broken_promises", len(report.failed_hashes))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    @property
    def num_requests(self) -> int:
        """Requests that are kept: 0 when the engine is idle."""
        return len(self._requests)

    def _is_stored(self, request: Any) -> bool:
        # The block hash holds an adapter's name only, so two adapters of one name would share.
        return request.lora_request is None

    def _num_saved_tokens_max(self, request: Any) -> int:
        if not self._may_save:
            return 0
        if self._options.save_decode_blocks:
            return 1 << 62
        # A block computed token by token differs in rounding from one computed in a prefill.
        return int(request.num_prompt_tokens)

    def _set_blocks(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        if (request := self._requests.get(request_id)) is not None:
            request.block_ids = tuple(list(ids) for ids in block_ids)

    def _add_blocks(self, request_id: str, block_ids: Iterable[Sequence[int]]) -> None:
        if (request := self._requests.get(request_id)) is not None:
            for known, added in zip(request.block_ids, block_ids, strict=True):
                known.extend(added)

    def _plan_request(
        self, request_id: str, num_computed: int, num_tokens: int
    ) -> RequestStep | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        # What the engine counts as computed ends with what it was promised.
        first_loaded = (num_computed - request.num_promised_tokens) // self._block_size
        first_saved = num_computed // self._block_size
        end = min(num_computed + num_tokens, request.num_saved_tokens_max) // self._block_size
        loads = self._block_list(request, first_loaded, first_saved)
        saves = self._block_list(request, first_saved, end)
        if saves and self._rests_on_garbage(request, first_saved):
            self._counters.add("save.on_garbage", max(0, end - first_saved))
            saves = []
        request.num_promised_tokens = 0
        if not loads and not saves:
            return None
        return RequestStep(request_id=request_id, loads=loads, saves=saves)

    def _note_rewritten(self, request_id: str, num_computed: int, num_tokens: int) -> None:
        """Blocks that are loaded anew, or computed to their end, hold garbage no more."""
        request = self._requests.get(request_id)
        if self._garbage and request is not None:
            first = (num_computed - request.num_promised_tokens) // self._block_size
            end = (num_computed + num_tokens) // self._block_size
            for ids in request.block_ids:
                self._garbage.difference_update(ids[first:end])

    def _rests_on_garbage(self, request: _Request, num_blocks: int) -> bool:
        return bool(self._garbage) and not all(
            self._garbage.isdisjoint(ids[:num_blocks]) for ids in request.block_ids
        )

    def _block_list(self, request: _Request, first: int, end: int) -> list[BlockList]:
        hashes = self._hashes_of_blocks(request.block_hashes, first, end)
        if not hashes:
            return []
        end = first + len(hashes)
        return [
            BlockList(
                object_index=0,
                block_hashes=list(hashes),
                block_ids=tuple(ids[first:end] for ids in request.block_ids),
            )
        ]

    def _hashes_of_blocks(
        self, hashes: Sequence[bytes], first: int = 0, end: int | None = None
    ) -> Sequence[bytes]:
        """The hash of a block is the engine's hash of the last hash block in it."""
        per_block = self._hashes_per_block
        if per_block == 1 and first == 0 and end is None:
            # A waiting request is asked about in every step: its list is used as it is.
            return hashes
        stop = None if end is None else max(first, end) * per_block
        return hashes[first * per_block + per_block - 1 : stop : per_block]

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
