"""Checkpoints on gs://, through gcsfs against a real server over HTTP, also with network faults."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.child_processes import PYTHONPATH, child_environment
from tests.support.object_store import Proxy, environment, free_port, make_bucket, run_server
from tpu_kit.machine.storage import object_store
from tpu_kit.machine.storage.object_store import ObjectFolder, at_hand, is_url, join, upload
from tpu_kit.training.checkpoint import manager, manifest
from tpu_kit.training.checkpoint.gcs_store import BucketStore
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints
from tpu_kit.training.checkpoint.manifest import Checkpoint, DamagedError


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "adapter_model": {"a": torch.full((50, 3), float(step)), "b": torch.arange(6.0).view(2, 3).T},
        "optimizer": {"m": torch.full((7,), step / 3, dtype=torch.bfloat16)},
    }


def save(store: CheckpointManager, step: int, *, best: bool = False, **metrics: float) -> None:
    store.save(step, tensors(step), {"state": {"step": step}, "log": f"ä {step}\n"}, metrics, best)
    store.wait()


def assert_is_step(found: Checkpoint | None, step: int) -> None:
    assert found is not None and found.step == step
    for name, group in tensors(step).items():
        read = found.tensors(name)
        assert all(torch.equal(read[key], group[key]) and read[key].dtype == group[key].dtype for key in group)
    assert found.document("state") == {"step": step}
    assert found.document("log") == f"ä {step}\n"


def steps(store: CheckpointManager) -> list[int]:
    return [found.step for found in store.complete()]


@pytest.fixture
def place(bucket: str) -> str:
    return f"{bucket}/runs/mine/checkpoints"


def objects(place: str) -> list[str]:
    return sorted(name for name in ObjectFolder(place).list() if not name.startswith("owner-"))


def test_round_trip(place: str) -> None:
    with CheckpointManager(place, keep=2, clock=lambda: 1234.5) as store:
        assert store.newest() is None
        save(store, 7, loss=1.5)
        found = store.newest()
        assert_is_step(found, 7)
        assert found is not None and store.rejected == []
        assert (found.created, found.best, found.metrics) == (1234.5, False, {"loss": 1.5})
        assert str(found.path).startswith(f"{place}/step-00000007-")
        prefix = str(found.path).removeprefix(f"{place}/")
        names = {"adapter_model.safetensors", "optimizer.safetensors", "state.json", "log.json"}
        assert found.files.keys() == names
        assert objects(place) == sorted(f"{prefix}/{name}" for name in (*names, "manifest.json"))
        sizes = ObjectFolder(place).list()
        assert found.size == sum(sizes[f"{prefix}/{name}"][0] for name in names)
        with pytest.raises(ValueError, match=r"holds no ema\.safetensors; it holds adapter_model"):
            found.tensors("ema")
    ((other,), damaged) = list_checkpoints(place, verify=True)  # as another process or rank sees it
    assert_is_step(other, 7)
    assert damaged == []


def test_same_step_is_replaced(place: str) -> None:
    with CheckpointManager(place, keep=2) as store:
        save(store, 1, loss=1.0)
        before = store.complete()[0]
        save(store, 1, loss=2.0)
        (found,) = store.complete()
        assert found.metrics == {"loss": 2.0}
        assert_is_step(found, 1)
        assert len(objects(place)) == len(FILES) + 1
        with pytest.raises(DamagedError, match="is missing"):
            before.verify()


def test_retention_deletes_after_the_next_is_complete(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    remove = ObjectFolder.remove

    def watch(self: ObjectFolder, names: Any) -> None:
        for name in names:
            remove(self, [name])
            if name.startswith("owner-"):
                continue
            good, damaged = list_checkpoints(place, verify=True)
            assert damaged == []
            seen.append([found.step for found in good])

    with CheckpointManager(place, keep=1, keep_every=4) as store:
        save(store, 1, best=True)
        save(store, 2)
        save(store, 4)
        assert steps(store) == [1, 4]
        monkeypatch.setattr(ObjectFolder, "remove", watch)
        save(store, 5)
        assert steps(store) == [1, 4, 5] and seen == []
        save(store, 6, best=True)
        assert steps(store) == [4, 6]
        assert seen[0] == [4, 5, 6] and seen[-1] == [4, 6] and all(6 in found for found in seen)
        monkeypatch.undo()
        assert {name[:13] for name in objects(place)} == {"step-00000004", "step-00000006"}


FILES = ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "log.json"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest", "truncated"),
        ("manifest", "missing"),
        ("adapter_model.safetensors", "flipped"),
        ("optimizer.safetensors", "missing"),
        ("state.json", "truncated"),
    ],
)
def test_damaged_newest_is_set_aside(place: str, file: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(place, keep=3) as store:
        save(store, 1)
        save(store, 2)
        (name,) = [name for name in objects(place) if name.startswith("step-00000002") and file in name]
        folder = ObjectFolder(place)
        content = bytearray(folder.read(name))
        content[len(content) // 2] ^= 1
        if damage == "missing":
            folder.remove([name])
        else:
            folder.write(name, bytes(content if damage == "flipped" else content[:-5]))
        before = len(FILES) * 2 + 2 - (damage == "missing" and file != "manifest")
        assert_is_step(store.newest(), 1)
        (rejected,) = store.rejected
        told = capsys.readouterr().err
        assert name in rejected.reason and rejected.reason in told
        assert f"is set aside as {name.rpartition('/')[0]}/manifest.json.corrupt" in told
        assert len(objects(place)) == before
        save(store, 2)  # the run continues from step 1
        assert_is_step(store.newest(), 2)
    CheckpointManager(place, keep=3).close()
    assert len(objects(place)) == before + len(FILES) + 1, "the damaged files must still be there"


def test_restart_puts_the_earlier_run_out_of_the_way(place: str) -> None:
    with CheckpointManager(place, keep=2) as store:
        store.restart()
        for step in (100, 1):
            save(store, step)
            store.restart()
            assert store.newest() is None and objects(place) == []
            ((found,), damaged) = list_checkpoints(f"{place}.previous", verify=True)
            assert_is_step(found, step)
            assert damaged == []


def test_withdraw(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(place, keep=4) as store:
        for step in (1, 2, 3):
            save(store, step)
        store.withdraw(2)
        assert_is_step(store.newest(), 1)
    told = capsys.readouterr().err
    assert re.search(r"step 3 is set aside as step-00000003-\w+-\w+/manifest.json.corrupt: the training diverged", told)


def test_list(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert manager.print_checkpoints(place) == 0
    assert capsys.readouterr().out == f"no checkpoints in {place}/checkpoints\n"
    with CheckpointManager(place, keep=3) as store:
        save(store, 5, best=True, loss=1.25)
        save(store, 1000, loss=0.75)
        for argument in (place, place.removesuffix("/checkpoints")):
            assert manager.print_checkpoints(argument) == 0
            first, second = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert first == ["step", "5", "0.0", "MB", "0", "s", "complete,", "best", "loss", "1.25"]
            assert second[:2] == ["step", "1,000"]
        file = f"{store.complete()[1].path}/state.json"
        ObjectFolder(place).write(file.removeprefix(f"{place}/"), b'{"step": 9999}')
        assert manager.print_checkpoints(place, verify=True, as_json=True) == 1
        listed = json.loads(capsys.readouterr().out)
        assert [found["step"] for found in listed["complete"]] == [5]
        assert listed["complete"][0]["path"].startswith(f"{place}/step-00000005-")
        (damaged,) = listed["damaged"]
        assert damaged == {
            "path": file.removesuffix("/state.json"),
            "reason": f"{file} has changed since it was written: its MD5 differs",
        }
    assert manager.print_checkpoints("gs://no-such-bucket-of-mine/run") == 1
    assert "there is no bucket gs://no-such-bucket-of-mine: make it" in capsys.readouterr().err


def test_upload_and_join(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "adapter" / "deep").mkdir(parents=True)
    (tmp_path / "adapter" / "a.json").write_text("{}")
    (tmp_path / "adapter" / "deep" / "b.bin").write_bytes(b"\0" * 10)
    target = join(f"{bucket}/run/", "adapter")
    assert target == f"{bucket}/run/adapter" and is_url(target) and not is_url(Path("gs://x"))
    assert join("runs", "x") == Path("runs/x")
    upload(tmp_path / "adapter", str(target))
    listing = ObjectFolder(str(target)).list()
    contents = {"a.json": b"{}", "deep/b.bin": b"\0" * 10}
    assert listing == {name: (len(each), hashlib.md5(each).hexdigest()) for name, each in contents.items()}
    with pytest.raises(ValueError, match="gs:/// names no bucket: write gs://bucket/folder"):
        ObjectFolder("gs:///")


# -------------------------------------------------------------------------------------------------------------- writers

# Sources of other processes; each line on stdin starts their next action.
CHILD = """
import sys, torch
from tpu_kit.training.checkpoint import gcs_store as bucket_store; from tpu_kit.training.checkpoint import manager
from tpu_kit.training.checkpoint.manager import CheckpointManager
place, elsewhere = sys.argv[1:3]
if elsewhere:
    file_here = bucket_store._lock_file
    bucket_store._lock_file = lambda url: file_here(f"{elsewhere} {url}")
