"""``memory://``: objects in this process, for tests.

``memory://name`` shares its objects with every other store of that name in the process, so that two
stores can talk; ``memory://`` alone is private. Sessions belong to the instance either way.

Source: spec/kvformat.md section 8.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores.arguments import (
    address_of,
    check_nbytes,
    check_pieces,
    check_ranges,
    is_key,
    same_length,
)
from kvformat.stores.coverage import Coverage
from kvformat.stores.protocol import Code
from kvformat.stores.uri import parse_store_uri, refuse_unknown_options


class _Object:
    __slots__ = ("address", "data", "num_readers")

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.address = address_of(self.data)
        self.num_readers = 0


class _Write:
    __slots__ = ("coverage", "target")

    def __init__(self, nbytes: int) -> None:
        self.target = _Object(nbytes)
        self.coverage = Coverage()


class _Objects:
    """What stores of one name share. The lock covers every call: this store is for tests."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_key: dict[str, _Object] = {}


_named: WeakValueDictionary[str, _Objects] = WeakValueDictionary()
_named_lock = threading.Lock()


def _shared_objects(name: str) -> _Objects:
    if not name:
        return _Objects()
    with _named_lock:
        objects = _named.get(name)
        if objects is None:
            objects = _named[name] = _Objects()
        return objects


class MemoryStore:
    """A store in memory. It has no options and no size cap."""

    def __init__(self, uri: str) -> None:
        parsed = parse_store_uri(uri)
        refuse_unknown_options(parsed, ())
        if parsed.path:
            raise ConfigError(
                Reason.CONFIG_VALUE,
                f"option store: expected memory:// or memory://name, found {uri!r}",
            )
        self.uri = uri
        self._objects = _shared_objects(parsed.authority)
        self._lock = self._objects.lock
        self._writes: dict[str, _Write] = {}
        self._reads: dict[str, _Object] = {}
        self._closed = False

    def exists(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        return [
            int(key in self._objects.by_key) if is_key(key) else int(Code.INVALID) for key in keys
        ]

    def put_start(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, nbytes):
            return [Code.INVALID] * len(keys)
        with self._lock:
            return [self._put_start(key, size) for key, size in zip(keys, nbytes, strict=True)]

    def _put_start(self, key: str, nbytes: int) -> int:
        if not is_key(key):
            return Code.INVALID
        if key in self._objects.by_key or key in self._writes:
            return Code.EXISTS
        code = check_nbytes(nbytes)
        if code == Code.OK:
            try:
                self._writes[key] = _Write(nbytes)
            except MemoryError:
                return Code.NO_SPACE
        return code

    def put_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes, offsets):
            return [Code.INVALID] * len(keys)
        with self._lock:
            return list(map(self._put_ranges, keys, addresses, sizes, offsets))

    def _put_ranges(
        self, key: str, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        write = self._writes.get(key)
        if write is None:
            return Code.INVALID
        total = check_ranges(addresses, sizes, offsets, len(write.target.data))
        if total > 0:
            for address, size, offset in zip(addresses, sizes, offsets, strict=True):
                ctypes.memmove(write.target.address + offset, address, size)
            write.coverage.add_ranges(sizes, offsets)
        return total

    def put_commit(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            return [self._put_commit(key) for key in keys]

    def _put_commit(self, key: str) -> int:
        write = self._writes.pop(key, None)
        if write is None or not write.coverage.is_whole(len(write.target.data)):
            return Code.INVALID
        if key in self._objects.by_key:
            return Code.EXISTS
        self._objects.by_key[key] = write.target
        return Code.OK

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            return [Code.OK if self._writes.pop(key, None) else Code.INVALID for key in keys]

    def get_start(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            return [self._get_start(key) for key in keys]

    def _get_start(self, key: str) -> int:
        if not is_key(key):
            return Code.INVALID
        if key not in self._reads:
            found = self._objects.by_key.get(key)
            if found is None:
                return Code.NOT_FOUND
            found.num_readers += 1
            self._reads[key] = found
        return Code.OK

    def get_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes, offsets):
            return [Code.INVALID] * len(keys)
        with self._lock:
            return list(map(self._get_ranges, keys, addresses, sizes, offsets))

    def _get_ranges(
        self, key: str, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        source = self._reads.get(key)
        if source is None:
            return Code.INVALID
        total = check_ranges(addresses, sizes, offsets, len(source.data))
        if total > 0:
            for address, size, offset in zip(addresses, sizes, offsets, strict=True):
                ctypes.memmove(address, source.address + offset, size)
        return total

    def get_end(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            return [self._get_end(key) for key in keys]

    def _get_end(self, key: str) -> int:
        source = self._reads.pop(key, None)
        if source is None:
            return Code.INVALID
        source.num_readers -= 1
        return Code.OK

    def put(self, key: str, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return Code.UNAVAILABLE if self._closed else Code.INVALID
        return self.put_objects([key], [[address_of(view)]], [[view.nbytes]])[0]

    def get(self, key: str) -> bytes | None:
        with self._lock:
            found = None if self._closed else self._objects.by_key.get(key)
            return None if found is None else bytes(found.data)

    def put_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes):
            return [Code.INVALID] * len(keys)
        with self._lock:
            return list(map(self._put_object, keys, addresses, sizes))

    def _put_object(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        total = check_pieces(addresses, sizes)
        if not is_key(key) or total < 1:
            return Code.INVALID
        if key in self._objects.by_key:
            return Code.EXISTS
        target = _Object(total)
        offset = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(target.address + offset, address, size)
            offset += size
        self._objects.by_key[key] = target
        return Code.OK

    def get_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes):
            return [Code.INVALID] * len(keys)
        with self._lock:
            return list(map(self._get_object, keys, addresses, sizes))

    def _get_object(self, key: str, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        total = check_pieces(addresses, sizes)
        if not is_key(key) or total < 1:
            return Code.INVALID
        source = self._objects.by_key.get(key)
        if source is None:
            return Code.NOT_FOUND
        if total != len(source.data):
            return Code.INVALID
        offset = 0
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, source.address + offset, size)
            offset += size
        return total

    def object_nbytes(self, key: str) -> int:
        if self._closed:
            return Code.UNAVAILABLE
        if not is_key(key):
            return Code.INVALID
        found = self._objects.by_key.get(key)
        return Code.NOT_FOUND if found is None else len(found.data)

    def remove(self, keys: Sequence[str]) -> list[int]:
        if self._closed:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            return [self._remove(key) for key in keys]

    def _remove(self, key: str) -> int:
        if not is_key(key):
            return Code.INVALID
        found = self._objects.by_key.get(key)
        if found is None:
            return Code.NOT_FOUND
        if found.num_readers:
            return Code.NOT_READY
        del self._objects.by_key[key]
        return Code.OK

    def list(self, prefix: str = "") -> Iterator[str]:
        with self._lock:
            if self._closed:
                raise StoreUnavailableError(Reason.STORE_UNAVAILABLE, f"{self.uri} is closed")
            keys = tuple(self._objects.by_key)
        return (key for key in keys if key.startswith(prefix))

    def register_memory(self, address: int, nbytes: int) -> int:
        return Code.OK

    def unregister_memory(self, address: int) -> int:
        return Code.OK

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._writes.clear()
            for source in self._reads.values():
                source.num_readers -= 1
            self._reads.clear()
