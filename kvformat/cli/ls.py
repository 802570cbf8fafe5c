"""``kvformat ls``: whose objects a store holds."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import msgspec
from rich.console import Console

from kvformat.cli.problems import EXIT_FINE, Problem, exit_code
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import (
    Column,
    format_count,
    format_list,
    format_nbytes,
    format_weights,
    open_console,
    print_json,
    print_line,
    print_problems,
    print_table,
    printable,
)
from kvformat.cli.sources import StoreReader, find_layout, layout_dtypes, open_reader
from kvformat.errors import RemoteDataError
from kvformat.fingerprint import content_fingerprint
from kvformat.key import ManifestKey, Namespace, namespace_prefix, parse_key
from kvformat.layout import Layout


class NamespaceDocument(msgspec.Struct, kw_only=True):
    """One namespace. What only its manifest tells is null where that can't be had.

    ``num_objects`` and ``nbytes`` count block objects, without the manifest.
    """

    namespace: str
    tenant: str
    model: str
    fingerprint: str
    content_fingerprint: str | None = None
    weights: str | None = None
    adapter: str | None = None
    dtypes: list[str] | None = None
    block_sizes: list[int] | None = None
    num_layers: int | None = None
    num_objects: int = 0
    nbytes: int = 0


class Listing(msgspec.Struct, kw_only=True):
    """The document of ``ls --json``. ``num_foreign_keys`` counts keys of other programs."""

    store: str
    prefix: str
    namespaces: list[NamespaceDocument]
    num_objects: int
    nbytes: int
    num_foreign_keys: int
    problems: list[Problem]


@click.command("ls", cls=Command, short_help="List the namespaces in a store.")
@click.argument("store")
@click.argument("prefix", default="")
@click.option("--keys", "only_keys", is_flag=True, help="List keys instead, as they come.")
@json_option
def ls_command(store: str, prefix: str, only_keys: bool, as_json: bool) -> int:
    """List the namespaces in STORE: model, tenant, weights, dtypes, block size, objects, bytes.

    PREFIX restricts that to keys that start with it. With --keys each key is printed on a line of
    its own (with --json as an object with "key" and "nbytes"), ready for describe and inspect.

    \b
    Examples:
      kvformat ls file:///var/cache/kv
      kvformat ls file:///var/cache/kv kvformat1/acme/
      kvformat ls file:///var/cache/kv --keys | head -1

    Exit status: 0 all is well, 1 a namespace's manifest is missing or corrupt, 2 the store can't
    be reached, or can't list its keys.
    """
    with open_reader(store) as reader:
        if only_keys:
            _list_keys(reader, prefix, as_json=as_json)
            return EXIT_FINE
        document = _list_namespaces(reader, store, prefix)
    if as_json:
        print_json(document)
    else:
        _show(open_console(), document)
    return exit_code(document.problems)


def _list_keys(reader: StoreReader, prefix: str, *, as_json: bool) -> None:
    for key in reader.store.list(prefix):
        if not as_json:
            click.echo(printable(key))
        elif (nbytes := reader.store.object_nbytes(key)) >= 0:
            click.echo(json.dumps({"key": key, "nbytes": nbytes}).replace("\x7f", "\\u007f"))


def _list_namespaces(reader: StoreReader, store: str, prefix: str) -> Listing:
    found: dict[Namespace, NamespaceDocument] = {}
    num_foreign = 0
    for text in reader.store.list(prefix):
        try:
            key = parse_key(text)
        except RemoteDataError:
            num_foreign += 1
            continue
        entry = found.get(key.namespace)
        if entry is None:
            entry = found[key.namespace] = NamespaceDocument(
                namespace=namespace_prefix(key.namespace).removesuffix("/"),
                tenant=key.namespace.tenant,
                model=key.namespace.model,
                fingerprint=key.namespace.fingerprint.hex(),
            )
        # An object may go between the list and this call.
        if not isinstance(key, ManifestKey) and (nbytes := reader.store.object_nbytes(text)) >= 0:
            entry.num_objects += 1
            entry.nbytes += nbytes
    problems: list[Problem] = []
    for namespace, entry in found.items():
        layout, why = find_layout(reader, ManifestKey(namespace))
        problems += why
        if layout is not None:
            _add_layout(entry, layout)
    entries = sorted(found.values(), key=lambda e: (e.tenant, e.model, e.fingerprint))
    return Listing(
        store=store,
        prefix=prefix,
        namespaces=entries,
        num_objects=sum(e.num_objects for e in entries),
        nbytes=sum(e.nbytes for e in entries),
        num_foreign_keys=num_foreign,
        problems=problems,
    )


def _add_layout(entry: NamespaceDocument, layout: Layout) -> None:
    entry.content_fingerprint = content_fingerprint(layout).hex()
    entry.weights = layout.identity.weights
    entry.adapter = layout.identity.adapter
    entry.dtypes = layout_dtypes(layout)
    entry.block_sizes = sorted({group.block_size for group in layout.groups})
    entry.num_layers = sum(len(group.layers) for group in layout.groups)


def _show(console: Console, document: Listing) -> None:
    if document.namespaces:
        print_table(
            console,
            (
                Column("model", folds=True),
                Column("tenant", folds=True),
                Column("weights", folds=True),
                Column("dtype", folds=True),
                Column("block size", is_number=True),
                Column("objects", is_number=True),
                Column("bytes", is_number=True),
                Column("fingerprint"),
            ),
            [tuple(_cells(entry)) for entry in document.namespaces],
        )
        console.print()
    total = (
        f"{format_count(len(document.namespaces), 'namespace')}, "
        f"{format_count(document.num_objects, 'object')}, {format_nbytes(document.nbytes)}"
    )
    if document.num_foreign_keys:
        keys = format_count(document.num_foreign_keys, "key")
        total += f"; {keys} not of this format version"
    print_line(console, total)
    print_problems(console, document.problems)


def _cells(entry: NamespaceDocument) -> Iterator[object]:
    yield entry.model or "(empty)"
    yield entry.tenant or "(empty)"
    yield "?" if entry.weights is None else format_weights(entry.weights, entry.adapter or "")
    yield "?" if entry.dtypes is None else format_list(entry.dtypes)
    yield "?" if entry.block_sizes is None else format_list(entry.block_sizes)
    yield entry.num_objects
    yield format_nbytes(entry.nbytes)
    yield entry.fingerprint
