"""launch(fn, config) runs a function on every device, from a notebook, a script or a test.

    calling process              launcher (worker.py)            replicas (worker.py)
    (a kernel; opens no     -->  own session; reads fn and   -->  TPU: processes of xmp.spawn
    device) launch.py        config from stdin                xla-cpu: threads of a process (cpu_simulation.py)
         ^                                                        CUDA, several CPUs: processes of torch.distributed
         |                                                             |
         +-- text of rank 0 (stdout, stderr), reports in a folder -----+

If the calling process ends for any reason, the launcher and all replicas end. A single CPU replica without a time limit
runs in the calling process. preemption.py stops a launch early, after the training loop has saved.
"""

from __future__ import annotations

import builtins
import codecs
import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TypeVar

from tpu_kit.config.fields import hide_secrets
from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed import detection, preemption
from tpu_kit.distributed.child_process import end_name, processor_times
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.hosts import interface
from tpu_kit.distributed.meeting import HostError, Meeting
from tpu_kit.distributed.output import SafeStream
from tpu_kit.distributed.preemption import Notices, launch_folder
from tpu_kit.distributed.replica import cpu_simulation, runtime
from tpu_kit.distributed.replica.worker import LAUNCHER, REFUSALS, ReplicaMessage
from tpu_kit.distributed.sending import payload_of
from tpu_kit.machine.capacity import check_disk, check_memory
from tpu_kit.machine.checks import Machine, check_holder, check_process, preset_per_process

T = TypeVar("T")

_LOOK = 0.1  # seconds between reads of the reports
_BEAT = 1.0  # seconds between reads of the processor time
_SETTLE = 1.0  # seconds in which all causes and consequences of a failure are reported
_GRACE = 10.0  # seconds that replicas get to end after a signal
_BUSY = 0.03  # seconds of processor time per beat; an idle process uses less
# Errors of a replica whose cause is another replica's end.
_CONSEQUENCE = (
    r"MeetingError|Connection (closed|reset|refused)( by peer)?|remote process exited|ncclRemoteError|Broken pipe"
    r"|DistStoreError|DistNetworkError|Socket Timeout|failed to recv"
)
# Errors of gloo and NCCL for a collective that waits longer than the limit of `worker`.
_TIMED_OUT = re.compile(r"Timed out waiting \d+ms for|Watchdog caught collective operation timeout")


def advice(text: str) -> str:
    """Returns advice on an error or traceback, a line "-> ..." for each known cause; "" if no cause is known.

    {} in an advice stands for the match of the pattern's group.
    """
    known = tomllib.loads(Path(__file__).with_name("known_errors.toml").read_text(encoding="utf-8"))["error"]
    found = ((error["advice"], re.search(error["pattern"], text, re.IGNORECASE)) for error in known)
    return "\n".join(f"-> {text.replace('{}', (match.groups() or ('',))[0] or '')}" for text, match in found if match)


class LaunchError(RuntimeError):
    """A replica failed, died or hung.

    Attributes:
        rank: the replica that failed first; None for a hang, the launcher, or a process with several replicas or none.
        traceback: its traceback, or only the text of an error of files or the network that the kit raised; else empty.
    """

    def __init__(self, message: str, rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message)
        self.rank, self.traceback = rank, traceback


def _lost_a_peer(traceback: str) -> bool:
    """Whether the last line of a traceback is an error that another replica's end causes, such as "Broken pipe"."""
    return re.search(_CONSEQUENCE, traceback.rstrip().rpartition("\n")[2]) is not None


