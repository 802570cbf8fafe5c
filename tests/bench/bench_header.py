"""Header decode with full validation, of a layout seen before and of one never seen."""

from __future__ import annotations

from measure import Row, best_us, report, row
from shapes import MLA, model

from kvformat import (
    ObjectMap,
    Shard,
    check_header,
    decode_header,
    encode_header,
    fingerprint,
    header,
    new_header,
)

LIMITS_US = {61: 5.0, 256: 8.0}


def measure(num_layers: int, limit_us: float) -> list[Row]:
    """One object of so many layers in one group."""
    layout = model(num_layers, MLA)
    object_map, digest, block_hash = ObjectMap(layout, 0, Shard()), fingerprint(layout), bytes(32)
    made = new_header(object_map, digest, block_hash, bytes(16), range(1, num_layers + 1))
    data = encode_header(made)

    def never_seen() -> None:
        header._found_right.clear()
        decode_header(data)

    found, cold, check, encode = best_us(
        lambda: decode_header(data),
        never_seen,
        lambda: check_header(made, object_map, digest, block_hash),
        lambda: encode_header(made),
        number=300,
        rounds=100,
    )
    label = f"{num_layers} layers, {len(data)} bytes"
    return [
        row(f"header decode, {label}", found, "us", at_most=limit_us),
        row(f"header decode, {label}, range table never seen", cold, "us"),
        row(f"header check against the object asked for, {label}", check, "us"),
        row(f"header encode, {label}", encode, "us"),
    ]


if __name__ == "__main__":
    report("header", [r for layers, limit in LIMITS_US.items() for r in measure(layers, limit)])
