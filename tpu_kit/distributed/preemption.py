"""Notices that a run must end soon, and the step at which all its replicas stop.

calling process: Notices                       replicas: PreemptionGuard
SIGTERM, SIGINT, the cloud's metadata server,  with PreemptionGuard(rt) as guard:
a time budget                                      while guard.should_run(step): ...
         |                                                 |
         +------------------ StopFlag ----------------------+
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tpu_kit.distributed.stop_flag import SharedMemoryStopFlag, StopFlag
from tpu_kit.hardware.gce_metadata import MetadataWatch

if TYPE_CHECKING:
    from tpu_kit.distributed.runtime import Runtime

_LOOK = 0.2  # seconds between two looks at the clock and the board

_here: StopFlag | None = None  # of this process; replicas that are threads share it


class PreemptionGuard:
    """What a training loop asks before each step, so that after a notice all replicas stop at the same one.

        with PreemptionGuard(rt) as agreement:
            for step in ...:
                if not agreement.should_run(step):
                    break  # agreement.reason says why; save, and end with "preempted"
                ...
            save()  # inside, so that a signal does not end the process while it saves

    While a replica is in it the function counts as one that heeds notices: the first SIGINT or SIGTERM is a notice.
    Otherwise a signal ends the launch. Off a launch every step may start.

    Args:
        rt: this replica's runtime.

    Attributes:
        reason: why to stop; None until `should_run` has said no.
    """

    def __init__(self, rt: Runtime) -> None:
        self.reason: str | None = None
        self._flag, self._rank = _here, rt.rank
        self._before: Any = None

    def __enter__(self) -> PreemptionGuard:
        if self._flag is None:
            return self
        self.pause()
        is_main = threading.current_thread() is threading.main_thread()
        # The caller, whose replica runs inline, has its own; where replicas are threads, worker.py has set one.
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            catch_sigterm()
            self._before = signal.SIG_DFL
        return self

    def __exit__(self, *_: object) -> None:
        if self._flag is None:
            return
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self._flag.leave(self._rank)

    def pause(self) -> None:
        """Tells that this replica's next work is no step, such as an evaluation, until it asks for one again.

        Meanwhile the launch is not judged by its steps; see `launch.Supervisor`.
        """
        if self._flag is not None:
            self._flag.pause(self._rank)

    def should_run(self, step: int) -> bool:
        """Whether this replica may start a step; for the same step all replicas get the same answer.

        It costs well below a microsecond and never waits for another replica.

        Args:
            step: 1 or more, larger at each call; every replica asks for the same steps.
        """
        if self._flag is None or self._flag.may_start(self._rank, step):
            return True
        self.reason = self._flag.reason
        self.pause()
        return False


def join(flag: StopFlag | None) -> None:
    """Makes `flag` the one that this process's replicas heed; called by launch alone."""
    global _here
    _here = flag


def catch_sigterm() -> None:
    """Makes a SIGTERM to this process a notice if its replicas heed notices, else its end. In the main thread."""

    def handle(*_: object) -> None:
        if _here is not None and _here.heeded:
            _here.ask()
        else:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Lets SIGTERM raise SystemExit(143), as SIGINT raises KeyboardInterrupt; nothing where another handler is set."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Notices:
    """Hears, in the calling process, of everything that ends a launch early, and tells its replicas once.

    SIGINT and SIGTERM are caught in the main thread alone, and only where they were not ignored. The first one is a
    notice if the function that runs handles preemption (`PreemptionGuard`). If not, and at the second signal, the
    launch ends: by KeyboardInterrupt after SIGINT, by SystemExit(143) after SIGTERM.

    Args:
        budget: seconds from now after which the run is to end; None for no such limit.

    Attributes:
        flag: what the replicas look at.
        at_once: whether a second signal has ended it: nothing is waited for any more.
    """

    flag: SharedMemoryStopFlag

    def __init__(self, budget: float | None = None) -> None:
        self.at_once = False
        self._budget, self._deadline = budget, time.monotonic() + budget if budget is not None else None
        self._signalled = False
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # its put is safe in a signal's handler
        self._before: dict[int, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Notices:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        self.flag = self._stack.enter_context(SharedMemoryStopFlag.create())
        thread = threading.Thread(target=self._serve, name="tpu_kit notices", daemon=True)
        thread.start()
        self._stack.callback(thread.join, 5)
        self._stack.callback(self._heard.put, None)
        self._stack.enter_context(contextlib.closing(MetadataWatch(self._heard.put)))
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # None: not Python's, and could not be put back
                    self._before[number] = before
                    self._stack.callback(signal.signal, number, before)
                    signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _on_signal(self, number: int, frame: Any) -> None:
        before = self._before[number]
        if self.flag.heeded and not self._signalled:
            self._signalled = True
            self._heard.put(signal.Signals(number).name)
            return
        if not self._signalled and callable(before) and before is not signal.default_int_handler:
            before(number, frame)
            return
        self.at_once = self._signalled
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _serve(self) -> None:
        """Tells of what was heard; a thread's work, as a signal's handler must not print or wait."""
        stopped = False
        while True:
            try:
                heard = self._heard.get(timeout=_LOOK)
            except queue.Empty:
                heard = None if stopped else self._looked()
                if heard is None:
                    continue
            else:
                if heard is None:
                    return
            is_signal = heard in signal.Signals.__members__
            text = f"{heard} received" if is_signal else heard
            if not stopped:
                stopped = True
                self.flag.stop(text)
                text += ": saving a checkpoint at the next step" if self.flag.heeded else ""
            elif is_signal:
                text += ", too: the checkpoint is being saved"
            else:
                continue
            print(f"tpu_kit: {text}{'; once more ends at once' if is_signal else ''}", file=sys.stderr, flush=True)

    def _looked(self) -> str | None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            return f"the time budget of {_duration(self._budget)} is used up"
        if self.flag.asked and self.flag.heeded:
            return "a process of the launch got a SIGTERM"
        return None


def _duration(seconds: float | None) -> str:
    assert seconds is not None
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min"), (rest, "s")) if count]
    return " ".join(parts) if seconds >= 60 else f"{seconds:g} s"
