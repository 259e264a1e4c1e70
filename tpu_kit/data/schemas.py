"""Reads the conversation of a row from the columns that `columns.py` found.

The formats are `cot` (question, reasoning, answer), `messages` (chats, with tools), `prompt_completion` and `text`.
`chat_encoding.py` encodes the conversation as token ids.
"""

import contextlib
import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping
from typing import Any, NamedTuple

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.columns import (
    SOLUTIONS,
    Layout,
    answer_of,
    in_message,
    is_filled,
    reasoning_of,
    reply,
    role_of,
    split_solution,
    with_own_tags,
)

_PLAIN = str.maketrans("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT DOUBLE QUOTATION MARK}"
                       "\N{RIGHT DOUBLE QUOTATION MARK}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "''\"\"---")  # fmt: skip
NO_REPLY = "..."
"""The reply in the conversation of a row that has none; no run trains on it."""

_SHAREGPT_KEYS = {"from": "role", "value": "content"}


class RowError(ValueError):
    """One row cannot be used; the caller adds its number."""


class Conversation(NamedTuple):
    """The content of one row.

    Attributes:
        messages: a chat, or plain text.
        first: index of the first message (in plain text, character) after the prompt, which carries no loss.
        tools: JSON schemas for the chat template.
    """

    messages: list[dict[str, Any]] | str
    first: int
    tools: list[Any] | None = None

    @property
    def asked(self) -> Any:
        """The messages before the last reply, or the text before the completion."""
        if isinstance(self.messages, str):
            return self.messages[: self.first]
        return self.messages[: max(i for i, message in enumerate(self.messages) if message["role"] == "assistant")]

    @property
    def questions(self) -> list[int]:
        """The hash of the prompt of each trained reply; the last one is the question of the row.

        The hash is of all turns before the reply without system turns, and the same for chats, columns and plain text.
        """
        if isinstance(self.messages, str):
            return [_hash(self.messages[: self.first] or self.messages)]
        hashes, prompt = [], 0
        for i, message in enumerate(self.messages):
            if i >= self.first and learns(message):
                hashes.append(prompt)
            if message["role"] != "system":
                said = f"{message.get('content')}{message.get('tool_calls') or ''}"
                prompt = _hash(f"{prompt} {message['role']}: {said}" if prompt else said)
        return hashes


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(normalised(text).encode(), digest_size=8).digest(), "little", signed=True)


def learns(message: Mapping[str, Any]) -> bool:
    """Returns whether a message is a reply that carries loss, which `weight: 0` and `train: false` prevent."""
    return message["role"] == "assistant" and message.get("weight") != 0 and message.get("train") is not False


def normalised(text: str) -> str:
    """Returns a question without case, extra white space, typographic quotes and dashes, and final punctuation."""
    text = unicodedata.normalize("NFC", text).translate(_PLAIN).casefold()
    return " ".join(text.split()).rstrip(" .?:;,\"'")


