"""The demo's store, seen from outside the engines: what is in it, and how to damage it.

Everything but :func:`demo_store` opens the store, so it belongs in a forked process: a Mooncake
client starts threads, and a process with threads must not fork engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvformat.diff import ABSENT, diff
from kvformat.fingerprint import parse_manifest
from kvformat.header import decode_header
from kvformat.key import BlockKey, parse_key
from kvformat.layout import Layout
from kvformat.stores.opening import open_store
from kvformat.stores.protocol import Code

_REMOVE_LIMIT_S = 20.0


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one namespace."""

    keys: list[str]
    nbytes: int


@contextmanager
def demo_store(kind: str, root: Path) -> Iterator[str]:
    """The URI of an empty store, ``file`` or ``mooncake``, that goes when the context ends."""
    require_kind(kind)
    if kind == "file":
        yield f"file://{root / 'store'}"
    else:
        from kvformat_connector.store.mooncake_services import mooncake_services

        # A short lease, so that an object that was just read can be replaced by a damaged one.
        with mooncake_services(lease_ttl_ms=5_000, log_folder=root) as services:
            yield services.uri


def require_kind(kind: str) -> None:
    """SystemExit for a kind of store that the demo doesn't know."""
    if kind not in ("file", "mooncake"):
        raise SystemExit(f"STORE is {kind!r}, expected file or mooncake")


def read_contents(uri: str, namespace: str) -> Contents:
    """Keys, without the manifest, and bytes of a namespace."""
    store = open_store(uri)
    try:
        keys = sorted(k for k in store.list(namespace) if isinstance(parse_key(k), BlockKey))
        return Contents(keys=keys, nbytes=sum(store.object_nbytes(key) for key in keys))
    finally:
        store.close()


def compare_namespaces(uri: str, one: str, other: str) -> list[tuple[str, str, str]]:
    """Path and both values of each field in which the stored manifests of two namespaces differ."""
    store = open_store(uri)
    try:
        layouts: list[Layout] = []
        for namespace in (one, other):
            data = store.get(f"{namespace}manifest")
            if data is None:
                raise LookupError(f"no manifest under {namespace}")
            parsed = parse_key(f"{namespace}manifest")
            layouts.append(parse_manifest(data, parsed.namespace.fingerprint))
        return [(d.path, _show(d.a), _show(d.b)) for d in diff(*layouts)]
    finally:
        store.close()


def _show(value: object) -> str:
    return ABSENT if value is None else str(value)


def flip_byte(uri: str, key: str, range_index: int) -> None:
    """Flip the lowest bit of the middle byte of one (group, layer) range of an object."""
    store = open_store(uri)
    try:
        data = store.get(key)
        if data is None:
            raise LookupError(f"no object {key}")
        header = decode_header(data)
        damaged = bytearray(data)
        damaged[int(header.offsets[range_index]) + int(header.sizes[range_index]) // 2] ^= 1
        deadline = time.monotonic() + _REMOVE_LIMIT_S
        while (code := store.remove([key])[0]) == Code.NOT_READY and time.monotonic() < deadline:
            time.sleep(0.2)  # reading it gave us a lease on it
        if code != Code.OK or store.put(key, damaged) != Code.OK:
            raise RuntimeError(f"the object can't be replaced: remove answered {code}")
    finally:
        store.close()
