"""Staging memory: whatever a store says of it, none is lost, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvformat.errors import Reason, TransferError
from kvformat.stores.memory import MemoryStore
from kvformat.stores.protocol import Code
from kvformat_connector.staging import Staging
from kvformat_connector.transfer import Lane

NBYTES = 64 << 10


class PickyStore(MemoryStore):
    """A store that has to be told of memory; ``answer`` is what it says."""

    def __init__(self) -> None:
        super().__init__("memory://")
        self.answer: Callable[[], int] = lambda: Code.OK
        self.registered: list[int] = []

    def register_memory(self, address: int, nbytes: int) -> int:
        code = self.answer()
        self.registered.append(address)
        return code

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return Code.OK


def refuse() -> int:
    return Code.NO_SPACE


def fail() -> int:
    raise MemoryError


@pytest.mark.parametrize(("answer", "error"), [(refuse, TransferError), (fail, MemoryError)])
def test_memory_that_the_store_cannot_use_is_not_counted(
    answer: Callable[[], int], error: type[Exception]
) -> None:
    """A store that refuses new memory, or raises, costs that stage and no room for later ones."""
    store = PickyStore()
    staging = Staging(store, NBYTES, Lane("register"), 5.0)
    store.answer = answer
    for _ in range(3):
        with pytest.raises(error):
            staging.take(1, NBYTES, 0.0)
        assert staging.num_taken_nbytes == 0
    store.answer = lambda: Code.OK
    stage = staging.take(1, NBYTES, 0.0)
    assert stage is not None
    staging.release(stage)
    assert staging.wait_idle(0.0)


def test_a_store_that_hangs_over_new_memory_is_not_waited_for() -> None:
    """A call that tells the store of memory and doesn't return is given up after the deadline, the
    next ones at once; when it returns, the store forgets that memory and can be told of other."""
    store = PickyStore()
    staging = Staging(store, 4 * NBYTES, Lane("register"), 0.05)
    opened = threading.Event()
    store.answer = lambda: Code.OK if opened.wait(60) else Code.INTERNAL
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            staging.take(1, NBYTES, 0.0)
        assert caught.value.reason is Reason.TRANSFER_FAILED
        assert staging.num_taken_nbytes == 0
    assert store.registered == []  # the second one never came to the store
    opened.set()
    deadline = time.monotonic() + 10
    stage = None
    while stage is None:
        assert time.monotonic() < deadline
        try:
            stage = staging.take(1, NBYTES, 0.0)
        except TransferError:
            time.sleep(0.005)
    assert store.registered == [stage.address]
