"""``kvformat diff``: why two servers share their cache, or don't."""

from __future__ import annotations

import os
from contextlib import ExitStack

import click
import msgspec
from rich.console import Console

from kvformat.cli.hints import find_hint
from kvformat.cli.problems import EXIT_FINE, EXIT_FOUND, Problem
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import (
    Column,
    format_list,
    format_weights,
    open_console,
    print_fields,
    print_json,
    print_problems,
    print_table,
    print_title,
    printable,
)
from kvformat.cli.sources import (
    StoreReader,
    find_layout,
    is_key_text,
    layout_dtypes,
    load_layout_file,
    open_reader,
    parse_namespace,
    stored_namespaces,
)
from kvformat.diff import ABSENT, Scalar, diff
from kvformat.errors import KeyFormatError
from kvformat.fingerprint import content_fingerprint
from kvformat.key import ManifestKey, Namespace, layout_namespace, namespace_prefix
from kvformat.layout import Layout


class SideDocument(msgspec.Struct, kw_only=True):
    """One side: the file or namespace it came from, and what that is."""

    source: str
    tenant: str
    model: str
    fingerprint: str
    content_fingerprint: str | None = None


class DifferenceDocument(msgspec.Struct, frozen=True):
    """A field and both its values; null for a side that has no such field.

    A run of layers that differ alike is one field: ``groups[0].layers[0..31].components[k].dtype``.
    """

    field: str
    a: Scalar | None
    b: Scalar | None


class DiffDocument(msgspec.Struct, kw_only=True):
    """The document of ``diff --json``.

    ``is_content_equal`` is true where at most the shard grid differs: such servers can exchange KV
    between prefill and decode, but don't share objects. It, ``is_equal`` and ``differences`` are
    null where a manifest couldn't be had; then ``problems`` says why.
    """

    a: SideDocument
    b: SideDocument
    is_equal: bool | None = None
    is_content_equal: bool | None = None
    differences: list[DifferenceDocument] | None = None
    problems: list[Problem] = []


class _Side(msgspec.Struct):
    source: str
    namespace: Namespace
    layout: Layout | None
    problems: list[Problem]


@click.command("diff", cls=Command, short_help="Why two servers share their cache, or don't.")
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--store", metavar="URI", help="Where namespaces are looked up.")
@json_option
def diff_command(a: str | None, b: str | None, store: str | None, as_json: bool) -> int:
    """Say in which fields the layouts A and B differ, with both values.

    A and B are manifest files or, with --store, namespaces: given by a key, a fingerprint or the
    start of one, the start of a namespace, a tenant, a model, or tenant/model. What is left out is
    taken from the store, if that leaves one choice only.

    \b
    Examples:
      kvformat describe NAMESPACE --store file:///var/cache/kv --manifest > server1.json
      kvformat diff server1.json server2.json
      kvformat diff --store file:///var/cache/kv
      kvformat diff --store file:///var/cache/kv 3f21 server2.json

    Exit status: 0 the layouts are equal, 1 they differ or a manifest is wrong or missing, 2 wrong
    usage, or the store can't be reached.
    """
    if store is None and (a is None or b is None):
        raise click.UsageError("give two manifest files, or --store URI")
    with ExitStack() as stack:
        reader = None if store is None else stack.enter_context(open_reader(store))
        document = compare_layouts(a, b, reader)
    if as_json:
        print_json(document)
    else:
        show_comparison(open_console(), document)
    return EXIT_FINE if document.is_equal else EXIT_FOUND


def compare_layouts(a: str | None, b: str | None, reader: StoreReader | None) -> DiffDocument:
    """Compare two layouts that are named as the command's arguments are."""
    return _compare(*_load_sides(a, b, reader))


def _load_sides(a: str | None, b: str | None, reader: StoreReader | None) -> tuple[_Side, _Side]:
    choices: list[Namespace] | None = None
    sides: list[_Side] = []
    for text in (a, b):
        if text is None:
            continue
        namespace = _exact_namespace(text)
        if namespace is not None:
            sides.append(_load_namespace(text, namespace, reader))
        elif not is_key_text(text) and os.path.exists(text) and not os.path.isdir(text):
            layout = load_layout_file(text)
            sides.append(_Side(text, layout_namespace(layout), layout, []))
        else:
            if reader is None:
                raise click.UsageError(
                    f"there is no file {text!r}, and no --store to look it up in"
                )
            choices = stored_namespaces(reader) if choices is None else choices
            sides.append(_choose(text, choices, reader))
    if len(sides) < 2 and reader is not None:
        choices = stored_namespaces(reader) if choices is None else choices
        sides += _rest(sides, choices, reader)
    return sides[0], sides[1]


def _exact_namespace(text: str) -> Namespace | None:
    """The namespace that a key or a whole namespace names; a store need not be able to list then.

    Raises ``UnsupportedVersionError`` for those of another format version.
    """
    if not is_key_text(text):
        return None
    try:
        return parse_namespace(text)
    except KeyFormatError:
        return None