def save(store, step, numbers=100):
    store.save(step, {"x": {"a": torch.full((numbers,), float(step))}}, {}, {})
    store.wait()
def tell(*words):
    print(*words, flush=True)
"""


@contextlib.contextmanager
def child(source: str, place: str, elsewhere: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD + source, place, elsewhere], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=child_environment() | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def says(process: subprocess.Popen[str], expected: str) -> str:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if not line.startswith(expected):
        process.kill()
        raise AssertionError(line + process.communicate()[1])
    return line.removeprefix(expected).strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


HOLD = """
store = CheckpointManager(place, keep=1)
save(store, 3)
tell("held")
sys.stdin.readline()
try: save(store, 4)
except ValueError as error: tell("refused", error)
else: tell("saved")
store.close()
"""


@pytest.mark.slow
def test_second_writer_is_refused_until_the_first_ends(place: str) -> None:
    with child(HOLD, place) as first:
        says(first, "held")
        holder = f"process {first.pid} on {socket.gethostname()}"
        start = time.monotonic()
        with pytest.raises(ValueError, match=f"is being written to by {holder}: end that process first, or set"):
            CheckpointManager(place, keep=1)
        assert time.monotonic() - start < 1.5, "on one machine nobody needs to wait"
        go(first)
        says(first, "saved")
        assert first.wait(30) == 0
    with CheckpointManager(place, keep=1) as store:
        assert steps(store) == [4]


def test_killed_writer_of_this_machine_is_taken_over_at_once(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with child(HOLD, place) as first:
        says(first, "held")
        first.kill()
        first.wait()
        start = time.monotonic()
        with CheckpointManager(place, keep=1) as store:
            assert steps(store) == [3]
            assert time.monotonic() - start < 5
            assert len([name for name in ObjectFolder(place).list() if name.startswith("owner-")]) == 1
    told = f"process {first.pid} on {socket.gethostname()} was writing to {place}: this process takes it over"
    assert told in capsys.readouterr().err


LATE = """
store = CheckpointManager(place, keep=3)
save(store, 3)
act = getattr(bucket_store.BucketStore, "MOMENT")
def slow(self, *arguments, **named):
    setattr(bucket_store.BucketStore, "MOMENT", act)
    tell("sleeps")
    sys.stdin.readline()
    return act(self, *arguments, **named)
