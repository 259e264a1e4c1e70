"""Runs on streamed text train like rows in memory, resume bit for bit, and refuse changed shards."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support import loaded_feeder
from tests.support.child_processes import PYTHONPATH, child_environment
from tpu_kit.config.loader import load_config
from tpu_kit.data.stream import feeder
from tpu_kit.recipes import sft
from tpu_kit.recipes.result import TrainResult
from tpu_kit.training.metrics import read_metrics


@pytest.fixture
def texts(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The rows of `world` as texts in three files."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(feeder, "_start", loaded_feeder.start)
    rows = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]
    lines = [json.dumps({"text": row["prompt"] + row["completion"]}) + "\n" for row in rows]
    (tmp_path / "texts").mkdir()
    for name, part in (("a", lines[:24]), ("b", lines[24:30]), ("c", lines[30:])):
        (tmp_path / "texts" / f"{name}.jsonl").write_text("".join(part))
    return tmp_path / "texts"


def values(world: Path, folder: Path, source: Any, **settings: Any) -> dict[str, Any]:
    return {
        "model.name": str(world / "model"), "base_dtype": "fp32", "lora.r": 4, "source": str(source), "max_length": 64,
        "streaming": True, "eval_rows": 4, "max_steps": 12, "learning_rate": 1e-2, "loss_chunk": 64, "batch_size": 4,
        "logging_steps": 1, "output_dir": str(folder), "device_type": "cpu", "num_replicas": 1, "save_steps": 5,
        **settings,
    }  # fmt: skip


def trained(world: Path, folder: Path, source: Any, **settings: Any) -> tuple[TrainResult, list[dict[str, Any]]]:
    """Trains; returns the result and the records of its updates."""
    result = sft.train(load_config(None, values(world, folder, source, **settings)))
    assert result.status == "finished"
    return result, [record for record in read_metrics(folder) if record["kind"] == "train"]


def test_a_stream_trains_as_the_rows_in_memory(world: Path, tmp_path: Path, texts: Path) -> None:
    settings: dict[str, Any] = {"eval_rows": 0, "shuffle": False, "max_steps": 3}
    _, stream = trained(world, tmp_path / "stream", texts / "a.jsonl", **settings)
    memory = {"streaming": False, "format": "text", "too_long": "split"}
    _, rows = trained(world, tmp_path / "memory", texts / "a.jsonl", **settings, **memory)
    same = ("loss", "grad_norm", "tokens", "lr")
    assert [[one[name] for name in same] for one in stream] == [[one[name] for name in same] for one in rows]
    assert stream[0]["epoch"] == rows[0]["epoch"]


def test_a_resumed_stream_ends_with_the_same_weights(
    world: Path, tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, values(world, tmp_path / "run", texts / "*.jsonl"))
    plan = sft.dry_run(config)
    assert plan.rows is None and plan.updates == 12 and plan.to_dict()["rows"] is None
    assert plan.facts()["files of data.source"]["count"] == 3
    _, records = trained(world, tmp_path / "run", texts / "*.jsonl")
    said = capsys.readouterr().out
    assert "shards           3 of 3 files, 0.0 MiB; about" in said
    assert "held out         the first 4 rows of a.jsonl, in all epochs" in said
    assert "12 updates (optim.max_steps), 3,072 tokens" in said
    epochs = [record["epoch"] for record in records]
    assert epochs == sorted(epochs) and epochs[-1] > 1 and {record["shard"] for record in records} == {0.0, 1.0, 2.0}
    shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "half/checkpoints")
    for step in (10, 12):
        shutil.rmtree(tmp_path / f"half/checkpoints/step-{step:08}")
    _, again = trained(world, tmp_path / "half", texts / "*.jsonl")
    ends = [load_file(tmp_path / name / "checkpoints/step-00000012/training.safetensors") for name in ("run", "half")]
    assert all((ends[1][name] == value).all() for name, value in ends[0].items())
    same = ("step", "loss", "tokens", "epoch", "shard")
    assert [[one[name] for name in same] for one in again] == [[one[name] for name in same] for one in records]

    moved = tmp_path / "elsewhere"
    shutil.copytree(texts, moved)
    trained(world, tmp_path / "half", moved / "*.jsonl", max_steps=13)
    assert "moved            data.source:" in capsys.readouterr().out

    def refused(text: str) -> None:
        with pytest.raises(ValueError, match=rf"is of another run:\n  the shards of data.source: {text}\nSet these"):
            trained(world, tmp_path / "run", texts / "*.jsonl", max_steps=14)

    (texts / "b.jsonl").write_text((texts / "b.jsonl").read_text().replace("1", "2"))
    refused("b.jsonl has changed")
    (texts / "c.jsonl").rename(texts / "d.jsonl")
    refused("c.jsonl has disappeared; d.jsonl is new; b.jsonl has changed")


def test_a_shard_that_is_lost_ends_the_run_with_what_it_made_saved(
    world: Path, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(payload: bytes) -> Any:
        (texts / "c.jsonl").rename(texts / "c.lost")
        return loaded_feeder.start(payload)

    with monkeypatch.context() as patch:
        patch.setattr(feeder, "_start", lost)
        text = r"c.jsonl has disappeared; put it back. The (\d) updates before are saved: the run started again goes on"
        with pytest.raises(ValueError, match=text):
            trained(world, tmp_path / "run", texts / "*.jsonl", save_steps=100)
    (texts / "c.lost").rename(texts / "c.jsonl")
    _, records = trained(world, tmp_path / "run", texts / "*.jsonl", save_steps=100)
    _, whole = trained(world, tmp_path / "whole", texts / "*.jsonl", save_steps=100)
    assert [record["loss"] for record in records] == [record["loss"] for record in whole]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_random_moments_it_ends_with_the_same_weights(world: Path, tmp_path: Path, texts: Path) -> None:
    """Real processes, over three shards and more than two epochs, with a tokenising process."""
    given = values(world, tmp_path / "run", texts / "*.jsonl", max_steps=30, save_steps=2, logging_steps=3)

    def start(folder: str) -> subprocess.Popen[bytes]:
        said = [f"{key}={value}" for key, value in {**given, "output_dir": tmp_path / folder}.items()]
        environment = {**child_environment({"PJRT_DEVICE": None}), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1",
                       "HF_DATASETS_CACHE": str(tmp_path / "cache")}  # fmt: skip
        command = [sys.executable, "-m", "tpu_kit", "train", *said]
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    assert start("whole").wait(300) == 0
    draw, kills = random.Random(0), 0
    while True:
        run, begun = start("run"), time.monotonic()
        saved = len([*(tmp_path / "run" / "checkpoints").glob("step-*")])
        patience = draw.uniform(0, 0.3)  # updates take about 0.1 s
        while run.poll() is None:
            now = len([*(tmp_path / "run" / "checkpoints").glob("step-*")])
            if kills < 8 and (now > saved or time.monotonic() - begun > 60):
                time.sleep(patience)
                run.kill()
                run.wait()
                kills += 1
            time.sleep(0.02)
        if run.returncode == 0:
            break
    assert kills >= 3
    ends = [load_file(tmp_path / name / "checkpoints/step-00000030/training.safetensors") for name in ("run", "whole")]
    assert all((ends[1][name] == value).all() for name, value in ends[0].items())
    assert [*(tmp_path / "cache" / "tpu_kit").glob("stream-*")] == [] or kills  # a killed caller leaves its folder
