"""What the demo shows, each with what must hold for it to be true."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvformat_connector.demo.engines import EngineReport, EngineSpec, in_fork, run_engine
from kvformat_connector.demo.model import make_model, make_prompt
from kvformat_connector.demo.storage import (
    Contents,
    compare_namespaces,
    flip_byte,
    read_contents,
)

#: Whole blocks of 32 and four tokens, and not above a thousand or so. With one token left to
#: compute, or with many more to compute in the cold run, the CPU backend's matrix kernels round
#: otherwise: logprobs that differ in the last bits would be the engine's doing, not the cache's.
PROMPT_LENGTHS: Final = (900, 516, 132)
_STRIDES: Final = (7, 5, 11)
COMMITS: Final = ("1f0a" * 10, "9c3e" * 10)
DAMAGED_LAYER: Final = 5


class Stage:
    """Where the scenes play: a folder, a store, a console, and what has been checked."""

    def __init__(self, root: Path, uri: str, console: Console) -> None:
        self.root = root
        self.uri = uri
        self.console = console
        self.prompts = [
            make_prompt(length, stride)
            for length, stride in zip(PROMPT_LENGTHS, _STRIDES, strict=True)
        ]
        self.checks: list[tuple[str, bool]] = []

    def check(self, what: str, holds: bool) -> None:
        """Note, and show, whether something holds."""
        self.checks.append((what, holds))
        mark = "[green]holds[/]" if holds else "[red bold]DOES NOT HOLD[/]"
        self.console.print(f"  {mark}  {what}", soft_wrap=True)

    def model(self, commit: str) -> str:
        """A folder with the model of a commit; another commit has other weights."""
        path = self.apart(
            f"Making the model of revision {commit[:8]}",
            lambda: str(make_model(self.root / "hub", commit, seed=COMMITS.index(commit))),
        )
        return str(path)

    def engine(self, what: str, model: str, **fields: Any) -> EngineReport:
        """Run an engine in a fresh process."""
        fields.setdefault("prompts", self.prompts)
        spec = EngineSpec(model=model, connector_options={"store": self.uri}, **fields)
        with self.console.status(what):
            report = run_engine(spec, self.root / "engine.log")
        self.console.print(f"[dim]{what}: done[/]")
        if report.error:
            raise RuntimeError(f"{what}: {report.error}")
        return report

    def apart(self, what: str, function: Callable[[], Any]) -> Any:
        """Do something that starts threads, in a process of its own."""
        with self.console.status(what):
            return in_fork(function, self.root / "apart.log")


def cold_and_warm(stage: Stage) -> EngineReport:
    """The main scene. Answers what the cold engine said."""
    model = stage.model(COMMITS[0])
    cold = stage.engine("Cold engine: computes the prompts and saves their KV", model)
    warm = stage.engine("Warm engine, a fresh process: loads the KV of the prompts", model)
    contents = msgspec.convert(
        stage.apart("Listing", lambda: read_contents(stage.uri, cold.namespace)), Contents
    )
    table = Table("prompt tokens", "hit tokens", "TTFT cold", "TTFT warm", "tokens", "logprobs")
    for index in (0, 1):
        table.columns[index].justify = "right"
    for first, second in zip(cold.answers, warm.answers, strict=True):
        table.add_row(
            str(first.num_prompt_tokens),
            str(second.num_cached_tokens),
            f"{first.ttft_ms:.0f} ms",
            f"{second.ttft_ms:.0f} ms",
            "equal" if first.token_ids == second.token_ids else "DIFFERENT",
            "bit-identical" if first.logprobs == second.logprobs else "DIFFERENT",
        )
    stage.console.print(table)
    stage.console.print(
        f"In the store: {len(contents.keys)} objects, {contents.nbytes:,} bytes, and the manifest, "
        f"under\n  {cold.namespace}",
        soft_wrap=True,
    )
    num_blocks = [(length - 1) // 32 for length in PROMPT_LENGTHS]
    stage.check(
        "the cold engine hit nothing, the warm one every whole block of every prompt",
        [a.num_cached_tokens for a in cold.answers] == [0] * len(num_blocks)
        and [a.num_cached_tokens for a in warm.answers] == [32 * n for n in num_blocks],
    )
    stage.check(
        "every block that was hit was loaded and verified, none was recomputed",
        warm.worker.get("load.blocks") == sum(num_blocks)
        and "save.blocks" not in warm.worker
        and not warm.rejections,
    )
    stage.check("tokens are equal", _tokens(cold) == _tokens(warm))
    stage.check(
        "logprobs are bit-identical",
        [a.logprobs for a in cold.answers] == [a.logprobs for a in warm.answers],
    )
    stage.check("one object per block is in the store", len(contents.keys) == sum(num_blocks))
    zeroed = stage.engine(
        "Negative control: hits are claimed, the loaded KV is zeroed",
        model,
        connector_name="ZeroingConnector",
        connector_module="kvformat_connector.demo.zeroing",
    )
    stage.check(
        "with zeroed KV the tokens of every prompt are others, so equal tokens prove something",
        all(a != b for a, b in zip(_tokens(cold), _tokens(zeroed), strict=True)),
    )
    return cold


def other_servers(stage: Stage, cold: EngineReport) -> None:
    """Servers that must not read what the first one wrote, and why they don't."""
    dtype, options = _other_kv_dtype()
    for what, model, engine_options in (
        ("another revision", stage.model(COMMITS[1]), {}),
        (f"KV dtype {dtype}", stage.model(COMMITS[0]), options),
    ):
        report = stage.engine(
            f"Server with {what}, same prompt",
            model,
            prompts=stage.prompts[:1],
            engine_options=engine_options,
        )
        rows = stage.apart(
            "Comparing manifests",
            partial(compare_namespaces, stage.uri, cold.namespace, report.namespace),
        )
        table = Table("field", "first server", f"server with {what}")
        for column in table.columns:
            column.overflow = "fold"
        for path, ours, theirs in rows:
            table.add_row(escape(path), escape(ours), escape(theirs))
        stage.console.print(table)
        stage.check(
            f"a server with {what} hits 0 tokens",
            [answer.num_cached_tokens for answer in report.answers] == [0]
            and report.scheduler.get("lookup.hit_tokens", 0) == 0,
        )
        stage.check("its manifest in the store says in which fields it differs", len(rows) > 0)