setattr(bucket_store.BucketStore, "MOMENT", slow)
try: save(store, 4)
except ValueError as error: tell("refused", error)
else: tell("saved")
"""


@pytest.mark.parametrize("moment", ["_check", pytest.param("_update", marks=pytest.mark.slow)])
def test_writer_of_another_machine_is_replaced_at_once_and_cannot_commit(
    place: str, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with child(LATE.replace("MOMENT", moment), place, "another host") as first:
        says(first, "sleeps")
        start = time.monotonic()
        with CheckpointManager(place, keep=3) as store:
            assert time.monotonic() - start < 5, "it does not wait"
            assert f"process {first.pid} on {socket.gethostname()} was writing to" in capsys.readouterr().err
            assert steps(store) == [3]
            save(store, 5)
            go(first)
            told = says(first, "refused")
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            assert told.startswith(f"{place} is being written to by {holder}: end that process first")
            assert steps(store) == [3, 5] and list_checkpoints(place)[1] == []
        assert {name[:13] for name in objects(place)} == {"step-00000003", "step-00000005"}


def test_owner_object_that_somebody_deletes_is_no_loss(place: str) -> None:
    with CheckpointManager(place, keep=1) as store:
        ObjectFolder(place).remove([name for name in ObjectFolder(place).list() if name.startswith("owner-")])
        save(store, 1)
        assert steps(store) == [1]


def test_checkpoints_without_an_owner_object_count(place: str) -> None:
    with CheckpointManager(place, keep=2) as store:
        save(store, 1)
    folder = ObjectFolder(place)
    folder.remove([name for name in folder.list() if name.startswith("owner-")])
    with CheckpointManager(place, keep=2) as store:
        assert steps(store) == [1]
        save(store, 2)
        assert steps(store) == [1, 2]


RACE = """
store = None
for step in range(1, 13):
    sys.stdin.readline()
    try:
        store = CheckpointManager(place, keep=1)
        tell("open")
        sys.stdin.readline()
        save(store, step)
    except ValueError as error: tell("lost", error)
    else: tell("won")
    if store: store.close()
