"""The newest checkpoint of a run on the hub: always complete, fenced, and continued on another machine."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.exporting.test_publish import contents, in_process
from tests.recipes.conftest import world
from tests.recipes.test_sft import Configure, configure
from tests.support.hub import NAME, TOKEN, Hub, Repository
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.exporting.hub import checkpoint_uploads
from tpu_kit.exporting.hub.checkpoint_uploads import FOLDER, CheckpointUploads, fetch_checkpoint
from tpu_kit.recipes import sft
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints

__all__ = ["configure", "in_process", "world"]  # fixtures


def run_in(folder: Path) -> TrainConfig:
    folder.mkdir()
    return load_config(None, {"model_id": NAME, "strategy": "checkpoint", "output_dir": str(folder)})


def save(run: TrainConfig, *steps: int, keep: int = 1) -> None:
    with CheckpointManager(run.checkpoints_place, keep) as checkpoints:
        for step in steps:
            tensors = {"training": {"weights": torch.full((64,), float(step))}}
            checkpoints.save(step, tensors, {"state": {"step": step}}, {"loss": 1 / step})


def newest(run: TrainConfig) -> dict[str, bytes]:
    return contents(Path(list_checkpoints(run.checkpoints_place)[0][-1].path))


def there(hub: Hub) -> dict[str, bytes]:
    """The files of the checkpoint in the repository."""
    files = hub.repositories.get(NAME, Repository()).files
    return {name.removeprefix(f"{FOLDER}/"): content for name, content in files.items() if name.startswith(FOLDER)}


def upload(run: TrainConfig) -> CheckpointUploads:
    """Uploads the newest checkpoint as a run does at its end."""
    with CheckpointUploads(run) as uploads:
        pass
    return uploads


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_newest_wins_and_one_begins_in_five_minutes(hub: Hub, tmp_path: Path) -> None:
    run, now, goes_on = run_in(tmp_path / "run"), [0.0], threading.Event()
    hub.fault = lambda method, path: goes_on.wait(20) and None if path.endswith("/commit/main") else None
    save(run, 1)
    with CheckpointUploads(run, clock=lambda: now[0], look=0.01) as uploads:
        wait_for(lambda: f"/api/models/{NAME}/commit/main" in hub.paths)
        first = newest(run)
        save(run, 2, 3)  # and the first is deleted while it is uploaded
        goes_on.set()
        wait_for(lambda: uploads.count == 1)
        assert there(hub) == first
        now[0] = 299.0
        time.sleep(0.1)
        assert uploads.count == 1
        now[0] = 300.0
        wait_for(lambda: uploads.count == 2)
        assert there(hub) == newest(run)
        save(run, 4)
    assert uploads.count == 3 and there(hub) == newest(run)  # the last save is not waited for
    assert hub.repositories[NAME].messages == [f"Checkpoint of step {step}" for step in (1, 3, 4)]
    assert not list((tmp_path / "run").glob(".hub*"))
    assert upload(run).count == 0  # it is there


def in_child(work: Callable[[], object]) -> int:
    """Starts a function in a process of its own; returns its id."""
    if not (child := os.fork()):
        work()
        os._exit(0)
    return child


def kill_at(hub: Hub, child: int, request: str) -> list[int]:
    """Makes the hub kill a process at a request; returns the list to which its exit code is added."""
    ended = list[int]()

    def kill(method: str, path: str) -> None:
        if not ended and (path.endswith(request) or (request.endswith("/") and request in path)):
            os.kill(child, signal.SIGKILL)
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    hub.fault = kill
    return ended


REQUESTS = ["/api/repos/create", f"/api/models/{NAME}", "/resolve/", "/preupload/main", "/objects/batch", "/lfs/",
            "/commit/main"]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS)
def test_killed_at_a_request_the_repository_has_one_whole_checkpoint(hub: Hub, tmp_path: Path, request_: str) -> None:
    run = run_in(tmp_path / "run")
    save(run, 1, keep=2)
    upload(run)
    before = there(hub)
    save(run, 2, keep=2)
    ended = kill_at(hub, in_child(lambda: upload(run)), request_)
    wait_for(lambda: bool(ended))
    assert ended == [-signal.SIGKILL]
    hub.fault = lambda method, path: None
    assert there(hub) in (before, newest(run))
    save(run, 3, keep=2)
    assert upload(run).count == 1 and there(hub) == newest(run)
    other = load_config(None, {"checkpoint.source": f"hf://{NAME}", "output_dir": str(tmp_path / "other")})
    fetch_checkpoint(other)
    assert newest(other) == newest(run)


FETCHES = [f"/api/models/{NAME}", f"/{FOLDER}/manifest.json", "/tree/", f"/{FOLDER}/state.json"]


@pytest.mark.parametrize("request_", FETCHES)
def test_killed_at_a_request_of_a_fetch_and_repeated(hub: Hub, tmp_path: Path, request_: str) -> None:
    run = run_in(tmp_path / "run")
    save(run, 2)
    upload(run)
    other = load_config(None, {"checkpoint.source": f"hf://{NAME}", "output_dir": str(tmp_path / "other")})
    child = in_child(lambda: fetch_checkpoint(other))
    killed = kill_at(hub, child, request_)
    wait_for(lambda: bool(killed))
    assert killed == [-signal.SIGKILL]
    hub.fault = lambda method, path: None
    assert not list_checkpoints(other.checkpoints_place)[0]
    fetch_checkpoint(other)
    assert newest(other) == newest(run) and not list((tmp_path / "other").glob(".hub*"))


def test_a_run_that_another_one_has_replaced_pushes_no_more(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run_in(tmp_path / "one"), run_in(tmp_path / "two")
    save(one, 1)
    with CheckpointUploads(one, least=0, look=0.01) as first:
        wait_for(lambda: first.count == 1)
        save(two, 5)
        assert upload(two).count == 1
        save(one, 2)
        wait_for(lambda: first._lost)
        save(one, 3)
    said = capsys.readouterr()
    assert there(hub) == newest(two) and first.count == 1
    assert "hub.model_id=ann/tuned: its checkpoint is replaced; it stays in the commit" in said.out
    assert "another run has pushed a checkpoint there, so this run pushes no more" in said.err


def test_a_commit_by_hand_and_a_lost_answer_do_not_end_the_uploads(hub: Hub, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    save(run, 1)
    with CheckpointUploads(run, look=0.01) as uploads:
        wait_for(lambda: uploads.count == 1)
        repository = hub.repositories[NAME]
        repository.commit({**repository.files, "notes.txt": b"mine"}, "by hand")
        save(run, 2)
    assert uploads.count == 2 and repository.files["notes.txt"] == b"mine" and there(hub) == newest(run)

    hub.lost = lambda path: path.endswith("/commit/main")  # it is done, and the response is lost
    save(run, 3)
    with CheckpointUploads(run, look=0.01, least=0) as uploads:
        wait_for(lambda: there(hub) == newest(run))
        hub.lost = lambda path: False
        wait_for(lambda: uploads._manifest == newest(run)["manifest.json"])
        save(run, 4)
    assert there(hub) == newest(run) and not uploads._lost


def test_a_failure_is_one_warning_with_the_command(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path / "run")
    save(run, 1)
    hub.fault = lambda method, path: (402, {}) if path.endswith("/preupload/main") else None
    with CheckpointUploads(run, look=0.01, least=0):
        wait_for(lambda: sum(path.endswith("/preupload/main") for path in hub.paths) > 3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: hub.model_id={NAME}: the quota of the account is used up: make room")
    assert warning.endswith(f"after the run: python -m tpu_kit export {run.output_path} format=adapter push={NAME}")


def test_checkpoints_of_an_earlier_run_are_not_pushed(hub: Hub, tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    save(run, 7)
    anew = load_config({**run.to_dict(), "checkpoint": {"resume": "never"}})
    with CheckpointUploads(anew, look=0.01):
        time.sleep(0.1)
        with CheckpointManager(run.checkpoints_place, 1) as checkpoints:
            checkpoints.restart()
        save(run, 2)
    assert hub.repositories[NAME].messages == ["Checkpoint of step 2"]


def test_a_full_disk_holds_no_second_copy(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path / "run")
    save(run, 1)
    linked = list[str]()
    monkeypatch.setattr(checkpoint_uploads.os, "link", lambda *paths: linked.append(str(paths)))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    assert upload(run).count == 1 and there(hub) == newest(run) and not linked


def test_what_cannot_be_fetched(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path / "run")
    save(run, 4)

    def fetch(source: str, **values: str) -> None:
        changed = {"checkpoint.source": source, "output_dir": str(tmp_path / "run"), **values}
        fetch_checkpoint(load_config(None, changed))

    with pytest.raises(ValueError, match=r"checkpoint.source=hf://ann/tuned cannot be found: check its name, and that"):
        fetch("hf://ann/tuned")
    fetch("hf://ann/tuned", model_id=NAME)  # its first start
    with pytest.raises(ValueError, match=r"tuned@a+ cannot be found"):
        fetch(f"hf://ann/tuned@{40 * 'a'}", model_id=NAME)
    hub.repositories["ann/other"] = Repository()
    with pytest.raises(ValueError, match=r"hf://ann/other has no last-checkpoint, which a run with hub.strategy=check"):
        fetch("hf://ann/other", model_id=NAME)
    upload(run)
    fetch("hf://ann/tuned")
    assert f"step-00000004 is not older than step 4 of hf://{NAME}@" in capsys.readouterr().out
    damaged = {**hub.repositories[NAME].files, f"{FOLDER}/state.json": b"{}"}
    hub.repositories[NAME].commit(damaged, "damaged")
    with pytest.raises(ValueError, match=r"state.json has 2 bytes, and had"):
        fetch("hf://ann/tuned", output_dir=str(tmp_path / "fresh"))
    assert not list_checkpoints(tmp_path / "fresh" / "checkpoints")[0]


def test_another_machine_continues_the_run(hub: Hub, configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"schedule": "constant", "dropout": 0.1, "model_id": NAME, "strategy": "checkpoint", "save_steps": 1}
    whole = configure("whole", **{**given, "model_id": None, "strategy": "end"})
    sft.train(whole)
    sft.train(configure("first", max_steps=4, **given))
    said = capsys.readouterr().out
    pinned = said.rpartition("to continue on another machine: checkpoint.source=")[2].split()[0]
    assert pinned.startswith(f"hf://{NAME}@") and "; the newest checkpoint during training" in said
    assert {"README.md", "adapter_model.safetensors"} <= {*hub.repositories[NAME].files} > {f"{FOLDER}/manifest.json"}
    second = configure("second", **{**given, "checkpoint.source": pinned})
    result = sft.train(second)
    said = capsys.readouterr().out
    assert f"fetches          the checkpoint of step 4 of {pinned}" in said and "from step 4" in said
    assert (result.step, result.total_steps) == (6, 6)
    adapters = [load_file(config.output_path / "adapter" / "adapter_model.safetensors") for config in (whole, second)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    repository = hub.repositories[NAME]
    written = [*contents(configure("first").output_path.parent).values(), *hub.objects.values()]
    written += [content for files in repository.commits.values() for content in files.values()]
    assert len(written) > 20 and not any(TOKEN.encode() in content for content in written)
    steps = [message for message in repository.messages if message.startswith("Checkpoint")]
    assert steps[-1] == "Checkpoint of step 6"
