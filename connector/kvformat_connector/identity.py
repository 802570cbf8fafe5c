"""Which weights an engine serves: the part of the identity that no name can carry.

A hub snapshot is known by its commit. Anything else is known by a digest of its files: the
configuration, the weight index and a model's own code whole, of each weight file the name, size and
a few pages, and something of every tensor, because a merge or an edit may change a single one: the
middle of each in a safetensors file, the checksums that a torch archive keeps. That reads some
megabytes of any checkpoint, and every byte that it reads is the same on every node, whatever the
path.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import uuid
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvformat.errors import ConfigError, Reason
from kvformat_connector.config import Options

logger = logging.getLogger(__name__)

_OPTION: Final = "model_identity"
_OPTION_FILE: Final = "model_identity_file"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_WHOLE_FILES: Final = (
    "config.json",
    "*.index.json",
    "quantize_config.json",
    "hf_quant_config.json",
    "*.py",  # a model's own code
)
_NUM_READERS: Final = 32
_PAGE_NBYTES: Final = 4096
_PAGES_PER_FILE: Final = 16
_MAX_HEADER_NBYTES: Final = 64 << 20
_TENSOR_SAMPLE_NBYTES: Final = 1024
#: An adapter's file of at most this size is read whole.
_SMALL_NBYTES: Final = 64 << 20
_MAX_GIVEN_LENGTH: Final = 1024


def weights_identity(
    model: str,
    *,
    given: str = "",
    load_format: str = "auto",
    revision: str | None = None,
    download_dir: str | None = None,
) -> str:
    """``commit:<40 hex>``, ``digest:<64 hex>`` or ``given:<text>``; never empty.

    Args:
        model: a folder, a weight file, or a hub name whose snapshot is in the local hub cache.
        given: the operator's word (option ``model_identity``); it decides where it is there.
        load_format: the engine's; ``dummy`` makes weights up, so nothing on disk says which.
        revision: the hub revision the engine was asked for.
        download_dir: the hub cache the engine uses, where it isn't the default.

    Raises:
        ConfigError: reason ``config_missing``, where nothing tells the weights; the text names the
            option that supplies them.
    """
    if given:
        return f"given:{given}"
    if load_format == "dummy":
        raise ConfigError(
            Reason.CONFIG_MISSING,
            f"load_format is 'dummy', so no file says which weights {model!r} has: set option "
            f"{_OPTION!r} to a text that is the same exactly where the weights are",
        )
    path = _local_path(model, revision, download_dir)
    if path is None:
        raise ConfigError(
            Reason.CONFIG_MISSING,
            f"model {model!r} is neither a folder nor in the local hub cache (revision "
            f"{revision!r}): set option {_OPTION!r} to its revision or digest",
        )
    commit = _snapshot_commit(path)
    return f"commit:{commit}" if commit else f"digest:{_digest_of(path)}"


def given_identity(options: Options) -> str:
    """The operator's word on the weights, or the text of the file that has it; empty where nothing
    is said. Raises ``ConfigError`` like :func:`read_given`."""
    file = options.model_identity_file
    return read_given(file) if file else options.model_identity


def read_given(path: str) -> str:
    """The identity that an operator keeps in a file, for weights that change while an engine runs.

    Raises ``ConfigError`` with reason ``config_value`` for a file that doesn't hold a short text.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError("something that is no file")  # a pipe would be waited for
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_GIVEN_LENGTH + 1).strip()
    except (OSError, ValueError) as error:
        text, found = "", str(error)
    else:
        found = f"{len(text)} characters"
    if not 0 < len(text) <= _MAX_GIVEN_LENGTH:
        raise ConfigError(
            Reason.CONFIG_VALUE,
            f"option {_OPTION_FILE!r} has the value {path!r}, expected a file that holds the "
            f"identity of the weights, 1 to {_MAX_GIVEN_LENGTH} characters; found {found}",
        )
    return text


