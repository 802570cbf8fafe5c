"""Objects that are not what their key says: proven wrong, removed, and written again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from faulty_store import FaultyStore
from simulated_engine import BLOCK_SIZE, NUM_FULL, TOKENS, Request, SimulatedEngine, Tensor
from xxhash import xxh3_64_intdigest

from kvformat.header import decode_header, encode_header, new_header
from kvformat.key import key_prefix
from kvformat.objectmap import object_maps
from kvformat.stores import open_store
from kvformat.stores.protocol import Code, Store
from kvformat_connector.lookup import Distrusted
from kvformat_connector.worker import Worker

VICTIM = 3


def save_and_damage(store: Store, spoil: Callable[[bytearray], Iterable[int]]) -> str:
    """Save all blocks of TOKENS, then put something else in the place of one; its key."""
    engine = SimulatedEngine(store)
    engine.serve(Request("c", TOKENS))
    (object_map,) = object_maps(engine.layout)
    prefix = key_prefix(engine.namespace, object_map.group_bitmap, object_map.shard)
    key = prefix + Request("c", TOKENS).block_hashes[VICTIM].hex()
    data = bytes(spoil(bytearray(store.get(key) or b"")))
    assert store.remove([key]) == [Code.OK]
    assert store.put(key, data) == Code.OK
    return key


def judge(engine: SimulatedEngine) -> None:
    """Steps without requests until nothing is suspected any more."""
    damaged = engine.worker._damaged
    assert damaged is not None
    deadline = time.monotonic() + 20
    while damaged.num_suspects:
        assert time.monotonic() < deadline
        engine.step([])
        time.sleep(0.002)


def flip(data: bytearray) -> bytearray:
    data[-5] ^= 4
    return data


def flip_header(data: bytearray) -> bytearray:
    data[60] ^= 4
    return data


@pytest.mark.parametrize(
    "spoil",
    [
        flip,
        flip_header,
        lambda data: [*data[:8], 2, *data[9:]],
        lambda data: data[:-1],
        lambda data: data[:40],
        lambda data: b"x" * 99,
    ],
    ids=["payload", "header", "version", "a byte short", "header cut", "no object"],
)
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_damaged_object_is_removed_and_written_again(
    expected: list[list[bytes]],
    tmp_path: Path,
    kind: str,
    spoil: Callable[[bytearray], Iterable[int]],
) -> None:
    """The request that meets it computes; it or the next one writes the key; others hit."""
    store = open_store("memory://" if kind == "memory" else f"file://{tmp_path / 'store'}")
    key = save_and_damage(store, spoil)
    warm = SimulatedEngine(store, failed_key_retry_ms=0)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    judge(warm)
    assert warm.counters.snapshot()["damaged.removed"] == 1
    # Written again by the request that computed it, or by the next one.
    assert warm.serve(Request("x", TOKENS)).kv == expected
    assert warm.counters.snapshot()["save.blocks"] == 1
    assert store.exists([key]) == [1]
    again = SimulatedEngine(store).serve(Request("y", TOKENS))
    assert (again.num_hit_tokens, again.kv) == (NUM_FULL * BLOCK_SIZE, expected)
    assert again.failed_block_ids == set()


def test_an_object_that_is_right_when_it_is_read_again_stays(
    expected: list[list[bytes]],
) -> None:
    """A stale session or the network was at fault: nothing is removed."""
    store = FaultyStore()
    SimulatedEngine(store).serve(Request("c", TOKENS))
    warm = SimulatedEngine(store)
    inner = store.inner.get_ranges

    def spoil(
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        # Every read brings bytes from elsewhere in the object.
        return inner(keys, addresses, sizes, [[row[0] + 64] for row in offsets])

    store.inner.get_ranges = spoil  # type: ignore[method-assign]
    assert warm.serve(Request("w", TOKENS)).kv == expected
    store.inner.get_ranges = inner  # type: ignore[method-assign]
    judge(warm)
    counts = warm.counters.snapshot()
    assert counts["rejected.header_magic"] == counts["damaged.right_again"] == NUM_FULL
    assert "damaged.removed" not in counts
    assert store.calls["remove"] == 0


def test_what_a_writer_may_have_meant_stays(expected: list[list[bytes]]) -> None:
    """A required feature that is unknown here, or no checksums: a reason to compute, and none to
    remove."""
    (object_map,) = object_maps(SimulatedEngine(FaultyStore()).layout)
    nbytes = object_map.header_nbytes

    def require_a_feature(data: bytearray) -> bytearray:
        data[16] |= 1
        data[nbytes - 8 : nbytes] = xxh3_64_intdigest(data[: nbytes - 8]).to_bytes(8, "little")
        return data

    def leave_checksums_out(data: bytearray) -> bytearray:
        header = decode_header(bytes(data[:nbytes]))
        without = new_header(
            object_map, header.fingerprint, header.block_hash, header.write_id, None
        )
        data[:nbytes] = encode_header(without)
        return data

    for spoil, reason in (
        (require_a_feature, "header_feature"),
        (leave_checksums_out, "checksum_absent"),
    ):
        store = FaultyStore()
        key = save_and_damage(store, spoil)
        store.calls.clear()
        warm = SimulatedEngine(store)
        assert warm.serve(Request("w", TOKENS)).kv == expected
        judge(warm)
        assert warm.counters.snapshot()[f"rejected.{reason}"] == 1
        assert store.calls["remove"] == 0
        assert store.exists([key]) == [1]


def test_an_object_that_somebody_reads_is_removed_later(
    expected: list[list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refuses while there is a lease: asked again, a bounded number of times."""
    import kvformat_connector.damaged as damaged

    monkeypatch.setattr(damaged, "_RETRY_S", 0.0)
    for num_refusals, outcome in ((3, "damaged.removed"), (99, "damaged.kept")):
        store = FaultyStore()
        key = save_and_damage(store, flip)
        store.calls.clear()
        remove = store.inner.remove

        def refuse(keys: Sequence[str], limit: int = num_refusals) -> list[int]:
            return [Code.NOT_READY] if store.calls["remove"] <= limit else remove(keys)  # noqa: B023

        store.inner.remove = refuse  # type: ignore[method-assign]
        warm = SimulatedEngine(store)
        assert warm.serve(Request("w", TOKENS)).kv == expected
        judge(warm)
        assert warm.counters.snapshot()[outcome] == 1
        assert store.calls["remove"] == min(num_refusals + 1, damaged._MAX_TRIES)
        assert store.exists([key]) == [int(outcome == "damaged.kept")]


