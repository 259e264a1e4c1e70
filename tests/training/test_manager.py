"""Checkpoints: written data is read back, and no failure loses the last good checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.child_processes import PYTHONPATH, child_environment, run_python
from tpu_kit.config.loader import ConfigError
from tpu_kit.machine.storage import atomic
from tpu_kit.training.checkpoint import local_store, manager, manifest
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints
from tpu_kit.training.checkpoint.manifest import DamagedError


def tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    flat = torch.arange(step, step + 24, dtype=torch.float32)
    return {
        "adapter_model": {"a": flat[:12].view(3, 4), "b": flat[12:].view(2, 6).T, "empty": torch.zeros(0, 4)},
        "optimizer": {"m": torch.full((5,), step / 3, dtype=torch.bfloat16), "step": torch.tensor(step)},
        "rng": {"cpu": torch.arange(64, dtype=torch.uint8)},
    }


def save(store: CheckpointManager, step: int, *, best: bool = False, **metrics: float) -> None:
    documents = {"state": {"step": step, "best_loss": math.inf}, "config": {"optim": {"seed": step}}}
    store.save(step, tensors(step), documents, metrics, best)
    store.wait()


def assert_is_step(found: manifest.Checkpoint | None, step: int) -> None:
    assert found is not None
    assert found.step == step
    for name, group in tensors(step).items():
        read = found.tensors(name)
        assert read.keys() == group.keys()
        assert all(torch.equal(read[key], group[key]) and read[key].dtype == group[key].dtype for key in group)
    assert found.document("state") == {"step": step, "best_loss": math.inf}


def steps(store: CheckpointManager) -> list[int]:
    return [found.step for found in store.complete()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_round_trip(folder: Path) -> None:
    with CheckpointManager(folder, keep=2, clock=lambda: 1234.5) as store:
        assert store.newest() is None
        save(store, 7, loss=1.5, eval_loss=float("nan"))
        found = store.newest()
        assert_is_step(found, 7)
        assert found is not None and store.rejected == []
        assert (found.created, found.best, found.metrics["loss"]) == (1234.5, False, 1.5)
        assert math.isnan(found.metrics["eval_loss"])
        names = {path.name for path in found.path.iterdir()}
        tensor_files = {"adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"}
        assert names == tensor_files | {"config.json", "state.json", "manifest.json"}
        assert found.files.keys() == names - {"manifest.json"}
        assert len({path.stat().st_mode for path in found.path.iterdir()}) == 1
        assert found.size == sum((found.path / name).stat().st_size for name in found.files)
        with pytest.raises(ValueError, match=r"holds no ema\.safetensors; it holds adapter_model"):
            found.tensors("ema")
    assert {path.name for path in folder.iterdir()} == {".lock", "step-00000007"}


def test_the_same_content_makes_the_same_files(tmp_path: Path) -> None:
    found = []
    for name in "ab":
        with CheckpointManager(tmp_path / name, keep=1, clock=lambda: 0.0) as store:
            save(store, 3)
            found += store.complete()
    assert found[0].files == found[1].files


def test_tensors_outlive_their_checkpoint(folder: Path) -> None:
    with CheckpointManager(folder, keep=1) as store:
        save(store, 1)
        (found,) = store.complete()
        read = found.tensors("optimizer")
        save(store, 2)
        assert not found.path.exists()
    assert str(found.path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(read["m"], tensors(1)["optimizer"]["m"])


def test_documents_and_metrics_may_change_after_save(folder: Path) -> None:
    with CheckpointManager(folder, keep=1) as store:
        state, metrics = {"history": [1]}, {"loss": 1.0}
        store.save(1, {}, {"state": state}, metrics)
        state["history"].append(2)
        metrics["loss"] = 2.0
        store.wait()
        (found,) = store.complete()
    assert found.document("state") == {"history": [1]}
    assert found.metrics == {"loss": 1.0}


def test_order_is_by_the_manifest(folder: Path) -> None:
    times = iter([300.0, 200.0, 100.0])  # a clock that runs backwards
    with CheckpointManager(folder, keep=3, clock=lambda: next(times)) as store:
        for step in (9, 10, 100):
            save(store, step)
        (folder / "step-00000100").rename(folder / "a name of my own")
        (folder / "notes").mkdir()
        assert steps(store) == [9, 10, 100]
        assert_is_step(store.newest(), 100)
        assert store.rejected == []


# -------------------------------------------------------------------------------------------------------- in background


def test_save_returns_before_it_is_written_and_one_is_on_its_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, written, save_file = threading.Event(), [], local_store.save_file

    def slow(*arguments: Any, **named: Any) -> None:
        assert go.wait(30)
        written.append(threading.current_thread())
        save_file(*arguments, **named)

    monkeypatch.setattr(local_store, "save_file", slow)
    with CheckpointManager(folder, keep=1) as store:
        store.save(1, {"x": {}}, {}, {})
        assert written == [] and steps(store) == []
        second = threading.Thread(target=store.save, args=(2, {"x": {}}, {}, {}))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        go.set()
        second.join()
        store.wait()
        assert len(written) == 2 and threading.current_thread() not in written
        assert steps(store) == [2]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_failure_in_the_background_is_raised_once(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    with CheckpointManager(folder, keep=2) as store:
        save(store, 1)
        with monkeypatch.context() as broken:
            broken.setattr(local_store, "file_digest", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            store.save(2, tensors(2), {}, {})
            assert store._last is not None and store._last.exception() is not None
        later: dict[str, Callable[[], None]] = {
            "save": lambda: store.save(3, {}, {}, {}), "wait": store.wait, "close": store.close
        }  # fmt: skip
        with pytest.raises(OSError, match=r"checkpoint of step 2 could not be written.* step 1 stays good") as raised:
            later[call]()
        assert raised.value.errno == errno.EIO
        assert str(raised.value.__cause__) == f"[Errno {errno.EIO}] broken"
        store.wait()
        assert_is_step(store.newest(), 1)
        assert list(folder.glob(".*.part")) == []


def test_error_of_the_caller_is_raised_too(folder: Path) -> None:
    same = torch.zeros(3)
    with CheckpointManager(folder, keep=1) as store:
        with pytest.raises(TypeError, match="not JSON serializable"):
            store.save(1, {}, {"state": {1, 2}}, {})
        store.save(1, {"x": {"a": same, "b": same}}, {}, {})
        with pytest.raises(RuntimeError, match="share memory"):
            store.wait()
        assert list(folder.iterdir()) == [folder / ".lock"]


def test_failure_does_not_hide_the_error_on_its_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_store, "file_digest", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(KeyError, match="mine"), CheckpointManager(folder, keep=1) as store:
        store.save(1, tensors(1), {}, {})
        raise KeyError("mine")
    assert "checkpoint of step 1 could not be written" in capsys.readouterr().err
    CheckpointManager(folder, keep=1).close()  # and the folder is free


def test_failure_of_the_last_one_is_raised_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_store, "file_digest", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="step 1 could not be written"), CheckpointManager(folder, keep=1) as store:
        store.save(1, tensors(1), {}, {})


# --------------------------------------------------------------------------------------------------------------- damage

FILES = ["adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json", "state.json"]


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b" " * 9),
    "flipped": flip,
    "missing": Path.unlink,
}


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *((file, damage) for file in [*FILES, "manifest.json"] for damage in ("truncated", "flipped", "missing")),
        ("optimizer.safetensors", "empty"),
        ("manifest.json", "empty"),
        ("state.json", "longer"),
    ],
)
def test_damaged_newest_is_set_aside(folder: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(folder, keep=3) as store:
        save(store, 1)
        save(store, 2)
        broken = store.complete()[-1]
        DAMAGES[damage](broken.path / file)
        assert_is_step(store.newest(), 1)
        (rejected,) = store.rejected
        assert rejected.path == broken.path
        assert file in rejected.reason
        told = capsys.readouterr().err
        assert rejected.reason in told and "is set aside as step-00000002.corrupt" in told
        assert not broken.path.exists() and (folder / "step-00000002.corrupt").is_dir()
        assert list_checkpoints(folder, verify=True)[1] == []

        save(store, 2)  # the run continues from step 1
        assert_is_step(store.newest(), 2)
        (folder / "step-00000002" / "state.json").unlink()
        assert_is_step(store.newest(), 1)
        assert len(list(folder.glob("*.corrupt"))) == 2


def test_a_flipped_byte_anywhere_in_a_manifest_is_found(folder: Path) -> None:
    with CheckpointManager(folder, keep=1) as store:
        save(store, 2, loss=0.25)
    file = folder / "step-00000002" / "manifest.json"
    content, (before,) = file.read_bytes(), list_checkpoints(folder)[0]
    for position in range(0, len(content), 3):
        changed = bytearray(content)
        changed[position] ^= 4
        file.write_bytes(changed)
        good, damaged = list_checkpoints(folder)
        assert len(damaged) == 1 or good == [before], bytes(changed[position - 9 : position + 9])


def test_damage_is_found_on_reading(folder: Path) -> None:
    with CheckpointManager(folder, keep=1) as store:
        save(store, 1)
        (found,) = store.complete()
        flip(found.path / "optimizer.safetensors")
        found.tensors("adapter_model")
        with pytest.raises(DamagedError, match=r"optimizer\.safetensors has changed since it was written"):
            found.tensors("optimizer")
        (found.path / "rng.safetensors").unlink()
        with pytest.raises(DamagedError, match=r"rng\.safetensors is missing"):
            found.document("state")


def test_all_damaged_is_refused_and_stays_where_it_is(folder: Path) -> None:
    with CheckpointManager(folder, keep=2) as store:
        for step in (1, 2):
            save(store, step)
            flip(folder / f"step-0000000{step}" / "state.json")
        before = everything(folder)
        with pytest.raises(ValueError, match="has no complete checkpoint, but this is there:") as refused:
            store.newest()
        for step in (1, 2):
            text = f"step-0000000{step}/state.json has changed since it was written: its MD5 differs"
            assert text in str(refused.value)
        assert "start anew: another run_name (or output_dir, if it is set), or checkpoint.resume=" in str(refused.value)
        assert everything(folder) == before
        store.restart()
        assert store.newest() is None


def test_format_of_a_newer_version_is_not_damage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(folder, keep=2) as store:
        save(store, 1)
        file = folder / "step-00000001" / "manifest.json"
        about = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
        file.write_text(manifest.seal({**about, "format": manifest.FORMAT + 1}))
        with pytest.raises(
            ValueError,
            match=f"step-00000001 has format {manifest.FORMAT + 1}, and this tpu_kit reads {manifest.FORMAT}:",
        ):
            store.newest()
        assert file.exists() and store.rejected == []
        assert manager.print_checkpoints(str(folder)) == 1
        assert f"has format {manifest.FORMAT + 1}" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ retention


def test_newest_and_best_stay(folder: Path) -> None:
    seen = []
    with CheckpointManager(folder, keep=2) as store:
        for step, best in [(1, True), (2, True), (3, False), (4, False), (5, False), (6, True), (7, False), (8, False)]:
            save(store, step, best=best)
            seen.append(steps(store))
    assert seen == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]]


def test_the_old_one_stays_until_the_new_one_is_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    sync = atomic.sync

    def watch(path: Path) -> None:
        seen.append([found.step for found in list_checkpoints(folder, verify=True)[0]])
        sync(path)

    with CheckpointManager(folder, keep=1) as store:
        save(store, 1)
        monkeypatch.setattr(atomic, "sync", watch)
        save(store, 2)
        assert all(1 in found for found in seen) and seen[-1] == [1, 2]
        assert steps(store) == [2]
        seen.clear()
        save(store, 2)
        assert all(found == [2] for found in seen)


def test_the_oldest_make_room_and_no_more_than_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointManager(folder, keep=9) as store:
        for step in (1, 2, 3):
            save(store, step)
        # A disk that lacks less than the first two checkpoints' size, until the first checkpoint is deleted.
        monkeypatch.setattr(
            shutil, "disk_usage", lambda _: SimpleNamespace(free=50_000 if 1 in steps(store) else 10**9)
        )
        save(store, 4)
        assert steps(store) == [2, 3, 4]
    assert "is full: the checkpoint of step 1 makes room for step 4" in capsys.readouterr().err


def test_every_mth_stays(folder: Path) -> None:
    seen = []
    with CheckpointManager(folder, keep=1, keep_every=3) as store:
        for step in range(1, 9):
            save(store, step, best=step == 4)
            seen.append(steps(store))
    assert seen == [[1], [2], [3], [3, 4], [3, 4, 5], [3, 4, 6], [3, 4, 6, 7], [3, 4, 6, 8]]


def test_same_step_is_replaced(folder: Path) -> None:
    with CheckpointManager(folder, keep=2) as store:
        save(store, 1, loss=1.0)
        save(store, 1, loss=2.0)
        (found,) = store.complete()
        assert found.metrics == {"loss": 2.0}
    assert {path.name for path in folder.iterdir()} == {".lock", "step-00000001"}


def test_restart_puts_the_earlier_run_out_of_the_way(folder: Path) -> None:
    with CheckpointManager(folder, keep=2) as store:
        save(store, 100)
        store.restart()
        assert store.newest() is None
        save(store, 1)
        assert_is_step(store.newest(), 1)
        previous = folder.with_name("checkpoints.previous")
        assert [found.step for found in list_checkpoints(previous, verify=True)[0]] == [100]
        store.restart()
        assert [found.step for found in list_checkpoints(previous, verify=True)[0]] == [1]
        store.restart()
        assert [found.step for found in list_checkpoints(previous, verify=True)[0]] == [1]


def test_withdraw_sets_aside_what_has_diverged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(folder, keep=4) as store:
        for step in (1, 2, 3):
            save(store, step)
        store.withdraw(2)
        assert_is_step(store.newest(), 1)
    told = capsys.readouterr().err.splitlines()
    assert told[1] == "warning: the checkpoint of step 3 is set aside as step-00000003.corrupt: the training diverged"
    assert len(told) == 2 and (folder / "step-00000002.corrupt" / "state.json").exists()


# -------------------------------------------------------------------------------------------------------------- writers

HOLD = """
import pathlib, sys, time
import torch
from tpu_kit.training.checkpoint import manager as checkpoint
from tpu_kit.training.checkpoint import local_store as folder_store
store = checkpoint.CheckpointManager(pathlib.Path(sys.argv[1]), keep=1)
print("held", flush=True)
sys.stdin.read()
write = folder_store.save_file
folder_store.save_file = lambda *arguments, **named: (time.sleep(0.3), write(*arguments, **named))
store.save(5, {"x": {"a": torch.ones(2)}}, {}, {})
raise SystemExit(3)
"""


def test_second_writer_is_refused_and_the_first_ends_when_it_has_saved(folder: Path) -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=child_environment() | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        part = folder / ".step-00000001.1.part"
        part.mkdir()
        holder = f"process {first.pid} on {socket.gethostname()}"
        with pytest.raises(ValueError, match=f"is being written to by {holder}: end that process first, or set"):
            CheckpointManager(folder, keep=1)
        assert part.exists()  # it may belong to the first writer
        first.communicate(timeout=60)
        assert first.returncode == 3
    finally:
        first.kill()
        first.wait()
    with CheckpointManager(folder, keep=1) as store:
        assert not part.exists()
        assert steps(store) == [5]
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"):
            CheckpointManager(folder, keep=1)


@pytest.mark.parametrize("where", ["a network folder", "Windows"])
def test_folder_without_locks_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    part = folder / ".step-00000001.1.part"
    part.mkdir(parents=True)
    if where == "Windows":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOTSUP, "none")))
    with CheckpointManager(folder, keep=1) as store:
        save(store, 1)
        assert_is_step(store.newest(), 1)
    assert "has no file locks: make sure that only one run writes there" in capsys.readouterr().err
    assert part.exists()  # its owner is unknown


def test_old_one_comes_back_when_killed_between_two_renames(folder: Path) -> None:
    with CheckpointManager(folder, keep=1) as store:
        save(store, 4)
    (folder / "step-00000004").rename(folder / ".step-00000004.old")
    assert [found.step for found in list_checkpoints(folder)[0]] == [4]
    with CheckpointManager(folder, keep=1) as store:
        assert_is_step(store.newest(), 4)
    assert (folder / "step-00000004").is_dir()


# ----------------------------------------------------------------------------------------------- disks that do not take

# Both run in their own mount namespace, which ends with the process.
DISK = """
import pathlib, subprocess, sys
import torch
from tpu_kit.training.checkpoint.manager import CheckpointManager
from tpu_kit.training.checkpoint.manager import list_checkpoints
mount = pathlib.Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], check=True)
folder = mount / "checkpoints"
store = CheckpointManager(folder, keep=3)
def save(step, numbers, **named):
    store.save(step, {"x": {"a": torch.full((numbers,), float(step))}}, {}, {}, **named)
    store.wait()
