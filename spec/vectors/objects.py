"""Vectors about whole objects: read, read layer by layer, written."""

from __future__ import annotations

import model
import xxhash
from layouts import LAYOUTS
from reader import HASH, hash_of
from suite import Suite, shard_fields


def target(layout: dict, object_index: int, shard) -> dict:
    return {
        "manifest": model.canonical(layout).hex(),
        "object_index": object_index,
        "shard": shard_fields(shard),
        "block_hash": hash_of(layout).hex(),
    }


def components(made: model.Object, layers=None) -> list[dict]:
    return [
        {"group": group, "layer": layer, "component": component["name"], "data": data.hex()}
        for wanted in (made.layers if layers is None else layers)
        for group, layer, component, data in made.components
        if (group, layer) == wanted
    ]


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def whole() -> Suite:
    suite = Suite("objects", "Whole objects: right ones, and every way to be the wrong one.")
    for name, (about, layout) in LAYOUTS.items():
        for object_index in range(len(layout["objects"])):
            shards = model.shards(layout, object_index)
            for shard in dict.fromkeys((shards[0], shards[-1])):
                made = model.Object(layout, object_index, shard, hash_of(layout), seed=name)
                suite.add("reader", "object.read", f"{name}: {about}",
                          {"data": made.data.hex(), **target(layout, object_index, shard)},
                          result={"components": components(made)})  # fmt: skip
    layout, shard = LAYOUTS["hybrid"][1], (0, 0, 0)
    wanted = target(layout, 0, shard)
    made = model.Object(layout, 0, shard, HASH)
    start = len(made.header)

    def bad(error, about: str, data: bytes, **change) -> None:
        suite.add("reader", "object.read", about, {"data": data.hex(), **wanted, **change},
                  error=error)  # fmt: skip

    at = start
    for (group, layer), data in made.layers.items():
        for about, place in (("first", at), ("last", at + len(data) - 1)):
            bad({"reason": "checksum_mismatch", "group": group, "layer": layer},
                f"one bit flipped in the {about} byte of group {group} layer {layer}",
                flipped(made.data, place, 7))  # fmt: skip
        at += len(data)
    first = {"reason": "checksum_mismatch", "group": 0, "layer": 0}
    bad(first, "two layers damaged: the first is named",
        flipped(flipped(made.data, start), len(made.data) - 1))  # fmt: skip
    bad(first, "zeros instead of the payload, as after a write that never came",
        made.header + bytes(len(made.payload)))  # fmt: skip
    other = model.Object(layout, 0, shard, HASH, seed="another")
    bad(first, "the header of one write, the payload of another", made.header + other.payload)
    middle = len(made.layers[0, 0])
    bad({"reason": "checksum_mismatch", "group": 0, "layer": 1}, "replaced after the first layer",
        made.data[: start + middle] + other.data[start + middle :])  # fmt: skip
    numbers = made.fields["checksums"]
    swapped = model.Object(
        layout, 0, shard, HASH,
        checksums=[int.from_bytes(n.to_bytes(8, "big"), "little") for n in numbers],
    )  # fmt: skip
    bad(first, "checksums in big-endian order", swapped.data)
    seeded = [xxhash.xxh3_64_intdigest(data, seed=1) for data in made.layers.values()]
    bad(first, "checksums with another seed",
        model.Object(layout, 0, shard, HASH, checksums=seeded).data)  # fmt: skip
    older = [xxhash.xxh64_intdigest(data) for data in made.layers.values()]
    bad(first, "XXH64 instead of XXH3", model.Object(layout, 0, shard, HASH, checksums=older).data)
    bad("wrong_size", "one byte short", made.data[:-1])
    bad("wrong_size", "one byte too long", made.data + b"\0")
    bad("wrong_size", "only the header", made.header)
    bad("header_truncated", "cut in the header", made.data[: start - 1])
    bad("header_truncated", "nothing", b"")
    bad("header_magic", "the payload without its header", made.payload + made.payload)
    bad("header_magic", "not yet written header", bytes(start) + made.payload)
    bad("header_checksum", "one bit of the header flipped", flipped(made.data, 100))
    bad("wrong_block", "the object of another block under this key",
        model.Object(layout, 0, shard, bytes(32)).data)  # fmt: skip
    bad("wrong_shard", "the object of another shard under this key",
        model.Object(layout, 0, (0, 1, 0), HASH).data)  # fmt: skip
    bad("wrong_groups", "another object of the block under this key",
        model.Object(layout, 0, shard, HASH, group_bitmap=10, directory=[
            (group + 1, *entry) for group, *entry in made.fields["directory"]]).data)  # fmt: skip
    bad("wrong_fingerprint", "an object of another namespace under this key",
        model.Object({**layout, "identity": {**layout["identity"], "weights": "w2"}}, 0, shard,
                     HASH).data)  # fmt: skip
    bad("wrong_fingerprint", "the same shape in another axis order is another layout",
        model.Object(LAYOUTS["fused"][1], 0, shard, HASH).data,
        **target(LAYOUTS["packed"][1], 0, shard))  # fmt: skip
    directory = made.fields["directory"]
    bad(
        "incomplete",
        "a layer that was never completed",
        model.Object(layout, 0, shard, HASH, directory=[(0, 0, 2, [0]), directory[1]]).data,
    )
    bad("checksum_absent", "an object without checksums",
        model.Object(layout, 0, shard, HASH, optional=0, checksums=[0] * 4).data)  # fmt: skip
    return suite


