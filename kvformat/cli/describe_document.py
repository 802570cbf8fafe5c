"""The document of ``describe``, and how it reads in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console

from kvformat.cli.header_document import HeaderDocument, format_shard, print_header
from kvformat.cli.problems import Problem
from kvformat.cli.render import (
    Column,
    format_list,
    format_nbytes,
    print_fields,
    print_line,
    print_problems,
    print_table,
    print_title,
)
from kvformat.key import Shard
from kvformat.layout import Layout
from kvformat.objectmap import ObjectMap, layer_interval, shard_sizes


class RangeEntry(msgspec.Struct, frozen=True):
    """Where one component of one layer lies: ``layer`` is the index in the group."""

    group: int
    layer: int
    component: str
    offset: int
    nbytes: int


class ObjectDocument(msgspec.Struct, frozen=True):
    """The whole map of an object of ``nbytes`` bytes, header included."""

    nbytes: int
    header_nbytes: int
    num_tokens: int
    ranges: list[RangeEntry]


class ObjectSummary(msgspec.Struct, frozen=True):
    """One object that each block of a layout has."""

    groups: list[int]
    group_bitmap: str
    shard: Shard
    nbytes: int
    header_nbytes: int


class Description(msgspec.Struct, kw_only=True):
    """The document of ``describe --json``. Every field is always there, null where unknown.

    ``kind`` is ``object_key``, ``manifest_key``, ``namespace``, ``manifest_file`` or
    ``object_file``. ``groups`` holds group indices: those of the object, or of the layout.
    ``shard``, ``block_hash`` and ``object`` belong to one object. ``layout`` is the manifest, and
    ``objects`` lists what each block of it consists of (null also where a grid has very many
    shards). ``header`` belongs to an object file.
    """

    kind: str
    target: str
    format_version: int | None = None
    tenant: str | None = None
    model: str | None = None
    fingerprint: str | None = None
    content_fingerprint: str | None = None
    groups: list[int] | None = None
    shard: Shard | None = None
    block_hash: str | None = None
    manifest_key: str | None = None
    layout: dict[str, Any] | None = None
    object: ObjectDocument | None = None
    objects: list[ObjectSummary] | None = None
    header: HeaderDocument | None = None
    problems: list[Problem] = []


def object_document(object_map: ObjectMap) -> ObjectDocument:
    """The map of an object as it is shown."""
    return ObjectDocument(
        object_map.nbytes,
        object_map.header_nbytes,
        object_map.block_size,
        [
            RangeEntry(r.group, r.layer, r.component.name, r.offset, r.nbytes)
            for r in object_map.components
        ],
    )


def show_description(console: Console, document: Description, *, has_source: bool) -> None:
    """Print a description for people."""
    layout = None if document.layout is None else msgspec.convert(document.layout, Layout)
    print_line(console, f"{_KINDS[document.kind]}: {document.target}", "bold")
    print_fields(console, _name_fields(document))
    if document.header is not None:
        print_header(console, document.header)
    if layout is not None:
        _show_layout(console, document, layout)
        if document.object is not None and document.shard is not None:
            _show_object(console, document.object, layout, document.shard)
        if document.shard is None:
            _show_objects(console, document, layout)
    print_problems(console, document.problems)
    if layout is None and not has_source:
        console.print()
        print_line(console, "The object map needs the layout: --store URI or --layout FILE.", "dim")


_KINDS = {
    "object_key": "Key of an object",
    "manifest_key": "Key of a manifest",
    "namespace": "Namespace",
    "manifest_file": "Manifest",
    "object_file": "Object",
}


def _name_fields(document: Description) -> Iterator[tuple[str, object]]:
    yield "format version", "-" if document.format_version is None else document.format_version
    for title, value in (("tenant", document.tenant), ("model", document.model)):
        if value is not None:
            yield title, value or "(empty)"
    yield "fingerprint", document.fingerprint or "-"
    if document.content_fingerprint is not None:
        yield "content fingerprint", document.content_fingerprint
    if document.shard is not None:
        yield "groups", format_list(document.groups or [])
        yield "shard", format_shard(document.shard)
        yield "block hash", document.block_hash
    if document.manifest_key is not None and document.kind != "manifest_key":
        yield "manifest key", document.manifest_key


def _show_layout(console: Console, document: Description, layout: Layout) -> None:
    identity, recipe, grid = layout.identity, layout.hash, layout.grid
    print_title(console, "Layout")
    print_fields(
        console,
        (
            ("weights", identity.weights),
            ("adapter", identity.adapter or "-"),
            (
                "block hash",
                f"{recipe.algorithm}, {recipe.digest_nbytes} bytes, a block of "
                f"{recipe.block_size} tokens, seed {recipe.seed or '-'}",
            ),
            (
                "shard grid",
                f"{grid.layer_shards} layer x {grid.head_shards} head x "
                f"{grid.context_shards} context"
                + (
                    f" (runs of {grid.context_interleave} tokens)"
                    if grid.context_shards > 1
                    else ""
                ),
            ),
            *((f"config.{name}", value) for name, value in identity.config.items()),
        ),
    )
    print_title(console, "Groups")
    shown = range(len(layout.groups)) if document.groups is None else document.groups
    print_table(
        console,
        (
            Column("group", is_number=True),
            Column("kind"),
            Column("block size", is_number=True),
            Column("window", is_number=True),
            Column("layers", is_number=True),
            Column("components", folds=True),
        ),
        [
            (
                index,
                g.kind,
                g.block_size,
                g.window or "-",
                len(g.layers),
                _components(layout, index),
            )
            for index in shown
            for g in [layout.groups[index]]
        ],
    )


def _components(layout: Layout, group: int) -> str:
    """Each kind of component that the group's layers have, once."""
    kinds = {
        f"{c.name} {c.dtype}[{_shape(c.axes, c.sizes)}]": None
        for layer in layout.groups[group].layers
        for c in layer.components
    }
    return format_list(kinds)


