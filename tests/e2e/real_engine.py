"""What the tests of this folder share: prompts, checkpoints, and a short way to run an engine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvformat_connector.demo.engines import EngineReport, EngineSpec
from kvformat_connector.demo.host import EngineHost
from kvformat_connector.demo.model import HUB_NAME, make_prompt

BLOCK_SIZE = 32
COMMITS = ("1f0a" * 10, "9c3e" * 10)

#: Whole blocks and four tokens each; see the demo's scenes for why.
PROMPTS = [make_prompt(516, 7), make_prompt(132, 5)]
NUM_BLOCKS = [16, 4]


def make_models(root: Path) -> dict[str, str]:
    """Folders of two checkpoints by commit, made in a process that may import torch."""
    program = (
        "import sys, pathlib\n"
        "from kvformat_connector.demo.model import make_model\n"
        "for seed, commit in enumerate(sys.argv[2:]):\n"
        "    make_model(pathlib.Path(sys.argv[1]), commit, seed=seed)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(root), *COMMITS], check=True, capture_output=True
    )
    return {commit: str(root / HUB_NAME / "snapshots" / commit) for commit in COMMITS}


class Servers:
    """Runs engines, each in a fresh process."""

    def __init__(self, host: EngineHost, models: dict[str, str]) -> None:
        self._host = host
        self._models = models

    def run(
        self,
        *,
        store: str | None,
        prompts: list[list[int]],
        commit: str = COMMITS[0],
        options: dict[str, Any] | None = None,
        **fields: Any,
    ) -> EngineReport:
        """One engine. ``store=None`` runs vLLM without a connector; ``options`` are those of the
        connector, ``fields`` those of ``EngineSpec``."""
        connector = None if store is None else {"store": store, **(options or {})}
        return self._host.run(
            EngineSpec(
                model=self._models[commit],
                prompts=prompts,
                connector_options=connector,
                **fields,
            )
        )


def copy_of(uri: str, folder: Path) -> str:
    """A file store of its own with the same objects."""
    shutil.copytree(uri.removeprefix("file://"), folder / "store")
    return f"file://{folder / 'store'}"


def tokens(report: EngineReport) -> list[list[int]]:
    return [answer.token_ids for answer in report.answers]


def logprobs(report: EngineReport) -> list[list[dict[str, float]]]:
    return [answer.logprobs for answer in report.answers]


def hits(report: EngineReport) -> list[int]:
    return [answer.num_cached_tokens for answer in report.answers]
