"""``kvformat describe``: each kind of target, with and without its layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run
from cli_stores import BLOCK_HASH, make_layout, make_object, put, put_blocks, put_manifest

from kvformat.fingerprint import content_fingerprint, fingerprint, manifest
from kvformat.key import ManifestKey, Namespace, Shard, format_key, layout_namespace
from kvformat.stores import Store

LAYOUT = make_layout(tenant="a/b", model="org/model", head_shards=2)
FINGERPRINT = fingerprint(LAYOUT).hex()
NAMESPACE = f"kvformat1/a%2Fb/org%2Fmodel/{FINGERPRINT}"
SHARD = Shard(0, 1, 0)
KEY = f"{NAMESPACE}/g0000000000000001/l0000h0001c0000/{BLOCK_HASH.hex()}"

#: Header of 2 layers in one group: 192 + 16 + 8 + 3 * 8 * 2 + 8 = 272, aligned to 64. A shard has
#: 2 of 4 heads: 2 * 16 tokens * 8 channels * 2 bytes.
HEADER_NBYTES, PART_NBYTES = 320, 512
OBJECT = {
    "nbytes": 320 + 4 * 512,
    "header_nbytes": 320,
    "num_tokens": 16,
    "ranges": [
        {"group": 0, "layer": layer, "component": name, "offset": offset, "nbytes": 512}
        for layer, name, offset in (
            (0, "k", 320),
            (0, "v", 832),
            (1, "k", 1344),
            (1, "v", 1856),
        )
    ],
}

KEY_DOCUMENT = {
    "kind": "object_key",
    "target": KEY,
    "format_version": 1,
    "tenant": "a/b",
    "model": "org/model",
    "fingerprint": FINGERPRINT,
    "content_fingerprint": None,
    "groups": [0],
    "shard": {"layer": 0, "head": 1, "context": 0},
    "block_hash": BLOCK_HASH.hex(),
    "manifest_key": f"{NAMESPACE}/manifest",
    "layout": None,
    "object": None,
    "objects": None,
    "header": None,
    "problems": [],
}


@pytest.fixture
def manifest_file(tmp_path: Path) -> str:
    path = tmp_path / "manifest.json"
    path.write_bytes(manifest(LAYOUT))
    return str(path)


def reasons(document: dict[str, list[dict[str, str]]]) -> list[str]:
    return [problem["reason"] for problem in document["problems"]]


def test_key_alone(run: Run) -> None:
    """A key explains itself without a store, in full and exactly."""
    outcome = run("describe", KEY, "--json")
    assert outcome.json == KEY_DOCUMENT
    assert outcome.code == 0


def test_key_with_layout(run: Run, store: Store, manifest_file: str) -> None:
    """A layout file and a store's manifest give one and the same whole object map."""
    put_manifest(store, LAYOUT)
    expected = {
        **KEY_DOCUMENT,
        "content_fingerprint": content_fingerprint(LAYOUT).hex(),
        "layout": json.loads(manifest(LAYOUT)),
        "object": OBJECT,
    }
    for source in (("--store", store.uri), ("--layout", manifest_file)):
        outcome = run("describe", KEY, *source, "--json")
        assert outcome.json == expected
        assert outcome.code == 0


def test_text_shows_each_range(run: Run, manifest_file: str) -> None:
    """The table for people has the row of each component, with names, offset and size."""
    outcome = run("describe", KEY, "--layout", manifest_file)
    rows = [line.split() for line in outcome.stdout.splitlines()]
    for entry in OBJECT["ranges"]:
        name = f"layers.{2 * entry['layer']}"
        shape = ["bfloat16", "2", "x", "16", "x", "8"]
        row = ["0", str(entry["layer"]), name, entry["component"], *shape]
        assert [*row, str(entry["offset"]), str(entry["nbytes"])] in rows


