"""A user's first rows: sixty rows of each common format become an adapter, and typical mistakes name their fix."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.support.child_processes import run_python
from tpu_kit.cli import main
from tpu_kit.config.loader import load_config
from tpu_kit.machine.checks import Machine
from tpu_kit.recipes.run_plan import plan_run

Row = dict[str, Any]
NO_TPU = (
    "launch.device_type=tpu needs torch_xla, which is not installed here" if Machine().version("torch_xla") is None
    else "launch.device_type=xla-cpu rehearses the same code on this CPU"
)  # fmt: skip
PAIRS = [(a, b) for a in range(3, 13) for b in range(4, 10)]


def asked(a: int, b: int) -> str:
    return f"A shelf holds {a} books. {b} more arrive. How many are there?"


def steps(a: int, b: int) -> str:
    return f"First there are {a}. With {b} more that makes {a} + {b} = {a + b}."


def chat(a: int, b: int) -> list[Row]:
    reply = f"<think>\n{steps(a, b)}\n</think>\n{a + b}"
    return [{"role": "user", "content": asked(a, b)}, {"role": "assistant", "content": reply}]


def sharegpt(a: int, b: int) -> list[Row]:
    return [{"from": who, "value": said["content"]} for who, said in zip(("human", "gpt"), chat(a, b), strict=True)]


def as_lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


# By format: the file's name, a function that makes a row, and how the kit must read the rows.
FORMATS: dict[str, tuple[str, Callable[[int, int], Row], str]] = {
    "messages": ("rows.jsonl", lambda a, b: {"messages": chat(a, b)}, "messages (messages=messages)"),
    "prompt and completion": (
        "rows.jsonl", lambda a, b: {"prompt": asked(a, b), "completion": f" {a + b}"},
        "prompt_completion (prompt=prompt, completion=completion)",
    ),
    "question and answer": (
        "rows.jsonl", lambda a, b: {"question": asked(a, b), "answer": str(a + b)},
        "cot (question=question, answer=answer)",
    ),
    "alpaca": (
        "rows.json",
        lambda a, b: {"instruction": "Add the books.", "input": asked(a, b), "output": steps(a, b)},
        "cot (question=instruction, context=input, answer=output)",
    ),
    "sharegpt": (
        "rows.jsonl", lambda a, b: {"conversations": sharegpt(a, b)},
        "messages (messages=conversations)",
    ),
    "gsm8k": (
        "rows.jsonl", lambda a, b: {"question": asked(a, b), "answer": f"{steps(a, b)}\n#### {a + b}"},
        "cot (question=question, answer=answer)",
    ),
    "text": ("rows.jsonl", lambda a, b: {"text": f"{asked(a, b)} {steps(a, b)}"}, "text (text=text)"),
    "openmathinstruct": (
        "rows.parquet",
        lambda a, b: {
            "problem": asked(a, b), "generated_solution": f"{steps(a, b)} \\boxed{{{a + b}}}",
            "expected_answer": str(a + b), "problem_source": "augmented_gsm8k",
        },
        "cot (question=problem, reasoning=generated_solution, answer=expected_answer)",
    ),
    "csv": (
        "rows.csv", lambda a, b: {"Question": asked(a, b), "Reasoning": steps(a, b), "Answer": a + b},
        "cot (question=Question, reasoning=Reasoning, answer=Answer)",
    ),
    "tsv": (
        "rows.tsv", lambda a, b: {"prompt": asked(a, b), "response": a + b},
        "cot (question=prompt, answer=response)",
    ),
}  # fmt: skip


def write_rows(folder: Path, kind: str) -> str:
    name, make, _ = FORMATS[kind]
    rows = [make(a, b) for a, b in PAIRS]
    if name.endswith(".parquet"):
        Dataset.from_list(rows).to_parquet(folder / name)
    elif name.endswith(".json"):
        (folder / name).write_text(json.dumps(rows))
    else:
        (as_csv if name.endswith("sv") else as_lines)(folder / name, rows)
    return name


@pytest.fixture
def desk(tmp_path: Path, wheel: Path) -> Path:
    """An empty folder; the wheel of the kit is installed beside it."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "desk").mkdir()
    return tmp_path / "desk"


@pytest.mark.parametrize("kind", FORMATS)
def test_sixty_rows_are_read_as_they_are_meant(kind: str, tmp_path: Path) -> None:
    name = tmp_path / write_rows(tmp_path, kind)
    plan, prepared = plan_run(load_config(None, [f"data.source={name}", "device_type=cpu", "generate_rows=0"]))
    report = prepared.report
    assert report.layout.startswith(FORMATS[kind][2])
    assert (report.rows_read, report.rows_used, report.held_out) == (60, 54, 6)
    with_reasoning = kind in ("messages", "sharegpt", "gsm8k", "openmathinstruct", "csv")
    assert report.reasoning.trained == (54 if with_reasoning else 0)
    assert plan.config.optim.batch_size == min(4, len(prepared.train)), "a default batch that they do not fill"


