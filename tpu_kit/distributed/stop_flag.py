"""The flag by which all replicas of a launch stop at the same step.

A replica records the step that it is about to start and looks whether there is a limit: no message, no read of the
device. To stop them, the calling process forbids new steps for a moment, takes the largest step that any replica has
started as the limit, and lets them go on. All replicas start that step and none starts a later one, so that no
collective waits for a replica that has stopped, however far one replica has run ahead.
"""

from __future__ import annotations

import abc
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_RANKS = 1024  # replicas that the memory has room for
# The cells, int64. They begin as zeros: no limit, every replica away.
_LIMIT, _ASKED, _HEEDS, _STARTED = 0, 1, 2, 2 + _RANKS
_AWAY, _PAUSED, _STEPPING = 0, 1, 2  # in the cells of _HEEDS: what a replica does
_TEXT = 8 * (2 + 2 * _RANKS)  # bytes before the reason
_SIZE = _TEXT + 1024
_DECIDING = -1
# A replica that saw no limit has written its step before it looked; that write is seen everywhere long before this.
_SETTLE = 0.05  # seconds


class StopFlag(abc.ABC):
    """What replicas and the calling process tell each other about stopping."""

    @property
    @abc.abstractmethod
    def reason(self) -> str:
        """Why to stop, as given to `stop`; empty before."""

    # ---------------------------------------------------------------------------------------------------- in a replica

    @abc.abstractmethod
    def may_start(self, rank: int, step: int) -> bool:
        """Records that a replica starts a step, unless the step lies past the limit; see `PreemptionGuard.should_run`.

        Waits while the limit is being decided.
        """

    @abc.abstractmethod
    def pause(self, rank: int) -> None:
        """Records that a replica heeds the flag, and is between two steps."""

    @abc.abstractmethod
    def leave(self, rank: int) -> None:
        """Records that a replica no longer heeds the flag."""

    @abc.abstractmethod
    def ask(self, *_: object) -> None:
        """Tells the calling process that this one got a SIGTERM; fit to be a signal's handler."""

    # ------------------------------------------------------------------------------------------- in the calling process

    @abc.abstractmethod
    def stop(self, reason: str) -> None:
        """Decides which step is the last one; called once."""

    @abc.abstractmethod
    def steps(self) -> dict[int, int]:
        """The step that each replica has started, by rank; empty while one of them is paused between two steps."""

    @property
    @abc.abstractmethod
    def heeded(self) -> bool:
        """Whether a replica is in a `with PreemptionGuard`."""

    @property
    @abc.abstractmethod
    def asked(self) -> bool:
        """Whether another process of the launch got a SIGTERM."""


class SharedMemoryStopFlag(StopFlag):
    """The flag for the replicas of one host: memory that the processes of a launch share.

    Args:
        path: a file that `SharedMemoryStopFlag.create` made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._cells = memoryview(self._map)[:_TEXT].cast("q")

    @classmethod
    @contextlib.contextmanager
    def create(cls) -> Iterator[SharedMemoryStopFlag]:
        """A new flag, gone at the end."""
        memory = "/dev/shm"  # on a disk a write could wait for the disk
        folder = memory if os.access(memory, os.W_OK | os.X_OK) else None
        descriptor, path = tempfile.mkstemp(prefix="tpu_kit-", dir=folder)
        try:
            os.truncate(descriptor, _SIZE)
            os.close(descriptor)
            flag = cls(path)
            yield flag
            flag.close()
        finally:
            Path(path).unlink(missing_ok=True)

    def hide(self) -> None:
        """Removes the file's name, once all have opened it: a caller that is killed later leaves nothing behind."""
        Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the memory back."""
        self._cells.release()
        with contextlib.suppress(BufferError):  # a replica's thread may still hold a view
            self._map.close()

    def may_start(self, rank: int, step: int) -> bool:
        """Records the step before it reads the limit, so that `stop` sees the step; below a microsecond."""
        cells = self._cells
        cells[_STARTED + rank] = step
        cells[_HEEDS + rank] = _STEPPING
        while (limit := cells[_LIMIT]) == _DECIDING:
            time.sleep(0.001)
        return not limit or step < limit

    def pause(self, rank: int) -> None:
        """As `StopFlag.pause`."""
        assert rank < _RANKS
        self._cells[_HEEDS + rank] = _PAUSED

    def leave(self, rank: int) -> None:
        """As `StopFlag.leave`."""
        self._cells[_HEEDS + rank] = _AWAY

    def ask(self, *_: object) -> None:
        """As `StopFlag.ask`."""
        self._cells[_ASKED] = 1

    def stop(self, reason: str) -> None:
        """Sets the limit to the largest step started, once all writes of replicas that saw no limit have arrived."""
        self._map[_TEXT:_SIZE] = reason.encode()[: _SIZE - _TEXT].ljust(_SIZE - _TEXT, b"\0")
        self._cells[_LIMIT] = _DECIDING
        time.sleep(_SETTLE)
        self._cells[_LIMIT] = 1 + max(self._cells[_STARTED : _STARTED + _RANKS])

    def steps(self) -> dict[int, int]:
        """As `StopFlag.steps`."""
        states = self._cells[_HEEDS:_STARTED].tolist()
        if _PAUSED in states:
            return {}
        return {rank: self._cells[_STARTED + rank] for rank, state in enumerate(states) if state == _STEPPING}

    @property
    def heeded(self) -> bool:
        """As `StopFlag.heeded`."""
        return any(self._cells[_HEEDS:_STARTED])

    @property
    def asked(self) -> bool:
        """As `StopFlag.asked`."""
        return bool(self._cells[_ASKED])

    @property
    def reason(self) -> str:
        """At most 1,024 bytes of it."""
        return self._map[_TEXT:_SIZE].rstrip(b"\0").decode(errors="replace")
