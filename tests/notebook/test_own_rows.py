"""Notebooks 6 and 7 with only a user's own rows: the teacher and the start are trained on these rows too."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import tpu_kit
from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit.config.loader import TrainConfig, load_config, of_rewards
from tpu_kit.config.schema import USUAL


class Started(Exception):
    """A training begins."""


def first_training(notebook: str, monkeypatch: pytest.MonkeyPatch, **given: Any) -> TrainConfig:
    """The configuration that the cells of a notebook train first, if these parameters are set."""
    begun: list[TrainConfig] = []

    def train(config: TrainConfig) -> None:
        begun.append(config)
        raise Started

    monkeypatch.setattr(tpu_kit, "train", train)
    cells = [cell.source for cell in nbformat.read(REPOSITORY / "notebooks" / f"{notebook}.ipynb", 4).cells
             if cell.cell_type == "code" and "find_spec" not in cell.source]  # fmt: skip
    injected = "# Parameters\n" + "".join(f"{key} = {value!r}\n" for key, value in given.items())
    namespace: dict[str, Any] = {"In": ["", cells[0], injected]}
    for cell in (cells[0], injected, *cells[1:]):
        try:
            exec(cell, namespace)
        except Started:
            return begun[0]
    raise AssertionError("nothing was trained")


@pytest.mark.parametrize("name", ["6-distill", "7-grpo", "8-preference"])
def test_the_start_learns_from_the_rows_of_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = {"source": "mine.jsonl", "columns": {"question": "q"}, "max_length": 128, "device_type": "cpu"}
    start = first_training(name, monkeypatch, **mine)
    assert (start.data.source, start.data.columns, start.data.max_length) == ("mine.jsonl", {"question": "q"}, 128)
    assert start.launch.device_type == "cpu" and start.model.name == "embedded"
    assert start.optim.learning_rate == 5e-3 and start.optim.objective == "supervised" and start.distill.teacher is None


def test_the_start_of_rewards_is_of_the_users_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start = first_training("7-grpo", monkeypatch, source="mine.jsonl", name="some/model", r=8)
    assert (start.model.name, start.lora.r, start.lora.adapter, start.optim.learning_rate) == (
        "some/model",
        8,
        None,
        2e-4,
    )


@pytest.mark.parametrize(
    ("file", "model", "more", "expected"),
    [
        ("embedded-cot", "embedded", {}, 5e-3),
        (None, "some/model", {}, 2e-4),
        ("embedded-cot", "some/model", {}, 2e-4),
        (None, "some/model", {"r": 0}, 2e-5),
        (None, "some/model", {"learning_rate": 1e-3}, 1e-3),
    ],
)
def test_the_rate_is_that_of_the_model(file: str | None, model: str, more: dict[str, Any], expected: float) -> None:
    given = {"learning_rate": None, "model.name": model, "max_length": 1024, "eval_steps": None}
    config = load_config(file, parameters={**given, **more})
    assert config.optim.learning_rate == expected
    if "learning_rate" not in more:
        assert config.sources["optim.learning_rate"] == USUAL
        assert of_rewards(config).optim.learning_rate == pytest.approx(expected / 10, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["6-distill", "7-grpo"])
def test_notebooks_run_on_own_rows(name: str, tmp_path: Path) -> None:
    rows = [{"question": f"A shelf holds {a} books. {b} more arrive. How many are there?", "answer": str(a + b)}
            for a in range(3, 13) for b in range(4, 10)]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewarded = ["start_steps=6", "prompts_per_update=2", "num_generations=4"] if name == "7-grpo" else []
    few = ["source=mine.jsonl", "max_steps=4", "logging_steps=1", "warmup_steps=1", "eval_rows=4", "generate_rows=2",
           "device_type=cpu", "out=done", *rewarded]  # fmt: skip
    done = run_python(
        ["-m", "tpu_kit", "notebooks", str(REPOSITORY / "notebooks" / f"{name}.ipynb"), *few], cwd=tmp_path, timeout=900
    )
    assert len(re.findall(r"^source +mine.jsonl: cot", done.stdout, re.MULTILINE)) >= 2, done.stdout
    assert "embedded: cot" not in done.stdout
