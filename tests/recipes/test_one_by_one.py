"""Separate layers that keep all activations (remat=none) train like layers in a loop: 30 updates per trainer.

Quick siblings: test_layer_scan.py, on_xla_it_is_one_program_with_the_same_numbers; test_answers.py,
on_xla_the_tokens_are_the_same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.recipes.distillation import distill
from tpu_kit.recipes.grpo import grpo
from tpu_kit.recipes.sft import train
from tpu_kit.training.metrics import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_xla"),
    pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed"),
]
UPDATES = 30
COMMON: dict[str, Any] = {
    "num_replicas": 1, "base_dtype": "fp32", "lora.r": 4, "max_steps": UPDATES, "save_steps": 1000, "logging_steps": 1,
    "eval_rows": 0, "batch_size": 2, "learning_rate": 1e-3, "loss_chunk": 48,
}  # fmt: skip
LOOP: dict[str, Any] = {"remat": "full", "scan_layers": "on", "mlp_tile": 64}
Trainer = tuple[Callable[..., Any], dict[str, Any]]


def trainer(name: str, request: pytest.FixtureRequest) -> Trainer:
    """Returns a command, and the settings of its run."""
    if name == "grpo":
        return grpo, {
            "split": "train[:40]", "prompts_per_update": 2, "num_generations": 4, "max_completion_length": 24,
            "max_length": 128, "reward_funcs": ["tests.support.reward_functions:even"], "sampling_temperature": 2.0,
            "num_iterations": 2, "learning_rate": 3e-4,
        }  # fmt: skip
    world = request.getfixturevalue("world")
    settings = {"model.name": str(world / "model"), "source": str(world / "rows.jsonl"), "max_length": 96}
    if name == "train":
        return train, settings | {"global_batch_size": 4}
    teacher = str(request.getfixturevalue("teacher"))
    return distill, settings | {"distill.teacher": teacher, "teacher_dtype": "fp32", "divergence": "js"}


def ended(config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the losses of a run, and all weights of its adapter."""
    losses = [record["loss"] for record in read_metrics(config.output_path) if record["kind"] == "train"]
    adapter = load_file(config.output_path / "adapter" / "adapter_model.safetensors")
    return torch.tensor(losses).double(), torch.cat([one.flatten().double() for _, one in sorted(adapter.items())])


@pytest.mark.parametrize("device_type", ["xla-cpu", "cpu"])
@pytest.mark.parametrize("name", ["train", "distill", "grpo"])
def test_thirty_updates_are_those_of_a_loop(
    name: str, device_type: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Devices are not compared with each other: in 30 rollouts a rounding error changes a sampled token."""
    command, settings = trainer(name, request)
    found = []
    for changes in (LOOP, {"remat": "none"}):
        folder = str(tmp_path / str(changes["remat"]))
        where = {"device_type": device_type, "output_dir": folder}
        config = load_config(None, COMMON | settings | changes | where)
        assert command(config).status == "finished"
        found.append(ended(config))
    (expected, weights), (losses, own) = found
    assert len(expected) == UPDATES and len(set(expected.tolist())) > UPDATES // 3
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert (own - weights).norm() <= 1e-6 * weights.norm()
