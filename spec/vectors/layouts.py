"""The layouts that the vectors are about, as plain JSON values."""

from __future__ import annotations

from math import prod

from model import BITS


def component(name: str, dtype: str, **sizes: int) -> dict:
    return {
        "name": name,
        "dtype": dtype,
        "axes": list(sizes),
        "sizes": list(sizes.values()),
        "nbytes": prod(sizes.values()) * BITS[dtype] // 8,
    }


def group(layers: list[list[dict]], kind="full_attention", block_size=4, window=0, name="layers"):
    return {
        "kind": kind,
        "block_size": block_size,
        "window": window,
        "layers": [
            {"name": f"model.{name}.{index}", "components": components}
            for index, components in enumerate(layers)
        ],
    }


def layout(
    groups: list[dict],
    *,
    objects=None,
    head_shards=1,
    context_shards=1,
    context_interleave=1,
    layer_starts=None,
    digest_nbytes=32,
    hash_block_size=4,
    tenant="",
    model="org/model",
    config=None,
) -> dict:
    return {
        "schema": "kvformat/1",
        "identity": {
            "tenant": tenant,
            "model": model,
            "weights": "sha256:0f1e2d3c",
            "adapter": "",
            "config": {"cache_config.cache_dtype": "auto"} if config is None else config,
        },
        "hash": {
            "algorithm": "sha256",
            "seed": "00ff",
            "block_size": hash_block_size,
            "digest_nbytes": digest_nbytes,
        },
        "groups": groups,
        "objects": [[index] for index in range(len(groups))] if objects is None else objects,
        "grid": {
            "head_shards": head_shards,
            "context_shards": context_shards,
            "context_interleave": context_interleave,
            "layer_starts": [[0]] * len(groups) if layer_starts is None else layer_starts,
        },
    }


def split(heads=2, tokens=4, channels=2, dtype="bfloat16") -> list[dict]:
    return [component(n, dtype, head=heads, token=tokens, channel=channels) for n in ("k", "v")]


def nhd(heads=2, tokens=4, channels=2, dtype="bfloat16") -> list[dict]:
    return [component(n, dtype, token=tokens, head=heads, channel=channels) for n in ("k", "v")]


def scales(names, heads=2, tokens=4) -> list[dict]:
    return [component(f"{name}_scale", "float32", head=heads, token=tokens) for name in names]


LATENT = [component("latent", "bfloat16", token=4, channel=4)]
ROPE = [component("rope", "bfloat16", token=4, channel=2)]
INDEXER = [
    component("indexer_k", "float8_e4m3fn", token=4, channel=4),
    component("indexer_scale", "float32", token=4),
]
STATE = [
    component("conv_state", "bfloat16", head=2, channel=3),
    component("ssm_state", "float32", head=2, channel=2),
]

