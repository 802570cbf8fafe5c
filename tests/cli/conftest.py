"""Ways to run the command: in this process, in one of its own, and on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import COMMAND, Outcome, Run
from click.testing import CliRunner

from kvformat.cli import main
from kvformat.stores import Store, open_store


@pytest.fixture
def run() -> Run:
    """Run the command in this process, where it sees this process's memory stores."""

    def run(*args: str) -> Outcome:
        result = CliRunner().invoke(main, list(args))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def run_process() -> Run:
    """Run the command as a user's shell does, with pipes for its output."""

    def run(*args: str | bytes, **environment: str) -> Outcome:
        done = subprocess.run(
            [*COMMAND, *args],
            capture_output=True,
            timeout=60,
            env={**_environment(), **environment},
            check=False,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    return run


@pytest.fixture
def run_terminal() -> Run:
    """Run the command on a terminal of so many columns."""

    def run(*args: str, columns: int = 80, **environment: str) -> Outcome:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        with subprocess.Popen(
            [*COMMAND, *args],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**_environment(), "TERM": "xterm-256color", **environment},
        ) as process:
            os.close(slave)
            output = b""
            while chunk := _read(master):
                output += chunk
            code = process.wait(timeout=60)
        os.close(master)
        return Outcome(code, output.decode().replace("\r\n", "\n"), "")

    return run


def _environment() -> dict[str, str]:
    """This process's, without what changes how a terminal program prints."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE")
    }


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux's way to say that the other side is closed
        return b""


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store that the command can open by its ``uri``, of each embedded scheme."""
    uri = {"memory": f"memory://{uuid.uuid4().hex}", "file": f"file://{tmp_path}/store"}
    opened = open_store(uri[request.param])
    yield opened
    opened.close()


@pytest.fixture
def file_store(tmp_path: Path) -> Iterator[Store]:
    """An empty store that other processes can open."""
    opened = open_store(f"file://{tmp_path}/store")
    yield opened
    opened.close()
