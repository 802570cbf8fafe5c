"""``kvformat ls``: whose objects are in the store (case 35)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from cli_runs import Run
from cli_stores import block_hash, make_layout, make_object, put, put_blocks

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.fingerprint import content_fingerprint, fingerprint
from kvformat.key import layout_namespace, namespace_prefix
from kvformat.layout import Layout
from kvformat.stores import Store
from kvformat.stores.memory import MemoryStore

BF16 = make_layout()
FP8 = make_layout(dtype="float8_e4m3fn")
#: Header 320; 2 layers of k and v with 4 * 16 * 8 elements.
BF16_NBYTES, FP8_NBYTES = 320 + 4 * 1024, 320 + 4 * 512


def namespace(layout: Layout) -> str:
    return namespace_prefix(layout_namespace(layout)).removesuffix("/")


def entry(layout: Layout, dtype: str, num_objects: int, nbytes: int) -> dict[str, object]:
    return {
        "namespace": namespace(layout),
        "tenant": "acme",
        "model": "org/model",
        "fingerprint": fingerprint(layout).hex(),
        "content_fingerprint": content_fingerprint(layout).hex(),
        "weights": "revision-1",
        "adapter": "",
        "dtypes": [dtype],
        "block_sizes": [16],
        "num_layers": 3,
        "num_objects": num_objects,
        "nbytes": nbytes,
    }


def test_rollout(run: Run, store: Store) -> None:
    """Case 3: a bf16 and an fp8 server's namespaces are two, each with its own objects."""
    put_blocks(store, BF16, 3)
    keys = put_blocks(store, FP8, 2)
    outcome = run("ls", store.uri, "--json")
    entries = [
        entry(BF16, "bfloat16", 3, 3 * BF16_NBYTES),
        entry(FP8, "float8_e4m3fn", 2, 2 * FP8_NBYTES),
    ]
    assert outcome.json == {
        "store": store.uri,
        "prefix": "",
        "namespaces": sorted(entries, key=lambda e: str(e["fingerprint"])),
        "num_objects": 5,
        "nbytes": 3 * BF16_NBYTES + 2 * FP8_NBYTES,
        "num_foreign_keys": 0,
        "problems": [],
    }
    assert outcome.code == 0
    store.remove([*keys, f"{namespace(FP8)}/manifest"])
    assert run("ls", store.uri, "--json").json["namespaces"] == [entries[0]]


def test_table(run: Run, store: Store) -> None:
    """People see one row a namespace, with everything that tells two apart."""
    put_blocks(store, BF16, 3)
    rows = [line.split() for line in run("ls", store.uri).stdout.splitlines()]
    digest = fingerprint(BF16).hex()
    assert ["org/model", "acme", "revision-1", "bfloat16", "16", "3", "12.9", "KiB", digest] in rows


def test_short_identities(run: Run, store: Store) -> None:
    """Digests of weights and adapter are short in the table, so that a row can be read; JSON has
    them whole."""
    layout = make_layout(weights=f"digest:{'0f' * 32}")
    adapter = f"digest:{'014b8145' * 8} is_3d_lora_weight=True fully_sharded_loras=False"
    identity = msgspec.structs.replace(layout.identity, adapter=adapter)
    put_blocks(store, msgspec.structs.replace(layout, identity=identity), 1)
    row = run("ls", store.uri).stdout.splitlines()[1]
    assert "digest:0f0f0f0f... + adapter:014b8145...  bfloat16" in row
    assert len(row) < 140
    assert run("ls", store.uri, "--json").json["namespaces"][0]["adapter"] == adapter


@pytest.mark.parametrize(
    ("num_blocks", "total"), [(1, "1 namespace, 1 object, "), (2, "1 namespace, 2 objects, ")]
)
def test_numbers_and_words_agree(run: Run, store: Store, num_blocks: int, total: str) -> None:
    """One is no plural."""
    put_blocks(store, BF16, num_blocks)
    assert total in run("ls", store.uri).stdout


def test_prefix(run: Run, store: Store) -> None:
    """A prefix restricts the list to one tenant."""
    put_blocks(store, BF16, 1)
    put_blocks(store, make_layout(tenant="zeta"), 2)
    outcome = run("ls", store.uri, "kvformat1/zeta/", "--json")
    assert [e["tenant"] for e in outcome.json["namespaces"]] == ["zeta"]
    assert outcome.json["num_objects"] == 2


def test_empty_store(run: Run, store: Store) -> None:
    """An empty store is fine and shows nothing."""
    outcome = run("ls", store.uri, "--json")
    assert (outcome.json["namespaces"], outcome.json["nbytes"], outcome.code) == ([], 0, 0)


def test_foreign_keys(run: Run, store: Store) -> None:
    """Keys of other programs and other format versions are counted and otherwise left alone."""
    put_blocks(store, BF16, 1)
    for key in ("model@tp0@00ff", "kvformat2/a/b", "\x1b[31m"):
        put(store, key, b"x")
    outcome = run("ls", store.uri, "--json")
    assert (outcome.json["num_foreign_keys"], outcome.json["num_objects"]) == (3, 1)
    assert outcome.code == 0


def test_namespace_without_usable_manifest(run: Run, store: Store) -> None:
    """What only a manifest tells is null; the namespace is listed and the reason given."""
    put(store, *make_object(BF16))
    put(store, *make_object(FP8))
    put(store, f"{namespace(FP8)}/manifest", b"{}")
    outcome = run("ls", store.uri, "--json")
    assert {e["weights"] for e in outcome.json["namespaces"]} == {None}
    assert {p["key"]: p["reason"] for p in outcome.json["problems"]} == {
        f"{namespace(BF16)}/manifest": "not_found",
        f"{namespace(FP8)}/manifest": "manifest_field",
    }
    assert (outcome.json["num_objects"], outcome.code) == (2, 1)
    assert run("ls", store.uri).code == 1


def test_hybrid_model(run: Run, store: Store) -> None:
    """Objects of every group and shard count."""
    layout = make_layout(head_shards=2)
    put_blocks(store, layout, 1)
    put(store, *make_object(layout, block_hash(0), object_index=1))
    outcome = run("ls", store.uri, "--json")
    assert outcome.json["num_objects"] == 2
    assert outcome.json["nbytes"] == (320 + 4 * 512) + (256 + 2 * 512)


def test_keys(run: Run, store: Store) -> None:
    """--keys gives each key; with --json, one object a line with its size."""
    keys = put_blocks(store, BF16, 3)
    prefix = f"{namespace(BF16)}/g"
    assert sorted(run("ls", store.uri, prefix, "--keys").stdout.splitlines()) == sorted(keys)
    lines = run("ls", store.uri, prefix, "--keys", "--json").stdout.splitlines()
    assert {json.loads(line)["key"] for line in lines} == set(keys)
    assert {json.loads(line)["nbytes"] for line in lines} == {BF16_NBYTES}


def test_store_that_cannot_list(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that can't list its keys is no finding: the store's own words, and exit code 2."""

    def refuse(self: MemoryStore, prefix: str = "") -> Iterator[str]:
        raise StoreUnavailableError(Reason.STORE_UNSUPPORTED, "this store can't list")

    monkeypatch.setattr(MemoryStore, "list", refuse)
    for command in ("ls", "verify"):
        outcome = run(command, "memory://", "--json")
        assert outcome.json == {
            "error": {"reason": "store_unsupported", "detail": "this store can't list"}
        }
        assert outcome.code == 2
