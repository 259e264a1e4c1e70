"""Measures the peak memory of a process while a block of code runs."""

from __future__ import annotations

import threading
from types import TracebackType


def held(process: int | str = "self") -> int:
    """Returns a process's resident memory that no file backs, in bytes."""
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class PeakMemory:
    """Samples `held` every millisecond within a block; `most` is the largest value, `before` the first."""

    def __enter__(self) -> PeakMemory:
        self.most = self.before = held()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, held())

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
