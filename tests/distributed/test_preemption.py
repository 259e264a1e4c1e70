"""Notices from signals, a metadata server and the clock in real launches: all ranks stop at the same step."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.distributed.test_launch import (
    THREE,
    Killer,
    config_for,
    environment,
    eventually,
    left_over,
    marked,
    needs_xla,
    xla_cpu,
)
from tests.support import replica_functions
from tests.support.child_processes import run_python
from tpu_kit.distributed import preemption
from tpu_kit.distributed.launch import LaunchError, launch
from tpu_kit.distributed.preemption import Notices, PreemptionGuard, StopFlag, launch_folder, watch_metadata
from tpu_kit.distributed.replica.backends import CpuRuntime

__all__ = ["environment"]  # a fixture
INLINE = "launch.num_replicas=1"


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    # A shell's background job, which the tests may be, ignores SIGINT.
    before, threads = signal.signal(signal.SIGINT, signal.default_int_handler), {*threading.enumerate()}
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGINT, before)
    # Calls that test_main_thread has abandoned may still sleep.
    assert eventually(lambda: not [t for t in {*threading.enumerate()} - threads if t.name.startswith("tpu_kit ")], 5)


@pytest.fixture(autouse=True)
def no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")  # no server listens there


def after(mark: Callable[[], Any], *acts: Callable[[], Any], every: float = 0.0) -> threading.Thread:
    """Calls a function in a thread when a mark exists."""

    def run() -> None:
        mark()
        for act in acts:
            act()
            time.sleep(every)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def this_process(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def assert_agreed(lasts: list[tuple[int, str | None]], ranks: int, reason: str) -> int:
    """Returns the last step, which all ranks share."""
    assert len(lasts) == ranks
    assert len(set(lasts)) == 1, lasts
    step, why = lasts[0]
    assert why is not None and re.search(reason, why), why
    return step


# ---------------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize(("device_type", "ranks"), [pytest.param("xla-cpu", 4, marks=needs_xla), ("cpu", 2)])
def test_sigterm(device_type: str, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after(lambda: marked(tmp_path, "stepping-0"), this_process(signal.SIGTERM))
    config = config_for(tmp_path, device_type, f"launch.num_replicas={ranks}")
    step = assert_agreed(launch(replica_functions.agreed_steps, config), ranks, "^SIGTERM received$")
    assert step >= 3
    told = "tpu_kit: SIGTERM received: saving a checkpoint at the next step; once more ends at once\n"
    assert capsys.readouterr().err.count(told) == 1


@pytest.mark.slow
@pytest.mark.parametrize("device_type", [xla_cpu, "cpu"])
def test_ranks_that_are_far_apart(device_type: str, tmp_path: Path) -> None:
    """Slow ranks continue until they have taken all steps that the fastest rank had started."""
    after(lambda: marked(tmp_path, "stepping-0"), this_process(signal.SIGINT))
    step = assert_agreed(launch(replica_functions.uneven_steps, config_for(tmp_path, device_type)), 2, "^SIGINT rec")
    at = marked(tmp_path, "stepping-0")[0]
    assert 40 <= step <= 40 + (time.time() - at) / 0.002
    assert not (tmp_path / "out" / "stepping-1").exists() or marked(tmp_path, "stepping-1")[0] > at


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("device_type", "rounds"), [("cpu", 60), pytest.param("xla-cpu", 20, marks=needs_xla)])
def test_kills_and_notices_at_random_moments_of_the_steps(device_type: str, rounds: int, tmp_path: Path) -> None:
    """The killed replica is named, not its peers; after a notice all ranks have taken the same steps."""
    chance = random.Random(rounds)
    for number in range(rounds):
        folder, victim, delay = tmp_path / str(number), chance.randrange(3), chance.random()
        config = config_for(folder, device_type, *THREE)
        if chance.random() < 0.4:
            after(
                lambda at=folder: marked(at, "stepping-0"), lambda s=delay: time.sleep(s), this_process(signal.SIGTERM)
            )
            assert assert_agreed(launch(replica_functions.agreed_steps, config), 3, "^SIGTERM received$") >= 3
        else:
            killer = Killer(folder, f"stepping-{victim}", signal.SIGKILL, after=lambda s=delay: time.sleep(s))
            with pytest.raises(LaunchError) as caught:
                launch(replica_functions.agreed_steps, config)
            who = f"rank {victim}" if device_type == "cpu" else "ranks 0, 1, 2"
            assert str(caught.value).startswith(f"{who} (process {killer.pid}) was ended by SIGKILL"), number
            assert caught.value.rank == (victim if device_type == "cpu" else None)
        print(f"round {number} as it should be")


HAMMER = """
import os, random, sys, time
from tpu_kit.distributed import preemption
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.preemption import StopFlag
from tpu_kit.distributed.replica.runtime import Runtime

