"""What a row of a data set says: its format, found from the column names, and its conversation.

Four formats are known: `cot` (question, reasoning, answer), `messages` (chats, with tools), `prompt_completion` and
`text`. `encoder.py` turns the conversation into token ids.
"""

import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tpu_kit.config import DataConfig

NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("messages", "conversations", "conversation"),
    "tools": ("tools",),
    "system": ("system", "system_prompt"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "text": ("text",),
    "question": ("question", "problem", "prompt", "instruction", "query", "input"),
    "context": ("input", "context"),
    "reasoning": (
        "reasoning", "rationale", "thinking", "thought", "thoughts", "cot", "complex_cot", "chain_of_thought",
        "reasoning_content", "solution", "explanation",
    ),
    "answer": ("answer", "final_answer", "response", "output", "target", "completion"),
}  # fmt: skip
"""Role -> column names it is recognised by, compared without case; the first that is present wins."""

ROLES: dict[str, tuple[str, ...]] = {
    "cot": ("system", "question", "context", "reasoning", "answer"),
    "messages": ("system", "messages", "tools"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "text": ("text",),
}
"""Format -> the roles it reads."""

_PLAIN = str.maketrans("\N{LEFT SINGLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}\N{LEFT DOUBLE QUOTATION MARK}"
                       "\N{RIGHT DOUBLE QUOTATION MARK}\N{EN DASH}\N{EM DASH}\N{MINUS SIGN}", "''\"\"---")  # fmt: skip
_OPTIONAL = {"system", "context", "reasoning", "tools"}
_SHAREGPT_KEYS = {"from": "role", "value": "content"}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}


class RowError(ValueError):
    """One row cannot be used; the caller adds which."""


@dataclass(frozen=True)
class Layout:
    """How the columns of a data set are read.

    Attributes:
        format: "cot", "messages", "prompt_completion" or "text".
        columns: role -> column.
        ignored: columns that are not used.
    """

    format: str
    columns: Mapping[str, str]
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        used = ", ".join(f"{role}={column}" for role, column in self.columns.items())
        return f"{self.format} ({used})" + (f", not used: {', '.join(self.ignored)}" if self.ignored else "")


class Conversation(NamedTuple):
    """What one row says.

    Attributes:
        messages: a chat, or the plain text of a row that is none.
        first: the messages (or, of plain text, the characters) before this are the prompt and carry no loss.
        tools: JSON schemas for the chat template.
    """

    messages: list[dict[str, Any]] | str
    first: int
    tools: list[Any] | None = None

    @property
    def question(self) -> str:
        """What is asked, by which rows of the train and the held-out split are told apart."""
        if isinstance(self.messages, str):
            return self.messages[: self.first] or self.messages
        asked = [message for message in self.messages[: self.first] if message["role"] != "system"]
        if len(asked) == 1:  # so that it is the same in a chat, in a row of columns and in plain text
            return str(asked[0].get("content"))
        return "\n".join(f"{message['role']}: {message.get('content')}" for message in asked)


def normalised(text: str) -> str:
    """A question without what changes nothing in it: case, white space, the forms of quotes and dashes, its end."""
    text = unicodedata.normalize("NFC", text).translate(_PLAIN).casefold()
    return " ".join(text.split()).rstrip(" .?:;,\"'")


def detect_layout(columns: Sequence[str], config: DataConfig) -> Layout:
    """Recognise the format from the column names; `config.format` and `config.columns` override.

    Raises:
        ValueError: an unknown role, a column that is not there, or columns that fit no format.
    """
    given = dict(config.columns or {})
    if unknown := sorted(set(given) - set(NAMES)):
        raise ValueError(f"data.columns: unknown role {', '.join(unknown)}; the roles are {', '.join(NAMES)}")
    if absent := sorted(set(given.values()) - set(columns)):
        raise ValueError(f"data.columns: no column {', '.join(absent)}; the data has {', '.join(columns)}")
    found = given | {role: column for role in NAMES if role not in given and (column := _find(role, columns))}
    fmt = config.format if config.format != "auto" else _guess(found, given)
    if fmt == "cot":
        if "context" not in given and found.get("question", "").lower() != "instruction":
            found.pop("context", None)  # an `input` column is context to an `instruction` only
        if "answer" not in found and "reasoning" in found and "reasoning" not in given:
            found["answer"] = found.pop("reasoning")  # a solution alone: all of it is the answer
    missing = [role for role in ROLES.get(fmt, ()) if role not in found and role not in _OPTIONAL]
    if not fmt or missing:
        wanted = f"format {fmt} needs {' and '.join(missing)}" if fmt else "they fit no format"
        raise ValueError(
            f"missing columns: {wanted}; the data has {', '.join(columns) or 'none'}. Name them, for example "
            "data.columns={question: problem, reasoning: rationale, answer: target}, or set data.format"
        )
    used = {role: found[role] for role in ROLES[fmt] if role in found}
    return Layout(fmt, used, tuple(column for column in columns if column not in used.values()))


def _find(role: str, columns: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in NAMES[role] if name in lower), None)


