"""Finds the role of each column of a data set, and the reasoning within a text.

The names of the columns and their first values decide the roles, never the name of the data set.
`tests/data/test_columns.py` has a row of each reasoning data set that the rules cover. Tags around the reasoning, or
closing words before the answer, separate the reasoning within a text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tpu_kit.config.choices import ROLES
from tpu_kit.config.loader import DataConfig

MESSAGE_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that hold reasoning beside its content; the first with text counts."""

_TAGS = (("<think>", "</think>"), ("<|begin_of_thought|>", "<|end_of_thought|>"))
_ANSWER_TAGS = ("<|begin_of_solution|>", "<|end_of_solution|>")
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
    places = [match.start() for match in re.finditer(re.escape(config.think_close), text)]
    own = [place for place in places if text[:place][-1:] not in {*" \t`'\"([*"}]
    place = next(iter(own or places[:1] if opened else own), None)
    if place is None or (not opened and config.think_open in text[:place]):
        return None
    return text[:place], text[place + len(config.think_close) :]


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
    for opening, closing in _TAGS:
        if closing == config.think_close or (opening not in text and closing not in text):
            continue
        for tag in _ANSWER_TAGS:
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
    last, found = -1, None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened:
            start = opened.pop()
            if start in boxes and start > last:
                last, found = start, text[start : brace.start()].strip()
    return found


_TRACES = (
    "reasoning", "rationale", "thinking", "thought", "thoughts", "cot", "complex_cot", "chain_of_thought",
    "reasoning_content", "thinking_trajectories", "thinking_trajectory", "deepseek_thinking_trajectory",
    "gemini_thinking_trajectory", "deepseek_reasoning",
)  # fmt: skip
_SOLUTIONS = ("solution", "generated_solution", "r1_solution_1", "deepseek_solution")
_REPLIES = (
    "answer", "final_answer", "expected_answer", "response", "output", "target", "completion", "attempt",
    "deepseek_attempt", "gemini_attempt",
)  # fmt: skip

NAMES: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages", "conversations", "conversation"),),
    "tools": (("tools",),),
    "system": (("system", "system_prompt"),),
    "prompt": (("prompt",),),
    "completion": (("completion",),),
    "text": (("text",),),
    "question": (("question", "problem", "query", "instruction", "prompt"), ("input",), ("source",)),
    "context": (("context", "passage", "article", "support", "hint"), ("input",)),
    "options": (("options", "choices"),),
    "reasoning": (_TRACES, _SOLUTIONS, ("explanation",)),
    "answer": (_REPLIES, ("answers", "answerkey", "correct_answer", "correct"), ("content",)),
}
"""Role -> the names of its columns, compared without case, in groups of falling priority. Two columns of one group with
different values are ambiguous, which is an error."""

_BESIDE = {("question", "source"): "target", ("answer", "content"): "reasoning_content"}
"""(role, name) -> the column that must exist beside it for the name to have this role."""

KNOWN = frozenset(name for role, groups in NAMES.items() for name in chain(*groups) if (role, name) not in _BESIDE)
"""Every name that has a role by itself."""

