"""``kvformat doctor``: would a server start here, reach its store, and share with another one?"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import click
from rich.console import Console

import kvformat
from kvformat import registry
from kvformat.cli.diff import compare_layouts, show_comparison
from kvformat.cli.doctor_document import Check, Diagnosis, OptionDifference
from kvformat.cli.problems import EXIT_FINE, EXIT_FOUND, EXIT_UNUSABLE, Problem
from kvformat.cli.program import Command, json_option
from kvformat.cli.render import (
    Column,
    open_console,
    print_json,
    print_table,
    print_title,
    printable,
)
from kvformat.cli.sources import open_reader, read_file
from kvformat.errors import Reason


@click.command("doctor", cls=Command, short_help="Would a server start here, and share?")
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option("--store", metavar="URI", help="The store to reach and test.")
@click.option(
    "--config",
    "configs",
    metavar="FILE",
    multiple=True,
    help="A server's --kv-transfer-config as JSON; twice: would these two share?",
)
@json_option
def doctor_command(
    a: str | None, b: str | None, store: str | None, configs: Sequence[str], as_json: bool
) -> int:
    """Check versions, options, block hashes, ports and the store, and whether two servers share.

    The store is the one of --store, else that of the first --config. It is tested with an object
    that is put, read, compared and removed.

    A and B are two servers' manifests, given as for kvformat diff: they say everything that two
    servers must agree on. Two configuration files say what their options decide.

    \b
    Examples:
      kvformat doctor --config kv-transfer.json
      kvformat doctor --store mooncake://host:50051
      kvformat doctor --config server1.json --config server2.json
      kvformat doctor server1-manifest.json server2-manifest.json

    Exit status: 0 nothing is wrong, 1 something is, 2 wrong usage, or the store can't be reached.
    """
    if len(configs) > 2:
        raise click.UsageError("--config can be given twice at most: it compares two servers")
    diagnosis = Diagnosis(checks=list(_versions()))
    connector = _connector(diagnosis)
    if connector is not None:
        _check_configs(diagnosis, connector, configs)
        uri = store or _store_of(connector, configs)
        if uri is not None:
            diagnosis.checks += connector.check_store(uri)
    elif configs or store:
        raise click.UsageError("--config and --store need the package kvformat_connector")
    if a is not None or b is not None:
        with ExitStack() as stack:
            reader = None if store is None else stack.enter_context(open_reader(store))
            if reader is None and (a is None or b is None):
                raise click.UsageError("give two manifest files, or --store URI")
            diagnosis.layouts = compare_layouts(a, b, reader)
    diagnosis.problems = list(_problems(diagnosis))
    if as_json:
        print_json(diagnosis)
    else:
        _show(open_console(), diagnosis)
    return _exit_code(diagnosis)


def _versions() -> Sequence[Check]:
    found = sys.version_info
    return [
        Check(
            "kvformat",
            "ok",
            f"{kvformat.__version__}, format {registry.FORMAT_MAJOR}.{registry.FORMAT_MINOR}",
        ),
        Check("python", "ok", f"{found.major}.{found.minor}.{found.micro} {platform.machine()}"),
    ]


def _connector(diagnosis: Diagnosis) -> Any:
    """The connector's own checks, or None where it isn't installed. It lies above this package, so
    it is asked for when the command runs and never imported before."""
    try:
        connector: Any = importlib.import_module("kvformat_connector.diagnosis")
    except ImportError as error:
        diagnosis.checks.append(Check("connector", "skipped", f"can't be imported: {error}"))
        return None
    diagnosis.checks += connector.check_installation()
    return connector


def _check_configs(diagnosis: Diagnosis, connector: Any, configs: Sequence[str]) -> None:
    documents = [_read_config(path) for path in configs]
    for path, document in zip(configs, documents, strict=True):
        diagnosis.checks += connector.check_config(path, document)
    if len(documents) == 2:
        found = connector.option_differences(*documents)
        diagnosis.option_differences = (
            None if found is None else [OptionDifference(*difference) for difference in found]
        )


def _read_config(path: str) -> object:
    try:
        return json.loads(read_file(path))
    except ValueError as error:
        raise click.UsageError(f"{path!r} holds no JSON: {error}") from error


def _store_of(connector: Any, configs: Sequence[str]) -> str | None:
    found: str | None = connector.store_of(_read_config(configs[0])) if configs else None
    return found


def _problems(diagnosis: Diagnosis) -> Sequence[Problem]:
    found = [
        Problem(check.reason or check.status, f"{check.name}: {check.found}")
        for check in diagnosis.checks
        if check.status in ("failed", "unreachable")
    ]
    for difference in diagnosis.option_differences or ():
        found.append(
            Problem(
                Reason.CONFIG_CONFLICT.value,
                f"option {difference.option}: {difference.a} and {difference.b}, "
                "so these servers share nothing",
            )
        )
    return [*found, *(diagnosis.layouts.problems if diagnosis.layouts else ())]


def _exit_code(diagnosis: Diagnosis) -> int:
    if any(check.status == "unreachable" for check in diagnosis.checks):
        return EXIT_UNUSABLE
    if diagnosis.problems or (diagnosis.layouts is not None and not diagnosis.layouts.is_equal):
        return EXIT_FOUND
    return EXIT_FINE


def _show(console: Console, diagnosis: Diagnosis) -> None:
    print_table(
        console,
        (Column("check"), Column("result"), Column("found", folds=True)),
        [(check.name, check.status, check.found) for check in diagnosis.checks],
    )
    advice = [(check.name, check.advice) for check in diagnosis.checks if check.advice]
    if advice:
        print_title(console, "What to do")
        for name, text in advice:
            console.print(f"  {printable(name)}: {printable(text)}")
    if diagnosis.option_differences is not None:
        differences = diagnosis.option_differences
        verdict = (
            "The options differ: these servers share nothing."
            if differences
            else "The options agree; compare the servers' manifests for what the engine decides."
        )
        print_title(console, verdict, "bold red" if differences else "bold green")
        if differences:
            print_table(
                console,
                (Column("option"), Column("A", folds=True), Column("B", folds=True)),
                [(d.option, d.a, d.b) for d in differences],
            )
    if diagnosis.layouts is not None:
        console.print()
        show_comparison(console, diagnosis.layouts)
    failed = sum(check.status in ("failed", "unreachable") for check in diagnosis.checks)
    if failed:
        print_title(console, f"{failed} check{'s' if failed > 1 else ''} failed.", "bold red")
    elif _exit_code(diagnosis) == EXIT_FINE:
        print_title(console, "Every check that could be made is fine.", "bold green")
