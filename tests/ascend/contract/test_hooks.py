"""vllm-ascend's own hook functions against our connector: what a cold engine saves as the hooks
come, a fresh one loads as they come, and answers the same."""

from __future__ import annotations

import inspect
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import models
import pytest
import stand_ins
import vllm_ascend.attention.utils as hooks_of_vllm_ascend
from driver import (
    AscendEngine,
    Hooks,
    Layer,
    Served,
    gqa_hooks,
    make_config,
    mla_hooks,
    on_platform,
    sfa_hooks,
    with_recurrent_layers,
)
from models import BLOCK_SIZE, NUM_LAYERS, Model
from stand_ins import COMPUTE, SOURCES, Event
from vllm_ascend.platform import NPUPlatform

import kvformat as kf
from kvformat.stores import open_store

#: Two whole blocks and some, in chunks of 256 tokens.
PROMPT = [(7 * at) % 500 for at in range(300)]
NUM_BLOCKS = len(PROMPT) // BLOCK_SIZE

KINDS = {
    "split K and V": (models.gqa(), gqa_hooks),
    "latent and rope": (models.mla(), mla_hooks),
    "three components": (models.sfa(), sfa_hooks),
    "split K and V beside recurrent layers": (models.gqa(), with_recurrent_layers(gqa_hooks)),
    "three components beside recurrent layers": (models.sfa(), with_recurrent_layers(sfa_hooks)),
}


class Site:
    """Engines of one kind over one store."""

    def __init__(self, model: Model, hooks: Hooks, folder: Path) -> None:
        self.model = model
        self.hooks = hooks
        self.uri = f"file://{folder / 'store'}"
        self._folder = folder

    def engine(self, hooks: Hooks | None = None, **options: object) -> closing[AscendEngine]:
        """A fresh engine with a fresh cache."""
        config = make_config(self.model, self._folder, self.uri, **options)
        return closing(AscendEngine(self.model, config, hooks or self.hooks))

    def serve(self, prompt: list[int] = PROMPT, hooks: Hooks | None = None) -> Served:
        """Answer a prompt with a fresh engine."""
        with self.engine(hooks) as engine:
            return engine.serve(prompt)


@pytest.fixture(params=KINDS, ids=list(KINDS))
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    model, hooks = KINDS[request.param]
    with on_platform(NPUPlatform()):
        yield Site(model, hooks, tmp_path)


def test_the_hooks_are_those_of_the_release() -> None:
    """The functions that these tests call stand in files that equal the source distribution's,
    byte for byte."""
    archive = SOURCES.with_name(f"{SOURCES.name}.tar.gz")
    assert archive.name == "vllm_ascend-0.30.0rc2.tar.gz"
    found = Path(inspect.getsourcefile(hooks_of_vllm_ascend) or "")
    with tarfile.open(archive) as tar:
        member = tar.extractfile(f"{SOURCES.name}/{found.relative_to(SOURCES)}")
        assert member is not None
        assert member.read() == found.read_bytes()


def test_a_fresh_engine_answers_from_the_store(site: Site) -> None:
    """Cold, then warm: every whole block is saved once, loaded and verified, and the answers are
    equal, although the device does its work late."""
    with site.engine() as cold:
        first = cold.serve(PROMPT)
    assert first.num_hit_tokens == 0
    assert cold.connector.counters["save.blocks"] == NUM_BLOCKS
    with site.engine() as warm:
        second = warm.serve(PROMPT)
    assert second.num_hit_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert warm.connector.counters["load.blocks"] == NUM_BLOCKS
    assert warm.connector.rejections == []
    assert second.token_ids == first.token_ids
    assert "save.blocks" not in warm.connector.counters


def test_whole_objects_are_loaded_before_the_request_runs(site: Site) -> None:
    """With ``use_layerwise`` off the request waits in steps without a forward, for which vLLM 0.30
    ends nothing; no layer hook is needed, and the answer is the same."""
    first = site.serve()
    with site.engine(use_layerwise=False) as warm:
        second = warm.serve(PROMPT)
    assert second.num_hit_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert warm.connector.counters["load.blocks"] == NUM_BLOCKS
    assert warm.connector.rejections == []
    assert second.token_ids == first.token_ids