def layers() -> Suite:
    suite = Suite(
        "layers", "Single layers of an object, verified by checksum or by a second header."
    )
    # The indexer of this shard has no bytes: two layers with bytes, two without.
    layout, shard = LAYOUTS["hybrid"][1], (0, 1, 0)
    wanted = target(layout, 0, shard)
    made = model.Object(layout, 0, shard, HASH)
    again = model.Object(layout, 0, shard, HASH, write_id=bytes(16))
    bare = model.Object(layout, 0, shard, HASH, optional=0, checksums=[0] * 4)
    places = list(made.layers)

    def damaged(obj: model.Object, keep) -> bytes:
        """The object with every layer but those of ``keep`` filled with other bytes."""
        return obj.header + b"".join(
            data if layer in keep else b"\xa5" * len(data) for layer, data in obj.layers.items()
        )

    def read(about: str, data: bytes, which, *, second=None, error=None) -> None:
        given = {
            "data": data.hex(), "again": None if second is None else second.hex(), **wanted,
            "layers": [{"group": group, "layer": layer} for group, layer in which],
        }  # fmt: skip
        suite.add("layer_reader", "object.read_layers", about, given,
                  result={"components": components(made, which)}, error=error)  # fmt: skip

    for place in places:
        read(f"group {place[0]} layer {place[1]} alone", damaged(made, [place]), [place])
    read("all layers", made.data, places)
    read("two layers, in the order asked for", damaged(made, [places[3], places[1]]),
         [places[3], places[1]])  # fmt: skip
    for place in places[:2]:
        error = {"reason": "checksum_mismatch", "group": place[0], "layer": place[1]}
        read(f"group {place[0]} layer {place[1]} is the damaged one",
             damaged(made, [p for p in places if p != place]), [place], error=error)  # fmt: skip
    read("a good layer before a damaged one makes it no better", damaged(made, places[:1]),
         places[:2], error={"reason": "checksum_mismatch", "group": 0, "layer": 1})  # fmt: skip
    read("no checksums, but they are to be verified", bare.data, places, error="checksum_absent")
    read("no checksums, the same header twice", bare.data, places, second=bare.data)
    read("checksums that are not verified, the same header twice", made.data, places[:2],
         second=made.data)  # fmt: skip
    read("replaced in between", made.data, places, second=again.data, error="replaced")
    read("replaced by the same content with another write id", bare.data, places,
         second=model.Object(layout, 0, shard, HASH, optional=0, checksums=[0] * 4,
                             write_id=b"\1" * 16).data, error="replaced")  # fmt: skip
    read("replaced by another block's object", made.data, places,
         second=model.Object(layout, 0, shard, bytes(32)).data, error="wrong_block")  # fmt: skip
    read("gone in between, zeros in its place", made.data, places, second=bytes(len(made.data)),
         error="header_magic")  # fmt: skip
    read("incomplete the second time", made.data, places,
         second=model.Object(layout, 0, shard, HASH,
                             directory=[(0, 0, 2, [0]), made.fields["directory"][1]]).data,
         error="incomplete")  # fmt: skip
    read("wrong the first time: a right second header doesn't help",
         model.Object(layout, 0, shard, bytes(32)).data, places, second=made.data,
         error="wrong_block")  # fmt: skip
    read("one byte too long, in which no layer lies", made.data + b"\0", places,
         error="wrong_size")  # fmt: skip
    read("one byte short, in a layer that is not asked for", made.data[:-1], places[:1],
         error="wrong_size")  # fmt: skip
    read("of the second reading only the header is there", made.data, places,
         second=made.header)  # fmt: skip
    read("after the header of the second reading is something else", bare.data, places[:1],
         second=bare.header + bytes(3))  # fmt: skip
    read("a header cut the second time", made.data, places, second=made.header[:-1],
         error="header_truncated")  # fmt: skip
    later = model.Object(layout, 0, shard, HASH, minor=1, optional=3, later=bytes(8))
    read("a later minor with a header of the same size", later.data, places)
    larger = model.Object(layout, 0, shard, HASH, minor=1, optional=3, later=bytes(64))
    read("a later minor with a larger header", larger.data, places, error="wrong_size")
    read("a larger header the second time", made.data, places, second=larger.data,
         error="wrong_size")  # fmt: skip
    read("a layer that is not in the shard", made.data, [(0, 0), (2, 2)], error="layout_grid")
    read("a group that is not in the object", made.data, [(1, 0)], error="layout_grid")
    return suite


