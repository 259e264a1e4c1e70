"""A run's stored configuration stays readable when parameters are renamed, removed or added after it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tpu_kit.checkpointing.manager import CheckpointManager, scan
from tpu_kit.checkpointing.manifest import Checkpoint
from tpu_kit.config import loader
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config, load_stored, migrate
from tpu_kit.config.schema import parameters
from tpu_kit.exporting import export
from tpu_kit.notebook import cells
from tpu_kit.training.resume import check_resume, refuse_early

FIRST = json.loads((Path(__file__).parent / "stored_1ebdc59.json").read_text())
"""What the first version that this table knows stored."""


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version: it has renamed optim.chunk_of_loss, removed two parameters, and added optim.mlp_tile."""
    monkeypatch.setattr(loader, "RENAMED", {"optim.chunk_of_loss": ("9.1", "optim.loss_chunk")})
    monkeypatch.setattr(loader, "REMOVED", {"optim.nesterov": ("9.2", False), "old_section.colour": ("9.2", "green")})
    monkeypatch.setattr(loader, "ADDED", {"optim.mlp_tile": ("9.3", 77)})


def stored(**changes: Any) -> dict[str, Any]:
    """What a version before `later` stored of a run."""
    values = load_config(None, {"r": 3, "max_steps": 5, **changes}).to_dict()
    values["optim"]["chunk_of_loss"] = values["optim"].pop("loss_chunk")
    del values["optim"]["mlp_tile"]
    values["optim"]["nesterov"] = False
    values["old_section"] = {"colour": "green"}
    return values


def test_every_parameter_that_came_or_went_is_in_the_tables() -> None:
    before, today = loader.flatten(FIRST), parameters()
    gone = {name for name in before if name not in today}
    assert gone <= loader.RENAMED.keys() | loader.REMOVED.keys(), "say in loader.py what became of them"
    new = today.keys() - before.keys() - {now for _, now in loader.RENAMED.values()}
    assert new <= loader.ADDED.keys(), "say in loader.py what runs of earlier versions are to have"
    for name, (_, value) in loader.ADDED.items():
        today[name].read(value)
    assert {now for _, now in loader.RENAMED.values()} <= today.keys()
    assert not loader.REMOVED.keys() & today.keys()


def test_renamed_removed_and_added(later: None) -> None:
    found, notes = migrate(stored(loss_chunk=99))
    assert notes == []
    assert (found["optim.loss_chunk"], found["optim.mlp_tile"], found["lora.r"]) == (99, 77, 3)
    assert found.keys() <= parameters().keys()
    assert load_config(found).optim.mlp_tile == 77 != TrainConfig().optim.mlp_tile  # not today's default


def test_what_cannot_be_used_is_noted(later: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = stored()
    values["optim"] |= {"nesterov": True, "unheard_of": [1, 2]}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    assert load_stored(file).lora.r == 3
    assert capsys.readouterr().err.splitlines() == [
        f"note: {file}: optim.nesterov=true is ignored: tpu_kit 9.2 removed it, and behaves as false",
        f"note: {file}: optim.unheard_of=[1, 2] is ignored: this tpu_kit has no such parameter",
    ]
    with pytest.raises(ConfigError, match=r"optim.unheard_of: no such parameter"):  # a user's file is read strictly
        load_config(file)


def test_export_and_the_notebooks_read_a_run_of_an_earlier_version(
    later: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    text = yaml.safe_dump(stored(run_name="mine", loss_chunk=99))
    (tmp_path / "runs" / "mine" / "config.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for found in (export._read_config(tmp_path / "runs" / "mine"), cells.run_config({"run_name": "mine"})):
        assert (found.lora.r, found.optim.loss_chunk, found.optim.mlp_tile) == (3, 99, 77)


def checkpoint(folder: Path, config: dict[str, Any]) -> Checkpoint:
    with CheckpointManager(folder / "checkpoints", keep=1) as writer:
        writer.save(4, {}, {"config": config, "state": {"global_batch_size": 4, "fingerprint": "f"}}, {})
    return scan(folder / "checkpoints")[0][0]


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(
    later: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = stored(output_dir=str(tmp_path))
    values["optim"] |= {"unheard_of": 1}
    found = checkpoint(tmp_path, values)
    config = load_config(None, {"r": 3, "max_steps": 6, "output_dir": str(tmp_path)})
    refuse_early(config)
    check_resume(found, config, 4, "f", total=6, quiet=False)
    said = capsys.readouterr()
    assert said.out == (
        f"resumed          from step 4, {found.path}; optim.max_steps is 6, was 5; optim.mlp_tile is 2048, was 77\n"
    )
    assert said.err.startswith(f"note: {found.path}: optim.unheard_of=1 is ignored")
    other = load_config(None, {"r": 4, "max_steps": 6, "output_dir": str(tmp_path)})
    for refuse in (lambda: refuse_early(other), lambda: check_resume(found, other, 4, "f", total=6, quiet=True)):
        with pytest.raises(ValueError, match=r"is of another run:\n  lora.r: 3 there, 4 now\nSet these back"):
            refuse()
