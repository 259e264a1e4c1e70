"""The hosts of a run, their rendezvous, and what a host reports about others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_launch import config_for, needs_xla
from tests.support import replica_functions
from tests.support.object_store import Proxy, free_port
from tpu_kit import cli
from tpu_kit.config.loader import LaunchConfig
from tpu_kit.distributed import meeting as meeting_module
from tpu_kit.distributed.detection import detect
from tpu_kit.distributed.hosts import ONE, PORT, Hosts, find_hosts, interface, keep_log
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.meeting import HostError, Meeting
from tpu_kit.distributed.preemption import Notices
from tpu_kit.machine.checks import Machine

LIST = {"TPU_KIT_HOSTS": "a,b,c", "TPU_KIT_HOST_INDEX": "1"}
GKE = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "x-0.s,x-1.s"}
SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "x-0-0.s:8080"}
SKY = {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}


@pytest.mark.parametrize(
    ("environ", "index", "names", "coordinator"),
    [
        ({}, 0, ("localhost",), ""),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, 0, ("localhost",), ""),  # Kaggle
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "10.0.0.1"}, 0, ("localhost",), ""),
        (LIST, 1, ("a", "b", "c"), f"a:{PORT}"),
        (LIST | GKE | SLICES | SKY, 1, ("a", "b", "c"), f"a:{PORT}"),
        (LIST | {"TPU_KIT_COORDINATOR": "10.0.0.9:5000"}, 1, ("a", "b", "c"), "10.0.0.9:5000"),
        (GKE, 1, ("x-0.s", "x-1.s"), f"x-0.s:{PORT}"),
        (GKE | SLICES | SKY, 3, ("slice 0 worker 0", "slice 0 worker 1", "x-0.s", "x-1.s"), f"x-0-0.s:{PORT}"),
        (SKY, 2, ("10.0.0.1", "10.0.0.2", "10.0.0.3"), f"10.0.0.1:{PORT}"),
    ],
)
def test_hosts_of_the_environment(
    environ: dict[str, str], index: int, names: tuple[str, ...], coordinator: str, tmp_path: Path
) -> None:
    found = find_hosts(Machine(root=tmp_path, environ=environ))
    assert (found.index, found.names, found.coordinator) == (index, names, coordinator)
    assert found.name(found.index) == f"host {index} of {len(names)}, {names[index]}"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"TPU_KIT_HOSTS": "a,b"}, "TPU_KIT_HOST_INDEX='' is not a number from 0 to 1: set it to this host's own"),
        (LIST | {"TPU_KIT_HOST_INDEX": "3"}, "TPU_KIT_HOST_INDEX='3' is not a number from 0 to 2"),
        ({"TPU_KIT_HOST_INDEX": "1"}, "TPU_KIT_HOST_INDEX=1, but TPU_KIT_HOSTS names no hosts: set it to all hosts"),
        (LIST | {"TPU_KIT_HOSTS": "a,b,a"}, "TPU_KIT_HOSTS=a,b,a names a host twice"),
        (LIST | {"TPU_KIT_COORDINATOR": "a"}, "TPU_KIT_COORDINATOR=a is not address:port, such as a:29477"),
        (
            GKE | SLICES | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a", "TPU_KIT_COORDINATOR": "b"},
            "TPU_KIT_COORDINATOR=b is not address:port, such as x-0-0.s:29477",
        ),
        (GKE | {"TPU_WORKER_ID": "7"}, "TPU_WORKER_ID='7' is not a number from 0 to 1"),
        (GKE | SLICES | {"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID='' is not a number from 0 to 1"),
        (GKE | {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
    ],
)
def test_variables_that_are_wrong_are_told(environ: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=told):
        find_hosts(Machine(root=tmp_path, environ=environ))


@pytest.fixture
def metadata() -> Iterator[tuple[dict[str, str], str]]:
    """A metadata server: its attributes, which a test sets, and its address."""
    values: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value = values.get(self.path.rpartition("/")[2])
            self.send_response(200 if value is not None else 404)
            self.send_header("Metadata-Flavor", "Google")
            self.end_headers()
            self.wfile.write((value or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield values, f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_hosts_of_a_tpu_vm(metadata: tuple[dict[str, str], str], tmp_path: Path) -> None:
    values, address = metadata
    chip = tmp_path / "sys/bus/pci/devices/0000:00:05.0"
    chip.mkdir(parents=True)
    (chip / "vendor").write_text("0x1ae0\n")
    (chip / "device").write_text("0x0063\n")
    at = Machine(root=tmp_path, environ={}, metadata_server=address)
    assert find_hosts(at) == ONE, "the server does not know: one host, such as Colab"
    values |= {"worker-network-endpoints": "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6"}
    values |= {"agent-worker-number": "1"}
    found = find_hosts(at)
    assert (found.index, found.names, found.coordinator) == (1, ("10.0.0.5", "10.0.0.6"), f"10.0.0.5:{PORT}")
    assert find_hosts(Machine(root=tmp_path / "no", environ={}, metadata_server=address)) == ONE


def address_of_this_machine() -> str:
    """An address that is not the loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 80))  # an address without a machine; sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.mark.parametrize("index", [0, 1])
