"""An object's header as the commands show it."""

from __future__ import annotations

import msgspec
from rich.console import Console

from kvformat import registry
from kvformat.cli.render import format_list, format_nbytes, print_fields, print_title
from kvformat.header import ObjectHeader
from kvformat.key import Shard


class GroupDocument(msgspec.Struct, frozen=True):
    """A group of an object: ``num_layers`` layers from ``first_layer`` on (index in the group)."""

    group: int
    first_layer: int
    num_layers: int
    num_complete: int
    missing_layers: list[int]


class HeaderDocument(msgspec.Struct, frozen=True):
    """A header. Bitmaps and identities are hex text, because JSON numbers end at 2^53."""

    format_version: int
    format_minor: int
    header_nbytes: int
    object_nbytes: int
    required_features: str
    optional_features: str
    fingerprint: str
    write_id: str
    groups: list[int]
    shard: Shard
    num_tokens: int
    block_hash: str
    has_checksums: bool
    is_complete: bool
    group_layers: list[GroupDocument]


def header_document(header: ObjectHeader) -> HeaderDocument:
    """A header as it is shown."""
    return HeaderDocument(
        format_version=registry.FORMAT_MAJOR,
        format_minor=header.minor,
        header_nbytes=header.header_nbytes,
        object_nbytes=header.object_nbytes,
        required_features=f"{header.required_features:016x}",
        optional_features=f"{header.optional_features:016x}",
        fingerprint=header.fingerprint.hex(),
        write_id=header.write_id.hex(),
        groups=bitmap_groups(header.group_bitmap),
        shard=header.shard,
        num_tokens=header.num_tokens,
        block_hash=header.block_hash.hex(),
        has_checksums=header.has_checksums,
        is_complete=header.is_complete,
        group_layers=[
            GroupDocument(
                span.group,
                span.first_layer,
                span.num_layers,
                span.complete.bit_count(),
                [
                    span.first_layer + i
                    for i in range(span.num_layers)
                    if not span.complete >> i & 1
                ],
            )
            for span in header.spans
        ],
    )


def bitmap_groups(bitmap: int) -> list[int]:
    """Ascending indices of the groups in a bitmap."""
    return [group for group in range(registry.MAX_GROUPS) if bitmap >> group & 1]


def format_shard(shard: Shard) -> str:
    """A shard in words."""
    return f"layer {shard.layer}, head {shard.head}, context {shard.context}"


def print_header(console: Console, header: HeaderDocument) -> None:
    """A header, for people."""
    print_title(console, "Header")
    features = [
        f"{kind} {bits}"
        for kind, bits in (
            ("required", header.required_features),
            ("optional", header.optional_features),
        )
        if int(bits, 16)
    ]
    print_fields(
        console,
        (
            ("format", f"{header.format_version}.{header.format_minor}"),
            ("fingerprint", header.fingerprint),
            ("block hash", header.block_hash),
            ("shard", format_shard(header.shard)),
            ("groups", format_list(header.groups)),
            ("tokens", header.num_tokens),
            ("size", f"{header.object_nbytes} bytes ({format_nbytes(header.object_nbytes)})"),
            ("header size", f"{header.header_nbytes} bytes"),
            ("write id", header.write_id),
            ("features", format_list(features)),
            (
                "checksums",
                "XXH3-64 a layer" if header.has_checksums else "none given by the writer",
            ),
            (
                "complete",
                format_list(
                    f"group {g.group}: {g.num_complete} of {g.num_layers} layers"
                    + (f" (from layer {g.first_layer})" if g.first_layer else "")
                    for g in header.group_layers
                ),
            ),
        ),
    )
