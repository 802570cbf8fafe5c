"""Each rule of a layout: broken alone, it is refused with its reason, by hand and in a manifest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from model_layouts import attention, group, layout, model

from kvformat import (
    Component,
    HashRecipe,
    Identity,
    Layer,
    Layout,
    LayoutError,
    ManifestError,
    Reason,
    RemoteDataError,
    ShardGrid,
    component,
    manifest,
    parse_layout,
    parse_manifest,
)
from kvformat.components import recurrent_state, split_attention
from kvformat.registry import DTYPE_BITS, MAX_MANIFEST_NBYTES, MAX_TEXT_NBYTES

BASE = model("sliding window beside full", head_shards=2, layer_starts=((0, 1), (0, 2)))
KV = BASE.groups[0].layers[0].components
SOME = KV[0]


def other(of: Any, **fields: Any) -> Any:
    """The same node with other fields: constructed, so that its rules are applied."""
    return type(of)(**{name: getattr(of, name) for name in of.__struct_fields__} | fields)


def reshaped(**fields: Any) -> Component:
    """A component of 4 x 16 x 6 bfloat16 with other fields."""
    return other(SOME, **fields)


#: What is wrong -> how to build it, and the reason.
BROKEN: dict[str, tuple[Callable[[], object], Reason]] = {
    "component name empty": (lambda: reshaped(name=""), Reason.LAYOUT_COMPONENT),
    "component name upper case": (lambda: reshaped(name="K"), Reason.LAYOUT_COMPONENT),
    "component name too long": (lambda: reshaped(name="k" * 64), Reason.LAYOUT_COMPONENT),
    "component name with a newline": (lambda: reshaped(name="k\n"), Reason.LAYOUT_COMPONENT),
    "dtype unknown": (lambda: reshaped(dtype="bf16"), Reason.LAYOUT_DTYPE),
    "no axes": (lambda: reshaped(axes=(), sizes=(), nbytes=2), Reason.LAYOUT_COMPONENT),
    "more sizes than axes": (lambda: reshaped(axes=("head", "token")), Reason.LAYOUT_COMPONENT),
    "nine axes": (
        lambda: reshaped(axes=tuple("abcdefghi"), sizes=(1,) * 9, nbytes=2),
        Reason.LAYOUT_COMPONENT),
    "axis twice": (lambda: reshaped(axes=("head", "head", "channel")), Reason.LAYOUT_COMPONENT),
    "axis name": (lambda: reshaped(axes=("head", "Token", "channel")), Reason.LAYOUT_COMPONENT),
    "size 0": (lambda: reshaped(sizes=(4, 0, 6), nbytes=0), Reason.LAYOUT_COMPONENT),
    "size negative": (lambda: reshaped(sizes=(-4, 16, -6), nbytes=768), Reason.LAYOUT_COMPONENT),
    "size a float": (lambda: reshaped(sizes=(4.0, 16, 6)), Reason.LAYOUT_COMPONENT),
    "size a bool": (
        lambda: reshaped(sizes=(True, 16, 6), nbytes=192), Reason.LAYOUT_COMPONENT),
    "size 2^53": (
        lambda: reshaped(sizes=(2**53, 16, 6), nbytes=2**53 * 192), Reason.LAYOUT_COMPONENT),
    "nbytes wrong": (lambda: reshaped(nbytes=767), Reason.LAYOUT_COMPONENT),
    "nbytes over the limit": (
        lambda: component("k", "int8", token=1 << 24, channel=1 << 24), Reason.LAYOUT_COMPONENT),
    "half a byte": (lambda: component("k", "int4", token=16, channel=3), Reason.LAYOUT_COMPONENT),
    "four bits, last axis cut": (
        lambda: component("k", "int4", channel=4, token=16), Reason.LAYOUT_COMPONENT),
    "layer without components": (
        lambda: Layer(name="l", components=()), Reason.LAYOUT_COMPONENT),
    "65 components": (
        lambda: Layer(name="l", components=tuple(reshaped(name=f"c{i}") for i in range(65))),
        Reason.LAYOUT_COMPONENT),
    "component twice": (lambda: Layer(name="l", components=(SOME, SOME)), Reason.LAYOUT_COMPONENT),
    "layer name not Unicode": (
        lambda: Layer(name="\ud800", components=KV), Reason.LAYOUT_COMPONENT),
    "group kind unknown": (lambda: group(KV, kind="attention"), Reason.LAYOUT_GROUP),
    "block size 0": (lambda: group(KV, block_size=0), Reason.LAYOUT_GROUP),
    "block size 2^32": (lambda: group(KV, block_size=1 << 32), Reason.LAYOUT_GROUP),
    "block size a float": (lambda: group(KV, block_size=16.0), Reason.LAYOUT_GROUP),  # type: ignore[arg-type]
    "window missing": (lambda: group(KV, kind="sliding_window"), Reason.LAYOUT_GROUP),
    "window where there is none": (lambda: group(KV, window=128), Reason.LAYOUT_GROUP),
    "window negative": (
        lambda: group(KV, kind="chunked_local", window=-1), Reason.LAYOUT_GROUP),
    "group without layers": (lambda: group(KV, 0), Reason.LAYOUT_GROUP),
    "16385 layers": (lambda: group(KV, 16385), Reason.LAYOUT_LIMIT),
    "layer name twice": (
        lambda: other(group(KV, 1), layers=group(KV, 1).layers * 2), Reason.LAYOUT_GROUP),
    "recurrent with tokens": (lambda: group(KV, kind="recurrent_state"), Reason.LAYOUT_GROUP),
    "tokens that don't divide the block": (lambda: group(KV, block_size=24), Reason.LAYOUT_GROUP),
    "more tokens than the block": (lambda: group(KV, block_size=8), Reason.LAYOUT_GROUP),
    "hash algorithm": (lambda: other(BASE.hash, algorithm="SHA-256"), Reason.LAYOUT_HASH),
    "seed not hex": (lambda: other(BASE.hash, seed="xy"), Reason.LAYOUT_HASH),
    "seed upper case": (lambda: other(BASE.hash, seed="AB"), Reason.LAYOUT_HASH),
    "seed of half a byte": (lambda: other(BASE.hash, seed="abc"), Reason.LAYOUT_HASH),
    "seed of 65 bytes": (lambda: other(BASE.hash, seed="00" * 65), Reason.LAYOUT_HASH),
    "hash block size 0": (lambda: other(BASE.hash, block_size=0), Reason.LAYOUT_HASH),
    "digest 0": (lambda: other(BASE.hash, digest_nbytes=0), Reason.LAYOUT_HASH),
    "digest 65": (lambda: other(BASE.hash, digest_nbytes=65), Reason.LAYOUT_HASH),
    "no weights": (lambda: other(BASE.identity, weights=""), Reason.LAYOUT_IDENTITY),
    "tenant not Unicode": (lambda: other(BASE.identity, tenant="\udfff"), Reason.LAYOUT_IDENTITY),
    "tenant missing": (lambda: other(BASE.identity, tenant=None), Reason.LAYOUT_IDENTITY),
    "model too long": (
        lambda: other(BASE.identity, model="é" * (MAX_TEXT_NBYTES // 2 + 1)),
        Reason.LAYOUT_IDENTITY),
    "config name": (lambda: other(BASE.identity, config={"a b": 1}), Reason.LAYOUT_IDENTITY),
    "config name empty": (lambda: other(BASE.identity, config={"": 1}), Reason.LAYOUT_IDENTITY),
    "config a float": (lambda: other(BASE.identity, config={"a": 0.5}), Reason.LAYOUT_IDENTITY),
    "config nothing": (lambda: other(BASE.identity, config={"a": None}), Reason.LAYOUT_IDENTITY),
    "config a list": (lambda: other(BASE.identity, config={"a": [1]}), Reason.LAYOUT_IDENTITY),
    "config 2^53": (lambda: other(BASE.identity, config={"a": 2**53}), Reason.LAYOUT_IDENTITY),
    "config -2^53": (lambda: other(BASE.identity, config={"a": -(2**53)}), Reason.LAYOUT_IDENTITY),
    "config text too long": (
        lambda: other(BASE.identity, config={"a": "x" * (MAX_TEXT_NBYTES + 1)}),
        Reason.LAYOUT_IDENTITY),
    "no head shards": (lambda: other(BASE.grid, head_shards=0), Reason.LAYOUT_GRID),
    "65537 head shards": (lambda: other(BASE.grid, head_shards=65537), Reason.LAYOUT_GRID),
    "65792 shards in all": (
        lambda: other(BASE.grid, head_shards=256, context_shards=257, layer_starts=((0,), (0,))),
        Reason.LAYOUT_LIMIT),
    "no context shards": (lambda: other(BASE.grid, context_shards=0), Reason.LAYOUT_GRID),
    "no interleave": (
        lambda: other(BASE.grid, context_shards=2, context_interleave=0), Reason.LAYOUT_GRID),
    "interleave of one shard": (
        lambda: other(BASE.grid, context_interleave=2), Reason.LAYOUT_GRID),
    "layer starts for no group": (lambda: other(BASE.grid, layer_starts=()), Reason.LAYOUT_GRID),
    "no layer shard": (lambda: other(BASE.grid, layer_starts=((), ())), Reason.LAYOUT_GRID),
    "other number of layer shards": (
        lambda: other(BASE.grid, layer_starts=((0,), (0, 1))), Reason.LAYOUT_GRID),
    "first layer shard not at 0": (
        lambda: other(BASE.grid, layer_starts=((1, 1), (0, 1))), Reason.LAYOUT_GRID),
    "layer shards that fall": (
        lambda: other(BASE.grid, layer_starts=((0, 2, 1), (0, 1, 2))), Reason.LAYOUT_GRID),
    "layer start a float": (
        lambda: other(BASE.grid, layer_starts=((0, 1.0), (0, 1))), Reason.LAYOUT_GRID),
    "layer starts for one group of two": (
        lambda: other(BASE, grid=ShardGrid(layer_starts=((0,),))), Reason.LAYOUT_GRID),
    "layer shard past the layers": (
        lambda: other(BASE, grid=ShardGrid(layer_starts=((0, 3), (0, 1)))), Reason.LAYOUT_GRID),
    "schema": (lambda: other(BASE, schema="kvformat/2"), Reason.LAYOUT_SCHEMA),
    "no groups": (lambda: layout([], layer_starts=((0,),)), Reason.LAYOUT_GROUP),
    "65 groups": (lambda: layout([attention(1, num_layers=1)] * 65), Reason.LAYOUT_LIMIT),
    "block of no whole hash block": (
        lambda: other(BASE, hash=other(BASE.hash, block_size=3)), Reason.LAYOUT_GROUP),
    "group in no object": (lambda: other(BASE, objects=((0,),)), Reason.LAYOUT_OBJECTS),
    "group in two objects": (
        lambda: other(BASE, objects=((0, 1), (1,))), Reason.LAYOUT_OBJECTS),
    "object of no group": (
        lambda: other(BASE, objects=((0,), (1,), ())), Reason.LAYOUT_OBJECTS),
    "object of an unknown group": (
        lambda: other(BASE, objects=((0,), (1,), (2,))), Reason.LAYOUT_OBJECTS),
    "object of group -1": (lambda: other(BASE, objects=((-1,), (0,))), Reason.LAYOUT_OBJECTS),
    "objects out of order": (lambda: other(BASE, objects=((1,), (0,))), Reason.LAYOUT_OBJECTS),
    "groups of an object out of order": (
        lambda: other(BASE, objects=((1, 0),)), Reason.LAYOUT_OBJECTS),
    "object of two block sizes": (
        lambda: layout(
            [attention(), group(recurrent_state(64), kind="recurrent_state", block_size=32)],
            objects=((0, 1),)),
        Reason.LAYOUT_OBJECTS),
    "object of too many layers": (
        lambda: layout([attention(1, 1, num_layers=9000)] * 2, objects=((0, 1),)),
        Reason.LAYOUT_LIMIT),
    "object of too many bytes": (
        lambda: layout([group((component("k", "int8", token=16, channel=1 << 43),), 3)]),
        Reason.LAYOUT_LIMIT),
    "state in unequal heads": (
        lambda: recurrent_state(10, num_heads=3), Reason.LAYOUT_COMPONENT),
    "axis order": (
        lambda: split_attention(
            num_kv_heads=1, head_size=2, block_size=16, dtype="int8", order="DNH"),  # type: ignore[arg-type]
        Reason.LAYOUT_COMPONENT),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_has_its_reason(name: str) -> None:
    """Case 9 among them: what a layout can't say is the author's error, with the rule's reason."""
    build, reason = BROKEN[name]
    with pytest.raises(LayoutError) as raised:
        build()

    assert raised.value.reason is reason


