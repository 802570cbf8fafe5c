"""Vectors of the class reader about headers: where ranges lie, decoding, checking, later minors."""

from __future__ import annotations

import struct

import model
from layouts import LAYOUTS
from suite import Suite, shard_fields

HASH = bytes(range(0xA0, 0xC0))


def hash_of(layout: dict) -> bytes:
    return HASH[: layout["hash"]["digest_nbytes"]]


def maps() -> Suite:
    suite = Suite("maps", "Object maps: which shards have an object, and where its bytes lie.")
    for name, (about, layout) in LAYOUTS.items():
        manifest = model.canonical(layout).hex()
        for object_index in range(len(layout["objects"])):
            given = {"manifest": manifest, "object_index": object_index}
            shards = model.shards(layout, object_index)
            suite.add("reader", "object.shards", f"{name}: {about}", given,
                      result={"shards": [shard_fields(shard) for shard in shards]})  # fmt: skip
            # All where there are few; else the first and the last, where an off-by-one shows.
            for shard in shards if len(shards) <= 4 else (shards[0], shards[1], shards[-1]):
                made = model.Object(layout, object_index, shard, hash_of(layout))
                suite.add(
                    "reader",
                    "object.map",
                    f"{name}: {about}",
                    {**given, "shard": shard_fields(shard)},
                    result=map_fields(made),
                )
    for name, shard, about in (
        ("gqa_few_heads", (0, 1, 0), "a head shard without heads"),
        ("mla_fused", (0, 1, 0), "a latent is in head shard 0 only"),
        ("segments", (1, 0, 0), "a layer shard without layers"),
        ("context_runs", (0, 0, 2), "a context shard without tokens"),
        ("gqa", (1, 0, 0), "a layer shard outside the grid"),
        ("gqa", (0, 1, 0), "a head shard outside the grid"),
        ("gqa", (0, 0, 1), "a context shard outside the grid"),
    ):
        given = {
            "manifest": model.canonical(LAYOUTS[name][1]).hex(),
            "object_index": 0,
            "shard": shard_fields(shard),
        }
        suite.add(
            "reader", "object.map", f"{about}: there is no object", given, error="layout_grid"
        )
    for name, change in (
        ("gqa", {"head_shards": 65536}), ("gqa", {"context_shards": 65536}),
        ("compressed", {"context_shards": 65536, "context_interleave": 3}),
        ("mixed", {"head_shards": 3, "context_shards": 5}),
        ("recurrent", {"head_shards": 512, "context_shards": 128}),
    ):  # fmt: skip
        cut = {**LAYOUTS[name][1], "grid": {**LAYOUTS[name][1]["grid"], **change}}
        for object_index in range(len(cut["objects"])):
            found = model.shards(cut, object_index)
            suite.add("reader", "object.shards", f"{name}, most shards of a large grid are empty",
                      {"manifest": model.canonical(cut).hex(), "object_index": object_index},
                      result={"shards": [shard_fields(shard) for shard in found]})  # fmt: skip
    given = {"manifest": model.canonical(LAYOUTS["hybrid"][1]).hex(), "object_index": 3}
    suite.add("reader", "object.shards", "an object that the layout hasn't", given,
              error="layout_objects")  # fmt: skip
    suite.add("reader", "object.map", "an object that the layout hasn't",
              {**given, "shard": shard_fields((0, 0, 0))}, error="layout_objects")  # fmt: skip
    return suite


def map_fields(made: model.Object) -> dict:
    layers, at = [], len(made.header)
    for (group, layer), data in made.layers.items():
        layers.append({"group": group, "layer": layer, "offset": str(at), "nbytes": str(len(data))})
        at += len(data)
    return {
        "group_bitmap": str(made.fields["group_bitmap"]),
        "header_nbytes": str(len(made.header)),
        "object_nbytes": str(len(made.data)),
        "layers": layers,
        "components": [
            {
                "group": group, "layer": layer, "component": component["name"],
                "offset": str(offset), "nbytes": str(len(data)),
            }
            for (group, layer, component, data), offset
            in zip(made.components, made.offsets(), strict=True)
        ],
    }  # fmt: skip


