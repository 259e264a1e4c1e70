"""Calls functions of users in the main thread of their process, and ends calls that are to end.

Only the main thread can set signal handlers and timers, so `signal.alarm` and math-verify's `parse` fail elsewhere. A
replica on a GPU or the CPU is the main thread of its process. Replicas of XLA are other threads, for which the main
thread waits in Python (worker.py); SIGUSR2 makes it run their calls, one after the other. During a call SIGUSR2 raises
`CallEnded` in the function, also while it sleeps or waits for the network.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tpu_kit.distributed.child_process import processor_times

T = TypeVar("T")

_LOOK = 0.2  # seconds between two looks at what ends a call
_BEAT = 1.0  # seconds between two readings of the processor time; a tenth of what a call may wait where that is less
_BUSY = 0.03  # processor seconds in a second that are more than a process needs that waits


class CallEnded(BaseException):
    """A call was ended. No Exception, which functions of users catch.

    Attributes:
        why: "stop", or the text of why it hangs.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Call(Generic[T]):
    """A function, and how it ended."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.started, self.over = False, threading.Event()
        self.end: CallEnded | None = None  # to raise in the function
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Calls the function, unless the call was ended before."""
        self.started = True
        try:
            if self.end is None:
                self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.over.set()

    def result(self) -> T:
        """Returns what the function returned, or raises its error; an ended call has no result, whatever it caught."""
        if error := self.end or self._error:
            raise error
        return self._value  # type: ignore[return-value]


class _Handler:
    """The handler of SIGUSR2, in the main thread: it raises in the function that runs there, if the call is to end."""

    def __init__(self) -> None:
        self._running: _Call[Any] | None = None

    def run(self, job: _Call[Any]) -> None:
        """Calls the function of a job, which a signal can end."""
        self._running = job
        try:
            job.run()
        except CallEnded:  # raised between the end of the function and the next lines
            pass
        finally:
            self._running = None

    def __call__(self, *_: object) -> None:
        if self._running is None:
            self._idle()
        elif self._running.end is not None and not self._running.over.is_set():
            raise self._running.end

    def _idle(self) -> None:
        """Is called where no function runs."""


class _Server(_Handler):
    """Runs the calls of other threads, one after the other.

    Attributes:
        calls: those that wait.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()

    def _idle(self) -> None:
        hangs = None
        while not self.calls.empty():
            job = self.calls.get()
            job.end = job.end or hangs  # the launch would be ended while the next one hangs, too
            self.run(job)
            hangs = job.end if job.end and job.end.why != "stop" else hangs


def serve() -> None:
    """Makes the main thread, which calls this once and then only waits, run the calls of other threads."""
    signal.signal(signal.SIGUSR2, _Server())


def call(
    function: Callable[[], T], stop: Callable[[], bool] = lambda: False, patience: float | None = None, *,
    aside: bool = False,
) -> T:  # fmt: skip
    """Calls a function in the main thread, or in this one if the main thread runs no calls, and returns its result.

    Args:
        function: of a user.
        stop: asked 5 times a second; once it returns True, the call is ended.
        patience: seconds without processor time of this process and its children after which the call is ended.
        aside: call it in a thread of its own instead, which is abandoned when the call is ended.

    Raises:
        CallEnded: by `stop` or `patience`.
        BaseException: of the function.
    """
    job, main, handler = _Call(function), threading.main_thread(), signal.getsignal(signal.SIGUSR2)
    if aside:
        threading.Thread(target=job.run, name="tpu_kit call", daemon=True).start()
        _watch(job, stop, patience, interrupt=lambda: job.over.set())
    elif threading.current_thread() is main:
        _call_here(job, stop, patience)
    elif isinstance(handler, _Server):
        handler.calls.put(job)
        _wake()
        _watch(job, stop, patience, interrupt=_wake)
    else:
        job.run()
    return job.result()


def _wake() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGUSR2)


def _call_here(job: _Call[Any], stop: Callable[[], bool], patience: float | None) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    handler = before if isinstance(before, _Handler) else _Handler()
    signal.signal(signal.SIGUSR2, handler)
    watcher = threading.Thread(target=_watch, args=(job, stop, patience, _wake), name="tpu_kit call", daemon=True)
    watcher.start()
    try:
        handler.run(job)
    finally:
        job.over.set()
        watcher.join()  # its signal would end the process once the handler is the system's
        signal.signal(signal.SIGUSR2, before or signal.SIG_DFL)


def _watch(job: _Call[Any], stop: Callable[[], bool], patience: float | None, interrupt: Callable[[], None]) -> None:
    """Waits for the end of a call; interrupts one that is to end again and again, as it may catch what is raised."""
    used = seen = read_at = 0.0
    beat = min(_BEAT, (patience or math.inf) / 10)
    while not job.over.wait(_LOOK):
        now = time.monotonic()
        if not job.started or not seen:
            seen = read_at = now
        if patience is not None and job.end is None and now - read_at > beat:
            # Without the time that the reading itself takes.
            before, used = used, sum(processor_times(os.getpid()).values()) - time.thread_time()
            if used - before > _BUSY * (now - read_at):
                seen = now
            read_at = now
            if now - seen > patience:
                job.end = CallEnded(f"has returned nothing and used no processor time for {now - seen:.0f} s")
        if job.end is None and stop():
            job.end = CallEnded("stop")
        if job.end is not None:
            interrupt()
