"""Failures that would come after training are refused before the launch, or fixed, for each kind of rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tpu_kit.assets import embedded
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config
from tpu_kit.data.prepare import prepare
from tpu_kit.generation.evaluation.held_out_answers import check_answers
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import sft
from tpu_kit.training.metrics import Tracker, read_metrics


def chat(row: dict[str, Any]) -> list[dict[str, str]]:
    """A chat of two turns; only the last reply holds the row's answer."""
    return [
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "Shall I answer?"},
        {"role": "user", "content": "Yes."},
        {"role": "assistant", "content": f"<think>\n{row['reasoning']}\n</think>\n{row['answer']}"},
    ]


ROWS: dict[str, Any] = {
    "cot": lambda row: row,
    "messages": lambda row: {"messages": chat(row)},
    "prompt_completion": lambda row: {"prompt": f"{row['question']}\n", "completion": row["answer"]},
    "chats": lambda row: {"prompt": chat(row)[:-1], "completion": chat(row)[-1:]},
    "text": lambda row: {"text": f"{row['question']} {row['answer']}"},
}
ANSWERABLE = [kind for kind in ROWS if kind != "text"]


def configured(tmp_path: Path, kind: str, **changes: Any) -> TrainConfig:
    lines = [json.dumps(ROWS[kind](row)) + "\n" for row in embedded.cot_rows("train", 40)]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    settings = {
        "source": str(tmp_path / "rows.jsonl"), "max_length": 192, "eval_rows": 6, "max_steps": 1, "batch_size": 2,
        "generate_tokens": 8, "device_type": "cpu", "num_replicas": 1, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    return load_config(None, settings | changes)


@pytest.mark.parametrize("name", ["generate_rows", "eval_generate_rows"])
@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_each_kind_can_be_answered_or_are_refused(tmp_path: Path, kind: str, name: str) -> None:
    config = configured(tmp_path, kind, **{name: 4})
    if kind == "text":
        with pytest.raises(ConfigError, match=rf"tracking.{name}=4: row 0: its prompt is empty, .* rows of plain text"):
            sft.train(config)
        assert not (tmp_path / "run" / "metrics.jsonl").exists(), "it was launched"
        return
    check_answers(config, prepare(config.data, load_tokenizer(config.model)))
    held = prepare(config.data, load_tokenizer(config.model)).eval_rows
    wanted = {row["answer"] for row in embedded.cot_rows("train", 40)}
    assert {row["answer"] for row in held} <= wanted, "the last reply without its reasoning is the reference"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "messages" else pytest.mark.slow) for kind in ANSWERABLE]
)
def test_a_run_with_answers_judges_rows_of_each_kind(tmp_path: Path, kind: str) -> None:
    result = sft.train(configured(tmp_path, kind, generate_rows=3, eval_generate_rows=3))
    assert result.status == "finished"
    for name in ("accuracy_before", "accuracy_after", "eval_accuracy"):
        assert 0 <= result.metrics[name] <= 1, (name, result.metrics)
    (record,) = [one for one in read_metrics(tmp_path / "run") if one["kind"] == "eval"]
    assert record["accuracy"] is not None and math.isfinite(record["accuracy"])
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["tuned"]["accuracy"]["total"] == 3


def test_a_row_keeps_an_answer_of_its_own(tmp_path: Path) -> None:
    lines = [{"messages": chat(row), "answer": f"own {n}"} for n, row in enumerate(embedded.cot_rows("train", 20))]
    config = configured(tmp_path, "messages", format="messages")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = prepare(config.data, load_tokenizer(config.model)).eval_rows
    assert all(row["answer"].startswith("own ") for row in rows)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verifier": "numeric"}, r"tracking.verifier=numeric can judge none of the 4 held-out rows that tracking."
         r"generate_rows=4 asks for \(ValueError: the row's answer .* is not a number\); use another verifier, or set "
         r"tracking.generate_rows=0"),
        ({"verifier": "math:sqrt"}, r"can judge none of the 4 .*TypeError"),
        ({"generate_tokens": 4000}, r"tracking.generate_tokens=4000 plus the \d+ tokens of held-out row \d exceed "
         r"the model's \d+ positions; use at most \d+, or set tracking.generate_rows=0"),
    ],
)  # fmt: skip
def test_answers_that_cannot_be_given_or_judged(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    config = configured(tmp_path, "messages", generate_rows=4, **changes)
    lines = [{"messages": [*chat(row)[:-1], {"role": "assistant", "content": f"It is {n} or so."}]}
             for n, row in enumerate(embedded.cot_rows("train", 40))]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=text):
        sft.train(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists(), "it was launched"


def test_fewer_rows_than_are_to_be_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path, "cot", generate_rows=50, eval_source=str(tmp_path / "held.jsonl"))
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(5)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_answers(config, prepare(config.data, load_tokenizer(config.model)))
    assert capsys.readouterr().out == (
        "plan             tracking.generate_rows=50: there are only 5 held-out rows, and all are answered\n"
    )


def test_a_tracker_that_does_not_close_fails_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Gone:
        def finish(self, exit_code: int) -> None:
            raise ConnectionError("the server is gone")

    tracker = Tracker(TrainConfig(), tmp_path)
    tracker._wandb = Gone()
    tracker.close()
    assert "warning: W&B could not be closed (ConnectionError: the server is gone); metrics.jsonl has all" in (
        capsys.readouterr().err
    )
