"""Columns are recognised, and rows that cannot be used say why."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from tpu_kit.config.loader import DataConfig
from tpu_kit.config.named_values import FORMATS, DataFormat, RowFormat, imported
from tpu_kit.data.rows.columns import detect_layout, reasoning_of, reply
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.schemas import Conversation, conversation, normalised


def layout(names: str, **settings: Any) -> str:
    return str(detect_layout(names.split(), DataConfig(**settings)))


def read(row: dict[str, Any], **settings: Any) -> Any:
    config = DataConfig(**settings)
    return conversation(row, detect_layout(list(row), config), config)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("question reasoning answer", "cot (question=question, reasoning=reasoning, answer=answer)"),
        ("Question Complex_CoT Response", "cot (question=Question, reasoning=Complex_CoT, answer=Response)"),
        ("problem solution answer id", "cot (question=problem, reasoning=solution, answer=answer), not used: id"),
        ("problem solution", "cot (question=problem, answer=solution)"),
        ("prompt rationale target", "cot (question=prompt, reasoning=rationale, answer=target)"),
        ("prompt thinking completion", "cot (question=prompt, reasoning=thinking, answer=completion)"),
        ("question answer", "cot (question=question, answer=answer)"),
        ("instruction input output", "cot (question=instruction, context=input, answer=output)"),
        ("input thinking final_answer", "cot (question=input, reasoning=thinking, answer=final_answer)"),
        ("messages tools", "messages (messages=messages, tools=tools)"),
        ("conversations source", "messages (messages=conversations), not used: source"),
        ("problem solution messages", "messages (messages=messages), not used: problem, solution"),
        ("prompt completion", "prompt_completion (prompt=prompt, completion=completion)"),
        ("system conversations", "messages (system=system, messages=conversations)"),
        ("text", "text (text=text)"),
    ],
)
def test_recognised(columns: str, expected: str) -> None:
    assert layout(columns) == expected


def _pair(row: Any, layout: Any, config: DataConfig) -> Conversation:
    asked, said = (str(row[layout.columns[role]]) for role in ("question", "answer"))
    return Conversation(f"{asked} => {said}", len(asked))


def test_a_new_format_is_a_line_and_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"auto", *FORMATS} == {*get_args(DataFormat)} and all(
        callable(imported(each.read)) for each in FORMATS.values()
    )
    monkeypatch.setitem(FORMATS, "pair", RowFormat(f"{__name__}:_pair", ("question", "answer"), ("question", "answer")))
    row, config = {"query": "2 + 3", "target": 5, "id": 1}, DataConfig(format="pair")  # type: ignore[arg-type]
    found = detect_layout(list(row), config)
    assert str(found) == "pair (question=query, answer=target), not used: id"
    assert conversation(row, found, config) == Conversation("2 + 3 => 5", 5)
    with pytest.raises(ValueError, match="answer"):
        detect_layout(["query"], config)


def test_overridden() -> None:
    columns = {"question": "a", "reasoning": "b", "answer": "c"}
    assert layout("a b c text", columns=columns).startswith("cot (question=a, reasoning=b, answer=c)")
    assert layout("a text", columns={"text": "a"}) == "text (text=a), not used: text"
    assert layout("text messages", format="text") == "text (text=text), not used: messages"
    assert layout("prompt completion", format="cot") == "cot (question=prompt, answer=completion)"
    assert layout("problem solution answer", columns={"reasoning": "solution"}).startswith("cot (question=problem, ")


@pytest.mark.parametrize(
    ("columns", "settings", "text"),
    [
        ("a b", {}, "missing columns: they fit no format; the data has a, b. Name them"),
        (
            "prompt chosen rejected",
            {},
            "preference rows, pairs of a chosen and a rejected reply, are for dpo. To",
        ),
        ("question", {"format": "cot"}, "missing columns: format cot needs answer; .*.columns={answer: COLUMN}"),
        ("question answer", {"format": "text"}, "format text needs text"),
        ("a b", {"columns": {"question": "q"}}, "data.columns: no column q; the data has a, b"),
    ],
)
def test_not_recognised(columns: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layout(columns, **settings)


def test_chain_of_thought_with_tags_of_ones_own() -> None:
    row = {"question": "q", "reasoning": "r", "answer": 7}
    assert read(row).messages[-1]["content"] == "<think>\nr\n</think>\n7"
    config = DataConfig(think_open="[", think_close="]")
    assert read(row, think_open="[", think_close="]").messages[-1]["content"] == "[\nr\n]\n7" == reply("r", "7", config)
    assert reasoning_of("[\nr\n]\n7", config) == "r" and reasoning_of("7", config) == ""


def test_gsm8k_has_reasoning_and_answer_in_one_column() -> None:
    row = {"question": "q", "answer": "2+3=5\nso five\n#### 5"}
    assert read(row).messages[-1]["content"] == "<think>\n2+3=5\nso five\n</think>\n5"


def test_context_of_an_instruction() -> None:
    row = {"instruction": "Add.", "input": "2, 3", "output": 5.0}
    assert [m["content"] for m in read(row).messages] == ["Add.\n\n2, 3", "5"]
    assert read(row | {"input": ""}).messages[0]["content"] == "Add."


def questions(row: dict[str, Any], **settings: Any) -> list[int]:
    return read(row, **settings).questions(DataConfig(**settings))


def test_a_question_is_the_same_in_every_format() -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (question,) = questions({"messages": chat})
    alike = [{"prompt": " Q.", "completion": "c"}, {"text": "q"}, {"question": "q", "answer": "b"}]
    assert [questions({"messages": chat}, system_prompt="s"), *map(questions, alike)] == [[question]] * 4
    longer = [*chat, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "b"}]
    first, second = questions({"messages": longer})
    assert first == question != second
    for i, said in ((0, "p"), (1, "c"), (2, "or?")):
        assert questions({"messages": [*longer[:i], longer[i] | {"content": said}, *longer[i + 1 :]]})[1] != second
    assert questions({"messages": [*longer[:3], longer[3] | {"content": "c"}]}) == [first, second]


USER, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "", "reasoning": "r", "answer": "a"}, "column 'question' is empty"),
        ({"question": "q", "reasoning": "r", "answer": " \n"}, "column 'answer' is empty"),
        (
            {"question": "q", "reasoning": [["r"], 7], "answer": "a"},
            "column 'reasoning' holds reasoning that is not text",
        ),
        ({"question": "q", "answer": True}, "column 'answer' holds true, a truth value; write the intended text"),
        ({"prompt": "p", "completion": ""}, "column 'completion' is empty"),
        ({"prompt": "p", "completion": [REPLY]}, "must both be text or both be lists of messages"),
        ({"prompt": [USER], "completion": [USER]}, "column 'completion' has no assistant turn"),
        (
            {"prompt": [USER, REPLY, USER], "completion": [{"role": "assistant", "content": ""}]},
            "message 3 .* is empty",
        ),
        ({"messages": []}, "column 'messages' must be a list of messages"),
        ({"messages": "hello"}, "column 'messages' is not valid JSON: .*: 'hello'"),
        ({"messages": '{"role": "user"}'}, "column 'messages' must be a list of messages"),
        ({"messages": [{"role": "user"}, REPLY]}, "message 0 of column 'messages', from user, has no content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}, REPLY]},
            "message 0 of column 'messages' has a part of type image; only text can be trained on",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": ""}]},
            "the completion, is empty",
        ),
        ({"question": "q", "answer": float("nan")}, "column 'answer' holds nan"),
        ({"messages": [USER]}, "has no assistant turn"),
        ({"messages": [{"content": "q"}, REPLY]}, "message 0 of column 'messages' has no role"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "message 1 .* the completion, is empty"),
        ({"messages": [USER, REPLY], "tools": "{"}, "column 'tools' is not valid JSON"),
        ({"text": None}, "column 'text' is empty"),
    ],
)
def test_rows_that_cannot_be_used(row: dict[str, Any], text: str) -> None:
    with pytest.raises(RowError, match=text):
        read(row)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_a_tool_call_is_a_completion() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert read({"messages": [USER, call]}).messages[1] == {key: call[key] for key in ("role", "tool_calls")}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": json.dumps([USER, REPLY])},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, REPLY]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": [USER], "completion": [REPLY]},
    ],
    ids=["JSON text", "parts", "ShareGPT", "prompt and completion"],
)
def test_a_chat_however_it_is_written(row: dict[str, Any]) -> None:
    assert read(row).messages == [USER, REPLY]


def test_a_system_column_is_the_first_turn() -> None:
    row = {"system": "Mine.", "messages": [USER, REPLY]}
    mine, settings = {"role": "system", "content": "Mine."}, {"role": "system", "content": "Yours."}
    assert read(row).messages == [mine, USER, REPLY]
    assert read(row, system_prompt="Yours.").messages == [mine, USER, REPLY]
    assert read(row | {"system": ""}, system_prompt="Yours.").messages == [settings, USER, REPLY]
    assert read({"system": "Mine.", "question": "q", "answer": "a"}).messages == [mine, USER, REPLY]
    assert read({"s": "Mine.", "question": "q", "answer": "a"}, columns={"system": "s"}).messages[0] == mine


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (7.0, "7"), (2.5, "2.5"), (10**18 + 1, "1000000000000000001"), ("007", "007"), ("½", "½")],
)
def test_answers_that_are_numbers(value: Any, text: str) -> None:
    assert read({"question": "q", "answer": value}).messages[-1]["content"] == text


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 5 + 1?", " what  is\n5 + 1", True),
        ("It\N{RIGHT SINGLE QUOTATION MARK}s 5 \N{MINUS SIGN} 1.", "it's 5 - 1", True),
        ("What is 5 + 1?", "What is 5 - 1?", False),
        ("1.5", "15", False),
        ("x\N{SUPERSCRIPT TWO}", "x2", False),
    ],
)
def test_questions_are_compared_by_what_they_say(one: str, other: str, same: bool) -> None:
    assert (normalised(one) == normalised(other)) is same