def writers() -> Suite:
    suite = Suite("writers", "Objects as a writer makes them from whole blocks.")
    for name, (about, layout) in LAYOUTS.items():
        for object_index in range(len(layout["objects"])):
            whole_block = [
                {
                    "group": group, "layer": layer, "component": component["name"],
                    "data": model.block_bytes(name, group, layer, component).hex(),
                }
                for group, layer, component in model.parts(layout, object_index)
            ]  # fmt: skip
            shards = model.shards(layout, object_index)
            for shard in dict.fromkeys((shards[0], shards[-1])):
                made = model.Object(layout, object_index, shard, hash_of(layout), seed=name)
                suite.add(
                    "writer", "object.write", f"{name}: {about}",
                    {**target(layout, object_index, shard), "write_id": bytes(range(16)).hex(),
                     "checksums": True, "components": whole_block},
                    result={"object": made.data.hex()},
                )  # fmt: skip
    name, shard = "all_cuts", (1, 0, 1)
    layout = LAYOUTS[name][1]
    given = {**target(layout, 0, shard), "write_id": "ff" * 16, "checksums": False}
    parts = [
        {
            "group": group, "layer": layer, "component": component["name"],
            "data": model.block_bytes(name, group, layer, component).hex(),
        }
        for group, layer, component in model.parts(layout, 0)
    ]  # fmt: skip
    held = [part for part in parts if part["layer"] == 2]
    bare = model.Object(layout, 0, shard, HASH, seed=name, optional=0, checksums=[0],
                        write_id=b"\xff" * 16)  # fmt: skip
    suite.add("writer", "object.write", "without checksums, only the layers of the shard given",
              {**given, "components": held}, result={"object": bare.data.hex()})  # fmt: skip
    for about, components_given in (
        ("no layers", []),
        ("a component of the layer lacks", held[1:]),
        ("only layers of another shard", [part for part in parts if part["layer"] != 2]),
    ):
        suite.add("writer", "object.write", f"{about}: nothing to commit",
                  {**given, "components": components_given}, error="incomplete")  # fmt: skip
    right = {**given, "components": held}
    first, *others = held
    for reason, about, change in (
        ("header_size", "a component one byte short",
         {"components": [{**first, "data": first["data"][:-2]}, *others]}),
        ("header_size", "a component one byte too long",
         {"components": [{**first, "data": first["data"] + "00"}, *others]}),
        ("header_size", "a component without bytes",
         {"components": [{**first, "data": ""}, *others]}),
        ("header_hash", "no block hash", {"block_hash": ""}),
        ("header_hash", "a shortened block hash", {"block_hash": HASH[:16].hex()}),
        ("header_hash", "a block hash of 33 bytes", {"block_hash": HASH.hex() + "00"}),
        ("header_hash", "a block hash of 65 bytes", {"block_hash": "00" * 65}),
        ("header_size", "a write id of 15 bytes", {"write_id": "ff" * 15}),
        ("header_size", "a write id of 17 bytes", {"write_id": "ff" * 17}),
        ("layout_grid", "a shard outside the grid", {"shard": shard_fields((2, 0, 0))}),
        ("layout_objects", "an object that the layout hasn't", {"object_index": 1}),
    ):  # fmt: skip
        suite.add("writer", "object.write", about, {**right, **change}, error=reason)
    return suite
