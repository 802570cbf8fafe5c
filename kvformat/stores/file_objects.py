"""The files of a file store: objects under their names, and objects being written.

Who uses a file holds a shared lock (flock) on it; who removes one takes the exclusive lock first,
without waiting, and lets the file be if that fails. A dead process holds no lock. So an object that
is being read is never removed, and what a killed writer left is told from what a living one writes.

Layout of the folder: ``.store/usage`` is the count of bytes, ``.store/writing/`` holds one file per
object being written, everything else is objects (see ``file_paths``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from kvformat.stores.coverage import Coverage
from kvformat.stores.file_folder import Folder
from kvformat.stores.file_paths import format_directory, format_path, parse_path
from kvformat.stores.file_usage import Usage

_INTERNAL = ".store"
_WRITING = f"{_INTERNAL}/writing"
_USAGE = f"{_INTERNAL}/usage"
# An eviction frees more than it must, so that the next one is some while away.
_REFILL_PERCENT = 90
# Which of two objects was used first is known if their last uses lie further apart than this.
_USE_RESOLUTION_NS = 1_000_000_000


class ReadFile:
    """An open, committed object. The lock and the descriptor go with the last reference."""

    __slots__ = ("fd", "nbytes")

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes

    def __del__(self) -> None:
        os.close(self.fd)


class WriteFile(ReadFile):
    """An object being written under a name of its own."""

    __slots__ = ("coverage", "name", "num_writing")

    def __init__(self, fd: int, nbytes: int, name: str) -> None:
        super().__init__(fd, nbytes)
        self.name = name
        self.coverage = Coverage()
        self.num_writing = 0  #: range calls in progress


class ReadOnlyFiles:
    """The objects of a folder in which nothing is ever changed.

    Errors are ``OSError``; the caller translates them. What isn't a regular file isn't there.
    """

    def __init__(self, path: str) -> None:
        self._root = Folder(path)

    def stat(self, key: str) -> os.stat_result:
        """What the file system says of a committed object."""
        found = self._root.stat(format_path(key))
        _check_regular(found, key)
        return found

    def keys(self, prefix: str) -> Iterator[str]:
        """The committed keys that start with ``prefix``."""
        for path, _ in self._root.files(format_directory(prefix)):
            key = parse_path(path)
            if key is not None and key.startswith(prefix):
                yield key

    def open_object(self, key: str) -> ReadFile:
        """Open a committed object for reading."""
        try:
            return self._open_object(key, os.O_NOATIME)
        except PermissionError:  # only a file's owner may read it without a trace
            return self._open_object(key, 0)

    def _open_object(self, key: str, flags: int) -> ReadFile:
        fd, found = _open_regular(self._root, format_path(key), flags)
        file = ReadFile(fd, found.st_size)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileNotFoundError(errno.ENOENT, "being removed", key) from None
        if not os.fstat(fd).st_nlink:  # removed between open and lock
            raise FileNotFoundError(errno.ENOENT, "removed", key)
        return file


class ObjectFiles(ReadOnlyFiles):
    """The files of a folder, some of them being written."""

    def __init__(self, path: str, max_nbytes: int | None) -> None:
        self._path = path
        self._max_nbytes = max_nbytes
        self._attaching = threading.Lock()
        self._attach()

    def _attach(self) -> None:
        writing = os.path.join(self._path, _WRITING)
        os.makedirs(writing, exist_ok=True)
        super().__init__(self._path)
        self._writing = Folder(writing)
        self._usage = Usage(_USAGE, self._root.fd)
        with self._usage.locked():
            if not self._usage.is_counted():
                self._usage.write(self._scan()[0])
            self._remove_orphans()
            self._check_links()

    def open_object(self, key: str) -> ReadFile:
        """Open a committed object for reading and mark it as used now."""
        file = self._open_object(key, 0)
        found = os.fstat(file.fd)
        # Eviction goes by the access time. It's set here because many file systems are mounted so
        # that reading doesn't, and not at each read of a busy object, because it's written to disk.
        now = time.time_ns()
        if abs(now - found.st_atime_ns) > _USE_RESOLUTION_NS:
            with suppress(PermissionError):  # a reader that isn't the file's owner
                os.utime(file.fd, ns=(now, found.st_mtime_ns))
        return file

    def open_new(self, sizes: list[int]) -> list[WriteFile | OSError]:
        """Open a new file per size, in one go. Each takes its bytes from the cap at once."""
        with self._attaching:
            if not self._writing.is_at(os.path.join(self._path, _WRITING)):
                self._attach()  # somebody cleared the cache by removing the folder
        opened: list[WriteFile | OSError] = []
        may_evict = True
        with self._usage.locked():
            for nbytes in sizes:
                try:
                    if not self._has_room(nbytes):
                        # One eviction that couldn't help won't help the rest of the batch.
                        may_evict = may_evict and self._make_room(nbytes)
                        if not self._has_room(nbytes):
                            raise OSError(errno.ENOSPC, "all that could go is in use")
                    opened.append(self._open_new(nbytes))
                except OSError as error:
                    opened.append(error)
        return opened

    def _open_new(self, nbytes: int) -> WriteFile:
        name = os.urandom(16).hex()
        self._usage.add(nbytes)
        try:
            fd = self._writing.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.truncate(fd, nbytes)
            except OSError:
                os.close(fd)
                self._writing.unlink(name)
                raise
        except OSError:
            self._usage.add(-nbytes)
            raise
        return WriteFile(fd, nbytes, name)

    def commit(self, file: WriteFile, key: str) -> None:
        """Give ``file`` the object's name. On any error it is discarded; ``FileExistsError`` if
        another object has that name.
        """
        try:
            self._root.link_from(self._writing, file.name, format_path(key))
        except OSError:
            self.discard([file])
            raise
        with suppress(FileNotFoundError):
            self._writing.unlink(file.name)

    def discard(self, files: list[WriteFile]) -> None:
        """Remove files that were never committed."""
        with self._usage.locked():
            for file in files:
                with suppress(FileNotFoundError):
                    self._writing.unlink(file.name)
                    self._usage.add(-file.nbytes)

    def remove(self, keys: list[str]) -> list[OSError | None]:
        """Remove committed objects; ``BlockingIOError`` for one in use."""
        answers: list[OSError | None] = []
        with self._usage.locked():
            for key in keys:
                try:
                    self._usage.add(-self._unlink_unused(self._root, format_path(key)))
                    answers.append(None)
                except OSError as error:
                    answers.append(error)
        return answers

    def _unlink_unused(self, folder: Folder, path: str) -> int:
        """Remove a file that no one uses; the bytes that this gave back."""
        fd, _ = _open_regular(folder, path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(fd)
            folder.unlink(path)
        finally:
            os.close(fd)
        # A writer killed inside its commit leaves a file with both names.
        return found.st_size if found.st_nlink == 1 else 0

    def _check_links(self) -> None:
        """Find out at the start, not at each commit, that a file system lacks links or locks."""
        probe = self._open_new(1)
        name = f"{_INTERNAL}/{probe.name}"
        try:
            self._root.link_from(self._writing, probe.name, name)
            self._root.unlink(name)
        finally:
            self._writing.unlink(probe.name)
            self._usage.add(-probe.nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._max_nbytes is None or self._usage.read() + nbytes <= self._max_nbytes

    def _make_room(self, nbytes: int) -> bool:
        """Evict what was used least recently; whether ``nbytes`` fit now."""
        assert self._max_nbytes is not None
        if nbytes > self._max_nbytes:
            return False
        self._remove_orphans()
        used, objects = self._scan()
        goal = min(self._max_nbytes * _REFILL_PERCENT // 100, self._max_nbytes - nbytes)
        for _, path in sorted(objects):
            if used <= goal:
                break
            with suppress(OSError):  # in use, or not ours to remove
                used -= self._unlink_unused(self._root, path)
        self._usage.write(used)
        return self._has_room(nbytes)

    def _remove_orphans(self) -> None:
        """Remove what killed writers left."""
        for path, _ in self._writing.files(""):
            with suppress(OSError):
                self._usage.add(-self._unlink_unused(self._writing, path))

    def _scan(self) -> tuple[int, list[tuple[int, str]]]:
        """The bytes of all files, and when each object was used last, with its path.

        A file may move from one place to the other meanwhile, so the writers' files are looked at
        first, and what is seen twice counts once.
        """
        used = 0
        seen: set[int] = set()
        objects = []
        for folder in (self._writing, self._root):
            for path, entry in folder.files(""):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if found.st_ino not in seen:
                    used += found.st_size
                if folder is self._writing:
                    seen.add(found.st_ino)
                else:
                    objects.append((found.st_atime_ns, path))
        return used, objects


def _open_regular(folder: Folder, path: str, flags: int = 0) -> tuple[int, os.stat_result]:
    """Open a regular file for reading. Raises ``FileNotFoundError`` for any other."""
    try:
        # A FIFO that nobody writes to must not hold the caller; files take no notice of the flag.
        fd = folder.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link, a socket
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path) from None
        raise
    found = os.fstat(fd)
    try:
        _check_regular(found, path)
    except FileNotFoundError:
        os.close(fd)
        raise
    return fd, found


def _check_regular(found: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", name)
