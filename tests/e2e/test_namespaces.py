"""Real vLLM: adapters and updated weights have blocks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_files import save_adapter
from real_engine import COMMITS, NUM_BLOCKS, PROMPTS, Servers, hits, tokens

from kvformat_connector.demo.engines import Update
from kvformat_connector.demo.storage import read_contents
from kvformat_connector.engine import hash_has_adapter_path

pytestmark = pytest.mark.vllm

PROMPT = PROMPTS[1]
NUM_HITS = 32 * NUM_BLOCKS[1]


def test_an_adapter_is_told_by_its_files(servers: Servers, tmp_path: Path) -> None:
    """The same name and path, so the same block hashes: the adapter's blocks hit in a fresh engine
    and answer the same. Other files under that name hit nothing and answer otherwise, and the base
    model shares with neither."""
    store = f"file://{tmp_path / 'store'}"
    options = {"engine_options": {"enable_lora": True, "max_lora_rank": 8}}
    folder = save_adapter(tmp_path / "adapter", seed=1)
    ask = {"store": store, "prompts": [PROMPT, PROMPT], "adapters": {1: folder}, **options}
    cold, warm = servers.run(**ask), servers.run(**ask)
    assert (hits(cold), hits(warm)) == ([0, 0], [NUM_HITS, NUM_HITS])
    assert tokens(warm) == tokens(cold)
    assert warm.worker["load.blocks"] == cold.worker["save.blocks"] == 2 * NUM_BLOCKS[1]
    save_adapter(tmp_path / "adapter", seed=2)
    other = servers.run(**ask)
    assert hits(other) == [NUM_HITS, 0]
    base, first, second = tokens(cold)[0], tokens(cold)[1], tokens(other)[1]
    assert tokens(other)[0] == base
    assert len({tuple(base), tuple(first), tuple(second)}) == 3


def test_block_hashes_hold_the_path_of_an_adapter() -> None:
    """So one name may stand for one adapter after another, each under its own path."""
    assert hash_has_adapter_path()


def test_updated_weights_load_nothing_of_those_before(
    servers: Servers, models: dict[str, str], tmp_path: Path
) -> None:
    """An engine whose weights are replaced, and whose caches are reset, hits nothing, answers as
    one that started with the new weights, and keeps what it computes where nobody else looks. One
    whose operator names the new weights shares them."""
    store = f"file://{tmp_path / 'store'}"

    def named(text: str) -> dict[str, str]:
        path = tmp_path / f"identity of {text}"
        path.write_text(text)
        return {"model_identity_file": str(path)}

    def update(**fields: str) -> Update:
        return Update(weights=models[COMMITS[1]], **fields)

    ask = {"store": store, "prompts": [PROMPT, PROMPT]}
    started = servers.run(**ask, commit=COMMITS[1], options=named("step 2"))
    alone = servers.run(**ask, updates={1: update()})
    sharing = servers.run(**ask, updates={1: update(name="step 2")}, options=named("step 1"))
    assert (hits(alone), hits(sharing)) == ([0, 0], [0, NUM_HITS])
    for updated in (alone, sharing):
        assert tokens(updated)[1] == tokens(started)[0] != tokens(updated)[0]
        assert updated.scheduler["weights.changed"] == 1
    assert len(read_contents(store, alone.namespace).keys) == NUM_BLOCKS[1]
    assert alone.namespace != sharing.namespace == started.namespace


def test_a_reset_that_failed_is_noticed(
    servers: Servers, models: dict[str, str], tmp_path: Path
) -> None:
    """While a request has blocks the engine keeps its own prefix cache, and serves old KV from it:
    that gets into no namespace. After a reset that worked everything is as it should be."""
    store = f"file://{tmp_path / 'store'}"
    new = models[COMMITS[1]]
    updated = servers.run(
        store=store,
        prompts=[PROMPT] * 3,
        updates={1: Update(weights=new, resets_in_use=True), 2: Update(weights=new)},
    )
    started = servers.run(store=store, prompts=[PROMPT], commit=COMMITS[1])
    assert hits(updated) == [0, NUM_HITS, 0]
    assert tokens(updated)[2] == tokens(started)[0] != tokens(updated)[0]
    assert updated.scheduler["requests.not_stored"] == 1
    assert updated.worker["save.blocks"] == 2 * NUM_BLOCKS[1]
    assert len(read_contents(store, updated.namespace).keys) == NUM_BLOCKS[1]