def header_fields(fields: dict, header: bytes) -> dict:
    """The result of ``header.decode``."""
    offsets, at = [], len(header)
    for size in fields["sizes"]:
        offsets.append(at)
        at += size
    return {
        "minor": fields.get("minor", 0),
        "header_nbytes": len(header),
        "required_features": "0",
        "optional_features": str(fields.get("optional", 1)),
        "fingerprint": fields["fingerprint"].hex(),
        "object_nbytes": str(at),
        "write_id": fields["write_id"].hex(),
        "group_bitmap": str(fields["group_bitmap"]),
        "num_tokens": fields["num_tokens"],
        "shard": shard_fields(fields["shard"]),
        "block_hash": fields["block_hash"].hex(),
        "extension": (fields.get("extension", b"") + bytes(32))[:32].hex(),
        "groups": [
            {"group": group, "first_layer": first, "num_layers": num, "complete": list(complete)}
            for group, first, num, complete in fields["directory"]
        ],
        "offsets": [str(offset) for offset in offsets],
        "sizes": [str(size) for size in fields["sizes"]],
        "checksums": [str(number) for number in fields["checksums"]],
    }


#: A header with padding, two groups, and numbers that a double or a sign would break.
FIELDS = {
    "fingerprint": bytes(range(16)),
    "write_id": bytes(range(255, 239, -1)),
    "group_bitmap": 2**63 + 2,
    "num_tokens": 2**32 - 1,
    "shard": (65535, 0x0102, 0x0304),
    "block_hash": HASH,
    "directory": [(1, 3, 2, [3]), (63, 16382, 2, [16382, 16383])],
    "sizes": [2**48 - 1, 0, 2**32, 7],
    "checksums": [2**64 - 1, 0x2D06800538D394C2, 2**53 + 1, 0x0102030405060708],
}


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """The header with some bytes replaced and its checksum made right again."""
    body = data[:at] + new + data[at + len(new) :]
    return model.seal(body[:-8])


