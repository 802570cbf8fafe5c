"""``kvformat verify``: every object of a store, counted by reason."""

from __future__ import annotations

import pytest
from cli_runs import Run
from cli_stores import block_hash, make_layout, make_object, put, put_blocks, put_manifest

from kvformat.key import layout_namespace, namespace_prefix
from kvformat.stores import Code, Store
from kvformat.stores.memory import MemoryStore

LAYOUT = make_layout()
NBYTES = 320 + 4 * 1024


def damaged(number: int, *positions: int) -> tuple[str, bytes]:
    key, data = make_object(LAYOUT, block_hash(number))
    changed = bytearray(data)
    for position in positions:
        changed[position] ^= 0x80
    return key, bytes(changed)


def test_good_store(run: Run, store: Store) -> None:
    """The whole document of a walk that finds nothing."""
    put_blocks(store, LAYOUT, 4)
    outcome = run("verify", store.uri, "--json")
    assert outcome.json == {
        "store": store.uri,
        "prefix": "",
        "is_payload_verified": True,
        "num_objects": 4,
        "num_ok": 4,
        "nbytes": 4 * NBYTES,
        "num_manifests": 1,
        "num_gone": 0,
        "num_foreign_keys": 0,
        "reasons": {},
        "problems": [],
    }
    assert outcome.code == 0


def test_counts_by_reason(run: Run, store: Store) -> None:
    """Each damaged object counts once under each of its reasons, and is named."""
    put_blocks(store, LAYOUT, 2)
    both_layers = put(store, *damaged(10, 320, -1))
    payload = put(store, *damaged(11, 400))
    header = put(store, *damaged(12, 100))
    copied = put(store, make_object(LAYOUT, block_hash(13))[0], damaged(0)[1])
    unknown = put(store, "kvformat9/a/b", b"x")
    put(store, "somebody/else", b"x")
    outcome = run("verify", store.uri, "--json")
    assert outcome.json["reasons"] == {
        "checksum_mismatch": 2,
        "header_checksum": 1,
        "wrong_block": 1,
        "key_version": 1,
    }
    assert (outcome.json["num_objects"], outcome.json["num_ok"]) == (6, 2)
    assert outcome.json["num_foreign_keys"] == 1
    assert {(p["key"], p["reason"]) for p in outcome.json["problems"]} == {
        (both_layers, "checksum_mismatch"),
        (payload, "checksum_mismatch"),
        (header, "header_checksum"),
        (copied, "wrong_block"),
        (unknown, "key_version"),
    }
    assert outcome.code == 1
    text = run("verify", store.uri)
    assert "1 usable manifest\n" in text.stdout
    rows = [line.split() for line in text.stdout.splitlines()]
    assert ["checksum_mismatch", "2"] in rows
    assert text.code == 1


def test_prefix(run: Run, store: Store) -> None:
    """A walk stays below its prefix."""
    put_blocks(store, LAYOUT, 1)
    put(store, *damaged(10, 320))
    other = make_layout(tenant="zeta")
    put_blocks(store, other, 3)
    prefix = namespace_prefix(layout_namespace(other))
    outcome = run("verify", store.uri, prefix, "--json")
    assert (outcome.json["num_objects"], outcome.json["num_ok"], outcome.code) == (3, 3, 0)


def test_prefix_without_manifest_in_it(run: Run, store: Store) -> None:
    """A prefix that leaves the manifest out still uses it."""
    put_blocks(store, LAYOUT, 1)
    prefix = namespace_prefix(layout_namespace(LAYOUT)) + "g"
    outcome = run("verify", store.uri, prefix, "--json")
    assert (outcome.json["num_manifests"], outcome.json["num_ok"]) == (1, 1)


def test_headers_only(run: Run, store: Store) -> None:
    """--headers-only reads no payload and says so."""
    put_blocks(store, LAYOUT, 1)
    put(store, *damaged(10, 320))
    outcome = run("verify", store.uri, "--headers-only", "--json")
    assert (outcome.json["is_payload_verified"], outcome.json["num_ok"]) == (False, 2)
    assert outcome.code == 0


