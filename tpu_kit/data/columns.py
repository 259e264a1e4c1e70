"""Finds the role of each column of a data set by its name, and the reasoning within a text.

`data.columns` names columns with other names. Tags around the reasoning, or closing words before the answer, separate
the reasoning within a text.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from tpu_kit.config.choices import ROLES
from tpu_kit.config.loader import DataConfig

MESSAGE_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold reasoning beside its content; the first with text counts."""

_TABLES = tomllib.loads(Path(__file__).with_name("columns.toml").read_text())
_STATED = re.compile(r"\n[ \t]*The answer is:[ \t]*(\S.*?)\s*\Z", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]")
_MARKED = re.compile(r"####[ \t]*(.*?)\s*\Z")  # on the last line: elsewhere it is a heading of Markdown


def reply(reasoning: str, answer: str, config: DataConfig) -> str:
    """Returns a reply: the reasoning in its tags, then the answer."""
    return f"{config.think_open}\n{reasoning}\n{config.think_close}\n{answer}"


def _split(text: str, config: DataConfig) -> tuple[str, str] | None:
    """Returns the text of a reply before and after the tag that closes its reasoning; None without reasoning.

    A tag after a space, a quote or a bracket is a mention of it, and so are all tags of a text that opens no reasoning
    where it begins but elsewhere.
    """
    opened = text.lstrip().startswith(config.think_open)
    positions = [match.start() for match in re.finditer(re.escape(config.think_close), text)]
    closing = [position for position in positions if text[:position][-1:] not in {*" \t`'\"([*"}]
    position = next(iter(closing or positions[:1] if opened else closing), None)
    if position is None or (not opened and config.think_open in text[:position]):
        return None
    return text[:position], text[position + len(config.think_close) :]


def reasoning_of(text: str, config: DataConfig) -> str:
    """Returns the reasoning of a reply, without white space around it; empty if there is none."""
    parts = _split(text, config)
    return parts[0].lstrip().removeprefix(config.think_open).strip() if parts else ""


def answer_of(text: str, config: DataConfig) -> str:
    """Returns the text of a reply after its reasoning."""
    parts = _split(text, config)
    return parts[1] if parts else text


def in_message(message: Mapping[str, Any], config: DataConfig) -> str:
    """Returns the reasoning of a message, from its own key or from the tags in its content; empty if there is none."""
    for key in MESSAGE_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    content = message.get("content")
    return reasoning_of(content, config) if isinstance(content, str) else ""


def with_own_tags(text: str, config: DataConfig) -> str:
    """Replaces tags of reasoning such as `<|begin_of_thought|>` by those of the configuration.

    A reply becomes `reply` of its reasoning and its answer. In another text, such as a system prompt that names the
    tags, each tag is replaced.
    """
    for opening, closing in _TABLES["tags"]:
        if closing == config.think_close or (opening not in text and closing not in text):
            continue
        for tag in _TABLES["answer_tags"]:
            text = text.replace(tag, "")
        before, closed, after = text.partition(closing)
        if closed and before.lstrip().startswith(opening):
            return reply(before.lstrip().removeprefix(opening).strip(), after.strip(), config)
        text = text.replace(opening, config.think_open).replace(closing, config.think_close)
    return text


def split_solution(text: str, config: DataConfig, *, boxed: bool) -> tuple[str, str]:
    r"""Splits a solution into reasoning and answer; the reasoning is empty if there is none.

    The separators are the tags, a last line "The answer is: ..." (MetaMathQA), "####" on the last line (GSM8K) and, if
    `boxed`, the last \boxed{} (MATH), which stays in the reasoning too.

    Raises:
        ValueError: nothing follows the tags or the "####".
    """
    if (answer := answer_of(text, config)) != text:
        if not answer.strip():
            raise ValueError(f"nothing after {config.think_close}")
        return reasoning_of(text, config), answer.strip()
    if stated := _STATED.search(text):
        return _MARKED.sub("", text[: stated.start()]).strip(), stated[1]
    if marked := _MARKED.search(text):
        if not marked[1]:
            raise ValueError("nothing after ####")
        return text[: marked.start()].strip(), marked[1]
    if boxed and (inner := last_boxed(text)):
        return text.strip(), inner
    return "", text


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} that is closed, nested braces included; None without one."""
    boxes = {box.end() for box in _BOX.finditer(text)}
    last, content = -1, None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and start > last:
                last, content = start, text[start : brace.start()].strip()
    return content


NAMES: Mapping[str, Sequence[Sequence[str]]] = _TABLES["names"]
"""Role -> the names of its columns, compared without case, in groups of falling priority. Two columns of one group are
ambiguous, which is an error."""
SOLUTIONS = NAMES["reasoning"][1]
"""Columns of worked solutions, which may end in a boxed answer: reasoning beside an answer, else both."""

_NEEDED = {
    "messages": ("messages",), "prompt_completion": ("prompt", "completion"), "cot": ("question", "answer"),
    "text": ("text",), "prompt": ("prompt",),
}  # fmt: skip
_ROWS = 1000  # read at a time


@dataclass(frozen=True)
class Layout:
    """The format and the roles of the columns of a data set.

    Attributes:
        format: "cot", "messages", "prompt_completion" or "text".
        columns: role -> column.
        ignored: unused columns.
        filled: whether Arrow stores the arguments of tool calls as a struct, in which None stands for a missing key.
    """

    format: str
    columns: Mapping[str, str]
    ignored: tuple[str, ...]
    filled: bool = False

    def __str__(self) -> str:
        used = ", ".join(f"{role}={column}" for role, column in self.columns.items())
        return f"{self.format} ({used})" + (f", not used: {', '.join(self.ignored)}" if self.ignored else "")


def stores_arguments(feature: Any, name: str = "") -> bool:
    """Returns whether a column stores the arguments of tool calls as a struct of Arrow."""
    if isinstance(feature, dict):
        return name == "arguments" or any(stores_arguments(inner, key) for key, inner in feature.items())
    return hasattr(feature, "feature") and stores_arguments(feature.feature, name)


def empty_columns(rows: Any) -> list[str]:
    """Returns the columns of a `datasets.Dataset` without a value; only these are read to their end."""
    empty = list(rows.column_names)
    for start in range(0, len(rows), _ROWS):
        if not empty:
            break
        # In Arrow's form: images would be decoded otherwise.
        table = rows.select_columns(empty).with_format("arrow")[start : start + _ROWS]
        empty = [name for name in empty if not any(map(is_filled, table.column(name).to_pylist()))]
    return empty


def is_filled(value: Any) -> bool:
    """Returns whether a cell holds more than None, white space, NaN, or a list or struct of only these."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(map(is_filled, value.values()))
    if isinstance(value, list):
        return any(map(is_filled, value))
    return value is not None and value == value