def damaged_object(stage: Stage, cold: EngineReport) -> None:
    """One flipped bit in one object."""
    contents = msgspec.convert(
        stage.apart("Listing", lambda: read_contents(stage.uri, cold.namespace)), Contents
    )
    key = contents.keys[len(contents.keys) // 2]
    stage.apart("Flipping one bit of an object", lambda: flip_byte(stage.uri, key, DAMAGED_LAYER))
    report = stage.engine(
        f"Warm engine, one bit of layer {DAMAGED_LAYER} of one object flipped",
        stage.model(COMMITS[0]),
    )
    for rejection in report.rejections:
        stage.console.print(
            escape(
                f"  rejected: {rejection['reason']}: {rejection['detail']}\n  of {rejection['key']}"
            ),
            soft_wrap=True,
        )
    stage.check(
        "exactly that object is rejected, with group, layer and reason",
        [(r["key"], r["reason"]) for r in report.rejections] == [(key, "checksum_mismatch")]
        and f"group 0 layer {DAMAGED_LAYER}:" in report.rejections[0]["detail"],
    )
    stage.check(
        "every other block is loaded", report.worker.get("load.blocks") == len(contents.keys) - 1
    )
    stage.check("the block is recomputed: tokens are equal", _tokens(cold) == _tokens(report))


def _tokens(report: EngineReport) -> list[list[int]]:
    return [answer.token_ids for answer in report.answers]


def _other_kv_dtype() -> tuple[str, dict[str, Any]]:
    """A KV dtype that this processor can use and the first server doesn't."""
    if os.uname().machine == "x86_64":
        import torch

        if torch.cpu._is_avx512_supported():
            return "fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}
    return "bfloat16", {"dtype": "bfloat16"}
