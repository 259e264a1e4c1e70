"""Runs that commit 1ebdc59 wrote go on: their tensors are read as what they were, and training continues as it did."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tpu_kit.checkpointing.manager import scan
from tpu_kit.checkpointing.manifest import FORMAT
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.exporting import export
from tpu_kit.hardware.machine import Machine
from tpu_kit.models import causal_lm as models
from tpu_kit.recipes import sft
from tpu_kit.training import resume
from tpu_kit.training.resume import training_tensors
from tpu_kit.training.state import sections

FIXTURES = Path(__file__).parents[1] / "fixtures" / "runs_1ebdc59"
sys.path.insert(0, str(FIXTURES))

import make  # noqa: E402  its folder must be on the path first

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all that 1ebdc59 wrote, as the current folder: paths in it are relative."""
    shutil.copytree(FIXTURES, tmp_path / "world", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path / "world")
    return tmp_path / "world"


def config_of(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TrainConfig:
    if name == "scanned-adafactor":
        monkeypatch.setattr(resume, "_ALONE", make.ALONE)
    return load_config(None, {**make.COMMON, **make.RUNS[name], "output_dir": name, **changes})


@pytest.mark.parametrize("name", make.RUNS)
def test_its_weights_are_read_as_what_they_were(name: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as in the adapter beside them, which was saved layer by layer then, too."""
    config = config_of(name, monkeypatch)
    (found,), _ = scan(world / name / "checkpoints", verify=True)
    assert found.format == 2 < FORMAT
    model = models.load_model(config.model, config.lora, seed=1)
    read = sections(training_tensors(found, model))
    shapes = {key: one.shape for key, one in models.trainable_parameters(model).items()}
    assert {key: tensor.shape for key, tensor in read["parameters"].items()} == shapes
    if config.lora.r:
        saved = load_file(Path(found.path) / "adapter_model.safetensors")
        for key, tensor in read["average" if config.optim.ema_decay else "parameters"].items():
            assert torch.equal(tensor, saved[key.replace(".default", "")]), key
    assert ("average" in read, "best" in read) == (config.optim.ema_decay > 0, config.optim.eval_steps is not None)
    for section in read.keys() - {""}:
        assert read[section].keys() <= shapes.keys()


@pytest.mark.parametrize(
    ("name", "rel"),
    [
        ("unrolled-adamw", 1e-6),
        pytest.param("scanned-adamw", 1e-6, marks=needs_xla),
        ("scanned-adamw8bit", 1e-3),  # moments are coded otherwise since then
        ("unrolled-adafactor", 1e-6),
        ("scanned-adafactor", 1e-3),  # the vectors of a stack are scaled one by one since then
        ("scanned-gemma2", 1e-6),
    ],
)
def test_it_goes_on_as_it_did(name: str, rel: float, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((world / name / "expected.json").read_text())
    sft.train(config_of(name, monkeypatch, eval_rows=None))  # as many as it began with are held out
    for run in ("uninterrupted", "resumed"):
        for kind, records in make.losses(Path(name)).items():
            before = [loss for _, loss in expected[run][kind]]
            assert [loss for _, loss in records] == pytest.approx(before, rel=rel, abs=0)


def test_a_scanned_one_goes_on_unrolled(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.loads((world / "scanned-gemma2" / "expected.json").read_text())["uninterrupted"]
    sft.train(config_of("scanned-gemma2", monkeypatch, scan_layers="off", remat="none"))
    found = make.losses(Path("scanned-gemma2"))
    assert [loss for _, loss in found["train"]] == pytest.approx([loss for _, loss in expected["train"]], rel=1e-5)


def test_another_model_is_refused(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), _ = scan(world / "scanned-gemma2" / "checkpoints")
    config = config_of("scanned-gemma2", monkeypatch)
    other = models.load_model(config_of("scanned-adamw", monkeypatch).model, config.lora, seed=0)
    with pytest.raises(ValueError, match=r"weights do not fit this model: it has 1,120 numbers in 12 stacks of"):
        training_tensors(found, other)


def test_its_configuration_is_read(world: Path) -> None:
    assert export._read_config(world / "unrolled-adamw").lora.r == 4