@pytest.mark.parametrize("target", [f"{NAMESPACE}/manifest", NAMESPACE, f"{NAMESPACE}/"])
def test_namespace(run: Run, store: Store, target: str) -> None:
    """A namespace, by manifest key or prefix, lists every object that a block of it has."""
    put_manifest(store, LAYOUT)
    outcome = run("describe", target, "--store", store.uri, "--json")
    document = outcome.json
    assert document["kind"] == ("manifest_key" if target.endswith("manifest") else "namespace")
    assert (document["groups"], document["shard"], document["object"]) == ([0, 1], None, None)
    # One layer more in group 0 costs its ranges; the second group's header is 256 bytes.
    assert [
        (o["groups"], o["shard"]["head"], o["nbytes"], o["header_nbytes"])
        for o in document["objects"]
    ] == [
        ([0], 0, 2368, 320),
        ([0], 1, 2368, 320),
        ([1], 0, 1280, 256),
        ([1], 1, 1280, 256),
    ]
    assert outcome.code == 0


def test_manifest_file(run: Run, manifest_file: str) -> None:
    """A manifest file is explained like its namespace."""
    outcome = run("describe", manifest_file, "--json")
    document = outcome.json
    assert (document["kind"], document["fingerprint"]) == ("manifest_file", FINGERPRINT)
    assert (document["tenant"], document["model"]) == ("a/b", "org/model")
    assert document["layout"] == json.loads(manifest(LAYOUT))
    assert outcome.code == 0


def test_manifest_file_that_is_not_canonical(run: Run, tmp_path: Path) -> None:
    """An indented manifest is explained, and its form reported."""
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(manifest(LAYOUT)), indent=1))
    outcome = run("describe", str(path), "--json")
    assert outcome.json["fingerprint"] == FINGERPRINT
    assert reasons(outcome.json) == ["manifest_canonical"]
    assert outcome.code == 1


def test_object_file(run: Run, store: Store, tmp_path: Path, manifest_file: str) -> None:
    """An object in a file shows its header; a layout, given or found by fingerprint, its map."""
    path = tmp_path / "object"
    path.write_bytes(make_object(LAYOUT, shard=SHARD)[1])
    alone = run("describe", str(path), "--json")
    assert (alone.json["kind"], alone.json["tenant"]) == ("object_file", None)
    assert alone.json["fingerprint"] == FINGERPRINT
    assert alone.json["block_hash"] == BLOCK_HASH.hex()
    assert alone.json["header"]["object_nbytes"] == OBJECT["nbytes"]
    assert (alone.json["object"], alone.code) == (None, 0)
    put_manifest(store, LAYOUT)
    for source in (("--store", store.uri), ("--layout", manifest_file)):
        outcome = run("describe", str(path), *source, "--json")
        assert outcome.json["object"] == OBJECT
        assert outcome.json["manifest_key"] == f"{NAMESPACE}/manifest"
        assert (outcome.json["tenant"], outcome.code) == ("a/b", 0)


def test_object_file_of_another_layout(run: Run, store: Store, tmp_path: Path) -> None:
    """An object is not explained by a layout it isn't of."""
    path, layout_path = tmp_path / "object", tmp_path / "layout.json"
    path.write_bytes(make_object(make_layout(weights="other"))[1])
    layout_path.write_bytes(manifest(LAYOUT))
    outcome = run("describe", str(path), "--layout", str(layout_path), "--json")
    assert reasons(outcome.json) == ["wrong_fingerprint"]
    assert (outcome.json["object"], outcome.code) == (None, 1)
    outcome = run("describe", str(path), "--store", store.uri, "--json")
    assert (reasons(outcome.json), outcome.code) == (["not_found"], 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "header_truncated"),
        (b"nothing known, but long enough", "header_magic"),
        (make_object(LAYOUT)[1][:100], "header_truncated"),
        (make_object(LAYOUT)[1][:-1], "wrong_size"),
    ],
)
def test_broken_object_file(run: Run, tmp_path: Path, data: bytes, reason: str) -> None:
    """A file that is no whole object is a finding with its reason."""
    path = tmp_path / "object"
    path.write_bytes(data)
    outcome = run("describe", str(path), "--json")
    assert (reasons(outcome.json), outcome.code) == ([reason], 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "manifest_json"),
        (b"{}", "manifest_field"),
        (b'{"schema":"kvformat/2"}', "layout_schema"),
        (b'{"schema":1.5}', "manifest_number"),
    ],
)
def test_broken_manifest_file(run: Run, tmp_path: Path, data: bytes, reason: str) -> None:
    """A file that is no manifest, or another schema's, is a finding with its reason."""
    path = tmp_path / "manifest.json"
    path.write_bytes(data)
    outcome = run("describe", str(path), "--json")
    assert (outcome.json["error"]["reason"], outcome.code) == (reason, 1)
    assert run("describe", KEY, "--layout", str(path)).code == 1


