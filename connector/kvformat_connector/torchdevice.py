"""Cache memory that only torch can reach, as an NPU's: copies go through the device's own stream.

What the engine gives to its stream is done later, so a save waits for an event that was recorded
when the layer had been given, and a load for one that was recorded before it began: an earlier step
may still be writing to blocks that the engine has dealt out again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvformat.errors import PlanError, Reason
from kvformat.layout import Layout
from kvformat.placement import Placement
from kvformat_connector.device import Bytes, Device, HostDevice, Indices, Piece, check_bounds
from kvformat_connector.engine.npu import NPU_PACKING


def device_for(layout: Layout, placement: Placement, kv_caches: Mapping[str, Any]) -> Device:
    """The device of registered KV tensors: what they are made of, the layout's packing tells."""
    if layout.identity.config.get("kv_packing") != NPU_PACKING:
        return HostDevice(placement.regions)
    # Needs a CANN toolkit, and puts torch.npu in place.
    import torch_npu

    tensors = [
        tensor
        for value in kv_caches.values()
        for tensor in (value if isinstance(value, list | tuple) else [value])
    ]
    return TorchDevice(tensors, torch_npu.npu)


class TorchDevice:
    """Memory behind torch tensors.

    Args:
        tensors: all that hold KV; what shares a storage is one memory.
        module: torch's module of the device (``torch.npu``): streams and events.
    """

    computes_on_host = False

    def __init__(self, tensors: Sequence[Any], module: Any) -> None:
        self._module = module
        self._device = tensors[0].device
        self._memories = _memories(tensors)
        self._views: dict[Piece, Any] = {}
        self._thread = threading.local()

    def mark(self) -> object:
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    def wait(self, mark: object) -> None:
        mark.synchronize()  # type: ignore[attr-defined]

    def gather(self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes) -> None:
        import torch

        stream = self._stream()
        for piece in pieces:
            check_bounds(piece, block_ids)
        with self._module.stream(stream):
            rows = torch.from_numpy(block_ids).to(self._device)
            parts = [(piece, self._view(piece)[rows].to("cpu")) for piece in pieces]
        stream.synchronize()
        for piece, part in parts:
            stage[:, piece.position : piece.position + piece.nbytes] = part.numpy()

    def scatter(
        self, pieces: Sequence[Piece], block_ids: Indices, stage: Bytes, rows: Indices | None
    ) -> None:
        import torch

        stream = self._stream()
        for piece in pieces:
            check_bounds(piece, block_ids)
        with self._module.stream(stream):
            targets = torch.from_numpy(block_ids).to(self._device)
            for piece in pieces:
                part = stage[:, piece.position : piece.position + piece.nbytes]
                chosen = np.ascontiguousarray(part if rows is None else part[rows])
                self._view(piece)[targets] = torch.from_numpy(chosen).to(self._device)
        # The engine's stream is given its next work only after this has returned.
        stream.synchronize()

    def _stream(self) -> Any:
        """This thread's stream: copies wait for no computation, and no computation for them."""
        stream = getattr(self._thread, "stream", None)
        if stream is None:
            self._module.set_device(self._device)
            stream = self._thread.stream = self._module.Stream()
        return stream

    def _view(self, piece: Piece) -> Any:
        """``[num_blocks, nbytes]``: the piece in every block."""
        found = self._views.get(piece)
        if found is None:
            found = self._views[piece] = self._make_view(piece)
        return found

    def _make_view(self, piece: Piece) -> Any:
        extent = piece.block_stride * (piece.num_blocks - 1) + piece.nbytes
        for base, memory in self._memories.items():
            start = piece.address - base
            if start >= 0 and start + extent <= memory.numel():
                shape, strides = (piece.num_blocks, piece.nbytes), (piece.block_stride, 1)
                return memory.as_strided(shape, strides, start)
        raise PlanError(
            Reason.PLAN_BOUNDS, f"{extent} bytes at {piece.address:#x} are outside the cache memory"
        )


def _memories(tensors: Sequence[Any]) -> dict[int, Any]:
    """Each storage as bytes, by its address."""
    import torch

    memories: dict[int, Any] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in memories:
            memories[storage.data_ptr()] = torch.empty(
                0, dtype=torch.uint8, device=tensor.device
            ).set_(storage)
    return memories
