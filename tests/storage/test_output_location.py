from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.hardware.machine import Machine
from tpu_kit.storage.object_store import ObjectFolder
from tpu_kit.storage.output_location import find_place, make_output_folder, resolve_output_dir, set_results_aside

COLAB, BATCH = {"COLAB_RELEASE_TAG": "release"}, {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}
INTERACTIVE = {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}


def run(output_dir: str | None = None) -> TrainConfig:
    return load_config(None, {"run_name": "mine", "output_dir": output_dir})


def test_a_laptop_writes_beside_the_notebook(tmp_path: Path) -> None:
    place = find_place(run(), Machine(tmp_path, {}))
    assert (place.output_dir, place.reason, place.warning) == ("runs/mine", "this machine's disk", "")


def test_colab_with_drive(tmp_path: Path) -> None:
    (tmp_path / "content/drive/MyDrive").mkdir(parents=True)
    place = find_place(run(), Machine(tmp_path, COLAB))
    assert place.output_dir == f"{tmp_path}/content/drive/MyDrive/tpu_kit/mine"
    assert "outlives the session" in place.reason and not place.warning
    inside = find_place(run(f"{tmp_path}/content/drive/MyDrive/x"), Machine(tmp_path, COLAB))
    assert inside.output_dir.endswith("MyDrive/x") and not inside.warning
    outside = find_place(run("/content/x"), Machine(tmp_path, COLAB))
    assert outside.output_dir == "/content/x" and "Colab deletes this folder with the session" in outside.warning


def test_colab_without_drive(tmp_path: Path) -> None:
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
    outside = find_place(run("/tmp/x"), Machine(tmp_path, BATCH))
    assert outside.output_dir == "/tmp/x" and f"Kaggle keeps {working} alone" in outside.warning


def test_a_run_attached_to_a_kaggle_notebook_is_copied_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of another notebook's version, as Kaggle mounts it: read-only, below the version's name."""
    at, config = Machine(tmp_path, BATCH), load_config(None, {"run_name": "mine[1]"})
    for number, version in enumerate(("train-v1", "notebooks/someone/train-v2")):
        attached = tmp_path / "kaggle/input" / version / "runs/mine[1]"
        (attached / "checkpoints/step-00000040").mkdir(parents=True)
        (attached / "config.yaml").write_text(version)
        os.utime(attached / "config.yaml", (number, number))
    settled = resolve_output_dir(config, at)
    folder = tmp_path / "kaggle/working/runs/mine[1]"
    assert settled.output_dir == str(folder) and (folder / "checkpoints/step-00000040").is_dir()
    assert (folder / "config.yaml").read_text() == "notebooks/someone/train-v2", "the newest"
    assert "an input of this notebook" in capsys.readouterr().out
    (folder / "config.yaml").write_text("went on")
    resolve_output_dir(config, at)
    assert (folder / "config.yaml").read_text() == "went on"
    assert "copies" not in capsys.readouterr().out


def test_nothing_is_copied_elsewhere_or_where_a_run_starts_anew(tmp_path: Path) -> None:
    attached = tmp_path / "kaggle/input/v1/runs/mine"
    attached.mkdir(parents=True)
    (attached / "config.yaml").touch()
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
        with pytest.raises(ValueError, match=r"output_dir: .* is neither a folder nor a gs:// address; use one of "):
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
