"""Roles of columns: rows of published reasoning sets, and ambiguous columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from datasets import Dataset

from tests.support.reasoning_sets import CHOICES, OPTIONS, SETS, Known
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.rows.column_values import read_layout
from tpu_kit.data.rows.columns import Layout, detect_layout
from tpu_kit.data.rows.field_values import RowError, is_filled
from tpu_kit.data.rows.schemas import conversation, problem


def detect(rows: list[dict[str, Any]], **settings: Any) -> Layout:
    data = Dataset.from_list(rows)
    return read_layout(data, data.column_names, DataConfig(**settings))


def read(rows: list[dict[str, Any]], **settings: Any) -> tuple[str, Any]:
    layout = detect(rows, **settings)
    talk = conversation(Dataset.from_list(rows)[0], layout, DataConfig(**settings))
    return str(replace(layout, examples={}, notes=())), talk


@pytest.mark.parametrize("known", SETS, ids=lambda known: known.name)
def test_a_row_of(known: Known) -> None:
    roles, talk = read([known.row])
    assert roles == known.roles
    *asked, last = talk.messages
    content = f"<think>\n{known.reasoning}\n</think>\n{known.answer}" if known.reasoning else known.answer
    assert " ".join(last["content"].split()) == " ".join(content.split()) and last["role"] == "assistant"
    assert asked[-1] == {"role": "user", "content": known.question}
    assert [m["content"] for m in asked[:-1]] == ([known.system] if known.system else [])


def test_at_least_twenty_sets_are_known() -> None:
    assert len({known.name for known in SETS}) >= 20


def test_a_column_without_values_has_no_role_however_many_rows_there_are() -> None:
    """But a column whose first value is far down has a role."""
    rows = [{"question": f"q{i}", "cot": None, "explanation": "e", "answer": "a"} for i in range(3000)]
    roles = "cot (question=question, reasoning=explanation, answer=answer), not used: cot"
    assert str(replace(detect(rows), notes=())) == roles
    rows[2500]["cot"] = "trace"
    assert detect(rows).columns["reasoning"] == "cot"
    blank = [{"question": "q", "reasoning": " ", "rationale": "r", "answer": "a"}]
    assert detect(blank).columns["reasoning"] == "rationale"
    with pytest.raises(ValueError, match=r"needs answer; the data has question, answer \(answer without values\)"):
        detect([{"question": "q", "answer": None}], format="cot")


def test_what_counts_as_a_value() -> None:
    assert all(map(is_filled, ["x", 0, False, {"text": ["x"]}, [None, "x"]]))
    assert not any(map(is_filled, [None, "", " \n", [], {}, {"text": [], "label": None}, float("nan")]))


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "q", "prompt": "p", "answer": "a"}, "question could be question or prompt"),
        ({"question": "q", "answer": "a", "response": "b"},
         r"answer could be answer or response\. Choose a column, as in data\.columns=\{answer: answer\}"),
        ({"question": "q", "reasoning": "r", "rationale": "s", "answer": "a"},
         "reasoning could be reasoning or rationale"),
        ({"question": "q", "context": "c", "passage": "p", "answer": "a"}, "context could be context or passage"),
    ],
)  # fmt: skip
def test_what_is_ambiguous_is_an_error(row: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        read([row])


def test_columns_name_what_names_do_not_tell() -> None:
    row = {"query": "q", "r1_trace": "t", "r1_attempt": "a", "answer": "b", "response": "c"}
    roles, talk = read([row], columns={"reasoning": "r1_trace", "answer": "r1_attempt"})
    assert roles == "cot (question=query, reasoning=r1_trace, answer=r1_attempt), not used: answer, response"
    assert talk.messages[-1]["content"] == "<think>\nt\n</think>\na"


def test_the_last_reply_of_a_chat_may_be_in_columns_of_its_own() -> None:
    """As in dolphin-r1 and in Nemotron's post-training data."""
    asked = [{"role": "user", "content": "2 + 3?"}]
    for row, columns in (
        ({"input": asked, "output": "<think>\nr\n</think>\n5"}, {"messages": "input", "answer": "output"}),
        ({"messages": asked, "reasoning": "r", "answer": "5"}, {"messages": "messages", "answer": "answer"}),
    ):
        talk = read([row], columns=columns)[1]
        assert [m["content"] for m in talk.messages] == ["2 + 3?", "<think>\nr\n</think>\n5"] and talk.first == 1


