"""Vectors of the class keyer: manifests and fingerprints."""

from __future__ import annotations

import copy

import model
from layouts import LAYOUTS, component, group, layout, split
from suite import Suite

ONE = LAYOUTS["gqa"][1]
BIG = 2**53


def changed(path: str, value, base=ONE) -> dict:
    """A layout with one field replaced; a value of None takes the field away."""
    fields = copy.deepcopy(base)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    below = fields
    for part in way:
        below = below[part]
    if value is None:
        del below[last]
    else:
        below[last] = value
    return fields


def digests(fields: dict) -> dict:
    return {
        "fingerprint": model.fingerprint(fields).hex(),
        "content_fingerprint": model.content_fingerprint(fields).hex(),
    }


def manifests() -> Suite:
    suite = Suite("manifests", "Manifests: layouts that are valid, and documents that are not.")

    def good(about: str, fields: dict, expected=None) -> None:
        given = {"document": model.canonical(fields).hex(), "expected": expected}
        suite.add("keyer", "manifest.parse", about, given, result=digests(fields))

    def bad(reason: str, about: str, document, expected=None) -> None:
        data = document if isinstance(document, bytes) else model.canonical(document)
        given = {"document": data.hex(), "expected": expected}
        suite.add("keyer", "manifest.parse", about, given, error=reason)

    def loose(about: str, document: bytes, fields: dict) -> None:
        result = {"manifest": model.canonical(fields).hex(), **digests(fields)}
        suite.add("keyer", "manifest.format", about, {"document": document.hex()}, result=result)

    for about, fields in LAYOUTS.values():
        good(about, fields, model.fingerprint(fields).hex())
    good("without the fingerprint it was found under", ONE)
    for about, path, value in (
        ("another tenant", "identity.tenant", "t"),
        ("another model name", "identity.model", "org/model2"),
        ("another revision of the weights", "identity.weights", "sha256:0f1e2d3d"),
        ("an adapter", "identity.adapter", "lora:7"),
        ("another cache dtype by name only", "identity.config.cache_config.cache_dtype", "fp8"),
        ("another hash algorithm", "hash.algorithm", "sha256_cbor"),
        ("another hash seed", "hash.seed", ""),
        ("a smaller hash block", "hash.block_size", 2),
        ("a longer hash", "hash.digest_nbytes", 64),
        ("another layer name", "groups.0.layers.1.name", ""),
        ("another grid has the same content fingerprint", "grid.head_shards", 2),
    ):
        base = ONE
        if path.startswith("identity.config."):
            path, value = "identity.config", {path.removeprefix("identity.config."): value}
        good(f"{about}: another fingerprint", changed(path, value, base))
    good(
        "true is not 1: config with a boolean",
        changed("identity.config", {"x": True}),
    )
    good("true is not 1: config with an integer", changed("identity.config", {"x": 1}))
    good("true is not 1: config with a text", changed("identity.config", {"x": "1"}))
    good("text of 16384 bytes, the longest", changed("identity.tenant", "\u00e9" * 8192))
    good("text that starts with U+FEFF keeps it", changed("identity.tenant", "\ufeffa"))
    good("composed and decomposed text differ: composed", changed("identity.tenant", "\u00e9"))
    good("composed and decomposed text differ: decomposed", changed("identity.tenant", "e\u0301"))

    text = model.canonical(ONE)

    def swapped(old: bytes, new: bytes, within: bytes = text) -> bytes:
        assert old in within
        return within.replace(old, new, 1)

    # JSON
    bad("manifest_json", "nothing", b"")
    bad("manifest_json", "cut short", text[:-1])
    bad("manifest_json", "something after the value", text + b"}")
    bad("manifest_json", "a byte order mark", b"\xef\xbb\xbf" + text)
    bad("manifest_json", "bytes that are not UTF-8", swapped(b"org/", b"org\xff"))
    bad("manifest_json", "an encoded surrogate", swapped(b"org/", b"\xed\xa0\x80"))
    bad("manifest_json", "an escaped lone surrogate", swapped(b"org/", b"\\ud800"))
    bad("manifest_json", "a lone surrogate in an unknown name", b'{"\\ud800":1,' + text[1:])
    bad("manifest_json", "a name twice", b'{"schema":"kvformat/1",' + text[1:])
    bad(
        "manifest_json", "a name twice, once escaped",
        swapped(b'{"adapter"', b'{"\\u0061dapter":"","adapter"'),
    )  # fmt: skip
    bad("manifest_json", "NaN is not JSON", swapped(b'"block_size":4', b'"block_size":NaN'))
    bad("manifest_json", "a comma at the end", text[:-1] + b",}")
    bad("manifest_json", "a control character in a string", swapped(b"org/", b"org\n"))
    bad("manifest_json", "a number with a leading zero", swapped(b':32,"seed"', b':032,"seed"'))
    # numbers
    bad("manifest_number", "a fraction", swapped(b':32,"seed"', b':32.0,"seed"'))
    bad("manifest_number", "an exponent", swapped(b':32,"seed"', b':32e0,"seed"'))
    bad("manifest_number", "minus zero", swapped(b'"window":0', b'"window":-0'))
    bad("manifest_number", "2^53", changed("identity.config", {"x": BIG}))
    bad("manifest_number", "-2^53", changed("identity.config", {"x": -BIG}))
    bad("manifest_number", "2^53+1, which a double can't hold", changed("groups.0.window", BIG + 1))
    bad("manifest_number", "ten thousand digits", swapped(b":32,", b":" + b"9" * 10000 + b","))
    bad(
        "manifest_json", "syntax is judged before numbers",
        swapped(b'"window":0', b'"window":0.5') + b",",
    )  # fmt: skip
    # fields
    bad("manifest_field", "an array", b"[]")
    bad("manifest_field", "null", b"null")
    bad("manifest_field", "no schema", changed("schema", None))
    bad("manifest_field", "a schema that is a number", changed("schema", 1))
    bad("layout_schema", "another schema", changed("schema", "kvformat/2"))
    bad("layout_schema", "another schema with other fields", b'{"schema":"kvformat/2","x":1}')
    bad("manifest_field", "an unknown field", {**ONE, "zz": 1})
    for path in (
        "identity.adapter", "identity.config", "hash.seed", "groups.0.window", "groups.0.layers",
        "grid.context_interleave", "grid.head_shards", "objects",
        "groups.0.layers.0.components.0.axes",
    ):  # fmt: skip
        bad("manifest_field", f"no {path}: no field has a default", changed(path, None))
    bad("manifest_field", "true where an integer belongs", changed("hash.block_size", True))
    bad("manifest_field", "text where an integer belongs", changed("grid.head_shards", "1"))
    bad("manifest_field", "null in config", swapped(b'"auto"', b"null"))
    bad("manifest_field", "a list in config", changed("identity.config", {"x": [1]}))
    bad("manifest_field", "an object where a list belongs", changed("objects", {}))
    bad(
        "manifest_field", "fields are judged before the rules of the layout",
        changed("identity.weights", "", changed("grid.head_shards", None)),
    )  # fmt: skip
    # layout
    bad("layout_identity", "no weights", changed("identity.weights", ""))
    bad("layout_identity", "a config name with a space", changed("identity.config", {"a b": 1}))
    bad("layout_identity", "a config name beyond ASCII", changed("identity.config", {"\u00e9": 1}))
    bad("layout_identity", "an empty config name", changed("identity.config", {"": 1}))
    bad("layout_identity", "text of 16385 bytes", changed("identity.model", "x" * 16385))
    bad("layout_hash", "a seed in uppercase", changed("hash.seed", "AB"))
    bad("layout_hash", "a seed of half a byte", changed("hash.seed", "abc"))
    bad("layout_hash", "a hash of 0 bytes", changed("hash.digest_nbytes", 0))
    bad("layout_hash", "a hash of 65 bytes", changed("hash.digest_nbytes", 65))
    bad("layout_hash", "an algorithm that is no name", changed("hash.algorithm", "SHA-256"))
    bad("layout_group", "an unknown kind", changed("groups.0.kind", "linear"))
    bad("layout_group", "a block of 0 tokens", changed("groups.0.block_size", 0))
    bad("layout_group", "a negative block size", changed("groups.0.block_size", -4))
    bad("layout_group", "full attention with a window", changed("groups.0.window", 8))
    bad("layout_group", "a window of 0", changed("groups.0.kind", "sliding_window"))
    bad("layout_group", "no layers", changed("groups.0.layers", []))
    bad("layout_group", "a layer name twice", changed("groups.0.layers.1.name", "model.layers.0"))
    bad("layout_group", "a block that is not whole hash blocks", changed("hash.block_size", 3))
    bad("layout_group", "tokens that don't divide the block", layout([group([split(tokens=3)])]))
    bad(
        "layout_group", "recurrent state with tokens", layout([group([split()], "recurrent_state")])
    )
    at = "groups.0.layers.0.components.0"
    bad("layout_dtype", "an unknown dtype", changed(f"{at}.dtype", "float8"))
    bad("layout_component", "a component name in uppercase", changed(f"{at}.name", "K"))
    bad("layout_component", "an empty component name", changed(f"{at}.name", ""))
    bad("layout_component", "a component name of 64 characters", changed(f"{at}.name", "k" * 64))
    bad("layout_component", "a name with a newline at its end", changed(f"{at}.name", "k\n"))
    bad("layout_component", "a component twice", changed(f"{at}.name", "v"))
    bad("layout_component", "an axis twice", changed(f"{at}.axes", ["head", "token", "head"]))
    bad("layout_component", "fewer sizes than axes", changed(f"{at}.sizes", [2, 4]))
    bad("layout_component", "an axis of size 0", changed(f"{at}.sizes", [2, 4, 0]))
    bad("layout_component", "wrong nbytes", changed(f"{at}.nbytes", 33))
    bad("layout_component", "no components", changed("groups.0.layers.0.components", []))
    bad(
        "layout_component", "sizes whose product wraps to the nbytes declared in 64 bits",
        changed(at, {**component("k", "int8", x=1), "axes": ["x", "y"], "sizes": [2**32, 2**32],
                     "nbytes": 0}),
    )  # fmt: skip
    bad(
        "layout_component", "2^48 bytes, one over the limit",
        changed(at, component("k", "int8", head=2**24, channel=2**24)),
    )  # fmt: skip
    bad("layout_component", "nine axes",
        changed(at, component("k", "int8", **{f"a{i}": 1 for i in range(9)})))  # fmt: skip
    bad("layout_component", "four bits, cut last axis", changed(at, component("k", "int4", head=2)))
    bad("layout_component", "four bits, odd last axis",
        changed(at, component("k", "int4", head=2, channel=3)))  # fmt: skip
    bad("layout_component", "a layer name of 16385 bytes",
        changed("groups.0.layers.0.name", "x" * 16385))  # fmt: skip
    two = layout([group([split()]), group([split()], name="b")], objects=[[0, 1]])
    for about, value in (
        ("a group in no object", [[0]]), ("a group in two objects", [[0], [0, 1]]),
        ("an empty object", [[], [0, 1]]), ("descending groups", [[1, 0]]),
        ("objects not in order", [[1], [0]]), ("a group that isn't there", [[0, 1, 2]]),
        ("a negative group", [[-1, 0]]),
    ):  # fmt: skip
        bad("layout_objects", about, changed("objects", value, two))
    bad(
        "layout_objects", "block sizes that differ in one object",
        layout([group([split()]), group([split(tokens=8)], block_size=8)], objects=[[0, 1]]),
    )  # fmt: skip
    for about, path, value in (
        ("no head shards", "head_shards", 0), ("65537 head shards", "head_shards", 65537),
        ("no context shards", "context_shards", 0), ("runs of 0", "context_interleave", 0),
        ("runs without a cut", "context_interleave", 2), ("no layer starts", "layer_starts", []),
        ("layer starts for too many groups", "layer_starts", [[0], [0]]),
        ("no layer shard", "layer_starts", [[]]), ("not from 0", "layer_starts", [[1]]),
        ("layer starts that fall", "layer_starts", [[0, 2, 1]]),
        ("a start past the layers", "layer_starts", [[0, 3]]),
    ):  # fmt: skip
        bad("layout_grid", about, changed(f"grid.{path}", value))
    bad("layout_grid", "groups with different numbers of layer shards",
        changed("grid.layer_starts", [[0, 1], [0]], two))  # fmt: skip
    small = [component("state", "uint8", byte=1)]
    bad("layout_limit", "65 groups", layout([group([small], name=f"g{i}") for i in range(65)]))
    heavy = component("k", "int8", a=2**24, b=2**24 - 1)
    bad("layout_limit", "an object of more than 2^48-1 bytes",
        layout([group([[heavy], [component("k", "int8", a=2**24)]])]))  # fmt: skip
    good("an object of 2^48-2^24 bytes, under the limit", layout([group([[heavy]])]))
    # canonical form
    bad("manifest_canonical", "a newline at the end", text + b"\n")
    bad("manifest_canonical", "a space", swapped(b":32,", b": 32,"))
    bad("manifest_canonical", "fields out of order", b'{"schema":"kvformat/1",'
        + text[1:].replace(b',"schema":"kvformat/1"', b""))  # fmt: skip
    bad("manifest_canonical", "an escaped slash", swapped(b"org/", b"org\\/"))
    bad("manifest_canonical", "an escaped letter", swapped(b"org/", b"\\u006frg/"))
    bad("manifest_canonical", "an escape in uppercase",
        swapped(b"001f", b"001F",
                model.canonical(changed("identity.tenant", "\x1f"))))  # fmt: skip
    bad("manifest_canonical", "a long escape for a newline",
        swapped(b"\\n", b"\\u000a",
                model.canonical(changed("identity.tenant", "\n"))))  # fmt: skip
    bad("manifest_canonical", "an escaped character beyond ASCII",
        swapped(b"\xc3\xa9", b"\\u00e9",
                model.canonical(changed("identity.tenant", "\u00e9"))))  # fmt: skip
    bad("manifest_fingerprint", "the manifest of another namespace", text, "00" * 16)
    bad("manifest_fingerprint", "the content fingerprint is not the fingerprint", text,
        model.content_fingerprint(ONE).hex())  # fmt: skip
    bad("manifest_canonical", "canonical form is judged before the fingerprint", text + b" ",
        "00" * 16)  # fmt: skip

    # layouts that are not canonical yet
    def shuffled(value):
        if isinstance(value, dict):
            return {name: shuffled(value[name]) for name in sorted(value, reverse=True)}
        return [shuffled(below) for below in value] if isinstance(value, list) else value

    import json

    for name in ("gqa", "hybrid", "text"):
        fields = LAYOUTS[name][1]
        loose(f"{name}: fields in reverse order, spaces, escapes",
              json.dumps(shuffled(fields), indent=1).encode(), fields)  # fmt: skip
    suite.add("keyer", "manifest.format", "no field has a default here either",
              {"document": model.canonical(changed("identity.adapter", None)).hex()},
              error="manifest_field")  # fmt: skip

    def nested(outer: int, inner: str) -> bytes:
        """A field more, whose value makes `outer` arrays and objects around each other."""
        deep = b"[" * (outer - 2) + b"{" + inner.encode() + b"}" + b"]" * (outer - 2)
        return text[:-1] + b',"zz":' + deep + b"}"

    bad("manifest_field", "32 arrays and objects around each other", nested(31, '"x":[]'))
    bad("manifest_field", "a value inside 32 arrays and objects", nested(32, '"x":1'))
    bad("manifest_json", "an empty array inside 32 others", nested(32, '"x":[]'))
    bad("manifest_json", "an empty object inside 32 others", nested(32, '"x":{}'))
    bad("manifest_json", "a hundred thousand arrays", nested(100002, ""))
    bad("manifest_json", "the depth is judged before numbers", nested(33, '"x":0.5'))
    bad("manifest_field", "brackets in text are no arrays", nested(3, '"x":"' + "[{" * 40 + '"'))
    bad("manifest_field", "an object in config", changed("identity.config", {"x": {}}))
    bad("layout_identity", "config text of 16385 bytes",
        changed("identity.config", {"x": "y" * 16385}))  # fmt: skip
    good("config text of 16384 bytes", changed("identity.config", {"x": "y" * 16384}))
    halves = [group([[component("k", "int8", x=1)]] * n) for n in (8192, 8193)]
    for half in halves:
        half["layers"] = [{**part, "name": str(n)} for n, part in enumerate(half["layers"])]
    bad("layout_limit", "16385 layers in one object, over two groups",
        layout(halves, objects=[[0, 1]]))  # fmt: skip
    for head_shards, context_shards, starts in (
        (65536, 1, [[0]]), (1, 65536, [[0]]), (256, 256, [[0]]), (32768, 1, [[0, 1]]),
    ):  # fmt: skip
        grid = {**ONE["grid"], "head_shards": head_shards, "context_shards": context_shards,
                "layer_starts": starts}  # fmt: skip
        good(f"{len(starts[0])} x {head_shards} x {context_shards} shards", changed("grid", grid))
        for more in ("head_shards", "context_shards"):
            if grid[more] < 65536:
                bad("layout_limit", f"the same with one of {more} more",
                    changed(f"grid.{more}", grid[more] + 1, changed("grid", grid)))  # fmt: skip
    grid = {**ONE["grid"], "head_shards": 65536, "context_shards": 65536}
    bad("layout_limit", "65536 shards along each axis", changed("grid", grid))
    return suite
