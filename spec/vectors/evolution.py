"""Vectors of the class reader about objects of later minors."""

from __future__ import annotations

import struct

import model
from layouts import LAYOUTS
from reader import FIELDS, HASH, grown, header_fields, patched
from suite import Suite, shard_fields


def evolution() -> Suite:
    suite = Suite("evolution", "What a later minor may do, and what a reader of 1.0 makes of it.")
    layout = LAYOUTS["gqa"][1]
    target = {
        "manifest": model.canonical(layout).hex(),
        "object_index": 0,
        "shard": shard_fields((0, 0, 0)),
        "block_hash": HASH.hex(),
    }

    def made(**fields) -> model.Object:
        return model.Object(layout, 0, (0, 0, 0), HASH, **fields)

    def components(obj: model.Object) -> list:
        return [
            {"group": g, "layer": n, "component": c["name"], "data": data.hex()}
            for g, n, c, data in obj.components
        ]

    later = {
        "minor 1 that uses nothing new": {"minor": 1},
        "minor 65535 that uses nothing new": {"minor": 65535},
        "minor 1, an unknown optional bit": {"minor": 1, "optional": 3},
        "minor 1, an unknown optional bit with extension data":
            {"minor": 1, "optional": 3, "extension": b"\xee" * 32},
        "minor 1, data in what is padding in 1.0":
            {"minor": 1, "optional": 3, "later": b"\xdd" * 8},
    }  # fmt: skip
    for about, fields in later.items():
        obj = made(**fields)
        assert len(obj.header) == len(made().header)
        suite.add("reader", "header.decode", about, {"data": obj.header.hex()},
                  result=header_fields(obj.fields, obj.header))  # fmt: skip
        suite.add(
            "reader",
            "header.check",
            about,
            {"data": obj.header.hex(), **target, "require_checksums": True},
            result={},
        )
        suite.add("reader", "object.read", about, {"data": obj.data.hex(), **target},
                  result={"components": components(obj)})  # fmt: skip
    larger = made(minor=1, optional=3, later=b"\xdd" * 100)
    assert len(larger.header) > len(made().header)
    about = "minor 1 with a larger header"
    suite.add(
        "reader",
        "header.decode",
        f"{about}: it can be decoded",
        {"data": larger.header.hex()},
        result=header_fields(larger.fields, larger.header),
    )
    suite.add(
        "reader",
        "header.check",
        f"{about}: its offsets are not the layout's",
        {"data": larger.header.hex(), **target, "require_checksums": True},
        error="wrong_size",
    )
    suite.add("reader", "object.read", f"{about}: a miss", {"data": larger.data.hex(), **target},
              error="wrong_size")  # fmt: skip
    header = made(minor=1).header
    for reason, about, data in (
        ("header_feature", "minor 1 with a required bit", made(minor=1, required=2).header),
        ("header_feature", "minor 0 with a required bit", made(required=1).header),
        (
            "header_reserved",
            "minor 1, extension data without a bit that could own it",
            made(minor=1, extension=b"\1").header,
        ),
        (
            "header_reserved",
            "minor 1, a reserved byte of a group entry",
            patched(header, 194, b"\1"),
        ),
        (
            "header_size",
            "minor 1 with a header smaller than its tables",
            grown(patched(model.header(**FIELDS), 10, b"\1")),
        ),
        ("header_version", "major 2, minor 0", patched(header, 8, b"\2\0\0\0")),
        (
            "header_ranges",
            "minor 1, ranges that begin before its larger header",
            patched(larger.header, 192 + 16 + 8, struct.pack("<Q", len(header))),
        ),
    ):
        suite.add("reader", "header.decode", about, {"data": data.hex()}, error=reason)
    return suite