def test_examples_are_limited(run: Run, store: Store) -> None:
    """Counts are whole however few examples are asked for."""
    put_manifest(store, LAYOUT)
    for number in range(5):
        put(store, *damaged(number, 320))
    outcome = run("verify", store.uri, "--examples", "2", "--json")
    assert outcome.json["reasons"] == {"checksum_mismatch": 5}
    assert len(outcome.json["problems"]) == 2


def test_missing_manifest_counts_once(run: Run, store: Store) -> None:
    """A namespace's missing manifest is one finding, not one an object."""
    for number in range(3):
        put(store, *make_object(LAYOUT, block_hash(number)))
    outcome = run("verify", store.uri, "--json")
    assert outcome.json["reasons"] == {"not_found": 1}
    assert (outcome.json["num_ok"], outcome.json["num_manifests"]) == (3, 0)
    assert outcome.code == 1


def test_no_checksums(run: Run, store: Store) -> None:
    """Objects that can't be verified aren't called fine."""
    put_manifest(store, LAYOUT)
    put(store, *make_object(LAYOUT, has_checksums=False))
    outcome = run("verify", store.uri, "--json")
    assert outcome.json["reasons"] == {"checksum_absent": 1}
    assert outcome.code == 1


def test_object_evicted_during_the_walk(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 24: an object that goes between list and read is counted as gone, not as damaged."""
    [key] = put_blocks(store, LAYOUT, 1)
    gone = make_object(LAYOUT, block_hash(9))[0]
    monkeypatch.setattr(type(store), "list", lambda self, prefix="": iter([gone, key]))
    outcome = run("verify", store.uri, "--json")
    assert (outcome.json["num_gone"], outcome.json["num_objects"]) == (1, 1)
    assert outcome.code == 0


def test_lease_is_renewed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 25: a lease that is over before the next read is renewed, and the object read whole."""
    store = MemoryStore("memory://cli-lease")
    put_blocks(store, LAYOUT, 1)
    get_ranges, get_start = MemoryStore.get_ranges, MemoryStore.get_start
    leased: set[str] = set()

    def start_lease(self: MemoryStore, keys: list[str]) -> list[int]:
        leased.update(keys)
        return get_start(self, keys)

    def use_lease_up(self: MemoryStore, keys: list[str], *ranges: list[list[int]]) -> list[int]:
        if not leased.issuperset(keys):
            return [Code.LEASE_EXPIRED]
        leased.difference_update(keys)
        return get_ranges(self, keys, *ranges)

    monkeypatch.setattr(MemoryStore, "get_start", start_lease)
    monkeypatch.setattr(MemoryStore, "get_ranges", use_lease_up)
    outcome = run("verify", store.uri, "--json")
    assert (outcome.json["num_ok"], outcome.code) == (1, 0)


@pytest.mark.parametrize("code", [Code.TRANSFER_FAILED, Code.INVALID])
def test_key_that_cannot_be_read(run: Run, monkeypatch: pytest.MonkeyPatch, code: Code) -> None:
    """Case 23: a key whose every read fails is counted under the store's answer. A range inside of
    the object isn't wrong, whatever a store says of it when its node is gone."""
    store = MemoryStore(f"memory://cli-unreadable{code}")
    [key] = put_blocks(store, LAYOUT, 1)
    get_ranges = MemoryStore.get_ranges

    def failing(self: MemoryStore, keys: list[str], *ranges: list[list[int]]) -> list[int]:
        return [code] if keys == [key] else get_ranges(self, keys, *ranges)

    monkeypatch.setattr(MemoryStore, "get_ranges", failing)
    outcome = run("verify", store.uri, "--json")
    assert outcome.json["reasons"] == {"transfer_failed": 1}
    assert outcome.code == 1
