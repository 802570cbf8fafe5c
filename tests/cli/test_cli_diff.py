"""``kvformat diff``: one command says why two servers don't share (case 36)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import Run
from cli_stores import make_layout, put, put_manifest

from kvformat.fingerprint import content_fingerprint, fingerprint, manifest
from kvformat.key import ManifestKey, format_key, layout_namespace, namespace_prefix
from kvformat.layout import Layout
from kvformat.stores import Store

A = make_layout()
B = make_layout(seed="ff", weights="revision-2")


def namespace(layout: Layout) -> str:
    return namespace_prefix(layout_namespace(layout)).removesuffix("/")


def save(path: Path, layout: Layout) -> str:
    path.write_bytes(manifest(layout))
    return str(path)


def fields(document: dict[str, list[dict[str, object]]]) -> list[tuple[object, ...]]:
    return [(d["field"], d["a"], d["b"]) for d in document["differences"]]


def test_equal_files(run: Run, tmp_path: Path) -> None:
    """Equal layouts exit 0, whatever the form of their files."""
    a, b = save(tmp_path / "a", A), str(tmp_path / "b")
    Path(b).write_text(json.dumps(json.loads(manifest(A)), indent=2))
    outcome = run("diff", a, b, "--json")
    side = {
        "tenant": "acme",
        "model": "org/model",
        "fingerprint": fingerprint(A).hex(),
        "content_fingerprint": content_fingerprint(A).hex(),
    }
    assert outcome.json == {
        "a": {"source": a, **side},
        "b": {"source": b, **side},
        "is_equal": True,
        "is_content_equal": True,
        "differences": [],
        "problems": [],
    }
    assert outcome.code == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tenant": "other"}, [("identity.tenant", "acme", "other")]),
        ({"model": "m"}, [("identity.model", "org/model", "m")]),
        ({"weights": "w"}, [("identity.weights", "revision-1", "w")]),
        ({"seed": "ff"}, [("hash.seed", "00", "ff")]),
        ({"head_shards": 4}, [("grid.head_shards", 1, 4)]),
        (
            {"dtype": "float16"},
            [
                ("identity.config.kv_cache_dtype", "bfloat16", "float16"),
                *(
                    (f"groups[{group}].layers[{run}].components[{c}].dtype", "bfloat16", "float16")
                    for group, run in ((0, "0..1"), (1, "0"))
                    for c in "kv"
                ),
            ],
        ),
    ],
)
def test_one_change(
    run: Run, tmp_path: Path, change: dict[str, str], expected: list[tuple[object, ...]]
) -> None:
    """Case 1: exactly the changed field is named, with both values; the exit code says 1."""
    a, b = save(tmp_path / "a", A), save(tmp_path / "b", make_layout(**change))
    outcome = run("diff", a, b, "--json")
    assert fields(outcome.json) == expected
    assert outcome.json["is_equal"] is False
    assert outcome.json["is_content_equal"] is ("head_shards" in change)
    assert outcome.code == 1
    text = run("diff", a, b)
    rows = [line.split() for line in text.stdout.splitlines()]
    for row in expected:
        assert [str(value) for value in row] in rows


def test_field_of_one_side(run: Run, tmp_path: Path) -> None:
    """A field that one side doesn't have at all is null there."""
    document = json.loads(manifest(A))
    document["identity"]["config"]["rope"] = "yarn"
    b = tmp_path / "b"
    b.write_text(json.dumps(document))
    outcome = run("diff", save(tmp_path / "a", A), str(b), "--json")
    assert fields(outcome.json) == [("identity.config.rope", None, "yarn")]


def test_two_namespaces_of_a_store(run: Run, store: Store) -> None:
    """Nothing but the store is needed where it holds two namespaces."""
    put_manifest(store, A)
    put_manifest(store, B)
    outcome = run("diff", "--store", store.uri, "--json")
    by_fingerprint = {outcome.json[side]["fingerprint"]: side for side in "ab"}
    a, b = by_fingerprint[fingerprint(A).hex()], by_fingerprint[fingerprint(B).hex()]
    assert [(d["field"], d[a], d[b]) for d in outcome.json["differences"]] == [
        ("identity.weights", "revision-1", "revision-2"),
        ("hash.seed", "00", "ff"),
    ]
    assert outcome.code == 1


@pytest.mark.parametrize(
    "reference",
    [
        namespace(B),
        namespace(B) + "/",
        namespace(B) + "/manifest",
        fingerprint(B).hex(),
        fingerprint(B).hex()[:8],
        namespace(B)[:-20],
    ],
)
def test_ways_to_name_a_namespace(run: Run, store: Store, reference: str) -> None:
    """A key, a namespace, a fingerprint, or the start of one name the same side; A is the other."""
    put_manifest(store, A)
    put_manifest(store, B)
    outcome = run("diff", "--store", store.uri, reference, "--json")
    assert outcome.json["a"]["fingerprint"] == fingerprint(B).hex()
    assert outcome.json["b"]["fingerprint"] == fingerprint(A).hex()
    assert outcome.code == 1
    assert run("diff", "--store", store.uri, reference, reference).code == 0


