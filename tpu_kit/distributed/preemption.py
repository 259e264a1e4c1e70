"""Stops all replicas of a launch at the same step when a signal, the cloud or a time budget requires the end of a run.

calling process: Notices                       replicas: PreemptionGuard
SIGINT, SIGTERM, SIGHUP, SIGUSR1, a budget,    with PreemptionGuard(rt) as guard:
the cloud's metadata server                        while guard.should_run(step): ...
         |                                                 |
         +------------------ StopFlag ----------------------+

A replica records the step that it is about to start, then reads whether there is a limit. To stop the replicas, the
calling process blocks new steps for a moment and sets the limit to the largest step that any replica on any host has
started. All replicas run that step and no later step, so no collective waits for a replica that has stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import mmap
import os
import queue
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpu_kit.distributed.meeting import Meeting
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.machine.checks import Machine

RESULT_TYPE = "application/vnd.tpu-kit.result+json"
"""MIME type under which a notebook cell stores whether its run was preempted."""

# Signals that ask a run to save and end: SIGHUP if a terminal closes, SIGUSR1 from a cluster (sbatch --signal=USR1@60).
STOPS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
_AT_ONCE = (signal.SIGINT, signal.SIGTERM)  # a second signal of these ends a run at once; SIGHUP often comes twice

_POLL = 0.2  # seconds between two reads of the clock and the flag

_DECIDING = -1  # value of the limit while it is being decided
# A replica that read no limit has written its step before. All processes see that write well within this time.
_SETTLE = 0.05  # seconds
_RESULTS = 2**30  # bytes reserved for results of replicas

# Keys below computeMetadata/v1/instance/, the values that end a run, and the pages of cloud.google.com about them. TPU
# VMs, also in queued resources, are Compute Engine machines without a key of their own for this.
_ENDS = {
    # A Spot machine is preempted in 30 s, or in 120 s if the machine was created with that notice
    # (compute/docs/instances/create-use-spot).
    "preempted": r"(TRUE)",
    # 60 s left, an hour with a GPU; MIGRATE_ON_HOST_MAINTENANCE ends nothing
    # (compute/docs/metadata/getting-live-migration-notice, compute/docs/gpus/gpu-host-maintenance).
    "maintenance-event": r"(TERMINATE_ON_HOST_MAINTENANCE)",
    # The maintenance begins; PENDING is days ahead (tpu/docs/view-maintenance-notifications).
    "upcoming-maintenance?alt=json": r'"maintenance_?status"\s*:\s*"(ONGOING)"',
}
_TIMEOUT = 3.0  # seconds in which the server, which is on the same host, must answer
_TRIES = 3  # failed requests after which the server counts as missing
_PAUSE = 1.0  # seconds between requests


class _Cells(ctypes.Structure):
    """Layout of the shared memory, for at most 1,024 replicas; limit 0 means no limit."""

    _fields_ = (
        ("limit", ctypes.c_int64), ("asked", ctypes.c_int64), ("handles", ctypes.c_int64 * 1024),
        ("started", ctypes.c_int64 * 1024), ("reason", ctypes.c_char * 1024),
    )  # fmt: skip


def launch_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a temporary folder for the files of a launch's processes; a context manager that yields its path as str.

    The folder is in /dev/shm, where writes never wait for a disk or find it full, if /dev/shm has 1 GiB free: a
    container often has only 64 MiB. The block's end deletes it.
    """
    memory = "/dev/shm"
    has_room = os.access(memory, os.W_OK | os.X_OK) and shutil.disk_usage(memory).free > _RESULTS
    return tempfile.TemporaryDirectory(prefix="tpu_kit-", dir=memory if has_room else None)


class StopFlag:
    """Shared memory between the calling process and its host's replicas, which call `handle`, `may_start` and `ask`.

    Args:
        folder: the launch's folder, in which the memory is a file; None shares it with threads and forks only.
    """

    def __init__(self, folder: Path | None = None) -> None:
        size = ctypes.sizeof(_Cells)
        if folder is None:
            memory = mmap.mmap(-1, size)
        else:
            with open(folder / "flag", "a+b") as file:
                file.truncate(size)
                memory = mmap.mmap(file.fileno(), size)
        self._cells = _Cells.from_buffer(memory)

    def may_start(self, rank: int, step: int) -> bool:
        """Records that a replica starts a step; returns False if the step is past the limit, so that it must not run.

        Waits while the limit is being decided; otherwise the call takes about a microsecond. `rank` is the replica's
        number in the run, below 1,024; `step` is at least 1.
        """
        cells = self._cells
        cells.started[rank] = step
        while (limit := cells.limit) == _DECIDING:
            time.sleep(0.001)
        return not limit or step < limit

    def forbids(self, step: int) -> bool:
        """Whether a step is past the limit; does not start the step. False while the limit is being decided."""
        return 0 < self._cells.limit <= step

    def handle(self, rank: int, handles: bool) -> None:
        """Records whether a replica handles notices: whether it is inside a `PreemptionGuard`."""
        self._cells.handles[rank] = handles

    def ask(self, *_: object) -> None:
        """Tells the calling process that this process received a signal in `STOPS`; usable as a signal handler."""
        self._cells.asked = 1

    def hold(self, reason: str) -> int:
        """Blocks new steps until `release`; returns the largest step that this host has started, or 0."""
        self._cells.reason = reason.encode()[:1023]
        self._cells.limit = _DECIDING
        time.sleep(_SETTLE)
        return max(self._cells.started[:])

    def release(self, last: int) -> None:
        """Allows the steps up to `last`, and no later step."""
        self._cells.limit = 1 + last

    @property
    def handled(self) -> bool:
        """Whether any replica is inside a `PreemptionGuard`."""
        return any(self._cells.handles)

    @property
    def asked(self) -> bool:
        """Whether another process of the launch received a signal in `STOPS`."""
        return bool(self._cells.asked)

    @property
    def reason(self) -> str:
        """Why the run stops, at most 1,023 bytes; empty before `hold`."""
        return str(self._cells.reason.decode(errors="replace"))


