"""Which column of a data set has which role, found from the names of the columns and from the first values in them.

The rules know no data set by name. `tests/test_columns.py` holds a row of each of the reasoning sets that they were
written for, with the roles of its columns.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tpu_kit.config import DataConfig
from tpu_kit.reasoning import answer_of, in_message, split_solution, with_own_tags

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
"""Role -> the names of its columns in groups, compared without case. A group goes before those after it; two columns of
one group that hold different values are an ambiguity, which is refused."""

_BESIDE = {("question", "source"): "target", ("answer", "content"): "reasoning_content"}
"""(role, name) -> the name without which it means something else, such as the origin of a row."""

ROLES: dict[str, tuple[str, ...]] = {
    "cot": ("system", "question", "context", "options", "reasoning", "answer"),
    "messages": ("system", "messages", "tools", "reasoning", "answer"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "text": ("text",),
}
"""Format -> the roles it reads; chats have reasoning and answer where their last turn is in columns of its own."""

KNOWN = frozenset(
    name for role, groups in NAMES.items() for name in chain(*groups) if (role, name) not in _BESIDE
)  # fmt: skip
"""Every name that means a role by itself."""

_TELLING = {"messages": {"messages", "tools"}, "prompt_completion": {"prompt", "completion"}, "text": {"text"}}
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "observation": "tool",
}
_NEEDED = {
    "cot": ("question", "answer"),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_SWITCHES = {"on", "off", "yes", "no", "true", "false"}  # how a column `reasoning` says whether there is any
_SAMPLE = 100  # values of each column that are looked at
_AT_A_TIME = 1000  # rows

Values = Mapping[str, Sequence[Any]]
"""Column -> the first of its values that are not empty; none where the whole column is."""


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


class Ambiguous(ValueError):
    """Several columns could have a role."""


def first_values(rows: Any) -> dict[str, list[Any]]:
    """Returns the first values of each column that are not empty.

    Args:
        rows: a `datasets.Dataset`. All of it is read for a column without values, and its beginning for the others.
    """
    found: dict[str, list[Any]] = {name: [] for name in rows.column_names}
    for start in range(0, len(rows), _AT_A_TIME):
        wanted = [name for name, values in found.items() if len(values) < _SAMPLE]
        if not wanted:
            break
        # As Arrow holds them: images would be decoded otherwise.
        table = rows.select_columns(wanted).with_format("arrow")[start : start + _AT_A_TIME]
        for name in wanted:
            values = (value for value in table.column(name).drop_null().to_pylist() if is_filled(value))
            found[name] = [*found[name], *values][:_SAMPLE]
    return found


def is_filled(value: Any) -> bool:
    """Says whether a cell holds anything: neither nothing, nor white space, nor a list or struct of only such."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(map(is_filled, value.values()))
    if isinstance(value, list):
        return any(map(is_filled, value))
    return value is not None and value == value


