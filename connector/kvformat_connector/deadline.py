"""A call with a time limit, for what has none of its own and can't be cancelled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from kvformat.errors import Reason, StoreUnavailableError
from kvformat.stores.protocol import Store
from kvformat_connector.transfer import Lane

logger = logging.getLogger(__name__)

T = TypeVar("T")


def within(
    limit_s: float,
    what: str,
    call: Callable[[], T],
    drop: Callable[[T], object] | None = None,
) -> T:
    """``call()``, on a thread of its own. It must be one that lets other threads run.

    Raises what it raises, and ``StoreUnavailableError`` where it takes longer than ``limit_s``; it
    is left behind then, and what it answers in the end is given to ``drop``.
    """
    lane = Lane("start")
    answer = lane.submit(call)
    wait([answer], limit_s)
    lane.close(0.0)
    if answer.done():
        return answer.result()

    def drop_late(late: Future[T]) -> None:
        if drop is not None and late.exception() is None:
            drop(late.result())

    answer.add_done_callback(drop_late)
    raise StoreUnavailableError(
        Reason.STORE_UNAVAILABLE, f"option store: {what} didn't end within {limit_s:g} s"
    )


def close_within(limit_s: float, store: Store) -> None:
    """Close a store, but leave it behind where it takes longer: it may wait for a call in it that
    nobody else waits for any more."""
    try:
        within(limit_s, f"closing {store.uri!r}", store.close)
    except Exception as error:  # the process ends all the same
        logger.warning("%s", error)
