"""Both sides over a store: what is saved comes back, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from faulty_store import FaultyStore
from simulated_engine import (
    BLOCK_SIZE,
    NUM_FULL,
    TOKENS,
    Request,
    SimulatedEngine,
    make_layout,
    prompt,
)

from kvformat.acceptance import check_header, check_range
from kvformat.fingerprint import parse_manifest
from kvformat.header import decode_header, encode_header
from kvformat.key import (
    BlockKey,
    ManifestKey,
    Namespace,
    Shard,
    format_key,
    namespace_prefix,
    parse_key,
)
from kvformat.objectmap import object_maps
from kvformat.stores.memory import MemoryStore
from kvformat.stores.protocol import Code
from kvformat_connector.staging import Staging


def block_keys(engine: SimulatedEngine, store: FaultyStore) -> dict[bytes, str]:
    """Keys of the stored objects of an engine's namespace, by block hash."""
    keys = {}
    for text in store.list(namespace_prefix(engine.namespace)):
        if isinstance(key := parse_key(text), BlockKey):
            keys[key.block_hash] = text
    return keys


def replace(store: FaultyStore, key: str, data: bytes) -> None:
    assert store.inner.remove([key]) == [Code.OK]
    assert store.put(key, data) == Code.OK


def test_a_fresh_engine_loads_what_another_one_saved(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Cold, then warm: the same bytes in every layer of every block, none computed twice."""
    cold = SimulatedEngine(store)
    assert cold.serve(Request("c", TOKENS)).kv == expected
    assert cold.counters.snapshot()["save.blocks"] == NUM_FULL
    warm = SimulatedEngine(store)
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert served.num_hit_tokens == NUM_FULL * BLOCK_SIZE
    assert warm.counters.snapshot()["load.blocks"] == NUM_FULL
    assert "save.blocks" not in warm.counters.snapshot()
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 11])
def test_chunked_prefill_saves_the_same(
    store: FaultyStore, expected: list[list[bytes]], chunk: int
) -> None:
    """Case 27: chunk boundaries inside blocks change nothing."""
    SimulatedEngine(store).serve(Request("c", TOKENS), chunk=chunk)
    served = SimulatedEngine(store).serve(Request("w", TOKENS), chunk=chunk)
    assert served.num_hit_tokens == NUM_FULL * BLOCK_SIZE
    assert served.kv == expected


@pytest.mark.parametrize(
    "options",
    [
        {"layerwise_max_transfer_blocks": 1},
        {"layerwise_max_transfer_blocks": 4, "layerwise_prefetch_layers": 1},
        {"layerwise_max_transfer_bytes": 128},
        {"layerwise_prefetch_layers": 99},
        {"lookup_window": 1},
    ],
)
def test_limits_change_how_bytes_move_but_not_which(
    store: FaultyStore, expected: list[list[bytes]], options: dict[str, int]
) -> None:
    """Small calls, small pieces, much or little ahead: the same bytes."""
    SimulatedEngine(store, **options).serve(Request("c", TOKENS))
    assert SimulatedEngine(store, **options).serve(Request("w", TOKENS)).kv == expected


def test_stored_objects_are_what_the_format_says(store: FaultyStore) -> None:
    """Header, ranges and manifest of what the connector wrote, read by the format layer alone."""
    engine = SimulatedEngine(store)
    served = engine.serve(Request("c", TOKENS))
    data = store.get(format_key(ManifestKey(engine.namespace)))
    assert data is not None
    layout = parse_manifest(data, engine.namespace.fingerprint)
    assert layout == engine.layout
    (object_map,) = object_maps(layout)
    keys = block_keys(engine, store)
    hashes = Request("c", TOKENS).block_hashes
    assert sorted(keys) == sorted(hashes)
    write_ids = set()
    for block_hash, kv in zip(hashes, served.kv, strict=True):
        found = store.get(keys[block_hash])
        assert found is not None
        header = decode_header(found)
        check_header(header, object_map, engine.namespace.fingerprint, block_hash)
        for index, entry in enumerate(object_map.layers):
            piece = found[entry.offset : entry.offset + entry.nbytes]
            assert piece == kv[index]
            check_range(header, index, piece)
        write_ids.add(header.write_id)
    assert len(write_ids) == len(hashes)


@pytest.mark.parametrize("num_tokens", [27, 24], ids=["nothing to save", "a block to save again"])
def test_a_namespace_in_use_stays_explained(num_tokens: int) -> None:
    """A manifest that a store evicted comes back with a server that finds all its objects there."""
    uri = f"memory://explained-{num_tokens}"
    observer = MemoryStore(uri)
    SimulatedEngine(FaultyStore(uri)).serve(Request("c", TOKENS))
    engine = SimulatedEngine(FaultyStore(uri))
    key = format_key(ManifestKey(engine.namespace))
    assert observer.remove([key]) == [Code.OK]
    assert engine.serve(Request("w", TOKENS[:num_tokens])).num_hit_tokens > 0
    engine.worker.close()  # which ends what was begun
    assert observer.exists([key]) == [1]


def test_two_requests_of_one_step_write_and_read_one_object(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Case 29: the same new block twice in a step is put once; the same hit twice fills both."""
    cold = SimulatedEngine(store)
    first, second = Request("a", TOKENS), Request("b", TOKENS)
    tables = [cold.allocate(7), cold.allocate(7)]
    for request in (first, second):
        cold.scheduler.allocated(request, cold.scheduler.match(request, 0))
    cold.step([(first, tables[0], 0, 27), (second, tables[1], 0, 27)])
    assert cold.counters.snapshot()["save.blocks"] == NUM_FULL
    warm = SimulatedEngine(store)
    hits = [warm.scheduler.match(request, 0) for request in (first, second)]
    tables = [warm.allocate(7), warm.allocate(7)]
    for request, hit in zip((first, second), hits, strict=True):
        warm.scheduler.allocated(request, hit)
    failed = warm.step([(first, tables[0], hits[0], 3), (second, tables[1], hits[1], 3)])
    assert failed == set()
    assert [warm.kv_of(first, table) for table in tables] == [expected, expected]
    assert store.num_open_sessions == 0


@pytest.mark.parametrize(
    "other",
    [
        make_layout(weights="commit:2"),
        make_layout(dtype="float16"),
        make_layout(num_layers=4),
        make_layout(tenant="u"),
    ],
    ids=["revision", "dtype", "layers", "tenant"],
)
def test_servers_that_differ_share_nothing(store: FaultyStore, other: object) -> None:
    """Cases 3 and 4: another layout hits nothing, stores its own, and deleting one namespace leaves
    the other whole."""
    first = SimulatedEngine(store)
    first.serve(Request("a", TOKENS))
    second = SimulatedEngine(store, other)  # type: ignore[arg-type]
    served = second.serve(Request("b", TOKENS))
    assert served.num_hit_tokens == 0
    mine, theirs = block_keys(first, store), block_keys(second, store)
    assert len(mine) == len(theirs) == NUM_FULL
    store.inner.remove(list(store.list(namespace_prefix(first.namespace))))
    assert block_keys(second, store) == theirs
    assert (
        SimulatedEngine(store, other)
        .serve(  # type: ignore[arg-type]
            Request("c", TOKENS)
        )
        .num_hit_tokens
        == NUM_FULL * BLOCK_SIZE
    )
    assert SimulatedEngine(store).serve(Request("d", TOKENS)).num_hit_tokens == 0


def _under_another_hash(store: FaultyStore, engine: SimulatedEngine, target: str) -> bytes:
    keys = block_keys(engine, store)
    source = next(key for key in keys.values() if key != target)
    data = store.get(source)
    assert data is not None
    return data


def _from_another_namespace(store: FaultyStore, engine: SimulatedEngine, target: str) -> bytes:
    other = SimulatedEngine(store, make_layout(weights="commit:2"))
    other.serve(Request("other", TOKENS))
    key = parse_key(target)
    assert isinstance(key, BlockKey)
    data = store.get(block_keys(other, store)[key.block_hash])
    assert data is not None
    return data


def _from_another_shard(store: FaultyStore, engine: SimulatedEngine, target: str) -> bytes:
    data = store.get(target)
    assert data is not None
    header = msgspec.structs.replace(decode_header(data), shard=Shard(0, 1, 0))
    return encode_header(header) + data[header.header_nbytes :]


@pytest.mark.parametrize(
    ("misplace", "reason"),
    [
        (_under_another_hash, "wrong_block"),
        (_from_another_namespace, "wrong_fingerprint"),
        (_from_another_shard, "wrong_shard"),
    ],
)
def test_a_misplaced_object_is_rejected_before_its_payload_is_read(
    store: FaultyStore,
    expected: list[list[bytes]],
    misplace: Callable[[FaultyStore, SimulatedEngine, str], bytes],
    reason: str,
) -> None:
    """Case 7: right bytes, wrong place. The header alone gives it away; the block is recomputed."""
    cold = SimulatedEngine(store)
    cold.serve(Request("c", TOKENS))
    target = block_keys(cold, store)[Request("c", TOKENS).block_hashes[2]]
    replace(store, target, misplace(store, cold, target))
    header_nbytes = object_maps(cold.layout)[0].header_nbytes
    read: list[tuple[str, int]] = []
    warm = SimulatedEngine(store)

    def note(number: int, keys: list[str], codes: list[int]) -> list[int]:
        read.extend(zip(keys, codes, strict=True))
        return codes

    store.bend["get_ranges"] = note  # type: ignore[assignment]
    served = warm.serve(Request("w", TOKENS))
    assert [(r.key, r.reason) for r in warm.counters.rejections] == [(target, reason)]
    assert [nbytes for key, nbytes in read if key == target] == [header_nbytes]
    assert served.kv == expected
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("layer_index", [0, 1, 2])
def test_a_flipped_bit_is_found_in_the_layer_that_has_it(
    store: FaultyStore, expected: list[list[bytes]], layer_index: int
) -> None:
    """The rejection names group, layer and reason, and the block is recomputed."""
    cold = SimulatedEngine(store)
    cold.serve(Request("c", TOKENS))
    target = block_keys(cold, store)[Request("c", TOKENS).block_hashes[3]]
    data = bytearray(store.get(target) or b"")
    data[object_maps(cold.layout)[0].layers[layer_index].offset + 5] ^= 4
    replace(store, target, bytes(data))
    warm = SimulatedEngine(store)
    served = warm.serve(Request("w", TOKENS))
    [rejection] = warm.counters.rejections
    assert (rejection.key, rejection.reason) == (target, "checksum_mismatch")
    assert f"group 0 layer {layer_index}:" in rejection.detail
    assert served.kv == expected


@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_an_object_that_stops_in_the_middle_is_a_miss(
    store: FaultyStore, expected: list[list[bytes]], part: float
) -> None:
    """Case 19: a store that shows an object with only its first bytes written, the rest zero."""
    cold = SimulatedEngine(store)
    cold.serve(Request("c", TOKENS))
    target = block_keys(cold, store)[Request("c", TOKENS).block_hashes[0]]
    whole = store.get(target) or b""
    cut = int(len(whole) * part)
    replace(store, target, whole[:cut] + bytes(len(whole) - cut))
    warm = SimulatedEngine(store)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    assert [rejection.key for rejection in warm.counters.rejections] == [target]


@pytest.mark.parametrize("num_layers_written", [0, 1, 3])
def test_a_writer_that_dies_leaves_no_object(
    store: FaultyStore, expected: list[list[bytes]], num_layers_written: int
) -> None:
    """Case 19: a writer that ends after some layers has published nothing."""
    dying = SimulatedEngine(store)

    class DeathError(Exception):
        pass

    def die(layer_index: int) -> None:
        if layer_index == num_layers_written:
            raise DeathError

    dying.before_layer = die
    if num_layers_written < 3:
        with pytest.raises(DeathError):
            dying.serve(Request("d", TOKENS))
    else:
        dying.worker.end_step = lambda: None  # type: ignore[method-assign]
        dying.serve(Request("d", TOKENS))
    assert block_keys(dying, store) == {}
    del dying
    fresh = SimulatedEngine(store)
    assert fresh.serve(Request("w", TOKENS)).kv == expected


@pytest.mark.parametrize("call_number", [0, 1, 2, 3])
def test_one_failed_range_revokes_that_object_alone(store: FaultyStore, call_number: int) -> None:
    """Case 20: the others commit, whichever layer fails, or the header."""
    engine = SimulatedEngine(store)
    victim = 4

    def fail(number: int, keys: list[str], codes: list[int]) -> list[int]:
        if number == call_number:
            codes[victim] = Code.TRANSFER_FAILED
        return codes

    store.bend["put_ranges"] = fail  # type: ignore[assignment]
    engine.serve(Request("c", TOKENS))
    hashes = Request("c", TOKENS).block_hashes
    assert set(block_keys(engine, store)) == set(hashes) - {hashes[victim]}
    assert engine.counters.snapshot()["save.transfer_failed"] == 1
    assert store.num_open_sessions == 0


def test_one_failed_commit_touches_that_object_alone(store: FaultyStore) -> None:
    """Case 21: it is revoked and counted, and no later request is promised it."""
    engine = SimulatedEngine(store)
    revoked: list[str] = []
    commit = store.inner.put_commit

    def commit_all_but_one(keys: list[str]) -> list[int]:
        return [
            Code.UNAVAILABLE if index == 1 else commit([key])[0] for index, key in enumerate(keys)
        ]

    store.inner.put_commit = commit_all_but_one  # type: ignore[method-assign, assignment]
    store.bend["put_revoke"] = lambda number, keys, codes: revoked.extend(keys) or codes
    engine.serve(Request("c", TOKENS))
    hashes = Request("c", TOKENS).block_hashes
    assert [parse_key(key).block_hash for key in revoked] == [hashes[1]]  # type: ignore[union-attr]
    assert engine.counters.snapshot()["save.unavailable"] == 1
    assert SimulatedEngine(store).scheduler.match(Request("w", TOKENS), 0) == BLOCK_SIZE
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("method", ["get_start", "get_ranges"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda codes: [Code.TRANSFER_FAILED] * len(codes),
        lambda codes: codes[:-1],
        lambda codes: 1 / 0,
    ],
    ids=["fails", "short", "raises"],
)
def test_a_load_that_fails_is_recomputed(
    store: FaultyStore, expected: list[list[bytes]], method: str, answer: object
) -> None:
    """Cases 23 and 26: every call of a kind fails; the answer is the one without a cache."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    store.bend[method] = lambda number, keys, codes: answer(codes)  # type: ignore[operator]
    served = warm.serve(Request("w", TOKENS))
    assert served.num_hit_tokens == NUM_FULL * BLOCK_SIZE
    assert served.kv == expected
    assert warm.scheduler.match(Request("again", TOKENS), 0) == 0
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("layer_index", [0, 1, 2])
def test_nothing_computed_on_a_failed_load_is_saved(store: FaultyStore, layer_index: int) -> None:
    """Case 26: a request whose load fails computes a suffix on garbage in that step. None of it may
    be in the store, for every layer in which the load can fail."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    longer = [*TOKENS, *prompt(17, 77)]
    reference = SimulatedEngine(FaultyStore()).serve(Request("reference", longer))
    warm = SimulatedEngine(store)
    call_of_layer = layer_index + 1  # the first call reads headers

    def fail(number: int, keys: list[str], codes: list[int]) -> list[int]:
        if number == call_of_layer:
            codes[2] = Code.TRANSFER_FAILED
        return codes

    store.calls.clear()
    store.bend["get_ranges"] = fail  # type: ignore[assignment]
    assert warm.serve(Request("w", longer)).kv == reference.kv
    # The suffix, computed on the garbage first and properly in the next step:
    assert warm.counters.snapshot()["save.tainted"] == 5
    assert warm.counters.snapshot()["save.blocks"] == 5
    assert SimulatedEngine(store).serve(Request("v", longer)).kv == reference.kv


def test_a_request_that_reads_anothers_failed_blocks_saves_nothing(store: FaultyStore) -> None:
    """The second request of a step has a local hit on a block that the first is still loading."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    first = Request("a", TOKENS)
    second = Request("b", [*TOKENS[:4], *prompt(9, 99)])
    hit = warm.scheduler.match(first, 0)
    table = warm.allocate(7)
    warm.scheduler.allocated(first, hit)
    warm.scheduler.match(second, 0)
    warm.scheduler.allocated(second, 0)
    store.bend["get_start"] = lambda number, keys, codes: [Code.NOT_FOUND] * len(codes)
    failed = warm.step([(first, table, hit, 3), (second, [table[0], *warm.allocate(3)], 4, 9)])
    assert failed == set(table[:NUM_FULL])
    assert warm.counters.snapshot()["save.tainted"] == 2
    assert "save.blocks" not in warm.counters.snapshot()


def test_until_the_scheduler_knows_of_a_failure_nothing_is_saved(store: FaultyStore) -> None:
    """A step that was scheduled before a failure was known still counts garbage as computed, so the
    worker saves nothing until its report has come back acknowledged."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    longer = Request("w", [*TOKENS, *prompt(9, 77)])
    hit = warm.scheduler.match(longer, 0)
    table = warm.allocate(9)
    warm.scheduler.allocated(longer, hit)
    store.bend["get_start"] = lambda number, keys, codes: [Code.NOT_FOUND] * len(codes)
    failed = warm.step([(longer, table, hit, 4)], acknowledge=False)
    assert failed == set(table[:NUM_FULL])
    warm.step([(longer, None, hit + 4, 8)])
    assert warm.counters.snapshot()["save.held"] == 2
    assert "save.blocks" not in warm.counters.snapshot()
    warm.scheduler.reported(warm.reports[0])
    warm.step([(longer, None, 0, 36)])
    assert warm.counters.snapshot()["save.blocks"] == 9 - NUM_FULL


def test_garbage_that_an_aborted_request_left_behind_is_not_built_upon(store: FaultyStore) -> None:
    """A request whose load failed is aborted before it can recompute. The engine's own prefix cache
    still has its blocks: what others compute from them isn't saved, until they are rewritten."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    aborted = Request("a", TOKENS)
    hit = warm.scheduler.match(aborted, 0)
    table = warm.allocate(7)
    warm.scheduler.allocated(aborted, hit)
    store.bend["get_start"] = lambda number, keys, codes: [Code.NOT_FOUND] * len(codes)
    warm.step([(aborted, table, hit, 3)])
    warm.scheduler.finished("a")
    other = Request("b", [*TOKENS[:8], *prompt(9, 99)])
    other_table = [*table[:2], *warm.allocate(3)]
    warm.scheduler.match(other, 0)
    warm.scheduler.allocated(other, 0)
    warm.step([(other, other_table, 8, 9)])
    assert warm.counters.snapshot()["save.on_garbage"] == 2
    assert "save.blocks" not in warm.counters.snapshot()
    again = Request("d", TOKENS)
    warm.scheduler.match(again, 0)
    warm.scheduler.allocated(again, 0)
    warm.step([(again, table, 0, 27)])
    third = Request("e", [*TOKENS[:8], *prompt(9, 99)])
    warm.scheduler.match(third, 0)
    warm.scheduler.allocated(third, 0)
    warm.step([(third, other_table, 8, 9)])
    assert warm.counters.snapshot()["save.blocks"] == 2


def test_a_layer_that_the_engine_never_waits_for_fails_the_load(store: FaultyStore) -> None:
    """Hooks that don't fire must not turn into silent garbage."""
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    request = Request("w", TOKENS)
    hit = warm.scheduler.match(request, 0)
    table = warm.allocate(7)
    warm.scheduler.allocated(request, hit)
    wait = warm.worker.wait_layer
    warm.worker.wait_layer = (  # type: ignore[method-assign]
        lambda name: None if name == "layer1" else wait(name)
    )
    assert warm.step([(request, table, hit, 3)]) == set(table[:NUM_FULL])


def test_a_layer_that_is_never_saved_publishes_nothing(store: FaultyStore) -> None:
    """An object is complete when its bitmap is full, not when some last layer was seen."""
    engine = SimulatedEngine(store)
    save = engine.worker.save_layer
    engine.worker.save_layer = (  # type: ignore[method-assign]
        lambda name: None if name == "layer1" else save(name)
    )
    engine.serve(Request("c", TOKENS))
    assert block_keys(engine, store) == {}
    assert engine.counters.snapshot()["save.incomplete"] == NUM_FULL
    assert store.num_open_sessions == 0


@pytest.mark.parametrize("thread", ["copy", "save", "load", "check"])
def test_a_job_that_raises_ends_the_step_and_not_the_engine(
    store: FaultyStore,
    expected: list[list[bytes]],
    thread: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Case 31: an error on a background thread is counted, its objects are given up, and nothing
    waits for ever."""

    take = Staging.take

    def explode(*arguments: Any) -> Any:
        if threading.current_thread().name == f"kvformat-{thread}":
            raise RuntimeError("a bug")
        return take(*arguments)

    if thread in ("load", "check"):
        SimulatedEngine(store).serve(Request("c", TOKENS))
    # Every thread but the one that checks takes stages.
    monkeypatch.setattr(Staging, "take", explode)
    engine = SimulatedEngine(store)
    assert engine.worker._rank is not None
    if thread == "check":
        engine.worker._rank.device.scatter = explode  # type: ignore[assignment]
    served = engine.serve(Request("w", TOKENS))
    assert served.kv == expected
    counts = engine.counters.snapshot()
    if thread in ("load", "check"):
        assert len(served.failed_block_ids) == counts["rejected.transfer_failed"] == NUM_FULL
        assert "a bug" in engine.counters.rejections[0].detail
    else:
        assert counts["save.raised"] == 1
        assert block_keys(engine, store) == {}
    assert store.num_open_sessions == 0


def test_memory_that_a_store_cannot_use_moves_nothing(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A transport that needs its memory registered and can't get it: what was to be saved or loaded
    through it is not, and the engine goes on."""

    def refuse(address: int, nbytes: int) -> int:
        return Code.INVALID

    register, store.inner.register_memory = store.inner.register_memory, refuse  # type: ignore[method-assign]
    cold = SimulatedEngine(store)
    assert cold.serve(Request("c", TOKENS)).kv == expected
    assert cold.counters.snapshot()["save.raised"] > 0
    assert block_keys(cold, store) == {}
    store.inner.register_memory = register  # type: ignore[method-assign]
    SimulatedEngine(store).serve(Request("d", TOKENS))
    store.inner.register_memory = refuse  # type: ignore[method-assign]
    warm = SimulatedEngine(store)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    assert warm.counters.snapshot()["rejected.transfer_failed"] == NUM_FULL
    for engine in (cold, warm):
        rank = engine.worker._rank
        assert rank is not None
        assert rank.load_staging.num_taken_nbytes + rank.save_staging.num_taken_nbytes == 0
    assert store.num_open_sessions == 0


def test_a_put_session_that_grew_old_is_given_up(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer may own the memory of an old session: nothing is written to it any more."""
    import kvformat_connector.sessions as sessions

    monkeypatch.setattr(sessions, "MAX_PUT_SESSION_S", -1.0)
    engine = SimulatedEngine(store)
    engine.serve(Request("c", TOKENS))
    assert block_keys(engine, store) == {}
    assert store.calls["put_ranges"] == 0
    assert engine.counters.snapshot()["save.too_old"] == NUM_FULL
    assert store.num_open_sessions == 0


def test_a_writer_revokes_only_what_it_opened(store: FaultyStore) -> None:
    """Case 22: a key that another writer is at, or has committed, is left alone."""
    engine = SimulatedEngine(store)
    request = Request("c", TOKENS)
    other = SimulatedEngine(store)
    other.serve(Request("x", TOKENS[:9]))
    (object_map,) = object_maps(engine.layout)
    in_progress = format_key(
        BlockKey(
            engine.namespace, object_map.group_bitmap, object_map.shard, request.block_hashes[4]
        )
    )
    store.put_start([in_progress], [object_map.nbytes])
    engine.serve(Request("c", [*TOKENS[:20], *prompt(3, 200)]))
    assert in_progress in store.inner._writes
    fresh = SimulatedEngine(store)
    assert fresh.scheduler.match(request, 0) == 4 * BLOCK_SIZE
    assert isinstance(fresh.namespace, Namespace)


def test_many_steps_leave_nothing_behind(store: FaultyStore) -> None:
    """Case 30, in small: what the connector keeps is the same after many requests."""
    engine = SimulatedEngine(store)
    for number in range(60):
        engine.serve(Request(f"r{number}", prompt(30, number)))
    assert engine.scheduler.num_requests == 0
    assert engine.scheduler._lookup._known == {}
    assert store.num_open_sessions == 0