def detect_layout(columns: Sequence[str], config: DataConfig, values: Values | None = None) -> Layout:
    """Recognises the format and the roles; `config.format` and `config.columns` override.

    Args:
        columns: their names.
        config: the data section. An empty name in `config.columns` gives that role to no column.
        values: of `first_values`: a column without values gets no role, and several that hold the same are no
            ambiguity. None goes by the names alone.

    Raises:
        ValueError: an unknown role, a column that is not there, columns that fit no format, or several that could have
            the same role.
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
        needed = _NEEDED.get(fmt, ())
        missing = [role for role in needed if not used.get(role)]
        if not fmt or missing:
            wanted = f"format {fmt} needs {' and '.join(missing)}" if fmt else "they fit no format"
            raise ValueError(
                f"missing columns: {wanted}; the data has {', '.join(self.columns) or 'none'}{self._empty()}. Name "
                "them, for example data.columns={question: problem, reasoning: rationale, answer: target}, or set "
                "data.format"
            )
        used = {role: used[role] for role in ROLES[fmt] if used.get(role)}
        return Layout(fmt, used, tuple(column for column in self.columns if column not in used.values()))

    def _empty(self) -> str:
        names = [name for name in self.columns if self.values is not None and not self.values[name]]
        return f" ({', '.join(names)} without values)" if names else ""

    def _held(self, column: str | None) -> Sequence[Any]:
        return self.values[column] if self.values is not None and column else ()

    def _find(self, role: str) -> str | None:
        """Returns the column that has a role; None without any.

        Raises:
            Ambiguous: several could have it.
        """
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
        """Returns the column of a name if it holds something: of reasoning, more than whether there is any."""
        lower = {column.lower(): column for column in reversed(self.columns)}
        if name not in lower or _BESIDE.get((role, name), name) not in lower:
            return None
        held = self._held(lower[name])
        if role == "reasoning":
            held = [x for x in held if not isinstance(x, bool) and str(x).strip().lower() not in _SWITCHES]
        return lower[name] if held or self.values is None else None

    def _search(self, *roles: str) -> dict[str, str | None]:
        """Returns the column of each role.

        Raises:
            Ambiguous: naming all roles that several columns could have.
        """
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
        """Returns the column of chats: one named so, or one of questions whose values are lists of messages."""
        if column := self._find("messages"):
            return column
        held = self._held(column := self._find("question"))
        return column if held and all(isinstance(x, list) and _is_chat(x) for x in held) else None

    def _chats(self) -> list[list[Mapping[str, Any]]]:
        return [chat for x in self._held(self._chat()) if _is_chat(chat := _parsed(x))]

    def _chat_or_columns(self) -> str:
        """Says which is read where rows have a chat and may have its question and answer too: what holds reasoning."""
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
        return "reasoning" in used or any(self._splits(text, boxed) for text in texts)

    def _splits(self, text: str, boxed: bool) -> bool:
        try:
            return bool(split_solution(text, self.config, boxed=boxed)[0])
        except ValueError:
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
        """Returns the roles of a chain of thought in columns."""
        found = self._search(*ROLES["cot"])
        context, question = found["context"] or "", found["question"] or ""
        if "context" not in self.given and context.lower() == "input" and question.lower() != "instruction":
            found["context"] = None  # an `input` column is context to an `instruction` only
        found |= self._answered(found)
        return {role: column for role, column in found.items() if column}

    def _answered(self, found: Mapping[str, str | None]) -> dict[str, str | None]:
        """Returns the columns of reasoning and answer, given those that have the names."""
        reasoning, answer = found["reasoning"], found["answer"]
        if reasoning == answer and "reasoning" not in self.given:
            reasoning = None
        if answer is None and reasoning and "answer" not in self.given:
            answer = self._solution_beside(reasoning)
            if answer is None and "reasoning" not in self.given:  # a solution alone holds both
                reasoning, answer = None, reasoning
        if "reasoning" not in self.given and self._is_whole(answer):
            reasoning = None
        elif not {"reasoning", "answer"} & self.given.keys() and self._is_whole(reasoning):
            reasoning, answer = None, reasoning
        return {"reasoning": reasoning, "answer": answer}

    def _solution_beside(self, trace: str) -> str | None:
        """Returns the solution that a trace of thought led to, where no other column is the answer."""
        found = [column for name in _SOLUTIONS if (column := self._fitting("answer", name)) and column != trace]
        if len(found) > 1:
            raise Ambiguous(f"ambiguous columns: answer could be {' or '.join(found)}. Say which in data.columns")
        return found[0] if found else None

    def _is_whole(self, column: str | None) -> bool:
        """Says whether a column holds whole replies: reasoning in tags, and then an answer."""
        texts = [with_own_tags(x, self.config) for x in self._held(column) if isinstance(x, str)]
        return any(self.config.think_close in x and answer_of(x, self.config).strip() for x in texts)


def is_solution(column: str) -> bool:
    """Says whether a column of this name holds worked solutions, which may end in a boxed answer."""
    return column.lower() in _SOLUTIONS


def role_of(turn: Mapping[str, Any]) -> Any:
    """Returns who speaks in a message, in the names of chat templates."""
    role = turn.get("role") or turn.get("from")
    return _SHAREGPT_ROLES.get(str(role), role)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, Mapping) and role_of(turn) for turn in value)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return None


def _words(turn: Mapping[str, Any]) -> Any:
    return turn.get("content") if turn.get("content") is not None else turn.get("value")


def _plain(turn: Mapping[str, Any], config: DataConfig) -> dict[str, Any]:
    words = _words(turn)
    return {**turn, "content": with_own_tags(words, config) if isinstance(words, str) else None}
