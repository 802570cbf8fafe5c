"""Cases 1 to 4, 8 and 10: what makes two layouts two namespaces, and how a difference reads."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest
from model_layouts import HASH, IDENTITY, group
from model_layouts import layout as make_layout

from kvformat import (
    BlockKey,
    Identity,
    Layout,
    Reason,
    Shard,
    UnsupportedVersionError,
    component,
    content_fingerprint,
    diff,
    fingerprint,
    format_key,
    layout_namespace,
    manifest,
    namespace_prefix,
    parse_layout,
    parse_manifest,
)
from kvformat.components import split_attention
from kvformat.stores import Code, open_store

CONFIG = {
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "quantization": "none",
    "rope_scaling": '{"factor":"4"}',
    "enforce_eager": False,
}
BASE: dict[str, Any] = {
    "tenant": "acme",
    "model": "org/model",
    "weights": "rev-1",
    "adapter": "",
    "block_size": 16,
    "num_layers": 4,
    "num_kv_heads": 8,
    "head_size": 128,
    "kv_dtype": "bfloat16",
    "window": 1024,
    "algorithm": "sha256_cbor",
    "seed": "00",
    "hash_block_size": 16,
    "digest_nbytes": 32,
    "head_shards": 2,
    "context_shards": 2,
    "context_interleave": 1,
    "layer_starts": ((0, 2),),
}


def describe(config: dict[str, Any] | None = None, **changes: Any) -> Layout:
    """The layout of a server with sliding-window layers, from what an operator would call it."""
    of = {**BASE, **changes}
    components = split_attention(
        num_kv_heads=of["num_kv_heads"],
        head_size=of["head_size"],
        block_size=of["block_size"],
        dtype=of["kv_dtype"],
    )
    return make_layout(
        [
            group(
                components,
                of["num_layers"],
                kind="sliding_window",
                window=of["window"],
                block_size=of["block_size"],
            )
        ],
        identity=Identity(
            tenant=of["tenant"],
            model=of["model"],
            weights=of["weights"],
            adapter=of["adapter"],
            config={**CONFIG, **(config or {})},
        ),
        hash_recipe=type(HASH)(
            algorithm=of["algorithm"],
            seed=of["seed"],
            block_size=of["hash_block_size"],
            digest_nbytes=of["digest_nbytes"],
        ),
        head_shards=of["head_shards"],
        context_shards=of["context_shards"],
        context_interleave=of["context_interleave"],
        layer_starts=of["layer_starts"],
    )


LAYERS = "groups[0].layers[0..3]"

#: What changes -> the changed layout, and each difference: path, value before, value after.
CHANGES = {
    "tenant": (describe(tenant="other"), [("identity.tenant", "acme", "other")]),
    "model name": (describe(model="org/model2"), [("identity.model", "org/model", "org/model2")]),
    "revision": (describe(weights="rev-2"), [("identity.weights", "rev-1", "rev-2")]),
    "adapter": (describe(adapter="lora-1"), [("identity.adapter", "", "lora-1")]),
    "dtype": (
        describe({"dtype": "float16"}), [("identity.config.dtype", "bfloat16", "float16")]),
    "KV cache dtype by name": (
        describe({"kv_cache_dtype": "fp8"}), [("identity.config.kv_cache_dtype", "auto", "fp8")]),
    "KV cache dtype in the bytes": (
        describe(kv_dtype="float16"),
        [(f"{LAYERS}.components[{c}].dtype", "bfloat16", "float16") for c in "kv"]),
    "quantisation": (
        describe({"quantization": "awq"}), [("identity.config.quantization", "none", "awq")]),
    "rope scaling": (
        describe({"rope_scaling": '{"factor":"8"}'}),
        [("identity.config.rope_scaling", '{"factor":"4"}', '{"factor":"8"}')]),
    "a value more": (describe({"extra": 1}), [("identity.config.extra", None, 1)]),
    "a flag, not a number": (
        describe({"enforce_eager": 0}), [("identity.config.enforce_eager", False, 0)]),
    "block size": (
        describe(block_size=32),
        [("groups[0].block_size", 16, 32)]
        + [(f"{LAYERS}.components[{c}].sizes.token", 16, 32) for c in "kv"]),
    "number of layers": (
        describe(num_layers=5), [("groups[0].layers[4]", None, "layers.4")]),
    "KV heads": (
        describe(num_kv_heads=4), [(f"{LAYERS}.components[{c}].sizes.head", 8, 4) for c in "kv"]),
    "head size": (
        describe(head_size=64),
        [(f"{LAYERS}.components[{c}].sizes.channel", 128, 64) for c in "kv"]),
    "sliding window": (describe(window=512), [("groups[0].window", 1024, 512)]),
    "hash algorithm": (
        describe(algorithm="xxhash"), [("hash.algorithm", "sha256_cbor", "xxhash")]),
    "hash seed": (describe(seed="01"), [("hash.seed", "00", "01")]),
    "hash block size": (describe(hash_block_size=8), [("hash.block_size", 16, 8)]),
    "hash length": (describe(digest_nbytes=16), [("hash.digest_nbytes", 32, 16)]),
    "head shards": (describe(head_shards=4), [("grid.head_shards", 2, 4)]),
    "context shards": (describe(context_shards=3), [("grid.context_shards", 2, 3)]),
    "context interleave": (
        describe(context_interleave=4), [("grid.context_interleave", 1, 4)]),
    "layer shards": (
        describe(layer_starts=((0, 1),)), [("grid.layer_starts", "[[0,2]]", "[[0,1]]")]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_case_1_one_field_changes_the_fingerprint_and_is_named(change: str) -> None:
    """Each field of its own changes the fingerprint; diff names it, with both values, alone."""
    changed, expected = CHANGES[change]

    assert fingerprint(changed) != fingerprint(describe())
    assert [(d.path, d.a, d.b) for d in diff(describe(), changed)] == expected
    assert [type(d.b) for d in diff(describe(), changed)] == [type(b) for _, _, b in expected]


def test_case_1_no_two_changes_share_a_namespace() -> None:
    """All of these layouts are pairwise different namespaces."""
    layouts = [describe(), *(changed for changed, _ in CHANGES.values())]

    assert len({fingerprint(layout) for layout in layouts}) == len(layouts)


def test_case_1_another_schema_major_is_another_namespace() -> None:
    """The schema's major is in the digest, and a reader of this one says why it can't read it."""
    other = manifest(describe()).replace(b'"kvformat/1"', b'"kvformat/2"')

    assert other != manifest(describe())
    with pytest.raises(UnsupportedVersionError) as raised:
        parse_manifest(other)
    assert raised.value.reason is Reason.LAYOUT_SCHEMA


def test_only_the_grid_is_left_out_of_the_content_fingerprint() -> None:
    """Peers with other parallel sizes compare equal; any other change still shows."""
    for change, (changed, differences) in CHANGES.items():
        same = content_fingerprint(changed) == content_fingerprint(describe())
        assert same == all(path.startswith("grid.") for path, _, _ in differences), change


def test_case_2_cache_dtypes_are_pairwise_different_namespaces() -> None:
    """bf16, fp16, both fp8 and int8 never meet, though three have the same sizes."""
    dtypes = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"]
    prefixes = [namespace_prefix(layout_namespace(describe(kv_dtype=d))) for d in dtypes]

    assert len(set(prefixes)) == len(dtypes)
    assert not any(a.startswith(b) or b.startswith(a) for a, b in combinations(prefixes, 2))


def test_case_3_deleting_one_of_two_rollout_namespaces_leaves_the_other() -> None:
    """A bf16 and an fp8 server on one store: no key in common; what one's prefix lists is all of
    its own objects, and removing those takes nothing of the other's."""
    store = open_store("memory://")
    names = [layout_namespace(describe(kv_dtype=d)) for d in ("bfloat16", "float8_e4m3fn")]
    keys = [
        [format_key(BlockKey(name, 1, Shard(), bytes([i]) * 32)) for i in range(3)]
        for name in names
    ]
    for key in chain.from_iterable(keys):
        assert store.put(key, b"data") == Code.OK

    listed = list(store.list(namespace_prefix(names[0])))
    assert sorted(listed) == keys[0]
    assert store.remove(listed) == [Code.OK] * 3
    assert sorted(store.list()) == keys[1]