class NextWeights:
    """The identity of an engine's weights after each time that they may have changed.

    Only the operator knows which they are then, and says so by writing the file of option
    ``model_identity_file`` beforehand. A file that wasn't written since it was last read says
    nothing, whatever its text: weights that nobody has named are shared with nobody.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._written_at = self._look()

    def take(self) -> str:
        """``given:<text>``, or ``private:<32 hex>`` that is never given again."""
        before, self._written_at = self._written_at, self._look()
        if self._written_at != before:
            try:
                return f"given:{read_given(self._path)}"
            except ConfigError as error:
                logger.error("%s", error)
        return f"private:{uuid.uuid4().hex}"

    def _look(self) -> tuple[int, int]:
        with suppress(OSError, ValueError):
            found = os.stat(self._path)
            return found.st_mtime_ns, found.st_ino
        return 0, 0


def adapter_digest(folder: Path, names: Iterable[str]) -> str:
    """``digest:<64 hex>`` of the files of an adapter: small ones whole, others like weights.

    Raises ``OSError`` for a file that can't be read.
    """
    digest = hashlib.sha256(b"kvformat adapter 1\n")
    for name in sorted(names):
        file = folder / name
        is_small = file.stat().st_size <= _SMALL_NBYTES
        _add(digest, (name.encode(), *((file.read_bytes(),) if is_small else _samples(file))))
    return f"digest:{digest.hexdigest()}"


def model_name(model: str, given: str = "") -> str:
    """The name a model goes by in keys, the same on every node whatever the path.

    ``given`` decides where it is there; a folder of a hub cache gives the hub name, any other path
    its last part.
    """
    if given:
        return given
    path = Path(model)
    if not path.exists():
        return model
    for part in reversed(path.absolute().parts):
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.absolute().name


def _local_path(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    path = Path(model)
    if path.exists():
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            model, "config.json", revision=revision, cache_dir=download_dir
        )
    except (ImportError, ValueError):  # no hub client, or a text that is no hub name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _snapshot_commit(path: Path) -> str:
    # A folder that links to a snapshot is that snapshot. Only the folder is resolved: the files of
    # a snapshot are themselves links, to blobs.
    for folder in (path.absolute(), path.resolve()):
        if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
            return folder.name
    return ""


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256(b"kvformat weights 2\n")
    folder, weights = (path.parent, [path]) if path.is_file() else (path, _weight_files(path))
    if not weights:
        raise ConfigError(
            Reason.CONFIG_MISSING,
            f"{path} holds no weight file ({', '.join(sorted(WEIGHT_SUFFIXES))}): set option "
            f"{_OPTION!r} to the revision or digest of the weights",
        )
    for pattern in _WHOLE_FILES:
        for file in sorted(filter(Path.is_file, folder.glob(pattern))):
            _add(digest, (file.name.encode(), file.read_bytes()))
    # Hundreds of files, with hundreds of tensors each: what takes time is waiting for the disk.
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        for file, samples in zip(weights, readers.map(_samples_digest, weights), strict=True):
            _add(digest, (file.name.encode(), samples))
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES and file.is_file()
    )


def _samples_digest(file: Path) -> bytes:
    digest = hashlib.sha256()
    _add(digest, _samples(file))
    return digest.digest()


def _samples(file: Path) -> Iterable[bytes]:
    """Size, header or archive directory, tensors, and evenly spread pages of a weight file."""
    with suppress(zipfile.BadZipFile):  # not an archive
        yield from _archive_checksums(file)
    with file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        nbytes = os.fstat(descriptor).st_size
        yield nbytes.to_bytes(8, "little")
        start = 0
        if file.suffix == ".safetensors" and nbytes >= 8:
            header_nbytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
            if header_nbytes <= min(nbytes - 8, _MAX_HEADER_NBYTES):
                start = 8 + header_nbytes
                header = os.pread(descriptor, header_nbytes, 8)
                yield header
                for first, last in _tensor_offsets(header):
                    sample = min(_TENSOR_SAMPLE_NBYTES, last - first)
                    yield os.pread(descriptor, sample, start + (first + last - sample) // 2)
        last = max(start, nbytes - _PAGE_NBYTES)
        for index in range(_PAGES_PER_FILE):
            # First and last page are always among them: trailers and last tensors move first.
            offset = start + (last - start) * index // (_PAGES_PER_FILE - 1)
            yield os.pread(descriptor, _PAGE_NBYTES, offset)


def _tensor_offsets(header: bytes) -> list[tuple[int, int]]:
    """Start and end of each tensor behind a safetensors header; none where it isn't one."""
    try:
        tensors = json.loads(header)
        return sorted(
            (int(first), int(last))
            for name, tensor in tensors.items()
            if name != "__metadata__"
            for first, last in [tensor["data_offsets"]]
            if 0 <= first <= last
        )
    except (ValueError, TypeError, AttributeError, KeyError):
        return []


def _archive_checksums(file: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            yield f"{entry.filename} {entry.file_size} {entry.CRC:08x}".encode()


def _add(digest: hashlib._Hash, parts: Iterable[bytes]) -> None:
    # Lengths go in too, so that no two lists of parts are one stream of bytes.
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
