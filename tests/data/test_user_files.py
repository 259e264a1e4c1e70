"""Files of users, from the file to the trained tokens or to a refusal."""
# ruff: noqa: E501 (a line per row)

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from tests.data.test_reasoning import KEY
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat.chat_encoding import decoded_example
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.rows.sources import save_rows

Rows = list[dict[str, Any]]
TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
WRAPPED = {"type": "function", "function": TOOL}
SHOWN = json.dumps(WRAPPED)
CALLED = '<call>{"name": "add", "arguments": {"a": 2}}</call>'
TEMPLATE = "{% for tool in tools or [] %}{{ 'tool ' + (tool | tojson) + '<|im_end|>\n' }}{% endfor %}" + KEY
"""The tools come before the chat, and a chat is one document."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def user(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **keys}


def reply(content: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def chat(*messages: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": list(messages), **columns}


def prepared(folder: Path, rows: Rows | Dataset | str, **settings: Any) -> Prepared:
    """Prepares rows in a file of JSON lines, rows of a data set, or the text of a CSV file."""
    if isinstance(rows, Dataset):
        source = save_rows(rows, folder)
    else:
        path = folder / ("rows.csv" if isinstance(rows, str) else "rows.jsonl")
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        source = str(path)
    options = settings.pop("options", {})
    config = DataConfig(**({"source": source, "max_length": 512, "eval_rows": 0, "packing": False} | settings))
    return prepare(config, tiny_tokenizer(TEMPLATE), **options)


def trained(made: Prepared) -> list[str]:
    """The documents: a turn on each line as "role: text", with "> " before it if it carries loss."""
    assert made.encoder is not None
    documents = []
    for number in range(len(made.train.documents)):
        text = "".join(
            f"\N{SYMBOL FOR START OF TEXT}{part}" if loss else part
            for part, loss in decoded_example(made.encoder.tokenizer, made.example(number))
        )
        turns = text.replace("<|im_start|>", "").split("<|im_end|>")
        lines = []
        for turn in filter(None, map(str.strip, turns)):
            mark = "> " * ("\N{SYMBOL FOR START OF TEXT}" in turn)
            role, line, said = turn.replace("\N{SYMBOL FOR START OF TEXT}", "").partition("\n")
            lines.append(mark + (f"{role}: {said}" if line else role))
        documents.append("\n".join(lines))
    return documents


def only(folder: Path, rows: Rows | Dataset | str, **settings: Any) -> str:
    """The first document of rows that are all read alike."""
    return trained(prepared(folder, rows, **settings))[0]


Q, A = "user: Add.\n", "> assistant: "


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Contents that are not text, in every form of a row.
        ([chat(user("Add."), reply({"ü": None, "x": [1, True, 0.3]}))], Q + A + '{"ü": null, "x": [1, true, 0.3]}'),
        ([chat(user("Add."), reply(["a", 1]))], Q + A + '["a", 1]'),
        ([chat(user(1), reply(2.0))], "user: 1\n" + A + "2"),
        ([chat(user("Add."), reply("a")), chat(user(3), reply({"b": 1}))], Q + A + "a"),
        ([{"conversations": [{"from": "human", "value": {"q": 1}}, {"from": "gpt", "value": 0.3}]}],
         'user: {"q": 1}\n' + A + "0.3"),
        ([{"question": "Add.", "answer": {"city": "Köln", "twin": None}}], Q + A + '{"city": "Köln", "twin": null}'),
        ([{"question": "Add.", "answer": ["a", "b"]}], Q + A + '["a", "b"]'),
        ([{"question": "Add.", "answer": {"id": 10**20}}], Q + A + '{"id": 100000000000000000000}'),
        ([{"question": "Add.", "answer": 10**20}], Q + A + "1" + 20 * "0"),
        ([chat(user("Add."), reply({"id": -(10**20)}))], Q + A + '{"id": -100000000000000000000}'),
        ([{"prompt": "Add. ", "completion": {"a": 1}}], '> Add. {"a": 1}'),
        ([chat({"role": "system", "content": {"p": 1}}, user("Add."), reply("x"))], 'system: {"p": 1}\n' + Q + A + "x"),
        ([chat(user([{"type": "text", "text": "Add"}, {"type": "text", "text": "."}]), reply("x"))], Q + A + "x"),
        (json.dumps([user("Add."), reply({"n": None})]), Q + A + '{"n": null}'),
        # Reasoning in any place of a row.
        *[
            ([chat(user("Add."), reply("x", **{key: value}))], Q + A + "<think>\nhm\n</think>\nx")
            for key, value in {
                "reasoning_details": [{"type": "reasoning.text", "text": "hm"}], "reasoning": ["hm"], "thought": "hm",
                "thinking": {"text": "hm"},
            }.items()
        ],
        ([chat(user("Add."), reply([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "x"}]))],
         Q + A + "<think>\nhm\n</think>\nx"),
        ([{"question": "Add.", "reasoning": [{"text": "h"}, {"text": "m"}], "answer": "x"}],
         Q + A + "<think>\nh\nm\n</think>\nx"),
        ([{"question": "Add.", "answer": "<|begin_of_thought|>hm<|end_of_thought|>\n<|begin_of_solution|>x<|end_of_solution|>"}],
         Q + A + "<think>\nhm\n</think>\nx"),
        *[
            (rows, Q + A + "Its tags are <|begin_of_thought|> and <|begin_of_solution|>.")
            for said in ["Its tags are <|begin_of_thought|> and <|begin_of_solution|>."]
            for rows in ([{"question": "Add.", "answer": said}], [chat(user("Add."), reply(said))])
        ],
        # Columns beside a question or a chat.
        ([{"instruction": "Add.", "output": "x", "system": "s", "history": [["h", "r"]]}],
         "system: s\nuser: h\n> assistant: r\n" + Q + A + "x"),
        ([{"question": "Add.", "answer": "x", "history": [user("h"), reply("r")]}], "user: h\n> assistant: r\n" + Q + A + "x"),
        ([chat(user("h"), reply("r"), user("Add."), response="x")], "user: h\nassistant: r\n" + Q + A + "x"),
        *[
            ([row], Q + A + "x")
            for row in [
                {"input": [user("Add.")], "output": [reply("x")]}, {"prompt": [user("Add.")], "response": [reply("x")]},
                chat(user("Add."), response=json.dumps([reply("x")])), chat(user("Add."), response=reply("x")),
                {"prompt": user("Add."), "completion": reply("x")},
                chat(user([{"text": "Add."}]), reply({"content_type": "text", "parts": ["x"]})),
                chat(user({"type": "text", "text": "Add."}), reply("x")),
            ]
        ],
        ([chat(user("Add."), output={"n": 1})], Q + A + '{"n": 1}'),
        ([chat(user("Add."), reply("x"), response="x", id=3)], Q + A + "x"),
        ([chat(user("Add."), reply("x"), prompt="Add.", instruction="Add.")], Q + A + "x"),
        ([chat({"role": "system", "content": "s"}, user("Add."), reply("x"), system="s")], "system: s\n" + Q + A + "x"),
        ([{"prompt": [user("Add.")], "completion": "x", "system": "s"}], "system: s\n" + Q + A + "x"),
        ([{"query": "Add.", "answers": '[{"name": "add", "arguments": {"a": 2}}]', "tools": json.dumps([TOOL])}],
         f"tool {SHOWN}\n" + Q + A + CALLED),
        ([{"query": "Add.", "answers": [{"name": "add", "arguments": {"a": 2}}],
           "tools": [{"name": "add", "parameters": {"a": {"type": "int"}}}]}],
         'tool {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": '
         '{"a": {"type": "int"}}}}}\n' + Q + A + CALLED),
        ([{"input": [user("Add.")], "output": "x", "reasoning": "off", "system_prompt": "s"}], "system: s\n" + Q + A + "x"),
        # Marks of an answer.
        ([{"question": "Add.", "answer": "Use #### before it."}], Q + A + "Use #### before it."),
        ([{"question": "Add.", "answer": "# R\nSend it.\n\n#### See also: x"}], Q + A + "# R\nSend it.\n\n#### See also: x"),
        ([{"question": "Add.", "answer": "As\n#### See x"}, {"question": "b", "answer": "c"}], Q + A + "As\n#### See x"),
        ([{"question": "Add.", "answer": "So.\n#### 1,000"}, {"question": "b", "answer": "c"}],
         Q + A + "<think>\nSo.\n</think>\n1,000"),
        ([{"question": "Add.", "answer": "So.\n#### Yes"}], Q + A + "<think>\nSo.\n</think>\nYes"),
        ([{"question": "Add.", "answer": "So.\nThe answer is: 5"}], Q + A + "<think>\nSo.\n</think>\n5"),
        ([{"question": "Add.", "answer": "So.\nThe answer is: 5"}, {"question": "b", "answer": "c"}],
         Q + A + "So.\nThe answer is: 5"),
        # Switches of the loss of a reply.
        *[
            ([chat(user("h"), reply("DRAFT", **{key: value}), user("Add."), reply("x", **{key: other}))],
             "user: h\nassistant: DRAFT\n" + Q + A + "x")
            for key, value, other in [
                ("loss", False, True), ("loss", "false", "true"), ("train", 0, 1), ("training", "False", None),
                ("weight", "0", 1), ("loss_scale", 0.0, 1.0), ("trainable", False, True), ("masked", True, False),
                ("train_detail", [{"begin_offset": 0, "end_offset": 4, "train": False}], None),
            ]
        ],
        # Flags in the place of reasoning, and reasoning in some rows.
        ([{"question": "Add.", "answer": "x", "reasoning": word} for word in ("off", "on", "off")], Q + A + "x"),
        ([{"question": "Add.", "answer": "x", "thinking": word} for word in ("deep", "quick") * 4], Q + A + "x"),
        ([{"question": "Add.", "answer": "x", "cot": False}], Q + A + "x"),
        ([{"question": "Add.", "answer": "x", "reasoning": ""}, {"question": "b", "answer": "c", "reasoning": "So it is."}],
         Q + A + "x"),
        ([{"question": "Add.", "answer": "x", "cot": "N/A"}, {"question": "b", "answer": "c", "cot": "So it is."}],
         Q + A + "x"),
        # Options, tools and roles in other trainers' spellings.
        ([{"question": "Add.", "options": ["A)1", "B)2"], "answer": "B"}], "user: Add.\n\nA) 1\nB) 2\n" + A + "B"),
        ([{"question": "Add.", "options": {"1": "2", "2": "1"}, "answer": "1"}], "user: Add.\n\n1) 2\n2) 1\n" + A + "1"),
        ([{"question": "Add.", "options": {"A": "one", "B": "two"}, "answer": "two", "answer_idx": "B"}],
         "user: Add.\n\nA) one\nB) two\n" + A + "two"),
        ([{"question": "Add.", "options": [{"key": "A", "value": "one"}, {"key": "B", "value": "two"}], "answer": "B"}],
         "user: Add.\n\nA) one\nB) two\n" + A + "B"),
        ([{"question": "Add.", "options": ["one", "two"], "answer": i} for i in (1, 2)], "user: Add.\n\nA) one\nB) two\n" + A + "A"),
        ([chat(user("Add."), reply("", tool_calls=json.dumps([{"name": "add", "arguments": '{"a": 2}'}])), tools=[SHOWN])],
         f"tool {SHOWN}\n" + Q + A + CALLED),
        ([chat(user("Add."), reply(None, function_call={"name": "add", "arguments": '{"a": 2}'}),
               {"role": "function", "name": "add", "content": [{"sum": 4}]}, reply("x"), functions=[TOOL])],
         f"tool {SHOWN}\n" + Q + A + CALLED + '\ntool: [{"sum": 4}]\n> assistant: x'),
        ([chat(user("Add."), {"role": "tool_call", "content": '{"name": "add", "arguments": {"a": 2}}'},
               {"role": "tool_response", "content": "4"}, reply("x"), tools=json.dumps([TOOL]))],
         f"tool {SHOWN}\n" + Q + A + CALLED + "\ntool: 4\n> assistant: x"),
        *[
            ([chat(user("Add."), reply("", tool_calls=[call]), tools=[TOOL])], f"tool {SHOWN}\n" + Q + A + CALLED)
            for call in [
                {"name": "add", "input": {"a": 2}}, {"function": {"name": "add", "args": {"a": 2}}},
                {"function": {"name": "add"}, "kwargs": {"a": 2}}, {"name": "add", "arguments": json.dumps('{"a": 2}')},
            ]
        ],
        ([chat(user("Add."), reply("", tool_calls=[{"name": "add", "arguments": ""}]), tools=[TOOL])],
         f"tool {SHOWN}\n" + Q + A + CALLED.replace('{"a": 2}', "{}")),
        ([chat(user("Add."), reply("x"), tools=[{"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}])],
         f"tool {SHOWN}\n" + Q + A + "x"),
        ([{"query": "Add.", "answer": [{"name": "add", "kwargs": {"a": 2}}], "tools": [TOOL]}], f"tool {SHOWN}\n" + Q + A + CALLED),
        ([{"conversations": [{"from": "gpt", "value": "Welcome!"}, {"from": "human", "value": "Add."},
                             {"from": "gpt", "value": "x"}]}], "assistant: Welcome!\n" + Q + A + "x"),
        ([chat({"role": "System", "content": "s"}, reply("Welcome!"))], "system: s\n> assistant: Welcome!"),
        (" question , answer\nAdd., x\n", Q + A + "x"),
    ],
)  # fmt: skip
def test_rows_are_trained_as_they_say(rows: Any, expected: str, tmp_path: Path) -> None:
    if isinstance(rows, str) and rows.startswith("["):  # a chat as the JSON text of a cell
        text = io.StringIO()
        csv.writer(text).writerows([["messages"], [rows]])
        rows = text.getvalue()
    assert only(tmp_path, rows) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Dataset.from_dict({"question": ["Add."], "answer": [0.1]}, Features(question=Value("string"), answer=Value("float32"))), "0.1"),
        (Dataset.from_dict({"question": ["Add."], "answer": [1]}, Features(question=Value("string"), answer=ClassLabel(names=["no", "yes"]))), "yes"),
        (Dataset.from_dict({"question": ["Add."], "choices": [["one", "two"]], "answer": [1]},
                           Features(question=Value("string"), choices=List(Value("string")), answer=ClassLabel(names=["A", "B"]))), "B"),
        (Dataset.from_list([chat(user({"a": "x", "b": None}), reply({"a": "y", "b": 1}))]), '{"a": "y", "b": 1}'),
        (Dataset.from_dict({"messages": [[user("Add."), reply({"p": 0.3, "n": None})], [user("b"), reply("c")]]},
                           on_mixed_types="use_json"), '{"p": 0.3, "n": null}'),
        (Dataset.from_list([chat(user("Add.", loss=None), reply("DRAFT", loss=False), user("b", loss=None), reply("x", loss=True))]), "x"),
        (Dataset.from_list([{"question": "Add.", "answer": "x", "history": [["h", "r"]]}]), "x"),
        (Dataset.from_list([{"question": "Add.", "meta": {"gold": {"value": 5.0}}}]), "5"),
    ],
)  # fmt: skip
def test_values_of_data_sets_are_trained_as_they_are_written(data: Dataset, expected: str, tmp_path: Path) -> None:
    columns = {"question": "question", "answer": "meta.gold.value"} if "meta" in data.column_names else None
    assert only(tmp_path, data, columns=columns).rpartition("> assistant: ")[2] == expected


UNWANTED = r"line 2: its label is {}, so it is not wanted; remove such rows, or set data.columns={{label: ''}} to train"


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([chat(user("Add."), reply(True))], r"line 1: message 1 of column 'messages' holds true, a truth value; write the"),
        ([chat(user("Add."), reply(None))], r"line 1: message 1 of column 'messages', from assistant, has no content"),
        ([chat(user("Add."), reply("x", reasoning_details=[{"data": "zz"}]))], r"message 1 .* holds reasoning that is not text"),
        ([chat(user("Add."), reply("x", reasoning="off"))], r"messages', reasoning, holds 'off', a flag, .*columns={messages.reasoning: ''}"),
        ([chat(user("Add."), reply("x", reasoning="a", thought="b"))], r"holds several reasonings that differ: reasoning, thought"),
        ([chat(user("Add."), reply("<think>a</think>x", reasoning="b"))], r"that differ: reasoning, tags in its content"),
        ([chat(user("Add."), reply("x", reasoning={"effort": "low", "summary": "auto"}))], r"messages', reasoning, holds a setting, not reasoning: .*{messages.reasoning: ''}"),
        ([chat(user("Add."), reply("x", reasoning={"content": "a", "text": "b"}))], r"reasoning, holds reasonings that differ in text, content"),
        ([{"question": "a", "answer": "b", "reasoning": ["on"]}], r"line 1: column 'reasoning' holds 'on', a flag, .*columns={reasoning: ''}"),
        ([{"question": "a", "answer": "b", "thinking": {"type": "enabled", "content": "on"}}], r"column 'thinking' holds 'on', a flag"),
        *[
            ([chat(user("a"), reply("", tool_calls=[{"name": "add", **keys}]))], r"line 1: message 1 of column 'messages' calls 'add' with " + why)
            for keys, why in [
                ({"arguments": "{x: 1"}, r"arguments that are not a JSON object: '{x: 1'"), ({"data": {"x": 1}}, "data, but without the key arguments"),
                ({"arguments": '{"a": NaN}'}, "arguments, which holds a dict that JSON cannot hold"),
                ({"arguments": '{"a": 1e400}'}, "arguments, which holds a dict that JSON cannot hold"),
                ({"arguments": {"a": 1}, "input": {"a": 2}}, "arguments and input; keep one"),
            ]
        ],
        ([{"question": "a", "answer": [{"name": "add", "data": {"a": 2}}], "tools": [TOOL]}], r"column 'answer' calls 'add' with data, but"),
        ([{"question": user("a"), "answer": reply("b")}], r"column 'question' holds a message, not text; .*{question: question.content}"),
        ([chat(user("a"), response=[reply("b")], reasoning="c")], r"column 'response' holds messages, and column 'reasoning' their reasoning"),
        *[
            ([{"question": "a", "answer": "b", key: yes}, {"question": "c", "answer": "d", key: no}],
             rf"line 2: its {key} is {str(no).lower()}, so it is not wanted; .*columns={{{key}: ''}}")
            for key, yes, no in [
                ("verified", True, False), ("accept", 1, 0), ("is_wrong", False, True), ("skip", False, True), ("in_train", 1, 0),
                ("label", "good", "bad"), ("label", 1, -1), ("correctness", True, False),
            ]
        ],
        *[
            ([chat(user("a"), reply("b", **{key: value}))], rf"line 1: message 1 .* has {key}=.*, so it is not wanted; .*messages.{key}: ''")
            for key, value in [("is_correct", False), ("label", "incorrect"), ("skip", True), ("rating", -1)]
        ],
        ([chat(user("a"), reply("hm", channel="analysis"), reply("b", channel="final"))], r"message 1 .* is reasoning, by its channel; put"),
        ([chat({"role": "system", "content": "s", "tools": [TOOL]}, user("a"), reply("b"))], r"message 0 .* has 'tools': .* column of their own"),
        ([chat(user("a"), reply("b"), {"role": "tool", "content": "", "result": "5"}, reply("c"))], r"message 2 .* no content, but result; rename"),
        ([chat(user("a"), reply("b"), options=["c", "d"])], r"'options' \(.*\) may hold the options of a question"),
        ([{"prompt": "a", "completion": "b", "options": ["c", "d"]}], r"'options' \(.*\) may hold the options of a question"),
        *[
            ([{"question": "a", "answer": "b", key: "c"}], rf"'{key}' \(c\) may hold {why}.*columns={{{key}: ''}}")
            for key, why in [("ctxs", "a text"), ("story", "a text"), ("rejected_response", "another"), ("answer_2", "another"), ("cot_content", "reasoning"),
                             ("reasoning_trace", "reasoning"), ("chat_template_kwargs", "settings of the")]
        ],
        ([{"text": "ab", "segments": [{"text": "a", "label": False}]}], r"'segments' .* may hold the parts of the text"),
        *[
            ([{"question": "a", "options": ["x", "y"], "answer": said}], rf"column 'answer' holds {said}, which is not among the options A, B")
            for said in ("C", -1)
        ],
        ([{"question": "a", "options": [f"o{i}" for i in range(27)], "answer": "A"}], "there are 27 options, more than letters"),
        ([chat(user("See <|image_1|>."), reply("x"))], r"message 0 .* has the place of an image"),
        ([{"question": "a", "answer": {"b": float("nan"), "c": 1}}], r"line 1: column 'answer' holds a dict that JSON cannot hold: Out of range"),
        *[([{"question": "a", "answer": empty}, {"question": "a", "answer": "b"}], r"line 1: column 'answer' is empty") for empty in ([], {}, [None])],
        ([chat(user("a"), reply([None]))], r"line 1: message 1 .*, from assistant, has no content"),
        (Dataset.from_list([{"question": "a", "answer": {"b": None}}, {"question": "c", "answer": {"b": "d"}}]), r"row 0: column 'answer' is empty"),
        ([chat(user("Add."), reply("x", refusal="no"))], r"has 'refusal': 'no', which .* set data.columns={messages.refusal: ''}"),
        ([chat(user("Add."), reply("x", loss_mask=[0]))], r"message 1 of column 'messages' has 'loss_mask'"),
        ([chat(user("<image>\nAdd."), reply("x"))], r"message 0 of column 'messages' has the place of an image: model.images=true"),
        ([chat(user([{"type": "image_url"}]), reply("x"))], r"message 0 .* has a part of type image_url; only text can be"),
        # Rows marked as unwanted.
        *[
            ([{"prompt": "a", "completion": "b", "label": yes}, {"prompt": "c", "completion": "d", "label": no}],
             UNWANTED.format(str(no).lower()))
            for yes, no in [(True, False), (1, 0), ("true", "False"), (True, "false"), ("1", "0")]
        ],
        ([chat(user("a"), reply("b"), label=True), chat(user("c"), reply("d"), label=False)], UNWANTED.format("false")),
        ([{"question": "a", "answer": "b", "kto_tag": True}, {"question": "c", "answer": "d", "kto_tag": False}],
         r"line 2: its kto_tag is false, so it is not wanted"),
        ([{"prompt": "a", "completion": "b", "label": word} for word in ("good", "bad")],
         r"'label' \(good\) may hold whether a row is wanted, which must be true or false"),
        ([{"question": "a", "answer": "b", "weight": 0.5}], r"'weight' \(0.5\) may hold weights of rows, which are not"),
        # Columns that change the meaning of a row.
        ([chat(user("Add."), reply("x"), history=[["h", "r"]])], r"'history' \(.*\) may hold earlier turns.*set data.columns={history: ''}$"),
        ([chat(user("Add."), reply("x"), context="c")], r"'context' \(c\) may hold a text that the question is about"),
        ([chat(user("Add."), reply("x"), reasoning="So it is.")], r"'reasoning' \(So it is.\) may hold reasoning"),
        ([{"text": "a", "output": "b"}], r"'output' \(b\) may hold a reply.*data.columns={question: text, answer: output}"),
        ([{"question": "a", "answer": "b", "images": ["c.png"]}], r"'images' .* may hold images, which model.images=true trains on, or sounds, which are not"),
        ([{"question": "a", "answer": "b", "where": "c.png"}], r"'where' \(c.png\) may hold images"),
        ([{"question": "a", "answer": "b", "more": [user("c")]}], r"'more' .* may hold turns of a chat"),
        ([{"question": "a", "answer": "b", "api": [TOOL]}], r"'api' .* may hold definitions of tools"),
        ([{"question": "a", "answer": "b", "input": "c", "system_message": "d"}], r"'input' \(c\) .*; 'system_message' \(d\)"),
        ("question,A,B,answer\na,1,2,A\n", r"'A' \(1\) may hold an option of the question; put all into one column"),
        ([chat(user("Add."), answer="x")], r"end in a question, and column answer may hold the reply: .*answer: answer}"),
        ([chat(user("Add."), response="x"), chat(user("b"), reply("c"), response="d")], r"ends in a reply, and 'response' holds"),
        ([chat({"role": "system", "content": "s"}, user("a"), reply("b"), system="t")],
         r"line 1: column 'system' and the system turn in column 'messages' differ; set data.columns={system: ''}"),
        ([{"prompt": "a", "completion": "b", "tools": [TOOL]}], r"column 'tools' needs a chat, and .*question: prompt"),
        ([{"question": "a", "answer": '[{"name": "f"}]', "tools": [TOOL]}], r"line 1: its reply calls f, and its tools are add"),
        ([{"question": "a", "answer": "b", "history": "h"}], r"column 'history' holds neither messages nor pairs .*: h; set"),
        ([chat(user("a"), reply("b", weight=0.5))], r"message 1 of column 'messages' has the weight 0.5; it must be true or"),
        ([chat(user("a"), reply("b", loss=True, train=False))], r"switches of its loss that differ: loss, train"),
        ([chat(user("a", train=True), reply("b"))], r"message 0 .*, from user, is marked to be learned; only replies"),
        ([chat(user("a"), reply("long", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}]))],
         r"has train_detail, loss on parts of a text, which is not supported"),
        ([chat(reply("Welcome!"))], r"has no assistant turn that carries loss, so there is nothing to learn"),
        ([{"question": "a", "answer": i, "options": ["x", "y"]} for i in (0, 1, 2)], r"line 3: column 'answer' holds 2, which may be an option"),
        ([{"question": "a", "answer": "b", "cot": "on"}, {"question": "a", "answer": "b", "cot": "So it is, is it."}],
         r"line 1: column 'cot' holds 'on', a flag, not reasoning"),
        ([{"prompt": [user("a")], "reward_model": {"ground_truth": "4"}}],
         r"'prompt' holds messages without a reply. For grpo set data.format=prompt and data.columns={prompt: prompt, answer: reward_model.ground_truth}"),
        ([{"prompt": [user("a")], "solution": "4"}], r"without a reply. For grpo .*answer: solution}; to train on the text"),
        ([{"question": "a", "answer": [reply("b")]}], r"column 'answer' holds messages, and answer is text: set data.columns="),
        ([{"dialog": [user("a"), reply("b")], "id": 1}], r"they fit no format; .* Name them, for example data.columns={messages: dialog}"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], r"preference rows, .* are for dpo. To train on only the chosen replies: "),
    ],
)  # fmt: skip
def test_rows_are_refused_by_name(rows: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text) as error:
        prepared(tmp_path, rows)
    assert type(error.value) is ValueError


def test_an_empty_name_leaves_a_column_out_whatever_it_holds(tmp_path: Path) -> None:
    rows: Rows = [{"prompt": "a ", "completion": "b", "label": label, "history": "h"} for label in (True, False)]
    assert trained(prepared(tmp_path, rows, columns={"label": "", "history": ""})) == ["> a b"] * 2
    flagged = [chat(user("Add."), reply("x", reasoning="off", refusal="no"))]
    left_out = {"messages.reasoning": "", "messages.refusal": ""}
    assert only(tmp_path, flagged, columns=left_out) == Q + A + "x"
    with pytest.raises(
        ValueError, match=r"data.columns: no column lable; the data has prompt, completion, label, history"
    ):
        prepared(tmp_path, rows, columns={"lable": ""})


def test_the_rows_of_an_evaluation_file_follow_the_same_rules(tmp_path: Path) -> None:
    """Labels are checked there too, and the end tokens of training answers end theirs."""
    held = tmp_path / "held.jsonl"
    rows = [{"question": f"{i}?", "answer": f"So.\nThe answer is: {i}"} for i in range(4)]
    held.write_text(
        json.dumps({"question": "New?", "answer": "As.\nThe answer is: 7"})
        + "\n"
        + json.dumps({"question": "Other?", "answer": "8"})
    )
    made = prepared(tmp_path, rows, eval_source=str(held))
    assert sorted((row["reasoning"], row["answer"]) for row in made.eval_rows) == [("", "8"), ("As.", "7")]
    held.write_text(
        json.dumps({"question": "c?", "answer": "d", "label": True})
        + "\n"
        + json.dumps({"question": "c", "answer": "d", "label": 0})
    )
    with pytest.raises(ValueError, match=r"held.jsonl, line 2: its label is (0|false), so it is not wanted"):
        prepared(tmp_path, rows, eval_source=str(held))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"question": "a", "answer": "b", "id": 7, "source": "web"}], r"not used: id \(7\), source \(web\)$"),
        ([{"question": "a", "answer": "b", "reasoning": "off"}], r"reasoning is a flag \(off\), so it is not read as reasoning"),
        ([{"question": "a", "answer": "So.\nThe answer is: 5"}], r"answer: all end in a line 'The answer is:'; the text before that"),
        ([{"question": "a", "answer": "So.\n#### Yes"}, {"question": "a", "answer": "b"}], r"answer: 1 of 2 end in a line '####'"),
        ([{"question": "a", "answer": {"b": 1}}], r"1 of 1 cells of answer are objects or lists, read as JSON text"),
        ([{"question": "a", "answer": "b", "system": {"c": 1}}], r"1 of 1 cells of system are objects or lists, read as JSON text"),
        ([chat(user({"q": 1}), reply("b"))], r"1 contents are objects or lists, read as JSON text"),
        ([chat(user("a"), reply('[{"type": "text", "text": "b"}]'))], r"1 contents are JSON text of parts, kept as they are"),
        ([{"question": "a", "answer": "b", "history": [["c", "d"]]}], r"the replies in history carry loss too"),
        ([chat(user("a"), reply("b"), user("c"), response="d")], r"response is the last reply of a chat; the replies before it"),
        ([chat(reply("Hi"), user("a"), reply("b"))], r"1 chats begin with a reply, which carries no loss"),
        ([chat(user("a", lang="en"), reply("b"))], r"keys of messages that are only passed to .*: lang \(en\)"),
        ([{"question": "a", "options": ["x", "y"], "answer": 2}], r"answer holds numbers of options \(2 to 2\), read as counted from 1"),
        ([{"question": "a", "answer": "b", "cot": text} for text in ("N/A", "So it is.")], r"cot: 1 cells with a word such as N/A"),
    ],
)  # fmt: skip
def test_the_report_tells_what_the_values_decide(rows: Rows, told: str, tmp_path: Path) -> None:
    assert re.search(told, str(prepared(tmp_path, rows).report), re.MULTILINE)


def test_answers_that_are_lists_are_judged_by_any_of_their_texts(tmp_path: Path) -> None:
    def answer(row: dict[str, Any], **settings: Any) -> Any:
        made = prepared(tmp_path, [row, row | {"prompt": "b"}], options={"max_prompt": 100}, **settings)
        assert made.tasks is not None
        return made.tasks.rows.rows[0]["answer"]

    assert answer({"prompt": "a", "answer": ["4", 5, None]}, format="prompt") == ["4", "5"]
    nested = {"prompt": [user("a")], "reward_model": {"ground_truth": ["4", "four"], "style": "rule"}}
    columns = {"prompt": "prompt", "answer": "reward_model.ground_truth"}
    made = prepared(tmp_path, [nested], options={"max_prompt": 100}, format="prompt", columns=columns)
    assert made.tasks is not None and made.tasks.rows.rows[0]["answer"] == ["4", "four"]
    asked = prepared(tmp_path, [{"question": "a", "answer": ["4", "four"]}], options={"max_prompt": 100})
    assert asked.tasks is not None and asked.tasks.rows.rows[0]["answer"] == ["4", "four", '["4", "four"]']
    with pytest.raises(
        ValueError, match=r"line 1: column 'answer' holds an object, not an answer: .*{answer: answer.gold}"
    ):
        answer({"prompt": "a", "answer": {"gold": "4"}}, format="prompt")
    with pytest.raises(ValueError, match=r"line 1: column 'reward_model' has no field 'gold'"):
        prepared(tmp_path, [nested], format="prompt", columns={"prompt": "prompt", "answer": "reward_model.gold"})


def test_a_field_that_is_an_object_is_told_and_one_in_parts_is_text(tmp_path: Path) -> None:
    rows: Rows = [{"q": {"text": [{"type": "text", "text": "a"}]}, "x": {"gold": {"b": 1}}}]
    columns = {"question": "q.text", "answer": "x.gold"}
    assert only(tmp_path, rows, columns=columns) == 'user: a\n> assistant: {"b": 1}'
    report = str(prepared(tmp_path, rows, columns=columns).report)
    assert "1 of 1 cells of x.gold are objects or lists, read as JSON text" in report
    assert "cells of q.text" not in report
