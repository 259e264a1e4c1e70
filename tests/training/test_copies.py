"""A run is copied from a folder to a bucket and back, whole or in part, beside files of other tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpu_kit.machine.storage.object_store import ObjectFolder, parent
from tpu_kit.training.checkpoint import manager, manifest
from tpu_kit.training.checkpoint.manager import CheckpointManager, list_checkpoints, remains


def save(store: CheckpointManager, step: int) -> None:
    store.save(step, {"x": {"a": torch.full((50,), float(step))}}, {"state": {"step": step}}, {})
    store.wait()


def steps(place: Path | str) -> list[int]:
    """Opens a place as its writer; returns the steps of its valid checkpoints."""
    with CheckpointManager(place, keep=9) as store:
        newest = store.newest()
        found = store.complete()
    assert newest is not None and newest.step == found[-1].step and not store.rejected
    for one in found:
        assert torch.equal(one.tensors("x")["a"], torch.full((50,), float(one.step)))
        assert one.document("state") == {"step": one.step}
    assert [one.step for one in list_checkpoints(place, verify=True)[0]] == [one.step for one in found]
    return [one.step for one in found]


def upload(folder: Path, url: str) -> None:
    """Uploads like `gcsfs.put(..., recursive=True)`, or `gsutil rsync -r` without -d."""
    store = ObjectFolder(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.put(path, path.relative_to(folder).as_posix())


def download(url: str, folder: Path) -> None:
    store = ObjectFolder(url)
    for name in store.list():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        store.get(name, folder / name)


def test_a_run_goes_on_wherever_it_is_copied_to(tmp_path: Path, bucket: str) -> None:
    first, second, there, elsewhere = tmp_path / "a/checkpoints", tmp_path / "b/c", f"{bucket}/run/c", f"{bucket}/d"
    with CheckpointManager(first, keep=1, keep_every=2) as store:
        for step in (1, 2, 3):
            save(store, step)
    upload(first, there)
    assert steps(there) == [2, 3]
    with CheckpointManager(there, keep=1, keep_every=2) as store:
        save(store, 3)  # replaces the copied step
        save(store, 4)
        leftover = store._store.attempt_name.format(step=9, name="0123456789ab")
    assert steps(there) == [2, 4]
    about = json.loads(ObjectFolder(there).read("step-00000002/manifest.json"))
    ObjectFolder(there).write(f"{leftover}/manifest.json", json.dumps(about).encode())  # a killed attempt
    assert steps(there) == [2, 4]

    ObjectFolder(there).write(f"{leftover}/manifest.json", json.dumps(about).encode())
    download(there, second)
    assert [one.step for one in list_checkpoints(second)[0]] == [2, 4]
    upload(second, elsewhere)
    assert steps(elsewhere) == [2, 4] and not any(leftover in name for name in ObjectFolder(elsewhere).list())
    with CheckpointManager(second, keep=9) as store:
        save(store, 4)  # replaces the bucket's step
        save(store, 5)
    assert steps(second) == [2, 4, 5]
    assert {path.name for path in second.iterdir()} == {".lock", *(f"step-0000000{step}" for step in (2, 4, 5))}
    upload(second, there)  # over the bucket's newer checkpoints
    assert steps(there) == [2, 4, 5]
    shutil.copytree(first, tmp_path / "mount")
    assert steps(tmp_path / "mount") == [2, 3]


def test_objects_that_were_uploaded_in_parts_have_no_md5_and_are_read(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(f"{bucket}/c", keep=3) as store:
        save(store, 1)
        save(store, 2)
        listed = ObjectFolder.list
        monkeypatch.setattr(
            ObjectFolder, "list", lambda *given: {name: (size, "") for name, (size, _) in listed(*given).items()}
        )
        (_, newest) = store.complete()
        newest.verify()
        content = newest.source.read(file := f"{newest.folder}/x.safetensors")
        newest.source.write(file, content[:-1] + b"?")  # type: ignore[union-attr]
        found = store.newest()
        assert (
            found is not None
            and found.step == 1
            and "x.safetensors has changed since it was written" in store.rejected[0].reason
        )


def into(one: Path, folder: str) -> None:
    one.rename(other := one.with_name("other"))
    (one.parent / folder).mkdir(parents=True)
    other.rename(one.parent / folder / ("3f9a1c07b2de" if folder == one.name else one.name))


def as_trainer(one: Path) -> None:
    (one / "manifest.json").rename(one / "trainer_state.json")
    one.rename(one.with_name("checkpoint-500"))


def as_archive(one: Path) -> None:
    shutil.make_archive(str(one), "gztar", one)
    shutil.rmtree(one)


def as_tensors(one: Path) -> None:
    (one / "x.safetensors").rename(one.with_name("model.safetensors"))
    shutil.rmtree(one)


CUTS: dict[str, Callable[[Path], object]] = {
    "step-00000001/manifest.json is missing": lambda one: (one / "manifest.json").unlink(),
    "step-00000001/x.safetensors is missing": lambda one: (one / "x.safetensors").unlink(),
    "step-00000001/x.safetensors has 9 bytes, and had 296": lambda one: (one / "x.safetensors").write_bytes(bytes(9)),
    "step-00000001.corrupt was set aside as damaged": lambda one: one.rename(one.with_name(f"{one.name}.corrupt")),
    "checkpoints holds step-00000001/manifest.json: it is one folder too deep": lambda one: into(one, "checkpoints"),
    "step-00000001 holds 3f9a1c07b2de/manifest.json: it is one folder too deep, or of an": lambda one: into(
        one, one.name
    ),
    "checkpoint-500 is a checkpoint of transformers' Trainer": as_trainer,
    "step-00000001.tar.gz is an archive: unpack it": as_archive,
    "model.safetensors is no checkpoint of this tpu_kit": as_tensors,
}


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_what_is_no_whole_checkpoint_is_never_nothing(
    tmp_path: Path, request: pytest.FixtureRequest, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (told, cut) in enumerate(CUTS.items()):
        folder = tmp_path / str(number) / "checkpoints"
        with CheckpointManager(folder, keep=1) as store:
            save(store, 1)
        cut(folder / "step-00000001")
        place: Path | str = folder
        if where == "bucket":
            place = f"{request.getfixturevalue('bucket')}/{number}/checkpoints"
            upload(folder, place)
        for _ in range(2):  # a refusal changes nothing
            assert any(told in line for line in remains(place)), (told, remains(place))
            with (
                CheckpointManager(place, keep=9) as store,
                pytest.raises(ValueError, match="has no complete checkpoint, but this is there:") as refused,
            ):
                store.newest()
            assert told in str(refused.value) and str(refused.value).endswith("(which moves the old checkpoints aside)")
        manager.print_checkpoints(str(parent(place)))
        said = capsys.readouterr().out
        assert told in said or "corrupt" in told
        with CheckpointManager(place, keep=9) as store:
            store.restart()
            assert remains(place) == [] and store.newest() is None
            save(store, 7)
        assert steps(place) == [7]


def test_what_lies_beside_a_whole_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(tmp_path, keep=9) as store:
        save(store, 3)
        (tmp_path / "backup.zip").touch()
        (tmp_path / ".DS_Store").touch()
        (tmp_path / "step-00000002").mkdir()
        (tmp_path / "step-00000002" / "x.safetensors").touch()
        assert (found := store.newest()) is not None and found.step == 3
    told = capsys.readouterr().err
    assert f"warning: {tmp_path}/backup.zip is an archive: unpack it, and is ignored" in told and "DS_Store" not in told
    assert "step-00000002/manifest.json is missing; the checkpoint is set aside as step-00000002.corrupt" in told


def test_checkpoints_on_another_disk(tmp_path: Path) -> None:
    """A symbolic link replaces the folder, or a checkpoint in it."""
    disk, run = tmp_path / "disk" / "ck", tmp_path / "run"
    disk.mkdir(parents=True)
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    with CheckpointManager(run / "checkpoints", keep=1) as store:
        save(store, 1)
        store.restart()
        assert store.newest() is None and [one.step for one in list_checkpoints(disk.with_name("ck.previous"))[0]] == [
            1
        ]
        save(store, 2)
    shutil.move(disk / "step-00000002", tmp_path / "elsewhere")
    (disk / "step-00000002").symlink_to(tmp_path / "elsewhere")
    (disk / "round").symlink_to(disk)
    assert steps(run / "checkpoints") == [2]


def test_a_format_of_an_earlier_tpu_kit_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1) as store:
        save(store, 1)
        file = tmp_path / "step-00000001/manifest.json"
        about = json.loads(file.read_text())
        del about["sha256"]
        file.write_text(manifest.seal({**about, "format": 3}))
        with pytest.raises(
            ValueError, match="step-00000001 has format 3, and this tpu_kit reads 4: use the tpu_kit that"
        ):
            store.newest()
