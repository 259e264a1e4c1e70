"""Rows with equal questions: the prompt, with system turn and tools, in any form of the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.held_out import NONE, QUESTIONS, Questions
from tpu_kit.data.mixing import tokenize_sources
from tpu_kit.data.prepare import Prepared, prepare

TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
CALLS = CHATML.replace(
    " + '<|im_end|>' + '\n' }}",
    " }}{% for c in m.tool_calls or [] %}{{ c.function.name + ARGUMENTS }}{% endfor %}{{ '<|im_end|>\n' }}",
)
ASK, ANSWER = {"role": "user", "content": "Summarise the text."}, {"role": "assistant", "content": "It is short."}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}, **more}}}


def under(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": f"Use this text: {text}"}, ASK, ANSWER]}


def with_tool(name: str) -> dict[str, Any]:
    return {"messages": [ASK, ANSWER], "tools": [tool(name)]}


def of_file(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Prepared:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return prepare(DataConfig(**{"source": str(path)} | settings), tiny_tokenizer(TOOLS + CHATML))


@pytest.mark.parametrize("row", [under, with_tool])
def test_system_turns_and_tools_tell_questions_apart(row: Any, tmp_path: Path) -> None:
    rows = [row(f"report{i}") for i in range(30)]
    made = of_file(tmp_path / "rows.jsonl", [*rows, {"messages": [{**ASK, "content": "Other?"}, ANSWER]}])
    assert (made.report.rows_used, len(made.eval_rows), made.report.repeated) == (28, 3, 0)
    told = "same user turns  30 rows have the user turns of other rows under another system turn or other tools and are"
    assert told in str(made) and "held out         3, a tenth of the 31 different questions\n" in str(made)
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row(f"report{i}")) + "\n" for i in range(28, 32)))
    other = of_file(tmp_path / "rows.jsonl", rows, eval_source=str(tmp_path / "held.jsonl"))
    assert (len(other.eval_rows), other.eval_report and other.eval_report.seen_in_training) == (2, 2)
    assert "; 2 with the user turns of other rows under another system turn or other tools" in str(other)


def question_of(path: Path, row: dict[str, Any], template: str = TOOLS + CALLS, **settings: Any) -> int:
    """The question of a row in a file, as a run stores it."""
    path.write_text(json.dumps(row) + "\n")
    tokenizer = tiny_tokenizer(
        template.replace("ARGUMENTS", settings.pop("arguments", "(c.function.arguments|tojson)"))
    )
    config = DataConfig(source=str(path), **settings)
    return int(tokenize_sources(config, tokenizer).questions[0])


def agent(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [
        ASK, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function, **call}]},
        {"role": "tool", "content": "5"}, ANSWER,
    ]  # fmt: skip


def test_a_question_depends_on_what_the_row_says_alone(tmp_path: Path) -> None:
    path = tmp_path / "row.jsonl"
    system = {"role": "system", "content": "Be brief."}
    base = question_of(path, {"messages": [system, ASK, ANSWER]})
    assert base == question_of(path, {"system": "Be brief.", "messages": [ASK, ANSWER]})
    assert base == question_of(path, {"conversations": [
        {"from": "system", "value": "Be  brief"}, {"from": "human", "value": ASK["content"]},
        {"from": "gpt", "value": "Another reply."}]})  # fmt: skip
    plain = question_of(path, {"messages": [ASK, ANSWER]})
    assert plain == question_of(path, {"question": ASK["content"], "answer": "x"}) != base
    assert plain == question_of(path, {"prompt": ASK["content"], "completion": "x"})
    # The settings, the template and the day of a run change the prompt, not the question.
    assert plain == question_of(path, {"messages": [ASK, ANSWER]}, system_prompt="Be brief.")
    assert plain == question_of(path, {"messages": [ASK, ANSWER]}, template="{{ strftime_now('%Y') }}" + CHATML)
    tags = {"think_open": "<r>", "think_close": "</r>"}
    said = [ASK, {"role": "assistant", "content": "<|begin_of_thought|>why<|end_of_thought|>so"}, ASK, ANSWER]
    assert question_of(path, {"messages": said}) == question_of(path, {"messages": said}, **tags)

    rows = [
        {"tools": [tool("add", required=["a"]), tool("sub")], "messages": agent({"a": 2, "b": {"c": 1}})},
        {"tools": [tool("sub"), tool("add", required=["a"])], "messages": agent('{"b": {"c": 1}, "a": 2}', id="c7")},
        {"tools": json.dumps([tool("add", required=["a"])["function"], tool("sub", required=None)["function"]]),
         "messages": agent({"b": {"c": 1.0, "d": None}, "a": 2})},
    ]  # fmt: skip
    assert len({question_of(path, row) for row in rows}) == 1
    assert question_of(path, rows[0], arguments="c.function.arguments") == question_of(path, rows[0])
    changed = [rows[0] | {"tools": [tool("add")]}, rows[0] | {"messages": agent({"a": 3, "b": {"c": 1}})}]
    assert len({question_of(path, row) for row in [rows[0], *changed]}) == 3


def test_an_earlier_prompt_has_its_system_turn(tmp_path: Path) -> None:
    long = {"messages": [*under("x")["messages"], {"role": "user", "content": "More?"}, ANSWER]}
    config = replace(DataConfig(), source=str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [long, under("x"), under("y")])))
    made = tokenize_sources(config, tiny_tokenizer())
    assert made.earlier.tolist() == [made.questions[1]] and made.questions[2] not in made.earlier


def test_questions_of_another_version_are_refused(tmp_path: Path) -> None:
    written = Questions(np.array([1, 2]), NONE)
    written.write(tmp_path)
    read = Questions.read(tmp_path)
    assert read is not None and read.trained.tolist() == [1, 2]
    np.savez(tmp_path / QUESTIONS, **written._asdict())
    with pytest.raises(ValueError, match=r"questions.npz was written by another version of the kit, .* or delete the"):
        Questions.read(tmp_path)