_TELLING = {"messages": {"messages", "tools"}, "prompt_completion": {"prompt", "completion"}, "text": {"text"}}
_SHAREGPT_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "observation": "tool"
}  # fmt: skip
_NEEDED = {
    "cot": ("question", "answer"), "messages": ("messages",), "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}  # fmt: skip
_SWITCHES = {"on", "off", "yes", "no", "true", "false"}  # values of a column `reasoning` without text
_SAMPLE = 100  # values read of each column
_AT_A_TIME = 1000  # rows

Values = Mapping[str, Sequence[Any]]
"""Column -> its first values that are not empty; an empty list if the whole column is empty."""


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


class Ambiguous(ValueError):
    """Several columns could have a role."""


def first_values(rows: Any) -> dict[str, list[Any]]:
    """Returns the first values of each column that are not empty.

    Args:
        rows: a `datasets.Dataset`. Only a column without values is read to its end.
    """
    found: dict[str, list[Any]] = {name: [] for name in rows.column_names}
    for start in range(0, len(rows), _AT_A_TIME):
        wanted = [name for name, values in found.items() if len(values) < _SAMPLE]
        if not wanted:
            break
        # In Arrow's form: images would be decoded otherwise.
        table = rows.select_columns(wanted).with_format("arrow")[start : start + _AT_A_TIME]
        for name in wanted:
            values = (value for value in table.column(name).drop_null().to_pylist() if is_filled(value))
            found[name] = [*found[name], *values][:_SAMPLE]
    return found


def is_filled(value: Any) -> bool:
    """Returns whether a cell holds more than None, white space, NaN, or a list or struct of only these."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(map(is_filled, value.values()))
    if isinstance(value, list):
        return any(map(is_filled, value))
    return value is not None and value == value


def detect_layout(columns: Sequence[str], config: DataConfig, values: Values | None = None) -> Layout:
    """Finds the format and the roles of columns; `config.format` and `config.columns` override.

    Args:
        columns: their names.
        config: the data section. With an empty name in `config.columns` no column has that role.
        values: of `first_values`: a column without values has no role, and columns with the same values are not
            ambiguous. None uses the names alone.

    Raises:
        ValueError: an unknown role, a missing column, columns that fit no format, or several that fit one role.
    """
    given = dict(config.columns or {})
    if unknown := sorted(set(given) - set(NAMES)):
        raise ValueError(f"data.columns: unknown role {', '.join(unknown)}; the roles are {', '.join(NAMES)}")
    if absent := sorted({column for column in given.values() if column} - set(columns)):
        raise ValueError(f"data.columns: no column {', '.join(absent)}; the data has {', '.join(columns)}")
    return _Detection(tuple(columns), config, given, values).layout()


@dataclass(frozen=True)
class _Detection:
    """The search for the roles of columns."""

    columns: tuple[str, ...]
    config: DataConfig
    given: Mapping[str, str]
    values: Values | None

    def layout(self) -> Layout:
        fmt = self.config.format if self.config.format != "auto" else self._format()
        used = self._cot() if fmt == "cot" else self._named(fmt)
        missing = [role for role in _NEEDED.get(fmt, ()) if not used.get(role)]
        if not fmt or missing:
            wanted = f"format {fmt} needs {' and '.join(missing)}" if fmt else "they fit no format"
            empty = [name for name in self.columns if self.values is not None and not self.values[name]]
            without = f" ({', '.join(empty)} without values)" if empty else ""
            raise ValueError(
                f"missing columns: {wanted}; the data has {', '.join(self.columns) or 'none'}{without}. Name "
                "them, for example data.columns={question: problem, reasoning: rationale, answer: target}, or set "
                "data.format"
            )
        used = {role: used[role] for role in ROLES[fmt] if used.get(role)}
        return Layout(fmt, used, tuple(column for column in self.columns if column not in used.values()))

    def _held(self, column: str | None) -> Sequence[Any]:
        return self.values[column] if self.values is not None and column else ()

    def _find(self, role: str) -> str | None:
        """Returns the column of a role, None without one; raises Ambiguous if several fit."""
        if role in self.given:
            return self.given[role] or None
        for group in NAMES[role]:
            found = [column for name in group if (column := self._fitting(role, name))]
            if len(found) > 1 and (self.values is None or any(self._held(x) != self._held(found[0]) for x in found)):
                raise Ambiguous(f"{role} could be {' or '.join(found)}")
            if found:
                return found[0]
        return None

    def _fitting(self, role: str, name: str) -> str | None:
        """Returns the column of this name if its values fit the role."""
        lower = {column.lower(): column for column in reversed(self.columns)}
        if name not in lower or _BESIDE.get((role, name), name) not in lower:
            return None
        held = self._held(lower[name])
        if role == "reasoning":
            held = [x for x in held if not isinstance(x, bool) and str(x).strip().lower() not in _SWITCHES]
        return lower[name] if held or self.values is None else None

    def _search(self, *roles: str) -> dict[str, str | None]:
        """Returns the column of each role; raises one Ambiguous for all ambiguous roles."""
        found, problems = {}, []
        for role in roles:
            try:
                found[role] = self._find(role)
            except Ambiguous as error:
                problems.append(str(error))
        if problems:
            raise Ambiguous(f"ambiguous columns: {'; '.join(problems)}. Say which in data.columns={{role: column}}")
        return found

    def _format(self) -> str:
        told = {role for role, column in self.given.items() if column}
        for fmt, roles in _TELLING.items():
            if told & roles:
                return fmt
        if told - {"system"}:
            return "cot"
        if self._find("messages"):
            return self._chat_or_columns()
        if self._find("prompt") and self._find("completion") and not self._traces():
            return "prompt_completion"
        if self._chat():
            return "messages"
        if self._cot().keys() >= {"question", "answer"}:
            return "cot"
        return "text" if self._find("text") else ""

    def _traces(self) -> list[str]:
        return [column for name in chain(*NAMES["reasoning"]) if (column := self._fitting("reasoning", name))]

    def _chat(self) -> str | None:
        """Returns the column of chats: by its name, or a column of questions whose values are lists of messages."""
        if column := self._find("messages"):
            return column
        held = self._held(column := self._find("question"))
        return column if held and all(isinstance(x, list) and _is_chat(x) for x in held) else None

    def _chats(self) -> list[list[Mapping[str, Any]]]:
        return [chat for x in self._held(self._chat()) if _is_chat(chat := _parsed(x))]

    def _chat_or_columns(self) -> str:
        """Returns the format of rows with a chat, and perhaps question and answer: the format that has reasoning."""
        chats = self._chats()
        replies = [turn for chat in chats for turn in chat if role_of(turn) == "assistant"]
        if not replies or any(in_message(_plain(turn, self.config), self.config) for turn in replies):
            return "messages"
        try:
            used = self._cot()
        except Ambiguous:
            if self._traces():
                raise
            return "messages"
        if not {"question", "answer"} <= used.keys() or not self._has_reasoning(used):
            return "messages"
        asked = {str(_words(turn)).strip() for chat in chats for turn in chat if role_of(turn) == "user"}
        if len(replies) == len(chats) and asked & {str(x).strip() for x in self._held(used["question"])}:
            return "cot"
        raise Ambiguous(
            f"ambiguous columns: {self._chat()} holds chats without reasoning, and {', '.join(used.values())} other "
            "rows with reasoning. Set data.format=messages or data.format=cot"
        )

    def _has_reasoning(self, used: Mapping[str, str]) -> bool:
        boxed = is_solution(used["answer"])
        texts = (with_own_tags(str(x), self.config) for x in self._held(used["answer"]))
        try:
            return "reasoning" in used or any(split_solution(text, self.config, boxed=boxed)[0] for text in texts)
        except ValueError:  # tags or "####" without an answer after them
            return True

    def _named(self, fmt: str) -> dict[str, str]:
        """Returns the roles of a format other than cot."""
        found = self._search(*(role for role in ROLES.get(fmt, ()) if role not in ("reasoning", "answer")))
        if fmt == "messages":
            found["messages"] = self._chat()
            chats = self._chats()
            if "answer" in self.given or (chats and not any(role_of(turn) == "assistant" for x in chats for turn in x)):
                found |= self._answered(self._search("reasoning", "answer"))
        return {role: column for role, column in found.items() if column}

    def _cot(self) -> dict[str, str]:
        """Returns the roles of the format cot."""
        found = self._search(*ROLES["cot"])
        context, question = found["context"] or "", found["question"] or ""
        if "context" not in self.given and context.lower() == "input" and question.lower() != "instruction":
            found["context"] = None  # an `input` column is context only beside an `instruction`
        found |= self._answered(found)
        return {role: column for role, column in found.items() if column}

    def _answered(self, found: Mapping[str, str | None]) -> dict[str, str | None]:
        """Returns the columns of reasoning and answer, given the columns found by name."""
        reasoning, answer = found["reasoning"], found["answer"]
        if reasoning == answer and "reasoning" not in self.given:
            reasoning = None
        if answer is None and reasoning and "answer" not in self.given:
            answer = self._solution_beside(reasoning)
            if answer is None and "reasoning" not in self.given:  # a single solution column holds both
                reasoning, answer = None, reasoning
        if "reasoning" not in self.given and self._is_whole(answer):
            reasoning = None
        elif not {"reasoning", "answer"} & self.given.keys() and self._is_whole(reasoning):
            reasoning, answer = None, reasoning
        return {"reasoning": reasoning, "answer": answer}

    def _solution_beside(self, trace: str) -> str | None:
        """Returns the column of solutions beside a column of reasoning, which is then the answer."""
        found = [column for name in _SOLUTIONS if (column := self._fitting("answer", name)) and column != trace]
        if len(found) > 1:
            raise Ambiguous(f"ambiguous columns: answer could be {' or '.join(found)}. Say which in data.columns")
        return found[0] if found else None

    def _is_whole(self, column: str | None) -> bool:
        """Returns whether a column holds whole replies: reasoning in tags, then an answer."""
        texts = [with_own_tags(x, self.config) for x in self._held(column) if isinstance(x, str)]
        return any((answer := answer_of(x, self.config)) != x and answer.strip() for x in texts)


def is_solution(column: str) -> bool:
    """Returns whether a column of this name holds worked solutions, which may end in a boxed answer."""
    return column.lower() in _SOLUTIONS


def role_of(turn: Mapping[str, Any]) -> Any:
    """Returns the role of a message as chat templates name it."""
    role = turn.get("role") or turn.get("from")
    return _SHAREGPT_ROLES.get(str(role), role)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, Mapping) and role_of(turn) for turn in value)


def _parsed(value: Any) -> Any:
    with contextlib.suppress(json.JSONDecodeError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return None


def _words(turn: Mapping[str, Any]) -> Any:
    return turn.get("content") if turn.get("content") is not None else turn.get("value")


def _plain(turn: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    words = _words(turn)
    return {**turn, "content": with_own_tags(words, config) if isinstance(words, str) else None}