def test_case_4_other_weights_of_one_name_are_another_namespace_of_that_tenant_alone() -> None:
    """After a weight update nothing of the old namespace is found; other tenants keep theirs."""
    before, after = describe(weights="v1"), describe(weights="v2")
    other = describe(tenant="other", weights="v1")
    old = namespace_prefix(layout_namespace(before))

    assert not namespace_prefix(layout_namespace(after)).startswith(old)
    assert not namespace_prefix(layout_namespace(other)).startswith(old)
    assert [d.path for d in diff(before, after)] == ["identity.weights"]
    assert [d.path for d in diff(before, other)] == ["identity.tenant"]


def test_case_8_one_layout_described_in_two_ways_has_one_fingerprint() -> None:
    """A group of equal layers from one description, and layer by layer from documents with their
    fields in another order."""
    components = (component("k", "bfloat16", head=2, token=16, channel=4),)
    merged = make_layout([group(components, 3)])
    layer = (
        '{"name":"layers.#","components":[{"sizes":[2,16,4],"nbytes":256,'
        '"axes":["head","token","channel"],"name":"k","dtype":"bfloat16"}]}'
    )
    layers = ",".join(layer.replace("#", str(i)) for i in range(3))
    single = parse_layout(
        b'{"objects":[[0]],"groups":[{"layers":[' + layers.encode() + b'],"window":0,'
        b'"block_size":16,"kind":"full_attention"}],"grid":{"layer_starts":[[0]],'
        b'"head_shards":1,"context_interleave":1,"context_shards":1},"hash":{"seed":"'
        + HASH.seed.encode()
        + b'","digest_nbytes":32,"block_size":16,"algorithm":"sha256_cbor"},"identity":{'
        b'"config":{"tied":true,"rope_theta":10000,"kv_cache_dtype":"bfloat16"},"adapter":"",'
        b'"weights":"sha256:5a0f","model":"org/model-7b","tenant":"acme"},"schema":"kvformat/1"}'
    )

    assert merged.identity == IDENTITY
    assert manifest(single) == manifest(merged)
    assert fingerprint(single) == fingerprint(merged)


