"""LoRA adapters: each has its own blocks, told by its files and not by what it is called."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, Request, SimulatedEngine

from kvformat.fingerprint import parse_manifest
from kvformat.key import BlockKey, ManifestKey, format_key, parse_key
from kvformat_connector import adapters as adapters_module
from kvformat_connector.adapters import Adapters

TOKENS = [index % 250 for index in range(1, 28)]
NUM_HITS = 6 * BLOCK_SIZE


@dataclass
class LoRARequest:
    """As much of vLLM's as the connector reads."""

    lora_path: str
    lora_name: str = "adapter"
    lora_int_id: int = 1
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def save_adapter(folder: Path, fill: bytes = b"a", config: str = '{"r": 8}') -> str:
    """An adapter's folder; files of other content are changed, not replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(fill * 5_000)
    return str(folder)


def change(folder: Path, fill: bytes) -> None:
    """Change the weights in place, with another time of change on any file system."""
    path = folder / "adapter_model.safetensors"
    before = path.stat().st_mtime_ns
    path.write_bytes(fill * 5_000)
    os.utime(path, ns=(before + 10**9, before + 10**9))


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


def serve(engine: SimulatedEngine, lora: LoRARequest | None, name: str = "r") -> int:
    """Tokens that the engine took from the store for TOKENS."""
    return engine.serve(Request(name, TOKENS, lora_request=lora)).num_hit_tokens


@pytest.mark.parametrize("use_layerwise", [True, False])
def test_an_adapter_hits_its_own_blocks_and_nobody_elses(
    store: FaultyStore, tmp_path: Path, use_layerwise: bool
) -> None:
    """The hashes are equal in all cases: the same files hit, wherever they lie; other files of the
    same name, and the base model, do not."""
    first = LoRARequest(save_adapter(tmp_path / "a"))
    other = LoRARequest(save_adapter(tmp_path / "b", b"b"))
    moved = LoRARequest(shutil.copytree(tmp_path / "a", tmp_path / "moved"))
    for num_hits, loras in ((0, (first, other, None)), (NUM_HITS, (first, other, moved, None))):
        for lora in loras:
            engine = SimulatedEngine(store, use_layerwise=use_layerwise)
            assert serve(engine, lora) == num_hits
            assert engine.counters.snapshot().get("load.blocks", 0) == num_hits // BLOCK_SIZE


def test_adapters_and_the_base_model_share_a_step(store: FaultyStore, tmp_path: Path) -> None:
    """Requests of several namespaces are loaded and saved in one step, each in its own; the
    manifest of each is in the store and names its adapter."""
    loras = [
        LoRARequest(save_adapter(tmp_path / f, f.encode()), f, n) for n, f in enumerate("ab", 1)
    ]
    cold, warm = SimulatedEngine(store), SimulatedEngine(store)
    for engine, num_hits in ((cold, 0), (warm, NUM_HITS)):
        scheduled = []
        for index, lora in enumerate([*loras, None]):
            request = Request(f"r{index}", TOKENS, lora_request=lora)
            assert engine.scheduler.match(request, 0) == num_hits
            engine.scheduler.allocated(request, num_hits)
            scheduled.append((request, engine.allocate(7), num_hits, len(TOKENS) - num_hits))
        assert engine.step(scheduled) == set()
    assert cold.counters.snapshot()["save.blocks"] == warm.counters.snapshot()["load.blocks"] == 18
    keys = [parse_key(text) for text in store.list("")]
    namespaces = {key.namespace for key in keys if isinstance(key, BlockKey)}
    found = set()
    for namespace in namespaces:
        data = store.get(format_key(ManifestKey(namespace)))
        assert data is not None
        found.add(parse_manifest(data, namespace.fingerprint).identity.adapter)
    assert found == {"", *(Adapters().identity(lora) for lora in loras)}
    assert all(text == "" or text.startswith("digest:") for text in found)


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"fill": b"b"}, False),
        ({"config": '{"r": 16}'}, False),
        ({}, True),
    ],
)
def test_files_tell_an_adapter(tmp_path: Path, changed: dict[str, object], is_same: bool) -> None:
    """Weights and configuration count, in every byte of a small file."""
    first = Adapters().identity(LoRARequest(save_adapter(tmp_path / "a")))
    second = Adapters().identity(LoRARequest(save_adapter(tmp_path / "b", **changed)))  # type: ignore[arg-type]
    assert first.startswith("digest:")
    assert (first == second) is is_same


def test_what_an_adapter_computes_also_depends_on_the_engine(tmp_path: Path) -> None:
    """Settings, and how experts' weights are read, are part of the identity."""
    path = save_adapter(tmp_path / "a")
    plain = Adapters().identity(LoRARequest(path))
    assert (
        Adapters(" lora_dtype=float16").identity(LoRARequest(path)) == f"{plain} lora_dtype=float16"
    )
    assert Adapters().identity(LoRARequest(path, is_3d_lora_weight=True)) != plain


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors", ""])
def test_an_adapter_that_cannot_be_told_is_not_pooled(
    store: FaultyStore, tmp_path: Path, missing: str
) -> None:
    """No folder, no configuration or no weights: computed as without a store, and counted."""
    path = Path(save_adapter(tmp_path / "a"))
    if missing:
        (path / missing).unlink()
    else:
        shutil.rmtree(path)
    for _ in range(2):
        engine = SimulatedEngine(store)
        assert serve(engine, LoRARequest(str(path))) == 0
        assert engine.counters.snapshot()["requests.not_stored"] == 1
        assert engine.counters.snapshot()["lookup.miss_tokens.adapter"] == NUM_HITS
        assert "save.blocks" not in engine.counters.snapshot()