def test_the_interface_is_that_of_the_other_hosts(index: int) -> None:
    """Host 0 has the loopback's address under its own name, as Debian's /etc/hosts gives it."""
    mine = address_of_this_machine()
    assert interface(Hosts(index, ("127.0.0.1", "127.0.0.1"), "127.0.0.1:80")) == "lo"
    assert interface(Hosts(index, ("a", "b"), "127.0.1.1:80")) == "lo"
    names, coordinator = (("127.0.1.1", mine), "127.0.1.1:80") if index == 0 else ((mine, "b"), f"{mine}:80")
    found = interface(Hosts(index, names, coordinator))
    assert found != "lo" and found in [name for _, name in socket.if_nameindex()]


def test_ranks_of_several_hosts() -> None:
    hosts = Hosts(1, ("a", "b"), "a:1", "a test")
    backend = detect(LaunchConfig(device_type="cpu", num_replicas=3), hosts=hosts)
    assert backend.first_rank == 3 and "3 replica(s) on each of 2 hosts" in str(backend)


def test_the_log_of_a_host_hides_secrets(tmp_path: Path) -> None:
    with keep_log(Hosts(1, ("a", "b"), "a:1"), tmp_path):
        print("the token is hf_" + "abcdefghij" * 4)
    kept = (tmp_path / "logs" / "host-1.log").read_text()
    assert kept.startswith("[host 1] the token is ") and "abcdefghij" not in kept


def test_log_of_each_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index in (0, 1):
        with keep_log(Hosts(index, ("a", "b"), "a:1"), tmp_path):
            print(f"line {index}\nand", "a part", flush=True)
            print("0 %\r50 %\r100 %", file=sys.stderr)
        kept = (tmp_path / "logs" / f"host-{index}.log").read_text().splitlines()
        assert kept == [f"[host {index}] {text}" for text in (f"line {index}", "and a part", "100 %")]
    shown = capsys.readouterr()
    assert "[host 0] line 0" in shown.out and "line 1" not in shown.out
    assert f"log              {tmp_path}/logs/host-1.log" in shown.out
    assert "[host 1] 100 %" in shown.err


# ------------------------------------------------------------------------------------------------------------ meetings


Part = Callable[[Meeting], Any]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Hosts]]:
    """Hosts on this machine; a host without a heartbeat is lost after 2 s."""
    monkeypatch.setattr(meeting_module, "LOST", 2.0)
    monkeypatch.setattr(meeting_module, "_FAREWELL", 3.0)
    monkeypatch.setattr(meeting_module, "_TOLD", 1.0)

    def make(count: int) -> list[Hosts]:
        names, port = tuple(f"name-{index}" for index in range(count)), free_port()
        return [Hosts(index, names, f"127.0.0.1:{port}", "a test") for index in range(count)]

    return make


def together(hosts: list[Hosts], *parts: Part | None, patience: float = 10, hang_timeout: float = 60) -> list[Any]:
    """Returns the results or errors of the hosts' functions, run in threads; a host without a function does not
    join."""

    def run(host: Hosts, part: Part | None) -> Any:
        if part is None:
            return None
        try:
            with Meeting(host, patience, hang_timeout) as meeting:
                return part(meeting)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(run, hosts, parts))


def agree(**facts: Any) -> Part:
    return lambda meeting: meeting.agree(facts)


