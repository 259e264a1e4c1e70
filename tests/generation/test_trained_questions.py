"""An evaluation uses the rows that the adapter's run held out, and leaves out the questions that it trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.generation.test_evaluate import of_nothing
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.cli import main
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.data.held_out import NONE, Questions
from tpu_kit.data.prepare import prepare
from tpu_kit.exporting.card import model_card
from tpu_kit.generation.evaluation import evaluate as evaluate_module
from tpu_kit.generation.evaluation.comparison import Comparison
from tpu_kit.generation.evaluation.evaluate import evaluate_adapter
from tpu_kit.machine.storage.object_store import upload
from tpu_kit.model.weights.source import load_tokenizer
from tpu_kit.recipes import sft
from tpu_kit.recipes.run_data import prepare_run

SETTINGS = {"device_type": "cpu", "num_replicas": 1, "max_length": 96, "batch_size": 2, "max_steps": 1}
QUESTIONS = [row["question"] for row in cot_rows("train", 120, seed=1)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def config(source: str | Path, **given: Any) -> TrainConfig:
    return load_config(None, {**SETTINGS, "source": str(source), **given})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder with my.jsonl and a run that held out 4 of 120 questions, and these questions."""
    folder = tmp_path_factory.mktemp("finished")
    source = write(folder / "my.jsonl", cot_rows("train", 120, seed=1))
    run = config(source, eval_rows=4, output_dir=str(folder / "run"), date="2020-01-02")
    sft.train(run)
    return folder, {row["question"] for row in prepare(run.data, load_tokenizer(run.model)).eval_rows}


@pytest.fixture(autouse=True)
def silent_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(evaluate_module, "answer", of_nothing)
    yield


def asked(found: Comparison) -> set[str]:
    return {sample.question for sample in found.base.samples}


@pytest.mark.parametrize(
    ("given", "left_out"), [({"eval_rows": 4}, 0), ({}, 8), ({"eval_rows": 60}, 56), ({"seed": 1}, 12)]
)
def test_rows_of_the_source_take_the_split_of_the_run(
    finished: tuple[Path, set[str]], given: dict[str, int], left_out: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, held = finished
    found = evaluate_adapter(config(folder / "my.jsonl", **given), folder / "run" / "adapter")
    assert asked(found) == held and (found.seen_in_training, found.training_data_known) == (left_out, True)
    told = json.loads((folder / "run" / "eval.json").read_text())
    assert (told["seen_in_training"], len(told["samples"])) == (left_out, 4)
    assert f"{left_out} rows left out, because their questions are in the training data" in str(found)
    assert "has changed" not in capsys.readouterr().err


@pytest.mark.parametrize(("given", "day"), [({}, "2020-01-02"), ({"date": "2021-03-04"}, "2021-03-04")])
def test_the_date_is_that_of_the_run(
    finished: tuple[Path, set[str]], given: dict[str, str], day: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    days, folder = set[str | None](), finished[0]
    monkeypatch.setattr(
        evaluate_module, "answer", lambda run, *rest, **more: days.add(run.data.date) or of_nothing(run, *rest, **more)
    )
    evaluate_adapter(config(folder / "my.jsonl", **given), folder / "run" / "adapter")
    assert days == {day}


@pytest.mark.parametrize("given", [{"eval_rows": 60}, {"eval_rows": 2, "seed": 1}])
def test_a_run_from_an_adapter_holds_out_what_the_adapter_has_not_learned(
    finished: tuple[Path, set[str]], given: dict[str, int]
) -> None:
    folder, held = finished
    found = prepare_run(config(folder / "my.jsonl", adapter=str(folder / "run" / "adapter"), **given))
    before, now = Questions.read(folder / "run"), found.questions
    assert before and now and {row["question"] for row in found.eval_rows} <= held
    assert len(now.held_out) == min(4, given["eval_rows"]) and set(before.trained) <= set(now.trained)


def test_a_damaged_file_of_questions_is_named(tmp_path: Path) -> None:
    Questions(NONE, NONE).write(tmp_path)
    file = tmp_path / "questions.npz"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"questions.npz is damaged \(.*delete it to continue without"):
        Questions.read(tmp_path)


def test_a_source_that_changed_since_the_run(
    finished: tuple[Path, set[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, held = finished
    gone = sorted(held)[0]
    rows = [row for row in cot_rows("train", 120, seed=1) if row["question"] != gone]
    new = [row for row in cot_rows("eval", 200, seed=2) if row["question"] not in QUESTIONS]
    grown = write(tmp_path / "grown.jsonl", [*rows, *new])
    found = evaluate_adapter(config(grown), folder / "run" / "adapter")
    today = {row["question"] for row in prepare(config(grown).data, load_tokenizer(config(grown).model)).eval_rows}
    assert asked(found) == (today - set(QUESTIONS)) | (held - {gone}) and found.seen_in_training > 0
    assert found.seen_in_training == len(today & set(QUESTIONS) - held)
    count = len(asked(found) - held)
    text = f"{count} of these {count + 3} questions are new to the adapter's run, and 1 of the 4 that it held out"
    assert f"{text} are missing: data.eval_rows or the source differs" in capsys.readouterr().err


def test_rows_of_another_source_and_their_adapter_in_a_bucket(
    finished: tuple[Path, set[str]], tmp_path: Path, bucket: str
) -> None:
    folder, held = finished
    rows = cot_rows("train", 120, seed=1)
    new = [row for row in cot_rows("eval", 200, seed=2) if row["question"] not in QUESTIONS][:3]
    trained = [row for row in rows if row["question"] not in held][:5]
    source = write(tmp_path / "eval.jsonl", [*trained, *new, *[row for row in rows if row["question"] in held]])
    upload(folder / "run", f"{bucket}/run")
    run = config("embedded", eval_source=source)
    found = evaluate_adapter(run, f"{bucket}/run/adapter")
    assert asked(found) == held | {row["question"] for row in new}
    assert (found.seen_in_training, found.training_data_known) == (5, True)
    write(tmp_path / "eval.jsonl", trained)
    with pytest.raises(ValueError, match=r"every question of the evaluation rows .* in the training rows too; name "):
        evaluate_adapter(run, f"{bucket}/run/adapter")


def test_the_training_data_of_an_adapter_without_a_run_are_unknown(
    finished: tuple[Path, set[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "run" / "adapter", tmp_path / "adapter")
    (tmp_path / "my.yaml").write_text(config(folder / "my.jsonl").to_yaml())
    (tmp_path / "config.yaml").write_text("{ of another program")
    assert main(["evaluate", str(tmp_path / "my.yaml"), f"adapter={tmp_path}/adapter"]) == 0
    assert (
        "The training data of the adapter are unknown (there is no questions.npz beside it): it may"
        in capsys.readouterr().out
    )
    told = json.loads((tmp_path / "eval.json").read_text())
    assert told["training_data_known"] is False and len(told["samples"]) == 12
    card = model_card(config(folder / "my.jsonl"), tmp_path, "an adapter", None, "load it", [])
    assert "The training data of the adapter are unknown (there is no questions.npz" in card
