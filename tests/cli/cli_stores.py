"""Stores with known content for the tests of the command."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import msgspec

from kvformat import components
from kvformat.checksum import checksum
from kvformat.fingerprint import manifest
from kvformat.header import encode_header, new_header
from kvformat.key import BlockKey, ManifestKey, Namespace, Shard, format_key, layout_namespace
from kvformat.layout import Component, Group, HashRecipe, Identity, Layer, Layout, ShardGrid
from kvformat.objectmap import ObjectMap
from kvformat.stores import Code, Store

BLOCK_HASH = bytes(range(32))
WRITE_ID = bytes.fromhex("00112233445566778899aabbccddeeff")


def make_layout(
    *,
    tenant: str = "acme",
    model: str = "org/model",
    weights: str = "revision-1",
    dtype: str = "bfloat16",
    head_shards: int = 1,
    seed: str = "00",
    layer_name: str = "layers.{}",
) -> Layout:
    """Two layers of split K and V with 4 heads, and one sliding-window layer, 16 tokens a block."""
    attention = components.split_attention(num_kv_heads=4, head_size=8, block_size=16, dtype=dtype)

    def layers(numbers: Sequence[int], parts: tuple[Component, ...]) -> tuple[Layer, ...]:
        return tuple(Layer(name=layer_name.format(n), components=parts) for n in numbers)

    return Layout(
        schema="kvformat/1",
        identity=Identity(
            tenant=tenant, model=model, weights=weights, config={"kv_cache_dtype": dtype}
        ),
        hash=HashRecipe(algorithm="sha256", seed=seed, block_size=16, digest_nbytes=32),
        groups=(
            Group(kind="full_attention", block_size=16, layers=layers((0, 2), attention)),
            Group(kind="sliding_window", block_size=16, window=64, layers=layers((1,), attention)),
        ),
        objects=((0,), (1,)),
        grid=ShardGrid(head_shards=head_shards, layer_starts=((0,), (0,))),
    )


def block_hash(number: int) -> bytes:
    """The hash of a made-up block."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def make_object(
    layout: Layout,
    block: bytes = BLOCK_HASH,
    *,
    object_index: int = 0,
    shard: Shard | None = None,
    has_checksums: bool = True,
    **changes: object,
) -> tuple[str, bytes]:
    """The key and bytes of a whole object, its header fields changed as told."""
    object_map = ObjectMap(layout, object_index, Shard() if shard is None else shard)
    namespace = layout_namespace(layout)
    payload = random.Random(0).randbytes(object_map.nbytes - object_map.header_nbytes)
    start = object_map.header_nbytes
    sums = [
        checksum(payload[r.offset - start : r.offset - start + r.nbytes]) for r in object_map.layers
    ]
    header = new_header(
        object_map, namespace.fingerprint, block, WRITE_ID, sums if has_checksums else None
    )
    header = msgspec.structs.replace(header, **changes)
    key = format_key(BlockKey(namespace, object_map.group_bitmap, object_map.shard, block))
    return key, encode_header(header) + payload


def put(store: Store, key: str, data: bytes) -> str:
    """Store bytes under a key that is free."""
    assert store.put(key, data) == Code.OK
    return key


def put_manifest(store: Store, layout: Layout, namespace: Namespace | None = None) -> str:
    """Store a layout's manifest, under its own namespace or another."""
    key = ManifestKey(layout_namespace(layout) if namespace is None else namespace)
    return put(store, format_key(key), manifest(layout))


def put_blocks(store: Store, layout: Layout, num_blocks: int) -> list[str]:
    """Store a manifest and the first object of some blocks; the keys of the objects."""
    put_manifest(store, layout)
    return [put(store, *make_object(layout, block_hash(n))) for n in range(num_blocks)]