_flag: StopFlag | None = None  # this process's flag; replicas that are threads share it


class PreemptionGuard:
    """Decides before each step of a training loop whether the step may start, so that all replicas stop together.

        with PreemptionGuard(rt) as guard:
            for step in ...:
                if not guard.should_run(step):
                    break  # guard.reason says why; save, and end with "preempted"
                ...
            save()  # inside, so that a signal does not end the process while it saves

    Inside the guard, the first SIGINT or signal in `STOPS` stops the loop at the next step; outside, a signal ends the
    launch. Without a launch every step may start. `reason` is None until `should_run` has returned False.
    """

    def __init__(self, rt: Runtime) -> None:
        self.reason: str | None = None
        self._flag, self._rank = _flag, rt.rank

    def __enter__(self) -> PreemptionGuard:
        if self._flag is not None:
            self._flag.handle(self._rank, True)
        # An inline replica's process has the handler of `Notices`; if replicas are threads, worker.py sets a handler.
        in_main = threading.current_thread() is threading.main_thread()
        self._caught = catch_stops() if self._flag is not None and in_main else []
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        if self._flag is not None:
            self._flag.handle(self._rank, False)

    def should_run(self, step: int) -> bool:
        """Whether this replica may start a step; if not, sets `reason`. All replicas get the same answer for a step.

        Args:
            step: at least 1, never smaller than before; all replicas ask for the same steps.
        """
        if self._flag is None or self._flag.may_start(self._rank, step):
            return True
        self.reason = self._flag.reason
        return False

    def stopped_before(self, step: int) -> bool:
        """Whether `should_run` will return False for a step, so that its preparation can be abandoned.

        Replicas learn this at different times: a preparation must call `should_run` before its first collective.
        """
        return self._flag is not None and self._flag.forbids(step)


class Terminated(SystemExit):
    """Raised when a signal in `STOPS` ends the launch, with code 128 + number. User functions may raise SystemExit."""


def join(flag: StopFlag | None) -> None:
    """Sets the flag that this process's replicas read; None for no launch. Only `launch` and `worker` call this."""
    global _flag
    _flag = flag


def catch_stops() -> list[signal.Signals]:
    """Installs handlers for `STOPS` and returns the signals that got a handler; call it in the main thread.

    If a replica of this host is inside a `PreemptionGuard`, a handler calls `StopFlag.ask`; otherwise the signal ends
    this process. Signals that have another handler or are ignored (nohup ignores SIGHUP) stay unchanged.
    """

    def handle(number: int, _: object) -> None:
        if _flag is not None and _flag.handled:
            _flag.ask()
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    caught = [number for number in STOPS if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, handle)
    return caught


@contextlib.contextmanager
def stops_raise() -> Iterator[None]:
    """Makes signals in `STOPS` raise `Terminated` in the block; outside the main thread it has no effect.

    Signals that have a handler or are ignored before the block stay unchanged.
    """
    in_main = threading.current_thread() is threading.main_thread()
    free = [number for number in STOPS if in_main and signal.getsignal(number) is signal.SIG_DFL]

    def handle(number: int, _: object) -> None:
        raise Terminated(128 + number)

    for number in free:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in free:
            signal.signal(number, signal.SIG_DFL)


def stop_name(end: BaseException) -> str:
    """Returns the name of the signal that raised KeyboardInterrupt or SystemExit(128 + number); else empty."""
    if isinstance(end, KeyboardInterrupt):
        return "SIGINT"
    code = end.code if isinstance(end, SystemExit) else None
    return next((number.name for number in STOPS if code == 128 + number), "")


