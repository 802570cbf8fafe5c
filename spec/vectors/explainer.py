"""Vectors of the class explainer: the fields in which two layouts differ."""

from __future__ import annotations

import model
from layouts import INDEXER, LAYOUTS, component, group, layout, split
from manifests import ONE, changed
from suite import Suite


def diffs() -> Suite:
    suite = Suite("diffs", "Differences between two layouts, field by field.")

    def differ(about: str, a: dict, b: dict, *found) -> None:
        for left, right, swap in ((a, b, False), (b, a, True)):
            differences = [
                {"path": path, "a": y if swap else x, "b": x if swap else y} for path, x, y in found
            ]
            suite.add(
                "explainer", "layout.diff", about + (", the other way round" if swap else ""),
                {"a": model.canonical(left).hex(), "b": model.canonical(right).hex()},
                result={"differences": sorted(differences, key=lambda d: d["path"])},
            )  # fmt: skip

    differ("equal layouts", ONE, ONE)
    for path, value in (
        ("identity.tenant", "t"), ("identity.model", "org/other"), ("identity.weights", "w2"),
        ("identity.adapter", "lora"), ("hash.algorithm", "xxhash"), ("hash.seed", "aa"),
        ("hash.block_size", 2), ("hash.digest_nbytes", 16), ("grid.head_shards", 2),
    ):  # fmt: skip
        way, name = path.split(".")
        differ(f"one field: {path}", ONE, changed(path, value), (path, ONE[way][name], value))
    differ("config: one value, one name more on either side",
           changed("identity.config", {"x": 1, "same": True, "only_a": "a"}),
           changed("identity.config", {"x": 2, "same": True, "only_b": False}),
           ("identity.config.x", 1, 2), ("identity.config.only_a", "a", None),
           ("identity.config.only_b", None, False))  # fmt: skip
    differ("true, 1 and the text 1 differ", changed("identity.config", {"x": True, "y": 1}),
           changed("identity.config", {"x": 1, "y": "1"}),
           ("identity.config.x", True, 1), ("identity.config.y", 1, "1"))  # fmt: skip
    differ("dtype of all layers: one difference", ONE,
           layout([group([split(dtype="float16")] * 2)]),
           ("groups[0].layers[0..1].components[k].dtype", "bfloat16", "float16"),
           ("groups[0].layers[0..1].components[v].dtype", "bfloat16", "float16"))  # fmt: skip
    differ("one layer of two", ONE, changed("groups.0.layers.1.name", "x"),
           ("groups[0].layers[1].name", "model.layers.1", "x"))  # fmt: skip
    half = [component("k", "bfloat16", head=2, token=4, channel=2),
            component("v", "int8", head=2, token=4, channel=4)]  # fmt: skip
    differ(
        "layers that differ alike, with one between that doesn't",
        layout([group([split()] * 4)]),
        layout([group([half, split(), half, half])]),
        *[
            (f"groups[0].layers[{n}].components[v].{field}", a, b)
            for n in ("0", "2..3")
            for field, a, b in (("dtype", "bfloat16", "int8"), ("sizes.channel", 2, 4))
        ],
    )
    differ("axis order", LAYOUTS["fused"][1], LAYOUTS["packed"][1],
           ("groups[0].layers[0].components[kv].axes",
            '["kv","head","token","channel"]', '["head","token","kv","channel"]'))  # fmt: skip
    differ("an axis more", layout([group([[component("kv", "int8", token=4, channel=4)]])]),
           layout([group([[component("kv", "int8", kv=2, token=4, channel=2)]])]),
           ("groups[0].layers[0].components[kv].axes", '["token","channel"]',
            '["kv","token","channel"]'),
           ("groups[0].layers[0].components[kv].sizes.channel", 4, 2),
           ("groups[0].layers[0].components[kv].sizes.kv", None, 2))  # fmt: skip
    k, v = split()
    differ("the order of components", layout([group([[k, v]])]), layout([group([[v, k]])]),
           ("groups[0].layers[0].component_order", "k, v", "v, k"))  # fmt: skip
    differ("a component more", layout([group([[k]])]), layout([group([[k, v]])]),
           ("groups[0].layers[0].component_order", "k", "k, v"),
           ("groups[0].layers[0].components[v]", None,
            '{"dtype":"bfloat16","axes":["head","token","channel"],'
            '"sizes":{"head":2,"token":4,"channel":2}}'))  # fmt: skip
    differ("a layer more", layout([group([split()])]), ONE,
           ("groups[0].layers[1]", None, "model.layers.1"))  # fmt: skip
    differ("a group more", layout([group([split()])]),
           layout([group([split()]), group([INDEXER], name="indexer")], objects=[[0, 1]]),
           ("groups[1]", None, "full_attention"), ("objects", "[[0]]", "[[0,1]]"),
           ("grid.layer_starts", "[[0]]", "[[0],[0]]"))  # fmt: skip
    differ(
        "a window",
        layout([group([split()], "sliding_window", window=8)]),
        layout([group([split()], "chunked_local", window=16)]),
        ("groups[0].kind", "sliding_window", "chunked_local"),
        ("groups[0].window", 8, 16),
    )
    differ("text that looks like what tools show for an absent value",
           changed("identity.config", {"x": "(absent)", "y": "null"}),
           changed("identity.config", {}),
           ("identity.config.x", "(absent)", None),
           ("identity.config.y", "null", None))  # fmt: skip
    return suite
