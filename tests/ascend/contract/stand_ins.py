"""What vllm-ascend needs of an NPU, for a machine without one: ``torch_npu`` and ``torch.npu``.

Work that is given to a stream stays undone until somebody waits for it, as it may on a device. A
save that doesn't wait for its layer's event therefore reads what was there before.

Must be installed before vLLM and vllm-ascend are imported.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

#: The unpacked source distribution of vllm-ascend, as it came.
SOURCES = Path(os.environ["KVFORMAT_VLLM_ASCEND"]).resolve()


class Stream:
    """Work in the order in which it was given."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self._num_done = 0
        self._lock = threading.Lock()

    def give(self, work: Callable[[], None]) -> None:
        """Put work behind all work given before."""
        self._work.append(work)

    @property
    def num_given(self) -> int:
        """How much work has been given so far."""
        return len(self._work)

    def do(self, num: int) -> None:
        """Do the first ``num`` pieces of work, those that aren't done yet."""
        with self._lock:
            while self._num_done < num:
                self._num_done += 1
                self._work[self._num_done - 1]()

    def synchronize(self) -> None:
        """Do all of it."""
        self.do(self.num_given)


#: The stream that the model computes on.
COMPUTE = Stream()


class Event:
    """A point in the work of a stream."""

    num_recorded = 0

    def __init__(self) -> None:
        self._stream = COMPUTE
        self._at = 0

    def record(self, stream: Stream | None = None) -> None:
        Event.num_recorded += 1
        self._stream = stream or COMPUTE
        self._at = self._stream.num_given

    def synchronize(self) -> None:
        self._stream.do(self._at)


@contextmanager
def _on_stream(stream: Stream) -> Iterator[None]:
    # What torch does on a CPU is done at once, whatever the stream.
    yield


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def install() -> None:
    """Put the stand-ins where imports find them."""
    import torch

    npu = _module(
        "torch.npu",
        Stream=Stream,
        Event=Event,
        current_stream=lambda: COMPUTE,
        stream=_on_stream,
        set_device=lambda device: None,
        current_device=lambda: 0,
        # What libraries ask before they use a device of their own accord.
        is_available=lambda: False,
    )
    torch.npu = npu  # type: ignore[attr-defined]
    _module("torch_npu", npu=npu, __path__=[])
    # Written by vllm-ascend's build; says which chip it was built for.
    _module("vllm_ascend._build_info", __device_type__="A2")
