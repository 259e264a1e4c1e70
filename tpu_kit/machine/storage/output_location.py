"""Chooses a run's output folder so that its checkpoints outlive the session: for example, Google Drive on Colab."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from tpu_kit.config.loader import TrainConfig
from tpu_kit.machine.checks import Machine
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.local_folder import make_folder
from tpu_kit.machine.storage.object_store import ObjectFolder, upload

_WORKING, _INPUT = "kaggle/working", "kaggle/input"
_CHECKPOINTS, _DEEPEST = "checkpoints", 8  # folder levels below the inputs that are searched for checkpoints
_BUCKET = "output_dir=gs://your-bucket/run"


@dataclass(frozen=True)
class Place:
    """A run's output folder or gs:// URL, the reason for the choice, and a warning if it may be deleted early."""

    output_dir: str
    reason: str
    warning: str = ""


def find_place(config: TrainConfig, at: Machine | None = None) -> Place:
    """Chooses a run's output folder on the machine `at` (default: this machine); an `output_dir` that is set stays.

    Otherwise it is MyDrive/tpu_kit/RUN_NAME on Colab with a mounted Google Drive, and runs/RUN_NAME in /kaggle/working
    on Kaggle. Elsewhere it is runs/RUN_NAME. The result has a warning if the folder may be deleted early. Makes no
    folder and prints nothing.
    """
    at = at or Machine()
    given = config.output_dir
    if given is not None and "://" in given:
        return Place(given, "an object store, which outlives every machine")
    if "COLAB_RELEASE_TAG" in at.environ:
        return _on_colab(given, config.run_name, at)
    if "KAGGLE_KERNEL_RUN_TYPE" in at.environ:
        return _on_kaggle(given, config.run_name, at)
    warning = f"a spot TPU VM that is taken back is deleted with its disk: use {_BUCKET}, or a disk of its own"
    return Place(given or str(config.output_path), "this machine's disk", warning if at.tpus() else "")


def _on_colab(given: str | None, run_name: str, at: Machine) -> Place:
    """Returns the place on Colab: `given`, or else Google Drive if it is mounted, or else a folder that is deleted."""
    drives = _drives(at)
    own = next((drive / "MyDrive" for drive in drives if (drive / "MyDrive").is_dir()), None)
    if given is None and own is not None:
        return Place(str(own / "tpu_kit" / run_name), "Google Drive is mounted, and outlives the session")
    if given is not None and any(Path(os.path.abspath(given)).is_relative_to(drive) for drive in drives):
        return Place(given, "Google Drive, which outlives the session")
    warning = (
        "Colab deletes this folder with the session: before training run `from google.colab import drive; "
        f"drive.mount('/content/drive')` and leave output_dir out, or set {_BUCKET}"
    )
    return Place(given or f"runs/{run_name}", "this machine's disk", warning)


def _drives(at: Machine) -> list[Path]:
    """Lists Google Drive's mount points from /proc/mounts: its folder may exist without being mounted."""
    rows = [line.split() for line in at.read("proc/mounts").splitlines()]
    names = [row[1].replace("\\040", " ") for row in rows if len(row) > 2 and row[2].startswith("fuse.drive")]
    return [at.root / name.lstrip("/") for name in names]


def _on_kaggle(given: str | None, run_name: str, at: Machine) -> Place:
    """Returns the place on Kaggle: `given`, or else a folder in /kaggle/working, which Kaggle can keep."""
    working = at.root / _WORKING
    inside = given is None or Path(os.path.abspath(given)).is_relative_to(working)
    place = str(working / "runs" / run_name) if given is None else given
    if not inside:
        return Place(place, "as asked for", f"Kaggle keeps only {working}: leave output_dir out, or set {_BUCKET}")
    if at.environ["KAGGLE_KERNEL_RUN_TYPE"] == "Batch":
        return Place(place, f"{working} becomes the output of this version of the notebook")
    warning = (
        "an interactive session keeps it only if Persistence (in the notebook's settings) is set to Files; or use "
        f"Save Version > Save & Run All, or set {_BUCKET}"
    )
    return Place(place, f"Kaggle can keep {working}", warning)


def fetch_run(place: Place, run_name: str, at: Machine | None = None) -> None:
    """Copies a run from a Kaggle notebook's inputs to its local output folder; elsewhere does nothing.

    Does nothing if that folder has checkpoints. Searches the inputs for checkpoint manifests, up to eight folder levels
    deep; checkpoints contain their run's name. If several runs have the name `run_name`, copies the run with the most
    updates, and prints its path. If none has it, prints the runs of other names and copies nothing.
    """
    at = at or Machine()
    target = Path(place.output_dir)
    if "KAGGLE_KERNEL_RUN_TYPE" not in at.environ or "://" in place.output_dir or _steps(target / _CHECKPOINTS):
        return
    runs = {folder: _name_of(folder) for folder in _checkpoints_below(at.root / _INPUT)}
    found = [folder for folder, name in runs.items() if name == run_name]
    if not found:
        if runs:
            listed = ", ".join(f"{folder} (run_name={name})" for folder, name in sorted(runs.items()))
            print(f"inputs           have checkpoints of other runs, which are not continued: {listed}", flush=True)
        return
    newest = max(found, key=lambda folder: _steps(folder)[-1])
    whole = newest.name == _CHECKPOINTS  # else the input has only the checkpoints
    print(f"copies           {newest.parent if whole else newest}, an input of this notebook, to {target}", flush=True)
    target.mkdir(parents=True, exist_ok=True)
    # An input is read-only: its permissions are not copied. The checkpoints come last, in one atomic step.
    for path in newest.parent.iterdir() if whole else ():
        if path.name != _CHECKPOINTS:
            with atomic.replacing(target / path.name) as part:
                _copy(path, part)
    with atomic.replacing(target / _CHECKPOINTS) as part:
        _copy(newest, part)


