"""Threads that do a step's work in order, and calls to a store that are watched.

A lane runs its jobs one after the other. A channel is a lane that calls the store: the engine's
thread sees how long the call in flight has lasted, and leaves a channel behind whose call doesn't
come back. Range calls can't be cancelled, so the thread stays in it; it ends when the call does.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from typing import Any, Final, TypeVar

from kvformat.stores.protocol import Code
from kvformat_connector.answers import ask

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Job = tuple[Future[Any] | None, Callable[..., object], tuple[Any, ...]]

#: How often a waiting thread looks again whether a call in flight is too old.
_LOOK_AGAIN_S: Final = 0.05


class Lane:
    """One thread, started with its first job. A daemon: a call that never returns must not keep
    the process alive."""

    def __init__(self, name: str) -> None:
        self._name = f"kvformat-{name}"
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_submitted = 0
        self._num_run = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a job after all jobs before it."""
        future: Future[T] = Future()
        self._put((future, job, arguments))
        return future

    def post(self, job: Callable[..., object], *arguments: Any) -> None:
        """The same for a job that nobody waits for."""
        self._put((None, job, arguments))

    def _put(self, job: _Job) -> None:
        with self._lock:
            self._num_submitted += 1
            self._jobs.put(job)
            if self._is_closed:
                self._jobs.put(None)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted has run."""
        return self._num_run == self._num_submitted

    def drain(self) -> None:
        """Wait until everything that was submitted has run."""
        self.submit(int).result()

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread when what has been submitted is done, and wait for that so long. What is
        submitted later runs all the same, on a thread that ends after it."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
            if thread is not None:
                self._jobs.put(None)
        if thread is not None:
            thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            queued = self._jobs.get()
            if queued is None:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue  # another end stands behind what was submitted meanwhile
            future, job, arguments = queued
            try:
                result = job(*arguments)
            except BaseException as error:
                if future is None:
                    logger.exception("%s: a job failed", self._name)
                else:  # whoever waits for the future gets it
                    future.set_exception(error)
            else:
                if future is not None:
                    future.set_result(result)
            self._num_run += 1


class Channel:
    """A lane whose jobs call a store through :meth:`ask`."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        late_after_s: float = math.inf,
    ) -> None:
        self._lane = Lane(name)
        self._clock = clock
        self._called_at: float | None = None
        #: How long each call took that took longer than ``late_after_s``, all together.
        self.late_s = 0.0
        self._late_after_s = late_after_s
        self._is_abandoned = False

    def submit(self, job: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run a job after all jobs before it."""
        return self._lane.submit(job, *arguments)

    def post(self, job: Callable[..., object], *arguments: Any) -> None:
        """The same for a job that nobody waits for."""
        self._lane.post(job, *arguments)

    def ask(self, call: Callable[..., list[int]], keys: Sequence[str], *rest: Any) -> list[int]:
        """A code per key, whatever the store does; ``UNAVAILABLE`` on an abandoned channel."""
        if self._is_abandoned:
            return [Code.UNAVAILABLE] * len(keys)
        return self.ask_anyway(call, keys, *rest)

    def ask_anyway(
        self, call: Callable[..., list[int]], keys: Sequence[str], *rest: Any
    ) -> list[int]:
        """The same on an abandoned channel too: for ending sessions."""
        called_at = self._called_at = self._clock()
        try:
            return ask(call, keys, *rest)
        finally:
            self._called_at = None
            took = self._clock() - called_at
            if took > self._late_after_s:
                self.late_s += took

    @property
    def call_age_s(self) -> float:
        """For how long the call in flight has lasted; 0 where there is none."""
        called_at = self._called_at
        return 0.0 if called_at is None else self._clock() - called_at

    @property
    def is_abandoned(self) -> bool:
        """Whether the engine has stopped waiting for this channel."""
        return self._is_abandoned

    def wait(self, future: Future[Any], deadline_s: float) -> bool:
        """Wait for a job. False as soon as one call on the channel takes longer than
        ``deadline_s``; then the channel is to be abandoned."""
        while not future.done():
            left = deadline_s - self.call_age_s
            if left <= 0 and not future.done():
                return False
            # What the job raised is for whoever asks the future.
            with suppress(TimeoutError):
                future.exception(min(max(left, 0.001), _LOOK_AGAIN_S))
        return True

    @property
    def is_idle(self) -> bool:
        """Whether everything that was submitted has run."""
        return self._lane.is_idle

    def abandon(self) -> None:
        """Wait for it no more. When the call in flight returns, what is queued runs without the
        store, but for ending sessions."""
        self._is_abandoned = True

    def close(self, timeout_s: float) -> None:
        """End the thread when what has been submitted is done, and wait for that so long."""
        self._lane.close(timeout_s)


class Channels:
    """The channel in use of one purpose, and those left behind in a call that hangs."""

    def __init__(self, name: str, late_after_s: float = math.inf) -> None:
        self._name = name
        self._late_after_s = late_after_s
        self._left_behind: list[Channel] = []
        self.current = self._next()

    def leave(self, channel: Channel) -> None:
        """Abandon a channel and go on with a new one."""
        channel.abandon()
        if channel is self.current:
            self._left_behind.append(channel)
            self.current = self._next()

    @property
    def num_left_behind(self) -> int:
        """Channels whose call has not come back yet."""
        if self._left_behind:
            for channel in [each for each in self._left_behind if each.is_idle]:
                channel.close(0.0)
                self._left_behind.remove(channel)
        return len(self._left_behind)

    def close(self, timeout_s: float) -> None:
        """End the thread in use when it is done; those that hang end with the process."""
        self.current.close(timeout_s)

    def _next(self) -> Channel:
        return Channel(self._name, late_after_s=self._late_after_s)
