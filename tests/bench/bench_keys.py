"""Keys of many blocks under many shards, against joining a prefix and a hash in hex."""

from __future__ import annotations

import random

from measure import best_us, report, row
from shapes import GQA, model

from kvformat import Shard, format_keys, key_prefix, layout_namespace

NUM_BLOCKS, NUM_SHARDS = 8192, 8

if __name__ == "__main__":
    namespace = layout_namespace(model(64, GQA, NUM_SHARDS))
    hashes = [random.Random(i).randbytes(32) for i in range(NUM_BLOCKS)]
    prefixes = [key_prefix(namespace, 1, Shard(0, head, 0)) for head in range(NUM_SHARDS)]

    def floor() -> list[list[str]]:
        """A prefix and a hash in hex, for each key."""
        texts = [h.hex() for h in hashes]
        return [[prefix + text for text in texts] for prefix in prefixes]

    def keys() -> list[list[str]]:
        """What a scheduler does for one request."""
        shards = [key_prefix(namespace, 1, Shard(0, head, 0)) for head in range(NUM_SHARDS)]
        return format_keys(shards, hashes)

    assert keys() == floor()
    found, lowest = best_us(keys, floor, number=1, rounds=60)
    name = f"keys, {NUM_BLOCKS} blocks x {NUM_SHARDS} shards"
    report("keys", [row(name, found / 1000, "ms", floor=lowest / 1000, at_most=1.2)])
