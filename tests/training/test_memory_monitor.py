"""Measured memory beside the prediction: of eight devices, with figures as a TPU's runtime gives, and of this host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.compiler_models import QWEN2_500M, write_config
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.backends import CpuRuntime, TpuRuntime
from tpu_kit.planning.memory_estimate import estimate
from tpu_kit.planning.preflight import predicted_bytes
from tpu_kit.training.metrics import MemoryMonitor, describe_memory

GIB = 2**30


class Chip(TpuRuntime):
    """A replica on a TPU whose runtime says that so much was in use at its peak."""

    def __init__(self, rank: int, peak: int) -> None:
        super().__init__(rank, 8, torch.device("cpu"))
        self.peak = peak

    def memory(self) -> tuple[int | None, int | None]:
        return self.peak, 16909238272

    def barrier(self) -> None:
        pass


def configured(tmp_path: Path) -> TrainConfig:
    model = write_config(tmp_path / "model", QWEN2_500M)
    return load_config(None, [f"model.name={model}", "max_steps=10", f"output_dir={tmp_path / 'run'}"])


def replicas(config: TrainConfig, share: float) -> list[MemoryMonitor]:
    """Eight of them, the last with 10 % less than the others, which take `share` of the prediction."""
    predicted = estimate(config, num_replicas=8).total_bytes
    sizes = [int(share * predicted)] * 7 + [int(0.9 * share * predicted)]
    return [MemoryMonitor(config, Chip(rank, size), predicted) for rank, size in enumerate(sizes)]


def test_devices_are_compared_with_the_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    predicted = estimate(config, num_replicas=8).total_bytes
    assert predicted_bytes(config, Chip(0, 0)) == predicted
    assert predicted_bytes(config, CpuRuntime(0, 1, torch.device("cpu"))) is None
    found = replicas(config, 1.03)
    found[0].note()
    assert found[0].read()["device_imbalance"] == 0.0  # the others have not logged yet
    for one in found[1:]:
        assert one.end() == {}
    values = found[0].end()
    assert values["predicted_peak_bytes"] == predicted
    assert values["device_peak_bytes"] == values["device_3_peak_bytes"] == int(1.03 * predicted)
    assert values["device_peak_difference"] == pytest.approx(0.03, abs=1e-6)
    assert values["device_imbalance"] == pytest.approx(0.1, abs=1e-6)
    printed = capsys.readouterr()
    assert f"+3.0% against the {predicted / GIB:.2f} predicted; the least of a device is 10.0% lower" in printed.out
    assert not printed.err
    assert not (config.output_path / ".memory").exists()


def test_the_first_replica_may_come_last(tmp_path: Path) -> None:
    config = configured(tmp_path)
    stale = MemoryMonitor(config, Chip(0, 9 * GIB))  # of a launch that was killed
    stale.note()
    MemoryMonitor(config, Chip(1, 2 * GIB)).note()
    late = MemoryMonitor(config, Chip(0, GIB))
    assert late.read()["device_peak_bytes"] == 2 * GIB
    late.note()
    assert late.read()["device_0_peak_bytes"] == GIB


def test_more_than_five_percent_is_warned_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = replicas(configured(tmp_path), 1.2)
    for one in found:
        one.note()
    for _ in range(3):
        found[0].read()
    printed = capsys.readouterr().err
    assert printed.count("warning: more than 5% off the prediction") == 1 and "+20.0% against" in printed


def test_host_memory_is_that_of_all_processes(tmp_path: Path) -> None:
    config = configured(tmp_path)
    peaks = MemoryMonitor(config, CpuRuntime(0, 2, torch.device("cpu")))
    code = (
        "import sys; from tpu_kit.config.loader import load_config\n"
        "from tpu_kit.distributed.backends import CpuRuntime\nkept = bytearray(300 * 2**20)\n"
        "from tpu_kit.training.metrics import MemoryMonitor\n"
        "MemoryMonitor(load_config(sys.argv[1]), CpuRuntime(1, 2, None)).note()"
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    peaks.note()
    alone = peaks.read()["host_peak_bytes"]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "config.yaml")], check=True)
    other = json.loads((config.output_path / ".memory/1.json").read_text())["host"]
    assert other > 300 * 2**20
    both = peaks.read()
    assert both == {"host_peak_bytes": pytest.approx(alone + other, rel=0.02)}
    assert describe_memory(both).startswith("host memory      ")
