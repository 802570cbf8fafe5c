"""Which LoRA adapter a request is computed with, told by content.

The engine knows an adapter by a number, and its block hashes, and so its own prefix cache, know it
by name. So an adapter is told by its files only as long as neither a number nor a name has stood
for other files in this engine: after that nobody can tell which of them a block was computed with.

What is told here is what the files are when a request comes. What the engine has loaded only the
workers know (``engine.adapterloads``): a step whose request was given another identity loads and
saves nothing, and the scheduler is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from kvformat_connector.adapterfiles import AdapterFiles
from kvformat_connector.transfer import Lane

logger = logging.getLogger(__name__)

#: A request waits at most so long for the digest of its adapter; then it is served without.
_LIMIT_S: Final = 2.0
#: Numbers and names that an engine knows. It forgets none, for one that has stood for several
#: adapters must be remembered; later ones aren't pooled.
_MAX_NAMES: Final = 1 << 16


class _Look(msgspec.Struct, frozen=True):
    """A request's look at the files of its adapter."""

    digest: Future[str]
    until: float


class Adapters:
    """The adapters that an engine has met. Its thread calls and waits for nothing; a lane reads
    files."""

    def __init__(
        self,
        settings: str = "",
        *,
        hash_has_path: bool = False,
        can_watch: bool = True,
        limit_s: float = _LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            settings: the engine's, that change what an adapter computes.
            hash_has_path: whether block hashes hold an adapter's path as well as its name.
            can_watch: whether workers know what the engine loads; else no adapter can be told.
        """
        self._settings = settings
        self._hash_has_path = hash_has_path
        self._can_watch = can_watch
        self._limit_s = limit_s
        self._clock = clock
        self._lane = Lane("adapters")
        self._files = AdapterFiles()
        self._looks: dict[str, _Look] = {}
        #: A look that somebody waited for in vain.
        self._stuck: Future[str] | None = None
        #: By number, and by what block hashes hold: the identity, empty where there were several.
        self._served: dict[object, str] = {}
        self._names: dict[int, tuple[str, str]] = {}

    def identity(self, request_id: str, lora_request: Any) -> str | None:
        """The same text on every node exactly where the same adapter is used in the same way; empty
        where nobody can tell, None where it isn't known yet.

        Files are read once for a request, until it is forgotten.
        """
        if not self._can_watch:
            return ""
        look = self._looks.get(request_id)
        if look is None:
            look = self._looks[request_id] = self._start(lora_request.lora_path)
        if not look.digest.done():
            if self._clock() < look.until:
                return None
            if self._stuck is None or self._stuck.done():
                self._stuck = look.digest
                logger.warning(
                    "the files of adapter %r can't be read within %g s: its requests are served "
                    "without the store meanwhile",
                    lora_request.lora_name,
                    self._limit_s,
                )
            return ""
        digest = look.digest.result()
        if not digest:
            return ""
        is_3d = getattr(lora_request, "is_3d_lora_weight", False)
        identity = f"{digest}{' is_3d_lora_weight=True' * is_3d}{self._settings}"
        return identity if self._is_constant(lora_request, identity) else ""

    def forget(self, request_id: str) -> None:
        """The request is over, or its next question is another one."""
        self._looks.pop(request_id, None)

    def distrust(self, number: int) -> None:
        """A worker has loaded other files under this number than those that were told."""
        name = self._names.get(number)
        if self._served.get(number) != "":
            _warn(name and name[0], number)
        self._served[number] = ""
        if name is not None:
            self._served[name] = ""

    def close(self) -> None:
        """End the thread, when it has read what it reads."""
        self._lane.close(0.0)

    def _start(self, path: str) -> _Look:
        if self._stuck is not None and not self._stuck.done():
            # A disk that is gone keeps the lane: nothing is queued behind it.
            return _Look(Future(), self._clock())
        return _Look(self._lane.submit(self._files.digest, path), self._clock() + self._limit_s)

    def _is_constant(self, lora_request: Any, identity: str) -> bool:
        number = lora_request.lora_int_id
        path = lora_request.lora_path if self._hash_has_path else ""
        name = lora_request.lora_name, path
        is_known = number in self._served and name in self._served
        if not is_known and len(self._served) >= _MAX_NAMES:
            return False
        self._names[number] = name
        is_constant = True
        for served_as in (number, name):
            known = self._served.setdefault(served_as, identity)
            if known != identity:
                is_constant = False
                if known:
                    _warn(lora_request.lora_name, number)
                    self._served[served_as] = ""
        return is_constant


def _warn(name: str | None, number: int) -> None:
    logger.warning(
        "adapter %r (lora_int_id %d) is not what it was when it was first loaded or used: its "
        "requests are neither loaded nor saved any more. Serve other files under another name, "
        "path and lora_int_id",
        name,
        number,
    )
