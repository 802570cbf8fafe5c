"""A directory tree that several processes add files to and take files from.

Paths are relative to the folder and may be longer than PATH_MAX: they are walked in pieces.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvformat.stores.file_paths import is_directory_name

T = TypeVar("T")

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The longest path given to one system call. PATH_MAX is 4096 with the final NUL.
_MAX_PATH = 4000
# A directory that is made for a file may be pruned before the file is in it, again and again if
# others keep removing; in practice once.
_MAX_TRIES = 100


class Folder:
    """An open directory. It is closed with the last reference, so no call can lose it half-way."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    def is_at(self, path: str) -> bool:
        """Whether this is still the directory that ``path`` names."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def open(self, path: str, flags: int) -> int:
        """Open a file; the caller closes the descriptor."""
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        return self._at(path, lambda name, fd: os.open(name, flags, 0o666, dir_fd=fd))

    def stat(self, path: str) -> os.stat_result:
        """What ``lstat`` says."""
        return self._at(path, lambda name, fd: os.stat(name, dir_fd=fd, follow_symlinks=False))

    def unlink(self, path: str) -> None:
        """Remove a file, and with it the directories above it that are empty now."""
        self._at(path, lambda name, fd: os.unlink(name, dir_fd=fd))
        while "/" in path:
            path = path[: path.rindex("/")]
            try:
                self._at(path, lambda name, fd: os.rmdir(name, dir_fd=fd))
            except OSError:
                return

    def link_from(self, source: Folder, source_name: str, path: str) -> None:
        """Give a file of ``source`` a second name here. Raises ``FileExistsError`` if it's taken.

        Unlike a rename this never replaces a file, so the first one to come stays.
        """

        def link(name: str, fd: int) -> None:
            os.link(source_name, name, src_dir_fd=source.fd, dst_dir_fd=fd)

        for _ in range(_MAX_TRIES):
            try:
                return self._at(path, link)
            except FileNotFoundError:
                self._make_directories(path)
        raise OSError(errno.ENOENT, f"directories of {path!r} keep vanishing")

    def files(self, directory: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Each regular file below ``directory`` with its path.

        Hidden names are passed over, and directories on no key's path: a file system keeps some
        that only its owner may open (``lost+found``). An entry can be asked for its stat until the
        next one is taken.
        """
        waiting = [directory]
        while waiting:
            directory = waiting.pop()
            try:
                fd = self.open(directory or ".", _DIRECTORY)
            except FileNotFoundError:
                continue  # pruned meanwhile, or never there
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        path = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.name.startswith("."):
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            if is_directory_name(entry.name):
                                waiting.append(path)
                        elif entry.is_file(follow_symlinks=False):
                            yield path, entry
            finally:
                os.close(fd)

    def _at(self, path: str, call: Callable[[str, int], T]) -> T:
        """``call(name, fd)`` with a short name and the directory it is relative to."""
        fd = self.fd
        try:
            while len(path) > _MAX_PATH:
                cut = path.rindex("/", 0, _MAX_PATH)
                fd = self._step(fd, path[:cut])
                path = path[cut + 1 :]
            return call(path, fd)
        finally:
            if fd != self.fd:
                os.close(fd)

    def _make_directories(self, path: str) -> None:
        """Make the directories above the file ``path``."""
        fd = self.fd
        try:
            for name in path.split("/")[:-1]:
                try:
                    os.mkdir(name, dir_fd=fd)
                except FileExistsError:
                    pass
                except FileNotFoundError:
                    return  # pruned meanwhile: the caller tries again
                try:
                    fd = self._step(fd, name)
                except FileNotFoundError:
                    return
        finally:
            if fd != self.fd:
                os.close(fd)

    def _step(self, fd: int, path: str) -> int:
        """Open a directory relative to ``fd``, and close ``fd`` unless it is the folder."""
        below = os.open(path, os.O_PATH | _DIRECTORY, dir_fd=fd)
        if fd != self.fd:
            os.close(fd)
        return below
