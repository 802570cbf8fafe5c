"""Binding one layer's ranges to block ids, against one vector add a component and one zip.

The floor has the ids scaled beforehand and checks nothing.
"""

from __future__ import annotations

import numpy as np
from measure import Row, best_us, report, row
from shapes import GQA, MLA, SPARSE, model, placement

from kvformat import Component, plan_get

NUM_BLOCKS = 1024


def measure(name: str, num_layers: int, components: tuple[Component, ...]) -> Row:
    """One layer in the middle of a model, scattered ids."""
    layout = model(num_layers, components)
    ids = np.random.default_rng(0).permutation(4 * NUM_BLOCKS)[:NUM_BLOCKS]
    (template,) = plan_get(layout, placement(layout, 4 * NUM_BLOCKS))
    layer = template.layers[num_layers // 2]
    scaled = [(ids * stride, base) for base, stride in zip(layer.bases, layer.strides, strict=True)]
    sizes, offsets = tuple(layer.nbytes.tolist()), tuple(layer.offsets.tolist())

    def floor() -> object:
        columns = [(column + base).tolist() for column, base in scaled]
        return list(zip(*columns, strict=True)), [sizes] * NUM_BLOCKS, [offsets] * NUM_BLOCKS

    assert layer.bind(ids) == floor()
    found, lowest = best_us(lambda: layer.bind(ids), floor, number=20)
    label = f"bind {name}, {num_layers} layers x {len(components)}, {NUM_BLOCKS} blocks"
    return row(label, found, "us a layer", floor=lowest, at_most=1.3)


if __name__ == "__main__":
    report(
        "bind",
        [measure("MLA", 61, MLA), measure("K and V", 64, GQA), measure("sparse", 61, SPARSE)],
    )
