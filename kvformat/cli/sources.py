"""Where the commands get bytes and layouts from: stores, files, and parts of either."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from kvformat import registry
from kvformat.cli.problems import Problem, StoreAnswerError
from kvformat.errors import (
    ConfigError,
    FingerprintMismatchError,
    KeyFormatError,
    KVFormatError,
    Reason,
    RemoteDataError,
    StoreUnavailableError,
)
from kvformat.fingerprint import parse_layout, parse_manifest
from kvformat.key import (
    FORMAT_NAME,
    BlockKey,
    ManifestKey,
    Namespace,
    format_key,
    layout_namespace,
    parse_key,
)
from kvformat.layout import Layout
from kvformat.stores import Code, Store, open_store
from kvformat.stores.arguments import address_of

#: Objects are read in pieces of this size, so that a large one never lies in memory as a whole.
PIECE_NBYTES: Final = 1 << 20


class ObjectBytes(Protocol):
    """The bytes of an object, wherever they are."""

    nbytes: int

    def pieces(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """``nbytes`` bytes from ``offset``, in order; a piece is valid until the next one."""
        ...


def read(data: ObjectBytes, offset: int, nbytes: int) -> bytes:
    """Some bytes of an object, as one piece."""
    return b"".join(map(bytes, data.pieces(offset, nbytes)))


class FileBytes:
    """An object in a file of its own."""

    def __init__(self, path: str) -> None:
        found = os.stat(path)
        # It is read from several places: a pipe can't be, and one that nobody writes to never ends.
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("not a regular file")
        self._path = path
        self.nbytes = found.st_size

    def pieces(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        with open(self._path, "rb") as file:
            file.seek(offset)
            while nbytes > 0 and (piece := file.read(min(nbytes, PIECE_NBYTES))):
                yield memoryview(piece)
                nbytes -= len(piece)


class StoreReader:
    """Reads parts of a store's objects through one buffer, which the store knows."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._buffer = bytearray(PIECE_NBYTES)
        self._address = address_of(self._buffer)
        store.register_memory(self._address, PIECE_NBYTES)

    def close(self) -> None:
        """Take the buffer back from the store."""
        self.store.unregister_memory(self._address)

    @contextmanager
    def open(self, key: str, what: str) -> Iterator[StoredBytes]:
        """An object while a get session holds it.

        Raises ``StoreAnswerError`` where there is none, or it can't be read; ``what`` says in that
        error what was looked for.
        """
        try:
            yield StoredBytes(self, key, what)
        finally:
            self.store.get_end([key])

    def read_piece(self, key: str, what: str, offset: int, nbytes: int) -> memoryview:
        """At most ``PIECE_NBYTES`` bytes, valid until the next call."""
        request = ([key], [[self._address]], [[nbytes]], [[offset]])
        code = self.store.get_ranges(*request)[0]
        if code == Code.LEASE_EXPIRED:
            self.start(key, what)
            code = self.store.get_ranges(*request)[0]
        if code == Code.INVALID:
            # The range lies inside of the object: what is wrong is the way to its bytes. Mooncake
            # says this of an object whose storage node is gone.
            code = Code.TRANSFER_FAILED
        if code < 0:
            raise StoreAnswerError(code, key, what)
        return memoryview(self._buffer)[:nbytes]

    def start(self, key: str, what: str) -> None:
        """Open a get session, or renew its lease."""
        code = self.store.get_start([key])[0]
        if code < 0:
            raise StoreAnswerError(code, key, what)


