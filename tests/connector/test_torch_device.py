"""Copies between host memory and memory behind torch tensors, with a device that works late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvformat.errors import PlanError, Reason
from kvformat.placement import Region
from kvformat_connector.device import HostDevice, Piece
from kvformat_connector.torchdevice import TorchDevice

NUM_BLOCKS = 6


class LateDevice:
    """torch's module of a device, as far as it is used: events, streams and who used them."""

    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.streams: list[object] = []
        self.synchronized = 0
        self.prepared: list[int] = []

    def Event(self) -> Any:  # noqa: N802
        device = self

        class Recorded:
            def record(self, stream: object) -> None:
                self.before = len(device.pending)

            def synchronize(self) -> None:
                for index in range(self.before):
                    device.pending[index]()

        return Recorded()

    def Stream(self) -> Any:  # noqa: N802
        device = self

        class Copies:
            def synchronize(self) -> None:
                device.synchronized += 1

        stream = Copies()
        self.streams.append(stream)
        return stream

    def current_stream(self) -> object:
        return "compute"

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        assert stream in self.streams, "copies must not wait for what the model computes"
        yield

    def set_device(self, device: object) -> None:
        self.prepared.append(threading.get_ident())


def make(tensor: torch.Tensor) -> tuple[TorchDevice, LateDevice, list[Piece]]:
    """A device over ``[num_blocks, 2, 40]`` bytes, of which pieces take 24 and 40 of a block."""
    module = LateDevice()
    base = tensor.data_ptr()
    pieces = [Piece(base + 8, 80, NUM_BLOCKS, 0, 24), Piece(base + 40, 80, NUM_BLOCKS, 24, 40)]
    return TorchDevice([tensor, tensor[1:]], module), module, pieces


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.arange(NUM_BLOCKS * 80, dtype=torch.int64).to(torch.uint8).reshape(-1, 2, 40)


def test_it_copies_what_a_host_device_copies(tensor: torch.Tensor) -> None:
    """Blocks in any order, each piece to its place in the row, and back: byte for byte what the
    device for host memory does."""
    device, module, pieces = make(tensor)
    blocks = np.array([4, 0, 5], np.int64)
    ours, theirs = np.zeros((3, 64), np.uint8), np.zeros((3, 64), np.uint8)
    host = HostDevice([Region(tensor.data_ptr(), tensor.numel())])
    device.gather(pieces, blocks, ours)
    host.gather(pieces, blocks, theirs)
    assert ours.tobytes() == theirs.tobytes() != bytes(ours.nbytes)
    assert module.synchronized == 1

    before = tensor.clone()
    stage = np.random.default_rng(1).integers(0, 256, (4, 64), np.uint8)
    device.scatter(pieces, blocks, stage, np.array([3, 1, 0], np.int64))
    assert module.synchronized == 2
    expected = before.reshape(NUM_BLOCKS, 80)
    for block, row in zip(blocks, [3, 1, 0], strict=True):
        expected[block, 8:32] = torch.from_numpy(stage[row, :24])
        expected[block, 40:80] = torch.from_numpy(stage[row, 24:])
    assert torch.equal(tensor.reshape(NUM_BLOCKS, 80), expected)


def test_a_mark_stands_for_the_work_before_it(tensor: torch.Tensor) -> None:
    """Waiting for it does what was given before, and nothing that was given after."""
    device, module, _ = make(tensor)
    done: list[str] = []
    module.pending.append(lambda: done.append("written"))
    mark = device.mark()
    module.pending.append(lambda: done.append("next layer"))
    assert done == []
    device.wait(mark)
    assert done == ["written"]


def test_each_thread_copies_on_its_own_stream(tensor: torch.Tensor) -> None:
    """A stream and a current device belong to a thread: both lanes make theirs once."""
    device, module, pieces = make(tensor)

    def copy() -> None:
        for _ in range(2):
            device.gather(pieces, np.array([1], np.int64), np.zeros((1, 64), np.uint8))

    for _ in range(2):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    assert len(module.streams) == len(module.prepared) == 2


def test_nothing_outside_of_the_cache_is_touched(tensor: torch.Tensor) -> None:
    """A block id, or a piece, that the memory doesn't have is an error and copies nothing."""
    device, _, pieces = make(tensor)
    before = tensor.clone()
    stage = np.full((1, 64), 7, np.uint8)
    beyond = [Piece(tensor.data_ptr() + 60, 80, NUM_BLOCKS, 0, 24)]
    for bad_pieces, block in ((pieces, NUM_BLOCKS), (pieces, -1), (beyond, 0)):
        with pytest.raises(PlanError) as caught:
            device.scatter(bad_pieces, np.array([block], np.int64), stage, None)
        assert caught.value.reason is Reason.PLAN_BOUNDS
    assert torch.equal(tensor, before)
