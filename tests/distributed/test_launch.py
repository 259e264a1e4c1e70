"""Launches of real replicas: results, messages for each kind of end, and no process left behind."""

from __future__ import annotations

import builtins
import errno
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nbclient
import nbformat
import pytest
import torch

from tests.support import replica_functions
from tests.support.child_processes import PYTHONPATH, QUICK_XLA_FLAGS, child_environment
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed import launch as launch_module
from tpu_kit.distributed.detection import Backend
from tpu_kit.distributed.launch import LaunchError, Supervisor, launch
from tpu_kit.distributed.preemption import launch_folder
from tpu_kit.distributed.replica import worker
from tpu_kit.distributed.replica.worker import LAUNCHER, ReplicaMessage, write
from tpu_kit.machine import capacity
from tpu_kit.machine.checks import Check, Machine

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
xla_cpu = pytest.param("xla-cpu", marks=needs_xla)
slow_xla_cpu = pytest.param("xla-cpu", marks=[needs_xla, pytest.mark.slow])
AT_MOST = 15.0  # seconds from a failure to its error
MARKER = "TPU_KIT_TEST_LAUNCH"
ONE, THREE = ["launch.num_replicas=1"], ["launch.num_replicas=3"]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XLA_FLAGS", QUICK_XLA_FLAGS)
    monkeypatch.setenv(MARKER, str(tmp_path))  # every process of these launches inherits it
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert eventually(lambda: not left_over(tmp_path), 5), left_over(tmp_path)


