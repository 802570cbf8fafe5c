"""The book of a Mooncake client's put sessions: what was written, and since when each is open.

Mooncake keeps none: it commits objects with holes, and writes on through sessions whose memory is
somebody else's by now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kvformat.stores.arguments import check_nbytes
from kvformat.stores.coverage import Coverage
from kvformat.stores.protocol import Code

#: A master takes longer to come back, to be lent memory, and to deal it out.
CONFIRM_AFTER_S: Final = 0.2


class Opening:
    """Put sessions that were opened in one call: one master has given them all."""

    __slots__ = ("confirmed_at", "opened_at")

    def __init__(self) -> None:
        self.opened_at = self.confirmed_at = time.monotonic()


class Write:
    """A put session."""

    __slots__ = ("coverage", "nbytes", "num_writing", "opening")

    def __init__(self, nbytes: int, opening: Opening) -> None:
        self.nbytes = nbytes
        self.coverage = Coverage()
        self.num_writing = 0  #: range calls in progress
        self.opening = opening


class PutBook:
    """Open put sessions by key. Any thread may call; no call asks the store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writes: dict[str, Write] = {}

    def add(self, keys: Sequence[str], nbytes: Sequence[int], codes: list[int]) -> list[int]:
        """Note the sessions that are about to be opened, of keys whose code is ``OK``; answers
        their positions. The others get the code that says why not."""
        opening = Opening()
        new: list[int] = []
        with self._lock:
            for index, key in enumerate(keys):
                if codes[index] != Code.OK:
                    continue
                codes[index] = check_nbytes(nbytes[index])
                if key in self._writes:
                    codes[index] = Code.EXISTS
                elif codes[index] == Code.OK:
                    self._writes[key] = Write(nbytes[index], opening)
                    new.append(index)
        return new

    def drop(self, keys: Sequence[str]) -> list[int]:
        """Forget sessions; positions of the keys that had one."""
        with self._lock:
            return [
                index for index, key in enumerate(keys) if self._writes.pop(key, None) is not None
            ]

    def drop_late(self, keys: Sequence[str], limit_s: float) -> list[str]:
        """Forget those of these sessions that are open for longer; answers their keys."""
        opened_before = time.monotonic() - limit_s
        with self._lock:
            late = [
                key
                for key in keys
                if (write := self._writes.get(key)) and write.opening.opened_at < opened_before
            ]
            for key in late:
                self._writes.pop(key, None)
        return late

    def drop_opened_with(self, openings: Collection[Opening]) -> list[str]:
        """Forget all sessions of these openings; answers their keys."""
        with self._lock:
            gone = [key for key, write in self._writes.items() if write.opening in openings]
            for key in gone:
                del self._writes[key]
        return gone

    def unconfirmed(self, keys: Sequence[str]) -> dict[Opening, str]:
        """Openings of these sessions that the master must be asked about, and a key of each."""
        confirmed_before = time.monotonic() - CONFIRM_AFTER_S
        found: dict[Opening, str] = {}
        with self._lock:
            for key in keys:
                write = self._writes.get(key)
                if write is not None and write.opening.confirmed_at < confirmed_before:
                    found.setdefault(write.opening, key)
        return found

    @contextmanager
    def writing(self, keys: Sequence[str]) -> Iterator[list[Write | None]]:
        """The sessions of these keys, which aren't committed while the context lasts."""
        with self._lock:
            writes = [self._writes.get(key) for key in keys]
            in_use = [write for write in writes if write is not None]
            for each in in_use:
                each.num_writing += 1
        try:
            yield writes
        finally:
            with self._lock:
                for each in in_use:
                    each.num_writing -= 1

    def written(
        self,
        writes: Sequence[Write | None],
        codes: Sequence[int],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> None:
        """Note the ranges that were written, those with a positive code."""
        with self._lock:
            for write, code, s, o in zip(writes, codes, sizes, offsets, strict=True):
                if write is not None and code > 0:
                    write.coverage.add_ranges(s, o)

    def end(self, keys: Sequence[str]) -> tuple[list[int], list[str]]:
        """Forget sessions; positions of those whose object is whole, and keys of the others."""
        whole: list[int] = []
        unfinished: list[str] = []
        with self._lock:
            for index, key in enumerate(keys):
                write = self._writes.pop(key, None)
                if write is None:
                    continue
                # A range call in progress could change the object after its commit.
                if write.coverage.is_whole(write.nbytes) and not write.num_writing:
                    whole.append(index)
                else:
                    unfinished.append(key)
        return whole, unfinished

    def keys(self) -> list[str]:
        """Keys with an open session."""
        with self._lock:
            return list(self._writes)
