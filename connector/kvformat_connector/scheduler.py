"""The scheduler's side: what a request is promised, and what each step loads and saves.

It never touches KV memory and never opens a session; the worker's side does both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from kvformat.key import ManifestKey, format_key, layout_namespace, namespace_prefix
from kvformat.layout import Layout
from kvformat.stores.protocol import Store
from kvformat_connector.adapters import Adapters
from kvformat_connector.answers import ask
from kvformat_connector.breaker import Breaker
from kvformat_connector.config import Options
from kvformat_connector.loadpolicy import LoadPolicy
from kvformat_connector.lookup import Distrusted, PrefixLookup
from kvformat_connector.messages import BlockList, LoadMode, RequestStep, StepPlan, WorkerReport
from kvformat_connector.namespaces import Namespaces, Variant
from kvformat_connector.needs import BlockIds, alignment, block_list, object_needs
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import close_within

#: The end of a process waits at most so long for a store to close.
_CLOSE_LIMIT_S: Final = 5.0


class _Request(msgspec.Struct):
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


class _Asked(msgspec.Struct, frozen=True):
    """A question about a request's prefix: what the request is computed with, None where that isn't
    known; tokens in memory, tokens of whole blocks that could be loaded, why it wasn't promised
    more, and how the promise is loaded."""

    variant: Variant | None
    num_local_tokens: int
    num_usable_tokens: int
    reason: str = ""
    load_mode: LoadMode = "layerwise"


class Scheduler:
    """Lookup and request life. Requests are the engine's objects; only what is named is read."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        options: Options,
        counters: Counters,
        *,
        adapters: Adapters | None = None,
        may_load: bool = True,
        may_save: bool = True,
        load_policy: LoadPolicy | None = None,
    ) -> None:
        self._needs = object_needs(layout)
        #: Prefixes of keys.
        self._namespaces = Namespaces(
            layout, lambda variant: namespace_prefix(layout_namespace(variant))
        )
        self._adapters = adapters or Adapters()
        self._weights = ""
        #: Whether the engine's own prefix cache may hold KV of the weights before.
        self._has_old_memory = False
        self._hash_block_size = layout.hash.block_size
        #: Tokens of which a promise is a multiple.
        self._unit = alignment(self._needs)
        #: The engine moves blocks of several groups about in its tables, so they are asked for.
        self._tables_move = len(layout.groups) > 1
        self._load_policy = load_policy or LoadPolicy()
        self._options = options
        self._counters = counters
        self._store = store
        self._may_load = may_load
        self._may_save = may_save
        self._distrusted = Distrusted(options.failed_key_retry_ms)
        manifest_key = format_key(ManifestKey(layout_namespace(layout)))
        self._lookup = PrefixLookup(
            store,
            self._needs,
            options.lookup_window,
            self._distrusted,
            counters,
            Breaker(
                lambda suspects: ask(store.exists, [manifest_key])[0] >= 0,
                options.breaker_retry_ms / 1e3,
                counters,
            ),
        )
        self._requests: dict[str, _Request] = {}
        #: What was asked last for requests that have no blocks yet, and bulk loads to be sent.
        self._asked: dict[str, _Asked] = {}
        self._bulk_loads: list[RequestStep] = []
        self._acknowledged: dict[int, int] = {}
        #: By rank: whether it leaves the store alone, so that nothing may be promised.
        self._store_down: dict[int, bool] = {}
        #: Blocks in memory that hold garbage under a hash that the engine may still serve from its
        #: own prefix cache, when the request that was to recompute them is gone.
        self._garbage: set[int] = set()

    def match(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens after the first ``num_local_tokens`` that can be loaded: whole blocks, and never
        the last token, which the engine must compute to have something to sample from. None while
        it isn't known what the request is computed with."""
        variant: Variant | None = Variant(self._weights)
        if request.lora_request is not None:
            adapter = self._adapters.identity(request.request_id, request.lora_request)
            if adapter is None:
                return None
            variant = Variant(self._weights, adapter) if adapter else None
        if self._has_old_memory:
            variant = None
        if not self._may_load:
            self._asked[request.request_id] = _Asked(variant, num_local_tokens, num_local_tokens)
            return 0
        num_hashed = len(request.block_hashes) * self._hash_block_size
        limit = min(num_hashed, request.num_tokens - 1) // self._unit * self._unit
        first = end = num_local_tokens
        reason = "unaligned"
        if variant is None:
            reason = "reset_failed" if self._has_old_memory else "adapter"
        elif any(self._store_down.values()):
            self._counters.add("lookup.store_down")
            reason = "store_down"
        elif first % self._unit == 0 and first < limit:
            namespace = self._namespaces.of(variant)
            end = self._lookup.end(
                request.request_id, namespace, request.block_hashes, first, limit
            )
            reason = self._lookup.reason(request.request_id)
        nbytes = sum(need.block_nbytes * len(need.blocks(first, end)) for need in self._needs)
        mode = self._load_policy.mode(nbytes)
        self._asked[request.request_id] = _Asked(variant, first, limit, reason, mode)
        return end - first

    def loads_in_bulk(self, request_id: str) -> bool:
        """Whether a request waits outside of the batch for what :meth:`match` promised it."""
        asked = self._asked.get(request_id)
        return asked is not None and asked.load_mode == "bulk"

    def allocated(
        self,
        request: Any,
        num_external_tokens: int,
        block_ids: Callable[[], BlockIds] | None = None,
    ) -> None:
        """The engine gave the request blocks, ``num_external_tokens`` of them to be loaded.

        ``block_ids`` tells all of its blocks; bulk loads need it, because the engine schedules
        such a request only when it has been loaded.
        """
        request_id = request.request_id
        # What was asked while it waited is spent; after a preemption it is asked anew.
        self._lookup.forget(request_id)
        self._adapters.forget(request_id)
        asked = self._asked.pop(request_id, None)
        if asked is None and request_id in self._requests:
            return  # it has been loaded in bulk, and is scheduled now
        if asked is not None and self._may_load:
            self._count_misses(asked, request.num_tokens, num_external_tokens)
        if asked is None or asked.variant is None:
            # Nobody can tell what its blocks are computed with, or what they hold since the weights
            # have changed.
            self._requests.pop(request_id, None)
            self._counters.add("requests.not_stored")
            return
        first, variant = asked.num_local_tokens, asked.variant
        made = self._requests[request_id] = _Request(
            block_hashes=request.block_hashes,
            variant=variant,
            adapter_number=request.lora_request.lora_int_id if variant.adapter else 0,
            num_saved_tokens_max=self._num_saved_tokens_max(request),
            first_loaded=first,
            num_reloaded_tokens_max=(
                request.num_tokens if self._options.chunk_prefix_reload else 0
            ),
        )
        self._counters.add("lookup.hit_tokens", num_external_tokens)
        made.end_loaded = first
        if asked.load_mode == "layerwise":
            made.end_loaded += num_external_tokens
        elif num_external_tokens:
            assert block_ids is not None
            self._bulk_loads.append(
                RequestStep(
                    request_id=request_id,
                    variant=variant,
                    loads=self._loads(made, block_ids(), first, first + num_external_tokens),
                    load_mode="bulk",
                    adapter_number=made.adapter_number,
                )
            )

    def plan_step(self, output: Any) -> StepPlan:
        """What the worker does in the step that ``output``, a ``SchedulerOutput``, describes."""
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
        bulk_loads, self._bulk_loads = self._bulk_loads, []
        return StepPlan(
            weights=self._weights,
            requests=[*self._with_shared_blocks(steps), *bulk_loads],
            acknowledged=dict(self._acknowledged),
        )

    def finished(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self._lookup.forget(request_id)
        self._adapters.forget(request_id)
        self._asked.pop(request_id, None)
        self._requests.pop(request_id, None)

    def change_weights(self, identity: str, *, is_memory_clear: bool = True) -> None:
        """The engine gets other weights, or has got them: what is computed from now on belongs to
        ``identity``, and nothing that was promised before is loaded. Where the engine's own prefix
        cache keeps what it has, nobody can tell which weights a request's KV is of, and nothing is
        loaded or saved until it's told that they change with a cache that is clear.

        Requests that have blocks are left alone from now on: these hold KV of the weights before.
        One that the engine preempts, and so computes anew, is asked about again like a new one.
        """
        self._counters.add("weights.changed")
        self._weights = identity
        self._has_old_memory = not is_memory_clear
        for request_id in list(self._asked):
            self._lookup.forget(request_id)
        self._asked.clear()
        self._requests.clear()
        self._bulk_loads.clear()

    @property
    def namespace(self) -> str:
        """Prefix of the keys of what the engine computes now, without an adapter."""
        return self._namespaces.of(Variant(self._weights))

    def reported(self, report: WorkerReport) -> None:
        """Workers could not load what a request had been promised."""
        self._acknowledged.update(report.numbers)
        self._distrusted.add(report.failed_hashes)
        self._store_down.update(report.store_down)
        self._garbage.update(report.failed_block_ids)
        for number in report.changed_adapters:
            self._adapters.distrust(number)
        self._counters.add("lookup.broken_promises", len(report.failed_hashes))

    def close(self) -> None:
        """End the threads, and close the store."""
        self._adapters.close()
        close_within(_CLOSE_LIMIT_S, self._store)

    @property
    def num_requests(self) -> int:
        """Requests that are kept: 0 when the engine is idle."""
        return len(self._requests)

    def _count_misses(self, asked: _Asked, num_tokens: int, num_external_tokens: int) -> None:
        """Every token that must be computed, by reason; ``tail`` are those after the last whole
        block that could be loaded, at least the prompt's last one."""
        first = asked.num_local_tokens
        usable_end = min(num_tokens, max(first, asked.num_usable_tokens))
        self._counters.add(
            f"lookup.miss_tokens.{asked.reason}", usable_end - first - num_external_tokens
        )
        self._counters.add("lookup.miss_tokens.tail", num_tokens - usable_end)

    def _num_saved_tokens_max(self, request: Any) -> int:
        if not self._may_save:
            return 0
        if self._options.save_decode_blocks:
            return 1 << 62
        if self._options.chunk_prefix_reload:
            # What a request had generated before it was preempted is computed in chunks as its
            # prompt is, and each of them needs the ones before.
            return int(request.num_tokens)
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
        self, request_id: str, request: _Request, num_computed: int, num_tokens: int, tables: Any
    ) -> RequestStep | None:
        end = min(num_computed + num_tokens, request.num_saved_tokens_max)
        first_loaded, end_loaded = request.first_loaded, min(request.end_loaded, num_computed)
        is_filling = end // self._hash_block_size > num_computed // self._hash_block_size
        if first_loaded >= end_loaded and not is_filling:
            return None
        block_ids = (tables and tables.get_block_ids(request_id)) or request.block_ids
        loads = self._loads(request, block_ids, first_loaded, end_loaded)
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
        self, request: _Request, num_computed: int, num_tokens: int, end_saved: int
    ) -> None:
        """What later chunks of a prefill load again, because an engine that uses a layer's memory
        for other layers has it no more: all that was loaded or saved so far, without a gap."""
        known = request.end_loaded
        if num_computed < known + self._unit:
            known = max(known, end_saved // self._unit * self._unit)
        end = request.num_reloaded_tokens_max
        request.end_loaded = min(known, end) if num_computed + num_tokens < end else 0

    def _loads(
        self, request: _Request, block_ids: BlockIds, first: int, end: int
    ) -> list[BlockList]:
        """What a prefix of ``end`` tokens needs, when ``first`` tokens are in memory."""
        lists = (
            block_list(need, request.block_hashes, block_ids, need.blocks(first, end))
            for need in self._needs
        )
        return [made for made in lists if made is not None]

    def _saves(
        self, request: _Request, block_ids: BlockIds, first: int, end: int, last: int
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

    def _rests_on_garbage(self, request: _Request, num_computed: int) -> bool:
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
