"""Ranks' memories and the ranges of plans, found element by element.

Where an element lies in memory, and where in the object or in the other memory, is worked out for
each one; runs are put together afterwards.
"""

from __future__ import annotations

import model
from suite import shard_fields


def place(
    fields: dict,
    *,
    heads=None,
    layers=None,
    context=(1, 0, 1),
    order=None,
    padding=0,
    num_blocks=3,
    base=0x10000,
) -> dict:
    """A rank's memory, component after component, each with its blocks one after the other.

    ``heads(H)`` gives the interval of a component of H heads; ``layers`` the (group, layer) placed;
    ``order(axes)`` the order of the axes in memory, outermost first.
    """
    shards, context_index, interleave = context
    placed, regions = [], []
    for number, fields_of_group in enumerate(fields["groups"]):
        for layer, fields_of_layer in enumerate(fields_of_group["layers"]):
            if layers is not None and (number, layer) not in layers:
                continue
            memories = []
            for part in fields_of_layer["components"]:
                num_heads = model.axis_size(part, "head")
                start, stop = (0, num_heads) if heads is None else heads(num_heads)
                sizes = dict(zip(part["axes"], model.unit_sizes(part), strict=True))
                if "head" in sizes:
                    sizes["head"] = stop - start
                if "token" in sizes:
                    sizes["token"] = sum(
                        t // interleave % shards == context_index for t in range(sizes["token"])
                    )
                stride, strides = model.unit_nbytes(part), {}
                for axis in reversed(part["axes"] if order is None else order(part["axes"])):
                    strides[axis] = stride
                    stride *= sizes[axis]
                block_stride = max(stride, 1) + padding
                memories.append(
                    {
                        "component": part["name"],
                        "base_address": str(base),
                        "block_stride_nbytes": str(block_stride),
                        "axis_strides_nbytes": [str(strides[axis]) for axis in part["axes"]],
                        "head_start": start,
                        "head_stop": stop,
                    }
                )
                regions.append({"address": str(base), "nbytes": str(num_blocks * block_stride)})
                base += num_blocks * block_stride + 64
            placed.append(
                {"group": number, "layer": layer, "num_blocks": num_blocks, "components": memories}
            )
    return {
        "context_shards": shards,
        "context_index": context_index,
        "context_interleave": interleave,
        "regions": regions,
        "layers": placed,
    }


def addresses(part: dict, memory: dict, placement: dict, block: int) -> dict:
    """Element index -> address, for the elements of a component that a rank holds."""
    shards, interleave = placement["context_shards"], placement["context_interleave"]
    tokens = [
        token
        for token in range(model.axis_size(part, "token"))
        if token // interleave % shards == placement["context_index"]
    ]
    found = {}
    for index in model.units(part):
        head, token = (model.axis_index(part, index, axis) for axis in ("head", "token"))
        if token not in tokens or not memory["head_start"] <= head < memory["head_stop"]:
            continue
        address = int(memory["base_address"]) + block * int(memory["block_stride_nbytes"])
        for axis, number, stride in zip(
            part["axes"], index, memory["axis_strides_nbytes"], strict=True
        ):
            if axis == "head":
                number -= memory["head_start"]
            elif axis == "token":
                number = tokens.index(number)
            address += number * int(stride)
        found[index] = address
    return found


def joined(pairs, unit: int) -> list[list[int]]:
    """(a, b) of single units as the longest runs, by b."""
    runs: list[list[int]] = []
    for a, b in sorted(pairs, key=lambda pair: pair[1]):
        if runs and runs[-1][0] + runs[-1][2] == a and runs[-1][1] + runs[-1][2] == b:
            runs[-1][2] += unit
        else:
            runs.append([a, b, unit])
    return runs


def merged(runs) -> list[list[str]]:
    out: list[list[int]] = []
    for a, b, nbytes in sorted(runs, key=lambda run: run[1]):
        if out and out[-1][0] + out[-1][2] == a and out[-1][1] + out[-1][2] == b:
            out[-1][2] += nbytes
        else:
            out.append([a, b, nbytes])
    return [[str(number) for number in run] for run in out]


def layer_memories(fields: dict, placement: dict):
    """(group, layer) -> [(component, its memory)] in the order of the layout."""
    return {
        (p["group"], p["layer"]): [
            (part, next(m for m in p["components"] if m["component"] == part["name"]))
            for part in fields["groups"][p["group"]]["layers"][p["layer"]]["components"]
        ]
        for p in placement["layers"]
    }


def object_ranges(fields: dict, placement: dict, blocks, *, whole: bool) -> list[dict]:
    """The result of ``plan.get``; of ``plan.put`` with only the objects that are held whole."""
    if not blocks:  # which objects there are doesn't depend on the blocks
        return [
            {**found, "rows": []} for found in object_ranges(fields, placement, [0], whole=whole)
        ]
    memories = layer_memories(fields, placement)
    result = []
    for object_index in range(len(fields["objects"])):
        for shard in model.shards(fields, object_index):
            made = model.Object(fields, object_index, shard, b"\0")
            at = len(made.header)
            rows: list[list] = [[] for _ in blocks]
            for number, layer, part, held in model.component_ranges(fields, object_index, shard):
                unit = model.unit_nbytes(part)
                for component_of, memory in memories.get((number, layer), []):
                    if component_of is not part:
                        continue
                    for row, block in zip(rows, blocks, strict=True):
                        where = addresses(part, memory, placement, block)
                        row += joined(
                            [(where[i], at + n * unit) for n, i in enumerate(held) if i in where],
                            unit,
                        )
                at += len(held) * unit
            held_nbytes = sum(nbytes for _, _, nbytes in rows[0])
            if held_nbytes and (not whole or held_nbytes == len(made.payload)):
                result.append(
                    {
                        "object_index": object_index,
                        "shard": shard_fields(shard),
                        "rows": [merged(row) for row in rows],
                    }
                )
    return result


def transfer_ranges(fields: dict, source: dict, target: dict, pairs) -> list[dict]:
    """The result of ``plan.transfer``."""
    ours, theirs = layer_memories(fields, source), layer_memories(fields, target)
    result = []
    for number, layer in sorted(ours.keys() & theirs.keys()):
        rows: list[list] = [[] for _ in pairs]
        for (part, mine), (_, other) in zip(
            ours[number, layer], theirs[number, layer], strict=True
        ):
            for row, (block, other_block) in zip(rows, pairs, strict=True):
                here = addresses(part, mine, source, block)
                there = addresses(part, other, target, other_block)
                row += joined(
                    [(here[i], there[i]) for i in here if i in there], model.unit_nbytes(part)
                )
        if any(rows):
            result.append({"group": number, "layer": layer, "rows": [merged(r) for r in rows]})
    return result


def tensor_rank(rank: int, size: int):
    """Heads of a tensor-parallel rank, replicated where there are more ranks than heads."""

    def interval(num_heads: int) -> tuple[int, int]:
        if num_heads >= size:
            return rank * num_heads // size, (rank + 1) * num_heads // size
        return rank * num_heads // size, rank * num_heads // size + 1

    return interval


def hnd(axes: list[str]) -> list[str]:
    rest = [axis for axis in axes if axis not in ("head", "token")]
    return [axis for axis in ("head", "token") if axis in axes] + rest


def nhd_order(axes: list[str]) -> list[str]:
    rest = [axis for axis in axes if axis not in ("head", "token")]
    return [axis for axis in ("token", "head") if axis in axes] + rest


def kv_first(axes: list[str]) -> list[str]:
    return sorted(axes, key=lambda axis: axis != "kv")
