"""Runs on the simulated hosts of a slice: each host saves its shards, and other hosts and meshes resume from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from tests.support.child_processes import PYTHONPATH, child_environment
from tpu_kit.machine.checks import Machine
from tpu_kit.training.checkpoint.manager import list_checkpoints

pytestmark = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
SETTINGS = [
    "model.name=embedded", "base_dtype=fp32", "lora.r=2", "source=embedded", "data.split=train[:80]", "max_length=96",
    "eval_rows=8", "global_batch_size=8", "batch_size=1", "learning_rate=1e-2", "device_type=xla-cpu", "loss_chunk=48",
    "logging_steps=1", "ema_decay=0.9", "max_steps=4", "save_steps=2", "eval_steps=2", "schedule=constant",
    "warmup_ratio=0",
]  # fmt: skip


def start(folder: Path, url: str, hosts: int, *changes: str, dies: int | None = None) -> list[subprocess.Popen[str]]:
    """Starts the hosts; the last host is killed at step `dies`."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    running = []
    for index in range(hosts):
        at = folder / f"machine-{index}"
        at.mkdir(parents=True, exist_ok=True)
        about = [index, hosts, store.port, *([dies] if dies and index == hosts - 1 else [])]
        env = child_environment({
            "PYTHONPATH": PYTHONPATH, "PJRT_DEVICE": None, "TPU_KIT_TEST_HOST": ",".join(map(str, about)),
            "STORAGE_EMULATOR_HOST": os.environ["STORAGE_EMULATOR_HOST"], "HF_HOME": str(at / "cache"),
        })  # fmt: skip
        minutes = 1e-6 if index == 0 else 1e6  # only host 0's clock says that a checkpoint is due
        command = [sys.executable, "-m", "tests.support.slice_hosts", *SETTINGS, f"output_dir={url}", *changes,
                   f"save_minutes={minutes}"]  # fmt: skip
        running.append(subprocess.Popen(command, cwd=at, env=env, text=True, stderr=subprocess.PIPE))
    running[0].store = store  # type: ignore[attr-defined]  # lives as long
    return running


def wait(running: list[subprocess.Popen[str]]) -> None:
    for one in running:
        told = one.communicate(timeout=900)[1]
        assert one.returncode == 0, told[-5000:]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "machine-0" / "runs" / "default" / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_hosts_save_their_shards_and_other_hosts_go_on(tmp_path: Path, bucket: str) -> None:
    """An undisturbed run of two hosts; a run whose host dies while saving; and its resumption by four hosts."""
    wait(start(tmp_path / "whole", f"{bucket}/whole", 2, "mesh=fsdp=8"))
    broken = start(tmp_path / "broken", f"{bucket}/broken", 2, "mesh=fsdp=8", dies=4)
    broken[1].communicate(timeout=900)
    assert broken[1].returncode != 0
    good, damaged = list_checkpoints(f"{bucket}/broken/checkpoints", verify=True)
    assert [one.step for one in good] == [2, 3] and not damaged
    assert {"training-0.safetensors", "training-1.safetensors", "layout.json"} <= good[0].files.keys()
    broken[0].kill()  # it waits for host 1's part
    broken[0].communicate(timeout=60)
    wait(start(tmp_path / "resumed", f"{bucket}/broken", 4, "mesh=data=2,fsdp=4"))
    good, damaged = list_checkpoints(f"{bucket}/broken/checkpoints", verify=True)
    assert [one.step for one in good] == [3, 4] and not damaged
    mine, wanted = adapter(tmp_path / "resumed"), adapter(tmp_path / "whole")
    assert mine.keys() == wanted.keys() and any(bool(tensor.any()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        assert (mine[name] - tensor).norm() <= 1e-3 * tensor.norm() + 1e-6, name