def _copy(path: Path, to: Path) -> None:
    """Copies a file or folder to a new path, without permissions."""
    if path.is_dir():
        to.mkdir()
        for inner in path.iterdir():
            _copy(inner, to / inner.name)
    else:
        shutil.copyfile(path, to)


def _checkpoints_below(folder: Path, depth: int = 0) -> list[Path]:
    """Finds the folders that hold checkpoints, without searching inside of them or folders that cannot be read."""
    if _steps(folder):
        return [folder]
    inner = []
    if depth < _DEEPEST:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            inner = [Path(entry) for entry in entries if entry.is_dir()]
    return [found for path in inner for found in _checkpoints_below(path, depth + 1)]


def _name_of(checkpoints: Path) -> str:
    """Returns the name of the run that wrote the checkpoints; if it cannot be read, the name of their parent folder."""
    file = checkpoints / _steps(checkpoints)[-1] / "config.json"
    with contextlib.suppress(OSError, ValueError, AttributeError, KeyError):
        return str(json.loads(file.read_text(encoding="utf-8"))["run_name"])
    return checkpoints.parent.name


def _steps(checkpoints: Path) -> list[str]:
    """Lists the names of the checkpoints with a manifest, by step; empty if there is no such folder."""
    return sorted(path.parent.name for path in checkpoints.glob("step-*/manifest.json"))


def resolve_output_dir(config: TrainConfig, at: Machine | None = None) -> TrainConfig:
    """Returns `config` with the `output_dir` of `find_place`; prints the reason and any warning.

    Unless `checkpoint.resume` is "never", copies the run's checkpoints from Kaggle's inputs (`fetch_run`).
    """
    place = find_place(config, at)
    print(f"writes to        {place.output_dir}: {place.reason}", flush=True)
    if config.checkpoint.resume != "never":
        fetch_run(place, config.run_name, at)
    if place.warning:
        print(f"warning: {place.warning}", file=sys.stderr, flush=True)
    return replace(config, output_dir=place.output_dir)


def make_output_folder(config: TrainConfig, *, dry: bool = False) -> Path:
    """Makes and returns the run's local folder (`config.output_path`); with `dry`, only checks that it can be made.

    Raises ValueError if the folder cannot be made or written to.
    """
    folder = config.output_path
    try:
        if not dry:
            make_folder(folder)
        there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        raise ValueError(
            f"output_dir={folder} cannot be written to ({error.strerror}): set output_dir to a folder that can"
        ) from error
    return folder


def set_results_aside(config: TrainConfig) -> None:
    """Moves adapter and eval.json of an earlier training in `config.output_path` to its folder results.previous.

    If the new training ends early, an older adapter or its answers must not pass for its results. If either exists,
    first empties results.previous, and prints a line. In an object store the adapter stays, because adapter and
    config.yaml there must belong to the same run; only eval.json is removed there.
    """
    previous = config.output_path / "results.previous"
    if results := [path for name in ("adapter", "eval.json") if (path := config.output_path / name).exists()]:
        shutil.rmtree(previous, ignore_errors=True)
        previous.mkdir()
        for path in results:
            path.rename(previous / path.name)
        print(f"set aside        {' and '.join(path.name for path in results)} of earlier updates, in {previous}")
    if config.remote:
        ObjectFolder(config.remote).remove(["eval.json"])


def upload_results(config: TrainConfig, adapter_dir: str = "") -> None:
    """Uploads a run's local files to its object store, which already has the checkpoints.

    The files are config.yaml, questions.npz, metrics.jsonl and eval.json of `config.output_path`, if they exist.

    Args:
        config: the run, whose `output_dir` is in an object store.
        adapter_dir: local folder of the run's adapter, which becomes the folder adapter in the store; if empty, only
            the other files are uploaded.

    Raises:
        ValueError: an upload failed.
    """
    assert config.remote is not None
    try:
        if adapter_dir:
            upload(Path(adapter_dir), f"{config.remote}/adapter")
        for name in ("config.yaml", "questions.npz", "metrics.jsonl", "eval.json"):
            if (path := config.output_path / name).is_file():
                ObjectFolder(config.remote).put(path, name)
    except OSError as error:
        raise ValueError(
            f"{error}. Nothing is lost: the checkpoints are uploaded, the rest is in {config.output_path}; "
            f"{config.again} to upload it"
        ) from error