"""


@pytest.mark.slow
def test_of_two_writers_at_once_one_wins(place: str) -> None:
    """Both start and save at the same moment, repeatedly, as if on two machines."""
    with child(RACE, place, "a host") as first, child(RACE, place, "another host") as second:
        both = (first, second)
        for step in range(1, 13):
            for process in both:
                go(process)
            began = {process: process.stdout.readline() for process in both if process.stdout}
            opened = [process for process, line in began.items() if line == "open\n"]
            assert opened, began
            for process in opened:
                go(process)
            ends = began | {process: process.stdout.readline() for process in opened if process.stdout}
            won = [process for process, line in ends.items() if line == "won\n"]
            assert len(won) == 1, ends
            told = f"lost {place} is being written to by process {won[0].pid} on {socket.gethostname()}"
            assert all(line.startswith(told) for process, line in ends.items() if process not in won), ends
            good, damaged = list_checkpoints(place, verify=True)
            assert good[-1].step == step and damaged == []


def test_leftovers_of_a_killed_writer_are_removed(place: str) -> None:
    source = """
store = CheckpointManager(place, keep=2)
save(store, 1)
store._store._update = lambda **_: (tell("uploaded"), sys.stdin.readline())
save(store, 2)
"""
    with child(source, place) as first:
        says(first, "uploaded")
        assert len(objects(place)) == 4, "the files of step 2, which does not count yet"
        assert [found.step for found in list_checkpoints(place)[0]] == [1]
        first.kill()
    folder = ObjectFolder(place)
    folder.write("notes/mine.txt", b"not ours")
    with CheckpointManager(place, keep=2) as store:
        assert steps(store) == [1]
        assert objects(place)[0] == "notes/mine.txt" and len(objects(place)) == 3


# -------------------------------------------------------------------------------------------------- networks that break


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the pauses between gcsfs's retries; only their number matters."""
    pause = asyncio.sleep

    async def brief(seconds: float, *result: Any) -> Any:
        return await pause(min(seconds, 0.01), *result)

    monkeypatch.setattr(asyncio, "sleep", brief)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of a server; gcsfs in this process knows only the proxy."""
    made = Proxy()
    with run_server(public_url=made.url) as url:
        made.target = url
        with environment(made.url):
            yield made
        made.close()


@pytest.mark.slow
def test_dropped_connections_in_mid_upload(proxy: Proxy, impatient: None) -> None:
    place, numbers = f"{make_bucket(proxy.url)}/checkpoints", 5_000_000
    cuts = [
        (1, 1),
        (2_000, 1),
        (300_000, 1),
        (9_000_000, 1),
        (15_000_000, 1),
        (19_999_000, 1),
        (100_000, 5),
        (5_000_000, 9),
    ]
    with CheckpointManager(place, keep=1) as store:
        for step, (after, times) in enumerate(cuts, start=1):
            proxy.cuts = 0
            proxy.cut(after, times)
            store.save(step, {"x": {"a": torch.full((numbers,), float(step))}}, {}, {})  # 20 MB, in several parts
            store.wait()
            assert proxy.cuts == times
            proxy.cut(0, 0)
            ((found,), damaged) = list_checkpoints(place, verify=True)
            assert found.step == step and damaged == []
            assert torch.equal(found.tensors("x")["a"], torch.full((numbers,), float(step)))
        assert len(objects(place)) == 2


def test_network_that_is_down_costs_the_new_one_alone(
    proxy: Proxy, impatient: None, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = make_bucket(proxy.url)
    place = f"{bucket}/checkpoints"
    with CheckpointManager(place, keep=1) as store:
        save(store, 1)
        proxy.down = True
        with pytest.raises(OSError, match="could not be written") as raised:
            save(store, 2)
        assert raised.value.errno == errno.ENETUNREACH
        told = str(raised.value.strerror)
        assert told.startswith(
            f"the checkpoint of step 2 could not be written to {place}: {bucket} could not be reached ("
        )
        assert told.endswith("check the network, then run this again. The checkpoint of step 1 stays good")
        with pytest.raises(OSError, match="could not be reached"):
            store.newest()
        assert store.rejected == []
        proxy.down = False
        assert_is_step(store.newest(), 1)
        save(store, 3)
        assert steps(store) == [3]
    CheckpointManager(place, keep=1).close()
    assert {name[:13] for name in objects(place)} == {"step-00000003"}
    assert not caplog.records  # gcsfs would log a traceback for each error


def test_network_that_falls_silent_is_given_up(proxy: Proxy, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "SILENT_SECONDS", 0.4)
    place = f"{make_bucket(proxy.url)}/checkpoints"
    with CheckpointManager(place, keep=1) as store:
        save(store, 1)
        proxy.silent = True
        start = time.monotonic()
        with pytest.raises(OSError, match=r"could not be reached \(.*The checkpoint of step 1 stays good"):
            save(store, 2)
        assert time.monotonic() - start < 30
        proxy.silent = False
        save(store, 3)
        assert_is_step(store.newest(), 3)


@contextlib.contextmanager
def answering(status: int, message: str) -> Iterator[str]:
    """An HTTP server that refuses every request, with errors in Google's format."""

    class Handler(BaseHTTPRequestHandler):
        def _refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({"error": {"code": status, "message": message}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = _refuse

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_told_when_the_bucket_cannot_be_used(bucket: str, impatient: None) -> None:
    def opening() -> str:
        with pytest.raises(ValueError, match="gs://mine/run cannot be written to: ") as raised:
            CheckpointManager("gs://mine/run", keep=1)
        return str(raised.value).removeprefix("gs://mine/run cannot be written to: ")

    advice = "make it (gcloud storage buckets create gs://mine), or check its name"
    assert opening() == f"there is no bucket gs://mine: {advice}"
    message = "me@project.iam does not have storage.objects.list access to the bucket."
    with answering(403, message) as url, environment(url):
        told = opening()
    assert told.startswith("this account may not do that in gs://mine: give it the role Storage Object User there")
    assert message in told
    with answering(401, "Anonymous caller does not have storage.objects.list access.") as url, environment(url):
        told = opening()
    assert told.startswith("gs://mine needs credentials, and no valid credentials were found: run `gcloud auth")
    with environment(f"http://127.0.0.1:{free_port()}"):
        told = opening()
    assert told.startswith("gs://mine could not be reached (")
    with answering(503, "Backend Error") as url, environment(url):
        told = opening()
    assert told == "gs://mine answered HttpError: Backend Error, 503"


def test_full_temporary_folder_is_told(place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with CheckpointManager(place, keep=1) as store:
        save(store, 1)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
            with pytest.raises(
                OSError, match=f"could not be written to {place}: {tmp_path} cannot be written to"
            ) as raised:
                store.save(2, {"x": {"a": torch.zeros(100_000)}}, {}, {})
                store.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert raised.value.errno == errno.EFBIG
        assert str(raised.value).endswith("set TMPDIR to another folder. The checkpoint of step 1 stays good")
        assert list(tmp_path.iterdir()) == []


def test_reading_needs_no_temporary_folder_and_downloads_what_is_wanted(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers = torch.arange(100_000.0)
    training = {"average/a": numbers, "moments/first/a": -numbers, "parameters/a": numbers + 1, "step": torch.tensor(7)}
    with CheckpointManager(place, keep=1) as store:
        store.save(1, {"training": training, "empty": {}}, {}, {})
        store.wait()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no such folder"))
        read, downloaded = ObjectFolder.read, []

        def watch(self: ObjectFolder, name: str, *bounds: Any) -> bytes:
            downloaded.append(len(content := read(self, name, *bounds)))
            return content

        monkeypatch.setattr(ObjectFolder, "read", watch)
        monkeypatch.setattr(manifest, "_READ_BYTES", 10_001)  # not a multiple of a number's size
        found = store.newest()
        assert found is not None and sum(downloaded) < 2_000
        assert found.tensors("empty") == {}
        for keep, names in ((None, training.keys()), (lambda name: name.startswith("parameters/"), ["parameters/a"])):
            downloaded.clear()
            tensors = found.tensors("training", keep)
            assert tensors.keys() == set(names) and all(torch.equal(tensors[name], training[name]) for name in names)
            assert sum(downloaded) < 400_000 * min(len(names), 3) + 30_000
        content = bytearray(read(store._store.files, file := f"{found.folder}/training.safetensors"))
        for place_of_damage in (3, 40, -5):  # the header's length, the header, a number
            damaged = content.copy()
            damaged[place_of_damage] ^= 1
            store._store.files.write(file, bytes(damaged))
            with pytest.raises(DamagedError, match=r"training.safetensors has changed since .* its MD5 differs"):
                found.tensors("training")


def test_full_temporary_folder_is_told_when_an_adapter_is_read(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ObjectFolder(f"{bucket}/adapter").write("adapter_model.safetensors", bytes(400_000))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told = rf"{bucket}/adapter/adapter_model.safetensors cannot be written to {tmp_path}/\S+ \(File too large\): free "
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
        with pytest.raises(ValueError, match=f"{told}space there, or set TMPDIR to"), at_hand(f"{bucket}/adapter"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_url_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(ValueError, match="gs:// needs gcsfs: pip install it"):
        CheckpointManager("gs://mine/run", keep=1)


def test_store_is_free_again_when_it_could_not_be_cleaned(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(BucketStore, "_clean", lambda self: (_ for _ in ()).throw(OSError(5, "broken")))
        with pytest.raises(ValueError, match="cannot be written to: broken"):
            CheckpointManager(place, keep=1)
    CheckpointManager(place, keep=1).close()
