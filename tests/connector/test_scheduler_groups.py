"""The scheduler's side with several groups: what is promised, loaded in bulk, and saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from faulty_store import FaultyStore
from simulated_engine import Request

from kvformat.components import fused_attention, recurrent_state
from kvformat.layout import Group, HashRecipe, Identity, Layer, Layout, ShardGrid
from kvformat_connector.config import parse_options
from kvformat_connector.engine import Ranks
from kvformat_connector.loadpolicy import load_policy
from kvformat_connector.messages import BlockList, RequestStep, StepPlan
from kvformat_connector.needs import object_needs
from kvformat_connector.scheduler import Scheduler
from kvformat_connector.stats import Counters

#: Of the simulated engine's requests: one hash for every 4 tokens.
HASHED = 4
OPTIONS = parse_options({"store": "memory://", "model_identity": "v1"})


def group(kind: str, block_size: int, window: int = 0) -> Group:
    components = (
        recurrent_state(64)
        if kind == "recurrent_state"
        else fused_attention(num_kv_heads=2, head_size=4, block_size=block_size, dtype="float32")
    )
    layer = Layer(name=f"{kind}.{block_size}", components=components)
    return Group(kind=kind, block_size=block_size, window=window, layers=(layer,))


def layout(*groups: Group) -> Layout:
    return Layout(
        identity=Identity(tenant="t", model="m", weights="w", config={}),
        hash=HashRecipe(algorithm="sha256", seed="", block_size=HASHED, digest_nbytes=32),
        groups=groups,
        objects=tuple((index,) for index in range(len(groups))),
        grid=ShardGrid(layer_starts=tuple((0,) for _ in groups)),
    )


FULL = group("full_attention", 4)
WINDOW = group("sliding_window", 4, 9)
STATE = group("recurrent_state", 8)


class Engine:
    """A scheduler of one layout, and the store it asks."""

    def __init__(self, *groups: Group) -> None:
        self.layout = layout(*groups)
        self.store = FaultyStore()
        self.needs = object_needs(self.layout)
        self.scheduler = Scheduler(
            self.layout,
            self.store,
            OPTIONS,
            Counters(),
            load_policy=load_policy(self.layout, Ranks(), OPTIONS),
        )

    def put(self, request: Request, object_index: int, *blocks: int) -> None:
        need = self.needs[object_index]
        for block in blocks:
            block_hash = need.block_hash(request.block_hashes, block)
            self.store.put(self.scheduler.namespace + need.parts[0] + block_hash.hex(), b"x")

    def step(
        self, request: Request, computed: int, num_tokens: int, *tables: list[int]
    ) -> StepPlan:
        new = SimpleNamespace(
            req_id=request.request_id, block_ids=tables, num_computed_tokens=computed
        )
        return self.scheduler.plan_step(
            SimpleNamespace(
                scheduled_new_reqs=[new] if num_tokens else [],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
                ),
                num_scheduled_tokens={request.request_id: num_tokens} if num_tokens else {},
            )
        )

    def blocks(self, lists: list[BlockList]) -> dict[int, list[int]]:
        """Ids by object."""
        return {made.object_index: made.block_ids[0] for made in lists}


def request(num_tokens: int) -> Request:
    return Request("r", list(range(num_tokens)))


@pytest.mark.parametrize(
    ("groups", "mode"),
    [
        ((FULL,), "layerwise"),
        ((FULL, FULL), "bulk"),
        ((WINDOW,), "bulk"),
        ((FULL, STATE), "bulk"),
    ],
)
def test_only_full_attention_alone_is_loaded_layer_by_layer(
    groups: tuple[Group, ...], mode: str
) -> None:
    """An engine can go on from a failed block only where all blocks before it are in memory."""
    assert load_policy(layout(*groups), Ranks(), OPTIONS).mode(1 << 40) == mode


def test_a_pipeline_is_loaded_in_bulk() -> None:
    """A later stage would compute on what an earlier one failed to load."""
    assert load_policy(layout(FULL), Ranks(num_stages=2), OPTIONS).mode(1 << 40) == "bulk"


def test_a_bulk_load_is_sent_once_before_the_request_is_computed() -> None:
    """Of full attention every promised block, of a window the last ones, of a state the one at the
    end: to where the engine's tables say, in the step in which blocks were given."""
    engine = Engine(FULL, WINDOW, STATE)
    asked = request(27)
    engine.put(asked, 0, 0, 1, 2, 3, 4, 5)
    engine.put(asked, 1, 3, 4, 5)
    engine.put(asked, 2, 2)
    assert engine.scheduler.match(asked, 0) == 24
    tables = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 7, 8], [0, 0, 9])
    engine.scheduler.allocated(asked, 24, lambda: tables)
    [step] = engine.step(asked, 0, 0).requests
    assert (step.request_id, step.load_mode, step.saves) == ("r", "bulk", [])
    assert engine.blocks(step.loads) == {0: [1, 2, 3, 4, 5, 6], 1: [7, 8], 2: [9]}
    assert step.loads[2].block_hashes == [asked.block_hashes[5]]
    assert engine.step(asked, 0, 0).requests == []
    # Loaded: it is scheduled with the rest of its prompt, and promised nothing more.
    engine.scheduler.allocated(asked, 0, lambda: tables)
    assert engine.step(asked, 24, 3, [*tables[0], 10], [*tables[1], 11], [*tables[2], 12]) == (
        StepPlan()
    )


