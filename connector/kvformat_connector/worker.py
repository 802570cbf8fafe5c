"""The worker's side: the engine's layer hooks, turned into loads and saves of one step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvformat.layout import Layout
from kvformat.stores.protocol import Store
from kvformat_connector.adaptercheck import mistaken_requests
from kvformat_connector.breaker import Breaker
from kvformat_connector.bulk import BulkLoads
from kvformat_connector.config import Options
from kvformat_connector.damaged import Damaged
from kvformat_connector.deadline import close_within
from kvformat_connector.depth import Depth
from kvformat_connector.engine import (
    LoadedAdapters,
    Ranks,
    derive_placement,
    layer_addresses,
    merge_over_tensor_ranks,
    wait_for_tensor_ranks,
)
from kvformat_connector.loading import LATE_SHARE, LoadOutcome, LoadStep
from kvformat_connector.manifests import Manifests
from kvformat_connector.messages import StepPlan, StoredBlock, WorkerReport, merge_reports
from kvformat_connector.needs import fails_by_block
from kvformat_connector.objects import Rank
from kvformat_connector.probing import probe_store
from kvformat_connector.saving import SaveStep
from kvformat_connector.stats import Counters
from kvformat_connector.torchdevice import device_for
from kvformat_connector.transfer import Channels, Lane

logger = logging.getLogger(__name__)

#: A step waits at most so long for earlier saves to make room; then it doesn't save everything.
_SAVE_WAIT_S: Final = 1.0
#: Calls that hang at once; each keeps a thread and the memory it was given.
_MAX_LEFT_BEHIND: Final = 3
_CLOSE_LIMIT_S: Final = 5.0


class Worker:
    """Loads and saves. The engine's thread calls; threads of ours call the store."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        options: Options,
        counters: Counters,
        *,
        rank: int = 0,
        ranks: Ranks | None = None,
        adapters: LoadedAdapters | None = None,
        tells_stored: bool = False,
        may_save: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._store = store
        self._options = options
        self._counters = counters
        self._rank_number = rank
        self._ranks = ranks or Ranks()
        self._adapters = adapters or LoadedAdapters()
        self._clock = clock
        self._tells_stored = tells_stored
        self._stored: list[StoredBlock] = []
        self._may_save = may_save
        self._deadline_s = options.transfer_deadline_ms / 1e3
        self._addresses = layer_addresses(layout)
        #: Layers of recurrent state: the engine has no hook for them, and they are right when all
        #: of the step has been computed.
        self._unhooked = [
            address
            for name, address in self._addresses.items()
            if layout.groups[address.group].kind == "recurrent_state"
            and self._ranks.has_layer(name)
        ]
        self._rank: Rank | None = None
        self._bulk: BulkLoads | None = None
        self._damaged: Damaged | None = None
        self._manifests: Manifests | None = None
        self._load_channels = Channels("load", LATE_SHARE * self._deadline_s)
        self._save_channels = Channels("save")
        self._check_lane = Lane("check")
        self._copy_lane = Lane("copy")
        depth = options.layerwise_prefetch_layers
        self._depth = Depth(None if depth == "auto" else depth)
        self._breaker = Breaker(self._probe, options.breaker_retry_ms / 1e3, counters)
        self._plan = StepPlan()
        self._loads: LoadStep | None = None
        self._saves: SaveStep | None = None
        #: Saves of earlier steps that are not committed yet, and those that nobody waits for since
        #: their channel was left behind.
        self._saving: list[SaveStep] = []
        self._save_wait_s = _SAVE_WAIT_S
        self._failed_block_ids: set[int] = set()
        self._tainted: set[str] = set()
        self._received: set[str] = set()
        self._failed_requests: set[str] = set()
        self._report: WorkerReport | None = None
        self._num_reports = 0
        self._is_told_down = False

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's KV tensors. Raises ``ConfigError`` for what the layout doesn't say."""
        placement = derive_placement(self._layout, kv_caches, self._ranks)
        self._rank = Rank(
            self._layout,
            placement,
            self._store,
            device_for(self._layout, placement, kv_caches),
            self._options,
            self._ranks,
        )
        self._bulk = BulkLoads(
            self._rank, self._check_lane, self._breaker, self._counters, self._deadline_s
        )
        self._manifests = Manifests(self._rank, self._clock)
        if self._may_save:  # who writes nothing removes nothing either
            self._damaged = Damaged(self._rank, self._counters, self._clock)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin a step. What it saves is opened now, because no other hook comes before the first
        layer of a step that loads nothing; what it loads, because the engine calls the hook for
        loads after the last layer of a step in which it doesn't know of any."""
        self.end_step()
        if plan.weights != self._plan.weights and self._bulk is not None:
            self._bulk.void_all()
        self._plan = plan
        if any(step.adapter_number for step in plan.requests):
            self._plan = plan = self._without_mistaken(plan)
        layerwise = [step for step in plan.requests if step.load_mode == "layerwise"]
        has_loads = any(step.loads for step in layerwise)
        if has_loads and self._options.chunk_prefix_reload:
            # What the chunk before stored may not be visible yet, and what several ranks hold alike
            # another one may have stored.
            self.settle(self._deadline_s)
            wait_for_tensor_ranks(self._ranks)
        # After that wait, in which a call may have taken too long.
        is_usable = self._is_store_usable()
        if is_usable and self._damaged is not None:
            self._damaged.poll()
        if self._rank is None or not plan.requests:
            return
        # First: what is loaded is waited for.
        if has_loads:
            self._loads = LoadStep(
                self._rank,
                self._rank.rows_to_get(layerwise),
                self._load_channels,
                self._check_lane,
                self._depth,
                self._breaker,
                self._counters,
                self._deadline_s,
            )
            self._loads.start()
        if len(layerwise) < len(plan.requests):
            self._begin_bulk(plan)
        if is_usable and self._manifests is not None:
            variants = {step.variant for step in plan.requests}
            self._manifests.publish(variants, self._save_channels.current)
        self._begin_saves(plan, is_usable)

    def wait_layer(self, layer_name: str) -> None:
        """Return when a layer's loads are in memory and verified, or have failed."""
        if self._loads is not None and layer_name in self._addresses:
            self._loads.wait(self._addresses[layer_name])

    def save_layer(self, layer_name: str) -> None:
        """Save a layer that has been computed. Doing it twice is fine."""
        if self._saves is not None and layer_name in self._addresses:
            self._saves.put(self._addresses[layer_name])

    def end_step(self) -> None:
        """Finish the loads of the step, and let the engine use the blocks again that it saves.
        Doing it twice is fine. Commits happen later: see :meth:`settle`."""
        self._finish_loads()
        saves, self._saves = self._saves, None
        tainted, self._tainted = self._tainted, set()
        if saves is not None:
            for address in self._unhooked:
                saves.put(address)
            saves.end(tainted)
            self._saving.append(saves)
            # One step waits for a store that is too slow, the next ones don't.
            self._save_wait_s = 0.0 if saves.found_no_stage else _SAVE_WAIT_S

    def take_failed_block_ids(self) -> set[int]:
        """Blocks that failed to load since the last call."""
        self._finish_loads()
        self._poll_bulk()
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_received(self) -> tuple[set[str], set[str]]:
        """Requests whose bulk loads are over since the last call, and those of them of which no
        part may be used."""
        self._poll_bulk()
        received, self._received = self._received, set()
        failed, self._failed_requests = self._failed_requests, set()
        return received, failed

    def take_report(self) -> WorkerReport | None:
        """What the scheduler must know of this step, or None."""
        self._finish_loads()
        self._poll_bulk()
        if self._breaker.is_open != self._is_told_down:
            self._is_told_down = self._breaker.is_open
            self._add_report(WorkerReport(store_down={self._rank_number: self._is_told_down}))
        if self._tells_stored:
            self._forget_done()
            if self._stored:
                self._add_report(WorkerReport(stored=self._stored))
                self._stored = []
        report, self._report = self._report, None
        return report

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was saved is committed or given up; what waits for a call that was
        left behind is given up. False where it isn't in time."""
        deadline = self._clock() + timeout_s
        self._forget_done()
        while self._awaited_saves:
            if self._clock() > deadline:
                return False
            self._is_store_usable()
            time.sleep(0.001)
            self._forget_done()
        return True

    @property
    def num_open_sessions(self) -> int:
        """Sessions that are open: 0 when the engine is idle and the store keeps up."""
        saves = self._saving if self._saves is None else [*self._saving, self._saves]
        num_open = sum(step.num_open_sessions for step in saves)
        return num_open + (0 if self._rank is None else len(self._rank.open_gets))

    @property
    def num_left_behind(self) -> int:
        """Calls to the store that were given up and have not come back."""
        num_bulk = 0 if self._bulk is None else self._bulk.num_left_behind
        num_layerwise = self._load_channels.num_left_behind + self._save_channels.num_left_behind
        return num_layerwise + num_bulk

    def close(self) -> None:
        """End the step, the threads and the store."""
        self.end_step()
        deadline = self._clock() + _CLOSE_LIMIT_S
        self.settle(_CLOSE_LIMIT_S)
        registrar = None if self._rank is None else self._rank.registrar
        for thread in (self._load_channels, self._save_channels, self._bulk, self._damaged,
                       self._check_lane, self._copy_lane, registrar):  # fmt: skip
            if thread is not None:
                thread.close(max(0.0, deadline - self._clock()))
        close_within(_CLOSE_LIMIT_S, self._store)

    def _without_mistaken(self, plan: StepPlan) -> StepPlan:
        """A request that is computed with another adapter than the scheduler takes it for loads and
        saves nothing, on any of the ranks that compute on each other's results."""
        found = mistaken_requests(self._adapters, plan.requests)
        mistaken = merge_over_tensor_ranks(self._ranks, found.request_ids)
        if not mistaken:
            return plan
        failed: set[int] = set()
        for step in plan.requests:
            if step.request_id not in mistaken:
                continue
            num_saves = sum(len(blocks.block_hashes) for blocks in step.saves)
            num_loads = sum(len(blocks.block_hashes) for blocks in step.loads)
            self._counters.add("save.adapter_changed", num_saves)
            self._counters.add("rejected.adapter_changed", num_loads)
            block_ids = {id_ for blocks in step.loads for ids in blocks.block_ids for id_ in ids}
            if step.load_mode == "bulk":
                self._received.add(step.request_id)
                self._fail_bulk(step.request_id, block_ids)
            else:
                failed |= block_ids
        self._add_report(WorkerReport(changed_adapters=found.changed_adapters))
        # The objects are as good as they were, for whoever has their adapter.
        outcome = LoadOutcome(block_ids=failed, request_ids=mistaken, block_hashes=[], suspects=[])
        self._tainted |= self._note_failures(outcome)
        kept = [step for step in plan.requests if step.request_id not in mistaken]
        return msgspec.structs.replace(plan, requests=kept)

    def _begin_saves(self, plan: StepPlan, is_usable: bool) -> None:
        assert self._rank is not None
        saves = [blocks for step in plan.requests for blocks in step.saves]
        if not saves:
            return
        held_by = None
        if not is_usable:
            held_by = "save.breaker_open"
        elif plan.acknowledged.get(self._rank_number, 0) < self._num_reports:
            # Steps that were scheduled before the scheduler knew of a failed load still count the
            # garbage as computed.
            held_by = "save.held"
        if held_by:
            self._counters.add(held_by, sum(len(blocks.block_hashes) for blocks in saves))
            return
        pending = {key for step in self._saving for key in step.keys}
        rows = self._rank.rows_to_put(plan.requests, without=pending)
        if rows:
            self._saves = SaveStep(
                self._rank,
                rows,
                self._save_channels.current,
                self._copy_lane,
                self._breaker,
                self._counters,
                self._save_wait_s,
                # A load that fails in this step would taint what is computed after it.
                may_commit_early=not any(
                    step.loads and step.load_mode == "layerwise" for step in plan.requests
                ),
            )
            self._saves.start()

    def _begin_bulk(self, plan: StepPlan) -> None:
        assert self._rank is not None
        assert self._bulk is not None
        for step in plan.requests:
            if step.load_mode == "bulk":
                self._bulk.start(step.request_id, self._rank.rows_to_get([step]))

    def _finish_loads(self) -> None:
        loads, self._loads = self._loads, None
        if loads is not None:
            outcome = loads.finish()
            self._suspect(outcome.suspects)
            tainted = self._note_failures(outcome)
            # Every tensor rank has the same loads, so all of them come here in this step.
            merged = merge_over_tensor_ranks(self._ranks, tainted)
            if merged and not tainted:
                # Another rank's garbage is in what this one computed too.
                self._num_reports += 1
                self._add_report(WorkerReport(numbers={self._rank_number: self._num_reports}))
            self._tainted |= merged
            self._counters.set("prefetch_layers", self._depth.num_layers)

    def _note_failures(self, outcome: LoadOutcome) -> set[str]:
        """Remember what failed; answers the requests whose computation rests on it."""
        if not outcome.block_ids:
            return set()
        self._num_reports += 1
        self._failed_block_ids |= outcome.block_ids
        self._add_report(
            WorkerReport(
                numbers={self._rank_number: self._num_reports},
                failed_hashes=outcome.block_hashes,
                failed_block_ids=sorted(outcome.block_ids),
            )
        )
        return outcome.request_ids | {
            step.request_id
            for step in self._plan.requests
            if not outcome.block_ids.isdisjoint(step.shared_block_ids)
        }

    def _poll_bulk(self) -> None:
        if self._bulk is None or not self._bulk.num_loads:
            return
        for outcome in self._bulk.poll():
            self._received.add(outcome.request_id)
            self._suspect(outcome.suspects)
            if not outcome.block_ids:
                continue
            self._fail_bulk(outcome.request_id, outcome.block_ids)
            # Nothing was computed on these blocks, so there is no garbage to tell of.
            self._add_report(WorkerReport(failed_hashes=outcome.block_hashes))

    def _fail_bulk(self, request_id: str, block_ids: set[int]) -> None:
        if fails_by_block(self._layout):
            self._failed_block_ids |= block_ids
        else:
            self._failed_requests.add(request_id)

    def _suspect(self, keys: Sequence[str]) -> None:
        if self._damaged is not None:
            self._damaged.suspect(keys)

    def _add_report(self, report: WorkerReport) -> None:
        self._report = report if self._report is None else merge_reports(self._report, report)

    def _is_store_usable(self) -> bool:
        """Look after calls that hang; whether the store may be used in this step."""
        self._forget_done()
        if awaited := self._awaited_saves:
            channel = self._save_channels.current
            if channel.call_age_s > self._deadline_s:
                self._save_channels.leave(channel)
                for step in awaited:
                    step.give_back_stages()
                self._breaker.trip(f"saving: a call took more than {self._deadline_s:g} s")
        if not self._breaker.is_open:
            return True
        return self.num_left_behind <= _MAX_LEFT_BEHIND and self._breaker.poll()

    @property
    def _awaited_saves(self) -> list[SaveStep]:
        """Those of them whose calls nobody has left behind."""
        return [step for step in self._saving if not step.is_left_behind]

    def _forget_done(self) -> None:
        if not self._saving:
            return
        if self._tells_stored:
            for step in self._saving:
                if step.is_done:
                    self._stored += step.committed
        self._saving = [step for step in self._saving if not step.is_done]
        self._counters.set("open_sessions", self.num_open_sessions)

    def _probe(self, suspects: Sequence[str]) -> bool:
        return self._rank is not None and probe_store(self._rank, suspects)
