"""Put, get, compare and remove an object: the only check of Mooncake's versions that there is.

Client and master don't compare theirs. A newer client's puts can fail on an older master while all
else works.

A pool whose objects are all in use has no room, and is as good to read from as any. That it says so
shows that it understands puts, so it passes; a pool that nobody lends memory says the same, and
only the master's HTTP port can tell the two apart.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from typing import NoReturn

from kvformat.stores.arguments import address_of
from kvformat.stores.protocol import Code, Store
from kvformat_connector.answers import answer_name, self_test_failed
from kvformat_connector.deadline import within
from kvformat_connector.store.mooncake_client import MooncakeVersions

_NBYTES = 4096
_LIMIT_S = 4.0
# A put that finds no room starts an eviction, which runs beside it.
_ROOM_LIMIT_S = 2.0


def check_by_use(
    store: Store,
    versions: MooncakeVersions,
    force_remove: Callable[[str], int],
    has_storage: Callable[[], bool | None],
) -> bool:
    """False where there was no room. Raises ``StoreUnavailableError`` naming the step that failed.

    ``force_remove`` removes an object although it was just read. ``has_storage`` tells whether some
    process lends memory, None where nobody knows.
    """
    return within(
        _LIMIT_S,
        f"the self-test with the Mooncake master at {versions.master_server_address!r}",
        lambda: _use(store, versions, force_remove, has_storage),
    )


def _use(
    store: Store,
    versions: MooncakeVersions,
    force_remove: Callable[[str], int],
    has_storage: Callable[[], bool | None],
) -> bool:
    def fail(step: str, expected: str, found: str, hint: str) -> NoReturn:
        client = f"{versions.distribution} {versions.version}"
        raise self_test_failed(store.uri, step, expected, found, f"; {hint} (client: {client})")

    def expect(step: str, found: int, expected: int) -> None:
        if found != expected:
            fail(step, answer_name(expected), answer_name(found), _hint(step, found))

    key = f"kvformat-self-test/{uuid.uuid4().hex}"
    content, found = bytearray(os.urandom(_NBYTES)), bytearray(_NBYTES)
    source, target = address_of(content), address_of(found)
    for address in (source, target):
        expect("register memory", store.register_memory(address, _NBYTES), Code.OK)
    deadline = time.monotonic() + _ROOM_LIMIT_S
    [code] = store.put_start([key], [_NBYTES])
    while code == Code.NO_SPACE and time.monotonic() < deadline:
        time.sleep(0.1)
        [code] = store.put_start([key], [_NBYTES])
    if code == Code.NO_SPACE and has_storage() is not False:
        return False
    expect("put start", code, Code.OK)
    expect("put", store.put_ranges([key], [[source]], [[_NBYTES]], [[0]])[0], _NBYTES)
    expect("commit", store.put_commit([key])[0], Code.OK)
    expect("get start", store.get_start([key])[0], Code.OK)
    expect("get", store.get_ranges([key], [[target]], [[_NBYTES]], [[0]])[0], _NBYTES)
    if content != found:
        fail("compare", "the bytes put", "other bytes", _hint("compare", Code.OK))
    expect("get end", store.get_end([key])[0], Code.OK)
    expect("remove", force_remove(key), Code.OK)
    for address in (source, target):
        expect("unregister memory", store.unregister_memory(address), Code.OK)
    return True


def _hint(step: str, found: int) -> str:
    if found == Code.NO_SPACE:
        return (
            "no process lends the store memory: start mooncake_client with "
            "--global_segment_size, or set the option global_segment_size"
        )
    # Whose node is gone, a client calls the ranges wrong, which here they never are.
    if found in (Code.TRANSFER_FAILED, Code.INVALID) and step in ("put", "get"):
        return (
            "a storage node doesn't answer: its process ended or can't be reached; the master "
            "forgets it after a while, else restart it"
        )
    return "are client and master of one version?"
