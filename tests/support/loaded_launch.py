"""Makes `launch` fork its processes from a process that has loaded the libraries, instead of starting interpreters.

Use it for tests of replicas' results. Tests of how processes start, end and are killed use real interpreters, in
tests/distributed. The launcher and the replicas run the kit's own code, as processes in a session of their own.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.child_processes import become, fork_loaded
from tpu_kit.distributed import launch
from tpu_kit.distributed.replica import worker


class LoadedPopen:
    """The part of `subprocess.Popen` that `launch` uses."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **streams: Any) -> None:
        assert list(command[1:]) == ["-m", worker.__name__], command
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self._process = fork_loaded(_launcher, dict(env), theirs)
        self.pid = self._process.pid
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(os.dup(pipe.fileno()), mode) for pipe, mode in zip(ours, ("wb", "rb", "rb"), strict=True)
        )
        for pipe in [*ours, *theirs]:
            pipe.close()

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the launcher to end; raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the launcher", timeout or 0)
        return self.returncode


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `launch` fork its processes until the test ends."""
    names = {**vars(subprocess), "Popen": LoadedPopen}
    monkeypatch.setattr(launch, "subprocess", SimpleNamespace(**names))


def _launcher(environment: Mapping[str, str], streams: list[Connection]) -> None:
    """Runs the launcher in this process; its replicas are forks too."""
    os.setsid()
    become(environment, [stream.fileno() for stream in streams])
    for stream in streams:
        stream.close()
    settings: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "write_through": True}
    sys.stdout, sys.stderr = (  # unbuffered, as the launch's variables make a new interpreter
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), **settings)  # type: ignore[arg-type]
        for number in (1, 2)
    )
    # A fork closes its stdin, which would wait for the launcher's thread that reads from it.
    sys.stdin = SimpleNamespace(buffer=os.fdopen(0, "rb", closefd=False), close=lambda: None)  # type: ignore[assignment]
    fork = multiprocessing.get_context("fork")
    worker.multiprocessing = SimpleNamespace(  # type: ignore[attr-defined]
        get_context=lambda _: fork, active_children=multiprocessing.active_children
    )
    worker.main()
