"""Vectors of the class keyer: manifests, fingerprints, keys."""

from __future__ import annotations

import copy

import model
from layouts import LAYOUTS, component, group, layout, split
from suite import Suite, shard_fields

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


TEXTS = (
    ("plain text", "org-1_x.y"), ("empty text", ""), ("a slash", "a/b"), ("@ and :", "a@b:c"),
    ("a percent sign", "100%"), ("text that looks like an escape", "%2F"), ("NUL", "a\0b"),
    ("a newline", "a\n"), ("a tilde, which is not the empty text", "~"),
    ("a tilde inside", "a~b"), ("one dot", "."), ("two dots", ".."), ("a leading dot", ".hidden"),
    ("a dot that doesn't lead", "a.b."), ("a space", " "), ("a plus, which is no space", "a+b"),
    ("composed text", "\u00e9"), ("decomposed text", "e\u0301"), ("beyond the BMP", "\U0001f600"),
    ("U+FEFF at the start", "\ufeffa"), ("the last code point", "\U0010ffff"),
    ("sub-delimiters, not one of which is left alone", "!$&'()*+,;="), ("DEL", "\x7f"),
    ("letters that are not ASCII's", "\u0410\uff21"), ("a backslash", "..\\.."),
)  # fmt: skip


def keys() -> Suite:
    suite = Suite("keys", "Keys: formatting, parsing, and text that is no key.")
    digest = model.fingerprint(ONE)
    hashes = {n: bytes(range(256 - n, 256)) for n in (1, 8, 16, 32, 64)}

    def both(about, tenant, name, bitmap=1, shard=(0, 0, 0), block_hash=hashes[32]) -> None:
        fields = {
            "tenant": tenant, "model": name, "fingerprint": digest.hex(),
            "group_bitmap": str(bitmap), "shard": shard_fields(shard),
            "block_hash": block_hash.hex(),
        }  # fmt: skip
        text = model.key(tenant, name, digest, bitmap, shard, block_hash)
        suite.add("keyer", "key.format", about, fields, result={"key": text})
        suite.add("keyer", "key.parse", about, {"key": text, "digest_nbytes": None},
                  result={"kind": "block", **fields})  # fmt: skip

    for about, text in TEXTS:
        both(f"tenant: {about}", text, "m")
    both("model: a name with slashes and dots", "t", "../org/model@rev:1")
    both("a tenant and model that join like the next two: a, bc", "a", "bc")
    both("ab, c", "ab", "c")
    both("text of 16384 bytes in both, each escaped", "\u00e9" * 8192, "/" * 16384)
    for nbytes, block_hash in hashes.items():
        both(f"a hash of {nbytes} bytes", "t", "m", block_hash=block_hash)
    both("two hashes that share their first 8 bytes: a", "t", "m", block_hash=bytes(8) + b"a" * 8)
    both("two hashes that share their first 8 bytes: b", "t", "m", block_hash=bytes(8) + b"b" * 8)
    both("group 63", "t", "m", bitmap=2**63)
    both("all groups", "t", "m", bitmap=2**64 - 1)
    both("groups above 2^53, which a double can't tell apart", "t", "m", bitmap=2**53 + 1)
    both("a shard", "t", "m", shard=(1, 2, 3))
    both("the last shard", "t", "m", shard=(65535, 65535, 65535))
    for about, tenant, name in (("plain", "t", "org/m"), ("empty", "", "")):
        fields = {"tenant": tenant, "model": name, "fingerprint": digest.hex()}
        prefix = model.namespace(tenant, name, digest) + "/"
        text = prefix + "manifest"
        suite.add("keyer", "key.format_manifest", f"manifest key, {about}", fields,
                  result={"key": text, "prefix": prefix})  # fmt: skip
        suite.add("keyer", "key.parse", f"manifest key, {about}",
                  {"key": text, "digest_nbytes": None},
                  result={"kind": "manifest", **fields})  # fmt: skip

    fields = {
        "tenant": "t", "model": "m", "fingerprint": digest.hex(), "group_bitmap": "1",
        "shard": shard_fields((0, 0, 0)), "block_hash": "00",
    }  # fmt: skip
    for reason, about, change in (
        ("key_text", "text over the limit", {"tenant": "x" * 16385}),
        ("key_text", "16385 bytes in 8193 characters", {"model": "\u00e9" * 8192 + "x"}),
        ("key_text", "a lone surrogate", {"model": "\ud800"}),
        ("key_fingerprint", "a fingerprint of 15 bytes", {"fingerprint": "00" * 15}),
        ("key_fingerprint", "a whole SHA-256", {"fingerprint": "00" * 32}),
        ("key_groups", "no groups", {"group_bitmap": "0"}),
        ("key_groups", "65 groups", {"group_bitmap": str(2**64)}),
        ("key_shard", "an index of 65536", {"shard": shard_fields((0, 65536, 0))}),
        ("key_hash", "no hash", {"block_hash": ""}),
        ("key_hash", "a hash of 65 bytes", {"block_hash": "00" * 65}),
    ):
        suite.add("keyer", "key.format", about, {**fields, **change}, error=reason)

    start, end = f"kvformat1/t/m/{digest.hex()}", f"g{1:016x}/l0000h0000c0000/00"

    def bad(reason: str, about: str, text: str, digest_nbytes=None) -> None:
        given = {"key": text, "digest_nbytes": digest_nbytes}
        suite.add("keyer", "key.parse", about, given, error=reason)

    bad("key_format", "nothing", "")
    bad("key_format", "another name", f"kvcache1/t/m/{digest.hex()}/{end}")
    bad("key_format", "another case", f"KVformat1/t/m/{digest.hex()}/{end}")
    bad("key_format", "no version", f"kvformat/t/m/{digest.hex()}/{end}")
    bad("key_format", "version 01", f"kvformat01/t/m/{digest.hex()}/{end}")
    bad("key_format", "version 0", f"kvformat0/t/m/{digest.hex()}/{end}")
    bad("key_format", "a version of six digits", "kvformat100000/x")
    bad("key_format", "a leading slash", f"/{start}/{end}")
    bad("key_format", "a slash at the end", f"{start}/{end}/")
    bad("key_format", "a newline at the end of the format", f"kvformat1\n/t/m/{digest.hex()}/{end}")
    bad("key_format", "six parts", f"{start}/g{1:016x}/00")
    bad("key_format", "only the namespace", start)
    bad("key_format", "five parts that don't end in manifest", f"{start}/manifests")
    bad("key_format", "manifest in uppercase", f"{start}/MANIFEST")
    bad("key_version", "major 2", f"kvformat2/t/m/{digest.hex()}/{end}")
    bad("key_version", "another major is judged before anything else of the key", "kvformat12")
    for about, part in (
        ("an empty part", ""), ("a letter escaped", "%41"), ("lowercase hex", "%2f"),
        ("a dot that leads", ".a"), ("a dot escaped that doesn't lead", "a%2Eb"),
        ("one dot", "."), ("two dots", ".."), ("half an escape", "a%2"), ("% alone", "%"),
        ("% and letters", "%GG"), ("a tilde inside", "a~"), ("two tildes", "~~"),
        ("a space", "a b"), ("a plus", "a+b"), ("raw text beyond ASCII", "\u00e9"),
        ("an escaped lone byte", "%FF"), ("an overlong slash", "%C0%AF"),
        ("an encoded surrogate", "%ED%A0%80"), ("a cut sequence", "%C3"),
        ("beyond U+10FFFF", "%F4%90%80%80"), ("a newline at the end", "a\n"),
        ("digits beyond ASCII", "\u0661"), ("16385 bytes", "x" * 16385),
        ("a raw @", "a@b"), ("a raw :", "a:b"),
    ):  # fmt: skip
        bad("key_text", about, f"kvformat1/{part}/m/{digest.hex()}/{end}")
    bad("key_text", "in the model as well", f"kvformat1/t/%41/{digest.hex()}/{end}")
    bad("key_text", "in a manifest key as well", f"kvformat1/t/%41/{digest.hex()}/manifest")
    for reason, about, text in (
        ("key_fingerprint", "31 digits", f"kvformat1/t/m/{digest.hex()[:-1]}/{end}"),
        ("key_fingerprint", "uppercase", f"kvformat1/t/m/{'AB' * 16}/{end}"),
        ("key_fingerprint", "empty, before manifest", "kvformat1/t/m//manifest"),
        ("key_groups", "no groups", f"{start}/g{0:016x}/l0000h0000c0000/00"),
        ("key_groups", "15 digits", f"{start}/g{1:015x}/l0000h0000c0000/00"),
        ("key_groups", "uppercase", f"{start}/g{'A' * 16}/l0000h0000c0000/00"),
        ("key_shard", "three digits", f"{start}/g{1:016x}/l000h0000c0000/00"),
        ("key_shard", "another order", f"{start}/g{1:016x}/h0000l0000c0000/00"),
        ("key_shard", "a space at the end", f"{start}/g{1:016x}/l0000h0000c0000 /00"),
        ("key_hash", "empty", f"{start}/g{1:016x}/l0000h0000c0000/"),
        ("key_hash", "half a byte", f"{start}/g{1:016x}/l0000h0000c0000/000"),
        ("key_hash", "uppercase", f"{start}/g{1:016x}/l0000h0000c0000/AB"),
        ("key_hash", "65 bytes", f"{start}/g{1:016x}/l0000h0000c0000/{'00' * 65}"),
        ("key_hash", "a newline at the end", f"{start}/g{1:016x}/l0000h0000c0000/00\n"),
        ("key_length", "131073 characters", f"{start}/" + "x" * (131072 - len(start))),
        ("key_hash", "131072 characters are not too many",
         f"{start}/g{1:016x}/l0000h0000c0000/" + "0" * (131072 - len(start) - 35)),
    ):  # fmt: skip
        bad(reason, about, text)
    # the order of the rules
    broken = ["%41", "%41", "xx", "g" + "0" * 16, "l", ""]
    for index, reason in enumerate(
        ("key_text", "key_text", "key_fingerprint", "key_groups", "key_shard", "key_hash")
    ):
        good = [*start.split("/")[1:], f"g{1:016x}", "l0000h0000c0000", "00"]
        bad(reason, "left to right: every later part is wrong as well",
            "/".join(["kvformat1", *good[:index], *broken[index:]]))  # fmt: skip
    bad("key_format", "the number of parts is judged before the parts", "kvformat1/%41/m")
    block = f"{start}/g{1:016x}/l0000h0000c0000/"
    bad("key_hash", "characters are code points: 131072 of them, one beyond the BMP",
        block + "0" * (131071 - len(block)) + "\U0001f600")  # fmt: skip
    for about, nbytes in (("shortened", 8), ("one byte too long", 33)):
        bad("key_hash", f"a hash that the layout knows to be {about}", block + "ab" * nbytes, 32)
    bad("key_shard", "the hash's length is judged with the hash", f"{start}/g{1:016x}/l/ab", 32)
    for about, text, digest_nbytes in (
        ("a hash of the layout's length", block + "ab" * 32, 32),
        ("a manifest key has no hash", f"{start}/manifest", 32),
    ):
        found = {"tenant": "t", "model": "m", "fingerprint": digest.hex()}
        if text.startswith(block):
            found |= {"group_bitmap": "1", "shard": shard_fields((0, 0, 0)),
                      "block_hash": text[len(block):]}  # fmt: skip
        kind = "block" if "block_hash" in found else "manifest"
        suite.add("keyer", "key.parse", about, {"key": text, "digest_nbytes": digest_nbytes},
                  result={"kind": kind, **found})  # fmt: skip
    return suite
