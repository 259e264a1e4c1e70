from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.machine.storage.output_location import (
    find_place,
    make_output_folder,
    resolve_output_dir,
    set_results_aside,
)

COLAB, BATCH = {"COLAB_RELEASE_TAG": "release"}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
INTERACTIVE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}


def run(output_dir: str | None = None) -> TrainConfig:
    return load_config(None, {"run_name": "mine", "output_dir": output_dir})


def test_a_laptop_writes_beside_the_notebook(tmp_path: Path) -> None:
    place = find_place(run(), Machine(tmp_path, {}))
    assert (place.output_dir, place.reason, place.warning) == ("runs/mine", "this machine's disk", "")


@pytest.mark.parametrize("mount", ["content/drive", "content/gdrive", "mnt/my drive"])
def test_colab_with_drive(tmp_path: Path, mount: str) -> None:
    (tmp_path / mount / "MyDrive").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    named = mount.replace(" ", "\\040")
    (tmp_path / "proc/mounts").write_text(f"overlay / overlay rw 0 0\ndrive /{named} fuse.drive rw,nosuid 0 0\n")
    place = find_place(run(), Machine(tmp_path, COLAB))
    assert place.output_dir == f"{tmp_path}/{mount}/MyDrive/tpu_kit/mine"
    assert "outlives the session" in place.reason and not place.warning
    for folder in ("MyDrive/x", "Shareddrives/team/x"):
        inside = find_place(run(f"{tmp_path}/{mount}/{folder}"), Machine(tmp_path, COLAB))
        assert inside.output_dir.endswith(folder) and not inside.warning
    outside = find_place(run("/content/x"), Machine(tmp_path, COLAB))
    assert outside.output_dir == "/content/x" and "Colab deletes this folder with the session" in outside.warning


def test_colab_without_drive(tmp_path: Path) -> None:
    (tmp_path / "content/drive/MyDrive").mkdir(parents=True)  # left behind by a Drive that is no longer mounted
    left = find_place(run(f"{tmp_path}/content/drive/MyDrive/x"), Machine(tmp_path, COLAB))
    assert "Colab deletes this folder" in left.warning
    place = find_place(run(), Machine(tmp_path, COLAB))
    assert place.output_dir == "runs/mine"
    assert "drive.mount('/content/drive')" in place.warning and "output_dir=gs://" in place.warning


def test_kaggle(tmp_path: Path) -> None:
    working = f"{tmp_path}/kaggle/working"
    batch = find_place(run(), Machine(tmp_path, BATCH))
    assert batch.output_dir == f"{working}/runs/mine" and not batch.warning
    interactive = find_place(run(), Machine(tmp_path, INTERACTIVE))
    assert interactive.output_dir == f"{working}/runs/mine"
    assert "Persistence" in interactive.warning and "Save & Run All" in interactive.warning
    for outside in ("/tmp/x", f"{working}-old/x"):
        place = find_place(run(outside), Machine(tmp_path, BATCH))
        assert place.output_dir == outside and f"Kaggle keeps only {working}" in place.warning


def attach(at: Machine, where: str, name: str, *steps: int) -> Path:
    """Makes checkpoints of a run among the inputs of a Kaggle notebook, which are read-only."""
    folder = at.root / "kaggle/input" / where
    for step in steps:
        (one := folder / f"step-{step:08d}").mkdir(parents=True)
        (one / "manifest.json").write_text(where)
        (one / "config.json").write_text(json.dumps({"run_name": name}))
        one.chmod(0o555)
    folder.chmod(0o555)
    return folder


