"""Threads that do jobs in order: none of them is lost, and none of the threads stays."""

from __future__ import annotations

import threading
import time

from kvformat_connector.transfer import Lane


def test_what_is_submitted_after_the_end_runs_and_leaves_no_thread() -> None:
    """Whoever closes a lane that is idle can't know that nobody is about to use it."""
    lane = Lane("closed")
    assert lane.submit(int, "1").result(10) == 1
    lane.close(10)
    assert lane.submit(int, "2").result(10) == 2
    first, done = threading.Event(), []
    lane.post(first.wait, 10)
    lane.close(0.0)
    for number in range(3):
        lane.post(done.append, number)
    first.set()
    assert lane.submit(list, done).result(10) == [0, 1, 2]
    deadline = time.monotonic() + 10
    while any(thread.name == "kvformat-closed" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert lane.is_idle
