"""Runs several replicas on XLA:CPU in one process, to rehearse a TPU run on a machine without a TPU.

The replicas are threads with their own XLA devices, and run real collectives. Two measures make that reliable; a TPU
needs neither, because there a replica is a process.

**One replica compiles, the others follow.** If two threads compile the same graph, the programs get different
collective ids and wait for each other forever. So `run` puts a barrier around torch_xla's step marker: when all
replicas have traced, rank 0 compiles and starts, then the others find the program in the cache.

**No buffer is donated** (`environment` turns torch_xla's parameter aliasing off). A thread that frees a donated buffer
blocks until the execution that took the buffer has ended. Threads free such buffers early, and block while they hold a
resource that the last replica needs to start. An example is a worker of torch_xla's pool that destroys its previous
task (`XLAGraphExecutor::Async`, which owns the inputs). Another is Python with the GIL, which drops the token of the
last all-reduce. The collective then never completes, and XLA ends the process ("Expected 4 threads to join the
rendezvous, but only 3 of them arrived"). On busy cores, 8 of 9 launches aborted with donation, none without.
"""

from __future__ import annotations

import contextlib
import faulthandler
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_rendezvous: _Rendezvous | None = None
T = TypeVar("T")


class _Rendezvous:
    """A barrier of `count` ranks, from 0, that names the missing ranks in its error; `timeout` is in seconds."""

    def __init__(self, count: int, timeout: float) -> None:
        self._count, self._timeout = count, timeout
        self._condition = threading.Condition()
        self._arrived: set[int] = set()
        self._round = 0
        self._unhurried = 0  # number of replicas without a time limit
        self._failure: str | None = None
        self.given: dict[int, Any] = {}  # values by rank

    def wait(self, rank: int) -> None:
        """Waits for all ranks; raises MeetingError after `timeout` seconds without a rank, or after `end`."""
        with self._condition:
            if self._failure:  # the others have stopped waiting
                raise MeetingError(self._failure)
            now = self._round
            self._arrived.add(rank)
            if len(self._arrived) == self._count:
                self._arrived.clear()
                self._round += 1
                self._condition.notify_all()
                return
            moved = self._condition.wait_for(lambda: self._round != now or self._failure, self._timeout)
            while not moved and self._unhurried:
                moved = self._condition.wait_for(lambda: self._round != now or self._failure, self._timeout)
            if self._round != now:
                return
            if not moved:
                missing = sorted(set(range(self._count)) - self._arrived)
                self._failure = (
                    f"rank {', '.join(map(str, missing))} did not come to the step in {self._timeout:g} s "
                    f"(launch.hang_timeout), where rank {', '.join(map(str, sorted(self._arrived)))} waited"
                )
                self._condition.notify_all()
                faulthandler.dump_traceback()  # shows where the missing ranks are
            raise MeetingError(self._failure)

    def end(self, why: str) -> None:
        """Makes present and future waits raise MeetingError with the text of the first call."""
        with self._condition:
            self._failure = self._failure or why
            self._condition.notify_all()

    @contextlib.contextmanager
    def unhurried(self) -> Iterator[None]:
        """Suspends the time limit of all waits during the block."""
        with self._condition:
            self._unhurried += 1
        try:
            yield
        finally:
            with self._condition:
                self._unhurried -= 1


_THREADS = 16  # of XLA:CPU per device: each collective that it runs at once blocks one until all devices join


class MeetingError(RuntimeError):
    """Raised in replicas that wait for a replica that has ended or did not come in time."""


def environment(devices: int, replicas: bool = True) -> dict[str, str]:
    """Returns variables for a process with `devices` XLA:CPU devices; JAX opens no TPU.

    If `replicas` is true, every device is a replica, and with several replicas no buffer is donated. If it is false,
    the devices form a mesh.
    """
    settings = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "JAX_PLATFORMS": "cpu"}
    if replicas and devices > 1:
        # Two threads per replica: one starts programs, the other moves data.
        settings |= {"XLA_THREAD_POOL_SIZE": str(2 * devices), "XLA_ENABLE_PARAM_ALIASING": "0"}
    if devices > 1:
        settings["PJRT_NPROC"] = str(_THREADS * devices)
    return settings


def run(replica: Callable[[], None], replicas: int, timeout: float) -> None:
    """Runs a function in a thread per device until all end, with a barrier around torch_xla's step marker.

    Call it once per process, in which the variables of `environment` are set. After all threads have ended, it raises
    the error of a replica, if there is one.

    Args:
        replica: the function, whose result is ignored; it asks torch_xla for its rank.
        replicas: number of devices, as in CPU_NUM_DEVICES.
        timeout: seconds that a replica waits for another replica at the step marker, in `meet` or in `gather`; then
            the waiting replicas get MeetingError.
    """
    global _rendezvous
    import torch_xla
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    extension: Any = torch_xla._XLAC
    mark = extension._xla_step_marker
    meeting = _rendezvous = _Rendezvous(replicas, timeout)

    def ordered(*args: Any, **kwargs: Any) -> None:
        rank = xr.global_ordinal()
        meeting.wait(rank)  # all have traced
        if rank == 0:
            mark(*args, **kwargs)
        meeting.wait(rank)  # the program is compiled
        if rank != 0:
            mark(*args, **kwargs)

    if replicas > 1:
        extension._xla_step_marker = ordered
    pjrt._run_thread_per_device(0, 1, replica, pjrt.initialize_multiprocess)  # as xmp.spawn does for CPU devices


def meet(rank: int) -> None:
    """Waits on the host for all replicas; raises MeetingError if a replica failed or did not reach the barrier."""
    assert _rendezvous is not None, "`run` comes first"
    _rendezvous.wait(rank)


def gather(rank: int, mine: T) -> list[T]:
    """Gathers a value of any type from every replica, without a copy; returns the values by rank.

    All replicas must call it. Raises MeetingError if a replica does not come within the `timeout` of `run`, or if `end`
    was called because a replica has ended.
    """
    assert _rendezvous is not None, "`run` comes first"
    _rendezvous.given[rank] = mine
    _rendezvous.wait(rank)
    result = [_rendezvous.given[other] for other in sorted(_rendezvous.given)]
    _rendezvous.wait(rank)
    del _rendezvous.given[rank]  # all have read it, and it may be large
    return result


def any_replica(rank: int, mine: bool) -> bool:
    """Returns whether `mine` is true in any replica; all must call it. Raises MeetingError as `meet`."""
    return any(gather(rank, mine))


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Suspends the time limit of waiting replicas, if there are any, during the block, which has its own limits."""
    with _rendezvous.unhurried() if _rendezvous else contextlib.nullcontext():
        yield


def end(why: str) -> None:
    """Makes all present and future waits of replicas, if there are any, raise `MeetingError` with the text `why`."""
    if _rendezvous is not None:
        _rendezvous.end(why)
