"""``kvformat inspect``: the header of a stored object, and whether its bytes are as written."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console

from kvformat.cli.check import (
    Examination,
    RangeDocument,
    examine,
)
from kvformat.cli.header_document import HeaderDocument, header_document, print_header
from kvformat.cli.problems import Problem, StoreAnswerError, exit_code
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import (
    Column,
    open_console,
    print_fields,
    print_json,
    print_problems,
    print_table,
    print_title,
)
from kvformat.cli.sources import StoreReader, find_layout, open_reader
from kvformat.key import ManifestKey, parse_key


class Inspection(msgspec.Struct, kw_only=True):
    """The document of ``inspect --json``.

    ``nbytes`` is the size that the store reports. ``is_layout_known`` says whether the object was
    checked against its namespace's manifest, ``is_payload_verified`` whether every range of the
    payload was read and is right. ``header`` is null, and ``ranges`` empty, where the header isn't
    valid or the key is a manifest's.
    """

    store: str
    key: str
    kind: str
    nbytes: int | None = None
    is_layout_known: bool = False
    is_payload_verified: bool = False
    header: HeaderDocument | None = None
    ranges: list[RangeDocument] = []
    problems: list[Problem] = []


@click.command("inspect", cls=Command, short_help="Show a stored object's header and check it.")
@click.argument("store")
@click.argument("key")
@click.option("--verify", is_flag=True, help="Read the payload too and check every checksum.")
@json_option
def inspect_command(store: str, key: str, verify: bool, as_json: bool) -> int:
    """Show what the object KEY in STORE says of itself and check it.

    The header is always checked: by itself, against the key, and against the layout where the
    store has the namespace's manifest. Only the header is read, unless --verify is given.

    \b
    Example:
      kvformat inspect file:///var/cache/kv "$KEY" --verify

    Exit status: 0 all is well, 1 something is wrong or missing, 2 the store can't be reached.
    """
    with open_reader(store) as reader:
        document = _inspect(reader, store, key, verify=verify)
    if as_json:
        print_json(document)
    else:
        _show(open_console(), document)
    return exit_code(document.problems)


def _inspect(reader: StoreReader, store: str, text: str, *, verify: bool) -> Inspection:
    key = parse_key(text)
    layout, problems = find_layout(reader, key)
    if isinstance(key, ManifestKey):
        return Inspection(
            store=store,
            key=text,
            kind="manifest",
            nbytes=max(reader.store.object_nbytes(text), 0) or None,
            is_layout_known=layout is not None,
            problems=problems,
        )
    document = Inspection(
        store=store,
        key=text,
        kind="object",
        is_layout_known=layout is not None,
        problems=problems,
    )
    try:
        with reader.open(text, "object") as stored:
            document.nbytes = stored.nbytes
            found = examine(stored, key, layout, verify=verify)
    except StoreAnswerError as error:
        document.problems = [*problems, error.finding()]
        return document
    return _with_examination(document, found)


def _with_examination(document: Inspection, found: Examination) -> Inspection:
    document.ranges = found.ranges
    document.problems = [*document.problems, *found.problems]
    if found.header is not None:
        document.header = header_document(found.header)
        document.is_payload_verified = all(row.status == "ok" for row in found.ranges)
    return document


def print_ranges(console: Console, ranges: list[RangeDocument]) -> None:
    """The ranges of an object with their checksums, for people."""
    print_title(console, "Layers")
    print_table(
        console,
        (
            Column("group", is_number=True),
            Column("layer", is_number=True),
            Column("offset", is_number=True),
            Column("bytes", is_number=True),
            Column("checksum"),
            Column("found"),
            Column("payload"),
        ),
        [
            (r.group, r.layer, r.offset, r.nbytes, r.checksum or "-", r.found or "-", r.status)
            for r in ranges
        ],
    )


def _show(console: Console, document: Inspection) -> None:
    print_fields(
        console,
        (
            ("key", document.key),
            ("size in store", "-" if document.nbytes is None else f"{document.nbytes} bytes"),
            ("manifest", "found, fits" if document.is_layout_known else "not usable"),
        ),
    )
    if document.header is not None:
        print_header(console, document.header)
        print_ranges(console, document.ranges)
    print_problems(console, document.problems)
    if not document.problems:
        print_title(console, _verdict(document), "bold green")


def _verdict(document: Inspection) -> str:
    if document.kind == "manifest":
        return "The manifest is valid and has the fingerprint of its key."
    if document.is_payload_verified:
        return "The header and every byte of the payload are right."
    return "The header is right. The payload was not read: --verify reads it."
