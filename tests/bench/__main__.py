"""Runs every bench of this folder: JSON on stdout, a table on stderr.

Run: ``python -m tests.bench [name ...]``. Status 1 where a bench fails to run or a target isn't
reached.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

Document = dict[str, object]


def run(bench: Path) -> Document:
    """One bench in a process of its own, so that none warms another's caches."""
    done = subprocess.run([sys.executable, bench], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return {"bench": bench.stem, "rows": [], "failed": done.returncode}
    found: Document = json.loads(done.stdout)
    return found


def table_of(documents: list[Document]) -> Table:
    """Every row of every bench."""
    table = Table(title=f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs")
    for name in ("what", "value", "unit", "floor", "ratio", "target", "reached"):
        table.add_column(name, justify="right" if name in ("value", "floor", "ratio") else "left")
    for document in documents:
        rows = document["rows"]
        assert isinstance(rows, list)
        if "failed" in document:
            table.add_row(str(document["bench"]), "", "", "", "", "", "[red]failed to run[/]")
        for row in rows:
            verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[row.get("reached")]
            cells = [row["name"], *(row.get(n, "") for n in ("value", "unit", "floor", "ratio"))]
            table.add_row(*map(str, cells), row.get("target", ""), verdict)
    return table


def main() -> int:
    """Run what was asked for, or all."""
    benches = sorted(Path(__file__).parent.glob("bench_*.py"))
    if wanted := sys.argv[1:]:
        benches = [b for b in benches if b.stem.removeprefix("bench_") in wanted]
    # A log has no width of its own; rows that fold there can't be read.
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    documents = []
    for bench in benches:
        console.print(f"running {bench.name}", style="dim")
        documents.append(run(bench))
    json.dump(documents, sys.stdout, indent=1)
    print()
    console.print(table_of(documents))
    missed = any(
        "failed" in document or any(row.get("reached") is False for row in document["rows"])  # type: ignore[attr-defined]
        for document in documents
    )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