def complete():
    good, damaged = list_checkpoints(folder, verify=True)
    assert not damaged and not list(folder.glob(".*.part"))
    return [found.step for found in good]
def refused(step, numbers):
    try:
        save(step, numbers)
    except OSError as error:
        print(error.errno, str(error).replace(str(mount), "MOUNT"))
    else:
        raise AssertionError("it was saved")
"""


def in_namespace(folder: Path, source: str) -> list[str]:
    folder.mkdir(parents=True)
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rm", "mount", "-t", "tmpfs", "none", folder]).returncode:
        pytest.skip("needs mount namespaces")
    arguments = ["-rm", sys.executable, "-c", DISK + source, str(folder)]
    return run_python(arguments, executable=unshare).stdout.splitlines()


def test_full_disk_and_one_that_becomes_read_only(folder: Path) -> None:
    *full, read_only, start = in_namespace(
        folder,
        "save(1, 50_000, best=True); save(2, 50_000); save(3, 50_000)\n"
        "assert complete() == [1, 2, 3]\n"
        "save(4, 110_000); assert complete() == [1, 3, 4]\n"  # step 2 made room
        "refused(5, 200_000); assert complete() == [1, 3, 4]\n"  # step 3 would not have made enough
        # A disk that fills up during the write, after the check found room
        "store.make_room = lambda *_: None\n"
        "refused(6, 200_000); assert complete() == [1, 3, 4]\n"
        "del store.make_room; save(7, 10_000); assert complete() == [1, 3, 4, 7]\n"
        "store.close()\n"
        "subprocess.run(['mount', '-o', 'remount,ro', mount], check=True)\n"
        "refused(8, 10); assert complete() == [1, 3, 4, 7]\n"
        "try: CheckpointManager(folder, keep=1)\n"
        "except ValueError as error: print(str(error).replace(str(mount), 'MOUNT'))\n",
    )
    needs = 800_000 + 256 + 2 * 8192
    for line, step in zip(full, (5, 6), strict=True):
        begin = (
            f"[Errno {errno.ENOSPC}] No space left on device: the checkpoint of step {step} could not be written to "
        )
        assert line.startswith(f"{errno.ENOSPC} {begin}MOUNT/checkpoints. It needs {needs:,} bytes: ")
        assert "bytes: delete something there or lower checkpoint.keep, or set output_dir to another disk" in line
        assert line.endswith("The checkpoint of step 4 stays good")
    told = f"{errno.EROFS} [Errno {errno.EROFS}] Read-only file system: the checkpoint of step 8 could not"
    assert read_only.startswith(told)
    assert read_only.endswith("bytes: set output_dir to another disk. The checkpoint of step 7 stays good")
    assert (
        start == "MOUNT/checkpoints cannot be written to (Read-only file system): set output_dir to a folder that can"
    )


AS_NOBODY = """
import os
torch.full((1,), 1.0)  # loads files that user nobody may not be able to read
os.setuid(65534)
folder = mount / "mine"
store = CheckpointManager(folder, keep=3)
save(1, 50_000); save(2, 50_000)
"""


def as_nobody(options: str, source: str) -> str:
    """Runs as a user for whom permissions and quotas apply; returns the printed text."""
    unshare = shutil.which("unshare")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's folders admit no other user
        mount = ["-m", "mount", "-t", "tmpfs", "-o", options, "none", folder]
        if os.getuid() != 0 or unshare is None or subprocess.run([unshare, *mount], capture_output=True).returncode:
            pytest.skip(f"needs root and a tmpfs with {options}")
        script = DISK.replace("size=1m", options) + AS_NOBODY + source
        return run_python(["-m", sys.executable, "-c", script, folder], executable=unshare).stdout.strip()


@pytest.mark.slow
def test_permission_that_is_lost() -> None:
    denied = as_nobody(
        "size=8m,mode=0777",
        "folder.chmod(0o555)\nrefused(3, 10); assert complete() == [1, 2]\n"
        "folder.chmod(0o755)\nsave(4, 10_000); assert complete() == [1, 2, 4]\n",
    )
    assert denied.startswith(f"{errno.EACCES} [Errno {errno.EACCES}] Permission denied: the checkpoint of step 3 could")
    assert denied.endswith("set output_dir to another disk. The checkpoint of step 2 stays good")


USED_UP = (
    f"{errno.EDQUOT} [Errno {errno.EDQUOT}] Disk quota exceeded: the checkpoint of step 3 could not be written to "
)
QUOTA_ADVICE = (
    "delete something there or lower checkpoint.keep, or set output_dir to another disk. The checkpoint of step"
)


def test_quota_that_is_used_up() -> None:
    told = as_nobody(
        "size=8m,usrquota_block_hardlimit=1m,mode=0777",  # since Linux 6.6, if compiled in
        "refused(3, 200_000); assert complete() == [1, 2]\nsave(4, 10_000); assert complete() == [1, 2, 4]\n",
    )
    assert told.startswith(USED_UP) and told.endswith(f"{QUOTA_ADVICE} 2 stays good")


def test_what_a_used_up_quota_is_told_as(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates quotas, which a kernel may lack: they fail at a write or, in network folders, at fsync."""
    with CheckpointManager(folder, keep=2) as store:
        save(store, 2)
        with monkeypatch.context() as full:
            full.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Disk quota exceeded")))
            with pytest.raises(OSError, match=f"{QUOTA_ADVICE} 2 stays good") as raised:
                save(store, 3)
        assert f"{errno.EDQUOT} {raised.value}".startswith(USED_UP)
        assert steps(store) == [2] and list(folder.glob(".*.part")) == []