class StoredBytes:
    """An object in a store, in an open get session."""

    def __init__(self, reader: StoreReader, key: str, what: str) -> None:
        reader.start(key, what)
        self._reader = reader
        self._key = key
        self._what = what
        self.nbytes = reader.store.object_nbytes(key)
        if self.nbytes < 0:
            raise StoreAnswerError(self.nbytes, key, what)

    def pieces(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        end = offset + nbytes
        for start in range(offset, end, PIECE_NBYTES):
            size = min(PIECE_NBYTES, end - start)
            yield self._reader.read_piece(self._key, self._what, start, size)


@contextmanager
def open_reader(uri: str) -> Iterator[StoreReader]:
    """A store, opened for reading. Raises ``ConfigError`` or ``StoreUnavailableError``."""
    try:
        # Who only asks leaves nothing behind, and gets no empty list for a mistyped path.
        store = open_store(uri, readonly=True)
    except KVFormatError:
        raise
    except Exception as error:  # a store is someone else's code, and may need what isn't here
        raise StoreUnavailableError(
            Reason.STORE_UNAVAILABLE,
            f"option store: {uri!r} can't be opened: {type(error).__name__}: {error}",
        ) from error
    try:
        reader = StoreReader(store)
        try:
            yield reader
        finally:
            reader.close()
    finally:
        store.close()


def load_layout(reader: StoreReader, namespace: Namespace) -> Layout:
    """The layout of a namespace, from its manifest in the store.

    Raises ``StoreAnswerError`` where there is no manifest, ``RemoteDataError`` where there is one
    that is corrupt or another namespace's.
    """
    key = format_key(ManifestKey(namespace))
    with reader.open(key, "manifest") as stored:
        # One byte above the limit is enough for the parser to refuse it.
        data = read(stored, 0, min(stored.nbytes, registry.MAX_MANIFEST_NBYTES + 1))
    layout = parse_manifest(data, namespace.fingerprint)
    require_namespace(layout, namespace, "the manifest")
    return layout


def find_layout(
    reader: StoreReader, key: BlockKey | ManifestKey
) -> tuple[Layout | None, list[Problem]]:
    """The layout of a key's namespace, or why there is none."""
    try:
        return load_layout(reader, key.namespace), []
    except StoreAnswerError as error:
        return None, [error.finding()]
    except RemoteDataError as error:
        return None, [Problem.from_error(error, format_key(ManifestKey(key.namespace)))]


def layout_dtypes(layout: Layout) -> list[str]:
    """The dtypes of a layout's components, each once, in order."""
    return list(
        dict.fromkeys(
            c.dtype for group in layout.groups for layer in group.layers for c in layer.components
        )
    )


def require_namespace(layout: Layout, namespace: Namespace, what: str) -> None:
    """Raise ``FingerprintMismatchError`` for the layout of another namespace."""
    found = layout_namespace(layout)
    for name in ("fingerprint", "tenant", "model"):
        a, b = getattr(found, name), getattr(namespace, name)
        if a != b:
            a, b = (x.hex() if isinstance(x, bytes) else repr(x) for x in (a, b))
            raise FingerprintMismatchError(
                Reason.MANIFEST_FINGERPRINT, f"{what} has {name} {a}, the key says {b}"
            )


def read_file(path: str) -> bytes:
    """The bytes of a file that should be a manifest; of a longer one, enough to refuse it.

    Raises ``ConfigError`` where it can't be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(registry.MAX_MANIFEST_NBYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(Reason.CONFIG_VALUE, f"can't read {path!r}: {error}") from error


def load_layout_file(path: str) -> Layout:
    """The layout of a manifest file, which may be indented or ordered for people.

    Raises ``ConfigError`` or ``ManifestError``.
    """
    return parse_layout(read_file(path))


def is_key_text(text: str) -> bool:
    """Whether ``text`` means a key or namespace of some format version, and not a file."""
    first, slash, _ = text.partition("/")
    return bool(slash) and first.startswith(FORMAT_NAME) and first[len(FORMAT_NAME) :].isdecimal()


def parse_namespace(text: str) -> Namespace:
    """The namespace that a key belongs to, or that a namespace's own four parts name.

    Raises ``KeyFormatError`` or ``UnsupportedVersionError``.
    """
    parts = text.removesuffix("/").split("/")
    return parse_key("/".join([*parts, "manifest"]) if len(parts) == 4 else text).namespace


def stored_namespaces(reader: StoreReader) -> list[Namespace]:
    """Every namespace with a key in the store, in order. Walks all keys."""
    found = set()
    for key in reader.store.list(f"{FORMAT_NAME}{registry.FORMAT_MAJOR}/"):
        try:
            found.add(parse_key(key).namespace)
        except KeyFormatError:
            continue
    return sorted(found, key=lambda n: (n.tenant, n.model, n.fingerprint))
