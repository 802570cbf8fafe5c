"""``verify: header``: no checksum is taken; headers that are read again show what was replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from faulty_store import FaultyStore
from simulated_engine import NUM_FULL, TOKENS, Request, SimulatedEngine

from kvformat.header import decode_header, encode_header
from kvformat.key import key_prefix
from kvformat.objectmap import object_maps
from kvformat.stores.protocol import Code
from kvformat_connector import objectcheck

#: Which call of the store reads payload, by how requests are loaded.
PAYLOAD_CALL = {True: "get_ranges", False: "get_objects"}


@pytest.fixture
def store(filled: FaultyStore) -> FaultyStore:
    return filled


@pytest.fixture(params=[True, False], ids=["layerwise", "bulk"])
def warm(request: pytest.FixtureRequest, store: FaultyStore) -> SimulatedEngine:
    return SimulatedEngine(store, verify="header", use_layerwise=request.param)


def keys_of(engine: SimulatedEngine) -> list[str]:
    (object_map,) = object_maps(engine.layout)
    prefix = key_prefix(engine.namespace, object_map.group_bitmap, object_map.shard)
    return [prefix + block_hash.hex() for block_hash in Request("k", TOKENS).block_hashes]


def drop(store: FaultyStore, key: str) -> None:
    """What removing by force and a restart of the pool's master do, whoever reads."""
    store.inner._objects.by_key.pop(key)
    store.inner._reads.pop(key, None)


def change(store: FaultyStore, key: str, edit: Callable[[bytes], bytes]) -> None:
    data = store.get(key)
    assert data is not None
    drop(store, key)
    assert store.put(key, edit(data)) == Code.OK


def written_again(data: bytes) -> bytes:
    """The object as another writer would have stored it: other payload, its own write id."""
    header = decode_header(data)
    other = msgspec.structs.replace(header, write_id=bytes(reversed(header.write_id)))
    return encode_header(other) + bytes(len(data) - header.header_nbytes)


def during_payload(
    engine: SimulatedEngine, store: FaultyStore, action: Callable[[], object]
) -> None:
    """Do something when the last payload has been read, before headers are read again."""
    (object_map,) = object_maps(engine.layout)
    is_layerwise = engine.options.use_layerwise is True
    left = len(object_map.layers) if is_layerwise else 1

    def after(number: int, keys: Sequence[str], codes: list[int]) -> list[int]:
        nonlocal left
        if codes[0] != object_map.header_nbytes:
            left -= 1
            if not left:
                action()
        return codes

    store.bend[PAYLOAD_CALL[is_layerwise]] = after


def test_right_objects_are_loaded_and_no_checksum_is_taken(
    warm: SimulatedEngine,
    store: FaultyStore,
    expected: list[list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The processor's time that the option is for is saved; headers are read twice."""

    def explode(data: object) -> int:
        raise AssertionError("a checksum was taken")

    monkeypatch.setattr(objectcheck, "checksum", explode)
    served = warm.serve(Request("w", TOKENS))
    assert (served.kv, served.failed_block_ids) == (expected, set())
    assert warm.counters.snapshot()["load.blocks"] == NUM_FULL
    assert store.num_open_sessions == 0


def test_an_object_that_is_replaced_meanwhile_is_found(
    warm: SimulatedEngine, store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """R7: another write id, so that block is computed, and nothing that rests on it is kept."""
    target = keys_of(warm)[2]
    during_payload(warm, store, lambda: change(store, target, written_again))
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert [(r.key, r.reason) for r in warm.counters.rejections] == [(target, "replaced")]
    assert store.num_open_sessions == 0


def test_an_object_that_vanishes_meanwhile_is_found(
    warm: SimulatedEngine, store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """Its memory may have been dealt out while it was read: each object is opened anew at the end,
    so that a session that is still open doesn't hide it."""
    target = keys_of(warm)[4]

    during_payload(warm, store, lambda: drop(store, target))
    served = warm.serve(Request("w", TOKENS))
    assert served.kv == expected
    assert [(r.key, r.reason) for r in warm.counters.rejections] == [(target, "not_found")]


def test_objects_without_checksums_can_be_read(
    store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """A writer that can't compute checksums gives none: rejected by default, read with headers."""

    def strip(data: bytes) -> bytes:
        header = decode_header(data)
        table = header.table[: 16 * header.num_ranges] + bytes(8 * header.num_ranges)
        bare = msgspec.structs.replace(header, optional_features=0, table=table)
        return encode_header(bare) + data[header.header_nbytes :]

    for key in keys_of(SimulatedEngine(store)):
        change(store, key, strip)
    trusting = SimulatedEngine(store, verify="header")
    assert trusting.serve(Request("w", TOKENS)).kv == expected
    assert trusting.counters.snapshot()["load.blocks"] == NUM_FULL
    strict = SimulatedEngine(store)
    assert strict.serve(Request("w", TOKENS)).kv == expected
    assert strict.counters.snapshot()["rejected.checksum_absent"] == NUM_FULL


def test_bytes_that_change_in_place_are_not_found(
    warm: SimulatedEngine, store: FaultyStore, expected: list[list[bytes]]
) -> None:
    """What an operator gives up: a wrong bit under a right header goes to the cache."""
    target = keys_of(warm)[3]
    change(store, target, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    served = warm.serve(Request("w", TOKENS))
    assert served.kv != expected
    assert warm.counters.rejections == []
