"""A process that runs engines for another one: it imports vLLM once and forks for each.

A program that has threads, as a test run with store clients has, can't fork engines safely itself.
Requests and answers are lines of JSON on standard input and on a pipe of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from kvformat_connector.demo.engines import (
    ChildError,
    EngineReport,
    EngineSpec,
    import_vllm,
    run_engine,
)


class Request(msgspec.Struct, frozen=True):
    """Run this engine and write its output to this file."""

    spec: EngineSpec
    log: str


class Reply(msgspec.Struct, frozen=True):
    """What came of it: a report, or the reason why there is none."""

    report: EngineReport | None = None
    failure: str = ""


class EngineHost:
    """The other side: starts the process, sends it specs, and ends it."""

    def __init__(self, log: Path, *, import_paths: Sequence[Path] = ()) -> None:
        self._log = log
        reader, writer = os.pipe()
        paths = [*map(str, import_paths), os.environ.get("PYTHONPATH", "")]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvformat_connector.demo.host", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        os.close(writer)
        self._replies: IO[bytes] = os.fdopen(reader, "rb")

    def run(self, spec: EngineSpec) -> EngineReport:
        """Run one engine. Raises ``ChildError`` where it doesn't end with a report."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Request(spec, str(self._log))) + b"\n")
        self._process.stdin.flush()
        line = self._replies.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-3000:]
            raise ChildError(f"the host of engines ended; end of {self._log}:\n{tail}")
        reply = msgspec.json.decode(line, type=Reply)
        if reply.report is None:
            raise ChildError(reply.failure)
        return reply.report

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._replies.close()

    def __enter__(self) -> EngineHost:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def main() -> None:
    """Serve requests until standard input ends."""
    import_vllm()
    with os.fdopen(int(sys.argv[1]), "wb") as replies:
        for line in sys.stdin.buffer:
            request = msgspec.json.decode(line, type=Request)
            try:
                reply = Reply(report=run_engine(request.spec, Path(request.log)))
            except ChildError as error:
                reply = Reply(failure=str(error))
            replies.write(msgspec.json.encode(reply) + b"\n")
            replies.flush()


if __name__ == "__main__":
    main()
