"""The format, worked out the slow and plain way, for the expected values of the vectors.

Nothing here comes from the library. Every element of a block is visited one by one and dealt to the
shard that owns it; the owner of a head is found by the inverse of the interval rule of the text
(head h of H in n shards belongs to shard floor(h*n/H)), so that a mistake in one is not repeated in
the other.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from urllib.parse import quote

import xxhash

BITS = {
    "bfloat16": 16, "float16": 16, "float32": 32, "float64": 64, "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4, "int4": 4, "int8": 8, "int16": 16, "int32": 32, "int64": 64, "uint4": 4,
    "uint8": 8,
}  # fmt: skip
SHORT_ESCAPES = {
    '"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r",
}  # fmt: skip


def canonical(value) -> bytes:
    """RFC 8785 bytes of dicts, lists, text, integers and booleans."""
    if value is True:
        return b"true"
    if value is False:
        return b"false"
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, str):
        return _string(value).encode()
    if isinstance(value, dict):
        fields = sorted((_string(name).encode(), canonical(below)) for name, below in value.items())
        return b"{" + b",".join(name + b":" + below for name, below in fields) + b"}"
    return b"[" + b",".join(canonical(below) for below in value) + b"]"


def _string(text: str) -> str:
    def one(char: str) -> str:
        return SHORT_ESCAPES.get(char) or (f"\\u{ord(char):04x}" if char < " " else char)

    return '"' + "".join(map(one, text)) + '"'


def fingerprint(layout: dict) -> bytes:
    return hashlib.sha256(canonical(layout)).digest()[:16]


def content_fingerprint(layout: dict) -> bytes:
    return fingerprint({name: value for name, value in layout.items() if name != "grid"})


def escape(text: str) -> str:
    if text == "":
        return "~"
    escaped = quote(text.encode(), safe="").replace("~", "%7E")
    return "%2E" + escaped[1:] if escaped.startswith(".") else escaped


def namespace(tenant: str, model: str, digest: bytes) -> str:
    return "/".join(("kvformat1", escape(tenant), escape(model), digest.hex()))


def key(tenant: str, model: str, digest: bytes, bitmap: int, shard, block_hash: bytes) -> str:
    layer, head, context = shard
    coordinates = f"l{layer:04x}h{head:04x}c{context:04x}"
    return f"{namespace(tenant, model, digest)}/g{bitmap:016x}/{coordinates}/{block_hash.hex()}"


def unit_nbytes(component: dict) -> int:
    return max(8, BITS[component["dtype"]]) // 8


def unit_sizes(component: dict) -> list[int]:
    """Axis sizes, counted in bytes along the last axis for dtypes of less than a byte."""
    bits = BITS[component["dtype"]]
    sizes = list(component["sizes"])
    if bits < 8:
        sizes[-1] = sizes[-1] * bits // 8
    return sizes


def units(component: dict):
    """Every element of a component in byte order: its index along each axis."""
    return itertools.product(*(range(size) for size in unit_sizes(component)))


def axis_index(component: dict, index, axis: str) -> int:
    return index[component["axes"].index(axis)] if axis in component["axes"] else 0


def axis_size(component: dict, axis: str) -> int:
    return component["sizes"][component["axes"].index(axis)] if axis in component["axes"] else 1


def layer_shard(layout: dict, group: int, layer: int) -> int:
    starts = layout["grid"]["layer_starts"][group]
    return max(j for j, start in enumerate(starts) if start <= layer)


def owner(layout: dict, group: int, layer: int, component: dict, index) -> tuple[int, int, int]:
    """The shard that holds one element."""
    grid = layout["grid"]
    head = axis_index(component, index, "head")
    token = axis_index(component, index, "token")
    return (
        layer_shard(layout, group, layer),
        head * grid["head_shards"] // axis_size(component, "head"),
        token // grid["context_interleave"] % grid["context_shards"],
    )


def parts(layout: dict, object_index: int):
    """(group, layer, component) of an object, in payload order, over all layer shards."""
    for group in layout["objects"][object_index]:
        for layer, fields in enumerate(layout["groups"][group]["layers"]):
            for component in fields["components"]:
                yield group, layer, component


def shards(layout: dict, object_index: int) -> list[tuple[int, int, int]]:
    """The shards that have an object: those that own an element."""
    return sorted(
        {
            owner(layout, group, layer, component, index)
            for group, layer, component in parts(layout, object_index)
            for index in units(component)
        }
    )


def component_ranges(layout: dict, object_index: int, shard):
    """(group, layer, component, element indices) of what a shard holds, empty ones included."""
    return [
        (
            group,
            layer,
            component,
            [i for i in units(component) if owner(layout, group, layer, component, i) == shard],
        )
        for group, layer, component in parts(layout, object_index)
        if layer_shard(layout, group, layer) == shard[0]
    ]


def block_bytes(seed: str, group: int, layer: int, component: dict) -> bytes:
    """Made-up content of one whole component."""
    name = f"{seed}/{group}/{layer}/{component['name']}"
    stream = b""
    while len(stream) < component["nbytes"]:
        stream += hashlib.sha256(f"{name}/{len(stream)}".encode()).digest()
    return stream[: component["nbytes"]]


def pack(component: dict, data: bytes, held) -> bytes:
    """The bytes of some elements of a component."""
    unit = unit_nbytes(component)
    sizes = unit_sizes(component)
    packed = b""
    for index in held:
        position = 0
        for place, size in zip(index, sizes, strict=True):
            position = position * size + place
        packed += data[position * unit : (position + 1) * unit]
    return packed


class Object:
    """One object, worked out: what its header says, its payload, and where everything lies."""

    def __init__(self, layout: dict, object_index: int, shard, block_hash: bytes, /, **fields):
        self.layout, self.object_index, self.shard = layout, object_index, tuple(shard)
        seed = fields.pop("seed", "block")
        self.components = [
            (
                group,
                layer,
                component,
                pack(component, block_bytes(seed, group, layer, component), held),
            )
            for group, layer, component, held in component_ranges(layout, object_index, self.shard)
        ]
        self.layers: dict[tuple[int, int], bytes] = {}
        for group, layer, _, data in self.components:
            self.layers[group, layer] = self.layers.get((group, layer), b"") + data
        groups = layout["objects"][object_index]
        directory = []
        for group in groups:
            held = [layer for g, layer in self.layers if g == group]
            # A group without layers here: its interval is empty, and begins where the shard does.
            first = held[0] if held else layout["grid"]["layer_starts"][group][self.shard[0]]
            directory.append((group, first, len(held), held))
        self.fields = {
            "fingerprint": fingerprint(layout),
            "write_id": bytes(range(16)),
            "group_bitmap": sum(2**group for group in groups),
            "num_tokens": layout["groups"][groups[0]]["block_size"],
            "shard": self.shard,
            "block_hash": block_hash,
            "directory": directory,
            "sizes": [len(data) for data in self.layers.values()],
            "checksums": [xxhash.xxh3_64_intdigest(data) for data in self.layers.values()],
            **fields,
        }
        self.header = header(**self.fields)
        self.payload = b"".join(self.layers.values())
        self.data = self.header + self.payload

    def offsets(self) -> list[int]:
        """Offsets of the component ranges."""
        offsets, at = [], len(self.header)
        for _, _, _, data in self.components:
            offsets.append(at)
            at += len(data)
        return offsets


def seal(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def header(
    *,
    fingerprint: bytes,
    write_id: bytes,
    group_bitmap: int,
    num_tokens: int,
    shard,
    block_hash: bytes,
    directory,
    sizes,
    checksums,
    minor: int = 0,
    required: int = 0,
    optional: int = 1,
    extension: bytes = b"",
    later: bytes = b"",
) -> bytes:
    """The bytes of a header. ``later`` stands after the checksums: data of a later minor."""
    entries, words = b"", b""
    for group, first, num_layers, complete in directory:
        entries += struct.pack("<HHIII", group, 0, first, num_layers, 0)
        bits = [0] * (-(-num_layers // 64) * 64)
        for layer in complete:
            bits[layer - first] = 1
        for at in range(0, len(bits), 64):
            words += struct.pack("<Q", sum(bit << i for i, bit in enumerate(bits[at : at + 64])))
    used = 192 + len(entries) + len(words) + 24 * len(sizes) + len(later) + 8
    nbytes = used + -used % 64
    offsets, at = [], nbytes
    for size in sizes:
        offsets.append(at)
        at += size
    body = b"\x8bKVF\r\n\x1a\n"
    body += struct.pack("<HHI", 1, minor, nbytes)
    body += struct.pack("<QQ", required, optional)
    body += fingerprint
    body += struct.pack("<Q", at)
    body += write_id
    body += struct.pack("<QI", group_bitmap, num_tokens)
    body += struct.pack("<HHH", *shard)
    body += struct.pack("<BBI", len(block_hash), len(directory), len(sizes))
    body += block_hash + bytes(64 - len(block_hash))
    body += extension + bytes(32 - len(extension))
    body += entries + words
    for column in (offsets, sizes, checksums):
        body += b"".join(struct.pack("<Q", number) for number in column)
    body += later
    return seal(body + bytes(nbytes - 8 - len(body)))