def headers() -> Suite:
    suite = Suite(
        "headers", "Headers by themselves: what is decoded, and every rule that can break."
    )

    def good(about: str, after: bytes = b"", **change) -> None:
        fields = {**FIELDS, **change}
        header = model.header(**fields)
        suite.add("reader", "header.decode", about, {"data": (header + after).hex()},
                  result=header_fields(fields, header))  # fmt: skip

    def bad(reason: str, about: str, data: bytes) -> None:
        suite.add("reader", "header.decode", about, {"data": data.hex()}, error=reason)

    for name, (about, layout) in LAYOUTS.items():
        shard = model.shards(layout, 0)[-1]
        made = model.Object(layout, 0, shard, hash_of(layout))
        suite.add("reader", "header.decode", f"{name}: {about}", {"data": made.header.hex()},
                  result=header_fields(made.fields, made.header))  # fmt: skip
    good("numbers that need all of their bits")
    good("what follows the header is not looked at", after=b"\xff" * 100)
    good("a hash of 1 byte", block_hash=b"\xff")
    good("a hash of 64 bytes", block_hash=bytes(range(64)))
    good("a hash that ends in zeros", block_hash=bytes(16))
    good("no checksums", optional=0, checksums=[0] * 4)
    good("no layer complete", directory=[(1, 3, 2, []), (63, 0, 2, [])])
    good("a group without layers here", group_bitmap=7,
         directory=[(0, 5, 0, []), (1, 0, 4, range(4)), (2, 2, 0, [])])  # fmt: skip
    long = {"group_bitmap": 1, "sizes": [1] * 130, "checksums": list(range(130))}
    good(
        "130 layers: three words of completeness", directory=[(0, 0, 130, range(0, 130, 3))], **long
    )
    good("an optional bit of a later minor", optional=2**63 + 1)
    good(
        "an optional bit of a later minor, with extension data", optional=3, extension=b"\x01" * 32
    )

    data = model.header(**FIELDS)
    tables = 192 + 32 + 16
    end = tables + 24 * 4
    bad("header_truncated", "nothing", b"")
    bad("header_truncated", "15 bytes", data[:15])
    bad("header_truncated", "16 bytes", data[:16])
    bad("header_truncated", "one byte less", data[:-1])
    bad("header_magic", "another magic", patched(data, 0, b"\x89"))
    bad("header_magic", "a newline changed on the way", patched(data, 4, b"\n\n"))
    bad("header_magic", "zeros, as in a hole of a file", bytes(4096))
    bad("header_version", "major 2", patched(data, 8, b"\2"))
    bad("header_version", "major 0", patched(data, 8, b"\0"))
    bad("header_version", "major 1 with its bytes swapped", patched(data, 8, b"\0\1"))
    for about, nbytes in (("192", 192), ("0", 0), ("not a multiple of 64", len(data) + 8),
                          ("2 MiB", 2 << 20), ("2^32-64", 2**32 - 64)):  # fmt: skip
        bad(
            "header_size", f"header_nbytes is {about}", patched(data, 12, struct.pack("<I", nbytes))
        )
    bad("header_truncated", "header_nbytes is one step more than is there",
        patched(data, 12, struct.pack("<I", len(data) + 64)))  # fmt: skip
    for about, at in (("in the fixed part", 40), ("in the hash", 96), ("in the tables", tables),
                      ("in the padding", end), ("in the checksum", len(data) - 1)):  # fmt: skip
        bad("header_checksum", f"one bit flipped {about}",
            data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])  # fmt: skip
    bad("header_checksum", "checksum in big-endian order", data[:-8] + data[:-9:-1])
    bad("header_feature", "required bit 0, reserved for partial blocks", patched(data, 16, b"\1"))
    bad("header_feature", "required bit 63", patched(data, 23, b"\x80"))
    bad(
        "header_reserved",
        "extension data without a bit that could own it",
        patched(data, 191, b"\1"),
    )
    bad("header_hash", "a hash of 0 bytes", patched(data, 90, b"\0"))
    bad("header_hash", "a hash of 65 bytes", patched(data, 90, b"\x41"))
    bad("header_hash", "bytes after the hash", patched(data, 159, b"\1"))
    bad("header_hash", "a hash longer than hash_nbytes says", patched(data, 90, b"\x1f"))
    bad("header_tokens", "no tokens", patched(data, 80, bytes(4)))
    bad("header_groups", "more groups than bits", patched(data, 91, b"\3"))
    bad("header_groups", "fewer groups than bits", patched(data, 91, b"\1"))
    bad("header_groups", "no groups", patched(patched(data, 91, b"\0"), 72, bytes(8)))
    bad("header_groups", "a directory beyond the header",
        patched(patched(data, 91, b"\x40"), 72, b"\xff" * 8))  # fmt: skip
    bad("header_groups", "another bit than the directory's", patched(data, 72, b"\4"))
    bad("header_groups", "entries out of order",
        patched(data, 192, data[208:224] + data[192:208]))  # fmt: skip
    bad("header_groups", "one group twice", patched(data, 208, data[192:208]))
    bad("header_groups", "group 64", patched(data, 208, b"\x40"))
    bad("header_groups", "layers beyond the limit", patched(data, 212, struct.pack("<I", 16383)))
    bad("header_groups", "first layer and layers wrap around",
        patched(data, 212, struct.pack("<II", 2**32 - 2, 2)))  # fmt: skip
    bad("header_groups", "num_ranges too small", patched(data, 92, b"\3"))
    bad("header_groups", "num_ranges too big", patched(data, 92, struct.pack("<I", 2**32 - 1)))
    bad("header_groups", "layers of all groups over the limit",
        patched(patched(data, 92, struct.pack("<I", 16385)), 196,
                struct.pack("<IIIHHII", 0, 16384, 0, 63, 0, 0, 1)))  # fmt: skip
    none = patched(patched(data, 92, bytes(4)), 200, bytes(4))
    bad("header_groups", "no layers at all", patched(none, 216, bytes(4)))
    bad("header_reserved", "bytes 2 and 3 of a group entry", patched(data, 195, b"\1"))
    bad("header_reserved", "bytes 12 to 15 of a group entry", patched(data, 223, b"\x80"))
    bad("header_size", "minor 0 with a header larger than its tables need",
        patched(data[:-8] + bytes(72), 12, struct.pack("<I", len(data) + 64)))  # fmt: skip
    bad("header_size", "tables larger than the header", grown(data))
    bad("header_completeness", "a bit beyond the layers", patched(data, 224, b"\4"))
    bad("header_completeness", "the last bit of the last word", patched(data, 239, b"\x80"))
    bad("header_reserved", "padding after the tables", patched(data, end, b"\1"))
    bad("header_reserved", "padding before the checksum", patched(data, len(data) - 9, b"\1"))

    def ranges(offsets, sizes, nbytes) -> bytes:
        table = b"".join(struct.pack("<Q", n % 2**64) for n in [*offsets, *sizes])
        return patched(patched(data, tables, table), 48, struct.pack("<Q", nbytes % 2**64))

    first = len(data)
    sizes = [10, 0, 20, 7]
    offsets = [first, first + 10, first + 10, first + 30]
    for about, table in (
        ("the first range does not begin after the header",
         ([first + 1, *offsets[1:]], [9, *sizes[1:]], first + 37)),
        ("the first range lies in the header",
         ([first - 1, *offsets[1:]], [11, *sizes[1:]], first + 37)),
        ("a gap", (offsets, [9, *sizes[1:]], first + 37)),
        ("an overlap", (offsets, [11, *sizes[1:]], first + 37)),
        ("ranges swapped", ([first, first + 10, first + 17, first + 10], sizes, first + 37)),
        ("object_nbytes is more than the last end", (offsets, sizes, first + 38)),
        ("object_nbytes is less than the last end", (offsets, sizes, first + 36)),
        ("object_nbytes is 0", (offsets, sizes, 0)),
        ("a size of 2^48", (
            [first, first + 2**48, first + 2**48, first + 2**48 + 20], [2**48, 0, 20, 7],
            first + 2**48 + 27)),
        ("sizes that wrap around to the right end", (
            [first, first + 2**63, first, first + 20], [2**63, 2**63, 20, 7], first + 27)),
        ("a size of 2^64-10", ([first, first - 10, first - 10, first + 10],
                               [2**64 - 10, 0, 20, 7], first + 17)),
    ):  # fmt: skip
        bad("header_ranges", about, ranges(*table))
    bad("header_reserved", "checksums without their bit", patched(data, 24, b"\0"))
    larger = patched(data[:-8] + bytes(72), 12, struct.pack("<I", len(data) + 64))
    # The order of the rules: each header breaks two neighbouring ones, the first is reported.
    for reason, about, broken in (
        ("header_truncated", "H1 before H2", b"\0" * 15),
        ("header_magic", "H2 before H3", patched(patched(data, 0, b"\0"), 8, b"\2")),
        ("header_version", "H3 before H4", patched(patched(data, 8, b"\2"), 12, b"\1")),
        ("header_size", "H4 before H5", patched(data, 12, b"\1")[:20]),
        ("header_truncated", "H5 before H6", b"".join((data[:40], b"\xaa", data[41:-1]))),
        ("header_checksum", "H6 before H7", data[:16] + b"\1" + data[17:]),
        ("header_feature", "H7 before H8", patched(patched(data, 16, b"\1"), 160, b"\1")),
        ("header_reserved", "H8 before H9", patched(patched(data, 160, b"\1"), 90, b"\0")),
        ("header_hash", "H9 before H10", patched(patched(data, 90, b"\0"), 80, bytes(4))),
        ("header_tokens", "H10 before H11", patched(patched(data, 80, bytes(4)), 91, b"\0")),
        ("header_groups", "H11 before H12", patched(patched(data, 91, b"\1"), 194, b"\1")),
        ("header_reserved", "H12 before H13", patched(patched(data, 210, b"\1"), 92, b"\1")),
        ("header_groups", "H12 goes entry by entry",
         patched(patched(data, 196, struct.pack("<I", 16384)), 210, b"\1")),
        ("header_groups", "H13 before H14",
         patched(larger, 92, b"\1")),
        ("header_size", "H14 before H15",
         patched(larger, 224, b"\4")),
        ("header_completeness", "H15 before H16", patched(patched(data, 224, b"\4"), end, b"\1")),
        ("header_reserved", "H16 before H17", patched(patched(data, end, b"\1"), 48, bytes(8))),
        ("header_ranges", "H17 before H18", patched(patched(data, 24, b"\0"), 48, bytes(8))),
    ):  # fmt: skip
        bad(reason, about, broken)
    return suite


