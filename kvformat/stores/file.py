"""``file:///folder``: objects as files in a folder that any number of processes share.

Options: ``max_nbytes`` caps the bytes of all objects, those being written included (``100GiB``);
above it the objects used least recently are evicted. Without it nothing is. An object is used when
it is read, and when it is put again. With ``readonly=true`` nothing in the folder is changed, not
even which objects were used last; it must exist, and every call that would write answers
``UNAVAILABLE``.

An object is written to a file of its own and gets its name by a hard link when it is committed,
so it appears whole or not at all, wherever its writer is killed. Of two writers of one key the
first to commit wins. What a killed writer left is removed when a store is opened on the folder, and
before an eviction. After a *power* failure a file may hold anything: the format's checksums find
that out.

A session holds a file descriptor; with too many open at once a start answers ``UNAVAILABLE``.

Source: spec/kvformat.md section 8.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import ClassVar

from kvformat.errors import ConfigError, Reason, StoreUnavailableError
from kvformat.stores.arguments import (
    address_of,
    check_nbytes,
    check_pieces,
    check_ranges,
    is_key,
    same_length,
)
from kvformat.stores.file_codes import code_of
from kvformat.stores.file_objects import ObjectFiles, ReadFile, ReadOnlyFiles, WriteFile
from kvformat.stores.file_ranges import move_pieces, move_ranges
from kvformat.stores.protocol import Code
from kvformat.stores.uri import (
    is_readonly,
    parse_nbytes,
    parse_store_uri,
    refuse_unknown_options,
)

#: Linux takes 4096 bytes with the terminating zero, and objects have names below the folder.
_MAX_PATH = 2048


class FileStore:
    """A store in a folder. Its methods may be called from any thread."""

    options: ClassVar[tuple[str, ...]] = ("max_nbytes", "readonly")

    def __init__(self, uri: str) -> None:
        parsed = parse_store_uri(uri)
        refuse_unknown_options(parsed, self.options)
        path = parsed.path
        is_root = not path.strip("/.")
        if parsed.authority or is_root or "\0" in path or len(path) > _MAX_PATH:
            raise ConfigError(
                Reason.CONFIG_VALUE,
                "option store: expected file:///path with the absolute path of a folder, of at "
                f"most {_MAX_PATH} characters and not the root, found {uri[:200]!r}",
            )
        cap = parsed.options.get("max_nbytes")
        max_nbytes = None if cap is None else parse_nbytes("max_nbytes", cap)
        if max_nbytes == 0:
            raise ConfigError(
                Reason.CONFIG_VALUE, f"option max_nbytes: expected above zero, found {cap!r}"
            )
        only_reads = is_readonly(uri)
        self.uri = uri
        self._files: ReadOnlyFiles | None  # None when closed
        self._writable: ObjectFiles | None = None  # the same files, if they may be changed
        try:
            if only_reads:
                self._files = ReadOnlyFiles(parsed.path)
            else:
                self._files = self._writable = ObjectFiles(parsed.path, max_nbytes)
        except OSError as error:
            raise StoreUnavailableError(
                Reason.STORE_UNAVAILABLE,
                f"option store: folder {parsed.path!r} can't be used: {error}"
                + ("" if only_reads else " (option readonly=true only reads)"),
            ) from error
        self._starting = threading.Lock()  # one put_start or close at a time
        self._lock = threading.Lock()  # the sessions; never held during I/O
        self._writes: dict[str, WriteFile] = {}
        #: Keys that are neither being written any more nor objects yet.
        self._committing: set[str] = set()
        self._reads: dict[str, ReadFile] = {}

    def exists(self, keys: Sequence[str]) -> list[int]:
        sizes = [self.object_nbytes(key) for key in keys]
        return [1 if size >= 0 else 0 if size == Code.NOT_FOUND else size for size in sizes]

    def put_start(self, keys: Sequence[str], nbytes: Sequence[int]) -> list[int]:
        if not same_length(keys, nbytes):
            return [Code.INVALID] * len(keys)
        with self._starting:
            files = self._writable
            if files is None:
                return [Code.UNAVAILABLE] * len(keys)
            codes: list[int] = []
            new: dict[str, int] = {}  # key: position in the batch
            for index, (key, size) in enumerate(zip(keys, nbytes, strict=True)):
                # First, for a commit in progress ends with an object that is found below.
                busy = key in self._writes or key in self._committing or key in new
                codes.append(Code.EXISTS if busy else self._check_new(key, size))
                if codes[index] == Code.OK:
                    new[key] = index
            try:
                opened = files.open_new([nbytes[index] for index in new.values()])
            except OSError as error:  # the lock on the count can't be had
                opened = [error] * len(new)
            with self._lock:
                for (key, index), file in zip(new.items(), opened, strict=True):
                    if isinstance(file, OSError):
                        codes[index] = code_of(file)
                    else:
                        self._writes[key] = file
        return codes

    def _check_new(self, key: str, nbytes: int) -> int:
        """``OK`` if an object of this size can be put under ``key``."""
        found = self.object_nbytes(key)
        if found >= 0:
            return Code.EXISTS
        return check_nbytes(nbytes) if found == Code.NOT_FOUND else found

    def put_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._writable is None:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes, offsets):
            return [Code.INVALID] * len(keys)
        with self._lock:
            files = [self._writes.get(key) for key in keys]
            for file in files:
                if file is not None:
                    file.num_writing += 1
        try:
            return list(map(self._put_ranges, files, addresses, sizes, offsets))
        finally:
            with self._lock:
                for file in files:
                    if file is not None:
                        file.num_writing -= 1

    def _put_ranges(
        self,
        file: WriteFile | None,
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> int:
        if file is None:
            return Code.INVALID
        total = check_ranges(addresses, sizes, offsets, file.nbytes)
        if total > 0:
            try:
                move_ranges(os.pwritev, file.fd, addresses, sizes, offsets)
            except OSError as error:
                return code_of(error)
            with self._lock:
                file.coverage.add_ranges(sizes, offsets)
        return total

    def put_commit(self, keys: Sequence[str]) -> list[int]:
        files = self._writable
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        return [self._put_commit(files, key) for key in keys]

    def _put_commit(self, files: ObjectFiles, key: str) -> int:
        with self._lock:
            file = self._writes.pop(key, None)
            if file is None:
                return Code.INVALID
            # A range call in progress could change the object after its commit.
            is_done = file.coverage.is_whole(file.nbytes) and not file.num_writing
            self._committing.add(key)
        try:
            if not is_done:
                files.discard([file])
                return Code.INVALID
            files.commit(file, key)
        except OSError as error:
            return code_of(error)
        finally:
            self._committing.discard(key)
        return Code.OK

    def put_revoke(self, keys: Sequence[str]) -> list[int]:
        files = self._writable
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            revoked = [self._writes.pop(key, None) for key in keys]
        try:
            files.discard([file for file in revoked if file is not None])
        except OSError as error:
            return [code_of(error)] * len(keys)
        return [Code.INVALID if file is None else Code.OK for file in revoked]

    def get_start(self, keys: Sequence[str]) -> list[int]:
        files = self._files
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        return [self._get_start(files, key) for key in keys]

    def _get_start(self, files: ReadOnlyFiles, key: str) -> int:
        if key in self._reads:
            return Code.OK  # nothing runs out here, so there is nothing to renew
        file = self._open(files, key)
        if isinstance(file, int):
            return file
        with self._lock:
            if self._files is None:  # closed meanwhile: nothing would end this session
                return Code.UNAVAILABLE
            self._reads.setdefault(key, file)
        return Code.OK

    def get_ranges(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        if self._files is None:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes, offsets):
            return [Code.INVALID] * len(keys)
        with self._lock:
            files = [self._reads.get(key) for key in keys]
        return list(map(self._get_ranges, files, addresses, sizes, offsets))

    def _get_ranges(
        self,
        file: ReadFile | None,
        addresses: Sequence[int],
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> int:
        if file is None:
            return Code.INVALID
        total = check_ranges(addresses, sizes, offsets, file.nbytes)
        if total > 0:
            try:
                move_ranges(os.preadv, file.fd, addresses, sizes, offsets)
            except OSError as error:
                return code_of(error)
        return total

    def get_end(self, keys: Sequence[str]) -> list[int]:
        if self._files is None:
            return [Code.UNAVAILABLE] * len(keys)
        with self._lock:
            ended = [self._reads.pop(key, None) for key in keys]
        return [Code.INVALID if file is None else Code.OK for file in ended]

    def put(self, key: str, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return Code.INVALID if self._writable else Code.UNAVAILABLE
        return self.put_objects([key], [[address_of(view)]], [[view.nbytes]])[0]

    def get(self, key: str) -> bytes | None:
        files = self._files
        file = Code.UNAVAILABLE if files is None else self._open(files, key)
        if isinstance(file, int):
            return None
        try:
            data = bytearray(file.nbytes)
            move_pieces(os.preadv, file.fd, [address_of(data)], [file.nbytes])
            return bytes(data)
        except (OSError, MemoryError):  # a file of any size can lie in the folder
            return None

    def put_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        files = self._writable
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes):
            return [Code.INVALID] * len(keys)
        return [
            self._put_object(files, key, pieces, lengths)
            for key, pieces, lengths in zip(keys, addresses, sizes, strict=True)
        ]

    def _put_object(
        self, files: ObjectFiles, key: str, addresses: Sequence[int], sizes: Sequence[int]
    ) -> int:
        total = check_pieces(addresses, sizes)
        code = self._check_new(key, total)
        if code == Code.EXISTS:
            self._open(files, key)  # put again is used again
        if code != Code.OK:
            return code
        try:
            [file] = files.open_new([total])
            if isinstance(file, OSError):
                raise file
            try:
                move_pieces(os.pwritev, file.fd, addresses, sizes)
            except OSError:
                files.discard([file])
                raise
            files.commit(file, key)
        except OSError as error:
            return code_of(error)
        return Code.OK

    def get_objects(
        self,
        keys: Sequence[str],
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[int]:
        files = self._files
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        if not same_length(keys, addresses, sizes):
            return [Code.INVALID] * len(keys)
        return [
            self._get_object(files, key, pieces, lengths)
            for key, pieces, lengths in zip(keys, addresses, sizes, strict=True)
        ]

    def _get_object(
        self, files: ReadOnlyFiles, key: str, addresses: Sequence[int], sizes: Sequence[int]
    ) -> int:
        total = check_pieces(addresses, sizes)
        if total < 1:
            return Code.INVALID
        file = self._open(files, key)
        if isinstance(file, int):
            return file
        if total != file.nbytes:
            return Code.INVALID
        try:
            move_pieces(os.preadv, file.fd, addresses, sizes)
        except OSError as error:
            return code_of(error)
        return total

    def _open(self, files: ReadOnlyFiles, key: str) -> ReadFile | int:
        if not is_key(key):
            return Code.INVALID
        try:
            return files.open_object(key)
        except OSError as error:
            return code_of(error)

    def object_nbytes(self, key: str) -> int:
        files = self._files
        if files is None:
            return Code.UNAVAILABLE
        if not is_key(key):
            return Code.INVALID
        try:
            return files.stat(key).st_size
        except OSError as error:
            return code_of(error)

    def remove(self, keys: Sequence[str]) -> list[int]:
        files = self._writable
        if files is None:
            return [Code.UNAVAILABLE] * len(keys)
        valid = [key for key in keys if is_key(key)]
        try:
            answers = iter(files.remove(valid))
        except OSError as error:
            return [code_of(error)] * len(keys)
        codes: list[int] = []
        for key in keys:
            answer = next(answers) if is_key(key) else OSError(errno.EINVAL, "not a key")
            codes.append(Code.OK if answer is None else code_of(answer))
        return codes

    def list(self, prefix: str = "") -> Iterator[str]:
        files = self._files
        if files is None:
            raise StoreUnavailableError(Reason.STORE_UNAVAILABLE, f"{self.uri} is closed")
        # A prefix that is no key itself starts none, except the empty one.
        return files.keys(prefix) if not prefix or is_key(prefix) else iter(())

    def register_memory(self, address: int, nbytes: int) -> int:
        return Code.OK

    def unregister_memory(self, address: int) -> int:
        return Code.OK

    def close(self) -> None:
        with self._starting:
            files, self._files, self._writable = self._writable, None, None
            with self._lock:
                writes = list(self._writes.values())
                self._writes.clear()
                self._reads.clear()
        if files is not None:
            with suppress(OSError):  # what stays is an orphan, and cleaned like one
                files.discard(writes)