def wait(meeting: Meeting, seconds: float = 10) -> None:
    """Stays until another host has failed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        meeting.check()
        time.sleep(0.02)


def assert_raised(found: Any, kind: type[Exception] | tuple[type[Exception], ...], *texts: str) -> None:
    assert isinstance(found, kind), found
    for text in texts:
        assert text in str(found), found


def test_hosts_meet_twice_and_one_host_agrees_with_itself(hosts: Callable[[int], list[Hosts]]) -> None:
    def part(meeting: Meeting) -> str:
        meeting.agree({"config": {"a": (1, 2)}})
        meeting.agree({"data": "hash"})
        return "met"

    assert together(hosts(4), *[part] * 4) == ["met"] * 4
    with Meeting() as alone:
        assert part(alone) == "met"
        alone.check()
        alone.ask_stop("enough")
        assert (alone.stop_asked(), alone.last_step(3)) == ("enough", 3)


def test_all_hosts_have_the_date_of_host_0(
    hosts: Callable[[int], list[Hosts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clocks:
        days = iter(["2025-12-31", "2026-01-01", "2026-01-02"])

        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(next(cls.days))

    def part(meeting: Meeting) -> tuple[str, str]:
        meeting.agree({"x": 1})
        return meeting.today, str(meeting._mine["today"])

    monkeypatch.setattr(meeting_module, "date", Clocks)
    found = together(hosts(3), *[part] * 3)
    assert len({own for _, own in found}) == 3 and {day for day, _ in found} == {found[0][1]}


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_hosts_are_named(hosts: Callable[[int], list[Hosts]], missing: int) -> None:
    parts = [None if index == missing else agree(x=1) for index in range(3)]
    for index, found in enumerate(together(hosts(3), *parts, patience=0.8)):
        if index != missing:
            assert_raised(found, HostError, f"host {missing} of 3, name-{missing}, has not come within 0.8 s")
            assert_raised(
                found, HostError, "Start all 3 hosts, and let host 0 take connections on port ", "a test name the hosts"
            )
            assert found.again


@pytest.mark.parametrize(
    ("device_type", "code", "told"),
    [
        ("cpu", 75, "host 0 of 2, a, has not come within 0.5 s"),
        pytest.param("xla-cpu", 1, "device_type=xla-cpu on 2 hosts", marks=needs_xla),
    ],
)
def test_exit_codes_of_the_command(
    device_type: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that waits in vain ends as a preempted one does, so that engines start it again."""
    values = {"TPU_KIT_HOSTS": "a,b", "TPU_KIT_HOST_INDEX": "1", "TPU_KIT_COORDINATOR": f"127.0.0.1:{free_port()}"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert cli.main(["train", f"device_type={device_type}", "meeting_timeout=0.5"]) == code
    assert told in capsys.readouterr().err


def test_what_differs_is_told_with_both_values(hosts: Callable[[int], list[Hosts]]) -> None:
    parts = [agree(rate=1, rows="x"), agree(rate=1, rows="x"), agree(rate=2, rows="y")]
    for found in together(hosts(3), *parts):
        told = "rate: 1 on host 0 of 3, name-0; 2 on host 2 of 3, name-2"
        if isinstance(found, HostError):  # another host reported first
            assert not found.again
        assert_raised(found, (ValueError, HostError), told, "rows: 'x' on host 0 of 3", "Make them equal")


def test_a_host_that_comes_late_is_told_why_the_meeting_has_failed(
    hosts: Callable[[int], list[Hosts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting_module, "_FAREWELL", 10.0)

    def part(one: Hosts, rate: int, after: float) -> None:
        time.sleep(after)
        with Meeting(one, 20, 60) as meeting:
            meeting.agree({"rate": rate})

    three = hosts(3)
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(part, one, *given) for one, given in zip(three, ((1, 0), (2, 0), (2, 2)), strict=True)]
        errors = [one.exception() for one in found]
    for error in errors:
        assert_raised(error, (ValueError, HostError), "rate: 1 on host 0 of 3, name-0; 2 on host 1 of 3")


def test_a_wrong_count_is_told_at_once(hosts: Callable[[int], list[Hosts]]) -> None:
    two = hosts(2)
    wrong = Hosts(1, (*two[0].names, "name-2"), two[0].coordinator, "a test")
    found = together([two[0], wrong], agree(count=2), agree(count=3))
    for one in found:
        assert_raised(one, (ValueError, HostError), "count: 2 on host 0 of ", "; 3 on host 1 of ")


def test_a_second_process_with_the_number_of_a_host_is_told(hosts: Callable[[int], list[Hosts]]) -> None:
    two = hosts(2)

    def old(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        time.sleep(3)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, two, old, old)
        time.sleep(1)
        (told,) = together(two[1:], agree(x=1), patience=1)
        assert first.result() == [None, None]
    assert_raised(told, HostError, "a run is in progress with another process as host 1 of 2, name-1")


def test_a_failure_is_told_to_all_and_quoted_once(hosts: Callable[[int], list[Hosts]]) -> None:
    def fails(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        raise ValueError("the disk is full")

    def waits(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        wait(meeting)

    def breaks(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        raise meeting.cause(RuntimeError("Connection closed by peer"))

    first, second, third = together(hosts(3), waits, fails, breaks)
    for found in (first, third):
        assert_raised(found, HostError)
        assert str(found) == "host 1 of 3, name-1, failed: the disk is full" and not found.again
    assert_raised(second, ValueError, "the disk is full")


def test_an_error_without_a_failure_of_another_host_is_the_cause(hosts: Callable[[int], list[Hosts]]) -> None:
    error = RuntimeError("Connection closed by peer")

    def part(meeting: Meeting) -> Exception:
        meeting.agree({"x": 1})
        return meeting.cause(error)

    assert together(hosts(2), part, part) == [error, error]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_host_is_named(hosts: Callable[[int], list[Hosts]], lost: int) -> None:
    """Its connection is cut without a message, as by a network partition."""
    two = hosts(2)
    proxy = Proxy(f"http://127.0.0.1:{two[0].address[1]}")
    two[1] = Hosts(1, two[1].names, proxy.url.removeprefix("http://"), "a test")

    def part(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        if meeting.hosts.index == lost:
            proxy.silent = True
        start = time.monotonic()
        try:
            wait(meeting)
        finally:
            assert time.monotonic() - start < 2 + 1.5, "within its limit"

    first, second = together(two, part, part)
    proxy.close()
    assert_raised(first, HostError, "host 1 of 2, name-1, has given no sign of life for 2 s")
    assert_raised(second, HostError, "host 0 of 2, name-0, has ", " for 2 s")
    assert first.again and second.again


def test_a_store_that_is_gone_is_told(hosts: Callable[[int], list[Hosts]]) -> None:
    two = hosts(2)
    proxy = Proxy(f"http://127.0.0.1:{two[0].address[1]}")
    two[1] = Hosts(1, two[1].names, proxy.url.removeprefix("http://"), "a test")

    def cut(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        time.sleep(1)  # until host 0 has read this host's message
        proxy.down = True
        wait(meeting, 3)

    def stays(meeting: Meeting) -> None:  # a process that has ended would not be missed
        meeting.agree({"x": 1})
        time.sleep(3.5)

    first, second = together(two, stays, cut)
    proxy.close()
    assert first is None
    assert_raised(second, HostError, "host 0 of 2, name-0, ")


def test_a_host_that_ends_well_is_no_loss(hosts: Callable[[int], list[Hosts]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others must be able to end after it, and its store, are gone."""
    monkeypatch.setattr(meeting_module, "_FAREWELL", 0.5)

    def lingers(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        wait(meeting, 3.5)

    assert together(hosts(3), agree(x=1), lingers, lingers) == [None, None, None]


def test_a_restarted_host_waits_for_the_next_meeting(hosts: Callable[[int], list[Hosts]]) -> None:
    """No other host has its number, but the run has started without it."""
    two = hosts(2)
    begun = threading.Barrier(2)

    def old(meeting: Meeting) -> None:
        meeting.agree({"x": 1})
        begun.wait()
        time.sleep(1)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(together, two, old, old)
        time.sleep(1.5)
        again = together(two, agree(x=2), agree(x=2))
        assert first.result() == [None, None]
    assert again == [None, None]


def test_the_host_that_hangs_is_named_with_its_stack(hosts: Callable[[int], list[Hosts]]) -> None:
    waiting = 'Thread 1 (most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 9 in wait'
    stuck = 'Thread 1 (most recent call first):\n  File "mine.py", line 7 in stuck'

    def part(stack: str) -> Part:
        def run(meeting: Meeting) -> None:
            meeting.agree({"x": 1})
            raise meeting.hang({f"rank {meeting.hosts.index}": stack})

        return run

    for found in together(hosts(3), part(waiting), part(stuck), part(waiting)):
        assert_raised(found, HostError, "host 1 of 3, name-1, hangs, and the others wait for it\nrank 1:", stuck)
        assert "host 0 of 3" not in str(found) and found.again


@pytest.mark.parametrize("shared", [True, False])
def test_hosts_look_for_what_host_0_writes_before_they_train(
    hosts: Callable[[int], list[Hosts]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(meeting_module, "_SEEN", 1.0)

    def part(meeting: Meeting) -> Path:
        meeting.agree({"x": 1})
        folder = tmp_path / ("" if shared else str(meeting.hosts.index))
        folder.mkdir(exist_ok=True)
        meeting.check_shared(folder)
        return folder

    found = together(hosts(3), *[part] * 3)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    if shared:
        assert found == [tmp_path] * 3
        return
    for one in found:  # of two watching hosts, the first to fail may end the other before it notices
        assert_raised(one, (ValueError, HostError), " lacks a file that host 0 wrote there 1 s ago: ")
        assert_raised(one, Exception, "set output_dir to an object store (gs://bucket/run), or to a folder that all h")
    assert isinstance(found[0], HostError) and not all(isinstance(one, HostError) for one in found)


def test_a_host_that_hangs_before_it_tells_its_facts_is_named(
    hosts: Callable[[int], list[Hosts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends heartbeats but makes no progress; a host that works is waited for."""
    monkeypatch.setattr(meeting_module, "_SEEN", -0.5)

    def part(prepare: Part) -> Part:
        def run(meeting: Meeting) -> str:
            meeting.agree({"x": 1})
            if meeting.hosts.index:
                prepare(meeting)
            meeting.agree({"y": 1})
            return "met"

        return run

    first, second = together(hosts(2), *[part(lambda meeting: wait(meeting, 60))] * 2, hang_timeout=1.5)
    told = "host 1 of 2, name-1, hangs: it has used no processor time for 1.5 s while the others wait for it"
    assert_raised(first, HostError, told)
    assert_raised(second, HostError, told)
    assert first.again
    monkeypatch.setattr(meeting_module, "_processor_time", lambda pid: time.monotonic())
    assert together(hosts(2), *[part(lambda meeting: wait(meeting, 3))] * 2, hang_timeout=1.5) == ["met"] * 2


def test_the_processor_time_is_that_of_children_too() -> None:
    before = meeting_module._processor_time(os.getpid())
    program = "import time\nwhile time.process_time() < 1: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert meeting_module._processor_time(os.getpid()) >= before + 0.9
        child.communicate(b"\n")
    assert meeting_module._processor_time(os.getpid()) >= before + 0.9
    assert meeting_module._processor_time(child.pid) == 0


def test_replicas_of_two_hosts_are_one_world(hosts: Callable[[int], list[Hosts]], tmp_path: Path) -> None:
    config = config_for(tmp_path, "cpu", "launch.num_replicas=1")

    def part(meeting: Meeting) -> Any:
        meeting.agree({"x": 1})
        return launch(replica_functions.sums, config, meeting=meeting)

    for rank, found in enumerate(together(hosts(2), part, part)):
        assert (found["rank"], found["world_size"]) == (rank, 2)
        assert found["values"] == [[3.0, 10.0], [[1.0] * 3] * 2]
        assert found["limit"] == timedelta(seconds=3 * config.launch.hang_timeout)


def test_all_hosts_stop_at_the_largest_step(
    hosts: Callable[[int], list[Hosts]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    stepping = threading.Barrier(3)

    def part(meeting: Meeting) -> tuple[int, str]:
        meeting.agree({"x": 1})
        index = meeting.hosts.index
        with Notices(budget=0.01 if index == 1 else None, meeting=meeting) as notices:
            stepping.wait()
            step = 0
            while notices.flag.may_start(0, step + 1):
                step += 1
                time.sleep(0.002 * (1 + 3 * index))  # far apart: a faster host does not wait for the others
            return step, notices.flag.reason

    found = together(hosts(3), part, part, part)
    assert len(set(found)) == 1, found
    assert found[0][0] > 50
    assert found[0][1] == "the time budget of 0.01 min is used up on host 1 of 3, name-1"
