"""Runs of several sources train like the concatenation, are measured by source, and resume bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tpu_kit.config.loader import load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult

pytestmark = pytest.mark.usefixtures("quick_xla")
needs_xla = pytest.mark.skipif(Machine().version("torch_xla") is None, reason="torch_xla is not installed")


@pytest.fixture
def halves(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rows of `world`, in two files."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("one", lines[:20]), ("two", lines[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    return [str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")]


def trained(world: Path, folder: Path, source: Any, **settings: Any) -> tuple[TrainResult, list[dict[str, Any]]]:
    """Trains; returns the result and the records of its metrics."""
    config = load_config(None, {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": source, "max_length": 96,
        "eval_rows": 8, "max_steps": 4, "learning_rate": 1e-2, "loss_chunk": 64, "logging_steps": 1, "batch_size": 2,
        "output_dir": str(folder), "device_type": "cpu", "num_replicas": 1, "save_steps": 2, **settings,
    })  # fmt: skip
    result = sft.train(config)
    assert result.status == "finished"
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_mix_trains_as_the_concatenation_and_is_measured_by_source(
    world: Path, tmp_path: Path, halves: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, whole = trained(world, tmp_path / "whole", str(world / "rows.jsonl"), eval_generate_rows=4, generate_tokens=4)
    capsys.readouterr()
    result, mixed = trained(world, tmp_path / "mix", halves, eval_generate_rows=4, generate_tokens=4)
    said = capsys.readouterr().out
    assert said.index("mix              source") < said.index("model            ") and said.count("mix      ") == 1
    states = [json.loads((tmp_path / name / "checkpoints/step-00000004/state.json").read_text()) for name in
              ("whole", "mix")]  # fmt: skip
    assert states[0]["fingerprint"] == states[1]["fingerprint"]
    pairs = [(one, other) for one, other in zip(whole, mixed, strict=True) if one["kind"] == "train"]
    assert len(pairs) == 4
    for one, other in pairs:
        assert (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"]), "bit for bit"
        assert not {"loss/one", "loss/two"} & {*one}
        by_source = sorted(other[name] for name in ("loss/one", "loss/two") if name in other)
        assert by_source[0] - 1e-5 <= other["loss"] <= by_source[-1] + 1e-5
    assert any({"loss/one", "loss/two"} <= {*other} for _, other in pairs)
    before, *_, after = [record for record in mixed if record["kind"] != "train"]
    end = [record for record in whole if record["kind"] != "train"][-1]
    assert after["loss"] == pytest.approx(end["loss"], rel=1e-5) and after["accuracy"] == end["accuracy"]
    assert before["loss/one"] > after["loss/one"] and {"accuracy/one", "accuracy/two"} & {*after}
    assert result.metrics["eval_loss/one"] == after["loss/one"] and "eval_loss/two" in result.metrics


def test_a_mix_in_an_order_resumes_bit_for_bit(world: Path, tmp_path: Path, halves: list[str]) -> None:
    source = [{"source": halves[0], "weight": 1.5, "name": "a"}, {"source": halves[1], "tokens": 0.4, "name": "b"}]
    settings: dict[str, Any] = {"order": "sequence", "eval_rows": 0}
    trained(world, tmp_path / "run", source, **settings)
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "half/checkpoints")
    shutil.rmtree(tmp_path / "half/checkpoints/step-00000004")
    trained(world, tmp_path / "half", source, **settings)
    ends = [load_file(tmp_path / name / "checkpoints/step-00000004/training.safetensors") for name in ("run", "half")]
    assert all((ends[1][name] == value).all() for name, value in ends[0].items())
    other = [source[0], {**source[1], "tokens": 0.3}]
    with pytest.raises(ValueError, match=r"is of another run:\n  data.source: .*'tokens': 0.4.* there, .*0.3.* now"):
        trained(world, tmp_path / "run", other, **settings)


@needs_xla
@pytest.mark.slow
def test_a_mix_is_one_program_on_replicas(world: Path, tmp_path: Path, halves: list[str]) -> None:
    _, cpu = trained(world, tmp_path / "cpu", halves, batch_size=4)
    _, xla = trained(world, tmp_path / "xla", halves, device_type="xla-cpu", num_replicas=2)
    for one, other in zip(cpu, xla, strict=True):
        for name in ("loss", "loss/one", "loss/two"):
            assert (name in one) == (name in other)
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-4), (one["step"], name)
    steps = [record for record in xla if record["kind"] == "train"]
    assert len({record["compiles"] for record in steps[1:]}) == 1
    assert all(record["host_syncs_per_step"] == 0 for record in steps[1:])
