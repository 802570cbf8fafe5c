"""A store whose answers a test can bend, call by call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvformat.stores.memory import MemoryStore

Bend = Callable[[int, Sequence[str], list[int]], list[int]]


class FaultyStore:
    """A memory store; ``bend[method](call_number, keys, codes)`` replaces the answer of a call.

    ``calls`` counts calls by method, ``sizes`` lists how many keys each had. ``before[method]`` is
    called with the keys before the call: it may wait, or raise.
    """

    def __init__(self, uri: str = "memory://") -> None:
        self.inner = MemoryStore(uri)
        self.uri = uri
        self.bend: dict[str, Bend] = {}
        self.before: dict[str, Callable[[Sequence[str]], object]] = {}
        self.calls: Counter[str] = Counter()
        self.sizes: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if not callable(method) or name in ("get", "put", "list", "close", "object_nbytes"):
            return method

        def call(keys: Sequence[str], *arguments: Any) -> list[int]:
            number = self.calls[name]
            self.calls[name] += 1
            self.sizes.setdefault(name, []).append(len(keys))
            if name in self.before:
                self.before[name](keys)
            codes = method(keys, *arguments)
            return self.bend[name](number, keys, codes) if name in self.bend else codes

        return method if name.endswith("register_memory") else call

    @property
    def num_open_sessions(self) -> int:
        """Put and get sessions that somebody still has open."""
        return len(self.inner._writes) + len(self.inner._reads)