def test_a_bulk_load_starts_after_the_local_hit() -> None:
    """What is in memory is not loaded again."""
    engine = Engine(FULL, WINDOW)
    asked = request(27)
    engine.put(asked, 0, 4, 5)
    engine.put(asked, 1, 4, 5)
    assert engine.scheduler.match(asked, 16) == 8
    engine.scheduler.allocated(asked, 8, lambda: ([1, 2, 3, 4, 5, 6], [0, 0, 0, 2, 7, 8]))
    [step] = engine.step(asked, 0, 0).requests
    assert engine.blocks(step.loads) == {0: [5, 6], 1: [7, 8]}


def saves_of(plan: StepPlan, engine: Engine) -> dict[int, list[int]]:
    steps: list[RequestStep] = plan.requests
    return engine.blocks(steps[0].saves) if steps else {}


def test_each_group_saves_the_blocks_that_become_full_in_a_step() -> None:
    """Blocks of 4 and of 8 tokens; block ids of a window that are gone are skipped."""
    engine = Engine(FULL, WINDOW, group("full_attention", 8))
    asked = request(20)
    engine.scheduler.match(asked, 0)
    engine.scheduler.allocated(asked, 0)
    plan = engine.step(asked, 4, 14, [1, 2, 3, 4, 5], [0, 0, 6, 7, 8], [9, 10, 11])
    assert saves_of(plan, engine) == {0: [2, 3, 4], 1: [6, 7], 2: [9, 10]}


@pytest.mark.parametrize(
    ("computed", "num_tokens", "saved"),
    [(0, 16, [5]), (0, 8, [4]), (8, 8, [5]), (0, 12, []), (8, 3, []), (16, 4, [])],
)
def test_a_state_is_saved_when_a_step_ends_at_a_block(
    computed: int, num_tokens: int, saved: list[int]
) -> None:
    """A step leaves the state after its last token: nothing else is a state at a block's end."""
    engine = Engine(FULL, STATE)
    asked = request(20)
    engine.scheduler.match(asked, 0)
    engine.scheduler.allocated(asked, 0)
    plan = engine.step(asked, computed, num_tokens, [1, 2, 3, 6, 7], [4, 5, 8])
    assert saves_of(plan, engine).get(1, []) == saved


def test_a_state_past_the_prompt_is_not_saved() -> None:
    """A prompt of two whole blocks of which a resumed request computes more in one step: the
    state at the prompt's end was passed, not left."""
    engine = Engine(FULL, STATE)
    asked = Request("r", list(range(20)), num_prompt_tokens=16)
    engine.scheduler.match(asked, 0)
    engine.scheduler.allocated(asked, 0)
    plan = engine.step(asked, 8, 12, [1, 2, 3, 6, 7], [4, 5, 8])
    assert saves_of(plan, engine) == {0: [3, 6]}