@pytest.mark.slow
def test_limits_of_a_user(tmp_path: Path) -> None:
    folder, theirs = tmp_path / "mine", tmp_path / "theirs"
    theirs.mkdir(mode=0o555)
    done = run_python(
        ["-c",
         "import os, pathlib, resource, sys, torch\n"
         "from tpu_kit.training.checkpoint.manager import CheckpointManager\n"
         "store = CheckpointManager(pathlib.Path(sys.argv[1]), keep=1)\n"
         "store.save(1, {'x': {'a': torch.ones(10)}}, {}, {}); store.wait()\n"
         "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
         "for documents, numbers in (({}, 100_000), ({'state': 'x' * 100_000}, 1)):\n"
         "    store.save(2, {'x': {'a': torch.ones(numbers)}}, documents, {})\n"
         "    try: store.wait()\n"
         "    except OSError as error: print(error.errno, error.strerror)\n"
         # Root may write anywhere. All modules are imported by now, as user nobody may not be able to read them.
         "os.chdir(sys.argv[3])\n"
         "if os.getuid() == 0: os.setuid(65534)\n"
         "try: CheckpointManager(pathlib.Path(sys.argv[2]), keep=1)\n"
         "except ValueError as error: print(error)\n",
         str(folder), theirs.name, str(tmp_path)],
    )  # fmt: skip
    *large, denied = done.stdout.splitlines()
    assert len(large) == 2
    assert all(line.startswith(f"{errno.EFBIG} File too large: the checkpoint of step 2 could not") for line in large)
    assert [found.step for found in list_checkpoints(folder, verify=True)[0]] == [1]
    assert denied == "theirs cannot be written to (Permission denied): set output_dir to a folder that can"