for round in range(15):
    flag = StopFlag()
    preemption.join(flag)
    ends = []
    for rank in range(4):
        reading, writing = os.pipe()
        ends.append(reading)
        if os.fork():
            os.close(writing)
            continue
        chance = random.Random(f"{round} {rank}")
        with PreemptionGuard(CpuRuntime(rank, 4, None)) as agreement:
            step = 1
            while agreement.should_run(step):
                step += 1
                if chance.random() < 0.001:
                    time.sleep(chance.random() * 0.02)
        os.write(writing, str(step - 1).encode())
        os._exit(0)
    time.sleep(random.Random(round).random() * 0.05)
    flag.release(flag.hold("enough"))
    lasts = {os.read(end, 100) for end in ends}
    assert len(lasts) == 1 and lasts != {b"0"}, lasts
    for end in ends:
        os.wait()
        os.close(end)
"""


def test_no_moment_is_a_bad_one() -> None:
    """Four processes poll on fewer cores, and get the notice at different moments; 15 times."""
    run_python(HAMMER)


def test_notice_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notice that does not end the function at once is kept until the function can handle it."""
    with Server() as server, server.as_the_cloud():
        after(lambda: marked(tmp_path, "stepping-0"), lambda: server.set("preempted", "TRUE"))
        lasts = launch(replica_functions.steps_after_loading, config_for(tmp_path, "cpu", INLINE))
    assert assert_agreed(lasts, 1, "instance/preempted says TRUE") == 0
    assert "(instance/preempted says TRUE)\n" in capsys.readouterr().err


def test_without_a_launch() -> None:
    with PreemptionGuard(CpuRuntime(0, 1, None)) as agreement:  # type: ignore[arg-type]
        assert all(agreement.should_run(step) for step in range(1, 9))
    assert agreement.reason is None


