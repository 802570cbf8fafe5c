"""Manifests: one layout has one spelling, and nothing else is one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from layout_strategies import layouts

from kvformat import (
    Identity,
    Layout,
    Reason,
    RemoteDataError,
    content_fingerprint,
    diff,
    fingerprint,
    manifest,
    parse_layout,
    parse_manifest,
)
from kvformat.fingerprint import canonical_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = TEXT | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.\-\[\]]{0,12}", fullmatch=True)


@st.composite
def described(draw: st.DrawFn) -> Layout:
    """A random layout with a random identity."""
    layout = draw(layouts())
    identity = Identity(
        tenant=draw(TEXT),
        model=draw(TEXT),
        weights=draw(TEXT.filter(bool)),
        adapter=draw(TEXT),
        config=draw(st.dictionaries(NAMES, VALUES, max_size=5)),
    )
    return Layout(
        identity=identity,
        hash=layout.hash,
        groups=layout.groups,
        objects=layout.objects,
        grid=layout.grid,
    )


def shuffled(value: object, order: random.Random) -> object:
    """The same JSON value with the fields of each object in another order."""
    if isinstance(value, dict):
        fields = list(value.items())
        order.shuffle(fields)
        return {name: shuffled(field, order) for name, field in fields}
    if isinstance(value, list):
        return [shuffled(item, order) for item in value]
    return value


@given(described(), st.randoms(use_true_random=False), st.sampled_from([None, 1, "\t"]))
def test_fields_in_any_order_are_one_manifest(
    layout: Layout, order: random.Random, indent: int | str | None
) -> None:
    """Any order and spacing in: the same bytes out, and the fingerprint that sha256sum gives."""
    data = manifest(layout)
    document = json.dumps(shuffled(json.loads(data), order), indent=indent).encode()

    found = parse_layout(document)

    assert manifest(found) == data
    assert fingerprint(found) == hashlib.sha256(data).digest()[:16]
    assert parse_manifest(data, fingerprint(layout)) == layout
    assert (
        data
        == json.dumps(
            json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
    )


def objects_in(value: object) -> list[dict[str, object]]:
    """Every object of a JSON value whose names the schema lists: all but ``config``."""
    found = [value] if isinstance(value, dict) else []
    below = value if isinstance(value, list) else []
    if isinstance(value, dict):
        below = [field for name, field in value.items() if name != "config"]
    return found + [inner for item in below for inner in objects_in(item)]


@given(described(), st.data())
def test_a_field_too_many_or_too_few_is_refused(layout: Layout, data: st.DataObject) -> None:
    """In every object of the manifest: an unknown field, or a missing one, is manifest_field."""
    fields = json.loads(manifest(layout))
    changed = data.draw(st.sampled_from(objects_in(fields)))
    if data.draw(st.booleans()):
        changed["remark"] = 1
    else:
        del changed[data.draw(st.sampled_from(sorted(changed)))]
    with pytest.raises(RemoteDataError) as raised:
        parse_manifest(canonical_json(fields))

    assert raised.value.reason is Reason.MANIFEST_FIELD


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts: unrelated, or equal in some of their parts, often in all."""
    a, other = draw(described()), draw(described())
    if draw(st.booleans()):
        return a, other
    identity = draw(st.sampled_from([a.identity, other.identity]))
    grid = msgspec.structs.replace(
        a.grid, head_shards=draw(st.sampled_from([a.grid.head_shards, 3]))
    )
    return a, msgspec.structs.replace(parse_layout(manifest(a)), identity=identity, grid=grid)


@given(pairs())
def test_diff_is_empty_exactly_for_equal_layouts(both: tuple[Layout, Layout]) -> None:
    """No difference means the same manifest, and the same manifest means no difference; the other
    way round the same fields have their values exchanged."""
    a, b = both
    there, back = diff(a, b), diff(b, a)

    assert (not there) == (manifest(a) == manifest(b))
    assert {(d.path, d.a, d.b) for d in there} == {(d.path, d.b, d.a) for d in back}


@given(pairs())
def test_the_content_fingerprint_leaves_out_the_grid_alone(both: tuple[Layout, Layout]) -> None:
    """Equal content fingerprints mean that only the shard grid may differ, and the reverse."""
    a, b = both
    only_grid = all(d.path.startswith("grid.") for d in diff(a, b))

    assert (content_fingerprint(a) == content_fingerprint(b)) == only_grid


def small_lists_or_objects(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    """A list or an object of a few values."""
    names = st.sampled_from(["name", "dtype", "layers", "kind", "x", "\u00e9"])
    return st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    small_lists_or_objects,
    max_leaves=20,
)


@given(described(), st.data())
def test_a_mutated_manifest_is_a_layout_or_remote_data_error(
    layout: Layout, data: st.DataObject
) -> None:
    """Any value in any place gives a layout that spells itself so, or a RemoteDataError."""
    fields = json.loads(manifest(layout))
    place = data.draw(st.sampled_from([o for o in objects_in(fields) if o]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(JSON)
    document = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    try:
        found = parse_manifest(document)
    except RemoteDataError:
        return
    assert manifest(found) == document


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"\xef\xbb\xbf{}")
@example(b'{"schema":"kvformat/1","schema":"kvformat/1"}')
@example(b'{"schema":"kvformat/2"}')
@example(b'{"schema":' + b"9" * 100_000 + b"}")
@example(b'{"schema":"kvformat/1","identity":{"tenant":"\\ud800"}}')
def test_any_bytes_are_a_layout_or_remote_data_error(data: bytes) -> None:
    """Bytes of any origin give nothing but a layout or a RemoteDataError."""
    for parse in (parse_layout, parse_manifest):
        with contextlib.suppress(RemoteDataError):
            assert isinstance(parse(data), Layout)