def test_manifest_is_missing(run: Run, store: Store) -> None:
    """A key whose manifest the store lacks is explained as far as it goes, and that is said."""
    outcome = run("describe", KEY, "--store", store.uri, "--json")
    manifest_key = f"{NAMESPACE}/manifest"
    assert reasons(outcome.json) == ["not_found"]
    assert outcome.json["problems"][0]["key"] == manifest_key
    assert {**outcome.json, "problems": []} == KEY_DOCUMENT
    assert outcome.code == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xfe", "manifest_json"),
        (manifest(LAYOUT) + b"\n", "manifest_canonical"),
        (manifest(make_layout(weights="other")), "manifest_fingerprint"),
    ],
)
def test_manifest_is_corrupt(run: Run, store: Store, data: bytes, reason: str) -> None:
    """A manifest that isn't the namespace's own explains nothing; the reason is given."""
    key = put(store, f"{NAMESPACE}/manifest", data)
    outcome = run("describe", KEY, "--store", store.uri, "--json")
    assert reasons(outcome.json) == [reason]
    assert outcome.json["problems"][0]["key"] == key
    assert (outcome.json["object"], outcome.code) == (None, 1)


def test_manifest_under_another_tenant(run: Run, store: Store) -> None:
    """A manifest copied to another tenant's namespace has the fingerprint, and is still refused."""
    namespace = Namespace("mallory", "org/model", fingerprint(LAYOUT))
    put_manifest(store, LAYOUT, namespace)
    key = format_key(ManifestKey(namespace))
    outcome = run("describe", key, "--store", store.uri, "--json")
    assert (reasons(outcome.json), outcome.code) == (["manifest_fingerprint"], 1)


def test_layout_file_of_another_namespace(run: Run, tmp_path: Path) -> None:
    """A layout file that isn't the key's gives no map."""
    path = tmp_path / "other.json"
    path.write_bytes(manifest(make_layout(weights="other")))
    outcome = run("describe", KEY, "--layout", str(path), "--json")
    assert reasons(outcome.json) == ["manifest_fingerprint"]
    assert (outcome.json["object"], outcome.code) == (None, 1)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("g0000000000000001", "g0000000000000003", "wrong_groups"),
        ("h0001", "h0002", "wrong_shard"),
        (BLOCK_HASH.hex(), "00ff", "key_hash"),
    ],
)
def test_key_that_its_layout_cannot_have(
    run: Run, store: Store, old: str, new: str, reason: str
) -> None:
    """Groups, a shard and a hash length that the layout doesn't have are findings."""
    put_manifest(store, LAYOUT)
    outcome = run("describe", KEY.replace(old, new), "--store", store.uri, "--json")
    assert (reasons(outcome.json), outcome.code) == ([reason], 1)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (KEY.replace("kvformat1", "kvformat2"), "key_version"),
        (KEY.replace("kvformat1", "kvformat0"), "key_format"),
        (KEY + "/x", "key_format"),
        (KEY + "g", "key_hash"),
        (KEY.replace("/g0", "/G0"), "key_groups"),
        (KEY.replace("h0001", "h1"), "key_shard"),
        (KEY.replace(FINGERPRINT, "ab"), "key_fingerprint"),
        (KEY.replace("a%2Fb", "a%2fb"), "key_text"),
        (KEY + "00" * 70000, "key_length"),
        ("model@tp0@0123abcd", "key_format"),
        ("", "key_format"),
    ],
)
def test_text_that_is_no_key(run: Run, key: str, reason: str) -> None:
    """What isn't a key of this version is a finding that names the part; nothing is guessed."""
    outcome = run("describe", key, "--json")
    assert outcome.json == {"error": {"reason": reason, "detail": outcome.json["error"]["detail"]}}
    assert outcome.code == 1