def test_who_saves_nothing_removes_nothing(expected: list[list[bytes]]) -> None:
    """A consumer leaves the pool as it is."""
    store = FaultyStore()
    key = save_and_damage(store, flip)
    store.calls.clear()
    warm = SimulatedEngine(store)
    warm.worker = Worker(warm.layout, store, warm.options, warm.counters, may_save=False)
    warm.worker.register({name: Tensor(array) for name, array in warm.memory.items()})
    assert warm.serve(Request("w", TOKENS)).kv == expected
    for _ in range(3):
        warm.step([])
    assert warm.counters.snapshot()["rejected.checksum_mismatch"] == 1
    assert store.calls["remove"] == 0
    assert store.exists([key]) == [1]


def test_a_block_that_fails_again_waits_twice_as_long() -> None:
    """Case 23: what can't be loaded is promised ever more rarely, and forgotten when it's long
    past."""
    now = [0.0]
    distrusted = Distrusted(1000, lambda: now[0])
    waits = []
    for _ in range(8):
        distrusted.add([b"a", b"a"])
        distrusted.add([b"a"])  # while it waits, a failure of another rank is the same one
        started = now[0]
        while b"a" in distrusted:
            now[0] += 0.5
        waits.append(now[0] - started)
    assert waits == [1, 2, 4, 8, 16, 32, 32, 32]
    now[0] += 32
    distrusted.add([b"b"])
    assert len(distrusted) == 1


def test_an_object_of_another_size_is_removed_unread(expected: list[list[bytes]]) -> None:
    """An object that is larger than any of its layout is not read to find that out: it might be
    larger than memory."""
    store = FaultyStore()
    save_and_damage(store, lambda data: flip(data) + bytes(len(data)))
    read: list[str] = []
    store.get = read.append  # type: ignore[attr-defined]
    warm = SimulatedEngine(store)
    assert warm.serve(Request("w", TOKENS)).kv == expected
    judge(warm)
    assert warm.counters.snapshot()["damaged.removed"] == 1
    assert read == []
