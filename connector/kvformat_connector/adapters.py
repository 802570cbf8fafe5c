"""Which LoRA adapter a request is computed with, told by content.

The engine knows an adapter by a number and loads it when it first meets the number, or again when
it had no room for it meanwhile; its block hashes, and so its own prefix cache, know it by name. So
an adapter is told by its files only as long as neither a number nor a name has stood for other
files in this engine: after that nobody can tell which of them a block was computed with.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Final

from kvformat_connector.identity import WEIGHT_SUFFIXES, adapter_digest
from kvformat_connector.transfer import Lane

logger = logging.getLogger(__name__)

#: The engine's thread waits at most so long for the digest of an adapter that it meets first. A
#: slower one is used when it is there.
_WAIT_S: Final = 2.0
_CONFIG_NAME: Final = "adapter_config.json"
_MAX_DIGESTS: Final = 256
_MAX_NAMES: Final = 4096

#: Name, size, time of change and file number of each file.
Signature = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """The adapters that an engine has met. Its thread calls; a lane reads files."""

    def __init__(
        self, settings: str = "", *, hash_has_path: bool = False, wait_s: float = _WAIT_S
    ) -> None:
        """
        Args:
            settings: the engine's, that change what an adapter computes.
            hash_has_path: whether block hashes hold an adapter's path as well as its name.
        """
        self._settings = settings
        self._hash_has_path = hash_has_path
        self._wait_s = wait_s
        self._lane = Lane("adapters")
        self._digests: dict[tuple[str, Signature], Future[str]] = {}
        #: By number, and by what block hashes hold: the identity, empty where there were several.
        self._served: dict[object, str] = {}

    def identity(self, lora_request: Any) -> str:
        """The same text on every node exactly where the same adapter is used in the same way; empty
        where nobody can tell."""
        path = lora_request.lora_path
        signature = _signature(path)
        if not signature:
            return ""
        digest = self._digests.pop((path, signature), None)
        if digest is None:
            digest = self._lane.submit(_digest, path, signature)
            wait([digest], self._wait_s)
        self._digests[path, signature] = digest
        while len(self._digests) > _MAX_DIGESTS:
            del self._digests[next(iter(self._digests))]
        identity = self._text(lora_request, digest)
        return identity if identity and self._is_constant(lora_request, identity) else ""

    def is_still(self, lora_request: Any, identity: str) -> bool:
        """Whether an adapter is the one that had this identity. Reads no files."""
        path = lora_request.lora_path
        digest = self._digests.get((path, _signature(path)))
        found = "changed" if digest is None else self._text(lora_request, digest)
        return found == identity and self._is_constant(lora_request, found)

    def close(self) -> None:
        """End the thread, when it has read what it reads."""
        self._lane.close(0.0)

    def _text(self, lora_request: Any, digest: Future[str]) -> str:
        if not digest.done() or not digest.result():
            return ""
        is_3d = getattr(lora_request, "is_3d_lora_weight", False)
        return f"{digest.result()}{' is_3d_lora_weight=True' * is_3d}{self._settings}"

    def _is_constant(self, lora_request: Any, identity: str) -> bool:
        path = lora_request.lora_path if self._hash_has_path else ""
        is_constant = True
        for served_as in (lora_request.lora_int_id, (lora_request.lora_name, path)):
            known = self._served.setdefault(served_as, identity)
            if known != identity:
                is_constant = False
                if known:
                    logger.warning(
                        "adapter %r (lora_int_id %d) is not what it was when it was first used: "
                        "its requests are neither loaded nor saved any more. Serve other files "
                        "under another name, path and lora_int_id",
                        lora_request.lora_name,
                        lora_request.lora_int_id,
                    )
                    self._served[served_as] = ""
        while len(self._served) > _MAX_NAMES:
            del self._served[next(iter(self._served))]
        return is_constant


def _signature(path: str) -> Signature:
    """What changes when the files of an adapter do; empty where there is no such folder."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            files = [(entry.name, entry.stat()) for entry in entries if _counts(entry.name)]
    except OSError:
        return ()
    return tuple(
        sorted((name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in files)
    )


def _counts(name: str) -> bool:
    return name == _CONFIG_NAME or os.path.splitext(name)[1] in WEIGHT_SUFFIXES


def _digest(path: str, signature: Signature) -> str:
    folder = Path(path).expanduser()
    names = [name for name, *_ in signature]
    if _CONFIG_NAME not in names or len(names) < 2:
        logger.warning("%s holds no adapter: its requests are not stored", folder)
        return ""
    try:
        digest = adapter_digest(folder, names)
    except Exception as error:
        logger.warning("adapter %s can't be read, its requests are not stored: %s", folder, error)
        return ""
    # Files that change while they are read are neither the ones before nor those after.
    return digest if _signature(path) == signature else ""
