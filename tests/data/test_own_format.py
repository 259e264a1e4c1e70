"""Rows of any form, which a user's function converts: `data.format=module:function`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.support.child_processes import PYTHONPATH, REPOSITORY, run_python
from tests.support.given_rows import prepare_rows
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import ConfigError, DataConfig, load_config
from tpu_kit.config.named_values import imported
from tpu_kit.data.pairs import PairLayout
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.distributed.hosts import ONE
from tpu_kit.recipes import problems

ROWS = [{"frage": f"What is {i} + 1?", "antwort": [i, i + 1]} for i in range(12)]
README = (REPOSITORY / "tpu_kit/data/README.md").read_text()
MINE = """
def pair(row):
    return {"prompt": row["frage"] + " ", "completion": str(row["antwort"][1])}

def chat(row):
    asked, said = ({"role": role, "content": text} for role, text in
                   (("user", row["frage"]), ("assistant", str(row["antwort"][1]))))
    return [asked, said]

def text(row):
    return f"{row['frage']} {row['antwort'][1]}"

def better(row):
    return {"prompt": row["frage"] + " ", "chosen": str(row["antwort"][1]), "rejected": "no"}

def many(rows):
    return [pair(row) for row in rows]

def uneven(row):
    return text(row) if row["antwort"][0] % 5 else {"x": {1, 2}} if row["antwort"][0] else 7

def prompt(row):
    return {"prompt": row["frage"], "gold": row["antwort"]}

def of_two(row, number):
    return ""
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module with the functions, and rows beside it."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rows", raising=False)
    (tmp_path / "my_rows.py").write_text(MINE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def made(folder: Path, function: str, **settings: Any) -> Prepared:
    config = DataConfig(**{"source": str(folder / "rows.jsonl"), "format": f"my_rows:{function}", "eval_rows": 2}
                        | settings)  # fmt: skip
    return prepare(config, tiny_tokenizer())


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        ("pair", [{"prompt": f"{r['frage']} ", "completion": str(r["antwort"][1])} for r in ROWS]),
        ("many", [{"prompt": f"{r['frage']} ", "completion": str(r["antwort"][1])} for r in ROWS]),
        ("chat", [{"question": r["frage"], "answer": str(r["antwort"][1])} for r in ROWS]),
        ("text", [{"text": f"{r['frage']} {r['antwort'][1]}"} for r in ROWS]),
    ],
)
def test_rows_of_a_function_are_those_of_a_file(function: str, rows: list[dict[str, str]], mine: Path) -> None:
    (mine / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = prepare(DataConfig(source=str(mine / "same.jsonl"), eval_rows=2), tiny_tokenizer())
    own = made(mine, function)
    assert own.fingerprint == same.fingerprint and own.eval_prompts == same.eval_prompts
    assert own.report.rows_read == 12 and made(mine, function, num_proc=2).fingerprint == same.fingerprint


def test_a_function_may_return_pairs(mine: Path) -> None:
    """`dpo` compares both replies, and `train` takes the chosen ones."""
    config = DataConfig(source=str(mine / "rows.jsonl"), format="my_rows:better", eval_rows=2)
    pairs = prepare(config, tiny_tokenizer(), pairs=PairLayout(True))
    assert pairs.report.pairs is not None and pairs.report.pairs.pairs == 12
    assert made(mine, "better").train.fingerprint() == made(mine, "pair").train.fingerprint()


def test_the_function_of_the_readme(mine: Path) -> None:
    (block,) = re.findall(r"```python\n(def .*?)```", README, re.DOTALL)
    (mine / "my_rows.py").write_text(block)
    own = made(mine, "pair", eval_rows=0)
    assert own.report.layout == "prompt_completion (prompt=prompt, completion=completion)"
    data = Dataset.from_list(ROWS)
    mapped = data.map(imported("my_rows:pair"), remove_columns=data.column_names)
    assert prepare_rows(DataConfig(eval_rows=0), tiny_tokenizer(), mapped).fingerprint == own.fingerprint


def test_prompts_alone_are_for_models_that_sample(mine: Path) -> None:
    config = DataConfig(source=str(mine / "rows.jsonl"), format="my_rows:prompt", eval_rows=0)
    tasks = prepare(config, tiny_tokenizer(), max_prompt=100).tasks
    assert tasks is not None and tasks.rows.rows[1] == {"prompt": ROWS[1]["frage"], "gold": [1, 2]}


def test_a_row_on_which_it_fails_is_named_with_its_value(mine: Path) -> None:
    text = (
        r"rows.jsonl: 3 of 12 rows cannot be used: rows.jsonl, line 1: data.format=my_rows:uneven returned 7; return "
        r"messages, a text, or .*; rows.jsonl, line 6: data.format=my_rows:uneven returned values that JSON lacks \(Obj"
    )
    with pytest.raises(ValueError, match=text):
        made(mine, "uneven")
    skipped = made(mine, "uneven", on_bad_row="skip").report
    assert (skipped.skipped, skipped.rows_read, skipped.rows_used) == (3, 12, 7)
    (mine / "rows.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"frage": "Why?"}\n')
    for function in ("pair", "many"):
        text = rf"line 2: data.format=my_rows:{function} raised \w+: .*None.* for {{'frage': 'Why\?', 'antwort': None}}"
        with pytest.raises(ValueError, match=text):
            made(mine, function)


def test_made_once_for_each_code(mine: Path) -> None:
    def files() -> int:
        return len(list((mine / "cache").rglob("own-*.arrow")))

    first = made(mine, "pair")
    assert made(mine, "pair").fingerprint == first.fingerprint and files() == 1
    (mine / "my_rows.py").write_text(MINE.replace('row["frage"] + " "', 'row["frage"] + " So: "'))
    del sys.modules["my_rows"]
    assert made(mine, "pair").fingerprint != first.fingerprint and files() == 2


CELL = """
import json, pathlib, sys
import datasets
from tests.support.given_rows import prepare_rows
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.config.named_values import imported
from tpu_kit.data.prepare import prepare
datasets.config.HF_DATASETS_CACHE = pathlib.Path({folder!r}) / "cells"
word = "So"
def mine(row):
    return {{"prompt": row["frage"] + " ", "completion": word + str(row["antwort"][1])}}
def run():
    return prepare(DataConfig(source={folder!r} + "/rows.jsonl", format="__main__:mine"), tiny_tokenizer()).fingerprint
first = run()
print(run() == first)
word = "Now"
print(run() != first, len(list(pathlib.Path({folder!r}).rglob("own-*.arrow"))))
"""


def test_a_function_of_a_cell(mine: Path) -> None:
    said = run_python(["-c", CELL.format(folder=str(mine))], env={"PYTHONPATH": PYTHONPATH}).stdout
    assert said.split() == ["True", "True", "2"]


def test_what_is_no_function_is_refused_before_anything_starts(mine: Path) -> None:
    def of_machine(name: str) -> str:
        config = load_config(None, {"format": name, "source": str(mine / "rows.jsonl")})
        (found,) = problems.of_machine(config, ONE)
        return str(found)

    assert of_machine("my_rows:lost").startswith("data.format=my_rows:lost: it cannot be imported (AttributeError")
    assert "my_rows:of_two(row, number) is not called with one row" in of_machine("my_rows:of_two")
    with pytest.raises(ConfigError, match='or module:function; did you mean "messages"'):
        load_config(None, {"format": "mesages"})