def grown(data: bytes) -> bytes:
    """A header whose directory and counts claim 100 more layers than there is room for."""
    (layers,) = struct.unpack_from("<I", data, 200)
    more = patched(data, 200, struct.pack("<I", layers + 100))
    return patched(more, 92, struct.pack("<I", 104))


def checks() -> Suite:
    suite = Suite("checks", "Headers against the object that was asked for.")
    layout = LAYOUTS["hybrid"][1]
    about_layout, shard, block_hash = model.canonical(layout).hex(), (0, 1, 0), HASH
    wanted = {
        "manifest": about_layout,
        "object_index": 0,
        "shard": shard_fields(shard),
        "block_hash": block_hash.hex(),
        "require_checksums": True,
    }

    def check(about: str, data: bytes, error=None, **change) -> None:
        suite.add("reader", "header.check", about, {"data": data.hex(), **wanted, **change},
                  result={}, error=error)  # fmt: skip

    def made(**fields) -> bytes:
        return model.Object(layout, 0, shard, block_hash, **fields).header

    right = model.Object(layout, 0, shard, block_hash)
    sizes, directory = right.fields["sizes"], right.fields["directory"]
    check("the object asked for", right.header)
    check("without checksums, to a reader that needs none",
          made(optional=0, checksums=[0] * len(sizes)), require_checksums=False)  # fmt: skip
    check("with checksums, to a reader that needs none", right.header, require_checksums=False)
    for name in ("gqa", "hash8", "hash16", "all_cuts", "recurrent", "segments"):
        other = LAYOUTS[name][1]
        corner = model.shards(other, 0)[-1]
        header = model.Object(other, 0, corner, hash_of(other)).header
        check(f"{name}: the object asked for", header, manifest=model.canonical(other).hex(),
              shard=shard_fields(corner), block_hash=hash_of(other).hex())  # fmt: skip
    other_namespace = {**layout, "identity": {**layout["identity"], "weights": "w2"}}
    bad = (
        ("wrong_fingerprint", "an object of another namespace",
         model.Object(other_namespace, 0, shard, block_hash).header),
        ("wrong_fingerprint", "one bit of the fingerprint",
         made(fingerprint=bytes([right.fields["fingerprint"][0] ^ 1])
              + right.fields["fingerprint"][1:])),
        ("wrong_groups", "another object of the same layout",
         made(group_bitmap=10,
              directory=[(1, 0, 2, [0, 1]), (3, 0, 2, [0, 1])])),
        ("wrong_groups", "one group less",
         made(group_bitmap=1, directory=[(0, 0, 5, range(5))], sizes=[1] * 5, checksums=[0] * 5)),
        ("wrong_shard", "another head shard, as a copy under another shard's key",
         model.Object(layout, 0, (0, 0, 0), block_hash).header),
        ("wrong_shard", "another layer shard", made(shard=(1, 1, 0))),
        ("wrong_shard", "another context shard", made(shard=(0, 1, 1))),
        ("wrong_block", "another block, as a copy under another block's key",
         made(block_hash=bytes(32))),
        ("wrong_block", "a hash that shares the first 31 bytes",
         made(block_hash=block_hash[:31] + b"\0")),
        ("wrong_block", "a shortened hash", made(block_hash=block_hash[:16])),
        ("wrong_block", "a longer hash", made(block_hash=block_hash + b"\0")),
        ("wrong_tokens", "a block of fewer tokens", made(num_tokens=3)),
        ("wrong_size", "a layer one byte longer", made(sizes=[sizes[0] + 1, *sizes[1:]])),
        ("wrong_size", "two layers of other sizes with the same sum",
         made(sizes=[sizes[0] + 1, sizes[1] - 1, *sizes[2:]])),
        ("wrong_size", "other first layer",
         made(directory=[(0, 1, 2, [1, 2]), *directory[1:]])),
        ("wrong_size", "other numbers of layers of the groups with the same sum",
         made(directory=[(0, 0, 1, [0]), (2, 0, 3, [0, 1, 2])])),
        ("incomplete", "one layer lacks", made(directory=[(0, 0, 2, [0]), *directory[1:]])),
        ("incomplete", "the last layer is there, an earlier one isn't",
         made(directory=[(0, 0, 2, [1]), *directory[1:]])),
        ("incomplete", "a whole group lacks", made(directory=[*directory[:1], (2, 0, 2, [])])),
        ("checksum_absent", "no checksums, to a reader that needs them",
         made(optional=0, checksums=[0] * len(sizes))),
        ("header_checksum", "the header is judged by itself first",
         right.header[:32] + b"\0" + right.header[33:]),
    )  # fmt: skip
    for reason, about, data in bad:
        check(about, data, reason)
    # Each breaks one rule and every later one.
    rules = (
        ("wrong_fingerprint", {"fingerprint": bytes(16)}),
        ("wrong_groups", {"group_bitmap": 3,
                          "directory": [(0, 0, 2, [0]), (1, 0, 2, [0])]}),
        ("wrong_shard", {"shard": (1, 1, 1)}),
        ("wrong_block", {"block_hash": b"\1"}),
        ("wrong_tokens", {"num_tokens": 1}),
        ("wrong_size", {"sizes": [1] * len(sizes)}),
        ("incomplete", {"directory": [(0, 0, 2, [0]), (2, 0, 2, [0])]}),
        ("checksum_absent", {"optional": 0, "checksums": [0] * len(sizes)}),
    )  # fmt: skip
    for number, (reason, _) in enumerate(rules):
        fields: dict = {}
        for _, change in reversed(rules[number:]):
            fields |= change
        check(f"this rule before every later one: {reason}", made(**fields), reason)
    larger = {"minor": 1, "later": bytes(64)}
    check("H5: a larger header, and all else is right", made(**larger), "wrong_size")
    check("H5 before the checksum", made(**larger)[:-1], "wrong_size")
    check("H5: no more than the layout's bytes are read",
          made(**larger)[: len(right.header)], "wrong_size")  # fmt: skip
    check("H5 before C1", made(**larger, fingerprint=bytes(16)), "wrong_size")
    check("H5 before H7", made(**larger, required=2), "wrong_size")
    smaller = made(directory=[(0, 0, 1, [0]), (2, 0, 1, [0])], sizes=sizes[:2],
                   checksums=[0] * 2, fingerprint=bytes(16))  # fmt: skip
    assert len(smaller) < len(right.header)
    check("H5: a smaller header", smaller, "wrong_size")
    check("H4 before H5", patched(right.header, 12, struct.pack("<I", 2 << 20)), "header_size")
    check("the right size, cut", right.header[:-1], "header_truncated")
    for nbytes in (16, 33):
        other_hash = (block_hash * 2)[:nbytes]
        check(f"C4: the hash asked for has {nbytes} bytes, the layout's have 32",
              made(block_hash=other_hash), "wrong_block", block_hash=other_hash.hex())  # fmt: skip

    def found(about: str, data: bytes, error=None, **change) -> None:
        nothing = {"object_index": None, "shard": None, "block_hash": None}
        check(f"by its layout alone: {about}", data, error, **nothing, **change)

    found("the object", right.header)
    found("another shard", model.Object(layout, 0, (0, 0, 0), block_hash).header)
    found("another entry of objects", model.Object(layout, 2, (0, 1, 0), bytes(32)).header)
    found("no checksums, but they are needed", made(optional=0, checksums=[0] * len(sizes)),
          "checksum_absent")  # fmt: skip
    found("another namespace, before groups are looked up",
          model.Object(LAYOUTS["gqa"][1], 0, (0, 0, 0), block_hash).header,
          "wrong_fingerprint")  # fmt: skip
    found("groups that share no object", made(group_bitmap=1, directory=[(0, 0, 4, range(4))]),
          "wrong_groups")  # fmt: skip
    found("groups of two objects", made(group_bitmap=7, directory=[*directory[:1], (1, 0, 0, []),
                                        *directory[1:]]), "wrong_groups")  # fmt: skip
    for place in ((1, 0, 0), (0, 2, 0), (0, 0, 1)):
        found(f"shard {place}, outside the grid", made(shard=place), "wrong_shard")
    found("a shard without bytes", model.Object(layout, 1, (0, 0, 0), block_hash,
                                                shard=(0, 1, 0)).header, "wrong_shard")  # fmt: skip
    found("a shortened hash", made(block_hash=block_hash[:16]), "wrong_block")
    found("other tokens", made(num_tokens=3), "wrong_tokens")
    found("a larger header of a later minor", made(**larger), "wrong_size")
    assert sum(sizes) == 64
    found("a larger header, which the sizes make up for",
          made(**larger, sizes=[0] * len(sizes)), "wrong_size")  # fmt: skip
    found("incomplete", made(directory=[(0, 0, 2, [0]), *directory[1:]]), "incomplete")
    return suite
