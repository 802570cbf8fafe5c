"""The bytes that a file store's folder holds, counted by all its processes together.

The count stands in a small file. Whoever changes it, or removes anything, holds the lock on that
file; a process that is killed loses the lock and may leave the count too high, never too low: bytes
are counted before they take space, and discounted after they gave it back. The next eviction counts
anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# A holder works for microseconds, or for the seconds of an eviction among millions of files.
_LOCK_LIMIT_S = 30.0
_NBYTES = 8


class Usage:
    """The shared count. Every method but :meth:`locked` is called under the lock."""

    def __init__(self, path: str, directory_fd: int) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=directory_fd)
        self._threads = threading.Lock()

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other threads and processes out. Raises ``TimeoutError`` if one stays in."""
        deadline = time.monotonic() + _LOCK_LIMIT_S
        if not self._threads.acquire(timeout=_LOCK_LIMIT_S):
            raise TimeoutError(errno.ETIMEDOUT, "another thread holds the store's lock")
        try:
            pause = 0.0001
            while True:
                try:
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise TimeoutError(
                            errno.ETIMEDOUT, "another process holds the store's lock"
                        ) from None
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def is_counted(self) -> bool:
        """Whether the count was ever written."""
        return os.fstat(self._fd).st_size == _NBYTES

    def read(self) -> int:
        """The bytes in use."""
        return int.from_bytes(os.pread(self._fd, _NBYTES, 0), "little")

    def write(self, nbytes: int) -> None:
        """Set the count."""
        # Sparse files can have more bytes together than the count can tell.
        nbytes = min(max(nbytes, 0), 2 ** (8 * _NBYTES) - 1)
        os.pwrite(self._fd, nbytes.to_bytes(_NBYTES, "little"), 0)

    def add(self, nbytes: int) -> None:
        """Count bytes in, or out if negative."""
        self.write(self.read() + nbytes)