def test_case_8_a_value_changed_on_the_way_to_a_worker_is_named() -> None:
    """Scheduler and worker compare fingerprints; the difference names the one value."""
    scheduler, worker = describe(), describe({"rope_scaling": "{}"})

    assert fingerprint(scheduler) != fingerprint(worker)
    assert [(d.path, d.a, d.b) for d in diff(scheduler, worker)] == [
        ("identity.config.rope_scaling", '{"factor":"4"}', "{}")
    ]


def test_case_10_packed_and_separate_k_and_v_of_one_shape_differ() -> None:
    """Two KV heads: with K and V packed beside each head the array has the same shape as with two
    planes, [2, 16, 2, 128] either way; the declared order tells them apart."""
    packed = component("kv", "bfloat16", head=2, token=16, kv=2, channel=128)
    planes = component("kv", "bfloat16", kv=2, token=16, head=2, channel=128)
    a, b = (make_layout([group((kv,))]) for kv in (packed, planes))

    assert packed.sizes == planes.sizes
    assert packed.nbytes == planes.nbytes
    assert fingerprint(a) != fingerprint(b)
    assert [d.path for d in diff(a, b)] == ["groups[0].layers[0..1].components[kv].axes"]


def test_the_order_of_components_is_part_of_a_layout() -> None:
    """The same components in another order are other bytes: another namespace, and one named
    difference a run of layers."""
    k, v = split_attention(num_kv_heads=2, head_size=4, block_size=16, dtype="bfloat16")
    a, b = make_layout([group((k, v), 3)]), make_layout([group((v, k), 3)])

    assert fingerprint(a) != fingerprint(b)
    assert [(d.path, d.a, d.b) for d in diff(a, b)] == [
        ("groups[0].layers[0..2].component_order", "k, v", "v, k")
    ]