def test_unknown_version_names_both(run: Run) -> None:
    """An operator reads which version was found and which is known."""
    outcome = run("describe", KEY.replace("kvformat1", "kvformat7"))
    assert "7" in outcome.stderr
    assert "knows 1" in outcome.stderr
    assert outcome.code == 1


@pytest.mark.parametrize("has_many_components", [False, True])
def test_huge_grid(run: Run, tmp_path: Path, has_many_components: bool) -> None:
    """A manifest that claims very many objects is explained at once, without their list."""
    fields = json.loads(manifest(LAYOUT))
    if has_many_components:
        layers = fields["groups"][0]["layers"]
        layers += [{**layers[0], "name": f"more {i}"} for i in range(300)]
        fields["grid"].update(head_shards=64, context_shards=32)
    else:
        fields["grid"].update(head_shards=256, context_shards=256)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(fields, sort_keys=True, separators=(",", ":")))
    outcome = run("describe", str(path), "--json")
    assert (outcome.json["objects"], outcome.json["groups"]) == (None, [0, 1])
    assert outcome.code == 0


def test_two_sources(run: Run, store: Store, manifest_file: str) -> None:
    """Two places for one layout is wrong usage."""
    assert run("describe", KEY, "--store", store.uri, "--layout", manifest_file).code == 2


def test_key_taken_from_ls(run: Run, store: Store) -> None:
    """Case 35: what ls prints, describe explains."""
    keys = put_blocks(store, LAYOUT, 2)
    listed = run("ls", store.uri, "--keys").stdout.splitlines()
    assert sorted(listed) == sorted([*keys, format_key(ManifestKey(layout_namespace(LAYOUT)))])
    for key in listed:
        assert run("describe", key, "--store", store.uri).code == 0


@pytest.mark.parametrize("target", [NAMESPACE, f"{NAMESPACE}/manifest", KEY])
def test_manifest_for_diff(
    run_process: Run, file_store: Store, tmp_path: Path, target: str
) -> None:
    """--manifest writes what the store holds, byte for byte, and diff takes it."""
    put_manifest(file_store, LAYOUT)
    outcome = run_process("describe", target, "--store", file_store.uri, "--manifest")
    assert (outcome.code, outcome.stdout.encode()) == (0, manifest(LAYOUT))
    file = tmp_path / "a.json"
    file.write_text(outcome.stdout)
    assert run_process("diff", str(file), str(file)).code == 0


def test_manifest_on_a_terminal(run_terminal: Run, manifest_file: str) -> None:
    """There it is indented, and diff would take that as well."""
    outcome = run_terminal("describe", manifest_file, "--manifest")
    assert (outcome.code, outcome.json) == (0, json.loads(manifest(LAYOUT)))
    assert outcome.stdout.startswith("{\n")


def test_no_manifest_to_write(run: Run, store: Store, manifest_file: str) -> None:
    """Nothing is written: not without a source, not where it is missing, not as two documents."""
    assert run("describe", NAMESPACE, "--manifest")[:2] == (2, "")
    missing = run("describe", NAMESPACE, "--manifest", "--store", store.uri)
    assert missing[:2] == (1, "")
    assert "not_found" in missing.stderr
    assert run("describe", manifest_file, "--manifest", "--json").code == 2
