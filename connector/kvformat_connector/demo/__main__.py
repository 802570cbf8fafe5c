"""``python -m kvformat_connector.demo``: the main job on real input, and what guards it.

``STORE=file`` (the default) or ``STORE=mooncake`` in the environment picks the store, and
``KEEP=FOLDER`` a new folder for models, file store and logs, which otherwise go when the demo ends.
The exit status is 0 exactly if everything that is shown holds.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from kvformat_connector.demo.engines import BLOCK_SIZE, import_vllm
from kvformat_connector.demo.model import HUB_NAME
from kvformat_connector.demo.scenes import (
    COMMITS,
    Stage,
    cold_and_warm,
    damaged_object,
    other_servers,
)
from kvformat_connector.demo.storage import demo_store, require_kind


@contextmanager
def demo_folder(keep: str, kind: str) -> Iterator[Path]:
    """An empty folder, kept if ``keep`` names one; SystemExit says why it can't be that one.

    A ``kind`` of store that isn't one ends the demo before there is a folder.
    """
    require_kind(kind)
    if not keep:
        with tempfile.TemporaryDirectory(prefix="kvformat-demo-") as folder:
            yield Path(folder)
        return
    if kind == "mooncake":
        raise SystemExit("KEEP needs STORE=file: a Mooncake store goes with its processes")
    root = Path(keep).expanduser().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
        used = any(root.iterdir())
    except OSError as error:
        raise SystemExit(f"KEEP={keep} can't be used: {error}") from None
    if used:
        raise SystemExit(f"KEEP={keep} isn't empty; the cold engine needs an empty store")
    yield root


def serve_command(root: Path, uri: str) -> str:
    """A command line that serves the kept model, in whose store it finds what the demo saved."""
    transfer = {
        "kv_connector": "KVFormatConnector",
        "kv_connector_module_path": "kvformat_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": uri},
    }
    words = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(root / "hub" / HUB_NAME / "snapshots" / COMMITS[0])),
        *("--skip-tokenizer-init", "--dtype", "float32"),
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", "2048"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    return f"VLLM_CPU_KVCACHE_SPACE=1 {shlex.join(words)}"


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    """Play all scenes; answers the exit status."""
    # By default these end the process at once, and Mooncake's processes and the folder stay behind.
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)
    started = time.monotonic()
    console = Console()
    kind = os.environ.get("STORE", "file") or "file"
    keep = os.environ.get("KEEP", "")
    with demo_folder(keep, kind) as root:
        with console.status("Importing vLLM (about ten seconds)"):
            import_vllm()
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
    if keep:
        command = Path(sys.executable).parent / "kvformat"
        print(f"Kept in {root}. Look into it:\n  {command} ls {uri}")
        print(f"Serve the model from it:\n  {serve_command(root, uri)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
