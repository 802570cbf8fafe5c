"""``kvformat verify``: walk a store and count what is wrong, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.status import Status

from kvformat.cli.check import examine
from kvformat.cli.problems import EXIT_FINE, EXIT_FOUND, Problem, StoreAnswerError
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import (
    Column,
    format_count,
    format_nbytes,
    open_console,
    print_json,
    print_line,
    print_problems,
    print_table,
    print_title,
)
from kvformat.cli.sources import StoreReader, find_layout, is_key_text, open_reader
from kvformat.errors import RemoteDataError
from kvformat.key import ManifestKey, Namespace, parse_key
from kvformat.layout import Layout
from kvformat.stores import Code


class Verification(msgspec.Struct, kw_only=True):
    """The document of ``verify --json``.

    ``num_objects`` counts the block objects that were examined, ``num_ok`` those with nothing
    wrong, ``num_manifests`` the usable manifests. ``reasons`` counts the keys of each reason: an
    object with two damaged layers counts once. ``num_gone`` counts objects that were removed during
    the walk, ``num_foreign_keys`` those of other programs; neither is a finding. ``problems`` holds
    at most ``--examples`` findings of each reason.
    """

    store: str
    prefix: str
    is_payload_verified: bool
    num_objects: int = 0
    num_ok: int = 0
    nbytes: int = 0
    num_manifests: int = 0
    num_gone: int = 0
    num_foreign_keys: int = 0
    reasons: dict[str, int] = {}
    problems: list[Problem] = []


@click.command("verify", cls=Command, short_help="Check every object in a store.")
@click.argument("store")
@click.argument("prefix", default="")
@click.option("--headers-only", is_flag=True, help="Don't read payloads.")
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Findings to show of each reason.",
)
@json_option
def verify_command(
    store: str, prefix: str, headers_only: bool, examples: int, as_json: bool
) -> int:
    """Check every object in STORE, or those whose key starts with PREFIX, and count by reason.

    Each object's header is checked by itself, against its key and against its namespace's
    manifest, and each layer's checksum against its bytes. Objects are read piece by piece.

    \b
    Examples:
      kvformat verify file:///var/cache/kv
      kvformat verify file:///var/cache/kv kvformat1/acme/ --headers-only

    Exit status: 0 all is well, 1 something is wrong, 2 the store can't be reached, or can't list
    its keys.
    """
    document = Verification(store=store, prefix=prefix, is_payload_verified=not headers_only)
    with open_reader(store) as reader, _progress(enabled=not as_json) as progress:
        walk = _Walk(reader, document, examples)
        for number, key in enumerate(reader.store.list(prefix)):
            walk.check(key)
            if number % 64 == 0 and progress is not None:
                progress.update(f"{format_count(number, 'key')}, {format_nbytes(document.nbytes)}")
    if as_json:
        print_json(document)
    else:
        _show(open_console(), document)
    return EXIT_FOUND if document.reasons else EXIT_FINE


class _Walk:
    """Examines one key after the other, and each namespace's manifest once."""

    def __init__(self, reader: StoreReader, document: Verification, num_examples: int) -> None:
        self._reader = reader
        self._document = document
        self._num_examples = num_examples
        self._layouts: dict[Namespace, Layout | None] = {}
        self._shown: Counter[str] = Counter()

    def check(self, text: str) -> None:
        """Examine one key and count what is found."""
        document = self._document
        try:
            key = parse_key(text)
        except RemoteDataError as error:
            if is_key_text(text):
                self._count(text, [Problem.from_error(error, text)])
            else:
                document.num_foreign_keys += 1
            return
        layout = self._layout(key.namespace)
        if isinstance(key, ManifestKey):
            return
        try:
            with self._reader.open(text, "object") as stored:
                document.nbytes += stored.nbytes
                found = examine(stored, key, layout, verify=document.is_payload_verified)
        except StoreAnswerError as error:
            if error.code == Code.NOT_FOUND:
                document.num_gone += 1
                return
            problems = [error.problem]
        else:
            problems = found.problems
        document.num_objects += 1
        document.num_ok += not problems
        self._count(text, problems)

    def _layout(self, namespace: Namespace) -> Layout | None:
        if namespace not in self._layouts:
            layout, problems = find_layout(self._reader, ManifestKey(namespace))
            self._layouts[namespace] = layout
            self._document.num_manifests += layout is not None
            for problem in problems:
                self._count(problem.key or "", [problem])
        return self._layouts[namespace]

    def _count(self, key: str, problems: list[Problem]) -> None:
        for reason in dict.fromkeys(problem.reason for problem in problems):
            counts = self._document.reasons
            counts[reason] = counts.get(reason, 0) + 1
        for problem in problems:
            if self._shown[problem.reason] < self._num_examples:
                self._shown[problem.reason] += 1
                self._document.problems.append(msgspec.structs.replace(problem, key=key))


@contextmanager
def _progress(*, enabled: bool) -> Iterator[Status | None]:
    """A line that moves, for who watches a terminal."""
    console = open_console(stderr=True)
    # Without cursor movements there is nothing that moves.
    if not (enabled and console.is_terminal and console.color_system):
        yield None
        return
    with console.status("listing keys") as status:
        yield status


def _show(console: Console, document: Verification) -> None:
    print_line(
        console,
        f"{format_count(document.num_objects, 'object')} ({format_nbytes(document.nbytes)}), "
        f"{document.num_ok} fine; {format_count(document.num_manifests, 'usable manifest')}",
    )
    if document.num_gone:
        print_line(console, f"{format_count(document.num_gone, 'object')} went away meanwhile")
    if document.num_foreign_keys:
        keys = format_count(document.num_foreign_keys, "key")
        print_line(console, f"{keys} of other programs left alone")
    if not document.is_payload_verified:
        print_line(console, "Payloads were not read (--headers-only).")
    if document.reasons:
        print_title(console, "Findings by reason")
        print_table(
            console,
            (Column("reason", style="red"), Column("keys", is_number=True)),
            Counter(document.reasons).most_common(),
        )
        print_problems(console, document.problems)
    else:
        examined = document.num_objects + document.num_manifests
        verdict = "Nothing is wrong." if examined else "There was nothing to check."
        print_title(console, verdict, "bold green" if examined else "bold")
