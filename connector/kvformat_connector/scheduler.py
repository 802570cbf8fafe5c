"""The scheduler's side: what a request is promised, and what each step loads and saves.

It never touches KV memory and never opens a session; the worker's side does both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvformat.key import ManifestKey, format_key, layout_namespace, namespace_prefix
from kvformat.layout import Layout
from kvformat.stores.protocol import Store
from kvformat_connector.adapters import Adapters
from kvformat_connector.answers import ask
from kvformat_connector.breaker import Breaker
from kvformat_connector.config import Options
from kvformat_connector.deadline import close_within
from kvformat_connector.loadpolicy import LoadPolicy
from kvformat_connector.lookup import Distrusted, PrefixLookup
from kvformat_connector.messages import LoadMode, RequestStep, StepPlan, WorkerReport
from kvformat_connector.namespaces import Namespaces, Variant
from kvformat_connector.needs import BlockIds, alignment, object_needs
from kvformat_connector.stats import Counters
from kvformat_connector.stepplanning import StepPlanner, TrackedRequest

#: The end of a process waits at most so long for a store to close.
_CLOSE_LIMIT_S: Final = 5.0


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
        self._steps = StepPlanner(layout, self._needs, counters)
        #: What was asked last for requests that have no blocks yet, and bulk loads to be sent.
        self._asked: dict[str, _Asked] = {}
        self._bulk_loads: list[RequestStep] = []
        self._acknowledged: dict[int, int] = {}
        #: By rank: whether it leaves the store alone, so that nothing may be promised.
        self._store_down: dict[int, bool] = {}

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
        if asked is None and request_id in self._steps:
            return  # it has been loaded in bulk, and is scheduled now
        if asked is not None and self._may_load:
            self._count_misses(asked, request.num_tokens, num_external_tokens)
        if asked is None or asked.variant is None:
            # Nobody can tell what its blocks are computed with, or what they hold since the weights
            # have changed.
            self._steps.forget(request_id)
            self._counters.add("requests.not_stored")
            return
        first, variant = asked.num_local_tokens, asked.variant
        made = TrackedRequest(
            block_hashes=request.block_hashes,
            variant=variant,
            adapter_number=request.lora_request.lora_int_id if variant.adapter else 0,
            num_saved_tokens_max=self._num_saved_tokens_max(request),
            first_loaded=first,
            num_reloaded_tokens_max=(
                request.num_tokens if self._options.chunk_prefix_reload else 0
            ),
        )
        self._steps.track(request_id, made)
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
                    loads=self._steps.loads(made, block_ids(), first, first + num_external_tokens),
                    load_mode="bulk",
                    adapter_number=made.adapter_number,
                )
            )

    def plan_step(self, output: Any) -> StepPlan:
        """What the worker does in the step that ``output``, a ``SchedulerOutput``, describes."""
        bulk_loads, self._bulk_loads = self._bulk_loads, []
        return StepPlan(
            weights=self._weights,
            requests=[*self._steps.plan(output), *bulk_loads],
            acknowledged=dict(self._acknowledged),
        )

    def finished(self, request_id: str) -> None:
        """The request is over, however it ended."""
        self._lookup.forget(request_id)
        self._adapters.forget(request_id)
        self._asked.pop(request_id, None)
        self._steps.forget(request_id)

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
        self._steps.clear()
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
        self._steps.distrust(report.failed_block_ids)
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
        return len(self._steps)

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
