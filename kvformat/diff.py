"""What differs between two layouts, field by field.

Source: spec/kvformat.md section 4.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvformat.layout import Layout

#: What people are shown for a side that doesn't have the field at all.
ABSENT: Final = "(absent)"

Scalar = str | int | bool


class Difference(msgspec.Struct, frozen=True):
    """One field with its value on either side.

    ``path`` is dotted; a run of layers that differ alike is one difference with the interval in
    its path: ``groups[0].layers[0..31].components[k].sizes.head``. A value is None where that side
    doesn't have the field.
    """

    path: str
    a: Scalar | None
    b: Scalar | None

    def __str__(self) -> str:
        a, b = (ABSENT if value is None else value for value in (self.a, self.b))
        return f"{self.path}: {a} here, {b} there"


def diff(a: Layout, b: Layout) -> list[Difference]:
    """Every field in which two layouts differ, in manifest order; empty exactly if none does."""
    differences: list[Difference] = []
    runs: dict[tuple[str, str, Scalar | None, Scalar | None], list[int]] = {}
    for field in Layout.__struct_fields__:
        if field == "groups":
            continue
        differences += _walk(
            field, msgspec.to_builtins(getattr(a, field)), msgspec.to_builtins(getattr(b, field))
        )
    for index in range(max(len(a.groups), len(b.groups))):
        if index >= min(len(a.groups), len(b.groups)):
            sides = [None if index >= len(x.groups) else x.groups[index].kind for x in (a, b)]
            differences.append(Difference(f"groups[{index}]", sides[0], sides[1]))
            continue
        left = msgspec.to_builtins(a.groups[index])
        right = msgspec.to_builtins(b.groups[index])
        layers = left.pop("layers"), right.pop("layers")
        differences += _walk(f"groups[{index}]", left, right)
        for number in range(max(map(len, layers))):
            if number >= min(map(len, layers)):
                sides = [None if number >= len(x) else x[number]["name"] for x in layers]
                differences.append(
                    Difference(f"groups[{index}].layers[{number}]", sides[0], sides[1])
                )
                continue
            for found in _walk("", _by_name(layers[0][number]), _by_name(layers[1][number])):
                runs.setdefault(
                    (f"groups[{index}].layers", found.path, found.a, found.b), []
                ).append(number)
    for (prefix, path, left_value, right_value), numbers in runs.items():
        for first, last in _intervals(numbers):
            layer = f"{first}" if first == last else f"{first}..{last}"
            differences.append(Difference(f"{prefix}[{layer}]{path}", left_value, right_value))
    return differences


def _by_name(layer: dict[str, object]) -> dict[str, object]:
    """A layer with its components addressed by name, and their order as a field of its own."""
    components = layer["components"]
    assert isinstance(components, tuple)
    names = [component["name"] for component in components]
    return {
        "name": layer["name"],
        "component_order": ", ".join(names),
        **{
            f"components[{name}]": {
                "dtype": component["dtype"],
                "axes": component["axes"],
                # Each axis by its name, and no nbytes, which follows: one cause, one difference.
                "sizes": dict(zip(component["axes"], component["sizes"], strict=True)),
            }
            for name, component in zip(names, components, strict=True)
        },
    }


def _walk(path: str, a: object, b: object) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for name in [*a, *(name for name in b if name not in a)]:
            below = f"{path}.{name}"
            if name not in a or name not in b:
                yield Difference(below, _show(a.get(name)), _show(b.get(name)))
            else:
                yield from _walk(below, a[name], b[name])
    # Type and value: true is not 1, neither in JSON nor in a fingerprint.
    elif (type(a), a) != (type(b), b):
        yield Difference(path, _show(a), _show(b))


def _show(value: object) -> Scalar | None:
    """A value in one line: lists and objects as text. No value of a layout is None."""
    if value is None or isinstance(value, (str, int)):
        return value
    return msgspec.json.encode(value).decode()


def _intervals(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, last) of each unbroken run."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last