class Supervisor:
    """Starts and watches the processes of a launch on this host.

    Args:
        backend: the result of `detection.detect`.
        folder: the launch's folder, in which its processes write reports.
        hang_timeout: seconds without output and processor time after which the launch counts as hung.
        time_limit: seconds; as in `launch`.
        meeting: as in `launch`.
    """

    def __init__(
        self, backend: Backend, folder: Path, hang_timeout: float, time_limit: float | None = None,
        meeting: Meeting | None = None,
    ) -> None:  # fmt: skip
        self._backend, self._folder, self._meeting = backend, folder, meeting or Meeting()
        self._hang_timeout, self._time_limit = hang_timeout, time_limit
        self._reports: dict[str, ReplicaMessage] = {}  # by the file's name
        self._last_active = time.monotonic()
        self._stderr = ""  # the last 16,384 characters

    def run(self, payload: bytes, notices: Notices) -> Any:
        """Starts the launcher, waits until all processes end, and returns the result of this host's first replica.

        Meanwhile it prints their stdout and stderr. Before it raises an error, it ends all processes.

        Args:
            payload: function and config, from `sending.payload_of`.
            notices: the receiver of notices, inside its block. If its `at_once` is true, no process gets time to save.

        Raises as `launch`, but checks no device, memory or disk before.
        """
        path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        settings = {
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8:backslashreplace",  # `_stream` decodes it
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # an installed torch_tpu would open the TPU
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "tpu_kit.distributed.replica.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=_environment(self._backend) | settings,
        )  # fmt: skip
        streams = self._stream(process.stdout, sys.stdout), self._stream(process.stderr, sys.stderr)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has died; `_result` raises the error
                pickle.dump((str(self._folder), self._backend, self._hang_timeout, payload), process.stdin)
                process.stdin.flush()
            return self._result(process)
        finally:
            # A function that does not handle preemption gets SIGTERM, which it may handle, then SIGKILL.
            asked = isinstance(sys.exc_info()[1], KeyboardInterrupt | SystemExit) and not notices.at_once
            _end(process, signal.SIGTERM if asked else signal.SIGKILL)
            for stream in streams:
                stream.join(5)

    def _read(self) -> None:
        """Adds new reports in the launch's folder to `_reports`."""
        for path in sorted(self._folder.glob("[0-9]*")):
            if path.name not in self._reports:
                self._reports[path.name] = ReplicaMessage.read(path)

    def _values(self, kind: str) -> dict[int, Any]:
        """Returns the values of the reports of a kind, by rank."""
        return {report.rank: report.value for report in self._reports.values() if report.kind == kind}

    def _stream(self, source: IO[bytes] | None, target: IO[str]) -> threading.Thread:
        """Starts and returns a thread that copies `source`, not None, to `target` until it closes, and hides secrets.

        Text is a sign of life. If `target` is stderr, `_stderr` keeps the last text.
        """
        assert source is not None
        decoder, safe = codecs.getincrementaldecoder("utf-8")(errors="replace"), SafeStream(target)

        def copy() -> None:
            while chunk := os.read(source.fileno(), 65536):
                self._last_active = time.monotonic()
                text = hide_secrets(decoder.decode(chunk))
                if target is sys.stderr:
                    self._stderr = (self._stderr + text)[-16384:]
                # If our own output is closed (`| head`), the replicas must not block on a full pipe.
                safe.write(text)
                safe.flush()

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        return thread

    def _result(self, process: subprocess.Popen[bytes]) -> Any:
        """Waits for this host's result and the launcher's end; raises as `launch` for a failure, hang or time limit."""
        times: dict[int, float] = {}
        started = checked = time.monotonic()
        first, meeting = self._backend.first_rank, self._meeting
        while True:
            meeting.check()
            if meeting.hung:
                raise self._hung(process, "another host waits")
            if time.monotonic() - checked > _BEAT:
                checked, before, times = time.monotonic(), times, processor_times(process.pid)
                # A process that uses processor time computes or compiles, even if it prints nothing.
                computing = {pid for pid, now in times.items() if now - before.get(pid, 0) > _BUSY}
                if computing:
                    self._last_active = meeting.active()
                elif meeting.others_active > self._last_active:
                    self._last_active = meeting.others_active
                elif checked - self._last_active > self._hang_timeout:
                    silent = f"no sign of life for {self._hang_timeout:g} s (launch.hang_timeout)"
                    raise self._hung(process, f"{silent}: no output, no processor time used")
                if self._time_limit is not None and checked - started > self._time_limit:
                    raise self._hung(process, f"not done after the time limit of {self._time_limit:g} s")
            over = process.poll() is not None  # before `_read`: a process reports before it ends
            self._read()
            if self._failures():
                raise self._failed(process)
            if over:
                if process.returncode == 0 and first in (results := self._values("done")):
                    return pickle.loads(results[first])
                how = f"the process that starts the replicas ({process.pid}) {_how(process.returncode)}"
                raise LaunchError(how + self._last_words())
            time.sleep(_LOOK)

    def _failures(self) -> list[ReplicaMessage]:
        """Returns error reports, and ends of other processes with status not 0 or no result; causes first."""
        reports, pids = self._reports.values(), self._values("started")
        explained = {pids.get(report.rank) for report in reports if report.kind in ("error", *REFUSALS)}

        def is_failure(report: ReplicaMessage) -> bool:
            if report.kind != "ended":
                return report.kind in ("error", *REFUSALS)
            pid, status = report.value
            # A process without replicas need not report a result.
            return pid not in explained and (status != 0 or not self._values("done").keys() >= set(self._ranks(pid)))

        return sorted(filter(is_failure, reports), key=lambda report: (_grade(report), report.at))

    def _failed(self, process: subprocess.Popen[bytes]) -> LaunchError | HostError | ValueError:
        """Collects reports for another second; returns the error to raise for the first cause.

        The error is a class in `REFUSALS` if the kit refused an input, as `_hung` if a collective waited too long, else
        a LaunchError.
        """
        time.sleep(_SETTLE)
        self._read()
        failures = self._failures()
        failures = [report for report in failures if _grade(report) < 2] or failures
        first = failures[0]
        if first.kind in REFUSALS:
            return REFUSALS[first.kind](first.value)
        if _TIMED_OUT.search(self._stderr if first.kind == "ended" else first.value):
            late = f"a replica joined no collective of the others for 3 x launch.hang_timeout={self._hang_timeout:g} s"
            return self._hung(process, late)
        if first.kind == "ended":
            ends = [report.value for report in failures if report.kind == "ended"]
            text = "\n".join(self._end_of(*end) for end in ends)
            text += f"\n{known}" if (known := advice(self._stderr)) else self._last_words()
            ranks = self._ranks(first.value[0])
            return LaunchError(text, ranks[0] if len(ranks) == 1 else None)
        errors: dict[str, list[int]] = {}  # ranks by text: all replicas often fail with the same text
        for report in failures:
            if report.kind == "error":
                errors.setdefault(report.value, []).append(report.rank)
        texts = [f"{_names(who)} failed:\n{text.rstrip()}" for text, who in errors.items()]
        texts += filter(None, [advice(first.value)])
        return LaunchError("\n\n".join(texts), None if first.rank == LAUNCHER else first.rank, first.value)

    def _ranks(self, pid: int) -> list[int]:
        """Returns the ranks of the replicas that have started in a process."""
        return [rank for rank, process in self._values("started").items() if process == pid]

    def _end_of(self, pid: int, status: int) -> str:
        """Returns a text such as "rank 1 (process 77) was ended by SIGSEGV"."""
        ranks = self._ranks(pid)
        return f"{_names(ranks) if ranks else 'a replica that had not started'} (process {pid}) {_how(status)}"

    def _last_words(self) -> str:
        """Returns the last 10 nonempty lines of stderr with a heading; "" if there are none."""
        lines = [line.rpartition("\r")[2].rstrip() for line in self._stderr.split("\n")]  # only a bar's last state
        last = [line for line in lines if line][-10:]
        return "\n".join(["\n\nThe last lines on stderr:", *last]) if last else ""

    def _hung(self, process: subprocess.Popen[bytes], text: str) -> LaunchError | HostError:
        """Makes all processes print their stacks; returns the error to raise.

        It is a LaunchError with `text`, or for several hosts the error of `Meeting.hang`.
        """
        stacks, errors = dict[str, str](), self._values("error")  # for replicas that have ended: a collective failed
        for pid in dict.fromkeys([*self._values("started").values(), process.pid]):
            self._stderr = ""
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)  # faulthandler prints all stacks, even of threads without the GIL
            time.sleep(0.5)  # keeps the stacks of two processes apart
            if ranks := self._ranks(pid):
                stacks[_names(ranks)] = (self._stderr or errors.get(ranks[0], ""))[-4096:]
        if self._meeting.hosts.count > 1:
            return self._meeting.hang(stacks)
        return LaunchError(f"{text}. The replicas were ended; the stacks of their threads are printed above")