def _load_namespace(source: str, namespace: Namespace, reader: StoreReader | None) -> _Side:
    if reader is None:
        raise click.UsageError(f"{source!r} is a namespace: --store says where its manifest is")
    return _Side(source, namespace, *find_layout(reader, ManifestKey(namespace)))


def _choose(text: str, choices: list[Namespace], reader: StoreReader) -> _Side:
    """The one namespace that ``text`` means."""
    found = [n for n in choices if _matches(text, n)]
    if len(found) != 1:
        listed = found or choices
        raise click.UsageError(
            f"{text!r} means {'several namespaces' if found else 'no namespace'} of the store"
            f"{'' if found else ', and there is no such file'}; "
            f"{'they are' if found else 'it has'}:\n{_list(listed, reader)}"
        )
    return _load_namespace(_name(found[0]), found[0], reader)


def _matches(text: str, namespace: Namespace) -> bool:
    return (
        namespace.fingerprint.hex().startswith(text)
        or namespace_prefix(namespace).startswith(text)
        or text in (namespace.tenant, namespace.model, f"{namespace.tenant}/{namespace.model}")
    )


def _rest(sides: list[_Side], choices: list[Namespace], reader: StoreReader) -> list[_Side]:
    """The namespaces to take for what was left out, if there is only one way."""
    left = [n for n in choices if n not in [side.namespace for side in sides]]
    wanted = 2 - len(sides)
    if len(left) < wanted:
        if len(choices) == 1:
            raise click.UsageError(
                "the store has one namespace only, nothing to compare it with:\n"
                f"{_list(choices, reader)}"
            )
        raise click.UsageError("the store has no namespaces, nothing to compare")
    if len(left) > wanted:
        raise click.UsageError(
            f"the store has {len(left)} {'other ' if sides else ''}namespaces, so it must be said "
            f"which to compare:\n{_list(left, reader)}"
        )
    return [_load_namespace(_name(namespace), namespace, reader) for namespace in left]


def _name(namespace: Namespace) -> str:
    return namespace_prefix(namespace).removesuffix("/")


def _list(namespaces: list[Namespace], reader: StoreReader) -> str:
    """A line for each, with what tells it from its neighbours if its manifest can be had."""
    lines = []
    for namespace in namespaces:
        layout, _ = find_layout(reader, ManifestKey(namespace))
        identity = "no usable manifest"
        if layout is not None:
            weights = format_weights(layout.identity.weights, layout.identity.adapter)
            identity = f"weights {weights}, {format_list(layout_dtypes(layout))}"
        lines.append(f"  {_name(namespace)}  ({printable(identity)})")
    return "\n".join(lines) or "  (none)"


def _compare(a: _Side, b: _Side) -> DiffDocument:
    document = DiffDocument(a=_side(a), b=_side(b), problems=[*a.problems, *b.problems])
    if a.layout is not None and b.layout is not None:
        document.differences = [
            DifferenceDocument(d.path, d.a, d.b) for d in diff(a.layout, b.layout)
        ]
        document.is_equal = not document.differences
        document.is_content_equal = document.a.content_fingerprint == document.b.content_fingerprint
    return document


def _side(side: _Side) -> SideDocument:
    return SideDocument(
        source=side.source,
        tenant=side.namespace.tenant,
        model=side.namespace.model,
        fingerprint=side.namespace.fingerprint.hex(),
        content_fingerprint=None if side.layout is None else content_fingerprint(side.layout).hex(),
    )


def show_comparison(console: Console, document: DiffDocument) -> None:
    """A comparison for people."""
    for name, side in (("A", document.a), ("B", document.b)):
        print_fields(console, ((name, side.source), ("", f"fingerprint {side.fingerprint}")))
    print_problems(console, document.problems)
    if document.differences is None:
        return
    style = "bold green" if document.is_equal else "bold red"
    print_title(console, _verdict(document), style)
    if not document.differences:
        return
    console.print()
    print_table(
        console,
        (Column("field", folds=True), Column("A", folds=True), Column("B", folds=True)),
        [(d.field, _cell(d.a), _cell(d.b)) for d in document.differences],
    )
    hints = dict.fromkeys(hint for d in document.differences if (hint := find_hint(d.field)))
    if hints:
        print_title(console, "What that means")
        print_fields(console, (("-", hint) for hint in hints))


def _cell(value: Scalar | None) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "true" if value else "false"
    return printable(str(value)) or '""'


def _verdict(document: DiffDocument) -> str:
    if document.is_equal:
        return "Equal: servers with these layouts share their objects."
    number = len(document.differences or ())
    fields = "1 field differs" if number == 1 else f"{number} fields differ"
    if document.is_content_equal:
        return (
            f"{fields}, in the shard grid only: no shared objects, but prefill and decode servers "
            "can exchange KV."
        )
    return f"{fields}: servers with these layouts share nothing."
