"""Random layouts."""

from __future__ import annotations

from hypothesis import strategies as st
from model_layouts import layout as make_layout

from kvformat import Component, Group, HashRecipe, Layer, Layout, component

HASH = HashRecipe(algorithm="sha256", seed="", block_size=4, digest_nbytes=8)


@st.composite
def components(draw: st.DrawFn, block_size: int, recurrent: bool) -> tuple[Component, ...]:
    """One to three components with any of the axes, in any order."""
    found = []
    for name in ("k", "v", "extra")[: draw(st.integers(1, 3))]:
        sizes = {"channel": draw(st.integers(1, 3)) * 2}
        if draw(st.booleans()):
            sizes["head"] = draw(st.sampled_from([1, 2, 3, 4, 8]))
        if not recurrent and draw(st.integers(0, 4)):
            sizes["token"] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= block_size]))
        if draw(st.booleans()):
            sizes["kv"] = 2
        axes = draw(st.permutations(list(sizes)))
        dtypes = ["bfloat16", "float8_e4m3fn", "float32"]
        if axes[-1] == "channel":
            dtypes.append("int4")
        dtype = draw(st.sampled_from(dtypes))
        found.append(component(name, dtype, **{axis: sizes[axis] for axis in axes}))
    return tuple(found)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    """One to five layers, equal or not, of any kind."""
    block_size = draw(st.sampled_from([4, 8]))
    kind = draw(st.sampled_from(["full_attention", "sliding_window", "recurrent_state"]))
    shapes = draw(
        st.lists(components(block_size, kind == "recurrent_state"), min_size=1, max_size=2)
    )
    return Group(
        kind=kind,
        block_size=block_size,
        window=32 if kind == "sliding_window" else 0,
        layers=tuple(
            Layer(name=f"layer.{i}", components=draw(st.sampled_from(shapes)))
            for i in range(draw(st.integers(1, 5)))
        ),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """One to three groups, some of which share objects, cut along every axis."""
    found = draw(st.lists(groups(), min_size=1, max_size=3))
    objects: list[list[int]] = []
    for index, group in enumerate(found):
        joined = [o for o in objects if found[o[0]].block_size == group.block_size]
        if joined and draw(st.booleans()):
            draw(st.sampled_from(joined)).append(index)
        else:
            objects.append([index])
    layer_shards = draw(st.integers(1, 3))
    starts = [
        (0, *sorted(draw(st.lists(st.integers(0, len(g.layers)), min_size=n, max_size=n))))
        for g in found
        for n in [layer_shards - 1]
    ]
    context_shards = draw(st.sampled_from([1, 1, 2, 3]))
    return make_layout(
        found,
        objects=tuple(map(tuple, objects)),
        head_shards=draw(st.integers(1, 16)),
        context_shards=context_shards,
        context_interleave=draw(st.integers(1, 3)) if context_shards > 1 else 1,
        layer_starts=tuple(starts),
        hash_recipe=HASH,
    )
