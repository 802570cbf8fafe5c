"""LoRA adapters: each has its own blocks, told by its files and not by what it is called."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, TOKENS, Request, SimulatedEngine

from kvformat.fingerprint import parse_manifest
from kvformat.key import BlockKey, ManifestKey, format_key, parse_key
from kvformat_connector import adapterfiles
from kvformat_connector import adapters as adapters_module
from kvformat_connector import worker as worker_module
from kvformat_connector.adaptercheck import mistaken_requests
from kvformat_connector.adapters import Adapters
from kvformat_connector.engine import LoadedAdapters, adapterloads
from kvformat_connector.messages import RequestStep
from kvformat_connector.namespaces import Variant
from kvformat_connector.scheduler import Scheduler

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


def identity(adapters: Adapters, lora: LoRARequest) -> str:
    """What a request that comes now is told, when it's known."""
    deadline = time.monotonic() + 30
    while (found := adapters.identity("r", lora)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    adapters.forget("r")
    return found


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
            assert engine.match(request) == num_hits
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
    assert found == {"", *(identity(Adapters(), lora) for lora in loras)}
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
    first = identity(Adapters(), LoRARequest(save_adapter(tmp_path / "a")))
    second = identity(Adapters(), LoRARequest(save_adapter(tmp_path / "b", **changed)))  # type: ignore[arg-type]
    assert first.startswith("digest:")
    assert (first == second) is is_same


def test_what_an_adapter_computes_also_depends_on_the_engine(tmp_path: Path) -> None:
    """Settings, and how experts' weights are read, are part of the identity."""
    path = save_adapter(tmp_path / "a")
    plain = identity(Adapters(), LoRARequest(path))
    assert (
        identity(Adapters(" lora_dtype=float16"), LoRARequest(path))
        == f"{plain} lora_dtype=float16"
    )
    assert identity(Adapters(), LoRARequest(path, is_3d_lora_weight=True)) != plain


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


def test_a_running_request_saves_nothing_once_its_adapter_is_loaded_anew(
    store: FaultyStore, tmp_path: Path
) -> None:
    """Files that change change nothing that is loaded. When the engine loads them, the next chunk
    is saved neither under the old ones nor under the new ones."""
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    engine = SimulatedEngine(store)
    request = Request("r", TOKENS, lora_request=lora)
    engine.match(request)
    engine.scheduler.allocated(request, 0)
    engine.step([(request, engine.allocate(7), 0, 9)])
    change(tmp_path / "a", b"b")
    engine.step([(request, None, 9, 8)])
    engine.load_adapter(lora)
    engine.step([(request, None, 17, 10)])
    counts = engine.counters.snapshot()
    assert (counts["save.blocks"], counts["save.adapter_changed"]) == (4, 2)


@pytest.mark.parametrize("use_layerwise", [True, False])
@pytest.mark.parametrize("is_stored", [True, False])
def test_an_adapter_that_was_loaded_before_its_files_changed_is_not_pooled(
    store: FaultyStore, tmp_path: Path, use_layerwise: bool, is_stored: bool
) -> None:
    """The engine loads an adapter before its first request, and computes with what it has loaded:
    nothing is loaded or saved under the files that are there when the request comes, also when
    they keep their time and size. The scheduler learns it, and other engines are not disturbed."""
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    engine = SimulatedEngine(store, use_layerwise=use_layerwise)
    engine.load_adapter(lora)
    file = tmp_path / "a" / "adapter_model.safetensors"
    before = file.stat()
    file.write_bytes(b"b" * 5_000)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_stored:
        assert serve(SimulatedEngine(store), lora) == 0
    num_keys = len(list(store.list("")))
    served = engine.serve(Request("r1", TOKENS, lora_request=lora))
    assert len(served.failed_block_ids) == 6 * is_stored
    counts = engine.counters.snapshot()
    assert counts.get("rejected.adapter_changed", 0) == 6 * is_stored
    assert counts["save.adapter_changed"] == 6
    assert serve(engine, lora, "r2") == 0
    assert engine.counters.snapshot()["requests.not_stored"] == 1
    assert len(list(store.list(""))) == num_keys
    other = SimulatedEngine(store, use_layerwise=use_layerwise)
    assert serve(other, lora) == NUM_HITS * is_stored


def test_an_adapter_is_loaded_while_its_files_change(tmp_path: Path) -> None:
    """Nobody can tell what was read."""
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    loaded = LoadedAdapters()
    loaded.load(1, lora.lora_path, lambda: change(tmp_path / "a", b"b"))
    assert loaded.digest(1) == ""
    loaded.load(2, lora.lora_path, lambda: None)
    assert loaded.digest(2) == identity(Adapters(), lora)
    assert loaded.digest(3) is None


def test_an_engine_that_tells_no_loads_pools_no_adapter(tmp_path: Path) -> None:
    """Without a watcher, what an engine has loaded is not known."""
    assert Adapters(can_watch=False).identity("r", LoRARequest(save_adapter(tmp_path / "a"))) == ""
    loaded = LoadedAdapters()
    step = RequestStep(request_id="r", variant=Variant("", "digest:0"), adapter_number=1)
    assert mistaken_requests(loaded, [step]) == ({"r"}, [])


def test_what_one_rank_has_loaded_otherwise_no_rank_saves(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks compute on each other's results: a rank with the right adapter saves nothing where
    another one has a wrong one."""
    monkeypatch.setattr(worker_module, "merge_over_tensor_ranks", lambda ranks, names: {"r"})
    engine = SimulatedEngine(store)
    assert serve(engine, LoRARequest(save_adapter(tmp_path / "a"))) == 0
    assert engine.counters.snapshot()["save.adapter_changed"] == 6
    assert list(store.list("")) == []


def test_a_preempted_request_forgets_its_old_adapter(store: FaultyStore, tmp_path: Path) -> None:
    """Asked anew under an adapter that nobody can tell, it loads nothing again of what its chunks
    before were given."""
    engine = SimulatedEngine(store, chunk_prefix_reload=True)
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    request = Request("r", TOKENS, lora_request=lora)
    engine.match(request)
    engine.scheduler.allocated(request, 0)
    blocks = engine.allocate(7)
    engine.step([(request, blocks, 0, 8)])
    engine.step([(request, None, 8, 8)])
    num_loaded = engine.counters.snapshot()["load.blocks"]
    change(tmp_path / "a", b"b")
    assert engine.match(request) == 0
    engine.scheduler.allocated(request, 0)
    assert engine.scheduler.num_requests == 0
    engine.step([(request, blocks, 0, 16)])
    engine.step([(request, None, 16, 11)])
    assert engine.counters.snapshot()["load.blocks"] == num_loaded


def test_an_engine_that_only_saves_tells_adapters_too(store: FaultyStore, tmp_path: Path) -> None:
    """It is asked like any other and promises nothing; what it saves has the adapter's name."""
    engine = SimulatedEngine(store)
    engine.scheduler = Scheduler(
        engine.layout, store, engine.options, engine.counters, may_load=False
    )
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    assert serve(engine, lora, "r1") == serve(engine, lora, "r2") == 0
    assert serve(SimulatedEngine(store), lora) == NUM_HITS


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
    assert identity(adapters, LoRARequest(save_adapter(tmp_path / "a")))
    found = identity(adapters, LoRARequest(save_adapter(tmp_path / "b", b"b"), **second))  # type: ignore[arg-type]
    assert bool(found) is is_told


def test_a_digest_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read when an adapter is first met, and never for asking again."""
    read = []
    digest = adapterfiles.adapter_digest
    monkeypatch.setattr(
        adapterfiles, "adapter_digest", lambda *args: read.append(args) or digest(*args)
    )
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    adapters = Adapters()
    assert identity(adapters, lora) == identity(adapters, lora)
    assert len(read) == 1


class StuckDisk:
    """Folders are listed when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        signature = adapterfiles.signature

        def answer(path: str) -> adapterfiles.Signature:
            self.asked.append(path)
            assert self.may_answer.wait(30)
            return signature(path)

        monkeypatch.setattr(adapterfiles, "signature", answer)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckDisk]:
    disk = StuckDisk(monkeypatch)
    yield disk
    disk.may_answer.set()


def test_the_engine_does_not_wait_for_a_disk(tmp_path: Path, disk: StuckDisk) -> None:
    """A request is asked about again while its adapter isn't known, and each time costs nothing
    more. After the limit it is served without the store, and so are those that come then, without
    anything queued for them; when the disk is back, so are adapters."""
    lora = LoRARequest(save_adapter(tmp_path / "a"))
    now = [0.0]
    adapters = Adapters(limit_s=2.0, clock=lambda: now[0])
    assert [adapters.identity("r1", lora) for _ in range(100)] == [None] * 100
    now[0] = 2.0
    assert adapters.identity("r1", lora) == ""
    assert adapters.identity("r2", lora) == ""
    assert len(disk.asked) == 1
    disk.may_answer.set()
    for _ in range(3000):
        if found := identity(adapters, lora):
            break
        time.sleep(0.01)
    assert found == identity(Adapters(), lora)


def test_a_request_waits_for_its_adapter_outside_of_the_batch(
    store: FaultyStore, tmp_path: Path, disk: StuckDisk
) -> None:
    """It is promised nothing, not even nothing, until it's known what it is computed with."""
    engine = SimulatedEngine(store)
    request = Request("r", TOKENS, lora_request=LoRARequest(save_adapter(tmp_path / "a")))
    assert engine.scheduler.match(request, 0) is None
    disk.may_answer.set()
    assert engine.match(request) == 0
    engine.scheduler.finished("r")
    assert engine.scheduler._adapters._looks == {}


def test_the_thread_that_reads_adapters_ends_with_the_scheduler(
    store: FaultyStore, tmp_path: Path
) -> None:
    """Closed with the scheduler, when it has read what it reads."""
    engine = SimulatedEngine(store)
    assert serve(engine, LoRARequest(save_adapter(tmp_path / "a"))) == 0
    thread = engine.scheduler._adapters._lane._thread
    assert thread is not None
    assert thread.is_alive()
    engine.scheduler.close()
    thread.join(30)
    assert not thread.is_alive()


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
        found.append(identity(Adapters(), LoRARequest(str(path))))
    assert all(found)
    assert len(set(found)) == 3


def test_many_adapters_take_little_memory(
    store: FaultyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept by adapter is bounded, and an adapter that was dropped is made anew; its
    manifest isn't published anew."""
    published = []
    put = store.put
    monkeypatch.setattr(store, "put", lambda key, data: published.append(key) or put(key, data))
    engine = SimulatedEngine(store)
    paths = [save_adapter(tmp_path / str(n), bytes([n])) for n in range(70)]
    for num_hits in (0, NUM_HITS):
        for number, path in enumerate(paths, 1):
            assert serve(engine, LoRARequest(path, path, number)) == num_hits
    rank = engine.worker._rank
    assert rank is not None
    assert len(rank._namespaces._kept) == 64
    assert len(published) == len(set(published)) == 70


def test_what_stood_for_several_adapters_is_never_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has met more adapters than it remembers pools no new ones: an older one that
    changed stays refused, by the scheduler and by the workers."""
    monkeypatch.setattr(adapters_module, "_MAX_NAMES", 4)
    monkeypatch.setattr(adapterloads, "_MAX_KEPT", 2)
    adapters, loaded = Adapters(), LoadedAdapters()
    hot = LoRARequest(save_adapter(tmp_path / "hot"), "hot", 1)
    others = [LoRARequest(save_adapter(tmp_path / f"{n}"), f"{n}", n) for n in range(2, 9)]

    def meet(lora: LoRARequest) -> tuple[str, str | None]:
        loaded.load(lora.lora_int_id, lora.lora_path, lambda: None)
        return identity(adapters, lora), loaded.digest(lora.lora_int_id)

    told, known = meet(hot)
    assert told == known != ""
    change(tmp_path / "hot", b"b")
    assert meet(hot) == ("", "")
    assert all(meet(others[0]))
    assert [meet(lora) for lora in others[1:]] == [("", "")] * 6
    assert meet(hot) == ("", "")
    assert all(meet(others[0]))


def test_a_path_that_is_none_tells_nothing(tmp_path: Path) -> None:
    """What names no folder, for the engine's or for the system's reasons, is no adapter and no
    error on the engine's thread."""
    for path in ("~nobody-has-this-name", "a\0b", "\udcff\ud800", "", str(tmp_path / "none")):
        assert identity(Adapters(), LoRARequest(path)) == ""


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str) -> None:
    """A pipe in an adapter's folder would be waited for, a device read without end."""
    path = Path(save_adapter(tmp_path / "a"))
    (path / "adapter_config.json").unlink()
    if kind == "pipe":
        os.mkfifo(path / "adapter_config.json")
    else:
        (path / "adapter_config.json").symlink_to("/dev/zero")
    assert identity(Adapters(), LoRARequest(str(path))) == ""