def _guess(found: Mapping[str, str], given: Mapping[str, str]) -> str:
    for fmt in ("messages", "prompt_completion", "text"):
        if set(ROLES[fmt]) & set(given) - {"system"}:
            return fmt
    if set(given) - {"system"}:
        return "cot"
    if "messages" in found:
        return "messages"
    if "prompt" in found and "completion" in found and "reasoning" not in found:
        return "prompt_completion"
    if "question" in found and ("answer" in found or "reasoning" in found):
        return "cot"
    return "text" if "text" in found else ""


def conversation(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Read one row.

    Raises:
        RowError: a cell is empty or of another type than its role needs, or no assistant turn carries loss.
    """
    columns = layout.columns
    if layout.format == "text":
        return Conversation(_cell(row, columns["text"]), 0)
    if layout.format == "cot":
        return _chain_of_thought(row, layout, config)
    system = _system(row, layout, config)
    tools = _without_none(_parsed(row.get(columns["tools"]), columns["tools"])) or None if "tools" in columns else None
    if layout.format == "messages":
        messages = _messages(_parsed(row.get(columns["messages"]), columns["messages"]), columns["messages"], 0, system)
        return Conversation(messages, next(i for i, m in enumerate(messages) if m["role"] == "assistant"), tools)
    prompt, completion = row.get(columns["prompt"]), row.get(columns["completion"])
    if isinstance(prompt, list) != isinstance(completion, list):
        raise RowError("prompt and completion must both be text or both be lists of messages")
    if isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages(prompt + completion, columns["completion"], len(prompt), system)
        return Conversation(messages, len(messages) - len(completion), tools)
    asked = _cell(row, columns["prompt"])
    return Conversation(asked + _cell(row, columns["completion"]), len(asked))


def reply(reasoning: str, answer: str, config: DataConfig) -> str:
    """Return the reply of a chain-of-thought row: the reasoning in its tags, then the answer."""
    return f"{config.think_open}\n{reasoning}\n{config.think_close}\n{answer}"


def reasoning_of(text: str, config: DataConfig) -> str:
    """Return the reasoning in what `reply` made, without white space around it; empty if there is none."""
    before, closed, _ = text.partition(config.think_close)
    return before.removeprefix(config.think_open).strip() if closed else ""


def problem(row: Mapping[str, Any], layout: Layout) -> dict[str, str]:
    """Return question, reasoning (empty if the data has none) and answer of a chain-of-thought row as text.

    Raises:
        RowError: a cell is empty or neither text nor a number.
    """
    columns = layout.columns
    question, answer = _cell(row, columns["question"]), _cell(row, columns["answer"])
    reasoning = _cell(row, columns["reasoning"]) if "reasoning" in columns else ""
    if "context" in columns and row.get(columns["context"]) not in (None, ""):
        question += "\n\n" + _cell(row, columns["context"])
    if "reasoning" not in columns and "####" in answer:  # GSM8K's way to write both in one column
        reasoning, _, answer = (part.strip() for part in answer.rpartition("####"))
        if not answer:
            raise RowError(f"column {columns['answer']!r} has nothing after ####")
    return {"question": question, "reasoning": reasoning, "answer": answer}


def _chain_of_thought(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    question, reasoning, answer = problem(row, layout).values()
    content = reply(reasoning, answer, config) if reasoning else answer
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": content}]
    messages = _messages(turns, layout.columns["question"], 1, _system(row, layout, config))
    return Conversation(messages, len(messages) - 1)


def _system(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> str | None:
    """Return the row's own system turn, else the one of the settings."""
    own = row.get(layout.columns["system"]) if "system" in layout.columns else None
    if own is not None and not isinstance(own, str):
        raise RowError(f"column {layout.columns['system']!r} holds a {type(own).__name__}, text is needed")
    return own or config.system_prompt


def _messages(value: Any, column: str, first: int, system: str | None) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise RowError(f"column {column!r} must be a list of messages, got {str(value)[:60]!r}")
    messages = [_without_none(message) for message in value]
    if any("from" in message for message in messages):  # ShareGPT
        messages = [{_SHAREGPT_KEYS.get(key, key): value for key, value in message.items()} for message in messages]
        messages = [{**m, "role": _SHAREGPT_ROLES.get(m.get("role"), m.get("role"))} for m in messages]
    for i, message in enumerate(messages):
        name = f"message {i} of column {column!r}"
        if not isinstance(message.get("role"), str):
            raise RowError(f"{name} has no role")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], name)
        said = message.get("content") or message.get("tool_calls") or message.get("reasoning_content")
        if i >= first and message["role"] == "assistant" and not (said.strip() if isinstance(said, str) else said):
            raise RowError(f"{name}, the completion, is empty")
        if said is None and "content" not in message:
            raise RowError(f"{name}, from {message['role']}, has no content")
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise RowError(f"column {column!r} has no assistant turn, so nothing to learn from")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _joined(parts: list[Any], name: str) -> str:
    """Return the text of a message that is given in parts, as chats with images are."""
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RowError(f"{name} has a part of type {kind}; only text can be trained on")
    return "".join(part["text"] for part in parts)


def _parsed(value: Any, column: str) -> Any:
    """Return a list that a file holds as JSON text, as all files of CSV must."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise RowError(f"column {column!r} is not valid JSON: {error}: {value[:60]!r}") from error


def _without_none(value: Any) -> Any:
    """Drop the None that Arrow puts in for absent keys of a struct."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _cell(row: Mapping[str, Any], column: str) -> str:
    """Return a cell as text; whole numbers are written without a decimal point."""
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