@pytest.mark.slow  # quick siblings: the test above, and tests/integration/test_template.py, which trains
@pytest.mark.parametrize("kind", FORMATS)
def test_sixty_rows_become_an_adapter(desk: Path, kind: str) -> None:
    name = write_rows(desk, kind)
    done = run_python(
        ["-m", "tpu_kit", "train", f"source={name}", "max_steps=4", "logging_steps=2"],
        env={"PYTHONPATH": str(desk.parent / "installed"), "PJRT_DEVICE": None}, cwd=desk, timeout=180,
    )  # fmt: skip
    assert f"{name}: {FORMATS[kind][2]}" in done.stdout
    assert "60 read, 54 used" in done.stdout and "held out         6;" in done.stdout
    assert "finished at step 4" in done.stdout and "Traceback" not in done.stderr
    assert (desk / "runs/default/adapter/adapter_model.safetensors").is_file()


# ------------------------------------------------------------------------------------------------------------ mistakes

ROWS: list[Row] = [{"question": asked(a, b), "answer": str(a + b)} for a, b in PAIRS]
MINE = "source=my_rows.jsonl"


def lines(*rows: Row) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# By mistake: files beside my_rows.jsonl, the arguments of `train`, and a part of the message.
MISTAKES: dict[str, tuple[Mapping[str, str | bytes], list[str], str]] = {
    "the path is misspelled": ({}, ["source=my_row.jsonl"], "there is no such file; did you mean my_rows.jsonl?"),
    "a parameter is misspelled": ({}, [MINE, "learning_rte=1e-4"], "did you mean optim.learning_rate?"),
    "a parameter has dashes": ({}, [MINE, "--batch_size", "4"], "--batch_size: no such option; there are "),
    "a word for a number": ({}, [MINE, "batch_size=four"], "is not a whole number"),
    "no such configuration": ({"my.yaml": ""}, ["mine.yaml"], "no such configuration file; did you mean my.yaml?"),
    "a tab in the configuration": ({"my.yaml": "data:\n\tsource: a\n"}, ["my.yaml"], "my.yaml, line 2: not valid YAML"),
    "an empty file": ({"e.jsonl": ""}, ["source=e.jsonl"], "the file is empty; write rows to it"),
    "one row": ({"one.jsonl": lines(*ROWS[:1])}, ["source=one.jsonl"], "all rows ask the same question. Give others"),
    "no column that is known": (
        {"own.jsonl": lines(*({"frage": r["question"], "antwort": r["answer"]} for r in ROWS))}, ["source=own.jsonl"],
        "the data has frage, antwort. Name them, for example data.columns={question: ",
    ),
    "a column that is not there": ({}, [MINE, "columns.question=query"], "no column query; the data has question"),
    "CSV without a header": (
        {"bare.csv": "".join(f"{r['question']},{r['answer']}\n" for r in ROWS)}, ["source=bare.csv"],
        "The first line of CSV names the columns, separated by commas: question,answer",
    ),
    "an empty answer": (
        {"gap.jsonl": lines(*ROWS, {"question": "And?", "answer": ""})}, ["source=gap.jsonl"],
        "gap.jsonl, line 61: column 'answer' is empty. Correct or delete them, or skip them with data.on_bad_row=skip",
    ),
    "a line that is no JSON": (
        {"bad.jsonl": lines(*ROWS) + "{'question': 1}\n"}, ["source=bad.jsonl"],
        "bad.jsonl, line 61, column 2: not valid JSON",
    ),
    "not UTF-8": (
        {"latin.csv": "question,answer\nWo?,Dr\xfcben\n".encode("latin-1")}, ["source=latin.csv"],
        "save the file as UTF-8",
    ),
    "another kind of file": ({"rows.xlsx": "x"}, ["source=rows.xlsx"], "the name must end in .jsonl, .json, "),
    "a folder without rows": ({"folder/notes.md": "x"}, ["source=folder"], "a folder; name the files in it, such as"),
    "no such data set": ({}, ["source=opena1/gsm8k"], "check the spelling and the network"),
    "no such split": ({}, [MINE, "split=test"], "files have one split, train, not 'test'"),
    "a batch larger than the data": ({}, [MINE, "batch_size=64"], "Set optim.batch_size="),
    "all rows held out": ({}, [MINE, "eval_rows=60"], "Set it lower, or to null for a tenth of them"),
    "rows that are too short": ({}, [MINE, "max_length=8"], "raise it"),
    "rows longer than the model reads": ({}, [MINE, "max_length=100000"], "set it to "),
    "no such model": ({}, [MINE, "name=Qwen/Qwen2.5-0.5B-Instrukt"], "did you mean Qwen/Qwen2.5-0.5B-Instruct?"),
    "no TPU here": ({}, [MINE, "device_type=tpu"], NO_TPU),
    "a prompt without a reply": (
        {"ask.jsonl": lines(*({"messages": chat(a, b)[:1]} for a, b in PAIRS))}, ["source=ask.jsonl"],
        "has no assistant turn that carries loss, so there is nothing to learn; its turns are from user",
    ),
    "answers to plain text": (
        {"t.jsonl": lines(*({"text": r["question"]} for r in ROWS))}, ["source=t.jsonl", "generate_rows=4"],
        "set tracking.generate_rows=0",
    ),
    "an update that does not divide": ({}, [MINE, "batch_size=4", "global_batch_size=10"], "use 8 or 12"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_its_fix_before_anything_is_launched(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, arguments, text = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tpu_kit.recipes.sft.launch", lambda *_: pytest.fail("it was launched"))
    for name, content in {"my_rows.jsonl": lines(*ROWS), **files}.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    where = [] if any("device_type" in one for one in arguments) else ["device_type=cpu"]
    assert main(["train", *arguments, *where]) in (1, 2)
    told = capsys.readouterr().err
    assert text in told and "Traceback" not in told