def _shape(axes: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    return " ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))


def _show_object(console: Console, document: ObjectDocument, layout: Layout, shard: Shard) -> None:
    print_title(console, "Object")
    spans = (
        f"group {group}: {first}..{stop - 1} of {len(layout.groups[group].layers)}"
        for group in dict.fromkeys(r.group for r in document.ranges)
        for first, stop in [layer_interval(layout, group, shard.layer)]
    )
    print_fields(
        console,
        (
            ("size", f"{document.nbytes} bytes ({format_nbytes(document.nbytes)})"),
            ("header", f"{document.header_nbytes} bytes"),
            ("tokens", document.num_tokens),
            ("layers", format_list(spans)),
        ),
    )
    console.print()
    rows = []
    for entry in document.ranges:
        layer = layout.groups[entry.group].layers[entry.layer]
        component = next(c for c in layer.components if c.name == entry.component)
        shape = " x ".join(map(str, shard_sizes(layout, component, shard)))
        rows.append(
            (
                entry.group,
                entry.layer,
                layer.name,
                entry.component,
                f"{component.dtype} {shape}",
                entry.offset,
                entry.nbytes,
            )
        )
    print_table(
        console,
        (
            Column("group", is_number=True),
            Column("layer", is_number=True),
            Column("name", folds=True),
            Column("component"),
            Column("holds", folds=True),
            Column("offset", is_number=True),
            Column("bytes", is_number=True),
        ),
        rows,
    )


def _show_objects(console: Console, document: Description, layout: Layout) -> None:
    print_title(console, "Objects of a block")
    if document.objects is None:
        print_line(console, "  too many shards to list; describe the key of one")
        return
    print_table(
        console,
        (
            Column("groups"),
            Column("layer shard", is_number=True),
            Column("head shard", is_number=True),
            Column("context shard", is_number=True),
            Column("tokens", is_number=True),
            Column("bytes", is_number=True),
        ),
        [
            (
                format_list(o.groups),
                o.shard.layer,
                o.shard.head,
                o.shard.context,
                layout.groups[o.groups[0]].block_size,
                o.nbytes,
            )
            for o in document.objects
        ],
    )
