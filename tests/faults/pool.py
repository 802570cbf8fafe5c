"""Services that can be killed, frozen and started again, and engines that use them."""

from __future__ import annotations

import http.client
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from simulated_engine import Request, SimulatedEngine, make_layout

from kvformat.objectmap import object_maps
from kvformat.stores import open_store
from kvformat.stores.protocol import Store
from kvformat_connector.store.mooncake_services import MooncakeServices, mooncake_services

NUM_LAYERS = 6
TOKENS = [(1 + index) % 250 for index in range(83)]
NUM_FULL = 20
LAYOUT = make_layout(num_layers=NUM_LAYERS)
DEADLINE_MS = 1500
#: Read what is needed next and no more, and store what is there at once, so that a fault between
#: two layers meets the later ones.
OPTIONS = {
    "overlap_saves": True,
    "layerwise_prefetch_layers": 1,
    "transfer_deadline_ms": DEADLINE_MS,
    "breaker_retry_ms": 200,
    "failed_key_retry_ms": 0,
}


class Pool:
    """A master and a storage client."""

    def __init__(self, services: MooncakeServices, stack: ExitStack) -> None:
        self.uri = services.uri
        self._metrics = services.metrics
        self._stack = stack
        self.processes = {"master": services.master, "client": services.client}

    def send(self, name: str, number: int) -> None:
        """Send a signal to one of the services."""
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """End a service at once."""
        self.processes[name].kill()
        self.processes[name].wait()

    def start(self, name: str) -> None:
        """Start a service that was killed, with the same ports."""
        process = subprocess.Popen(
            self.processes[name].args,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._stack.callback(_stop, process)
        self.processes[name] = process
        until(self._has_storage, 40)

    def _has_storage(self) -> bool:
        host, _, port = self._metrics.partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=2)
        try:
            connection.request("GET", "/get_all_segments")
            return bool(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def make_pool(**options: Any) -> Iterator[Pool]:
    """A pool of its own for a test that breaks it."""
    with ExitStack() as stack:
        services = stack.enter_context(mooncake_services(**options))
        pool = Pool(services, stack)
        # A frozen process doesn't hear that it is to end.
        stack.callback(lambda: [_wake(process) for process in pool.processes.values()])
        yield pool


@contextmanager
def make_engine(uri: str, **options: object) -> Iterator[SimulatedEngine]:
    """An engine on a store client of its own."""
    engine = SimulatedEngine(open_store(uri), LAYOUT, **{**OPTIONS, **options})
    try:
        yield engine
    finally:
        engine.worker.close()


def reference() -> list[list[bytes]]:
    """KV of TOKENS, computed without a pool."""
    return SimulatedEngine(open_store("memory://"), LAYOUT).serve(Request("r", TOKENS)).kv


def foreign_objects() -> dict[str, bytes]:
    """Objects of somebody else, of the same size as ours, so that they get the same memory."""
    nbytes = object_maps(LAYOUT)[0].nbytes
    return {f"foreign/{index}": bytes([index % 251]) * nbytes for index in range(3 * NUM_FULL)}


def fill(uri: str, objects: dict[str, bytes] | None = None) -> tuple[Store, dict[str, bytes]]:
    """Store objects of somebody else through a client of its own."""
    store = open_store(uri)
    objects = foreign_objects() if objects is None else objects
    for key, data in objects.items():
        store.put(key, data)
    return store, objects


def until(condition: Callable[[], object], limit_s: float) -> None:
    """Wait for a state that somebody else brings about."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it didn't come to that"
        time.sleep(0.02)


def until_used_again(engine: SimulatedEngine, limit_s: float = 60) -> None:
    """Steps without requests until the breaker has closed."""

    def is_closed() -> bool:
        engine.step([])
        return not engine.worker._breaker.is_open

    until(is_closed, limit_s)


def _wake(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
