"""The scheduler's side: what is promised, and what each step loads and saves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, Request, SimulatedEngine, prompt

from kvformat.key import key_prefix
from kvformat.objectmap import object_maps
from kvformat.stores.protocol import Code
from kvformat_connector.messages import StepPlan, WorkerReport


@pytest.fixture
def engine(store: FaultyStore) -> SimulatedEngine:
    return SimulatedEngine(store)


def publish(engine: SimulatedEngine, store: FaultyStore, request: Request, num_blocks: int) -> None:
    """Make the first blocks of a request exist, as far as a lookup can tell."""
    (object_map,) = object_maps(engine.layout)
    prefix = key_prefix(engine.namespace, object_map.group_bitmap, object_map.shard)
    for block_hash in request.block_hashes[:num_blocks]:
        store.put(prefix + block_hash.hex(), b"x")


def plan(engine: SimulatedEngine, **output: object) -> StepPlan:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
    )
    return engine.scheduler.plan_step(
        SimpleNamespace(**{"scheduled_new_reqs": [], "scheduled_cached_reqs": cached, **output})
    )


def new(request: Request, block_ids: list[int], computed: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=request.request_id, block_ids=(block_ids,), num_computed_tokens=computed
    )


def saved(step_plan: StepPlan) -> list[tuple[str, list[int]]]:
    return [
        (step.request_id, blocks.block_ids[0])
        for step in step_plan.requests
        for blocks in step.saves
    ]


def loaded(step_plan: StepPlan) -> list[tuple[str, list[int]]]:
    return [
        (step.request_id, blocks.block_ids[0])
        for step in step_plan.requests
        for blocks in step.loads
    ]


@pytest.mark.parametrize(
    ("num_tokens", "expected_blocks"),
    [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (11, 2), (12, 2)],
)
def test_the_last_token_is_never_promised(
    engine: SimulatedEngine, store: FaultyStore, num_tokens: int, expected_blocks: int
) -> None:
    """Case 27: with every block in the store, whole blocks before the last token are promised."""
    request = Request("r", prompt(num_tokens))
    publish(engine, store, request, 99)
    assert engine.scheduler.match(request, 0) == expected_blocks * BLOCK_SIZE


def test_what_is_cached_locally_is_not_promised_again(
    engine: SimulatedEngine, store: FaultyStore
) -> None:
    """The promise starts after the local hit; a local hit as long as the remote one leaves none."""
    request = Request("r", prompt(21))
    publish(engine, store, request, 4)
    assert engine.scheduler.match(request, 8) == 2 * BLOCK_SIZE
    assert engine.scheduler.match(request, 16) == 0
    assert engine.scheduler.match(request, 20) == 0


def test_a_step_saves_the_blocks_that_become_full_in_it(engine: SimulatedEngine) -> None:
    """Chunks that end inside blocks: each block is saved once, when its last token is computed."""
    request = Request("r", prompt(14))
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    seen = []
    computed = 0
    for chunk in (3, 4, 2, 5):
        cached = SimpleNamespace(
            req_ids=["r"], new_block_ids=[None], num_computed_tokens=[computed],
            resumed_req_ids=set(),
        )  # fmt: skip
        fresh = {"scheduled_new_reqs": [new(request, [9, 8, 7, 6])]} if not computed else {}
        made = plan(
            engine,
            num_scheduled_tokens={"r": chunk},
            **(fresh or {"scheduled_cached_reqs": cached}),
        )
        seen.append([ids for _, ids in saved(made)])
        computed += chunk
    assert seen == [[], [[9]], [[8]], [[7]]]


def test_blocks_with_generated_tokens_are_saved_only_on_request(store: FaultyStore) -> None:
    """By default a block counts as full when prompt tokens fill it."""
    for options, expected in (({}, []), ({"save_decode_blocks": True}, [("r", [5])])):
        engine = SimulatedEngine(store, **options)
        request = Request("r", prompt(8), num_prompt_tokens=6)
        engine.scheduler.match(request, 0)
        engine.scheduler.allocated(request, 0)
        plan(engine, scheduled_new_reqs=[new(request, [4, 5])], num_scheduled_tokens={"r": 6})
        cached = SimpleNamespace(
            req_ids=["r"], new_block_ids=[None], num_computed_tokens=[6], resumed_req_ids=set()
        )
        made = plan(engine, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 2})
        assert saved(made) == expected


def test_a_promise_is_loaded_in_the_step_that_schedules_the_request(
    engine: SimulatedEngine, store: FaultyStore
) -> None:
    """The promised blocks are loaded to where the engine put them, after the local ones, once."""
    request = Request("r", prompt(21))
    publish(engine, store, request, 4)
    engine.scheduler.allocated(request, engine.scheduler.match(request, 4))
    made = plan(
        engine,
        scheduled_new_reqs=[new(request, [10, 11, 12, 13, 14, 15], computed=16)],
        num_scheduled_tokens={"r": 5},
    )
    assert loaded(made) == [("r", [11, 12, 13])]
    assert saved(made) == [("r", [14])]
    [step] = made.requests
    assert step.loads[0].block_hashes == request.block_hashes[1:4]
    assert step.saves[0].block_hashes == request.block_hashes[4:5]


def test_a_resumed_request_uses_its_new_blocks(engine: SimulatedEngine, store: FaultyStore) -> None:
    """Case 28: after a preemption the same request id is matched anew and has other blocks."""
    request = Request("r", prompt(13))
    engine.scheduler.allocated(request, engine.scheduler.match(request, 0))
    plan(engine, scheduled_new_reqs=[new(request, [1, 2])], num_scheduled_tokens={"r": 6})
    publish(engine, store, request, 1)
    hit = engine.scheduler.match(request, 0)
    assert hit == BLOCK_SIZE
    engine.scheduler.allocated(request, hit)
    cached = SimpleNamespace(
        req_ids=["r"], new_block_ids=[([21, 22, 23, 24],)], num_computed_tokens=[hit],
        resumed_req_ids={"r"},
    )  # fmt: skip
    made = plan(engine, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 9})
    assert loaded(made) == [("r", [21])]
    assert saved(made) == [("r", [22, 23])]


def test_blocks_that_come_with_a_later_chunk_are_added(engine: SimulatedEngine) -> None:
    """A running request that gets more blocks keeps the ones it has."""
    request = Request("r", prompt(12))
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    plan(engine, scheduled_new_reqs=[new(request, [1])], num_scheduled_tokens={"r": 4})
    cached = SimpleNamespace(
        req_ids=["r"], new_block_ids=[([7, 3],)], num_computed_tokens=[4], resumed_req_ids=set()
    )
    made = plan(engine, scheduled_cached_reqs=cached, num_scheduled_tokens={"r": 8})
    assert saved(made) == [("r", [7, 3])]


def test_a_request_that_reads_what_another_one_loads_says_so(
    engine: SimulatedEngine, store: FaultyStore
) -> None:
    """Two requests of one step share a block that only the first loads."""
    first, second = Request("a", prompt(9)), Request("b", [*prompt(4), *prompt(5, 99)])
    publish(engine, store, first, 2)
    engine.scheduler.allocated(first, engine.scheduler.match(first, 0))
    engine.scheduler.match(second, 0)
    engine.scheduler.allocated(second, 0)
    made = plan(
        engine,
        scheduled_new_reqs=[new(first, [1, 2, 3], computed=8), new(second, [1, 5, 6], computed=4)],
        num_scheduled_tokens={"a": 1, "b": 5},
    )
    shared = {step.request_id: step.shared_block_ids for step in made.requests}
    assert shared == {"a": [], "b": [1]}


def test_nothing_is_kept_of_a_request_that_is_over(
    engine: SimulatedEngine, store: FaultyStore
) -> None:
    """Finished, aborted while waiting, aborted while running, never seen: nothing remains."""
    waiting, running = Request("w", prompt(9)), Request("r", prompt(9))
    engine.scheduler.match(waiting, 0)
    engine.scheduler.match(running, 0)
    engine.scheduler.allocated(running, 0)
    plan(engine, scheduled_new_reqs=[new(running, [1, 2, 3])], num_scheduled_tokens={"r": 4})
    for request_id in ("w", "r", "unknown"):
        engine.scheduler.finished(request_id)
    assert engine.scheduler.num_requests == 0
    assert engine.scheduler._lookup._known == {}


def test_a_reported_block_is_not_promised_again_for_a_while(
    engine: SimulatedEngine, store: FaultyStore
) -> None:
    """Case 23: after a failed load the promise ends before the block that failed."""
    request = Request("r", prompt(13))
    publish(engine, store, request, 3)
    assert engine.scheduler.match(request, 0) == 3 * BLOCK_SIZE
    engine.scheduler.reported(
        WorkerReport(numbers={0: 1}, failed_hashes=[request.block_hashes[1]], failed_block_ids=[5])
    )
    again = Request("s", prompt(13))
    assert engine.scheduler.match(again, 0) == 1 * BLOCK_SIZE
    assert plan(engine, num_scheduled_tokens={}).acknowledged == {0: 1}


def test_roles_limit_what_is_promised_and_saved(store: FaultyStore) -> None:
    """A producer promises nothing, a consumer saves nothing."""
    from kvformat_connector.scheduler import Scheduler

    engine = SimulatedEngine(store)
    request = Request("r", prompt(9))
    publish(engine, store, request, 2)

    def side(**roles: bool) -> Scheduler:
        return Scheduler(engine.layout, store, engine.options, engine.counters, **roles)

    assert side(may_load=False).match(request, 0) == 0
    engine.scheduler = side(may_save=False)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    made = plan(engine, scheduled_new_reqs=[new(request, [1, 2, 3])], num_scheduled_tokens={"r": 9})
    assert made.requests == []


def test_tokens_that_are_missed_are_counted_by_reason() -> None:
    """Hits and misses add up to the prompt's tokens: what wasn't there, what the store couldn't
    tell, what failed lately, and the tail that is never promised."""

    def misses(engine: SimulatedEngine) -> dict[str, int]:
        name = "lookup.miss_tokens."
        counts = engine.counters.snapshot()
        return {key.removeprefix(name): n for key, n in counts.items() if key.startswith(name)}

    store = FaultyStore()
    prompt = list(range(3 * BLOCK_SIZE + 2))
    cold = SimulatedEngine(store)
    cold.serve(Request("a", prompt))
    assert misses(cold) == {"absent": 3 * BLOCK_SIZE, "tail": 2}
    warm = SimulatedEngine(store)
    warm.serve(Request("b", [*prompt[: 2 * BLOCK_SIZE], *range(50, 50 + BLOCK_SIZE + 1)]))
    assert warm.counters.snapshot()["lookup.hit_tokens"] == 2 * BLOCK_SIZE
    assert misses(warm) == {"absent": BLOCK_SIZE, "tail": 1}
    warm.scheduler.reported(WorkerReport(failed_hashes=Request("c", prompt).block_hashes[:1]))
    warm.serve(Request("c", prompt))
    assert misses(warm)["distrusted"] == 3 * BLOCK_SIZE
    failing = SimulatedEngine(store)
    store.bend["exists"] = lambda number, keys, codes: [int(Code.UNAVAILABLE)] * len(keys)
    failing.serve(Request("d", prompt))
    assert misses(failing) == {"store_failed": 3 * BLOCK_SIZE, "tail": 2}
    lora = SimulatedEngine(store)
    lora.serve(
        Request("e", prompt, lora_request=SimpleNamespace(lora_path="/nowhere", lora_int_id=1))
    )
    assert misses(lora) == {"adapter": 3 * BLOCK_SIZE, "tail": 2}
    assert len(failing.counters.take().times["lookup"]) == 1


def test_a_worker_tells_what_it_committed_where_events_are_wanted(store: FaultyStore) -> None:
    """Each committed object once, in the report after its commit; nothing where nobody asks."""
    engine = SimulatedEngine(store)
    engine.worker._tells_stored = True
    request = Request("a", prompt(2 * BLOCK_SIZE + 1))
    engine.serve(request)
    told = [block for report in engine.reports for block in report.stored]
    assert [block.block_hash for block in told] == request.block_hashes[:2]
    silent = SimulatedEngine(FaultyStore())
    silent.serve(Request("a", prompt(2 * BLOCK_SIZE + 1)))
    assert silent.reports == []
