"""`python -m tpu_kit train` as a user runs it: a separate process, a shipped configuration, and the written files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.child_processes import run_python
from tpu_kit.machine.checks import Machine

needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")
STEPS = 4


def train(*arguments: str, expect: int = 0) -> tuple[str, str]:
    command = ["-m", "tpu_kit", "train", "embedded-cot", *arguments]
    done = run_python(command, env={"PJRT_DEVICE": None}, expect=expect, timeout=280)
    return done.stdout, done.stderr


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("device_type", "replicas"),
    [("cpu", 1), pytest.param("xla-cpu", 2, marks=[needs_xla, pytest.mark.slow])],
)
def test_the_shipped_configuration_trains(tmp_path: Path, device_type: str, replicas: int) -> None:
    folder = tmp_path / "run"
    stdout, stderr = train(
        f"output_dir={folder}", f"device_type={device_type}", f"num_replicas={replicas}", f"max_steps={STEPS}",
        "warmup_steps=1",
        "batch_size=2", "eval_steps=2", "eval_rows=4", "generate_rows=0", "logging_steps=2", "save_steps=100",
        "max_length=96",
    )  # fmt: skip
    assert "Traceback" not in stderr
    assert f"device_type={device_type}, {replicas} replica(s)" in stderr
    assert f"finished at step {STEPS}; adapter in {folder}/adapter" in stdout
    assert stdout.count(" updates; ") == 1  # rank 0 alone speaks
    found = files(folder)
    checkpoint = f"checkpoints/step-{STEPS:08d}"
    assert [name for name in found if not name.startswith("checkpoints/")] == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "adapter/base.json",
        "adapter/chat_template.jinja",
        "adapter/tokenizer.json",
        "adapter/tokenizer_config.json",
        "config.yaml",
        "metrics.jsonl",
        "questions.npz",
    ]
    kept = [name for name in found if name.startswith("checkpoints/") and name != "checkpoints/.lock"]
    best = "checkpoints/step-00000002"  # the best evaluation when it was written
    assert {name.rsplit("/", 1)[0] for name in kept} == {best, checkpoint}

    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("start", 0), ("train", 2), ("eval", 2), ("train", 4), ("eval", 4),
    ]  # fmt: skip
    lines = lines[1:]
    if device_type == "xla-cpu":
        assert lines[2]["compiles"] <= 3 + 1 + 1  # set-up, the update, the evaluation
        assert lines[2]["host_syncs_per_step"] == lines[2]["fallbacks_per_step"] == 0
    assert lines[3]["loss"] < lines[1]["loss"]

    from safetensors.torch import load_file

    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    moved = [name for name, value in weights.items() if "lora_B" in name and value.abs().max() > 0]
    assert len(moved) * 2 == len(weights)
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in weights.values())


def test_all_that_is_wrong_with_a_configuration_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _, stderr = train(f"output_dir={folder}", "batch_size=0", "learning_rat=1", expect=2)
    assert "2 problems in the configuration" in stderr
    assert "batch_size: 0 is out of range" in stderr
    assert "did you mean optim.learning_rate?" in stderr
    assert "Traceback" not in stderr
    assert not folder.exists()


def test_an_error_of_the_user_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    _, stderr = train(f"output_dir={tmp_path}/taken", "device_type=cpu", expect=1)
    assert "cannot be written to" in stderr
    assert "Traceback" not in stderr
