"""``kvformat inspect``: what an object says of itself, and each way in which it can be wrong."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from cli_runs import Run
from cli_stores import (
    BLOCK_HASH,
    WRITE_ID,
    block_hash,
    make_layout,
    make_object,
    put,
    put_manifest,
)

from kvformat.checksum import checksum
from kvformat.fingerprint import fingerprint
from kvformat.header import GroupSpan, decode_header, encode_header
from kvformat.key import Shard
from kvformat.stores import Store

LAYOUT = make_layout()
KEY, DATA = make_object(LAYOUT)
HEADER_NBYTES, LAYER_NBYTES = 320, 2048


def reasons(document: dict[str, list[dict[str, str]]]) -> list[str]:
    return [problem["reason"] for problem in document["problems"]]


def flip(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 1
    return bytes(changed)


def rewrite(data: bytes, **changes: object) -> bytes:
    """An object with other header fields and a header checksum that fits them."""
    header = decode_header(data)
    rest = data[header.header_nbytes :]
    return encode_header(msgspec.structs.replace(header, **changes)) + rest


def test_good_object(run: Run, store: Store) -> None:
    """The whole document of an object with nothing wrong, payload read."""
    put_manifest(store, LAYOUT)
    put(store, KEY, DATA)
    sums = [
        f"{checksum(DATA[start : start + LAYER_NBYTES]):016x}"
        for start in (HEADER_NBYTES, HEADER_NBYTES + LAYER_NBYTES)
    ]
    outcome = run("inspect", store.uri, KEY, "--verify", "--json")
    assert outcome.json == {
        "store": store.uri,
        "key": KEY,
        "kind": "object",
        "nbytes": HEADER_NBYTES + 2 * LAYER_NBYTES,
        "is_layout_known": True,
        "is_payload_verified": True,
        "header": {
            "format_version": 1,
            "format_minor": 0,
            "header_nbytes": HEADER_NBYTES,
            "object_nbytes": HEADER_NBYTES + 2 * LAYER_NBYTES,
            "required_features": "0000000000000000",
            "optional_features": "0000000000000001",
            "fingerprint": fingerprint(LAYOUT).hex(),
            "write_id": WRITE_ID.hex(),
            "groups": [0],
            "shard": {"layer": 0, "head": 0, "context": 0},
            "num_tokens": 16,
            "block_hash": BLOCK_HASH.hex(),
            "has_checksums": True,
            "is_complete": True,
            "group_layers": [
                {
                    "group": 0,
                    "first_layer": 0,
                    "num_layers": 2,
                    "num_complete": 2,
                    "missing_layers": [],
                }
            ],
        },
        "ranges": [
            {
                "group": 0,
                "layer": layer,
                "offset": HEADER_NBYTES + layer * LAYER_NBYTES,
                "nbytes": LAYER_NBYTES,
                "checksum": sums[layer],
                "found": sums[layer],
                "status": "ok",
            }
            for layer in (0, 1)
        ],
        "problems": [],
    }
    assert outcome.code == 0


def test_payload_is_read_only_on_demand(run: Run, store: Store) -> None:
    """Without --verify a damaged payload isn't seen, and isn't called verified."""
    put_manifest(store, LAYOUT)
    put(store, KEY, flip(DATA, -1))
    outcome = run("inspect", store.uri, KEY, "--json")
    assert outcome.json["is_payload_verified"] is False
    assert [row["status"] for row in outcome.json["ranges"]] == ["unread", "unread"]
    assert (outcome.json["problems"], outcome.code) == ([], 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_damaged_layer(run: Run, store: Store, layer: int) -> None:
    """One wrong byte is found in its layer, the other layer stays fine."""
    put_manifest(store, LAYOUT)
    damaged = flip(DATA, HEADER_NBYTES + layer * LAYER_NBYTES)
    put(store, KEY, damaged)
    outcome = run("inspect", store.uri, KEY, "--verify", "--json")
    row = outcome.json["ranges"][layer]
    start = row["offset"]
    assert row["status"] == "mismatch"
    assert row["found"] == f"{checksum(damaged[start : start + LAYER_NBYTES]):016x}"
    assert outcome.json["ranges"][1 - layer]["status"] == "ok"
    assert reasons(outcome.json) == ["checksum_mismatch"]
    assert f"layer {layer}" in outcome.json["problems"][0]["detail"]
    assert outcome.code == 1


def test_large_object_is_read_in_pieces(run: Run, store: Store) -> None:
    """A layer of several read pieces has the checksum of the whole, wherever it is damaged."""
    layout = make_layout(head_shards=1)
    group = layout.groups[0]
    parts = tuple(
        msgspec.structs.replace(c, sizes=(4, 16, 16384), nbytes=4 * 16 * 16384 * 2)
        for c in group.layers[0].components
    )
    layers = (msgspec.structs.replace(group.layers[0], components=parts), group.layers[1])
    layout = msgspec.structs.replace(
        layout, groups=(msgspec.structs.replace(group, layers=layers), layout.groups[1])
    )
    put_manifest(store, layout)
    good, bad = make_object(layout), make_object(layout, block_hash(1))
    put(store, *good)
    put(store, bad[0], flip(bad[1], 3 << 20))
    assert run("inspect", store.uri, good[0], "--verify").code == 0
    outcome = run("inspect", store.uri, bad[0], "--verify", "--json")
    assert [row["status"] for row in outcome.json["ranges"]] == ["mismatch", "ok"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: make_object(make_layout(weights="other")), "wrong_fingerprint"),
        (lambda: make_object(LAYOUT, object_index=1), "wrong_groups"),
        (lambda: make_object(LAYOUT, block_hash(1)), "wrong_block"),
        (lambda: (KEY, rewrite(DATA, shard=Shard(0, 3, 0))), "wrong_shard"),
        (lambda: (KEY, rewrite(DATA, num_tokens=8)), "wrong_tokens"),
        (lambda: (KEY, DATA + b"x"), "wrong_size"),
        (
            lambda: (KEY, rewrite(DATA, spans=(GroupSpan(0, 0, 2, 0b01),))),
            "incomplete",
        ),
        (lambda: (KEY, rewrite(DATA, required_features=2)), "header_feature"),
        (lambda: (KEY, b"X" + DATA[1:]), "header_magic"),
        (lambda: (KEY, DATA[:8] + b"\x02\x00" + DATA[10:]), "header_version"),
        (lambda: (KEY, flip(DATA, 100)), "header_checksum"),
        (lambda: (KEY, DATA[:300]), "header_truncated"),
    ],
)
def test_wrong_object(
    run: Run, store: Store, other: Callable[[], tuple[str, bytes]], reason: str
) -> None:
    """Case 7 and the like: another object's bytes under a key, and broken headers, are named."""
    put_manifest(store, LAYOUT)
    put(store, KEY, other()[1])
    outcome = run("inspect", store.uri, KEY, "--json")
    assert (reasons(outcome.json), outcome.code) == ([reason], 1)


