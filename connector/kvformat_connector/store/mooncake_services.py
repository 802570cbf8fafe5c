"""A Mooncake master and a process that lends it memory, on this machine, for tests and the demo.

Both come from the installed package. They listen on free ports of the loopback address and end with
the context that started them.
"""

from __future__ import annotations

import http.client
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kvformat.errors import Reason, StoreUnavailableError

_HOST = "127.0.0.1"
_START_LIMIT_S = 20.0
_STOP_LIMIT_S = 5.0
# A free port may be taken by another process before ours listens on it.
_MAX_TRIES = 3


class MooncakeServices(NamedTuple):
    """Where the services listen, as ``host:port``, and their processes."""

    master_server_address: str
    metrics: str
    master: subprocess.Popen[bytes]
    client: subprocess.Popen[bytes]

    @property
    def uri(self) -> str:
        """A store URI with every option that these services need."""
        return f"mooncake://{self.master_server_address}?metrics={self.metrics}"


@contextmanager
def mooncake_services(
    *,
    segment_nbytes: int = 512 << 20,
    lease_ttl_ms: int = 10_000,
    master_options: Sequence[str] = (),
    log_folder: Path | None = None,
) -> Iterator[MooncakeServices]:
    """Start both services, wait until objects can be put, and stop them in the end.

    ``segment_nbytes`` is the memory for objects, ``lease_ttl_ms`` how long a read object is safe.
    ``master_options`` go to the master as they are. The services' output goes to ``log_folder``.
    Raises ``StoreUnavailableError`` where Mooncake isn't installed or a service doesn't come up.
    """
    with ExitStack() as stack:
        if log_folder is None:
            log_folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(_MAX_TRIES):
            with ExitStack() as started:
                options = (f"-default_kv_lease_ttl={lease_ttl_ms}", *master_options)
                services = _start(started, segment_nbytes, options, log_folder)
                if services is not None:
                    stack.push(started.pop_all())
                    break
        else:
            logs = "; ".join(path.read_text(errors="replace")[-500:] for path in _logs(log_folder))
            raise StoreUnavailableError(
                Reason.STORE_UNAVAILABLE, f"Mooncake's services didn't come up: {logs}"
            )
        yield services


def _start(
    stack: ExitStack, segment_nbytes: int, master_options: Sequence[str], log_folder: Path
) -> MooncakeServices | None:
    rpc_port, metrics_port, client_port = _free_ports(3)
    master_log, client_log = _logs(log_folder)
    master = stack.enter_context(
        _running(
            master_log,
            "mooncake_master",
            f"-rpc_port={rpc_port}",
            f"-rpc_address={_HOST}",
            f"-metrics_port={metrics_port}",
            f"-metrics_host={_HOST}",
            *master_options,
        )
    )
    if not _comes_up(master, metrics_port, "/health"):
        return None
    client = stack.enter_context(
        _running(
            client_log,
            "mooncake_client",
            f"--host={_HOST}",
            f"--master_server_address={_HOST}:{rpc_port}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={segment_nbytes}",
            f"--port={client_port}",
        )
    )
    if not _comes_up(client, metrics_port, "/get_all_segments"):
        return None
    return MooncakeServices(f"{_HOST}:{rpc_port}", f"{_HOST}:{metrics_port}", master, client)


def _logs(folder: Path) -> tuple[Path, Path]:
    return folder / "mooncake_master.log", folder / "mooncake_client.log"


@contextmanager
def _running(log: Path, program: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the Mooncake package while the context lasts."""
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            "no Mooncake is installed; install 'mooncake-transfer-engine-non-cuda'",
        )
    path = Path(spec.submodule_search_locations[0]) / program
    with log.open("wb") as output:
        process = subprocess.Popen(
            [path, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _comes_up(process: subprocess.Popen[bytes], metrics_port: int, page: str) -> bool:
    """Wait until the master's HTTP port has something on ``page``; False if the process ended."""
    deadline = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(_HOST, metrics_port, timeout=2)
        try:
            connection.request("GET", page)
            if connection.getresponse().read():
                return True
        except (OSError, http.client.HTTPException):
            pass  # not yet
        finally:
            connection.close()
        time.sleep(0.05)
    return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
