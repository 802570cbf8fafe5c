"""Vectors of the class keyer: keys."""

from __future__ import annotations

import model
from manifests import ONE
from suite import Suite, shard_fields

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
