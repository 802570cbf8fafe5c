"""Vectors of the class resharder: plans between objects and memories, and between memories."""

from __future__ import annotations

import copy

import model
from layouts import LATENT, LAYOUTS, component, group, layout, nhd, split
from memories import (
    hnd,
    kv_first,
    nhd_order,
    object_ranges,
    place,
    tensor_rank,
    transfer_ranges,
)
from suite import Suite


def stores() -> Suite:
    suite = Suite("plans", "Plans between objects and memories of any parallel size.")

    def plan(op: str, about: str, fields: dict, placement: dict, *, blocks=(0, 2), error=None,
             limits=None) -> None:  # fmt: skip
        result = (
            None
            if error
            else {"objects": object_ranges(fields, placement, blocks, whole=op == "put")}
        )
        given = {
            "manifest": model.canonical(fields).hex(), "placement": placement,
            "blocks": [str(block) for block in blocks], "limits": limits,
        }  # fmt: skip
        suite.add("resharder", f"plan.{op}", about, given, result=result, error=error)

    # Every number of heads, cut by every writer, read by every reader.
    for heads in (1, 2, 4, 8):
        for shards in (1, 2, 4, 8):
            fields = layout([group([split(heads, 2, 1)])], head_shards=shards)
            rank = (heads + shards) % shards
            plan(
                "put",
                f"{heads} heads in {shards} head shards, written by rank {rank} of {shards}",
                fields,
                place(fields, heads=tensor_rank(rank, shards), order=nhd_order),
                blocks=(1,),
            )
            for size in (1, 2, 4, 8):
                rank = (heads * shards + 1) % size
                plan("get", f"{heads} heads in {shards} head shards, read by rank {rank} of {size}",
                     fields, place(fields, heads=tensor_rank(rank, size)), blocks=(1,))  # fmt: skip
    for name, (about, fields) in LAYOUTS.items():
        if name not in ("many_layers", "gqa_heads", "pipeline", "hash8", "hash16", "text"):
            plan("get", f"{name}, whole, in the layout's own order: {about}", fields, place(fields))
            plan("put", f"{name}, whole, token-major, padded: {about}", fields,
                 place(fields, order=nhd_order, padding=24), blocks=(2, 0, 0))  # fmt: skip
    packed = LAYOUTS["packed"][1]
    plan("get", "keys and values as two planes in memory, beside each other in the object", packed,
         place(packed, order=kv_first))  # fmt: skip
    pipeline = LAYOUTS["pipeline"][1]
    plan("put", "the second of two uneven stages", pipeline,
         place(pipeline, layers=[(0, n) for n in range(5, 8)]))  # fmt: skip
    plan("get", "one stage reads what two wrote", pipeline, place(pipeline))
    plan("get", "three stages read what two wrote: the middle one", pipeline,
         place(pipeline, layers=[(0, n) for n in range(3, 6)]))  # fmt: skip
    cut = layout([group([split(2, 8, 1)], block_size=8)], context_shards=4, context_interleave=2)
    plan("put", "a context rank writes its tokens", cut, place(cut, context=(4, 3, 2)))
    plan("get", "two context ranks read what four wrote", cut, place(cut, context=(2, 1, 2)))
    plan("get", "runs of another length", cut, place(cut, context=(2, 0, 1)))
    plan("get", "a rank with all tokens", cut, place(cut))
    both = LAYOUTS["all_cuts"][1]
    for op, rank in (("put", 0), ("put", 1), ("get", 0), ("get", 1)):
        plan(
            op,
            f"heads and tokens cut at once, rank {rank}",
            both,
            place(both, heads=tensor_rank(rank, 2), context=(2, rank, 1), layers=[(0, 0), (0, 1)]),
        )
    replica = LAYOUTS["mixed"][1]
    for rank in range(2):
        plan(
            "put",
            f"rank {rank} with its own heads and a replica of the latent: its own object only",
            replica,
            place(replica, heads=lambda n, r=rank: tensor_rank(r, 2)(n) if n > 1 else (0, 1)),
        )
    shared = layout([group([split()]), group([LATENT], name="latent")], head_shards=2)
    plan("put", "a rank with its own heads, and a latent in an object of its own",
         shared, place(shared, heads=tensor_rank(1, 2)))  # fmt: skip
    whole = layout([group([split(2, 2, 1)])])
    plan("get", "a rank that needs half the heads of an object", whole,
         place(whole, heads=tensor_rank(1, 2)))  # fmt: skip
    plan("get", "no blocks", whole, place(whole), blocks=())
    plan("get", "no layers", whole, place(whole, layers=[]))
    plan("get", "limits that cut the plan into single ranges", whole, place(whole, order=nhd_order),
         limits={"max_rows": "1", "max_ranges": "1", "max_nbytes": "2"})  # fmt: skip
    plan("put", "limits that hold all of it", whole, place(whole),
         limits={"max_rows": "9", "max_ranges": "9", "max_nbytes": "1000"})  # fmt: skip

    def bad(reason: str, about: str, change, *, op="get", fields=whole, **more) -> None:
        placement = place(fields)
        change(placement)
        plan(op, about, fields, placement, error=reason, **more)

    def memory(change: dict):
        return lambda p: p["layers"][0]["components"][0].update(change)

    def layer(change: dict):
        return lambda p: p["layers"][0].update(change)

    two = layout([group([split(2, 2, 1)])], head_shards=1)
    plan("put", "half an object has no writer", two, place(two, heads=tensor_rank(0, 2)),
         error="plan_coverage")  # fmt: skip
    plan("put", "half of the layers of an object has no writer", pipeline,
         place(pipeline, layers=[(0, n) for n in range(4)]), error="plan_coverage")  # fmt: skip
    plan("put", "a part of the tokens has no writer", two, place(two, context=(2, 0, 1)),
         error="plan_coverage")  # fmt: skip
    for blocks in ((3,), (-1,), (0, 2**40)):
        bad("plan_bounds", f"block ids {blocks} of 3 blocks", lambda p: None, blocks=blocks)
    bad("plan_bounds", "no regions", lambda p: p.update(regions=[]))
    bad("plan_bounds", "the last block leaves the region", layer({"num_blocks": 4}), blocks=(0,))
    bad("plan_bounds", "an address before the region", memory({"base_address": str(0x10000 - 1)}))
    bad("plan_bounds", "a stride that is too long", memory({"block_stride_nbytes": "1000"}))
    bad(
        "plan_bounds",
        "two regions that touch are two",
        lambda p: p["regions"].__setitem__(
            slice(0, 1),
            [
                {"address": str(0x10000), "nbytes": "12"},
                {"address": str(0x10000 + 12), "nbytes": "12"},
            ],
        ),
    )
    bad("plan_placement", "no blocks at all", layer({"num_blocks": 0}), blocks=())
    bad("plan_placement", "a negative block stride", memory({"block_stride_nbytes": "-8"}))
    bad("plan_placement", "a negative base address", memory({"base_address": "-2"}))
    for about, change in (
        ("a base address of 2^61", {"base_address": str(2**61)}),
        ("a block stride of 2^61", {"block_stride_nbytes": str(2**61)}),
        (
            "a block stride that wraps around to 0 in two blocks",
            {"block_stride_nbytes": str(2**62)},
        ),
        ("an axis stride that wraps around", {"axis_strides_nbytes": ["4", str(2**63 - 1), "2"]}),
        ("blocks that reach 2^61", {"block_stride_nbytes": str(2**60)}),
    ):
        bad("plan_placement", about, memory(change))
    bad("plan_placement", "65537 context shards", lambda p: p.update(context_shards=65537))
    bad("plan_placement", "an empty interval of heads", memory({"head_stop": 0}))
    bad("plan_placement", "a head too many", memory({"head_stop": 3}))
    bad("plan_placement", "a stride too few", memory({"axis_strides_nbytes": ["4", "2"]}))
    bad("plan_placement", "another component", memory({"component": "kv"}))
    bad("plan_placement", "a component twice", memory({"component": "v"}))
    bad("plan_placement", "a component lacks", lambda p: p["layers"][0]["components"].pop())
    bad("plan_placement", "a layer that isn't there", layer({"layer": 1}))
    bad("plan_placement", "a group that isn't there", layer({"group": 1}))
    bad(
        "plan_placement",
        "a layer twice",
        lambda p: p["layers"].append(copy.deepcopy(p["layers"][0])),
    )
    bad("plan_placement", "a context index out of range", lambda p: p.update(context_index=1))
    bad("plan_placement", "runs of 0", lambda p: p.update(context_interleave=0))
    for about, limits in (
        ("no rows", (0, 1, 100)), ("no ranges", (1, 0, 100)), ("no bytes", (1, 1, 0)),
        ("a negative limit", (1, 1, -1)), ("a range larger than a call", (9, 9, 7)),
    ):  # fmt: skip
        names = ("max_rows", "max_ranges", "max_nbytes")
        bad("plan_limit", about, lambda p: None,
            limits=dict(zip(names, map(str, limits), strict=True)))  # fmt: skip
    bad("plan_placement", "a component of one head with two", memory({"head_stop": 2}),
        fields=layout([group([[component("latent", "int8", token=4, channel=2)]])]))  # fmt: skip
    joined = {"max_rows": "9", "max_ranges": "9"}
    plan("get", "two components that touch in memory and object are one range", whole,
         touching(whole),
         limits={**joined, "max_nbytes": "16"})  # fmt: skip
    plan("get", "a range over two components that is larger than a call", whole, touching(whole),
         limits={**joined, "max_nbytes": "15"}, error="plan_limit")  # fmt: skip
    plan("get", "components that touch in block 0 alone are two ranges", whole,
         touching(whole, strides=(16, 24)), blocks=(0,),
         limits={**joined, "max_nbytes": "8"})  # fmt: skip
    halves = [(0, 8), (8, 8)]
    plan("get", "a range over two regions that touch", whole,
         touching(whole, num_blocks=1, regions=halves), blocks=(0,),
         error="plan_bounds")  # fmt: skip
    plan("get", "two ranges in two regions that touch", whole,
         touching(whole, num_blocks=1, regions=halves, strides=(16, 24)), blocks=(0,))  # fmt: skip
    plan("get", "blocks that are not asked for lie in the region too", whole,
         touching(whole, regions=[(0, 32)]), blocks=(0,), error="plan_bounds")  # fmt: skip
    plan("get", "no layers have no blocks to be out of range", whole, place(whole, layers=[]),
         blocks=(5,))  # fmt: skip
    backwards = place(whole)
    for memory_of in backwards["layers"][0]["components"]:
        stride = int(memory_of["axis_strides_nbytes"][0])
        memory_of["base_address"] = str(int(memory_of["base_address"]) + stride)
        memory_of["axis_strides_nbytes"][0] = str(-stride)
    plan("get", "heads that stand backwards in memory", whole, backwards)
    bad("plan_placement", "an axis stride of -2^61",
        memory({"axis_strides_nbytes": [str(-(2**61)), "2", "2"]}))  # fmt: skip
    nibbles = LAYOUTS["int4"][1]
    bad("plan_bounds", "four bits: the last axis has 4 bytes, so that 2^61 is not reached",
        memory({"axis_strides_nbytes": ["16", "4", str(2**59)]}), fields=nibbles)  # fmt: skip
    bad("plan_placement", "four bits: the last axis has 4 bytes, and 2^61 is reached",
        memory({"axis_strides_nbytes": ["16", "4", str(2**61 // 3 + 1)]}),
        fields=nibbles)  # fmt: skip
    latents = place(replica, heads=lambda n: tensor_rank(1, 2)(n) if n > 1 else (0, 1))
    latents["regions"] = latents["regions"][:-2]
    plan("put", "a replica that is left to another rank lies outside the regions", replica, latents,
         error="plan_bounds")  # fmt: skip
    return suite


def touching(fields: dict, *, strides=(16, 16), num_blocks=3, regions=((0, 64),)) -> dict:
    """A memory of one layer in which the second of two components follows the first in block 0."""
    base = 0x10000
    placement = place(fields, num_blocks=num_blocks)
    for index, part in enumerate(placement["layers"][0]["components"]):
        part |= {"base_address": str(base + 8 * index), "block_stride_nbytes": str(strides[index])}
    placement["regions"] = [{"address": str(base + at), "nbytes": str(n)} for at, n in regions]
    return placement


def transfers() -> Suite:
    suite = Suite("transfers", "Plans from one rank's memory to another's.")

    def plan(about: str, fields: dict, source: dict, target: dict, *, pairs=((0, 2), (2, 1)),
             error=None, blocks=None) -> None:  # fmt: skip
        result = None if error else {"layers": transfer_ranges(fields, source, target, pairs)}
        ours, theirs = blocks or (tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
        given = {
            "manifest": model.canonical(fields).hex(), "source": source, "target": target,
            "source_blocks": [str(b) for b in ours], "target_blocks": [str(b) for b in theirs],
        }  # fmt: skip
        suite.add("resharder", "plan.transfer", about, given, result=result, error=error)

    for heads, size, other in ((4, 4, 2), (4, 2, 4), (2, 4, 2), (2, 2, 8), (8, 1, 8), (1, 4, 2)):
        fields = layout([group([split(heads, 2, 1)])])
        rank = (size - 1) * other // size if other < size else other - 1
        plan(f"{heads} heads: from rank {size - 1} of {size} to rank {rank} of {other}", fields,
             place(fields, heads=tensor_rank(size - 1, size)),
             place(fields, heads=tensor_rank(rank, other), base=0x900000))  # fmt: skip
    fields = layout([group([split(4, 2, 1)])])
    plan(
        "ranks without a head in common: nothing to move",
        fields,
        place(fields, heads=tensor_rank(0, 2)),
        place(fields, heads=tensor_rank(1, 2)),
    )
    plan(
        "from token-major to head-major memory, padded",
        fields,
        place(fields, order=nhd_order),
        place(fields, order=hnd, padding=8, base=0x900000),
    )
    for name in ("fused", "mla_fused", "sparse_groups", "recurrent", "int4", "mixed", "compressed"):
        about, other = LAYOUTS[name]
        plan(f"{name}: {about}", other, place(other), place(other, order=nhd_order, base=0x900000))
    pipeline = LAYOUTS["pipeline"][1]
    plan("the layers that two uneven stages share", pipeline,
         place(pipeline, layers=[(0, n) for n in range(5)]),
         place(pipeline, layers=[(0, n) for n in range(3, 8)], base=0x900000))  # fmt: skip
    dealt = layout([group([nhd(2, 8, 1)], block_size=8)])
    plan("from a context rank to one with all tokens", dealt, place(dealt, context=(2, 1, 2)),
         place(dealt, base=0x900000))  # fmt: skip
    plan("between context ranks with other runs", dealt, place(dealt, context=(2, 1, 2)),
         place(dealt, context=(4, 3, 1), base=0x900000))  # fmt: skip
    there = place(fields, base=0x900000)
    plan("more source blocks than target blocks", fields, place(fields), there,
         blocks=((0, 1), (0,)), error="plan_bounds")  # fmt: skip
    plan("a target block out of range", fields, place(fields), there, pairs=((0, 3),),
         error="plan_bounds")  # fmt: skip
    outside = place(fields, base=0x900000)
    outside["regions"] = outside["regions"][:1]
    plan("a target outside its regions", fields, place(fields), outside, error="plan_bounds")
    lacking = place(fields, base=0x900000)
    lacking["layers"][0]["components"].pop()
    plan("a target without one of the components", fields, place(fields), lacking,
         error="plan_placement")  # fmt: skip
    inside = place(fields)
    inside["regions"] = inside["regions"][:1]
    plan("a source outside its regions", fields, inside, there, error="plan_bounds")
    plan("a source block out of range", fields, place(fields), there, pairs=((3, 0),),
         error="plan_bounds")  # fmt: skip
    short = layout([group([split(2, 2, 1)])])
    for side in ("source", "target"):
        for about, regions, strides, error in (
            ("a range over two regions that touch", [(0, 8), (8, 8)], (16, 16), "plan_bounds"),
            ("two ranges in two regions that touch", [(0, 8), (8, 8)], (16, 24), None),
        ):  # fmt: skip
            cut = touching(short, num_blocks=1, regions=regions, strides=strides)
            other = touching(short, num_blocks=1)
            ends = (cut, other) if side == "source" else (other, cut)
            plan(f"{about}, in the {side}", short, *ends, pairs=((0, 0),), error=error)
    wrong = place(pipeline, layers=[(0, n) for n in range(3, 8)], base=0x900000)
    wrong["layers"][-1]["components"][0]["block_stride_nbytes"] = "-8"
    plan("a wrong placement of a layer that the other side hasn't", pipeline,
         place(pipeline, layers=[(0, n) for n in range(5)]), wrong,
         error="plan_placement")  # fmt: skip
    return suite
