"""Each reply is trained as the chat template renders it in the last turn, in as few documents as possible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.test_chat_encoding import TRL
from tests.support.tiny_tokenizer import CHATML, tiny_tokenizer
from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat.chat_documents import Document
from tpu_kit.data.chat.chat_encoding import Encoder, decoded_example
from tpu_kit.data.prepare import prepare
from tpu_kit.data.rows.columns import detect_layout
from tpu_kit.data.rows.field_values import RowError

SPECIAL = ("<|im_end|>", "<|im_start|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|call|>")


def talk(replies: int, *, tools: bool = False) -> dict[str, Any]:
    """A chat, or an agent's steps: some calls have no text, and a user asks once between them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for i in range(replies):
        if not tools or i in (0, 3):
            messages.append({"role": "user", "content": f"Question {i}?"})
        messages.append({"role": "assistant", "content": f"Reply {i}."})
        if tools and i not in (2, replies - 1):
            call = {"type": "function", "id": f"call{i:05}", "function": {"name": "add", "arguments": {"a": i}}}
            messages[-1] |= {"tool_calls": [call], "content": "" if i % 2 else f"Reply {i}."}
            messages.append({"role": "tool", "name": "add", "tool_call_id": f"call{i:05}", "content": f"result {i}"})
    definition = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {}}}
    return {"messages": messages} | ({"tools": [{"type": "function", "function": definition}]} if tools else {})


def encoder(template: str, row: dict[str, Any]) -> Encoder:
    tokenizer = tiny_tokenizer(template, special=(*SPECIAL, "<bos>"), eos="<|im_end|>")
    tokenizer.bos_token = "<bos>"
    config = DataConfig(max_length=10_000, date="2025-01-01")
    return Encoder(tokenizer, config, detect_layout(list(row), config))


def replies(documents: list[Document]) -> list[tuple[str, str]]:
    """The prompt and the text of each reply."""
    return [(each.text[:start], each.text[start:end]) for each in documents for start, end in each.spans]


@pytest.mark.parametrize("name", [path.stem for path in sorted(TRL.glob("*.jinja"))])
@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
def test_a_reply_is_rendered_as_the_last_turn(name: str, tools: bool) -> None:
    row = talk(7, tools=tools)
    made = encoder((TRL / f"{name}.jinja").read_text(), row)
    read = made.conversation(row)
    try:
        found = replies(made.documents(read))
    except RowError:
        assert tools or "gemma" in name or "smolvlm" in name or "idefics" in name or "llava" in name, name
        return
    turns = [i for i, message in enumerate(read.messages) if message["role"] == "assistant"]
    assert len(found) == 7
    for i, reply in zip(turns, found, strict=True):
        alone = [{**m, "train": False} if m["role"] == "assistant" and n < i else m
                 for n, m in enumerate(read.messages[: i + 1])]  # fmt: skip
        assert replies(made.documents(read._replace(messages=alone, first=i))) == [reply]


def test_one_prompt_has_one_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 writes an empty block of reasoning into the last reply, but not into earlier replies."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    chat = talk(4)["messages"][1:]
    rows = [{"messages": chat[:2]}, {"messages": chat}, talk(3, tools=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tiny_tokenizer((TRL / "qwen3.jinja").read_text())
    config = DataConfig(source=str(tmp_path / "rows.jsonl"), eval_rows=0, max_length=4096)
    made = prepare(config, tokenizer)
    targets: dict[str, set[str]] = {}
    for number in range(len(made.train.documents)):
        before = ""
        for text, loss in decoded_example(tokenizer, made.example(number)):
            if loss:
                targets.setdefault(before, set()).add(text)
            before += text
    assert all(len(texts) == 1 for texts in targets.values()) and len(targets) == 4 + 3
    report = made.report
    assert (report.rows_used, report.documents) == (3, 1 + 4 + 3) and report.all_tokens > 1.5 * report.whole_tokens
    assert report.whole_tokens == sum(
        len(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"))["input_ids"]) for row in rows
    )
    times = report.all_tokens / report.whole_tokens
    text = (
        f"with {report.all_tokens:,} tokens, {times:.1f} times the {report.whole_tokens:,} of one document a chat. WARN"
    )
    assert text in str(made)
    one = prepare(config, tiny_tokenizer((TRL / "qwen3_training.jinja").read_text()))
    assert one.report.documents == 3 and "WARNING" not in str(one)


@pytest.mark.parametrize(("name", "tools"), [("chatml", False), ("llama3_1", False), ("qwen2_5", True)])
def test_rendering_is_linear_in_the_length_of_a_chat(name: str, tools: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    template = CHATML if name == "chatml" else (TRL / f"{name}.jinja").read_text()
    rendered: list[int] = []
    render = Encoder.render
    monkeypatch.setattr(
        Encoder, "render", lambda self, messages, *rest, **more: rendered.append(len(messages)) or render(
            self, messages, *rest, **more
        )
    )  # fmt: skip
    counts = []
    for length in (64, 256):
        rendered.clear()
        row = talk(length, tools=tools)
        made = encoder(template, row)
        (document,) = made.documents(made.conversation(row))
        assert len(document.spans) == length
        counts.append(sum(rendered) / len(row["messages"]))
    assert counts[1] < 1.1 * counts[0] < 25