def test_every_layout_reason_is_tested() -> None:
    """No reason of a layout is without a rule here."""
    wanted = {reason for reason in Reason if reason.value.startswith("layout_")}

    assert {reason for _, reason in BROKEN.values()} == wanted


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_its_size(dtype: str) -> None:
    """Bytes follow from the registry's bits."""
    made = component("k", dtype, head=2, token=16, channel=4)

    assert made.nbytes * 8 == 2 * 16 * 4 * DTYPE_BITS[dtype]
    assert made.item_nbytes == max(1, DTYPE_BITS[dtype] // 8)


def test_unequal_layer_shards_may_be_empty() -> None:
    """A group may have no layer in some shard: others have."""
    made = layout([attention(num_layers=2), attention(num_layers=4)], layer_starts=((0, 2), (0, 0)))

    assert made.grid.layer_shards == 2


def fields_of(made: Layout) -> Any:
    """A layout as plain values to change."""
    return json.loads(manifest(made))


def encode(fields: object) -> bytes:
    """Canonical JSON of the test's own making."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def edit(path: str, value: object) -> bytes:
    """The manifest with one value replaced; ``path`` is dotted, numbers are list positions."""
    fields = fields_of(BASE)
    *way, last = path.split(".")
    place = fields
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    place[int(last) if last.isdigit() else last] = value
    return encode(fields)


FIRST = "groups.0.layers.0.components.0"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.MANIFEST_JSON),
        (b"{", Reason.MANIFEST_JSON),
        (b"\xff", Reason.MANIFEST_JSON),
        (b"\xef\xbb\xbf" + manifest(BASE), Reason.MANIFEST_JSON),
        (manifest(BASE) + b"x", Reason.MANIFEST_JSON),
        (b"[" * 100_000, Reason.MANIFEST_JSON),
        (edit("remark", json.loads("[" * 32 + "]" * 32)), Reason.MANIFEST_JSON),
        (b" " * (MAX_MANIFEST_NBYTES + 1), Reason.MANIFEST_JSON),
        (manifest(BASE).replace(b'"grid"', b'"grid":1,"grid"', 1), Reason.MANIFEST_JSON),
        (manifest(BASE).replace(b'"acme"', b'"\\ud800"'), Reason.MANIFEST_JSON),
        (manifest(BASE).replace(b'"acme"', b"NaN"), Reason.MANIFEST_JSON),
        (manifest(BASE).replace(b":16", b":16.0", 1), Reason.MANIFEST_NUMBER),
        (manifest(BASE).replace(b":16", b":1e1", 1), Reason.MANIFEST_NUMBER),
        (manifest(BASE).replace(b"10000", b"9007199254740992"), Reason.MANIFEST_NUMBER),
        (manifest(BASE).replace(b"10000", b"-0"), Reason.MANIFEST_NUMBER),
        (manifest(BASE).replace(b"10000", b"9" * 100_000), Reason.MANIFEST_NUMBER),
        (b"[]", Reason.MANIFEST_FIELD),
        (b"1", Reason.MANIFEST_FIELD),
        (b"{}", Reason.MANIFEST_FIELD),
        (edit("remark", "x"), Reason.MANIFEST_FIELD),
        (edit("schema", 1), Reason.MANIFEST_FIELD),
        (edit("groups", {}), Reason.MANIFEST_FIELD),
        (edit("groups.0.block_size", "16"), Reason.MANIFEST_FIELD),
        (edit("groups.0.block_size", True), Reason.MANIFEST_FIELD),
        (edit(f"{FIRST}.nbytes", None), Reason.MANIFEST_FIELD),
        (edit("identity.config.rope_theta", [1]), Reason.MANIFEST_FIELD),
        (edit("schema", "kvformat/2"), Reason.LAYOUT_SCHEMA),
        (edit(f"{FIRST}.dtype", "bf16"), Reason.LAYOUT_DTYPE),
        (edit(f"{FIRST}.nbytes", 1), Reason.LAYOUT_COMPONENT),
        (edit("groups.0.kind", "x"), Reason.LAYOUT_GROUP),
        (edit("hash.seed", "x"), Reason.LAYOUT_HASH),
        (edit("identity.weights", ""), Reason.LAYOUT_IDENTITY),
        (edit("grid.head_shards", 0), Reason.LAYOUT_GRID),
        (edit("objects", [[1], [0]]), Reason.LAYOUT_OBJECTS),
        (manifest(BASE) + b"\n", Reason.MANIFEST_CANONICAL),
        (b" " + manifest(BASE), Reason.MANIFEST_CANONICAL),
        (json.dumps(fields_of(BASE)).encode(), Reason.MANIFEST_CANONICAL),
        (manifest(BASE).replace(b'"acme"', b'"acm\\u0065"'), Reason.MANIFEST_CANONICAL),
    ],
    ids=range(38),
)
def test_each_rule_of_a_manifest_has_its_reason(data: bytes, reason: Reason) -> None:
    """Bytes from a store: refused as remote data, with the reason of the first rule broken."""
    with pytest.raises(RemoteDataError) as raised:
        parse_manifest(data)

    assert raised.value.reason is reason


def test_a_manifest_of_another_namespace_is_refused() -> None:
    """The fingerprint of the place where it was found must be its own."""
    with pytest.raises(RemoteDataError) as raised:
        parse_manifest(manifest(BASE), bytes(16))

    assert raised.value.reason is Reason.MANIFEST_FINGERPRINT


def test_fields_may_stand_in_any_order_only_in_a_document() -> None:
    """parse_layout reads any order; parse_manifest one alone."""
    document = json.dumps(dict(reversed(fields_of(BASE).items()))).encode()

    assert parse_layout(document) == BASE
    with pytest.raises(ManifestError):
        parse_manifest(document)


def test_text_of_all_planes_is_written_as_itself() -> None:
    """RFC 8785: no escapes but those that JSON needs."""
    identity = Identity(
        tenant='模型\u20ac\U0001f600"\\', model="\x00\n\x7f", weights="w", config={}
    )
    data = manifest(msgspec.structs.replace(BASE, identity=identity))

    assert '"tenant":"模型€😀\\"\\\\"'.encode() in data
    assert b'"model":"\\u0000\\n\x7f"' in data
    assert parse_manifest(data).identity == identity


def test_the_recipe_of_an_unseeded_hash_is_empty() -> None:
    """A seed is optional text, not null."""
    assert HashRecipe(algorithm="xxh3_64", seed="", block_size=1, digest_nbytes=8).seed == ""