def test_incomplete_layer_is_not_judged(run: Run, store: Store) -> None:
    """A layer that was never written has no checksum to compare; it is called incomplete."""
    put_manifest(store, LAYOUT)
    put(store, KEY, rewrite(DATA, spans=(GroupSpan(0, 0, 2, 0b01),)))
    outcome = run("inspect", store.uri, KEY, "--verify", "--json")
    assert [row["status"] for row in outcome.json["ranges"]] == ["ok", "incomplete"]
    assert outcome.json["header"]["group_layers"][0]["missing_layers"] == [1]
    assert outcome.json["is_payload_verified"] is False


def test_without_manifest(run: Run, store: Store) -> None:
    """Without a manifest the header is still checked against the key, and completeness too."""
    put(store, KEY, rewrite(DATA, spans=(GroupSpan(0, 0, 2, 0b01),)))
    outcome = run("inspect", store.uri, KEY, "--json")
    assert reasons(outcome.json) == ["not_found", "incomplete"]
    assert (outcome.json["is_layout_known"], outcome.code) == (False, 1)


def test_object_is_missing(run: Run, store: Store) -> None:
    """A key with no object is a finding about that key."""
    put_manifest(store, LAYOUT)
    outcome = run("inspect", store.uri, KEY, "--json")
    assert (reasons(outcome.json), outcome.json["problems"][0]["key"]) == (["not_found"], KEY)
    assert (outcome.json["header"], outcome.code) == (None, 1)


def test_no_checksums(run: Run, store: Store) -> None:
    """An object without checksums is valid, but --verify can't vouch for it."""
    put_manifest(store, LAYOUT)
    put(store, *make_object(LAYOUT, has_checksums=False))
    plain = run("inspect", store.uri, KEY, "--json")
    assert (plain.json["header"]["has_checksums"], plain.code) == (False, 0)
    assert {row["checksum"] for row in plain.json["ranges"]} == {None}
    verified = run("inspect", store.uri, KEY, "--verify", "--json")
    assert (reasons(verified.json), verified.code) == (["checksum_absent"], 1)


def test_newer_minor_version(run: Run, store: Store) -> None:
    """Case 39: a newer minor with an unknown optional feature is read, and shown as what it is."""
    put_manifest(store, LAYOUT)
    header = decode_header(DATA)
    put(store, KEY, rewrite(DATA, minor=9, optional_features=header.optional_features | 1 << 40))
    outcome = run("inspect", store.uri, KEY, "--verify", "--json")
    assert outcome.json["header"]["format_minor"] == 9
    assert outcome.json["header"]["optional_features"] == "0000010000000001"
    assert (outcome.json["is_payload_verified"], outcome.code) == (True, 0)


def test_manifest_key(run: Run, store: Store) -> None:
    """The key of a manifest checks the manifest."""
    key = put_manifest(store, LAYOUT)
    outcome = run("inspect", store.uri, key, "--json")
    assert (outcome.json["kind"], outcome.json["is_layout_known"]) == ("manifest", True)
    assert (outcome.json["problems"], outcome.code) == ([], 0)
    store.remove([key])
    assert run("inspect", store.uri, key).code == 1


def test_text_and_json_find_the_same(run: Run, store: Store) -> None:
    """People see the reason code that programs see."""
    put_manifest(store, LAYOUT)
    put(store, KEY, flip(DATA, -1))
    outcome = run("inspect", store.uri, KEY, "--verify")
    assert "checksum_mismatch" in outcome.stdout
    assert outcome.code == 1
