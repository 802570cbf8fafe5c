"""The ``kvformat`` command: look into keys, objects, layouts and stores.

Exit codes of every command: 0 fine, 1 something was found (a mismatch, corrupt data, a difference,
something missing), 2 wrong usage or a store out of reach; 141 when whoever read the output went
away.

``--json`` prints one document; its fields are those of the struct that the command's module
documents (:class:`~kvformat.cli.describe_document.Description`,
:class:`~kvformat.cli.inspect.Inspection`, :class:`~kvformat.cli.diff.DiffDocument`,
:class:`~kvformat.cli.doctor_document.Diagnosis`,
:class:`~kvformat.cli.ls.Listing`, :class:`~kvformat.cli.verify.Verification`). All of them hold
``problems``: a list of ``{reason, detail, key}``, empty where nothing was found. Where there is
nothing to show at all the document is ``{"error": {"reason", "detail"}}``; wrong usage is told on
standard error only. Bytes, bitmaps and checksums are lowercase hex text. Fields are only added.
"""

from __future__ import annotations

import click

import kvformat
from kvformat import registry
from kvformat.cli.describe import describe_command
from kvformat.cli.diff import diff_command
from kvformat.cli.doctor import doctor_command
from kvformat.cli.inspect import inspect_command
from kvformat.cli.ls import ls_command
from kvformat.cli.program import Program
from kvformat.cli.verify import verify_command


@click.group(
    cls=Program,
    commands=[
        describe_command,
        diff_command,
        doctor_command,
        inspect_command,
        ls_command,
        verify_command,
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(
    kvformat.__version__,
    prog_name="kvformat",
    message=f"%(prog)s %(version)s (format {registry.FORMAT_MAJOR}.{registry.FORMAT_MINOR})",
)
def main() -> None:
    """Look into KV-cache objects: what a key, an object, a layout or a store holds.

    STORE is a URI such as file:///var/cache/kv or mooncake://host:50051.

    \b
    Is my KV in the pool?         kvformat ls STORE
    What is under this key?       kvformat describe KEY --store STORE
    Why do two servers not share? kvformat diff --store STORE
    Is what is stored intact?     kvformat verify STORE
    Would a server start here?    kvformat doctor --config kv-transfer.json

    Exit status of every command: 0 fine, 1 something was found, 2 wrong usage or a store that
    can't be reached.
    """
