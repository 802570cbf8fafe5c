"""The files of a LoRA adapter: whether they have changed, and a digest that tells them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Final

from kvformat_connector.identity import WEIGHT_SUFFIXES, adapter_digest
from kvformat_connector.recent import Recent

logger = logging.getLogger(__name__)

_CONFIG_NAME: Final = "adapter_config.json"
_MAX_DIGESTS: Final = 256

#: Of each file name, size, times of change, file number and device. A copy may keep the time of
#: its content; nothing keeps the time of the file's last change.
Signature = tuple[tuple[str, int, int, int, int, int], ...]


class AdapterFiles:
    """Digests of adapters, each taken once for the same files. One thread calls."""

    def __init__(self) -> None:
        self._digests: Recent[tuple[str, Signature], str] = Recent(_MAX_DIGESTS)

    def digest(self, path: str) -> str:
        """``digest:<64 hex>`` of an adapter's files; empty where there is none, or where they
        change while they are read."""
        found = signature(path)
        if not found:
            return ""
        digest = self._digests.get((path, found))
        if digest is None:
            digest = _read(path, found)
        self._digests.keep((path, found), digest)
        return digest


def signature(path: str) -> Signature:
    """What changes when the files of an adapter do; empty where there is no such folder, or
    something in it is no file."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if _counts(entry.name)]
    except (OSError, ValueError):  # no such folder, or no path at all
        return ()
    if not all(stat.S_ISREG(at.st_mode) for _, at in files):
        # A pipe would be waited for, a device read without end.
        return ()
    return tuple(
        sorted(
            (name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino, at.st_dev)
            for name, at in files
        )
    )


def _counts(name: str) -> bool:
    return name == _CONFIG_NAME or os.path.splitext(name)[1] in WEIGHT_SUFFIXES


def _read(path: str, found: Signature) -> str:
    folder = Path(os.path.expanduser(path))
    names = [name for name, *_ in found]
    if _CONFIG_NAME not in names or len(names) < 2:
        logger.warning("%s holds no adapter: its requests are not stored", folder)
        return ""
    try:
        digest = adapter_digest(folder, names)
    except Exception as error:
        logger.warning("adapter %s can't be read, its requests are not stored: %s", folder, error)
        return ""
    # Files that change while they are read are neither the ones before nor those after.
    return digest if signature(path) == found else ""