def watch_metadata(give: Callable[[str], None], closed: threading.Event) -> None:
    """Polls Google Cloud's metadata server until `closed`; calls `give` with the reason if the machine is taken back.

    It blocks: call it in a thread. It returns after that call, after `closed` is set, or if there is no server: 3
    requests without any answer. Maintenance announced before the run began does not end the run: otherwise a run that
    is restarted in the hour before a GPU machine stops would end at once, again and again.
    """
    server, failures, found = Machine(), 0, False
    announced = {"preempted": False}  # by key: whether its last value ends a run
    while not closed.is_set() and (found or failures < _TRIES):
        try:
            for key, pattern in _ENDS.items():
                value = server.metadata(key, _TIMEOUT)
                found = True
                if value is None:
                    announced[key] = False
                elif (end := re.search(pattern, value, re.IGNORECASE)) and announced.get(key) is False:
                    name = key.partition("?")[0]
                    return give(f"the cloud takes this machine back (instance/{name} says {end[1]})")
                else:
                    announced[key] = end is not None
        except (OSError, http.client.HTTPException, ValueError):
            failures += 1
        closed.wait(_PAUSE)


class Notices:
    """Context manager that receives all notices to end a launch early, and stops the replicas of all hosts once.

    SIGINT and `STOPS` are caught only in the main thread, and only if they were not ignored. The first signal stops the
    replicas at the next step if they handle preemption (`PreemptionGuard`). Otherwise, and at a second SIGINT or
    SIGTERM, the launch ends with KeyboardInterrupt after SIGINT, else with SystemExit(128 + number).

    Args:
        budget: minutes from now until the run must end; None for no limit.
        meeting: the meeting of the hosts, which stop together; None for this host alone.
        folder: the launch's folder; None if the replica runs in this process.

    Attributes:
        flag: the flag that the replicas read.
        at_once: whether a second signal has ended the launch, so that it no longer waits for replicas.
    """

    _stack: contextlib.ExitStack

    def __init__(self, budget: float | None = None, meeting: Meeting | None = None, folder: Path | None = None) -> None:
        self.at_once, self._meeting, self.flag = False, meeting or Meeting(), StopFlag(folder)
        self._budget, self._started = budget, time.monotonic()
        self._signalled, self._closed = False, threading.Event()
        self._notices: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # safe to use in a signal handler
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Notices:
        with contextlib.ExitStack() as stack:
            thread = threading.Thread(target=self._serve, name="tpu_kit notices", daemon=True)
            thread.start()
            stack.callback(thread.join, 5)
            stack.callback(self._notices.put, None)
            arguments = self._notices.put, self._closed
            threading.Thread(target=watch_metadata, args=arguments, name="tpu_kit metadata", daemon=True).start()
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, *STOPS):
                    before = signal.getsignal(number)
                    if before not in (None, signal.SIG_IGN):  # None: a handler outside of Python, not restorable
                        self._before[number] = before
                        stack.callback(signal.signal, number, before)
                        signal.signal(number, self._on_signal)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._stack.close()

    def _on_signal(self, number: int, frame: Any) -> None:
        """Handles a signal as the class says, but instead of an end calls a handler that was set before, if any."""
        before = self._before[number]
        if self.flag.handled and not self._signalled:
            self._signalled = True
            self._notices.put(signal.Signals(number).name)
            return
        if self._signalled and number not in _AT_ONCE:
            return
        if not self._signalled and callable(before) and before is not signal.default_int_handler:
            before(number, frame)
            return
        self.at_once = self._signalled
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(128 + number)

    def _serve(self) -> None:
        """Handles notices in a thread of its own, because a signal handler must not print or wait."""
        stopped = False
        while True:
            try:
                notice = self._notices.get(timeout=_POLL)
            except queue.Empty:
                notice = None if stopped else self._poll()
                if notice is None:
                    continue
            else:
                if notice is None:
                    return
            is_signal = notice in signal.Signals.__members__
            again = is_signal and signal.Signals[notice] in _AT_ONCE
            text = f"{notice} received" if is_signal else notice
            if not stopped:
                stopped, text = True, self._stop(text)
                text += ": saving a checkpoint at the next step" if self.flag.handled else ""
            elif is_signal:
                text += ", too: the checkpoint is being saved"
            else:
                continue
            print(f"tpu_kit: {text}{'; once more ends at once' if again else ''}", file=sys.stderr, flush=True)

    def _stop(self, text: str) -> str:
        """Stops the replicas of all hosts at the same step; returns the reason of the first host that has asked.

        Sends `text` as this host's reason unless a host has asked before.
        """
        if self._meeting.stop_asked() is None:
            self._meeting.ask_stop(text)
        text = self._meeting.stop_asked() or text
        started = self.flag.hold(text)
        # If another host is lost meanwhile, the launch ends and closes this loop.
        while (last := self._meeting.last_step(started)) is None and not self._closed.wait(0.02):
            pass
        self.flag.release(started if last is None else last)
        return text

    def _poll(self) -> str | None:
        """Returns why to stop: another host, the budget, or a signal to a replica's process; None if nothing asks."""
        if asked := self._meeting.stop_asked():
            return asked
        if self._budget is not None and time.monotonic() - self._started > 60 * self._budget:
            return f"the time budget of {self._budget:g} min is used up"
        if self.flag.asked and self.flag.handled:
            return "a signal to a process of the launch"
        return None