#: name -> (what it is, layout)
LAYOUTS = {
    "gqa": ("split K and V, heads outermost", layout([group([split()] * 2)])),
    "gqa_heads": (
        "eight KV heads in four head shards",
        layout([group([split(heads=8, channels=1)] * 2)], head_shards=4),
    ),
    "gqa_few_heads": (
        "two KV heads in four head shards: shards 1 and 3 have no object",
        layout([group([split()])], head_shards=4),
    ),
    "gqa_uneven_heads": (
        "five KV heads in three head shards: 2, 2 and 1",
        layout([group([split(heads=5)])], head_shards=3),
    ),
    "gqa_nhd": ("tokens outermost, cut along heads", layout([group([nhd()])], head_shards=2)),
    "fused": (
        "K and V in one component with an axis 'kv' that is never cut",
        layout(
            [group([[component("kv", "float16", kv=2, head=2, token=4, channel=2)]])], head_shards=2
        ),
    ),
    "packed": (
        "K beside V along the last axis: the shape of 'fused', other bytes",
        layout(
            [group([[component("kv", "float16", head=2, token=4, kv=2, channel=2)]])], head_shards=2
        ),
    ),
    "mla_fused": (
        "latent and rope in one component, without heads: all in head shard 0",
        layout(
            [group([[component("latent_rope", "bfloat16", token=4, channel=6)]] * 2)], head_shards=2
        ),
    ),
    "mla_split": ("latent and rope apart", layout([group([LATENT + ROPE] * 2)])),
    "sparse": (
        "latent, rope, indexer keys and their scales in each layer",
        layout([group([LATENT + ROPE + INDEXER] * 2)]),
    ),
    "sparse_groups": (
        "attention and indexer as two groups that share an object",
        layout(
            [group([LATENT + ROPE] * 3), group([INDEXER] * 2, name="indexer")], objects=[[0, 1]]
        ),
    ),
    "sliding": (
        "full attention and sliding window, apart",
        layout([group([split()] * 2), group([split()] * 3, "sliding_window", window=8)]),
    ),
    "chunked": (
        "chunked local attention with a larger block beside full attention",
        layout(
            [
                group([split()]),
                group([split(tokens=8)], "chunked_local", block_size=8, window=16),
            ]
        ),
    ),
    "recurrent": (
        "attention beside recurrent state without tokens, in two head shards",
        layout(
            [group([split()]), group([STATE] * 2, "recurrent_state", block_size=8)], head_shards=2
        ),
    ),
    "fp8": (
        "fp8 keys and values with scales",
        layout([group([split(dtype="float8_e4m3fn") + scales("kv")])], head_shards=2),
    ),
    "int4": (
        "four-bit keys and values, two elements a byte, with scales",
        layout([group([split(dtype="int4", channels=8) + scales("kv")])], head_shards=2),
    ),
    "mixed": (
        "layers of other components and other head sizes beside each other",
        layout([group([split(channels=2), split(channels=4), LATENT + ROPE])], head_shards=2),
    ),
    "hybrid": (
        "four groups, two of them sharing an object, objects not in the order of groups",
        layout(
            [
                group([split()] * 2),
                group([split(heads=1)] * 2, "sliding_window", window=12),
                group([INDEXER] * 2, name="indexer"),
                group([STATE], "recurrent_state", block_size=16),
            ],
            objects=[[0, 2], [1], [3]],
            head_shards=2,
        ),
    ),
    "pipeline": (
        "eight layers in stages of five and three",
        layout([group([split(heads=1, channels=1)] * 8)], layer_starts=[[0, 5]]),
    ),
    "segments": (
        "layer shards of which one group has none: one empty in the middle, one at the end",
        layout(
            [group([LATENT] * 4), group([INDEXER] * 2, name="indexer")],
            objects=[[0, 1]],
            layer_starts=[[0, 1, 1, 3], [0, 2, 2, 2]],
        ),
    ),
    "context": (
        "tokens dealt one by one to two shards",
        layout([group([split()])], context_shards=2),
    ),
    "context_runs": (
        "tokens dealt in runs of two to three shards: the third has none",
        layout([group([split()])], context_shards=3, context_interleave=2),
    ),
    "all_cuts": (
        "cut along layers, heads and tokens at once, with a component without tokens",
        layout(
            [group([[*split(), component("k_scale", "float32", head=2)]] * 3)],
            head_shards=2,
            context_shards=2,
            layer_starts=[[0, 2]],
        ),
    ),
    "compressed": (
        "a component with one entry for four tokens, dealt by its own index",
        layout(
            [
                group(
                    [[component("latent", "bfloat16", token=4, channel=1), *split(tokens=16)]],
                    block_size=16,
                )
            ],
            context_shards=2,
        ),
    ),
    "many_layers": (
        "65 layers: two words of completeness",
        layout([group([[component("state", "uint8", byte=1)]] * 65)]),
    ),
    "hash8": ("block hashes of 8 bytes", layout([group([LATENT])], digest_nbytes=8)),
    "hash16": ("block hashes of 16 bytes", layout([group([LATENT])], digest_nbytes=16)),
    "worked": (
        "the worked object of section 13",
        layout(
            [group([split(heads=2, tokens=2, channels=1)], block_size=2)],
            hash_block_size=2,
            digest_nbytes=8,
            tenant="acme",
        ),
    ),
    "text": (
        "free text of every kind in the identity",
        layout(
            [group([LATENT])],
            tenant='té\u0000\u001f\u007f\u2028"\\\b\f\n\r\t/\U0001f600',
            model="",
            config={
                "__proto__": True,
                "constructor": False,
                "a": "1",
                "B": 1,
                "a.b-c[0]": -(2**53) + 1,
                "max": 2**53 - 1,
                "zero": 0,
            },
        ),
    ),
}
