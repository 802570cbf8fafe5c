"""What every store of objects can do.

A call takes a batch of keys and answers with one ``int`` per key: zero or a positive number on
success, a negative :class:`Code` on failure. A failure of one key is an answer, never an
exception, and never touches another key. Callers check a whole answer with
``len(codes) == len(keys) and min(codes) >= 0``.

A key is 1 to 131,072 bytes of UTF-8, an object and a range have at least one byte; anything else is
``INVALID``, and so is a batch whose arguments differ in length. After ``close`` every call answers
``UNAVAILABLE``.

Sessions belong to the store instance and are named by key: at most one put session and one get
session a key. Any method may be called from any thread. Memory is given as integer addresses that
the caller guarantees to be valid for the length of the call (a store can't check them: see
spec/kvformat.md section 7, "Bounds").

Source: spec/kvformat.md section 8 (reader and writer procedures).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Protocol, runtime_checkable


class Code(IntEnum):
    """Answers below zero. Stores translate their own codes into these."""

    OK = 0
    NOT_FOUND = -1  #: no committed object under this key
    EXISTS = -2  #: a committed object is there already, or another writer is at it
    NOT_READY = -3  #: an object is being written, or is being read and can't be removed
    NO_SPACE = -4
    INVALID = -5  #: sizes, offsets or nesting that make no sense, or no open session
    LEASE_EXPIRED = -6
    TRANSFER_FAILED = -7
    UNAVAILABLE = -8  #: the store, or what it needs, doesn't answer
    INTERNAL = -9


@runtime_checkable
class Store(Protocol):
    """A store of immutable objects, each visible under its key from its commit on."""

    uri: str

    def exists(self, keys: Sequence[str]) -> list[int]:
        """1 for a committed object, 0 for none, below zero where the store can't tell."""
        ...

    def put_start(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        """Open a put session per key for an object of exactly ``nbytes[i]`` bytes.

        ``EXISTS`` where the object is there or is being written, by this store too: nothing is left
        to do for the key. A caller commits and revokes only what it got ``OK`` for.
        """
        ...

    def put_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Write ``sizes[i][j]`` bytes at ``addresses[i][j]`` to ``offsets[i][j]`` of object ``i``.

        Answers the bytes written for the key: all of them, or a negative code. Where ranges overlap
        the last one stays.
        """
        ...

    def put_commit(self, keys: Sequence[str]) -> list[int]:
        """Make the objects visible, whole, and end their sessions, whatever the answer.

        ``INVALID`` for an object with a byte that was never written, ``EXISTS`` where another
        writer's object came first. Neither becomes visible.
        """
        ...

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give the sessions up; nothing of them ever becomes visible."""
        ...

    def get_start(self, keys: Sequence[str]) -> list[int]:
        """Open a get session per key; the object stays readable while its lease holds.

        For a key with an open session this renews the lease.
        """
        ...

    def get_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ``sizes[i][j]`` bytes at ``offsets[i][j]`` of object ``i`` to ``addresses[i][j]``.

        Answers the bytes read for the key: all of them, or a negative code.
        """
        ...

    def get_end(self, keys: Sequence[str]) -> list[int]:
        """End the get sessions."""
        ...

    def put(self, key: str, data: bytes | bytearray | memoryview) -> int:
        """Store a whole object. ``EXISTS`` if one is there, or being written; that one stays."""
        ...

    def get(self, key: str) -> bytes | None:
        """A whole object, or None where there is none or it can't be read."""
        ...

    def put_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Store whole objects, each the concatenation of its pieces of memory."""
        ...

    def get_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read whole objects into memory pieces that are exactly as long. Answers bytes read."""
        ...

    def object_nbytes(self, key: str) -> int:
        """The size of a committed object in bytes, or a negative code."""
        ...

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove committed objects. ``NOT_READY`` for one that is being read, or has a lease."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """The committed keys that start with ``prefix``, in no order.

        Raises ``StoreUnavailableError`` with reason ``store_unsupported`` where a store can't list.
        """
        ...

    def register_memory(self, address: int, nbytes: int) -> int:
        """Announce memory that ranges will use. A store that needs none answers ``OK``."""
        ...

    def unregister_memory(self, address: int) -> int:
        """Take an announcement back."""
        ...

    def close(self) -> None:
        """Give up every open session and every resource. Closing twice is fine."""
        ...