def detect_layout(columns: Sequence[str], config: DataConfig, empty: Collection[str] = ()) -> Layout:
    """Finds the format and the roles of columns; `config.format` and `config.columns` override.

    Args:
        columns: their names.
        config: the data section. With an empty name in `config.columns` no column has that role.
        empty: the columns without a value (`empty_columns`), which get no role by their name.

    Raises:
        ValueError: an unknown role, a missing column, columns that fit no format, or several that fit one role.
    """
    named, listed = dict(config.columns or {}), shorten(", ".join(columns), 500) or "none"
    if absent := sorted({column for column in named.values() if column} - set(columns)):
        raise ValueError(f"data.columns: no column {', '.join(absent)}; the data has {listed}")

    def find(role: str) -> str | None:
        if role in named:
            return named[role] or None
        for group in NAMES[role]:
            fitting = [column for column in columns if column.lower() in group and column not in empty]
            if len(fitting) > 1:
                text = f"ambiguous columns: {role} could be {' or '.join(fitting)}. Say which, as in data.columns="
                raise ValueError(f"{text}{{{role}: {fitting[0]}}}")
            if fitting:
                return fitting[0]
        return None

    fmt = _format(config, find)
    roles = [role for role in ROLES.get(fmt, ()) if fmt in ("cot", "prompt") or role not in ("reasoning", "answer")]
    if fmt == "messages" and "answer" in named:  # the last reply of a chat is in columns of its own
        roles += ["reasoning", "answer"]
    used = {role: column for role in roles if (column := find(role))}
    is_instruction = used.get("question", "").lower() == "instruction"
    if used.get("context", "").lower() == "input" and not is_instruction and "context" not in named:
        del used["context"]
    if used.get("reasoning") == used.get("answer"):  # a solution without another answer is both
        used.pop("answer" if "reasoning" in named else "reasoning", None)
    missing = [role for role in _NEEDED.get(fmt, ()) if role not in used]
    if not fmt or missing:
        wanted = f"format {fmt} needs {' and '.join(missing)}" if fmt else "they fit no format"
        without = f" ({', '.join(empty)} without values)" if empty else ""
        without += " (for grpo, prompts alone are data.format=prompt)" if not fmt and find("prompt") else ""
        example = f"{missing[0]}: COLUMN" if fmt else "question: problem, reasoning: rationale, answer: target"
        raise ValueError(
            f"missing columns: {wanted}; the data has {listed}{without}. Name them, for example "
            f"data.columns={{{example}}}, or set data.format"
        )
    return Layout(fmt, used, tuple(column for column in columns if column not in used.values()))


def _format(config: DataConfig, find: Callable[[str], str | None]) -> str:
    """Returns `data.format`, or the first format that the columns fit; empty if they fit none."""
    if config.format != "auto":
        return config.format
    named = {role for role, column in (config.columns or {}).items() if column} - {"system"}
    for fmt in ("messages", "prompt_completion", "text"):
        if named & (set(ROLES[fmt]) - set(ROLES["cot"])):
            return fmt
    if named:
        return "cot"
    if find("messages"):
        return "messages"
    if find("prompt") and find("completion") and not find("reasoning"):
        return "prompt_completion"
    if find("question") and find("answer"):
        return "cot"
    return "text" if find("text") else ""


def role_of(turn: Mapping[str, Any]) -> Any:
    """Returns the role of a message as chat templates name it."""
    role = turn.get("role") or turn.get("from")
    return _TABLES["roles"].get(str(role), role)
