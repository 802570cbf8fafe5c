"""The Python library behind the command contract of spec/CONFORMANCE.md.

``python -m tests.vectors.adapter`` reads requests from standard input and answers on standard
output; :func:`answer` does the same for one request in this process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import kvformat as kv
from kvformat.checksum import checksum
from kvformat.header import ObjectHeader
from kvformat.identify import identify_object
from kvformat.objectmap import object_shards

CLASSES = ("keyer", "reader", "layer_reader", "writer", "resharder", "explainer")

Fields = dict[str, Any]
OPERATIONS: dict[str, Callable[[Fields], Fields]] = {}


def operation(name: str) -> Callable[[Callable[[Fields], Fields]], Callable[[Fields], Fields]]:
    """Registers what answers one operation of the contract."""

    def register(function: Callable[[Fields], Fields]) -> Callable[[Fields], Fields]:
        OPERATIONS[name] = function
        return function

    return register


def answer(request: Fields) -> Fields:
    """The answer to one request."""
    operation_of = OPERATIONS.get(request["op"])
    if operation_of is None:
        return {"id": request["id"], "unsupported": True}
    try:
        return {"id": request["id"], "result": operation_of(request["input"])}
    except kv.ChecksumMismatchError as error:
        where = {} if error.group is None else {"group": error.group, "layer": error.layer}
        return {"id": request["id"], "error": {"reason": error.reason.value, **where}}
    except kv.KVFormatError as error:
        return {"id": request["id"], "error": {"reason": error.reason.value}}


@operation("hello")
def hello(_: Fields) -> Fields:
    return {"implementation": "kvformat (Python)", "format": "1.0", "classes": list(CLASSES)}


# Class keyer


def _digests(layout: kv.Layout) -> Fields:
    return {
        "fingerprint": kv.fingerprint(layout).hex(),
        "content_fingerprint": kv.content_fingerprint(layout).hex(),
    }


@operation("manifest.parse")
def manifest_parse(given: Fields) -> Fields:
    expected = given["expected"]
    return _digests(
        kv.parse_manifest(
            bytes.fromhex(given["document"]), None if expected is None else bytes.fromhex(expected)
        )
    )


@operation("manifest.format")
def manifest_format(given: Fields) -> Fields:
    layout = kv.parse_layout(bytes.fromhex(given["document"]))
    return {"manifest": kv.manifest(layout).hex(), **_digests(layout)}


def _shard(fields: Fields) -> kv.Shard:
    return kv.Shard(fields["layer"], fields["head"], fields["context"])


def _shard_fields(shard: kv.Shard) -> Fields:
    return {"layer": shard.layer, "head": shard.head, "context": shard.context}


def _namespace(given: Fields) -> kv.Namespace:
    return kv.Namespace(given["tenant"], given["model"], bytes.fromhex(given["fingerprint"]))


@operation("key.format")
def key_format(given: Fields) -> Fields:
    key = kv.BlockKey(
        _namespace(given),
        int(given["group_bitmap"]),
        _shard(given["shard"]),
        bytes.fromhex(given["block_hash"]),
    )
    return {"key": kv.format_key(key)}


@operation("key.format_manifest")
def key_format_manifest(given: Fields) -> Fields:
    namespace = _namespace(given)
    return {
        "key": kv.format_key(kv.ManifestKey(namespace)),
        "prefix": kv.namespace_prefix(namespace),
    }


@operation("key.parse")
def key_parse(given: Fields) -> Fields:
    key = kv.parse_key(given["key"], given["digest_nbytes"])
    fields = {
        "tenant": key.namespace.tenant,
        "model": key.namespace.model,
        "fingerprint": key.namespace.fingerprint.hex(),
    }
    if isinstance(key, kv.ManifestKey):
        return {"kind": "manifest", **fields}
    return {
        "kind": "block",
        **fields,
        "group_bitmap": str(key.group_bitmap),
        "shard": _shard_fields(key.shard),
        "block_hash": key.block_hash.hex(),
    }


# Class reader


def _layout(given: Fields) -> kv.Layout:
    return kv.parse_manifest(bytes.fromhex(given["manifest"]))


def _map(given: Fields) -> kv.ObjectMap:
    return kv.ObjectMap(_layout(given), given["object_index"], _shard(given["shard"]))


@operation("object.map")
def object_map(given: Fields) -> Fields:
    found = _map(given)
    return {
        "group_bitmap": str(found.group_bitmap),
        "header_nbytes": str(found.header_nbytes),
        "object_nbytes": str(found.nbytes),
        "layers": [
            {"group": r.group, "layer": r.layer, "offset": str(r.offset), "nbytes": str(r.nbytes)}
            for r in found.layers
        ],
        "components": [
            {
                "group": r.group,
                "layer": r.layer,
                "component": r.component.name,
                "offset": str(r.offset),
                "nbytes": str(r.nbytes),
            }
            for r in found.components
        ],
    }


@operation("object.shards")
def shards(given: Fields) -> Fields:
    found = object_shards(_layout(given), given["object_index"])
    return {"shards": [_shard_fields(shard) for shard in found]}


@operation("header.decode")
def header_decode(given: Fields) -> Fields:
    header = kv.decode_header(bytes.fromhex(given["data"]))
    return {
        "minor": header.minor,
        "header_nbytes": header.header_nbytes,
        "required_features": str(header.required_features),
        "optional_features": str(header.optional_features),
        "fingerprint": header.fingerprint.hex(),
        "object_nbytes": str(header.object_nbytes),
        "write_id": header.write_id.hex(),
        "group_bitmap": str(header.group_bitmap),
        "num_tokens": header.num_tokens,
        "shard": _shard_fields(header.shard),
        "block_hash": header.block_hash.hex(),
        "extension": header.extension.hex(),
        "groups": [
            {
                "group": span.group,
                "first_layer": span.first_layer,
                "num_layers": span.num_layers,
                "complete": [
                    span.first_layer + i for i in range(span.num_layers) if span.complete >> i & 1
                ],
            }
            for span in header.spans
        ],
        "offsets": [str(number) for number in header.offsets],
        "sizes": [str(number) for number in header.sizes],
        "checksums": [str(number) for number in header.checksums],
    }


def _checked(data: bytes, given: Fields, *, require_checksums: bool) -> ObjectHeader:
    found = _map(given)
    header = kv.decode_header(data, found.header_nbytes)
    kv.check_header(
        header,
        found,
        kv.fingerprint(found.layout),
        bytes.fromhex(given["block_hash"]),
        require_checksums=require_checksums,
    )
    return header


@operation("header.check")
def header_check(given: Fields) -> Fields:
    data, require_checksums = bytes.fromhex(given["data"]), given["require_checksums"]
    if given["object_index"] is None:
        layout, header = _layout(given), kv.decode_header(data)
        identify_object(header, layout, kv.fingerprint(layout), require_checksums=require_checksums)
    else:
        _checked(data, given, require_checksums=require_checksums)
    return {}


def _check_size(data: bytes, header: ObjectHeader) -> None:
    if header.object_nbytes != len(data):
        raise kv.HeaderError(kv.Reason.WRONG_SIZE, "the object has another size than it says")


def _components(data: bytes, found: kv.ObjectMap, layers: list[tuple[int, int]]) -> Fields:
    return {
        "components": [
            {
                "group": r.group,
                "layer": r.layer,
                "component": r.component.name,
                "data": data[r.offset : r.offset + r.nbytes].hex(),
            }
            for layer in layers
            for r in found.components
            if (r.group, r.layer) == layer
        ]
    }


def _verify(data: bytes, header: ObjectHeader, found: kv.ObjectMap, index: int) -> None:
    layer = found.layers[index]
    kv.check_range(header, index, data[layer.offset : layer.offset + layer.nbytes])


@operation("object.read")
def object_read(given: Fields) -> Fields:
    data, found = bytes.fromhex(given["data"]), _map(given)
    header = _checked(data, given, require_checksums=True)
    _check_size(data, header)
    for index in range(len(found.layers)):
        _verify(data, header, found, index)
    return _components(data, found, [(r.group, r.layer) for r in found.layers])


# Class layer_reader


@operation("object.read_layers")
def object_read_layers(given: Fields) -> Fields:
    data, found = bytes.fromhex(given["data"]), _map(given)
    again = given["again"]
    header = _checked(data, given, require_checksums=again is None)
    _check_size(data, header)
    places = [(r.group, r.layer) for r in found.layers]
    wanted = [(place["group"], place["layer"]) for place in given["layers"]]
    if not set(wanted) <= set(places):
        raise kv.LayoutError(kv.Reason.LAYOUT_GRID, f"{wanted} are not all in the shard")
    if again is None:
        for place in wanted:
            _verify(data, header, found, places.index(place))
    else:
        second = _checked(bytes.fromhex(again), given, require_checksums=False)
        kv.check_same_write(header, second)
    return _components(data, found, wanted)


# Class writer


@operation("object.write")
def object_write(given: Fields) -> Fields:
    found = _map(given)
    whole = {
        (part["group"], part["layer"], part["component"]): bytes.fromhex(part["data"])
        for part in given["components"]
    }
    needed = {(r.group, r.layer, r.component.name): r.component.nbytes for r in found.components}
    if missing := needed.keys() - whole.keys():
        raise kv.HeaderError(kv.Reason.INCOMPLETE, f"{sorted(missing)} are not there")
    for name, nbytes in needed.items():
        if len(whole[name]) != nbytes:
            raise kv.LayoutError(kv.Reason.HEADER_SIZE, f"{name} has not {nbytes} bytes")
    memory, placement = _placed(found.layout, {name: whole[name] for name in needed})
    template = next(
        template
        for template in kv.plan_get(found.layout, placement)
        if template.object_map.object_index == found.object_index
        and template.object_map.shard == found.shard
    )
    payload = np.zeros(found.nbytes, np.uint8)
    for layer in template.layers:
        ranges = layer.bind(np.zeros(1, np.int64))
        for address, nbytes, offset in zip(*(row[0] for row in ranges), strict=True):
            payload[offset : offset + nbytes] = memory[address : address + nbytes]
    data = payload.tobytes()
    checksums = [checksum(data[r.offset : r.offset + r.nbytes]) for r in found.layers]
    header = kv.new_header(
        found,
        kv.fingerprint(found.layout),
        bytes.fromhex(given["block_hash"]),
        bytes.fromhex(given["write_id"]),
        checksums if given["checksums"] else None,
    )
    return {"object": (kv.encode_header(header) + data[found.header_nbytes :]).hex()}


def _placed(
    layout: kv.Layout, whole: dict[tuple[int, int, str], bytes]
) -> tuple[np.ndarray, kv.Placement]:
    """A memory of one block that holds whole components, one after the other."""
    memory = np.frombuffer(b"".join(whole.values()), np.uint8)
    bases, at = {}, 0
    for name, data in whole.items():
        bases[name] = at
        at += len(data)
    layers = []
    for number, group in enumerate(layout.groups):
        for index, layer in enumerate(group.layers):
            names = [(number, index, component.name) for component in layer.components]
            if not all(name in bases for name in names):
                continue
            placed = []
            for name, component in zip(names, layer.components, strict=True):
                stride, strides = component.item_nbytes, []
                for size in reversed(component.byte_sizes):
                    strides.append(stride)
                    stride *= size
                placed.append(
                    kv.ComponentPlacement(
                        component=component.name,
                        base_address=bases[name],
                        block_stride_nbytes=stride,
                        axis_strides_nbytes=tuple(reversed(strides)),
                        head_stop=component.num_heads,
                    )
                )
            layers.append(
                kv.LayerPlacement(group=number, layer=index, num_blocks=1, components=tuple(placed))
            )
    placement = kv.Placement(layers=tuple(layers), regions=(kv.Region(0, len(memory)),))
    return memory, placement


# Class resharder


def _placement(fields: Fields) -> kv.Placement:
    return kv.Placement(
        context_shards=fields["context_shards"],
        context_index=fields["context_index"],
        context_interleave=fields["context_interleave"],
        regions=tuple(kv.Region(int(r["address"]), int(r["nbytes"])) for r in fields["regions"]),
        layers=tuple(
            kv.LayerPlacement(
                group=layer["group"],
                layer=layer["layer"],
                num_blocks=layer["num_blocks"],
                components=tuple(
                    kv.ComponentPlacement(
                        component=memory["component"],
                        base_address=int(memory["base_address"]),
                        block_stride_nbytes=int(memory["block_stride_nbytes"]),
                        axis_strides_nbytes=tuple(map(int, memory["axis_strides_nbytes"])),
                        head_start=memory["head_start"],
                        head_stop=memory["head_stop"],
                    )
                    for memory in layer["components"]
                ),
            )
            for layer in fields["layers"]
        ),
    )


def _blocks(numbers: list[str]) -> np.ndarray:
    return np.array([int(number) for number in numbers], np.int64)


def _plan(given: Fields, plan: Callable[..., list[kv.RangeTemplate]]) -> Fields:
    blocks, limits = _blocks(given["blocks"]), given["limits"]
    result = []
    for template in plan(_layout(given), _placement(given["placement"])):
        rows: list[list[list[str]]] = [[] for _ in blocks]
        for layer in template.layers:
            calls = (
                [(slice(0, len(blocks)), layer.bind(blocks))]
                if limits is None
                else layer.batches(
                    blocks, kv.Limits(**{name: int(limit) for name, limit in limits.items()})
                )
            )
            for of_call, ranges in calls:
                for row, *columns in zip(rows[of_call], *ranges, strict=True):
                    row += [[str(a), str(o), str(n)] for a, n, o in zip(*columns, strict=True)]
        result.append(
            {
                "object_index": template.object_map.object_index,
                "shard": _shard_fields(template.object_map.shard),
                "rows": rows,
            }
        )
    return {"objects": result}


@operation("plan.put")
def plan_put(given: Fields) -> Fields:
    return _plan(given, kv.plan_put)


@operation("plan.get")
def plan_get(given: Fields) -> Fields:
    return _plan(given, kv.plan_get)


@operation("plan.transfer")
def plan_transfer(given: Fields) -> Fields:
    ours, theirs = _blocks(given["source_blocks"]), _blocks(given["target_blocks"])
    templates = kv.plan_transfer(
        _layout(given), _placement(given["source"]), _placement(given["target"])
    )
    result = []
    for template in templates:
        columns = template.bind(ours, theirs)
        flat = [list(map(str, numbers)) for numbers in zip(*columns, strict=True)]
        per_row = len(flat) // max(1, len(ours))
        rows = [flat[row * per_row : (row + 1) * per_row] for row in range(len(ours))]
        result.append({"group": template.group, "layer": template.layer, "rows": rows})
    return {"layers": sorted(result, key=lambda layer: (layer["group"], layer["layer"]))}


# Class explainer


@operation("layout.diff")
def layout_diff(given: Fields) -> Fields:
    a, b = (kv.parse_manifest(bytes.fromhex(given[side])) for side in ("a", "b"))
    return {"differences": [{"path": d.path, "a": d.a, "b": d.b} for d in kv.diff(a, b)]}


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
