"""Headers to damage: valid ones, and a way to change one field and keep its checksum right."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack_into

import xxhash
from model_layouts import layout, model

from kvformat import Layout, ObjectHeader, ObjectMap, Shard, encode_header, fingerprint, new_header

BLOCK_HASH = bytes(range(32))
WRITE_ID = bytes(range(16, 32))

#: Where the fields lie, from the tables of the specification: offset and struct code.
FIELDS = {
    "magic": (0, "8s"),
    "major": (8, "H"),
    "minor": (10, "H"),
    "header_nbytes": (12, "I"),
    "required": (16, "Q"),
    "optional": (24, "Q"),
    "fingerprint": (32, "16s"),
    "object_nbytes": (48, "Q"),
    "write_id": (56, "16s"),
    "bitmap": (72, "Q"),
    "num_tokens": (80, "I"),
    "layer_shard": (84, "H"),
    "head_shard": (86, "H"),
    "context_shard": (88, "H"),
    "hash_nbytes": (90, "B"),
    "num_groups": (91, "B"),
    "num_ranges": (92, "I"),
    "hash": (96, "64s"),
    "extension": (160, "32s"),
}
DIRECTORY_AT = 192


def object_map(source: Layout, object_index: int = 0, shard: Shard | None = None) -> ObjectMap:
    """The map of one object."""
    return ObjectMap(source, object_index, Shard() if shard is None else shard)


#: Two groups in one object (2 + 2 ranges), and one group (3 ranges).
TWO_GROUPS = model("sparse with indexer and scales")
ONE_GROUP = model("mla")
MAPS = {"two groups": object_map(TWO_GROUPS), "one group": object_map(ONE_GROUP)}


def header(of: ObjectMap, checksums: Sequence[int] | None = ()) -> ObjectHeader:
    """A right header for an object; by default with some checksums."""
    given = range(1, len(of.layers) + 1) if checksums == () else checksums
    return new_header(of, fingerprint(of.layout), BLOCK_HASH, WRITE_ID, given)


def encoded(name: str = "two groups") -> bytes:
    """The bytes of a right header."""
    return encode_header(header(MAPS[name]))


def sealed(data: bytes | bytearray) -> bytes:
    """The same bytes with the checksum that belongs to them in the place that they claim."""
    data = bytearray(data)
    end = int.from_bytes(data[12:16], "little")
    if 256 <= end <= len(data):
        pack_into("<Q", data, end - 8, xxhash.xxh3_64_intdigest(bytes(data[: end - 8])))
    return bytes(data)


def put_field(data: bytes, name: str, value: int | bytes) -> bytes:
    """Another value in a field of the fixed part, with a right checksum."""
    offset, code = FIELDS[name]
    return put_at(data, offset, code, value)


def put_at(data: bytes, offset: int, code: str, *values: int | bytes) -> bytes:
    """Other values at an offset, with a right checksum."""
    changed = bytearray(data)
    pack_into("<" + code, changed, offset, *values)
    return sealed(changed)


def many_layers(num_layers: int) -> ObjectMap:
    """An object of one group with so many layers."""
    one = ONE_GROUP.groups[0]
    layers = tuple(
        type(one.layers[0])(name=f"{i}", components=one.layers[0].components)
        for i in range(num_layers)
    )
    group = type(one)(kind=one.kind, block_size=one.block_size, layers=layers)
    return object_map(layout([group]))
