"""The path of a run, its config.yaml, its adapter or a checkpoint names the run; other paths are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.machine.storage.object_store import join, upload
from tpu_kit.machine.storage.run_config import names_run, read_command
from tpu_kit.machine.storage.run_folder import Run, adapter_of, find_run


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            load_config(None, {"max_steps": 7, "run_name": "old"}).to_yaml() if path.suffix == ".yaml" else ""
        )
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    make(tmp_path / "a", "config.yaml", "adapter/adapter_config.json", "checkpoints/step-00000007/adapter_config.json")
    make(tmp_path / "b", "config.yaml", "checkpoints/step-00000003/adapter_config.json")
    make(tmp_path / "copied", "adapter_config.json")
    make(tmp_path / "others", "notes.txt")
    return tmp_path


@pytest.mark.parametrize("named", ["a", "a/", "a/config.yaml", "a/adapter", "a/checkpoints/step-00000007"])
def test_a_run_by_each_of_its_paths(runs: Path, bucket: str, named: str) -> None:
    upload(runs, f"{bucket}/mine")
    for place in (runs, f"{bucket}/mine"):
        found, folder = find_run(f"{place}/{named}"), join(place, "a")
        adapter = join(folder, "checkpoints/step-00000007" if "step" in named else "adapter")
        assert found == Run(folder, adapter)
        config, answers = read_command(None, ["learning_rate=1e-3"], f"{place}/{named}")
        assert (config.optim.max_steps, config.optim.learning_rate, str(answers)) == (7, 1e-3, f"{place}/{named}")


def test_a_run_goes_on_where_it_lies(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for named in ("a", "a/config.yaml"):
        config, answers = read_command(str(runs / named))
        assert (config.output_dir, config.run_name, answers) == (str(runs / "a"), "old", runs / "a" / "adapter")
    assert capsys.readouterr().err.count(f"answers          {runs / 'a' / 'adapter'}\n") == 2
    assert read_command(str(runs / "a"), ["run_name=new"])[0].output_dir is None
    assert read_command(str(runs / "a"), ["output_dir=there"])[0].output_dir == "there"
    assert read_command(str(runs / "a"), adapter=None)[1] is None
    capsys.readouterr()
    assert read_command(str(runs / "b"), answers=False)[1] is None
    assert not capsys.readouterr().err
    read_command(str(runs / "b"))
    newest = runs / "b" / "checkpoints" / "step-00000003"
    assert capsys.readouterr().err == (
        f"answers          the base model only: {runs / 'b'} has no adapter, the run has not ended: continue it, or "
        f"give its newest checkpoint, {newest}\n"
    )


def test_a_configuration_beside_no_run_is_a_file(runs: Path) -> None:
    make(runs / "mine", "config.yaml")
    assert not names_run(str(runs / "mine" / "config.yaml")) and not names_run("embedded-cot")
    config, answers = read_command(str(runs / "mine" / "config.yaml"))
    assert (config.optim.max_steps, config.output_dir, answers) == (7, None, None)
    assert read_command(None, adapter=str(runs / "copied"))[0].optim.max_steps is None, "it lies beside no config.yaml"


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("b", "there is no adapter in {0}/b: the run has not ended: continue it, or give its newest checkpoint, {0}"),
        ("", "{0} has no adapter_config.json and no config.yaml, so it is neither a run nor an adapter; {0} holds the "
             "runs a, b"),
        ("others", "{0}/others has no adapter_config.json and no config.yaml, so it is neither a run nor an adapter; "
                   "{0}/others holds notes.txt; give the folder that training wrote"),
        ("c/adapter", "there is no adapter folder {0}/c/adapter, and no run; give the folder that training wrote"),
        ("c", "there is no adapter folder {0}/c, and no run; {0} holds the runs a, b"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_told_with_what_lies_there(runs: Path, named: str, told: str) -> None:
    with pytest.raises(ValueError) as error:
        adapter_of(runs / named)
    assert str(error.value).startswith(told.format(runs))


def test_an_empty_place_of_a_bucket(bucket: str) -> None:
    with pytest.raises(
        ValueError, match=f"there is no adapter folder {bucket}/none, and no run; {bucket} holds nothing"
    ):
        find_run(f"{bucket}/none")


def test_a_run_without_its_configuration(runs: Path) -> None:
    (runs / "a" / "config.yaml").unlink()
    with pytest.raises(
        ConfigError, match=f"{runs}/a has no config.yaml: name a configuration, or the folder that a run"
    ):
        read_command(str(runs / "a"))
