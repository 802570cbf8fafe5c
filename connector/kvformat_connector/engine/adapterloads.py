"""Which files the engine's own loader read for a LoRA adapter.

An engine loads an adapter when it is told to, or when a request needs it, and again when it had no
room for it meanwhile. Files may change in between, so only whoever watches it load knows what it
computes with.

Source: vllm/lora/worker_manager.py (``WorkerLoRAManager._load_adapter``: every load, also
vllm-ascend's).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from kvformat_connector.adapterfiles import AdapterFiles, signature

T = TypeVar("T")

_METHOD: Final = "_load_adapter"
_MAX_KEPT: Final = 1 << 16


class LoadedAdapters:
    """Digests of the adapters that a worker has loaded, by the engine's number. The engine's
    thread calls."""

    def __init__(self) -> None:
        self._files = AdapterFiles()
        self._digests: dict[int, str] = {}
        #: Whether there were more adapters than are remembered, and none is ever forgotten.
        self._is_full = False

    def load(self, number: int, path: str, load: Callable[[], T]) -> T:
        """Load an adapter and remember what it was."""
        before = signature(path)
        loaded = load()
        digest = self._files.digest(path)
        if signature(path) != before:
            digest = ""
        # The engine's prefix cache knows an adapter by name: blocks of the one before may be left.
        known = self._digests.get(number, digest)
        if number in self._digests or len(self._digests) < _MAX_KEPT:
            self._digests[number] = digest if digest == known else ""
        else:
            self._is_full = True
        return loaded

    def digest(self, number: int) -> str | None:
        """What a number has always stood for; empty where that isn't certain, None where it has
        not been loaded."""
        return self._digests.get(number, "" if self._is_full else None)


def can_watch_adapters() -> bool:
    """Whether this engine loads adapters where it can be watched."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager
    except ImportError:
        return False
    return hasattr(WorkerLoRAManager, _METHOD)


def watch_adapters(loaded: LoadedAdapters) -> None:
    """From now on, tell of every adapter that this process loads."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    load = getattr(WorkerLoRAManager, _METHOD)
    watcher = weakref.ref(loaded)

    @functools.wraps(load)
    def watched(manager: Any, lora_request: Any) -> Any:
        told = watcher()
        if told is None:  # of an engine that is gone
            return load(manager, lora_request)
        number, path = lora_request.lora_int_id, lora_request.lora_path
        return told.load(number, path, lambda: load(manager, lora_request))

    setattr(WorkerLoRAManager, _METHOD, watched)
