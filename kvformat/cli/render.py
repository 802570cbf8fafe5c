"""Text for people and JSON for programs.

On a terminal: colours (unless ``NO_COLOR`` is set) and the terminal's width, in which long values
fold and a table that can't fit becomes one record a row. Elsewhere: plain text, never folded or
cut.
Text that came from outside is shown with its control characters escaped.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvformat.cli.problems import Problem

#: Wider than any line, so that nothing folds where no terminal asks for it.
_UNLIMITED: Final = 1 << 20
#: Below this a folded column is no longer readable.
_MIN_FOLDED: Final = 14
_INDENT: Final = 2
#: Between columns.
_GAP: Final = 2
_DIGEST: Final = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b")
_MAX_IDENTITY: Final = 40


class _PlainPipeConsole(Console):
    """Leaves a broken pipe to the program, which knows what to exit with."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Column(msgspec.Struct, frozen=True):
    """A column of a table. ``folds``: its values may be folded in a narrow terminal."""

    title: str
    folds: bool = False
    is_number: bool = False
    style: str = ""


def open_console(*, stderr: bool = False) -> Console:
    """A console for one of the standard streams as it is now."""
    stream = sys.stderr if stderr else sys.stdout
    on_terminal = stream.isatty()
    return _PlainPipeConsole(
        file=stream,
        width=None if on_terminal else _UNLIMITED,
        # rich would still print bold and dim under NO_COLOR.
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=not on_terminal,
    )


def printable(text: str, keep: str = "") -> str:
    """``text`` with everything that isn't plainly visible written as a backslash escape.

    That is control and format characters, lone surrogates, and odd spaces: nothing that reaches a
    terminal can move its cursor, colour it, or reorder what it shows.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def format_nbytes(nbytes: int) -> str:
    """``48.0 MiB``; below a KiB the exact number."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} PiB"


def format_count(number: int, noun: str) -> str:
    """``1 key``, ``2 keys``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_weights(weights: str, adapter: str) -> str:
    """The identities of weights and adapter, short enough for a table: a digest by its first 8
    digits, an adapter without the settings that follow its digest, 40 characters of anything."""
    if not adapter:
        return _shorten(weights)
    start = adapter.removeprefix("digest:").partition(" ")[0]
    return f"{_shorten(weights)} + adapter:{_shorten(start)}"


def _shorten(text: str) -> str:
    text = _DIGEST.sub(r"\1...", text)
    return text if len(text) <= _MAX_IDENTITY else f"{text[: _MAX_IDENTITY - 3]}..."


def format_list(values: Iterable[object], nothing: str = "-") -> str:
    """Values with commas between."""
    return ", ".join(map(str, values)) or nothing


def dump_json(document: object) -> str:
    """A document as indented ASCII JSON; no character of it acts on a terminal."""
    text = json.dumps(msgspec.to_builtins(document), indent=2)
    return text.replace("\x7f", "\\u007f")


def print_json(document: object) -> None:
    """Print a document on standard output."""
    # In lines, because an unbuffered stream loses the rest of a large write that a pipe cut short.
    sys.stdout.writelines(f"{line}\n" for line in dump_json(document).split("\n"))


def print_title(console: Console, title: str, style: str = "bold") -> None:
    """A heading with an empty line before it."""
    console.print()
    console.print(_text(title, style))


def print_fields(console: Console, fields: Iterable[tuple[str, object]]) -> None:
    """One line a field: name and value."""
    rows = [(printable(name), printable(str(value))) for name, value in fields]
    widest = max((cell_len(name) for name, _ in rows), default=0)
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    # In a narrow terminal names fold too, before values get no room.
    grid.add_column(overflow="fold", max_width=max(1, min(widest, console.width // 2)))
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name, style="cyan"), Text(value))
    _print_block(console, grid)


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[object]]
) -> None:
    """A table, or a record a row where the console is too narrow for one."""
    cells = [[printable(str(value)) for value in row] for row in rows]
    if _least_width(columns, cells) > console.width:
        for number, row in enumerate(cells):
            if number:
                console.print()
            print_fields(console, zip((c.title for c in columns), row, strict=True))
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            Text(column.title),
            justify="right" if column.is_number else "left",
            style=column.style,
            overflow="fold",
            no_wrap=not column.folds,
        )
    for row in cells:
        table.add_row(*map(Text, row))
    _print_block(console, table)


def print_problems(console: Console, problems: Sequence[Problem]) -> None:
    """What was found, one line each, or nothing."""
    if not problems:
        return
    print_title(console, "Problems")
    for problem in problems:
        line = Text().append(printable(problem.reason), "bold red")
        line.append(f": {printable(problem.detail)}")
        if problem.key is not None:
            line.append(f" ({printable(problem.key)})", "dim")
        line.overflow = "fold"
        _print_block(console, line)


def print_line(console: Console, text: str, style: str = "") -> None:
    """One paragraph."""
    console.print(_text(text, style), overflow="fold")


def _print_block(console: Console, block: RenderableType) -> None:
    """Print something indented, and without the spaces with which rich fills a line up."""
    with console.capture() as captured:
        console.print(Padding.indent(block, _INDENT))
    for line in captured.get().removesuffix("\n").split("\n"):
        console.file.write(line.rstrip() + "\n")


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _least_width(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> int:
    """The width below which a value that must not fold would be cut."""
    total = _INDENT - _GAP
    for index, column in enumerate(columns):
        widest = max([cell_len(column.title), *(cell_len(row[index]) for row in cells)])
        total += (min(widest, _MIN_FOLDED) if column.folds else widest) + _GAP
    return total