def test_objects_hold_the_bytes_of_the_tensors(site: Site) -> None:
    """What is stored is the tensors' bytes, component by component in the order of the tuple, and
    a fresh engine's cache holds them again."""
    with site.engine() as cold:
        cold.serve(PROMPT)
        written = cold.last_blocks(NUM_BLOCKS)
    store = open_store(site.uri)
    payloads = set()
    for text in store.list():
        if isinstance(kf.parse_key(text), kf.BlockKey):
            data = store.get(text) or b""
            payloads.add(data[kf.decode_header(data).header_nbytes :])
    assert payloads == set(written)
    with site.engine() as warm:
        warm.serve(PROMPT)
        assert warm.last_blocks(NUM_BLOCKS) == written


def test_zeroed_kv_gives_another_answer(site: Site) -> None:
    """The negative control: equal answers would mean that the tests above can't tell right KV from
    wrong."""
    first = site.serve()

    def zeroing(layer: Layer) -> None:
        def attend() -> None:
            COMPUTE.give(lambda: [tensor.zero_() for tensor in layer.kv_cache] and None)
            layer.attend()

        site.hooks(replace(layer, attend=attend))

    second = site.serve(hooks=zeroing)
    assert second.num_hit_tokens == NUM_BLOCKS * BLOCK_SIZE
    assert second.token_ids != first.token_ids


def test_a_damaged_object_is_recomputed(site: Site) -> None:
    """One flipped bit: that block is rejected by checksum, computed again, and the answer is the
    one computed without a cache."""
    first = site.serve()
    store = open_store(site.uri)
    victim = max(key for key in store.list() if isinstance(kf.parse_key(key), kf.BlockKey))
    data = bytearray(store.get(victim) or b"")
    data[-1] ^= 1
    store.remove([victim])
    store.put(victim, bytes(data))
    with site.engine() as warm:
        second = warm.serve(PROMPT)
    assert [rejection.reason for rejection in warm.connector.rejections] == ["checksum_mismatch"]
    assert second.token_ids == first.token_ids


def test_a_layer_is_saved_as_soon_as_it_is_written(site: Site) -> None:
    """Every save waits for an event recorded in ``notify_kv_cache_written``, before attention;
    the save hook at the layer's end records no other one."""
    recorded: list[tuple[str, int]] = []

    def spying(layer: Layer) -> None:
        def attend() -> None:
            recorded.append(("before attention", Event.num_recorded))
            layer.attend()

        recorded.append(("before", Event.num_recorded))
        site.hooks(replace(layer, attend=attend))
        recorded.append(("after", Event.num_recorded))

    with site.engine(spying) as cold:
        cold.serve(PROMPT, num_new_tokens=1)
    first_step = recorded[: 3 * NUM_LAYERS]
    for before, between, after in zip(*[iter(first_step)] * 3, strict=True):
        assert [name for name, _ in (before, between, after)] == [
            "before",
            "before attention",
            "after",
        ]
        assert between[1] == before[1] + 1
        assert after[1] == between[1]
    assert cold.connector.counters["save.blocks"] == NUM_BLOCKS


@pytest.mark.parametrize("num_tokens", [2 * BLOCK_SIZE, 2 * BLOCK_SIZE + 1])
def test_one_token_left_to_compute(site: Site, num_tokens: int) -> None:
    """A batch that looks like decoding, for which a latent layer never waits: its loads are waited
    for when its cache has been written, and are used."""
    prompt = PROMPT[:num_tokens]
    first = site.serve(prompt)
    with site.engine() as warm:
        second = warm.serve(prompt)
    assert second.num_hit_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert warm.connector.counters["load.blocks"] == (num_tokens - 1) // BLOCK_SIZE
    assert warm.connector.rejections == []
    assert second.token_ids == first.token_ids


def test_hooks_outside_of_a_step_do_nothing(site: Site) -> None:
    """Profiling and dummy runs call the hooks without metadata: nothing is saved, nothing raises,
    and the next request is served."""
    with site.engine() as engine:
        hooks_of_vllm_ascend.notify_kv_cache_written()
        hooks_of_vllm_ascend.notify_kv_cache_written(site.model.hooked[0])
        engine.connector.save_kv_layer("", [], None)
        engine.connector.wait_for_layer_load("no such layer")
        served = engine.serve(PROMPT)
    assert engine.connector.counters["save.blocks"] == NUM_BLOCKS
    assert len(served.token_ids) == 3


def test_no_cann_is_needed() -> None:
    """The stand-ins are in place: nothing here has reached for a real device."""
    import torch_npu

    assert torch_npu.npu.Event is stand_ins.Event
