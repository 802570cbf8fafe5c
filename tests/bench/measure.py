"""Timing of calls that take turns, and the one form in which every bench reports.

A bench prints one JSON object: ``{"bench": name, "rows": [row, ...]}``. A row has ``name``,
``value`` and ``unit``; where something is measured beside it in the same run, ``floor`` and
``ratio`` (value / floor); and where it must reach something, ``target`` and ``reached``.
"""

from __future__ import annotations

import gc
import json
import operator
import sys
import time
from collections.abc import Callable

Row = dict[str, object]


def best_us(*calls: Callable[[], object], number: int, rounds: int = 40) -> list[float]:
    """Microseconds a call, the best round of each; the calls take turns within a round.

    The best round, because what else runs on a machine can only add to a time.
    """
    best = [float("inf")] * len(calls)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for index, call in enumerate(calls):
                start = time.perf_counter()
                for _ in range(number):
                    call()
                best[index] = min(best[index], (time.perf_counter() - start) / number * 1e6)
    finally:
        gc.enable()
    return best


def row(
    name: str,
    value: float,
    unit: str,
    *,
    floor: float | None = None,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """One line of a report. The limit holds for the ratio where there is a floor."""
    found: Row = {"name": name, "value": round(value, 4), "unit": unit}
    judged, what = value, f"{unit}"
    if floor is not None:
        judged, what = value / floor, "x floor"
        found |= {"floor": round(floor, 4), "ratio": round(judged, 3)}
    for sign, compare, limit in (("<=", operator.le, at_most), (">=", operator.ge, at_least)):
        if limit is not None:
            found |= {"target": f"{sign} {limit:g} {what}", "reached": compare(judged, limit)}
    return found


def report(bench: str, rows: list[Row]) -> None:
    """Print a bench's one JSON object."""
    json.dump({"bench": bench, "rows": rows}, sys.stdout)
    print()