def test_tenant_and_model_name_a_namespace(run: Run, store: Store) -> None:
    """Names work as long as they mean one namespace."""
    put_manifest(store, A)
    put_manifest(store, make_layout(tenant="zeta", model="m"))
    for text in ("zeta", "m", "zeta/m"):
        outcome = run("diff", "--store", store.uri, "acme", text, "--json")
        assert fields(outcome.json) == [
            ("identity.tenant", "acme", "zeta"),
            ("identity.model", "org/model", "m"),
        ]


def test_file_against_store(run: Run, store: Store, tmp_path: Path) -> None:
    """A server's own manifest is compared with what the store holds."""
    put_manifest(store, A)
    file = save(tmp_path / "b", B)
    outcome = run("diff", "--store", store.uri, file, fingerprint(A).hex(), "--json")
    assert fields(outcome.json) == [
        ("identity.weights", "revision-2", "revision-1"),
        ("hash.seed", "ff", "00"),
    ]
    assert fields(run("diff", "--store", store.uri, file, "--json").json) == fields(outcome.json)


def test_ambiguous(run: Run, store: Store) -> None:
    """A name that means several namespaces is refused, and each of them is listed."""
    third = make_layout(tenant="zeta")
    for layout in (A, B, third):
        put_manifest(store, layout)
    outcome = run("diff", "--store", store.uri, "acme", "zeta")
    assert namespace(A) in outcome.stderr
    assert namespace(B) in outcome.stderr
    assert namespace(third) not in outcome.stderr
    assert outcome.code == 2


@pytest.mark.parametrize("arguments", [(), ("nothing-like-it",), ("acme",)])
def test_not_enough_said(run: Run, store: Store, arguments: tuple[str, ...]) -> None:
    """What can't be told from the store is asked for, with the choices listed."""
    layouts = (A, B, make_layout(tenant="zeta"))
    for layout in layouts:
        put_manifest(store, layout)
    outcome = run("diff", "--store", store.uri, *arguments)
    assert namespace(A) in outcome.stderr
    assert outcome.code == 2


def test_choices_say_what_tells_them_apart(run: Run, store: Store) -> None:
    """Beside each namespace stand its weights and dtype; one without a manifest is listed too."""
    for layout in (A, make_layout(weights="revision-2", dtype="float8_e4m3fn")):
        put_manifest(store, layout)
    put(store, format_key(ManifestKey(layout_namespace(make_layout(tenant="z")))), b"{}")
    lines = run("diff", "--store", store.uri).stderr.splitlines()
    ends = sorted(line.partition("  (")[2] for line in lines if "kvformat1/" in line)
    assert ends == [
        "no usable manifest)",
        "weights revision-1, bfloat16)",
        "weights revision-2, float8_e4m3fn)",
    ]


@pytest.mark.parametrize("arguments", [(), (namespace(A),)])
def test_one_namespace(run: Run, store: Store, arguments: tuple[str, ...]) -> None:
    """Nothing is asked for that couldn't be given."""
    put_manifest(store, A)
    outcome = run("diff", "--store", store.uri, *arguments)
    assert outcome.code == 2
    assert "one namespace only" in outcome.stderr
    assert namespace(A) in outcome.stderr


def test_empty_store(run: Run, store: Store) -> None:
    """A store without namespaces is wrong usage, not a difference."""
    assert run("diff", "--store", store.uri).code == 2


def test_usage(run: Run, tmp_path: Path) -> None:
    """Missing files and missing stores are wrong usage, never a difference."""
    a = save(tmp_path / "a", A)
    for arguments in ((), (a,), (a, str(tmp_path / "none")), (a, namespace(A)), (a, "kvformat1/x")):
        assert run("diff", *arguments).code == 2


def test_namespace_without_manifest(run: Run, store: Store) -> None:
    """A side without a usable manifest is a finding; no difference is claimed."""
    put_manifest(store, A)
    outcome = run("diff", "--store", store.uri, namespace(A), namespace(B), "--json")
    assert [p["reason"] for p in outcome.json["problems"]] == ["not_found"]
    assert (outcome.json["is_equal"], outcome.json["differences"]) == (None, None)
    assert outcome.code == 1
    put(store, format_key(ManifestKey(layout_namespace(B))), b"{}")
    outcome = run("diff", "--store", store.uri, "--json")
    assert [p["reason"] for p in outcome.json["problems"]] == ["manifest_field"]
    assert outcome.code == 1


def test_advice(run: Run, tmp_path: Path) -> None:
    """An operator is told what to set where two seeds differ."""
    a, b = save(tmp_path / "a", A), save(tmp_path / "b", make_layout(seed="ff"))
    assert "PYTHONHASHSEED" in run("diff", a, b).stdout
