"""What is done once a process: a layout with its digests, and all plans of a rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from measure import best_us, report, row
from shapes import BLOCK_SIZE, GQA, SPARSE, model, placement

from kvformat import (
    Layout,
    Placement,
    content_fingerprint,
    fingerprint,
    layout_namespace,
    plan_get,
    plan_put,
)
from kvformat.boxes import intersect
from kvformat.components import split_attention


def derive() -> None:
    """From shapes to namespace, every layer described on its own."""
    layout = model(
        128,
        split_attention(num_kv_heads=8, head_size=128, block_size=BLOCK_SIZE, dtype="bfloat16"),
    )
    fingerprint(layout)


def plan(plans: Callable[..., object], layout: Layout, memory: Placement) -> None:
    """With nothing remembered from another plan."""
    intersect.cache_clear()
    plans(layout, memory)


if __name__ == "__main__":
    rows = []
    (found,) = best_us(derive, number=1)
    rows.append(row("layout and fingerprint, 128 layers", found / 1000, "ms", at_most=20))
    layout = model(128, GQA)
    (found,) = best_us(lambda: (layout_namespace(layout), content_fingerprint(layout)), number=1)
    rows.append(row("namespace and content fingerprint, 128 layers", found / 1000, "ms"))
    for name, cut, heads in (
        ("sparse, 61 layers, 1 rank", model(61, SPARSE), None),
        ("K and V, 64 layers, rank of 8", model(64, GQA, 8), (3, 4)),
        ("K and V, 64 layers, rank of 2 on a grid of 8", model(64, GQA, 8), (0, 4)),
    ):
        memory = placement(cut, 4096, heads)
        put, get = best_us(
            partial(plan, plan_put, cut, memory),
            partial(plan, plan_get, cut, memory),
            number=1,
            rounds=10,
        )
        rows.append(row(f"plan_put, {name}", put / 1000, "ms"))
        rows.append(row(f"plan_get, {name}", get / 1000, "ms"))
    report("planning", rows)