@pytest.mark.parametrize("load_inplace", [False, True])
def test_an_adapter_that_changes_while_it_is_served_is_not_pooled_any_more(
    store: FaultyStore, tmp_path: Path, load_inplace: bool
) -> None:
    """The engine may still have the old one, or blocks of it in its prefix cache: nothing is
    loaded or saved, not even when the old files are back. Another engine knows only the new."""
    path = save_adapter(tmp_path / "a")
    lora = LoRARequest(path, load_inplace=load_inplace)
    engine = SimulatedEngine(store)
    assert serve(engine, lora, "r1") == 0
    assert serve(engine, lora, "r2") == NUM_HITS
    change(tmp_path / "a", b"b")
    assert serve(engine, lora, "r3") == 0
    change(tmp_path / "a", b"a")
    assert serve(engine, lora, "r4") == 0
    assert engine.counters.snapshot()["requests.not_stored"] == 2
    change(tmp_path / "a", b"b")
    assert serve(SimulatedEngine(store), lora) == 0
    assert serve(SimulatedEngine(store), lora) == NUM_HITS


def test_a_running_request_saves_nothing_once_its_adapter_has_changed(
    store: FaultyStore, tmp_path: Path
) -> None:
    """From the change on the engine may compute with the new files: the next chunk isn't saved
    under the old ones."""
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    engine = SimulatedEngine(store)
    request = Request("r", TOKENS, lora_request=lora)
    engine.scheduler.match(request, 0)
    engine.scheduler.allocated(request, 0)
    engine.step([(request, engine.allocate(7), 0, 9)])
    change(tmp_path / "a", b"b")
    engine.step([(request, None, 9, 18)])
    counts = engine.counters.snapshot()
    assert (counts["save.blocks"], counts["save.adapter_changed"]) == (2, 4)


@pytest.mark.parametrize(
    ("second", "hash_has_path", "is_told"),
    [
        ({"lora_name": "other", "lora_int_id": 2}, False, True),
        ({"lora_name": "other"}, False, False),
        ({"lora_int_id": 2}, False, False),
        ({"lora_int_id": 2}, True, True),
    ],
    ids=["new name and number", "same number", "same name", "same name, path in the hash"],
)
def test_a_name_or_number_stands_for_one_adapter(
    tmp_path: Path, second: dict[str, object], hash_has_path: bool, is_told: bool
) -> None:
    """A number that stood for other files may still do so in the engine; a name may in its prefix
    cache, where block hashes hold no path."""
    adapters = Adapters(hash_has_path=hash_has_path)
    assert adapters.identity(LoRARequest(save_adapter(tmp_path / "a")))
    found = adapters.identity(LoRARequest(save_adapter(tmp_path / "b", b"b"), **second))  # type: ignore[arg-type]
    assert bool(found) is is_told


def test_a_digest_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read when an adapter is first met, and never for asking again."""
    read = []
    digest = adapters_module.adapter_digest
    monkeypatch.setattr(
        adapters_module, "adapter_digest", lambda *args: read.append(args) or digest(*args)
    )
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    adapters = Adapters()
    identity = adapters.identity(lora)
    assert adapters.identity(lora) == identity
    assert adapters.is_still(lora, identity)
    assert len(read) == 1


def test_the_engine_does_not_wait_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are served without the store until the digest is there, and with it from then on."""
    is_readable = threading.Event()
    digest = adapters_module.adapter_digest
    monkeypatch.setattr(
        adapters_module, "adapter_digest", lambda *args: is_readable.wait(30) and digest(*args)
    )
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    adapters = Adapters(wait_s=0.01)
    assert adapters.identity(lora) == ""
    assert adapters.identity(lora) == ""
    is_readable.set()
    for _ in range(3000):
        if adapters.identity(lora):
            break
        time.sleep(0.01)
    assert adapters.identity(lora) == Adapters().identity(lora)


def test_a_large_adapter_is_sampled(tmp_path: Path) -> None:
    """Of a file of 200 GB, which takes no room on the disk, some pages are read; another size and
    another first page are another adapter."""
    path = Path(save_adapter(tmp_path / "a"))
    weights = path / "adapter_model.safetensors"
    found = []
    for nbytes, first in ((200 << 30, b"a"), (200 << 30, b"b"), (201 << 30, b"b")):
        with weights.open("wb") as file:
            file.write(first)
            file.truncate(nbytes)
        found.append(Adapters().identity(LoRARequest(str(path))))
    assert all(found)
    assert len(set(found)) == 3


def test_many_adapters_take_little_memory(store: FaultyStore, tmp_path: Path) -> None:
    """What is kept by adapter is bounded, and an adapter that was dropped is made anew."""
    engine = SimulatedEngine(store)
    paths = [save_adapter(tmp_path / str(n), bytes([n])) for n in range(70)]
    for number, path in enumerate(paths, 1):
        assert serve(engine, LoRARequest(path, path, number)) == 0
    rank = engine.worker._rank
    assert rank is not None
    assert len(rank._namespaces._kept) == 64
    assert serve(engine, LoRARequest(paths[0], paths[0], 1)) == NUM_HITS
