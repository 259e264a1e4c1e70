"""A user's loss trains like the kit's own losses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.child_processes import REPOSITORY
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.generation.model_loading import load_for_generation
from tpu_kit.machine.checks import Machine
from tpu_kit.model.states_head import without_head
from tpu_kit.recipes import sft
from tpu_kit.training.losses.objective_check import check_objective

OWN = "tests.support.own_objectives"
xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


def readme_objective(folder: Path) -> str:
    """Writes the loss of training's README into a module; returns its name for the configuration."""
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "tpu_kit/training/README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "-> Sums" in block]
    assert len(block.strip().splitlines()) <= 15
    (folder / "my_loss.py").write_text(block)
    (function,) = re.findall(r"^def (\w+)", block, re.MULTILINE)
    return f"my_loss:{function}"


def trained(world: Path, folder: Path, objective: str, **settings: object) -> TrainConfig:
    config = load_config(
        None,
        {
            "model.name": str(world / "model"), "source": str(world / "rows.jsonl"), "base_dtype": "fp32",
            "max_length": 96, "eval_rows": 4, "max_steps": 4, "global_batch_size": 4, "batch_size": 2, "lora.r": 4,
            "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "output_dir": str(folder),
            "device_type": "xla-cpu", "objective": objective, **settings,
        },
    )  # fmt: skip
    assert sft.train(config).status == "finished"
    return config


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize(
    "where",
    [
        {"device_type": "cpu", "num_replicas": 1},
        pytest.param({"num_replicas": 2}, marks=[xla, pytest.mark.slow]),
        pytest.param({"launch.mesh": "fsdp=2"}, marks=[xla, pytest.mark.slow]),
    ],
    ids=str,
)
def test_the_loss_of_the_readme_trains(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: dict[str, object]
) -> None:
    name = readme_objective(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    config = trained(world, tmp_path / "run", name, **where)
    lines = [json.loads(line) for line in (config.output_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    if "device_type" not in where:
        assert len({line["compiles"] for line in steps[1:]}) == 1
        assert all(line["host_syncs_per_step"] == 0 for line in steps)


def test_a_loss_without_weight_is_told(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its logged loss is NaN, but no update is skipped, because its gradients are finite."""
    changes: dict[str, object] = {"device_type": "cpu", "max_steps": 1}
    trained(world, tmp_path / "run", f"{OWN}:weightless", **changes)
    assert capsys.readouterr().err.count(f"{OWN}:weightless had the weight 0 in all updates up to step 1") == 1


@pytest.mark.usefixtures("quick_xla")
def test_parameters_of_a_loss_are_trained_and_resumed_and_not_in_the_adapter(world: Path, tmp_path: Path) -> None:
    settings = {"device_type": "cpu", "num_replicas": 1, "max_steps": 4}
    config = trained(world, tmp_path / "run", f"{OWN}:WithScale", **settings)
    lines = [json.loads(line) for line in (config.output_path / "metrics.jsonl").read_text().splitlines()]
    logged = [line["scale_sum"] for line in lines if line["kind"] == "train"]
    assert logged[0] == pytest.approx(1.0)
    assert logged[-1] != logged[0]
    scale = "parameters/objective.scale"
    ended = load_file(config.output_path / "checkpoints/step-00000004/training.safetensors")
    assert abs(float(ended[scale]) - 1) > 1e-3
    assert not any("scale" in name for name in load_file(config.output_path / "adapter/adapter_model.safetensors"))
    shutil.copytree(config.output_path / "checkpoints", tmp_path / "half/checkpoints")
    shutil.rmtree(tmp_path / "half/checkpoints/step-00000004")
    again = trained(world, tmp_path / "half", f"{OWN}:WithScale", **settings)
    resumed = load_file(again.output_path / "checkpoints/step-00000004/training.safetensors")
    assert all((resumed[name] == value).all() for name, value in ended.items())


@pytest.mark.usefixtures("quick_xla")
def test_a_head_of_a_loss_is_saved_beside_the_adapter_and_generates(world: Path, tmp_path: Path) -> None:
    name = f"{OWN}:WithShift"
    config = trained(world, tmp_path, name, device_type="cpu", num_replicas=1, max_steps=4)
    adapter = config.output_path / "adapter"
    assert json.loads((adapter / "own_shift.json").read_text()) == {"hidden_size": 32, "tpu_kit_head": f"{OWN}:Shift"}
    shift = load_file(adapter / "own_shift.safetensors")["shift"]
    assert float(shift.abs().max()) > 1e-3
    ids = torch.arange(1, 9)[None]
    with without_head(adapter) as plain:
        before = load_for_generation(config.model, plain).get_decoder()(input_ids=ids).last_hidden_state
    after = load_for_generation(config.model, adapter, objective=name).get_decoder()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(after, before + shift)
    with pytest.raises(ValueError, match=re.escape(f"its class is in the module {OWN}, which only optim.objective=")):
        load_for_generation(config.model, adapter)
    with pytest.raises(ValueError, match=f"eval_generate_rows would answer without the head of optim.objective={name}"):
        check_objective(load_config("embedded-cot", {"objective": name, "eval_generate_rows": 2}))