def test_an_empty_name_gives_a_role_to_no_column() -> None:
    row = {"question": "q", "context": "c", "answer": "a"}
    assert read([row])[1].messages[0]["content"] == "c\n\nq"
    roles, talk = read([row], columns={"context": ""})
    assert roles == "cot (question=question, answer=answer), not used: context" and talk.messages[0]["content"] == "q"
    assert (
        read([{"question": "q", "reasoning": "r", "answer": "a"}], columns={"reasoning": ""})[1].messages[1]["content"]
        == "a"
    )


@pytest.mark.parametrize("options", [["bank", "library", "mall"], CHOICES], ids=["texts", "struct of lists"])
def test_options(options: Any) -> None:
    talk = read([{"question": "Where?", "options": options, "answer": "B"}])[1]
    assert [m["content"] for m in talk.messages] == [f"Where?\n\n{OPTIONS}", "B"]


def test_the_number_of_an_option_becomes_its_label() -> None:
    def answer(options: Any, answer: Any) -> str:
        layout = detect_layout(["question", "options", "answer"], DataConfig())
        return problem({"question": "q", "options": options, "answer": answer}, layout, DataConfig())["answer"]

    assert answer(["x", "y"], 1) == "B" and answer({"label": ["1", "2"], "text": ["x", "y"]}, 1) == "1"
    assert answer(["10", "20"], 20) == "20" and answer(["x", "y"], "y") == "y" and answer([], 7) == "7"
    with pytest.raises(RowError, match="column 'answer' holds 1, which may be an option or the number of an option"):
        answer(["1", "2"], 1)
    with pytest.raises(RowError, match="column 'answer' holds 2, which may be an option"):
        answer(["x", "y"], 2)
    with pytest.raises(RowError, match="column 'options' does not hold a list of options: x or y"):
        answer("x or y", "x")


def test_rows_whose_cells_do_not_fit() -> None:
    asked = read([{"question": "q", "context": {"title": ["t"]}, "answer": "a"}])[1].messages[0]["content"]
    assert asked == '{"title": ["t"]}\n\nq'
    assert read([{"question": "q", "reasoning": ["a", "b"], "answer": "c"}])[1].messages[1]["content"] == (
        "<think>\na\nb\n</think>\nc"
    )
    config, layout = DataConfig(), detect_layout(["question", "reasoning", "answer"], DataConfig())
    row = {"question": "q", "reasoning": "r", "answer": "<think>s</think>a"}
    with pytest.raises(RowError, match=r"'answer' \(in tags\) and 'reasoning' both hold reasoning; set data"):
        conversation(row, layout, config)
    given = detect_layout(["question", "solution", "answer"], config)
    row = {"question": "q", "solution": "<think>\nr\n</think>\nlong", "answer": "5"}
    assert conversation(row, given, config).messages[-1]["content"] == "<think>\nr\n</think>\n5"
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chat = detect_layout(["messages", "answer"], DataConfig(columns={"messages": "messages", "answer": "answer"}))
    with pytest.raises(RowError, match="column 'messages' ends in a reply, and 'answer' holds another"):
        conversation({"messages": asked, "answer": "b"}, chat, config)


def test_a_heading_is_no_answer() -> None:
    talk = read([{"question": "q", "answer": "#### Step 1\nCount on.\n#### Step 2\nStop."}])[1]
    assert talk.messages[-1]["content"] == "#### Step 1\nCount on.\n#### Step 2\nStop."
