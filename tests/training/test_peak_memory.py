"""Measured memory is compared with the prediction, for figures as a TPU's runtime reports them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.machine.test_checks import V5E, fake
from tests.support.compiler_models import QWEN2_500M, write_config
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.replica.backends import CpuRuntime, TpuRuntime
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.planning.preflight import check_before_launch
from tpu_kit.training.metrics import peak_memory

CPU = CpuRuntime(0, 1, torch.device("cpu"))


class Chip(TpuRuntime):
    """A replica on a TPU whose runtime reports a given peak."""

    def __init__(self, rank: int, peak: int) -> None:
        super().__init__(rank, 8, torch.device("cpu"))
        self.peak = peak

    def memory(self) -> tuple[int | None, int | None]:
        return self.peak, 16909238272


def configured(tmp_path: Path) -> TrainConfig:
    model = write_config(tmp_path / "model", QWEN2_500M)
    return load_config(None, [f"model.name={model}", "max_steps=10", f"output_dir={tmp_path / 'run'}"])


def test_a_device_is_compared_with_the_prediction(tmp_path: Path) -> None:
    config = configured(tmp_path)
    predicted = estimate(config, num_replicas=8).total_bytes
    tpu, cpu = (replace(config, launch=replace(config.launch, device_type=name)) for name in ("tpu", "cpu"))
    assert check_before_launch(tpu, at=fake(tmp_path / "root", *[V5E] * 8)).device_bytes == predicted
    assert check_before_launch(cpu).device_bytes is None
    values = peak_memory(Chip(0, int(1.03 * predicted)), predicted)
    assert (values["predicted_peak_bytes"], values["device_peak_bytes"]) == (predicted, int(1.03 * predicted))
    assert values["device_peak_difference"] == pytest.approx(0.03, abs=1e-6)


def test_a_host_alone_has_its_own_peak() -> None:
    values = peak_memory(CPU)
    assert values.keys() == {"host_peak_bytes"} and values["host_peak_bytes"] > 100 * 2**20
