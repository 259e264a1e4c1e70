"""Runs Python modules and tools in a child process that never outlives the call."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from tpu_kit.config.fields import hide_secrets


@dataclass(frozen=True)
class Ended:
    """Status, stdout and stderr of a process that has ended; a negative status is a signal, as in `subprocess`."""

    status: int  # as in `subprocess`: negative for a signal
    output: str  # stdout
    errors: str  # stderr

    @property
    def how(self) -> str:
        """The status in words, such as "status 1" or "SIGKILL"; see `end_name`."""
        return end_name(self.status)

    def last_lines(self, count: int) -> str:
        """Returns the last `count` nonempty lines of stderr, else of stdout, else "it wrote nothing"; hides secrets."""
        text = hide_secrets(self.errors if self.errors.strip() else self.output)
        return "\n".join([line for line in text.splitlines() if line.strip()][-count:]) or "it wrote nothing"


def end_name(status: int) -> str:
    """Returns "status 1", or for a negative status the signal: "SIGKILL", or "signal 99" if it has no name."""
    if status >= 0:
        return f"status {status}"
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Makes Linux kill this process (SIGKILL) when the thread that started it ends; elsewhere does nothing."""
    if sys.platform == "linux":  # the kernel needs no GIL
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def processor_times(pid: int) -> dict[int, float]:
    """Returns processor seconds by process id, for `pid` and its descendants that run; {} if there is no process `pid`.

    A value is a process's user and system time since its start, plus the time of ended children that it has waited for.
    """
    import psutil

    times = {}
    with contextlib.suppress(psutil.Error):
        for process in [root := psutil.Process(pid), *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                times[process.pid] = sum(process.cpu_times()[:4])  # includes children that it has waited for
    return times


_OF_DEVICES = ("XLA_", "TPU_", "LIBTPU_", "PJRT_", "JAX_", "CPU_NUM_DEVICES", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def xla_cpu_environment() -> dict[str, str]:
    """Returns a copy of `os.environ` for a child in which torch_xla and JAX use the CPU.

    The copy has PJRT_DEVICE=CPU, JAX_PLATFORMS=cpu, TPU_SKIP_MDS_QUERY=1, TOKENIZERS_PARALLELISM=false and
    TORCH_DEVICE_BACKEND_AUTOLOAD=0. Other variables that begin with XLA_, TPU_, LIBTPU_, PJRT_, JAX_, CPU_NUM_DEVICES,
    LOCAL_RANK, RANK or WORLD_SIZE are left out.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_DEVICES)}
    return inherited | {
        "PJRT_DEVICE": "CPU", "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TOKENIZERS_PARALLELISM": "false",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }  # fmt: skip


def run_child(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    given: str = "",
    seconds: float | None = None,
    on_line: Callable[[str], None] | None = None,
    python: str | None = None,
) -> Ended:
    """Runs `python ARGUMENTS` with this package on its path, prints nothing, and returns its status and output.

    A nonzero status raises no error. When the process has ended, or the call raises an error, the call kills all that
    runs in the process group.

    Args:
        arguments: the command line after `python`, such as ["-m", "tpu_kit"].
        environment: all variables of the process, which inherits none; PYTHONPATH gets this package's folder in front.
        given: the text of its stdin.
        seconds: time limit; None for no limit.
        on_line: called in another thread with every line of stdout, without newline, as soon as it is written.
        python: the interpreter of another environment, whose PYTHONPATH stays unchanged; None for Python here.

    Raises:
        OSError: `python` cannot be started.
        TimeoutError: the process ran longer than `seconds`; its output is lost.
    """
    if python is None:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), environment.get("PYTHONPATH")]))
        environment = {**environment, "PYTHONPATH": path}
    with TemporaryFile("w+", errors="replace") as errors, TemporaryFile("w+") as stdin:
        stdin.write(given)
        stdin.seek(0)
        child = subprocess.Popen(
            [python or sys.executable, *arguments], env={**environment}, stdin=stdin, stdout=subprocess.PIPE,
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
        reader.join(10)  # a process in another session may still hold the pipe
        errors.seek(0)
        return Ended(status, "".join(lines), errors.read())


def _read(child: subprocess.Popen[str], lines: list[str], on_line: Callable[[str], None] | None) -> None:
    """Appends the lines of the child's stdout to `lines` until it closes; passes them on at once, without newline."""
    assert child.stdout is not None
    for line in child.stdout:
        lines.append(line)
        if on_line is not None:
            on_line(line.rstrip("\n"))