def _grade(report: ReplicaMessage) -> int:
    """Ranks failures: 0 for a process that a signal has ended, 1 for another cause, 2 for a consequence.

    Consequences are SIGTERM, with which the launcher ends the other replicas, the launcher's errors, and lost peers.
    SIGABRT ranks as 1, because XLA and NCCL end a process with it that has lost its peers.
    """
    if report.kind == "ended":
        _, status = report.value
        return 2 if status == -signal.SIGTERM else int(status >= 0 or status == -signal.SIGABRT)
    return 2 if report.rank == LAUNCHER or _lost_a_peer(report.value) else 1


def _names(ranks: list[int]) -> str:
    """Returns "rank 0" or "ranks 0, 2"; "the launcher" if its rank is among them."""
    if LAUNCHER in ranks:
        return "the launcher"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _how(status: int) -> str:
    """Returns "ended with status 1 and no result" or "was ended by SIGKILL" with a hint on host memory."""
    if status >= 0:
        return f"ended with {end_name(status)} and no result"
    hint = ": often by the kernel, if host memory is full (see dmesg); try fewer replicas or a smaller model"
    return f"was ended by {end_name(status)}{hint if status == -signal.SIGKILL else ''}"


def _end(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Ends a process group with `first`, after `_GRACE` s or a second Ctrl-C with SIGKILL; waits for its end."""
    for number, patience in ((first, _GRACE), (signal.SIGKILL, _GRACE)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        try:
            process.wait(patience)
            break
        except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):  # a second Ctrl-C: kill at once
            pass
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # replicas may outlive the launcher
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _environment(backend: Backend) -> dict[str, str]:
    """Returns the environment of launcher and replicas, without variables that give several processes the same chip."""
    several = backend.device_type in ("tpu", "torch-tpu") and backend.num_replicas != 1 and backend.mesh is None
    left_out = preset_per_process(Machine()) if several else []
    return {name: value for name, value in os.environ.items() if name not in left_out} | _settings(backend)


def _settings(backend: Backend) -> dict[str, str]:
    """Returns the variables that the backend sets: devices, XLA's log level, the network interface of several hosts.

    USE_TORCH_XLA is "1" if its processes use torch_xla, else "0". Raises OSError as `hosts.interface`.
    """
    # No XLA_PERSISTENT_CACHE_PATH: torch_xla 2.8 and 2.9 cannot load the programs that they store (pytorch/xla#9094).
    settings = {"PJRT_DEVICE": "TPU"} if backend.device_type == "tpu" else {}
    if backend.device_type == "xla-cpu":
        count = backend.mesh.size if backend.mesh else backend.num_replicas or 1
        settings = cpu_simulation.environment(count, replicas=backend.mesh is None)
    if backend.mesh:  # XLA warns with every program that Shardy will replace its partitioner, GSPMD
        settings["TF_CPP_MIN_LOG_LEVEL"] = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")
    if backend.hosts.count > 1:  # the network interface of process groups, unless the user has set it
        names = [n for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if n not in os.environ]
        settings |= dict.fromkeys(names, interface(backend.hosts) if names else "")
    return settings | {"USE_TORCH_XLA": str(int("PJRT_DEVICE" in settings))}


_announced: tuple[Any, str] | None = None


def _announce(text: str) -> None:
    """Prints `text` to stderr; in a notebook to stdout, and only once per cell: a run launches up to three times."""
    global _announced
    if not hasattr(builtins, "__IPYTHON__"):
        print(text, file=sys.stderr, flush=True)  # a command's stdout may be JSON
        return
    from IPython import get_ipython

    said = getattr(get_ipython(), "execution_count", None), text
    if said != _announced:
        print(text, flush=True)  # a notebook shows stderr as if it were an error
    _announced = said


def launch(
    fn: Callable[[TrainConfig], T],
    config: TrainConfig,
    time_limit: float | None = None,
    *,
    sharded: bool = False,
    meeting: Meeting | None = None,
    backend: Backend | None = None,
) -> T:
    """Runs `fn(config)` in every replica and returns the result of this host's first replica.

    Prints the backend on stderr, in a notebook on stdout. Replicas other than this host's first write only to stderr.

    Args:
        fn: the function, with a picklable result without tensors on a device. In it, `runtime.current()` is the
            replica's runtime. Replicas in other processes get a copy of the function; see `sending`.
        config: the run; its `launch` section chooses the device. After `checkpoint.budget_minutes`, a function with a
            `preemption.PreemptionGuard` stops at its next step; other functions run on.
        time_limit: seconds after which all replicas are ended. Without a limit, a single CPU replica on a single host
            runs in this process, and its errors are raised unchanged.
        sharded: whether to use `launch.mesh`, if set: `fn` then runs in one process for all devices of a host. False
            means replicas, except on TPUs of several hosts, which always get a mesh.
        meeting: meeting of the hosts whose replicas work together; None for this host alone.
        backend: result of `detection.detect`, for which `sharded` has no effect; None calls it.

    Raises:
        ValueError: a device, memory or disk is missing, another process uses the TPU, or a variable such as
            XLA_USE_BF16 changes dtypes. Or `fn` cannot be sent, or the kit refuses an input in a replica.
        runtime.Outdated: the facts that the launch was planned with have changed.
        LaunchError: a replica failed or hangs (`launch.hang_timeout`), or the time limit was exceeded. The text has the
            rank and the traceback of a failure; stacks of a hang are printed.
        HostError: with several hosts, another host failed or is lost, or any host hangs.
        KeyboardInterrupt, SystemExit: a signal was received and all replicas have ended. A function that handles
            preemption (`preemption.PreemptionGuard`) returns its result after the first signal; a second ends it.
    """
    meeting = meeting or Meeting()
    several = meeting.hosts.count > 1
    if backend is None:
        launched = config.launch if sharded else replace(config.launch, mesh=None)
        backend = detection.detect(launched, hosts=meeting.hosts)
    _announce(f"tpu_kit: {backend}")
    budget = config.checkpoint.budget_minutes
    if backend.device_type == "cpu" and backend.num_replicas == 1 and time_limit is None and not several:
        return _inline(fn, config, Notices(budget))
    payload = payload_of(fn, config)
    _check_host(backend, config)
    with launch_folder() as name, Notices(budget, meeting, folder := Path(name)) as notices:
        try:
            return Supervisor(backend, folder, config.launch.hang_timeout, time_limit, meeting).run(payload, notices)
        except LaunchError as error:
            if not several or not _lost_a_peer(error.traceback):
                raise
            raise meeting.cause(error) from error


def _inline(fn: Callable[[TrainConfig], T], config: TrainConfig, notices: Notices) -> T:
    """Runs `fn(config)` as the only CPU replica in this process and returns its result; `notices` may end it early."""
    import torch

    from tpu_kit.distributed.replica.backends import CpuRuntime

    with notices:
        preemption.join(notices.flag)
        runtime.enter(CpuRuntime(0, 1, torch.device("cpu")))
        try:
            return fn(config)
        finally:
            runtime.enter(None)
            preemption.join(None)


_OTHER_NUMBERS = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_FP16", "XLA_DOWNCAST_FP16", "XLA_USE_32BIT_LONG")


def _is_on(name: str) -> bool:
    """Whether an environment variable is set, and not to "", "0" or "false"."""
    return os.environ.get(name, "").lower() not in ("", "0", "false")


def _check_host(backend: Backend, config: TrainConfig) -> None:
    """Raises ValueError for too little memory or disk, a TPU in use, or variables of XLA that change dtypes."""
    at = Machine()
    if backend.device_type in ("tpu", "xla-cpu") and (changed := [name for name in _OTHER_NUMBERS if _is_on(name)]):
        raise ValueError(
            f"unset {' and '.join(changed)}: torch_xla would compute in other types than the program's, for "
            "example in bf16 for fp32; model.base_dtype chooses the type"
        )
    processes = backend.num_replicas or max(len(at.tpus()), 1)
    memory = check_memory(at, config, processes)
    if memory.status == "failure":
        raise ValueError(f"not enough host memory to start {processes} replicas: {memory.found}. Use {memory.fix}")
    if (disk := check_disk(at, config)).status == "failure":
        raise ValueError(f"not enough disk: {disk.found}. Set {disk.fix}")
    if backend.device_type == "tpu":
        for check in (check_process(at), check_holder(at)):
            if check.status == "failure":
                raise ValueError(f"the TPU cannot be used: {check.found}. {check.fix}")
