"""How every command starts and ends: options that all share, errors, exit codes, broken pipes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click

from kvformat.cli.problems import EXIT_FOUND, EXIT_UNUSABLE, Problem, StoreAnswerError
from kvformat.cli.render import dump_json, printable
from kvformat.errors import KVFormatError, Reason, RemoteDataError, StoreUnavailableError

#: As a shell reports a process that wrote to a closed pipe, and one that was interrupted.
EXIT_BROKEN_PIPE = 141
EXIT_INTERRUPTED = 130

F = TypeVar("F", bound=Callable[..., object])


def json_option(function: F) -> F:
    """``--json``, as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(
        function
    )


class _ReaderGoneError(Exception):
    """A broken pipe, under a name that click doesn't take for its own business."""


class Command(click.Command):
    """A command whose function returns its exit code."""

    def invoke(self, ctx: click.Context) -> NoReturn:
        try:
            code: int = super().invoke(ctx)
        except (KVFormatError, StoreAnswerError) as error:
            code = _report(error, bool(ctx.params.get("as_json")))
        except BrokenPipeError:
            raise _ReaderGoneError from None
        except OSError as error:
            unavailable = StoreUnavailableError(Reason.STORE_UNAVAILABLE, str(error))
            code = _report(unavailable, bool(ctx.params.get("as_json")))
        ctx.exit(code)


class Program(click.Group):
    """The command line. No input of any kind ends in a traceback or a raw control character."""

    command_class = Command

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A terminal without Unicode gets an escape where it can't show a character.
                stream.reconfigure(errors="backslashreplace")
        try:
            try:
                code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            except click.ClickException as error:
                code = _show_usage(error)
            except click.Abort:
                code = EXIT_INTERRUPTED
            sys.stdout.flush()
        except (BrokenPipeError, _ReaderGoneError):
            # The interpreter flushes once more at exit, and must not meet the pipe again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = EXIT_BROKEN_PIPE
        sys.exit(code)


def _report(error: KVFormatError | StoreAnswerError, as_json: bool) -> int:
    """Print an error that left nothing to show. Data that is wrong is a finding; a store that is
    out of reach, or an option that is wrong, is not.
    """
    problem = error.problem if isinstance(error, StoreAnswerError) else Problem.from_error(error)
    if as_json:
        click.echo(dump_json({"error": {"reason": problem.reason, "detail": problem.detail}}))
    click.echo(f"Error: {printable(problem.detail, keep=chr(10))} [{problem.reason}]", err=True)
    return EXIT_FOUND if isinstance(error, RemoteDataError) else EXIT_UNUSABLE


def _show_usage(error: click.ClickException) -> int:
    text = io.StringIO()
    error.show(file=text)
    click.echo(printable(text.getvalue(), keep="\n"), err=True, nl=False)
    return EXIT_UNUSABLE
