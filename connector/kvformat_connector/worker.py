"""The worker's side: the engine's layer hooks, turned into loads and saves of one step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvformat.key import Namespace
from kvformat.layout import Layout
from kvformat.stores.protocol import Code, Store
from kvformat_connector.config import Options
from kvformat_connector.device import HostDevice
from kvformat_connector.engine import Ranks, derive_placement, layer_addresses
from kvformat_connector.loading import LoadOutcome, LoadStep
from kvformat_connector.messages import StepPlan, WorkerReport
from kvformat_connector.objects import Rank, make_rows, wanted_blocks
from kvformat_connector.saving import SaveStep
from kvformat_connector.stats import Counters
from kvformat_connector.transfer import Lane

logger = logging.getLogger(__name__)

#: A store may evict a manifest like any object, so it is offered again from time to time.
_MANIFEST_EVERY_S: Final = 60.0


class Worker:
    """Loads and saves. The engine's thread calls; two lanes do the moving."""

    def __init__(
        self,
        layout: Layout,
        namespace: Namespace,
        store: Store,
        options: Options,
        counters: Counters,
        *,
        rank: int = 0,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._namespace = namespace
        self._store = store
        self._options = options
        self._counters = counters
        self._rank_number = rank
        self._ranks = ranks or Ranks()
        self._clock = clock
        self._addresses = layer_addresses(layout)
        self._rank: Rank | None = None
        self._load_lane = Lane("load")
        self._save_lane = Lane("save")
        self._plan = StepPlan()
        self._loads: LoadStep | None = None
        self._saves: SaveStep | None = None
        self._failed_block_ids: set[int] = set()
        self._report: WorkerReport | None = None
        self._num_reports = 0
        self._manifest_due_at = float("-inf")

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's KV tensors. Raises ``ConfigError`` for what the layout doesn't say."""
        placement = derive_placement(self._layout, kv_caches, self._ranks)
        for region in placement.regions:
            code = self._store.register_memory(region.address, region.nbytes)
            if code != Code.OK:
                logger.warning("store refuses %d bytes of cache memory: %d", region.nbytes, code)
        self._rank = Rank(
            self._layout,
            self._namespace,
            placement,
            self._store,
            HostDevice(placement.regions),
            self._options,
            self._ranks,
        )

    def begin_step(self, plan: StepPlan) -> None:
        """Prepare a step; what it saves is opened now, because no other hook comes before the
        first layer of a step that loads nothing."""
        self.end_step()
        self._plan = plan
        if self._rank is None:
            return
        saves = wanted_blocks(plan.requests, "saves")
        if saves and plan.acknowledged.get(self._rank_number, 0) < self._num_reports:
            # Steps that were scheduled before the scheduler knew of a failed load still count the
            # garbage as computed.
            self._counters.add("save.held", sum(len(blocks.block_hashes) for _, blocks in saves))
            saves = []
        if saves:
            rows = make_rows(self._rank.puts, saves, distinct=True)
            self._saves = SaveStep(self._rank, rows, self._save_lane)
            self._saves.start(self._publish_manifest)
        if loads := wanted_blocks(plan.requests, "loads"):
            rows = make_rows(self._rank.gets, loads, distinct=False)
            self._loads = LoadStep(
                self._rank, rows, self._load_lane, self._options.layerwise_prefetch_layers
            )

    def start_load(self) -> None:
        """Start the loads of the step, if it has any."""
        if self._loads is not None:
            self._loads.start()

    def wait_layer(self, layer_name: str) -> None:
        """Return when a layer's loads are in memory and verified, or have failed."""
        if self._loads is not None and layer_name in self._addresses:
            self._loads.wait(self._addresses[layer_name])

    def save_layer(self, layer_name: str) -> None:
        """Save a layer that has been computed."""
        if self._saves is not None and layer_name in self._addresses:
            self._saves.put(self._addresses[layer_name])

    def end_step(self) -> None:
        """Finish every transfer of the step and end its sessions. Doing it twice is fine."""
        loads, self._loads = self._loads, None
        saves, self._saves = self._saves, None
        tainted: set[str] = set()
        if loads is not None:
            tainted = self._note_failures(loads.finish(self._counters))
        if saves is not None:
            saves.finish(tainted, self._counters)

    def take_failed_block_ids(self) -> set[int]:
        """Blocks that failed to load since the last call."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose bulk loads are over since the last call, and those of them of which no
        part may be used."""
        return set(), set()

    def take_report(self) -> WorkerReport | None:
        """What the scheduler must know of this step, or None."""
        report, self._report = self._report, None
        return report

    def close(self) -> None:
        """End the step, the threads and the store."""
        self.end_step()
        self._load_lane.close()
        self._save_lane.close()
        self._store.close()

    def _note_failures(self, outcome: LoadOutcome) -> set[str]:
        """Remember what failed; answers the requests whose computation rests on it."""
        if not outcome.block_ids:
            return set()
        self._num_reports += 1
        self._failed_block_ids |= outcome.block_ids
        self._report = WorkerReport(
            numbers={self._rank_number: self._num_reports},
            failed_hashes=outcome.block_hashes,
            failed_block_ids=sorted(outcome.block_ids),
        )
        return outcome.request_ids | {
            step.request_id
            for step in self._plan.requests
            if not outcome.block_ids.isdisjoint(step.shared_block_ids)
        }

    def _publish_manifest(self) -> None:
        assert self._rank is not None
        if self._clock() >= self._manifest_due_at:
            self._rank.publish_manifest()
            self._manifest_due_at = self._clock() + _MANIFEST_EVERY_S
