"""``python -m kvformat_connector.demo``: the main job on real input, and what guards it.

``STORE=file`` (the default) or ``STORE=mooncake`` in the environment picks the store. The exit
status is 0 exactly if everything that is shown holds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from kvformat_connector.demo.engines import import_vllm
from kvformat_connector.demo.scenes import Stage, cold_and_warm, damaged_object, other_servers
from kvformat_connector.demo.storage import demo_store


def main() -> int:
    """Play all scenes; answers the exit status."""
    started = time.monotonic()
    console = Console()
    kind = os.environ.get("STORE", "file") or "file"
    with console.status("Importing vLLM (about ten seconds)"):
        import_vllm()
    with tempfile.TemporaryDirectory(prefix="kvformat-demo-") as folder:
        root = Path(folder)
        with demo_store(kind, root) as uri:
            stage = Stage(root, uri, console)
            console.rule("[bold]1. Cold and warm")
            cold = cold_and_warm(stage)
            console.rule("[bold]2. Servers that differ don't meet")
            other_servers(stage, cold)
            console.rule("[bold]3. A damaged object is not used")
            damaged_object(stage, cold)
    failed = [what for what, holds in stage.checks if not holds]
    console.rule()
    console.print(
        f"{len(stage.checks) - len(failed)} of {len(stage.checks)} statements hold "
        f"({kind} store, {time.monotonic() - started:.0f} s)."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
