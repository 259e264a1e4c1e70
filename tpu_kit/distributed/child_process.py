"""Runs Python in a process of its own, which ends with the call whatever happens: the kit's own modules, or a tool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        status: as `subprocess` gives it, negative for a signal.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    status: int
    output: str
    errors: str

    @property
    def how(self) -> str:
        """The status, or the name of the signal."""
        return signal.Signals(-self.status).name if self.status < 0 else f"status {self.status}"

    def last_lines(self, count: int) -> str:
        """The end of what it said, stderr first choice, without empty lines."""
        text = self.errors if self.errors.strip() else self.output
        return "\n".join([line for line in text.splitlines() if line.strip()][-count:]) or "it wrote nothing"


def run_child(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    given: str = "",
    seconds: float | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Ended:
    """Runs `python ARGUMENTS`, which finds this package; the process and all that it started are gone afterwards.

    Args:
        arguments: of the interpreter: `["-m", "tpu_kit.planning.compile_worker"]`.
        environment: of the process, the whole of it.
        given: what it reads from stdin.
        seconds: the most it may take.
        on_line: called with each line of its stdout as it comes, in a thread.

    Raises:
        TimeoutError: it took longer.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]))
    with TemporaryFile("w+", errors="replace") as errors, TemporaryFile("w+") as stdin:
        stdin.write(given)
        stdin.seek(0)
        child = subprocess.Popen(
            [sys.executable, *arguments], env={**environment, "PYTHONPATH": path}, stdin=stdin, stdout=subprocess.PIPE,
            stderr=errors, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        lines: list[str] = []
        reader = threading.Thread(target=_read, args=(child, lines, on_line), daemon=True)
        try:
            reader.start()
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no answer in {seconds:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        reader.join(10)  # longer only if a process in a session of its own still holds the pipe
        errors.seek(0)
        return Ended(status, "".join(lines), errors.read())


def _read(child: subprocess.Popen[str], lines: list[str], on_line: Callable[[str], None] | None) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line)
        if on_line is not None:
            on_line(line.rstrip("\n"))
