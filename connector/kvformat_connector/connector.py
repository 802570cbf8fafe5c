"""The facade that vLLM loads: it picks the role and delegates.

Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py (the interface and its call order).
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvformat.errors import ConfigError, Reason
from kvformat.fingerprint import manifest
from kvformat.key import layout_namespace, namespace_prefix
from kvformat_connector.adapters import Adapters
from kvformat_connector.config import directions, parse_options, parse_range_debug
from kvformat_connector.engine import (
    LoadedAdapters,
    adopt_layout,
    can_watch_adapters,
    derive_layout,
    describe_stage,
    gather_stages,
    hash_has_adapter_path,
    is_unused,
    require_same_layout,
    stage_ranks,
    watch_adapters,
)
from kvformat_connector.events import StoredEvents
from kvformat_connector.identity import NextWeights
from kvformat_connector.loadpolicy import load_policy
from kvformat_connector.messages import LayoutNotice, StepPlan, WorkerReport, merge_reports
from kvformat_connector.metrics import ConnectorStats, PrometheusMetrics
from kvformat_connector.needs import fails_by_block, object_needs
from kvformat_connector.ported import without_effect
from kvformat_connector.resolved import adapter_settings
from kvformat_connector.scheduler import Scheduler
from kvformat_connector.starting import log_versions, open_checked_store, warnings_at_start
from kvformat_connector.stats import Counters, Rejection
from kvformat_connector.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvformat.layout import Layout

logger = logging.getLogger(__name__)

_RESET_FAILED: Final = (
    "the engine's own prefix cache was not reset, because requests hold blocks: it may serve KV of "
    "the weights before. Nothing is loaded or saved until a reset answers true: repeat it, or "
    "reset with reset_running_requests"
)


def _log_like_the_engine() -> None:
    """Show this package's messages where vLLM shows its own, unless somebody has set it up."""
    ours, theirs = logging.getLogger("kvformat_connector"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


class StepMetadata(KVConnectorMetadata):
    """A step plan, in the engine's wrapping."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):
    """A worker's report, in the engine's wrapping."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(merge_reports(self.report, other.report))


class LayoutMetadata(KVConnectorHandshakeMetadata):
    """A worker's layout, in the engine's wrapping."""

    def __init__(self, notice: LayoutNotice) -> None:
        self.notice = notice


class KVFormatConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV cache blocks as kvformat objects in a shared store, layer by layer."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_the_engine()
        transfer = self._kv_transfer_config
        extra_config = transfer.kv_connector_extra_config
        options = parse_options(extra_config)
        directions(transfer.kv_role, options)  # a contradiction must stop the start here
        self._options = options
        self._ranks = stage_ranks(vllm_config, kv_cache_config)
        self._rank = vllm_config.parallel_config.rank
        self._counters = Counters()
        is_worker = role == KVConnectorRole.WORKER
        self._source = f"worker {self._rank}" if is_worker else "scheduler"
        self._next_weights = NextWeights(options.model_identity_file)
        self._block_pool: BlockPool | None = None
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        events = vllm_config.kv_events_config
        self._publishes_events = events is not None and events.enable_kv_cache_events
        self._events: StoredEvents | None = None
        #: The layer that was waited for last: what a hook without a name means.
        self._layer = ""
        if role == KVConnectorRole.SCHEDULER:
            said = without_effect(extra_config), warnings_at_start(vllm_config, options)
            for sentence in chain(*said):
                logger.warning("%s", sentence)
        self._loaded_adapters = LoadedAdapters()
        if is_worker:
            if vllm_config.lora_config is not None and can_watch_adapters():
                watch_adapters(self._loaded_adapters)
            stage = describe_stage(vllm_config, kv_cache_config)
            if self._ranks.num_stages == 1:
                self._start(derive_layout(vllm_config, kv_cache_config, options, [stage]))

    def _start(self, layout: Layout) -> None:
        """Begin the work of this role. The scheduler knows the whole layout when the workers have
        told it; with several pipeline stages, they must have told each other before."""
        self._layout = layout
        if not fails_by_block(layout) and not hasattr(base, "KVConnectorTransferResults"):
            raise ConfigError(
                Reason.CONFIG_UNSUPPORTED,
                f"kv_cache_groups is {', '.join(group.kind for group in layout.groups)}: this "
                "engine can't be told that a request of such groups failed to load; vLLM 0.32 can",
            )
        #: Prefix of the keys of what is computed without an adapter.
        self.namespace = namespace_prefix(layout_namespace(layout))
        may_load, may_save = directions(self._kv_transfer_config.kv_role, self._options)
        policy = load_policy(layout, self._ranks, self._options)
        # Last, because it is the only step that takes time and leaves something open.
        store, had_room = open_checked_store(self._options.store, self.role.name.lower())
        self._counters.add("start.no_space", int(not had_room))
        if self.role == KVConnectorRole.SCHEDULER:
            log_versions(store)
            logger.info("KV objects of this server are under %s", self.namespace)
            self._scheduler = Scheduler(
                layout,
                store,
                self._options,
                self._counters,
                adapters=self._adapters(),
                may_load=may_load,
                may_save=may_save,
                load_policy=policy,
            )
            if self._publishes_events:
                self._events = StoredEvents(object_needs(layout), layout.hash.block_size)
        else:
            self._worker = Worker(
                layout,
                store,
                self._options,
                self._counters,
                rank=self._rank,
                ranks=self._ranks,
                adapters=self._loaded_adapters,
                tells_stored=self._publishes_events,
                may_save=may_save,
            )

    def _adapters(self) -> Adapters:
        lora_config = self._vllm_config.lora_config
        if lora_config is None:
            return Adapters()
        can_watch = can_watch_adapters()
        if not can_watch:
            logger.warning(
                "this engine doesn't tell which LoRA adapters it loads: requests that use one are "
                "neither loaded nor saved"
            )
        return Adapters(
            adapter_settings(lora_config),
            hash_has_path=hash_has_adapter_path(),
            can_watch=can_watch,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what isn't saved is a later miss, so no request is kept alive for it."""
        return False

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler's side; only the scheduler's role has one."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> Worker:
        """The worker's side; only the worker's role has one."""
        assert self._worker is not None
        return self._worker

    @property
    def counters(self) -> dict[str, int]:
        """Counts of this role so far."""
        return self._counters.snapshot()

    @property
    def rejections(self) -> list[Rejection]:
        """The last objects that this role did not use, and why."""
        return self._counters.rejections

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks can't be captured in a full graph."""
        # An engine with graphs asks long before it loads a model: time to say what is wrong.
        parse_options(extra_config)
        parse_range_debug()
        return True

    # Both roles

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return ConnectorStats.take(self._counters, self._source)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetric]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is None:
            stage = describe_stage(self._vllm_config, self._kv_cache_config)
            stages = gather_stages(self._ranks, stage)
            self._start(
                derive_layout(self._vllm_config, self._kv_cache_config, self._options, stages)
            )
        self.worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return LayoutMetadata(LayoutNotice(rank=self._rank, manifest=manifest(self._layout)))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._layer = ""
        self.worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads have started when the step was bound, see :meth:`Worker.begin_step`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._layer = layer_name
        self.worker.wait_layer(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """vllm-ascend's hook between a layer's write and its attention: the earliest save.

        It comes without a name from layers that don't know theirs, and comes alone where a batch
        only decodes, so it also waits for what attention is about to read.
        """
        name = layer_name or self._layer
        self.worker.wait_layer(name)
        self.worker.save_layer(name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        # vllm-ascend's recurrent layers give no name. They have waited under theirs, or else come
        # after a layer that has been computed.
        self.worker.save_layer(layer_name or self._layer)

    def wait_for_save(self) -> None:
        self.worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, _ = self.worker.take_received()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # Engines before 0.32 have no such class, and call get_finished.
        received, failed = self.worker.take_received()
        return base.KVConnectorTransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.take_report()
        return None if report is None else ReportMetadata(report)

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        notices = {
            key: value.notice
            for key, value in metadata.items()
            if isinstance(value, LayoutMetadata)
        }
        if self._scheduler is None:
            self._start(
                adopt_layout(self._vllm_config, self._kv_cache_config, self._options, notices)
            )
        require_same_layout(self._layout, notices)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        # Engines before 0.32 don't call this.
        self._block_pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens = self.scheduler.match(request, num_computed_tokens)
        return num_tokens, bool(num_tokens) and self.scheduler.loads_in_bulk(request.request_id)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, num_external_tokens, blocks.get_block_ids)
        if self._events is not None:
            self._events.track(request)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        plan = self.scheduler.plan_step(scheduler_output)
        if self._events is not None:
            self._events.planned(plan)
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self.scheduler.reported(meta.report)
            if self._events is not None:
                self._events.stored(meta.report.stored)

    def reset_cache(self) -> bool | None:
        """The engine's weights may have changed: nothing from before is loaded any more."""
        is_clear = self._block_pool is None or is_unused(self._block_pool)
        self.scheduler.change_weights(self._next_weights.take(), is_memory_clear=is_clear)
        self.namespace = self.scheduler.namespace
        if not is_clear:
            logger.error("%s", _RESET_FAILED)
        if self._events is not None:
            self._events.clear()
        logger.info("KV objects of this server are from now on under %s", self.namespace)
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._events is None else self._events.take()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._finished(request.request_id)
        return False, None

    def _finished(self, request_id: str) -> None:
        self.scheduler.finished(request_id)
        if self._events is not None:
            self._events.forget(request_id)