@pytest.mark.parametrize(
    "where", ["my-data", "my-data/checkpoints", "datasets/me/slug/versions/1/out/mine[1]/checkpoints"]
)
def test_a_run_among_the_inputs_of_a_kaggle_notebook_is_copied_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """The output of another notebook's version, or a data set of any name and depth."""
    at, config = Machine(tmp_path, BATCH), load_config(None, {"run_name": "mine[1]"})
    attach(at, "train-v1/runs/mine[1]/checkpoints", "mine[1]", 8)
    newest = attach(at, where, "mine[1]", 8, 40)
    attach(at, "else", "another", 900)
    if newest.name == "checkpoints":
        newest = newest.parent
        (newest / "config.yaml").write_text("run_name: mine[1]\n")
        (newest / "config.yaml").chmod(0o444)
    folder = tmp_path / "kaggle/working/runs/mine[1]"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("of a session that ended before its first checkpoint")
    assert resolve_output_dir(config, at).output_dir == str(folder)
    assert (folder / "checkpoints/step-00000040/manifest.json").read_text() == where
    assert ((folder / "config.yaml").read_text() == "run_name: mine[1]\n") == ("checkpoints" in where)
    assert all(path.stat().st_mode & 0o200 for path in folder.rglob("*")), "what is read-only cannot go on"
    assert f"copies           {newest}, an input of this notebook, to {folder}" in capsys.readouterr().out
    (folder / "config.yaml").write_text("went on")
    resolve_output_dir(config, at)
    assert (folder / "config.yaml").read_text() == "went on"
    assert "copies" not in capsys.readouterr().out


def test_other_runs_among_the_inputs_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at = Machine(tmp_path, BATCH)
    first, second = attach(at, "a/damaged/checkpoints", "x", 8), attach(at, "b/deep", "other", 8)
    (first / "step-00000008/config.json").write_text("{")
    resolve_output_dir(run(), at)
    listed = f"{first} (run_name=damaged), {second} (run_name=other)"
    told = f"have checkpoints of other runs, which are not continued: {listed}"
    assert told in capsys.readouterr().out and not (tmp_path / "kaggle/working").exists()


def test_nothing_is_copied_elsewhere_or_where_a_run_starts_anew(tmp_path: Path) -> None:
    attach(Machine(tmp_path, BATCH), "v1/runs/mine/checkpoints", "mine", 4)
    resolve_output_dir(run(), Machine(tmp_path, COLAB))
    resolve_output_dir(load_config(None, {"run_name": "mine", "resume": "never"}), Machine(tmp_path, BATCH))
    resolve_output_dir(load_config(None, {"run_name": "other"}), Machine(tmp_path, BATCH))
    assert not (tmp_path / "kaggle/working").exists()


def test_a_tpu_vm_may_be_deleted_with_its_disk(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    for name, value in {"vendor": "0x1ae0", "device": "0x0063"}.items():
        (device / name).write_text(value)
    assert "deleted with its disk" in find_place(run(), Machine(tmp_path, {})).warning


@pytest.mark.parametrize("environ", [{}, COLAB, BATCH])
def test_an_object_store_outlives_all(tmp_path: Path, environ: dict[str, str]) -> None:
    place = find_place(run("gs://bucket/run"), Machine(tmp_path, environ))
    assert place.output_dir == "gs://bucket/run" and not place.warning


def test_settle_says_where_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settled = resolve_output_dir(run(), Machine(tmp_path, INTERACTIVE))
    said = capsys.readouterr()
    assert settled.output_dir == f"{tmp_path}/kaggle/working/runs/mine"
    assert said.out.startswith(f"writes to        {settled.output_dir}: ")
    assert said.err.startswith("warning: an interactive session keeps it only if")
    assert resolve_output_dir(settled, Machine(tmp_path, INTERACTIVE)) == settled


def test_places_that_are_neither() -> None:
    for bad in ("s3://bucket/run", "gs://", "gs:///run"):
        with pytest.raises(ValueError, match=r"output_dir: .* is neither a folder nor a gs:// address; use either, "):
            run(bad)
    remote = run("gs://bucket/run/")
    assert remote.remote == "gs://bucket/run" and remote.checkpoints_place == "gs://bucket/run/checkpoints"
    assert remote.output_path == Path("runs/mine")


def test_hosts_make_one_folder_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as hosts:
        assert set(hosts.map(make_output_folder, [run(f"{tmp_path}/run")] * 2000)) == {tmp_path / "run"}
    assert list((tmp_path / "run").iterdir()) == []


def test_answers_of_an_earlier_run_leave_the_object_store(bucket: str) -> None:
    store = ObjectFolder(f"{bucket}/run")
    for name in ("adapter/base.json", "eval.json"):
        store.write(name, b"{}")
    set_results_aside(run(store.url))
    assert [*store.list()] == ["adapter/base.json"]