def left_over(tmp_path: Path) -> dict[int, str]:
    """Processes that a launch of this test left behind: id and command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if f"{MARKER}={tmp_path}\0".encode() in environ and int(folder.name) != os.getpid():
            found[int(folder.name)] = command
    return found


def eventually(condition: Callable[[], Any], seconds: float) -> Any:
    until = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return value


def settings(tmp_path: Path, device_type: str, *more: str) -> list[str]:
    return [
        f"launch.device_type={device_type}", "launch.num_replicas=2", "launch.hang_timeout=120",
        f"output_dir={tmp_path / 'out'}", *more,
    ]  # fmt: skip


def config_for(tmp_path: Path, device_type: str, *more: str) -> TrainConfig:
    return load_config(overrides=settings(tmp_path, device_type, *more))


def marked(tmp_path: Path, name: str, seconds: float = 90) -> tuple[float, int]:
    """Time of a mark that a replica left, and its process."""
    path = tmp_path / "out" / name
    assert eventually(path.is_file, seconds), f"no {name} in {seconds} s"
    at, pid = path.read_text().split()
    return float(at), int(pid)


class Killer(threading.Thread):
    """Kills the process that leaves a mark."""

    def __init__(
        self, tmp_path: Path, name: str, number: signal.Signals, after: Callable[[], Any] = lambda: None
    ) -> None:
        super().__init__()
        self._after = after
        self._mark = functools.partial(marked, tmp_path, name)
        self._number = number
        self.at, self.pid = 0.0, 0
        self.start()

    def run(self) -> None:
        _, self.pid = self._mark()
        self._after()
        time.sleep(0.5)
        self.at = time.time()
        os.kill(self.pid, self._number)


# ------------------------------------------------------------------------------------------------------------ results


def test_one_cpu_replica_runs_inline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def here(config: TrainConfig) -> tuple[int, int]:  # not even importable
        pids.append(os.getpid())
        return replica_functions.return_rank(config)

    assert launch(here, config_for(tmp_path, "cpu", "launch.num_replicas=1")) == (0, 1)
    assert pids == [os.getpid()]
    said = "tpu_kit: device_type=cpu, 1 replica(s): as configured\n"
    assert capsys.readouterr().err == said
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    launch(here, config_for(tmp_path, "cpu", "launch.num_replicas=1"))
    assert capsys.readouterr().out == said
    with pytest.raises(OSError, match="the disk is full"):
        launch(replica_functions.raise_in_all, config_for(tmp_path, "cpu", "launch.num_replicas=1"))


def test_rank_0_is_streamed_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[tuple[float, str]] = []
    stream = SimpleNamespace(write=lambda text: arrived.append((time.monotonic(), text)), flush=lambda: None)
    monkeypatch.setattr(sys, "stdout", stream)
    assert launch(functools.partial(replica_functions.print_slowly), config_for(tmp_path, "cpu")) == (0, 2)
    text = "".join(text for _, text in arrived)
    assert text == "line 0 of rank 0\nline 1 of rank 0\nline 2 of rank 0\n"
    times = [next(at for at, text in arrived if f"line {number}" in text) for number in range(3)]
    assert times[1] - times[0] > 0.1 and times[2] - times[1] > 0.1


def test_output_that_nobody_reads_does_not_stop_it() -> None:
    def closed(_: str) -> None:
        raise BrokenPipeError

    target: Any = SimpleNamespace(write=closed, flush=lambda: None)
    reading, writing = os.pipe()
    with open(reading, "rb") as source:
        thread = Supervisor(Backend("cpu", 2, ""), Path(), 60)._stream(source, target)
        with open(writing, "wb") as pipe:
            pipe.write(b"x" * 2**21)  # more than a pipe holds
        thread.join(30)
        assert not thread.is_alive()


def test_an_error_that_says_what_to_do_has_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as told:
        launch(replica_functions.miss_a_bucket, config_for(tmp_path, "cpu"))
    assert re.fullmatch(
        r"rank(s 0, 1| 0| 1) failed:\n\[Errno 2\] there is no bucket memory://mine: make it .*, or check its name",
        str(told.value),
    )


# -------------------------------------------------------------------------------------------------- values that cannot
# be sent


def test_values_that_cannot_be_sent_are_named(tmp_path: Path) -> None:
    """Values that a function reads, however deep, also as arguments of the launched function."""
    lock, tensor = threading.Lock(), torch.empty(1, device="meta")
    with open(tmp_path / "log", "w") as log:

        def writes(completions: Any) -> None:
            log.write(completions)

        def waits(config: TrainConfig, given: Any = None) -> None:
            with lock:
                pass

        config = config_for(tmp_path, "cpu")
        for function, told in (
            (waits, r"the variable lock of .*waits cannot be sent to the replicas, .*_thread.lock' obj"),
            (functools.partial(replica_functions.return_rank, rewards=["auto", writes]),
             r"the variable log of .*writes cannot be sent .*files that are not opened for reading.*: make it within"),
            (lambda config: tensor, r"the variable tensor of .*lambda> cannot be sent .*it holds a tensor on meta"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=told):
                launch(function, config)


def test_result_that_cannot_be_sent(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"return_lock returned a lock that cannot be sent .*return plain values, or"):
        launch(replica_functions.return_lock, config_for(tmp_path, "cpu", *ONE), time_limit=100)


@needs_xla
def test_a_result_on_the_device_initialises_nothing_here(tmp_path: Path) -> None:
    """If the caller unpickled such a result, it would initialise the device there."""
    with pytest.raises(LaunchError, match=r"it holds a tensor on xla:0; read it with .*to_host"):
        launch(replica_functions.return_tensor, config_for(tmp_path, "xla-cpu"))
    torch_xla = sys.modules.get("torch_xla")
    assert torch_xla is None or not torch_xla._XLAC._xla_runtime_is_initialized()


@pytest.mark.slow
def test_module_that_replicas_do_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost_steps.py").write_text("def run(config):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import lost_steps  # type: ignore[import-not-found]

    (tmp_path / "lost_steps.py").unlink()
    with pytest.raises(LaunchError, match=r"(?s)ranks? 0.*failed:.*ModuleNotFoundError: No module named 'lost_steps'"):
        launch(lost_steps.run, config_for(tmp_path, "cpu", *ONE), time_limit=100)


def test_not_enough_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "huge"
    model.mkdir()
    with open(model / "model.safetensors", "wb") as file:
        os.truncate(file.fileno(), 2**33)  # sparse: it takes no disk
    monkeypatch.setattr(capacity, "free_memory", lambda at: 2.0**60)
    with pytest.raises(
        ValueError,
        match=rf"^not enough disk: .* GiB free for {tmp_path}.*, 1[68]1.0 needed. Set output_dir=/larger/disk/run$",
    ):
        launch(replica_functions.return_rank, config_for(tmp_path, "cpu", f"model.name={model}", "lora.r=0", "keep=3"))


@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
def test_variables_that_change_what_is_computed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "0")
    config = load_config(None, {"device_type": "xla-cpu", "num_replicas": 2})
    with pytest.raises(ValueError, match=r"^unset XLA_USE_BF16: torch_xla would compute in other types"):
        launch(replica_functions.print_and_wait, config)


@pytest.mark.slow
@pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
def test_a_flag_that_xla_does_not_know_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_mistyped=1")
    config = load_config(None, {"device_type": "xla-cpu", "num_replicas": 2})
    told = "-> XLA_FLAGS has a flag that this XLA does not know: --xla_mistyped=1. Remove it"
    with pytest.raises(LaunchError, match=told) as caught:
        launch(replica_functions.print_and_wait, config)
    assert len(str(caught.value).splitlines()) == 2


def test_not_enough_host_memory(tmp_path: Path) -> None:
    model = tmp_path / "huge"
    model.mkdir()
    with open(model / "model.safetensors", "wb") as file:
        os.truncate(file.fileno(), 2**43)  # sparse: it takes no disk
    with pytest.raises(
        ValueError,
        match=r"not enough host memory to start 2 replicas: .* GiB free, 1638\d.* needed: "
        r"2 x 8192.00 of weights .*Use a smaller model.name",
    ):
        launch(replica_functions.return_rank, config_for(tmp_path, "cpu", f"model.name={model}"))  # fmt: skip


def test_a_runtime_that_is_already_initialised_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = Check("This process", "failure", 'a launch would fail with "Runtime is already initialized"', "restart")
    monkeypatch.setattr(launch_module, "check_process", lambda at: touched)
    with pytest.raises(ValueError, match=r'the TPU cannot be used: .* already initialized"\. restart'):
        launch_module._check_host(Backend("tpu", None, ""), config_for(tmp_path, "tpu", "launch.num_replicas=null"))


# ------------------------------------------------------------------------------------------------------------ bad ends


@pytest.mark.parametrize("device_type", [xla_cpu, pytest.param("cpu", marks=pytest.mark.slow)])
def test_rank_that_raises(device_type: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(replica_functions.raise_in_rank_1, config_for(tmp_path, device_type))
    assert time.time() - marked(tmp_path, "failing-1")[0] < AT_MOST
    assert str(caught.value).startswith("rank 1 failed:\nTraceback (most recent call last)")
    assert "in raise_in_rank_1" in str(caught.value)
    assert str(caught.value).endswith("KeyError: 'no such column: rationale'")
    assert "rank 0" not in str(caught.value)  # it was only waiting
    assert caught.value.rank == 1
    assert caught.value.traceback.startswith("Traceback")
    assert not left_over(tmp_path)


@pytest.mark.parametrize(
    ("device_type", "number", "who"),
    [
        pytest.param("xla-cpu", signal.SIGKILL, "ranks 0, 1 (process {pid})", marks=needs_xla),
        ("cpu", signal.SIGKILL, "rank 1 (process {pid})"),
        pytest.param("cpu", signal.SIGSEGV, "rank 1 (process {pid})", marks=pytest.mark.slow),
    ],
)
def test_killed_process(device_type: str, number: signal.Signals, who: str, tmp_path: Path) -> None:
    killer = Killer(tmp_path, "here-1", number)
    with pytest.raises(LaunchError) as caught:
        launch(replica_functions.wait_in_all_reduce, config_for(tmp_path, device_type))
    assert time.time() - killer.at < AT_MOST
    assert str(caught.value).startswith(f"{who.format(pid=killer.pid)} was ended by {number.name}")
    assert ("if host memory is full" in str(caught.value)) == (number == signal.SIGKILL)
    assert caught.value.rank == (None if device_type == "xla-cpu" else 1)
    assert not left_over(tmp_path)


def test_replica_that_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_SETTLE", 2)  # the end of rank 0, which loses its peer, is reported too
    told = (
        r"^rank 1 \(process \d+\) ended with status 3 and no result\n\nThe last lines on stderr:\n(.*\n)*rank 1 has no"
    )
    with pytest.raises(LaunchError, match=told):
        launch(replica_functions.exit_rank_1, config_for(tmp_path, "cpu"))
    assert time.time() - marked(tmp_path, "failing-1")[0] < AT_MOST


def test_replica_that_ends_well_without_a_result(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"^rank 1 \(process \d+\) ended with status 0 and no result"):
        launch(replica_functions.vanish_in_rank_1, config_for(tmp_path, "cpu", "launch.hang_timeout=20"))


@pytest.mark.parametrize("device_type", [slow_xla_cpu, "cpu"])
def test_hang_of_all(device_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"no sign of life for 3 s \(launch.hang_timeout\): no output, no processor"):
        launch(replica_functions.print_and_wait, config_for(tmp_path, device_type, "launch.hang_timeout=3"))
    assert time.time() - marked(tmp_path, "here-0")[0] < 3 + AT_MOST
    out, err = capsys.readouterr()
    assert out == "rank 0 is here\n"
    assert err.count("in print_and_wait") == 2  # the stack of each replica
    assert not left_over(tmp_path)


@needs_xla
@pytest.mark.slow
def test_rank_that_does_not_come_to_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"rank 1 did not come to the step in 6 s \(launch.hang_timeout\), where rank 0"
    ):
        launch(replica_functions.wait_in_all_reduce, config_for(tmp_path, "xla-cpu", "launch.hang_timeout=6"))
    assert time.time() - marked(tmp_path, "here-1")[0] < 6 + AT_MOST
    assert capsys.readouterr().err.count("in wait_in_all_reduce") >= 2
    assert not left_over(tmp_path)


def test_a_replica_that_dies_after_another_one_has_ended_well(tmp_path: Path) -> None:
    """The first error must not hide the second."""

    def has_ended() -> bool:
        try:
            stat = Path(f"/proc/{marked(tmp_path, 'here-1')[1]}/stat").read_text()
        except FileNotFoundError:  # it was waited for
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"

    killer = Killer(tmp_path, "here-2", signal.SIGKILL, after=lambda: eventually(has_ended, 30))
    with pytest.raises(LaunchError, match=r"^rank 2 \(process \d+\) was ended by SIGKILL"):
        launch(replica_functions.end_well_in_rank_1, config_for(tmp_path, "cpu", *THREE, "launch.hang_timeout=20"))
    assert time.time() - killer.at < AT_MOST


def test_the_end_of_a_replica_is_told_however_early_it_was(tmp_path: Path) -> None:
    class Ended:  # and reaped, so that it is none of the active children
        pid, exitcode = 101, -9

    over, replicas = threading.Event(), cast(Any, [Ended()])
    over.set()
    worker._watch_children(str(tmp_path), replicas, over)
    (report,) = map(ReplicaMessage.read, tmp_path.iterdir())
    assert report[1:] == (LAUNCHER, "ended", (101, -9))


@needs_xla
def test_packages_that_do_not_load_are_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_xla.py").write_text("raise ImportError('_XLAC.so: undefined symbol: _ZN5torch4lazy13MetricFn')")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = r"(?s)^rank 0 failed:\nTraceback.*undefined symbol: .*\n\n-> torch and torch_xla do not match: "
    with pytest.raises(LaunchError, match=told):
        launch(replica_functions.return_rank, config_for(tmp_path, "xla-cpu"))


def test_a_report_that_finds_no_room_leaves_some_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "replace", full)
        write(str(tmp_path), 0, "done", b"much")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_replicas_that_die_together_are_all_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        launch(replica_functions.die_together, config_for(tmp_path, "cpu", *THREE))
    text = str(caught.value)
    assert re.search(r"^rank 1 \(process \d+\) was ended by SIGKILL: often by the kernel", text, re.MULTILINE)
    assert re.search(r"^rank 2 \(process \d+\) ended with status 3 and no result$", text, re.MULTILINE)
    assert re.search(r"\n\nThe last lines on stderr:\n(.*\n)*rank 1 has no room left", text)


def test_a_replica_that_computes_for_ever_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        LaunchError, match=r"^a replica joined no collective of the others for 3 x launch.hang_timeout="
    ):
        launch(replica_functions.compute_for_ever, config_for(tmp_path, "cpu", "launch.hang_timeout=3"))
    assert time.time() - marked(tmp_path, "computing-1")[0] < 9 + AT_MOST
    assert "in compute_for_ever" in capsys.readouterr().err
    assert not left_over(tmp_path)


@needs_xla
@pytest.mark.slow
def test_hang_that_holds_the_gil(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="no sign of life"):
        launch(replica_functions.hold_the_gil, config_for(tmp_path, "xla-cpu", "launch.hang_timeout=8"))
    assert "in hold_the_gil" in capsys.readouterr().err


def judged(*reports: tuple[int, str, Any]) -> LaunchError:
    with launch_folder() as folder:
        for report in ((0, "started", 100), (1, "started", 101), *reports):
            write(folder, *report)
        return Supervisor(Backend("cpu", 2, ""), Path(folder), 60)._failed(cast(Any, None))


def test_the_first_cause_is_told_not_what_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "_SETTLE", 0.0)

    def error(text: str) -> str:
        return f"Traceback (most recent call last):\n  ...\n{text}\n"

    closed = error("RuntimeError: [../tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:25410")
    killed = judged((0, "error", closed), (1, "ended", (101, -9)), (LAUNCHER, "error", error("x: SIGKILL")))
    assert str(killed).startswith("rank 1 (process 101) was ended by SIGKILL") and killed.rank == 1
    raised = judged((0, "error", closed), (1, "error", error("ValueError: 1")), (0, "ended", (100, -15)))
    assert str(raised) == f"rank 1 failed:\n{error('ValueError: 1').rstrip()}" and raised.rank == 1
    both = judged((0, "error", error("ValueError: 0")), (1, "error", error("ValueError: 1")))
    alike = judged((1, "error", error("OSError: full")), (0, "error", error("OSError: full")))
    assert str(alike).startswith("ranks 0, 1 failed:\nTraceback") and str(alike).count("OSError: full") == 1
    assert both.rank == 0 and "rank 0 failed" in str(both) and "rank 1 failed" in str(both)
    alone = judged((1, "error", closed))
    assert str(alone).startswith("rank 1 failed") and "Connection closed by peer" in str(alone)
    late = judged((LAUNCHER, "ended", (102, -9)), (1, "started", 102))
    assert str(late).startswith("rank 1 (process 102) was ended by SIGKILL")
    assert str(judged((LAUNCHER, "ended", (777, -9)))).startswith("a replica that had not started (process 777)")
    two = judged((LAUNCHER, "ended", (101, -9)), (LAUNCHER, "ended", (100, 3)))
    assert str(two).splitlines()[1] == "rank 0 (process 100) ended with status 3 and no result" and two.rank == 1
    # A replica that lost its peer has reported it; the later end of its process is a consequence.
    lost = judged((LAUNCHER, "ended", (101, -9)), (LAUNCHER, "ended", (100, 3)), (0, "error", closed))
    assert str(lost).startswith("rank 1 (process 101) was ended by SIGKILL") and "rank 0" not in str(lost)
    # The peer's message need not be known; XLA and NCCL abort a process that lost its peer.
    odd = judged((0, "error", error("RuntimeError: peer 1 is odd")), (LAUNCHER, "ended", (101, -9)))
    assert str(odd).startswith("rank 1 (process 101) was ended by SIGKILL") and "odd" not in str(odd) and odd.rank == 1
    aborted = judged((0, "error", error("ValueError: 0")), (LAUNCHER, "ended", (101, -6)))
    assert str(aborted).startswith("rank 0 failed") and aborted.rank == 0
    vanished = judged((0, "error", closed), (LAUNCHER, "ended", (101, 0)))
    assert str(vanished) == "rank 1 (process 101) ended with status 0 and no result"
    assert judged((0, "error", closed), (1, "done", b""), (LAUNCHER, "ended", (101, 0))).rank == 0
    launcher = judged((LAUNCHER, "error", error("ImportError: torch")))
    assert str(launcher).startswith("the launcher failed:\nTraceback") and launcher.rank is None


# ------------------------------------------------------------------------------------------------ the caller's own end


def caller(tmp_path: Path, device_type: str, function: str) -> subprocess.Popen[str]:
    code = (
        # A shell's background job, which the tests may be, ignores SIGINT, and its children inherit that.
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.support import replica_functions\nfrom tpu_kit import launch, load_config\n"
        f"launch(replica_functions.{function}, load_config(overrides={settings(tmp_path, device_type)!r}))\n"
    )
    env = child_environment({"PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None, MARKER: str(tmp_path)})
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("device_type", [xla_cpu, "cpu"])
def test_interrupt_ends_everything(device_type: str, tmp_path: Path) -> None:
    with caller(tmp_path, device_type, "finish_when_asked") as process:
        for rank in range(2):
            marked(tmp_path, f"here-{rank}")
        assert process.stdout is not None and process.stdout.readline() == "rank 0 is here\n"  # streamed
        assert len(left_over(tmp_path)) >= 2
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert time.monotonic() - started < AT_MOST
    assert error.rstrip().endswith("KeyboardInterrupt")
    assert not left_over(tmp_path)
    if device_type == "cpu":  # they were asked to end, and had time
        for rank in range(2):
            marked(tmp_path, f"saved-{rank}", 1)


@pytest.mark.parametrize(
    ("device_type", "function"),
    [
        pytest.param("xla-cpu", "print_and_wait", marks=[needs_xla, pytest.mark.slow]),
        pytest.param("xla-cpu", "hold_the_gil", marks=needs_xla),
        ("cpu", "print_and_wait"),
    ],
)
def test_nothing_outlives_a_killed_caller(device_type: str, function: str, tmp_path: Path) -> None:
    with caller(tmp_path, device_type, function) as process:
        assert eventually(lambda: list((tmp_path / "out").glob("here-?")), 90)
        (line,) = [line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if "/tpu_kit-" in line]
        folder = Path(line.split()[5]).parent
        assert folder.is_dir()
        process.kill()
        assert eventually(lambda: not left_over(tmp_path), AT_MOST), left_over(tmp_path)
        assert not folder.exists()


def test_a_second_interrupt_does_not_stop_the_killing(request: pytest.FixtureRequest) -> None:
    """Ctrl-C is often pressed twice."""
    # A shell's background job, which the tests may be, ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    ignores = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", ignores + "time.sleep(600)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    timer = threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    started = time.monotonic()
    launch_module._end(process, signal.SIGTERM)
    timer.join()
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - started < 9  # before the whole grace period


# ------------------------------------------------------------------------------------------------------ a real kernel


@pytest.mark.slow  # notebook 7 launches twice in its kernel
def test_launch_cell_twice_in_one_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    cells = [
        "from tests.support import replica_functions\nfrom tpu_kit import launch, load_config\n"
        f"config = load_config(overrides={settings(tmp_path, 'cpu')!r})",
        "print(launch(replica_functions.print_slowly, config))",
        "print(launch(replica_functions.print_slowly, config))",
        "import os\nseen = []\ndef twice(number):\n    return 2 * number + len(seen)\ndef mine(config):\n"
        "    seen.append(1)\n    return twice(3), os.getpid()\nnumber, pid = launch(mine, config)\n"
        "print(number, pid != os.getpid(), seen)",
        "import sys; print('torch_xla' in sys.modules)",
        "from tpu_kit.distributed import launch as module; [module._announce('here') for _ in range(3)]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    for cell in notebook.cells[1:3]:
        text = "".join(output.get("text", "") for output in cell.outputs if output.get("name") == "stdout")
        device = "tpu_kit: device_type=cpu, 2 replica(s): as configured\n"  # stderr looks like an error
        assert text == device + "line 0 of rank 0\nline 1 of rank 0\nline 2 of rank 0\n(0, 2)\n", cell.outputs
    text = "".join(output.get("text", "") for output in notebook.cells[3].outputs)
    assert text == f"{device}7 True []\n", "the replica has a copy of the cell's functions and variables"
    assert "".join(output.text for output in notebook.cells[4].outputs) == "False\n"  # in one message or two
    assert notebook.cells[5].outputs[0].text == "here\n", "once a cell"


def test_a_launch_on_a_tpu_stores_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla 2.8 and 2.9 cannot load them: pytorch/xla issue 9094."""
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)
    assert launch_module._settings(Backend("tpu", None, "")) == {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "TPU"}
