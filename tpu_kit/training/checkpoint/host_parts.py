"""Background writing, and the parts of a checkpoint that the hosts of a mesh write.

Every host writes a file of tensors, such as training-3.safetensors, and then its receipt, training-3.json, with the
file's size and digest. Host 0 commits the checkpoint after all receipts exist. Only the hosts of this launch know the
name of the attempt's folder, so files of another launch never get into a checkpoint.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import Any, Self

PATIENCE = 1800.0
"""Seconds after which a part counts as lost. If its host is lost, the run ends much sooner."""
_PAUSE = 0.5  # seconds between two checks for receipts


class BackgroundWriter:
    """Runs one write at a time in a thread. As a context manager, it waits on exit until the last write has ended.

    The exit raises the error of that write, or prints it if the context itself raises an error.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    @property
    def _failed(self) -> bool:
        """Whether the last write has failed, and its error was not raised yet."""
        return self._last is not None and self._last.done() and self._last.exception() is not None

    def __enter__(self) -> Self:
        return self

    def poll(self) -> None:
        """Raises the error of the last write once, if it has failed; never waits."""
        if self._failed:
            self.wait()

    def wait(self) -> None:
        """Waits until the last write is durable; raises its error, once."""
        if self._last is not None:
            wait_for([self._last])  # an interrupt leaves the write to the next `wait`
            last, self._last = self._last, None
            last.result()

    def close(self) -> None:
        """Calls `wait`."""
        self.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if kind is None:
                raise
            print(failure, file=sys.stderr, flush=True)  # the context's own error matters more

    def _start(self, write: Callable[[], None]) -> None:
        """Starts a write in the thread; call `wait` before, or the previous write's error is lost."""
        self._last = self._executor.submit(write)


@dataclass(frozen=True)
class Attempt:
    """An attempt of all hosts to save a step."""

    name: str  # 12 hexadecimal digits
    hosts: int
    broken: Callable[[], bool]  # whether this host's own part could not be written

    def receipts(self, read: Callable[[], Mapping[str, bytes]]) -> dict[str, dict[str, Any]]:
        """Waits until all hosts have written their receipts, and returns the content of the receipts.

        Args:
            read: returns the receipts so far: file name, such as "training-3.json" -> bytes. It is called repeatedly.

        Returns:
            Name of a part's file, such as "training-3.safetensors" -> {"bytes": size, "md5": digest}.

        Raises:
            OSError: this host's part could not be written, or a receipt is missing after `PATIENCE`.
        """
        until, wanted = time.monotonic() + PATIENCE, {f"training-{host}.json" for host in range(self.hosts)}
        while missing := sorted(wanted - (found := read()).keys()):
            if self.broken() or time.monotonic() > until:
                why = "could not be written" if self.broken() else f"did not appear within {PATIENCE:g} s"
                raise OSError(f"{', '.join(missing)} {why}: each host writes its part of a checkpoint")
            time.sleep(_PAUSE)
        return {name.replace(".json", ".safetensors"): json.loads(found[name]) for name in sorted(wanted)}
