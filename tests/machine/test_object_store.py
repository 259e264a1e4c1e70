"""Folders and object stores with other programs' files, or with special characters in names."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from tpu_kit.cli import main
from tpu_kit.machine.storage.object_store import ObjectFolder, at_hand, join
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints
from tpu_kit.training.checkpoint.manifest import seal, unseal

READERS = {
    "generate": ["prompt=hi", "device_type=cpu", "adapter=RUN/adapter"],
    "search": ["prompt=hi", "device_type=cpu", "adapter=RUN/adapter"],
    "evaluate": ["embedded-cot", "device_type=cpu", "generate_rows=1", "generate_tokens=1", "adapter=RUN/adapter"],
    "export": ["RUN"],
    "checkpoints": ["RUN"],
    "train": ["embedded-cot", "device_type=cpu", "max_steps=1", "warmup_steps=0", "output_dir=RUN"],
}


@pytest.mark.parametrize("name", ["../victim", "ABSOLUTE"])
def test_an_object_whose_name_leads_out_of_a_copy_is_refused(bucket: str, tmp_path: Path, name: str) -> None:
    name = name.replace("ABSOLUTE", f"{tmp_path}/victim")
    ObjectFolder(f"{bucket}/run").write(f"adapter/{name}", b"evil")
    told = rf"{bucket}/run/adapter holds an object named '{name}', which .*: remove it, or use a folder that only you"
    with pytest.raises(ValueError, match=told), at_hand(f"{bucket}/run/adapter"):
        pass
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("command", READERS)
def test_every_command_that_reads_a_bucket_refuses(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a/b"))
    run = f"{bucket}/run"
    for place in ("adapter", "checkpoints"):
        ObjectFolder(f"{run}/{place}").write("../../../victim", b"evil")
    ObjectFolder(run).write("config.yaml", b"run_name: mine\n")
    assert main([command, *(text.replace("RUN", run) for text in READERS[command])]) == 1
    assert "holds an object named '" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("victim")) == []


@pytest.mark.parametrize("bucketed", [False, True], ids=["folder", "bucket"])
@pytest.mark.parametrize("name", ["../../../victim", "/etc/hostname"])
def test_a_manifest_that_names_files_outside_of_its_checkpoint_is_damaged(
    request: pytest.FixtureRequest, tmp_path: Path, bucketed: bool, name: str
) -> None:
    place = f"{request.getfixturevalue('bucket')}/checkpoints" if bucketed else tmp_path / "checkpoints"
    with CheckpointManager(place, keep=2) as manager:
        manager.save(1, {"x": {"a": torch.zeros(3)}}, {}, {})
        manager.wait()
        (good,) = manager.complete()
        file = f"{good.folder}/manifest.json"
        content = good.source.read(file)
        about = unseal(content, file, place)
        evil = seal(about | {"files": about["files"] | {name: {"bytes": 4, "sha256": "0", "md5": "0"}}}).encode()
        good.source.write(file, evil)
        found, damaged = list_checkpoints(place, verify=True)
        assert not found and damaged[0].reason.endswith("no run has written that") and repr(name) in damaged[0].reason
        with pytest.raises(ValueError, match="no run has written that"):
            manager.newest()


@pytest.mark.parametrize("bucketed", [False, True], ids=["folder", "bucket"])
def test_a_place_may_have_special_characters(request: pytest.FixtureRequest, tmp_path: Path, bucketed: bool) -> None:
    place = join(request.getfixturevalue("bucket") if bucketed else tmp_path, "a[1]{2} *?#%20", "checkpoints")
    with CheckpointManager(place, keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {"x": {"a": torch.tensor(step)}}, {}, {})
    ((found,), damaged) = list_checkpoints(place, verify=True)
    assert (found.step, damaged) == (2, []) and found.tensors("x") == {"a": torch.tensor(2)}
    with CheckpointManager(place, keep=1) as manager:
        manager.restart()
        assert manager.newest() is None and [found.step for found in list_checkpoints(f"{place}.previous")[0]] == [2]