def conversation(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Reads one row.

    Raises:
        RowError: a cell is empty or has the wrong type for its role, or no assistant turn carries loss.
    """
    columns = layout.columns
    if layout.format == "text":
        return Conversation(_cell(row, columns["text"]), 0)
    system = _system(row, layout, config)
    if layout.format == "cot":
        question, reasoning, answer = problem(row, layout, config).values()
        content = reply(reasoning, answer, config) if reasoning else answer
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
        messages = _messages(turns, columns["question"], 1, system, config)
        return Conversation(messages, len(messages) - 1)
    tools = without_none(_parsed(row.get(columns["tools"]), columns["tools"])) or None if "tools" in columns else None
    if layout.format == "messages":
        turns = _parsed(row.get(columns["messages"]), columns["messages"])
        if "answer" in columns:
            turns = [*turns, _last_turn(turns, row, columns, config)] if isinstance(turns, list) else turns
        messages = _messages(turns, columns["messages"], 0, system, config, layout.filled)
        replies = [i for i, message in enumerate(messages) if learns(message)]
        return Conversation(messages, replies[-1 if "answer" in columns else 0], tools)
    if layout.format == "prompt":
        asked = row.get(columns["prompt"])
        turns = asked if isinstance(asked, list) else [{"role": "user", "content": _cell(row, columns["prompt"])}]
        turns = [*turns, {"role": "assistant", "content": NO_REPLY}]
        messages = _messages(turns, columns["prompt"], len(turns) - 1, system, config, layout.filled)
        return Conversation(messages, len(messages) - 1, tools)
    if row.get("label") is False:  # KTO's mark of a completion
        raise RowError("its label is false, so its completion is not wanted; remove such rows")
    prompt, completion = row.get(columns["prompt"]), row.get(columns["completion"])
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("prompt and completion must both be text or both be lists of messages")
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages(prompt + completion, columns["completion"], len(prompt), system, config, layout.filled)
        return Conversation(messages, len(messages) - len(completion), tools)
    asked = _cell(row, columns["prompt"])
    return Conversation(asked + _cell(row, columns["completion"]), len(asked))


def problem(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> dict[str, str]:
    """Returns question, reasoning (empty if the row has none) and answer of a chain-of-thought row as text.

    The question includes its context and its options.

    Raises:
        RowError: a cell is empty, or is neither text nor a number.
    """
    columns = layout.columns
    question, options = _cell(row, columns["question"]), _options(row, columns)
    if "context" in columns and is_filled(row.get(columns["context"])):
        context = _cell(row, columns["context"])
        # A passage comes before the question about it; an instruction comes before its input.
        first = columns["question"].lower() == "instruction"
        question = f"{question}\n\n{context}" if first else f"{context}\n\n{question}"
    if options:
        question += "\n\n" + "\n".join(f"{label}) {text}" for label, text in options.items())
    reasoning, answer = _solved(row, columns, config, options)
    return {"question": question, "reasoning": reasoning, "answer": answer}


def _solved(
    row: Mapping[str, Any], columns: Mapping[str, str], config: DataConfig, options: Mapping[str, str]
) -> tuple[str, str]:
    """Returns the reasoning (empty without one) and the answer from the columns of a row."""
    answer = with_own_tags(_chosen(_cell(row, columns["answer"]), options, columns["answer"]), config)
    if "reasoning" not in columns:
        try:
            return split_solution(answer, config, boxed=columns["answer"].lower() in SOLUTIONS)
        except ValueError as error:
            raise RowError(f"column {columns['answer']!r} has {error}") from error
    reasoning = with_own_tags(_cell(row, columns["reasoning"]), config)
    if answer_of(answer, config) != answer:
        raise RowError(
            f"column {columns['answer']!r} holds reasoning in tags, and column {columns['reasoning']!r} holds some "
            "too; set data.columns={reasoning: ''} to use the former"
        )
    return reasoning_of(reasoning, config) or reasoning, answer


def _options(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, str]:
    """Returns the options of a row by label, from a list of texts or {"label": [...], "text": [...]}."""
    column = columns.get("options", "")
    value = row.get(column)
    if not is_filled(value):
        return {}
    texts, labels = value, None
    if isinstance(value, Mapping):
        texts, labels = value.get("text"), value.get("label")
    if not isinstance(texts, list) or not all(isinstance(x, str | int | float) for x in texts):
        raise RowError(f"column {column!r} holds no list of options: {str(value)[:60]}")
    labels = labels or [chr(ord("A") + i) for i in range(len(texts))]
    return {str(label): str(x).strip() for label, x in zip(labels, texts, strict=True)}


def _chosen(answer: str, options: Mapping[str, str], column: str) -> str:
    """Returns the answer, or the label of the option with that number, counted from 0."""
    if not options or not answer.strip().isdecimal() or answer.strip() in options:
        return answer
    number, labels = int(answer), list(options)
    if (answer.strip() in options.values()) != (number < len(labels)):
        return labels[number] if number < len(labels) else answer
    raise RowError(f"column {column!r} holds {answer}: whether that is an option or its number is not certain")


def final_answer(talk: Conversation, config: DataConfig) -> str:
    """Returns the last assistant turn or the completion, without reasoning; empty without one."""
    if isinstance(talk.messages, str):
        said = talk.messages[talk.first :] if talk.first else ""
    else:
        said = next(turn.get("content") or "" for turn in reversed(talk.messages) if turn["role"] == "assistant")
    return answer_of(str(said), config).strip()


def _system(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> str | None:
    text = row.get(layout.columns["system"]) if "system" in layout.columns else None
    if text is not None and not isinstance(text, str):
        raise RowError(f"column {layout.columns['system']!r} holds a {type(text).__name__}, text is needed")
    return with_own_tags(text, config) if text else config.system_prompt


def _last_turn(
    turns: list[Any], row: Mapping[str, Any], columns: Mapping[str, str], config: DataConfig
) -> dict[str, Any]:
    if turns and isinstance(turns[-1], Mapping) and role_of(turns[-1]) == "assistant":
        raise RowError(f"column {columns['messages']!r} ends in a reply, and {columns['answer']!r} holds another")
    reasoning, answer = _solved(row, columns, config, {})
    role, content = ("from", "value") if turns and "from" in turns[0] else ("role", "content")
    return {role: "assistant", content: reply(reasoning, answer, config) if reasoning else answer}


def _messages(
    value: Any, column: str, first: int, system: str | None, config: DataConfig, filled: bool = False
) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise RowError(f"column {column!r} must be a list of messages, got {str(value)[:60]!r}")
    messages = [without_none(message, filled) for message in value]
    if any("from" in message for message in messages):  # ShareGPT
        messages = [{_SHAREGPT_KEYS.get(key, key): value for key, value in message.items()} for message in messages]
        messages = [{**message, "role": role_of(message)} for message in messages]
    for i, message in enumerate(messages):
        name = f"message {i} of column {column!r}"
        if not isinstance(message.get("role"), str):
            raise RowError(f"{name} has no role")
        if message.get("weight", 1) not in (0, 1):
            raise RowError(f"{name} has the weight {message['weight']}; it must be 0 or 1")
        message |= _tool_calls(message, name)
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], name)
        if isinstance(message.get("content"), str) and message["role"] in ("assistant", "system"):
            message["content"] = with_own_tags(message["content"], config)
        said = message.get("content") or message.get("tool_calls") or in_message(message, config) or None
        if i >= first and message["role"] == "assistant" and not (said.strip() if isinstance(said, str) else said):
            raise RowError(f"{name}, the completion, is empty")
        if said is None and "content" not in message:
            raise RowError(f"{name}, from {message['role']}, has no content")
    if not any(map(learns, messages[first:])):
        roles = ", ".join(sorted({message["role"] for message in messages}))
        text = f"column {column!r} has no assistant turn that carries loss, so there is nothing to learn"
        raise RowError(f"{text}; its turns are from {roles}")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _tool_calls(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the parts of a message that change for chat templates: calls are tool calls, with decoded arguments."""
    made: dict[str, Any] = {}
    calls = list(message.get("tool_calls") or ())
    if message["role"] == "function_call":  # ShareGPT: the content is a call, or a list of calls
        try:
            said = json.loads(message["content"])
            calls = [
                {"type": "function", "function": dict(call)} for call in (said if isinstance(said, list) else [said])
            ]
        except (TypeError, ValueError) as error:
            raise RowError(f"{name} holds no function call as JSON: {str(message.get('content'))[:60]!r}") from error
        made = {"role": "assistant", "content": ""}
    for i, call in enumerate(calls):
        function = call.get("function", call)
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(json.JSONDecodeError):
                decoded = {**function, "arguments": json.loads(function["arguments"])}
                calls[i] = {**call, "function": decoded} if "function" in call else decoded
    return made | ({"tool_calls": calls} if calls else {})


def _joined(parts: list[Any], name: str) -> str:
    """Returns the text of a message in parts, as in chats with images."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"{name} has a part of type {kind}; only text can be trained on")
    return "".join(part["text"] for part in parts)


def _parsed(value: Any, column: str) -> Any:
    """Returns a value that a file holds as JSON text, as CSV files do."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise RowError(f"column {column!r} is not valid JSON: {error}: {value[:60]!r}") from error


def without_none(value: Any, filled: bool = True) -> Any:
    """Removes the None of missing keys; in the arguments of tool calls only if Arrow `filled` them in."""
    if isinstance(value, Mapping):
        return {
            key: item if key == "arguments" and not filled else without_none(item, filled)
            for key, item in value.items()
            if item is not None
        }
    return [without_none(item, filled) for item in value] if isinstance(value, list) else value


def _cell(row: Mapping[str, Any], column: str) -> str:
    """Returns a cell as text; whole numbers have no decimal point."""
    value = row.get(column)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"column {column!r} holds {value}, which is no answer")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"column {column!r} is empty")
    if not isinstance(value, str):
        raise RowError(f"column {column!r} holds a {type(value).__name__}, text is needed: {str(value)[:60]}")
    return value
