"""``mooncake://host:port``: objects in a Mooncake store. Options: see ``mooncake_options``.

Mooncake answers with success in places where this project must not: it commits objects with holes,
reports a put that stored nothing, writes through sessions whose memory is someone else's by now. So
this store keeps its own book of sessions: what was written, and since when a session is open.

Two things differ from other stores. Whoever looks at an object (``exists`` and ``object_nbytes``
included) gets a lease on it, for 10 s by default, in which ``remove`` answers ``NOT_READY`` and
eviction passes it by. And keys that hold a newline can't be told apart in a listing.

Source: spec/kvformat.md section 8.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import ClassVar

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.stores.arguments import (
    MAX_NBYTES,
    address_of,
    check_pieces,
    check_ranges,
    is_key,
    same_length,
)
from kvformat.stores.protocol import Code
from kvformat_connector.store.mooncake_calls import MooncakeCalls
from kvformat_connector.store.mooncake_client import (
    MooncakeVersions,
    find_versions,
    open_client,
    replica_arguments,
)
from kvformat_connector.store.mooncake_listing import fetch_keys, has_storage
from kvformat_connector.store.mooncake_options import parse_mooncake_options
from kvformat_connector.store.mooncake_puts import Opening, PutBook
from kvformat_connector.store.mooncake_self_test import check_by_use

_CLOSE_LIMIT_S = 5.0


class MooncakeStore:
    """A client of a Mooncake master. Its methods may be called from any thread.

    Opening it checks within 10 s that the client has the session calls, that the master answers,
    and that an object which is put comes back; a pool without room for it passes, and
    :attr:`had_room` says so. With ``readonly=true`` nothing is put. A process that ends by a signal
    must call :meth:`close` itself, or the master counts it as alive for a while.
    """

    #: What ``open_store(readonly=True)`` looks for.
    options: ClassVar[tuple[str, ...]] = ("readonly",)

    def __init__(self, uri: str) -> None:
        self._options = parse_mooncake_options(uri)
        self.uri = uri
        #: The installed Mooncake and the master in use.
        self.versions: MooncakeVersions = find_versions(self._options.master_server_address)
        client = open_client(self._options, self.versions)
        self._client = client
        self._calls = MooncakeCalls(client)
        replicas = replica_arguments(client, self._options)
        self._start_puts = partial(client.batch_put_session_start, **replicas)
        self._put_whole = partial(client.batch_put_from_multi_buffers, **replicas)
        self._puts = PutBook()
        self._lock = threading.Lock()  # the get sessions; never held during a call
        self._reads: set[str] = set()

        #: Whether an object could be put when the store was opened.
        self.had_room = True

        def force_remove(key: str) -> int:
            return self._calls.one(client.remove, key, True)

        def has_lender() -> bool | None:
            with suppress(StoreUnavailableError):
                return has_storage(self._options.metrics) if self._options.metrics else None
            return None

        if self._options.readonly:
            return
        try:
            self.had_room = check_by_use(self, self.versions, force_remove, has_lender)
        except StoreUnavailableError:
            # Not closed: if the check still hangs in a call, closing would crash it.
            self._calls.close(0.0)
            raise

    def exists(self, keys: Sequence[str]) -> list[int]:
        codes, valid = _check_keys(keys)
        self._calls.fill(codes, valid, self._client.batch_is_exist, keys)
        return self._unless_closed(codes)

    def put_start(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        if self._options.readonly:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, nbytes):
            return self._unless_closed([Code.INVALID] * len(keys))
        self._give_up_late(keys)
        codes, _ = _check_keys(keys)
        new = self._puts.add(keys, nbytes, codes)
        self._calls.fill(codes, new, self._start_puts, keys, nbytes)
        self._puts.drop([keys[index] for index in new if codes[index] != Code.OK])
        for index in new:
            if codes[index] == Code.INVALID:
                # The arguments are right, so this client lost a session of the key to another
                # writer, and can't write the key while the other's object is there.
                codes[index] = Code.EXISTS
        return self._unless_closed(codes)

    def put_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if not same_length(keys, addresses, sizes, offsets):
            return self._unless_closed([Code.INVALID] * len(keys))
        # Before the call, because a late or lost session may write into another object's memory.
        self._give_up_late(keys)
        unknown = self._give_up_lost(keys)
        with self._puts.writing(keys) as writes:
            totals = [
                Code.INVALID
                if write is None
                else Code.UNAVAILABLE
                if write.opening in unknown
                else check_ranges(a, s, o, write.nbytes)
                for write, a, s, o in zip(writes, addresses, sizes, offsets, strict=True)
            ]
            call = self._client.batch_put_from_multi_buffer_ranges
            codes = self._move(totals, call, keys, addresses, sizes, offsets)
        self._puts.written(writes, codes, sizes, offsets)
        return self._unless_closed(codes)

    def put_commit(self, keys: Sequence[str]) -> list[int]:
        self._give_up_late(keys)
        codes: list[int] = [Code.INVALID] * len(keys)
        whole, unfinished = self._puts.end(keys)
        self._calls.fill(codes, whole, self._client.batch_put_session_end, keys)
        unfinished += [keys[index] for index in whole if codes[index] != Code.OK]
        self._calls.batch(self._client.batch_put_session_revoke, unfinished)
        return self._unless_closed(codes)

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        codes: list[int] = [Code.INVALID] * len(keys)
        ours = self._puts.drop(keys)
        self._calls.fill(codes, ours, self._client.batch_put_session_revoke, keys)
        return self._unless_closed(codes)

    def _give_up_late(self, keys: Sequence[str]) -> None:
        """Forget and revoke the sessions that are open for longer than ``put_session_limit_ms``."""
        late = self._puts.drop_late(keys, self._options.put_session_limit_ms / 1000)
        self._calls.batch(self._client.batch_put_session_revoke, late)

    def _give_up_lost(self, keys: Sequence[str]) -> set[Opening]:
        """Forget and revoke the sessions that the master doesn't know any more; answers those that
        it can't be asked about.

        A session outlives the master that gave it: writing goes on as if nothing were, while a
        master that was started again deals the memory out to others. Of an object that is being
        written a master says that it isn't ready.
        """
        unknown: set[Opening] = set()
        lost: set[Opening] = set()
        for opening, key in self._puts.unconfirmed(keys).items():
            now = time.monotonic()
            code = self._calls.one(self._client.get_size, key)
            if code == Code.NOT_READY:
                opening.confirmed_at = now
            elif code == Code.UNAVAILABLE:
                unknown.add(opening)
            else:
                lost.add(opening)
        if lost:
            gone = self._puts.drop_opened_with(lost)
            self._calls.batch(self._client.batch_put_session_revoke, gone)
        return unknown

    def get_start(self, keys: Sequence[str]) -> list[int]:
        codes, valid = _check_keys(keys)
        # A second start of an open session renews its lease.
        self._calls.fill(codes, valid, self._client.batch_get_session_start, keys)
        with self._lock:
            self._reads.update(keys[index] for index in valid if codes[index] == Code.OK)
        # A session that couldn't be renewed points to memory that may be another object's.
        self._forget_reads([keys[index] for index in valid if codes[index] != Code.OK])
        return self._unless_closed(codes)

    def get_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if not same_length(keys, addresses, sizes, offsets):
            return self._unless_closed([Code.INVALID] * len(keys))
        with self._lock:
            is_open = [key in self._reads for key in keys]
        # The size of the object isn't known here without one more call. Mooncake checks the ranges.
        totals = [
            check_ranges(a, s, o, MAX_NBYTES) if opened else Code.INVALID
            for opened, a, s, o in zip(is_open, addresses, sizes, offsets, strict=True)
        ]
        call = self._client.batch_get_into_multi_buffer_ranges
        codes = self._move(totals, call, keys, addresses, sizes, offsets)
        self._forget_reads(
            [key for key, code in zip(keys, codes, strict=True) if code == Code.LEASE_EXPIRED]
        )
        return self._unless_closed(codes)

    def get_end(self, keys: Sequence[str]) -> list[int]:
        ended = self._forget_reads(keys)
        return self._unless_closed([Code.OK if is_ended else Code.INVALID for is_ended in ended])

    def _forget_reads(self, keys: Sequence[str]) -> list[bool]:
        """End get sessions; for each key whether there was one."""
        was_open: list[bool] = []
        with self._lock:
            for key in keys:
                was_open.append(key in self._reads)
                self._reads.discard(key)
        ours = [key for key, opened in zip(keys, was_open, strict=True) if opened]
        if ours:
            self._calls.one(self._client.batch_get_session_end, ours)
        return was_open

    def put(self, key: str, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return self._unless_closed([Code.INVALID])[0]
        address = address_of(view)
        code = self.register_memory(address, view.nbytes)
        if code != Code.OK:
            return code
        try:
            return self.put_objects([key], [[address]], [[view.nbytes]])[0]
        finally:
            self.unregister_memory(address)

    def get(self, key: str) -> bytes | None:
        nbytes = self.object_nbytes(key)
        if nbytes < 1:
            return None
        data = bytearray(nbytes)
        address = address_of(data)
        if self.register_memory(address, nbytes) != Code.OK:
            return None
        try:
            [code] = self.get_objects([key], [[address]], [[nbytes]])
        finally:
            self.unregister_memory(address)
        return bytes(data) if code == nbytes else None

    def put_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._options.readonly:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes):
            return self._unless_closed([Code.INVALID] * len(keys))
        codes = self.exists(keys)
        new: list[int] = []
        for index, code in enumerate(codes):
            if code == 0 and check_pieces(addresses[index], sizes[index]) < 1:
                codes[index] = Code.INVALID
            elif code == 0:
                new.append(index)
            elif code == 1:
                codes[index] = Code.EXISTS
        self._calls.fill(codes, new, self._put_whole, keys, addresses, sizes)
        # Mooncake answers 0 as well where another writer is at the key and nothing was stored.
        put = [index for index in new if codes[index] == Code.OK]
        self._calls.fill(codes, put, self._client.batch_is_exist, keys)
        for index in put:
            codes[index] = {1: Code.OK, 0: Code.EXISTS}.get(codes[index], codes[index])
        return self._unless_closed(codes)

    def get_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        if not same_length(keys, addresses, sizes):
            return self._unless_closed([Code.INVALID] * len(keys))
        totals = [
            (check_pieces(a, s) or Code.INVALID) if is_key(key) else Code.INVALID
            for key, a, s in zip(keys, addresses, sizes, strict=True)
        ]
        call = self._client.batch_get_into_multi_buffers
        codes = self._move(totals, call, keys, addresses, sizes)
        for index, code in enumerate(codes):
            # Pieces longer than the object fail like a transfer.
            if code == Code.TRANSFER_FAILED and totals[index] != self.object_nbytes(keys[index]):
                codes[index] = Code.INVALID
        return self._unless_closed(codes)

    def object_nbytes(self, key: str) -> int:
        code = Code.INVALID if not is_key(key) else self._calls.one(self._client.get_size, key)
        return self._unless_closed([code])[0]

    def remove(self, keys: Sequence[str]) -> list[int]:
        if self._options.readonly:
            return [Code.UNAVAILABLE] * len(keys)
        codes, valid = _check_keys(keys)
        self._calls.fill(codes, valid, self._client.batch_remove, keys)
        return self._unless_closed(codes)

    def register_memory(self, address: int, nbytes: int) -> int:
        if self._options.protocol == "tcp":  # needs none, and refuses regions that overlap
            return self._unless_closed([Code.OK])[0]
        return self._calls.one(self._client.register_buffer, address, nbytes)

    def unregister_memory(self, address: int) -> int:
        if self._options.protocol == "tcp":
            return self._unless_closed([Code.OK])[0]
        return self._calls.one(self._client.unregister_buffer, address)

    def close(self) -> None:
        # Mooncake's close revokes nothing: others would wait 30 s for each of these keys.
        self.put_revoke(self._puts.keys())
        self._calls.close(_CLOSE_LIMIT_S)

    def _move(
        self,
        totals: Sequence[int],
        call: Callable[..., list[int]],
        keys: Sequence[str],
        *columns: Sequence[Sequence[int]],
    ) -> list[int]:
        """Move the rows that have bytes to move; another number of bytes is a failure."""
        codes = list(totals)
        moving = [index for index, total in enumerate(totals) if total > 0]
        self._calls.fill(codes, moving, call, keys, *columns)
        for index in moving:
            if codes[index] >= 0 and codes[index] != totals[index]:
                codes[index] = Code.TRANSFER_FAILED
        return codes

    def _unless_closed(self, codes: list[int]) -> list[int]:
        return [Code.UNAVAILABLE] * len(codes) if self._calls.is_closed else codes

    # Last, for its name hides the type from what follows.
    def list(self, prefix: str = "") -> Iterator[str]:
        if self._calls.is_closed:
            raise StoreUnavailableError(Reason.STORE_UNAVAILABLE, f"{self.uri} is closed")
        if not self._options.metrics:
            raise StoreUnavailableError(
                Reason.STORE_UNSUPPORTED,
                f"{self.uri}: only the master's HTTP port can list keys; name it with the option "
                f"metrics, as in mooncake://host:port?metrics=host:9003",
            )
        return (key for key in fetch_keys(self._options.metrics) if key.startswith(prefix))


def _check_keys(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """A first code per key, and the positions of the keys that can be asked about."""
    codes = [int(Code.OK if is_key(key) else Code.INVALID) for key in keys]
    return codes, [index for index, code in enumerate(codes) if code == Code.OK]