# --------------------------------------------------------------------------------------------------------- command line


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    times = iter([now - 3 * 86400, now - 600, now + 50])
    with CheckpointManager(folder, keep=3, clock=lambda: next(times)) as store:
        save(store, 5, best=True, loss=1.25, eval_loss=1.5)
        save(store, 1000, loss=0.75)
        save(store, 1001)
        assert manager.print_checkpoints(str(folder.parent)) == 0  # beside the writer, by the run's folder
        assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
            ["step", "5", "0.0", "MB", "3", "d", "complete,", "best", "loss", "1.25", "eval_loss", "1.5"],
            ["step", "1,000", "0.0", "MB", "10", "min", "complete", "loss", "0.75"],
            ["step", "1,001", "0.0", "MB", "0", "s", "complete"],
        ]
        flip(folder / "step-00001000" / "optimizer.safetensors")
        assert manager.print_checkpoints(str(folder)) == 0
        capsys.readouterr()
        assert manager.print_checkpoints(str(folder), verify=True) == 1
        printed = capsys.readouterr().out.splitlines()
        assert "verified, best" in printed[0] and "1,001" in printed[1]
        damaged = folder / "step-00001000" / "optimizer.safetensors"
        assert printed[2:] == [f"damaged: {damaged} has changed since it was written: its MD5 differs"]
        assert damaged.exists()  # a list changes nothing

        assert manager.print_checkpoints(str(folder), verify=True, as_json=True) == 1
        listed = json.loads(capsys.readouterr().out)
        first = listed["complete"][0]
        assert [found["step"] for found in listed["complete"]] == [5, 1001]
        assert (first["path"], first["best"]) == (str(folder / "step-00000005"), True)
        assert first["metrics"] == {"loss": 1.25, "eval_loss": 1.5}
        assert first["bytes"] == sum(size for size, _ in first["files"].values())
        assert first["age_seconds"] == pytest.approx(3 * 86400, abs=100)
        assert [found["path"] for found in listed["damaged"]] == [str(damaged.parent)]


def test_list_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert manager.print_checkpoints(str(tmp_path)) == 0
    assert capsys.readouterr().out == f"no checkpoints in {tmp_path}\n"
    with pytest.raises(ConfigError, match="runs/none: no such folder"):
        manager.print_checkpoints("runs/none")


# ----------------------------------------------------------------------------------------------------------- stock PEFT


def test_stock_peft_loads_a_checkpoint(folder: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapter = {name: value.detach().clone() for name, value in get_peft_model_state_dict(model).items()}
    settings = model.peft_config["default"].to_dict()
    settings = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    with CheckpointManager(folder, keep=1) as store:
        store.save(3, {"adapter_model": adapter}, {"adapter_config": settings}, {})
        store.wait()
        found = store.newest()
    assert found is not None
    fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(fresh, found.path)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
        with loaded.disable_adapter():
            assert not torch.equal(loaded(ids).logits, model(ids).logits)
