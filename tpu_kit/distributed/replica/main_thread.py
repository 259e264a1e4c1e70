"""Calls user functions in the main thread of a process, and ends calls that hang or must stop.

Only the main thread can set signal handlers and timers, so `signal.alarm` and math-verify's `parse` fail elsewhere. A
replica on a GPU or the CPU is the main thread of its process. XLA replicas are other threads, while the main thread
waits in Python (worker.py); SIGUSR2 makes it run their calls in order. During a call SIGUSR2 raises `CallEnded` in the
function, also while it sleeps or waits for the network.
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

_LOOK = 0.2  # seconds between two checks whether a call must end
_BEAT = 1.0  # seconds between two reads of the processor time; a tenth of `patience` if that is less
_BUSY = 0.03  # seconds of processor time per second; a process that waits uses less


class CallEnded(BaseException):
    """Raised in a function whose call is ended. Not an Exception, because user functions may catch these.

    Attributes:
        why: "stop", or a text that describes the hang.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class _Call(Generic[T]):
    """A call of a function and its outcome."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.started, self.over = False, threading.Event()
        self.end: CallEnded | None = None  # to raise in the function
        self._value: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Calls the function, unless the call is already ended; keeps its outcome for `result`, and never raises."""
        self.started = True
        try:
            if self.end is None:
                self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.over.set()

    def result(self) -> T:
        """Returns the function's result or raises its error; an ended call raises CallEnded even if it returned."""
        if error := self.end or self._error:
            raise error
        return self._value  # type: ignore[return-value]


class _Handler:
    """The handler of SIGUSR2 in the main thread: raises `CallEnded` in the running function if its call must end."""

    def __init__(self) -> None:
        self._running: _Call[Any] | None = None

    def run(self, job: _Call[Any]) -> None:
        """Calls the function of a job, which a signal can end; the job keeps the outcome."""
        self._running = job
        try:
            job.run()
        except CallEnded:  # raised after the end of the function
            pass
        finally:
            self._running = None

    def __call__(self, *_: object) -> None:
        if self._running is None:
            self._idle()
        elif self._running.end is not None and not self._running.over.is_set():
            raise self._running.end

    def _idle(self) -> None:
        """Handles a signal while no function runs."""


class _Server(_Handler):
    """Runs the calls of other threads in order.

    Attributes:
        calls: the waiting calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()

    def _idle(self) -> None:
        """Runs the waiting calls; after a call that hung, ends the other waiting calls without running them."""
        hangs = None
        while not self.calls.empty():
            job = self.calls.get()
            job.end = job.end or hangs  # after a hang, waiting calls end too: a second hang would end the launch
            self.run(job)
            hangs = job.end if job.end and job.end.why != "stop" else hangs


def serve() -> None:
    """Makes the main thread run the calls of other threads; it calls this once and then only waits."""
    signal.signal(signal.SIGUSR2, _Server())


def call(
    function: Callable[[], T], stop: Callable[[], bool] = lambda: False, patience: float | None = None, *,
    aside: bool = False,
) -> T:  # fmt: skip
    """Calls a function in the main thread, or with `aside` in a new thread; waits for it and returns its result.

    If a thread other than the main thread calls this without `aside`, and the main thread does not `serve`, the
    function runs in the calling thread. `stop` and `patience` then have no effect.

    Args:
        function: the user's function. When its call is ended in the main thread, it gets CallEnded at any place.
        stop: called 5 times a second in another thread than the function; the call is ended once it returns True.
        patience: seconds after which the call is ended if this process and its children use no processor time; None
            for no limit.
        aside: whether to call the function in a new thread, which runs on after the call is ended.

    Raises:
        CallEnded: `stop` or `patience` has ended the call, or a call before it hung while this call waited.
        BaseException: the function's error.
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
    """Sends SIGUSR2 to the main thread."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGUSR2)


def _call_here(job: _Call[Any], stop: Callable[[], bool], patience: float | None) -> None:
    """Runs a call in this thread, the main thread, which another thread watches; sets SIGUSR2's handler meanwhile."""
    before = signal.getsignal(signal.SIGUSR2)
    handler = before if isinstance(before, _Handler) else _Handler()
    signal.signal(signal.SIGUSR2, handler)
    watcher = threading.Thread(target=_watch, args=(job, stop, patience, _wake), name="tpu_kit call", daemon=True)
    watcher.start()
    try:
        handler.run(job)
    finally:
        job.over.set()
        watcher.join()  # its signal would end the process after the handler is reset
        signal.signal(signal.SIGUSR2, before or signal.SIG_DFL)


def _watch(job: _Call[Any], stop: Callable[[], bool], patience: float | None, interrupt: Callable[[], None]) -> None:
    """Waits for the end of a call; once it must end, sets `end` and calls `interrupt` until it is over.

    The function may catch the error of an interrupt. `stop` and `patience` are as in `call`.
    """
    used = seen = read_at = 0.0
    beat = min(_BEAT, (patience or math.inf) / 10)
    while not job.over.wait(_LOOK):
        now = time.monotonic()
        if not job.started or not seen:
            seen = read_at = now
        if patience is not None and job.end is None and now - read_at > beat:
            # Without the time of this thread, which reads it.
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