def test_may_start_costs_next_to_nothing(tmp_path: Path) -> None:
    """Measured 0.5 us; the bound allows for a busy machine."""
    assert launch(replica_functions.cost_of_asking, config_for(tmp_path, "cpu", INLINE)) < 50e-6


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("device_type", "number"),
    [pytest.param("xla-cpu", signal.SIGTERM, marks=[needs_xla, pytest.mark.slow]), ("cpu", signal.SIGINT)],
)
def test_second_signal_ends_at_once(
    device_type: str, number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after(lambda: marked(tmp_path, "stepping-0"), this_process(number))
    after(lambda: marked(tmp_path, "told-0"), this_process(number))
    with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
        launch(replica_functions.never_saves, config_for(tmp_path, device_type))
    assert time.time() - marked(tmp_path, "told-0")[0] < 3
    if number == signal.SIGTERM:
        assert isinstance(caught.value, SystemExit) and caught.value.code == 143
    else:
        assert isinstance(caught.value, KeyboardInterrupt)
    assert not left_over(tmp_path)
    assert f"{number.name} received: saving a checkpoint" in capsys.readouterr().err


def test_signal_to_a_function_that_heeds_none(tmp_path: Path) -> None:
    after(lambda: [marked(tmp_path, f"here-{rank}") for rank in range(2)], this_process(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        launch(replica_functions.finish_when_asked, config_for(tmp_path, "cpu"))
    assert caught.value.code == 143
    for rank in range(2):
        marked(tmp_path, f"saved-{rank}")  # it was asked before it was killed


def test_signal_after_a_notice_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that shuts down gives two notices, and the second must not interrupt saving."""
    with Server() as server, server.as_the_cloud():
        after(lambda: marked(tmp_path, "stepping-0"), lambda: server.set("preempted", "TRUE"))
        after(lambda: marked(tmp_path, "saving-0"), this_process(signal.SIGTERM))
        lasts = launch(replica_functions.agreed_steps, config_for(tmp_path, "cpu", INLINE))
    assert_agreed(lasts, 1, "instance/preempted says TRUE")
    told = "SIGTERM received, too: the checkpoint is being saved; once more ends at once\n"
    assert capsys.readouterr().err.endswith(told)


@pytest.mark.parametrize(
    ("device_type", "to_launcher", "number"),
    [
        pytest.param("xla-cpu", True, signal.SIGUSR1, marks=[needs_xla, pytest.mark.slow]),
        pytest.param("cpu", True, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("cpu", False, signal.SIGTERM, marks=pytest.mark.slow),
        ("cpu", False, signal.SIGUSR1),
    ],
)
def test_signal_to_another_process_of_the_launch(
    device_type: str, to_launcher: bool, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that shuts down, or a cluster that gives notice, sends it to every process."""

    def end() -> None:
        _, replica = marked(tmp_path, "stepping-1")
        parent = int(Path(f"/proc/{replica}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent if to_launcher and device_type == "cpu" else replica, number)

    after(end)
    lasts = launch(replica_functions.agreed_steps, config_for(tmp_path, device_type))
    assert_agreed(lasts, 2, "^a signal to a process of the launch$")
    assert "a signal to a process of the launch: saving a checkpoint at the next step\n" in capsys.readouterr().err


def test_rank_that_dies_after_the_notice(tmp_path: Path) -> None:
    after(lambda: marked(tmp_path, "stepping-0"), this_process(signal.SIGTERM))
    with pytest.raises(LaunchError, match=r"^rank 1 \(process \d+\) ended with status 3 and no result$"):
        launch(replica_functions.die_in_rank_1_when_told, config_for(tmp_path, "cpu"))


def test_inline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, "cpu", INLINE)
    after(lambda: marked(tmp_path, "stepping-0"), this_process(signal.SIGINT))
    assert assert_agreed(launch(replica_functions.agreed_steps, config), 1, "^SIGINT received$") >= 3
    assert "SIGINT received: saving a checkpoint at the next step; once more ends at once\n" in capsys.readouterr().err
    (tmp_path / "out" / "stepping-0").unlink()
    after(lambda: marked(tmp_path, "stepping-0"), this_process(signal.SIGTERM))
    after(lambda: marked(tmp_path, "told-0"), this_process(signal.SIGTERM))
    with pytest.raises(SystemExit) as caught:
        launch(replica_functions.never_saves, config)
    assert caught.value.code == 143
    after(lambda: marked(tmp_path, "here-0"), this_process(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # a function that ignores notices
        launch(replica_functions.print_and_wait, config)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1], ids=["SIGHUP", "SIGUSR1"])
def test_a_closed_terminal_and_a_notice_of_a_cluster_save(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it comes twice, as from a terminal and its shell."""
    inherited = signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored, and a run would ignore it too
    after(lambda: marked(tmp_path, "stepping-0"), this_process(number))
    after(lambda: marked(tmp_path, "stepping-0"), this_process(number))
    try:
        lasts = launch(replica_functions.agreed_steps, config_for(tmp_path, "cpu", INLINE))
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, inherited)
    assert assert_agreed(lasts, 1, f"^{number.name} received$") >= 3
    assert f"tpu_kit: {number.name} received: saving a checkpoint at the next step\n" in capsys.readouterr().err


def test_launch_from_another_thread(tmp_path: Path) -> None:
    """There, signals cannot be caught; other notices still arrive."""
    results: list[Any] = []
    with Server() as server, server.as_the_cloud():
        config = config_for(tmp_path, "cpu", INLINE)
        thread = threading.Thread(target=lambda: results.append(launch(replica_functions.agreed_steps, config)))
        thread.start()
        marked(tmp_path, "stepping-0")
        server.set("preempted", "TRUE")
        thread.join(60)
    assert_agreed(results[0], 1, "preempted")


@pytest.mark.parametrize("number", preemption.STOPS)
@pytest.mark.parametrize("kind", ["ignored", "own"])
def test_handlers_of_the_caller(kind: str, number: int) -> None:
    """An ignored signal stays ignored (nohup), and the caller's own handler runs if no function handles notices."""
    called: list[int] = []
    own: Any = signal.SIG_IGN if kind == "ignored" else lambda number, _: called.append(number)
    before = signal.signal(number, own)
    try:
        with Notices(), preemption.stops_raise():
            assert number not in preemption.catch_stops()
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        assert signal.getsignal(number) is own
        assert called == ([] if kind == "ignored" else [number])
    finally:
        signal.signal(number, before)


# ------------------------------------------------------------------------------------------------------- clock, cloud


def test_time_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with Notices(budget=0.01) as notices:
        started = time.monotonic()
        assert not notices.flag.reason
        assert eventually(lambda: bool(notices.flag.reason), 5)
        assert 0.3 < time.monotonic() - started < 2
        assert notices.flag.reason == "the time budget of 0.01 min is used up"
        time.sleep(0.1)  # until the limit is set
        assert notices.flag.may_start(0, 0) and not notices.flag.may_start(0, 1)
    assert capsys.readouterr().err == "tpu_kit: the time budget of 0.01 min is used up\n"


class Server(ThreadingHTTPServer):
    """A metadata server as Google documents it, with its header.

    Args:
        flavor: of its header; None for the server of another cloud.
    """

    daemon_threads = True

    def __init__(self, flavor: str | None = "Google") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.flavor = flavor
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.unavailable = 0
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @contextlib.contextmanager
    def as_the_cloud(self) -> Iterator[None]:
        before = os.environ["GCE_METADATA_HOST"]
        os.environ["GCE_METADATA_HOST"] = f"127.0.0.1:{self.server_port}"
        try:
            yield
        finally:
            os.environ["GCE_METADATA_HOST"] = before

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, key = self.server, urlsplit(self.path).path.removeprefix("/computeMetadata/v1/instance/")
        server.requests.append(self.path)
        if self.headers["Metadata-Flavor"] != "Google":
            return self._answer(403, "")
        if server.unavailable:
            server.unavailable -= 1
            return self._answer(503, "")
        value = server.values.get(key)
        return self._answer(404, "no such key") if value is None else self._answer(200, value)

    def _answer(self, status: int, text: str) -> None:
        with contextlib.suppress(OSError):  # a waiting thread has ended
            self.send_response(status)
            if self.server.flavor:
                self.send_header("Metadata-Flavor", self.server.flavor)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@needs_xla
@pytest.mark.slow
def test_preempted_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as server, server.as_the_cloud():
        at: list[float] = []
        turn = after(
            lambda: marked(tmp_path, "stepping-0"),
            lambda: at.append(time.monotonic()),
            lambda: server.set("preempted", "TRUE"),
        )
        lasts = launch(replica_functions.agreed_steps, config_for(tmp_path, "xla-cpu"))
        assert time.monotonic() - at[0] < 5
        turn.join()
    assert assert_agreed(lasts, 2, r"^the cloud takes this machine back \(instance/preempted says TRUE\)$") >= 3
    err = capsys.readouterr().err
    assert err.count("(instance/preempted says TRUE): saving a checkpoint at the next step\n") == 1
    assert "once more" not in err


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_PAUSE", 0.05)


@contextlib.contextmanager
def watched(give: Callable[[str], None]) -> Iterator[None]:
    closed = threading.Event()
    threading.Thread(target=watch_metadata, args=(give, closed), name="tpu_kit metadata", daemon=True).start()
    try:
        yield
    finally:
        closed.set()


def heard(server: Server, act: Callable[[], None], wait: float = 1.0) -> list[str]:
    """Returns the result of a watch, after the keys were read once and something happened."""
    given: list[str] = []
    with server.as_the_cloud(), watched(given.append):
        assert eventually(lambda: len(server.requests) >= 4, 5)
        act()
        eventually(lambda: given, wait)
    return given


UPCOMING = '{\n  "can_reschedule": "false",\n  "maintenance_status": "%s",\n  "type": "SCHEDULED"\n}'


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("before", [True, False], ids=["announced", "not announced"])
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "maintenance-event says TERMINATE_ON_HOST_MAINTENANCE"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("upcoming-maintenance", UPCOMING % "ONGOING", "upcoming-maintenance says ONGOING"),
        ("upcoming-maintenance", '{"maintenanceStatus":"ONGOING"}', "upcoming-maintenance says ONGOING"),
        ("preempted", "FALSE", None),
    ],
)
def test_what_ends_a_run(key: str, value: str, expected: str | None, before: bool) -> None:
    with Server() as server:
        if before:
            server.values["upcoming-maintenance"] = UPCOMING % "PENDING"
        given = heard(server, lambda: server.set(key, value), wait=5 if expected else 0.5)
    assert given == ([f"the cloud takes this machine back (instance/{expected})"] if expected else [])


@pytest.mark.usefixtures("quick")
def test_what_was_announced_before() -> None:
    with Server() as server:
        server.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert heard(server, lambda: None, wait=0.3) == []
        server.requests.clear()
        server.set("preempted", "TRUE")
        given: list[str] = []
        with server.as_the_cloud(), watched(given.append):
            assert eventually(lambda: given, 5)  # only seconds are left, too few to start


@pytest.mark.usefixtures("quick")
def test_server_that_is_not_available_for_a_moment() -> None:
    with Server() as server:

        def act() -> None:
            server.unavailable = 3
            server.set("preempted", "TRUE")

        assert len(heard(server, act, wait=5)) == 1
        assert server.unavailable == 0


def test_another_cloud() -> None:
    with Server(flavor=None) as server, server.as_the_cloud():
        server.values["preempted"] = "TRUE"
        given: list[str] = []
        with watched(given.append):
            assert eventually(lambda: server.requests, 5)
            time.sleep(0.2)
        assert not given and len(server.requests) == 1


@pytest.mark.parametrize("kind", ["refuses", "silent", "unknown name", "nonsense"])
def test_no_cloud(kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The caller neither waits for it nor sees it."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        hosts = {
            "refuses": "127.0.0.1:9", "silent": f"127.0.0.1:{deaf.getsockname()[1]}",
            "unknown name": "metadata.invalid", "nonsense": "no:such:port",
        }  # fmt: skip
        monkeypatch.setenv("GCE_METADATA_HOST", hosts[kind])
        monkeypatch.setattr(preemption, "_TIMEOUT", 0.5)
        started = time.monotonic()
        with Notices() as notices:
            assert time.monotonic() - started < 0.3
            time.sleep(0.3)
            assert not notices.flag.reason and notices.flag.may_start(0, 1)
            left = time.monotonic()
        assert time.monotonic() - left < 0.5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("room", [2**31, 2**26])
def test_flag_in_memory_that_has_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption.shutil, "disk_usage", lambda _: SimpleNamespace(free=room))
    in_memory = room > 2**30 and os.access("/dev/shm", os.W_OK)
    with launch_folder() as folder:
        assert Path(folder).parent == Path("/dev/shm" if in_memory else tempfile.gettempdir())
        flag, other = StopFlag(Path(folder)), StopFlag(Path(folder))
        flag.release(flag.hold("é" * 2000))
        assert other.may_start(0, 0) and not other.may_start(0, 1) and 300 < len(other.reason) < 2000
