"""Finds the roles of a data set's columns by their names, and separates reasoning and answer in a text.

`data.columns` gives roles to columns with other names. Tags around the reasoning, or closing words before the answer,
separate the reasoning from the answer.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any, Literal

from tpu_kit.config.loader import DataConfig
from tpu_kit.config.named_values import FORMATS, ROLES
from tpu_kit.data.rows.field_values import RowError, parsed, plain_value, switch

MESSAGE_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message with reasoning apart from its content; the first key with text counts."""

TABLES = tomllib.loads(Path(__file__).with_name("columns.toml").read_text())
"""The contents of columns.toml, which explains them."""
STATED, MARKED = "The answer is:", "####"
"""Separators of reasoning and answer in a solution: of MetaMathQA, of GSM8K."""
_STATED = re.compile(r"\n[ \t]*The answer is:[ \t]*(\S.*?)\s*\Z", re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]")
_MARKED = re.compile(r"(?:\A|\n)[ \t]*####[ \t]*([^\n]*?)\s*\Z")
_HEADING = re.compile(r"^[ \t]*#{1,6} ", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?[$€£]? ?[-+]?\d[\d,]*(\.\d+)?(/\d+)? ?%?")
HEADED = r"(?s)(?:^|\n)[ \t]*#{1,6} .*\n[ \t]*####[^\n]*\s*$"
"""Pattern, for Arrow, of a text with a heading before its last line of `MARKED`, which then is a heading too."""
CLOSINGS = {STATED: r"(?i)\n[ \t]*The answer is:[ \t]*\S[^\n]*\s*$", MARKED: r"(?:^|\n)[ \t]*####[^\n]*\s*$"}
"""Patterns, for Arrow, of texts that end with a separator and an answer."""


def reply(reasoning: str, answer: str, config: DataConfig) -> str:
    """Formats a reply: the reasoning in tags, then the answer."""
    return f"{config.think_open}\n{reasoning}\n{config.think_close}\n{answer}"


def _split(text: str, opening: str, closing: str) -> tuple[str, str] | None:
    """Returns a reply's text before and after the first tag that closes its reasoning; None if it has no reasoning.

    The closing tag is in neither text; an opening tag stays in the first.

    A tag after a space, a quote or a bracket only mentions the tag. So do all tags of a text that does not begin with
    the opening tag but contains it before the closing tag.
    """
    opened = text.lstrip().startswith(opening)
    positions = [match.start() for match in re.finditer(re.escape(closing), text)]
    ends = [position for position in positions if text[:position][-1:] not in {*" \t`'\"([*"}]
    position = next(iter(ends or positions[:1] if opened else ends), None)
    if position is None or (not opened and opening in text[:position]):
        return None
    return text[:position], text[position + len(closing) :]


def reasoning_of(text: str, config: DataConfig) -> str:
    """Returns the reasoning of a reply, without white space around it; empty if there is none."""
    parts = _split(text, config.think_open, config.think_close)
    return parts[0].lstrip().removeprefix(config.think_open).strip() if parts else ""


def answer_of(text: str, config: DataConfig) -> str:
    """Returns the text of a reply after the tag that closes its reasoning; the whole text if it has none."""
    parts = _split(text, config.think_open, config.think_close)
    return parts[1] if parts else text


def in_message(message: Mapping[str, Any], config: DataConfig) -> str:
    """Returns a message's stripped reasoning, from a key of `MESSAGE_KEYS`, else tags in its content; empty if none."""
    for key in MESSAGE_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return str(message[key]).strip()
    content = message.get("content")
    return reasoning_of(content, config) if isinstance(content, str) else ""


def with_own_tags(text: str, config: DataConfig, *, is_reply: bool = True) -> str:
    """Returns a text with the configuration's tags in place of other models' tags, such as `<|begin_of_thought|>`.

    If tags are replaced, tags around the answer, such as `<|begin_of_solution|>`, are removed too.

    Args:
        text: a reply or a system prompt.
        config: has the reasoning tags.
        is_reply: True: a reply with reasoning is formatted by `reply`, and tags that a reply only mentions stay. False:
            all tags are replaced, as in a system prompt that names them.
    """
    for opening, closing in TABLES["tags"]:
        if closing == config.think_close or (opening not in text and closing not in text):
            continue
        if is_reply and (parts := _split(text, opening, closing)):
            return reply(parts[0].lstrip().removeprefix(opening).strip(), _without_tags(parts[1]), config)
        if is_reply and not text.lstrip().startswith(opening):
            continue
        for tag in TABLES["answer_tags"]:
            text = text.replace(tag, "")
        text = text.replace(opening, config.think_open).replace(closing, config.think_close)
    return text


def _without_tags(answer: str) -> str:
    """Returns an answer without the tags around it ("answer_tags" in columns.toml) and without outer white space."""
    opening, closing = TABLES["answer_tags"]
    answer = answer.strip()
    if not answer.startswith(opening):
        return answer
    before, closed, after = answer.removeprefix(opening).rpartition(closing)
    return (before + after if closed else after).strip()


def split_solution(text: str, config: DataConfig, *, boxed: bool, closings: Collection[str] = ()) -> tuple[str, str]:
    r"""Returns reasoning and answer of a solution, both stripped; without a separator, "" and the whole text unchanged.

    The separators, by priority: the tags; a last line of `STATED`, then of `MARKED`, and an answer, if in `closings`; a
    last line of "####" and a number (GSM8K); the last \boxed{} if `boxed`. A "####" after headings is no separator.

    Args:
        text: the solution.
        config: has the reasoning tags.
        boxed: whether the content of the last \boxed{} is the answer (MATH), and the whole text the reasoning.
        closings: `STATED` or `MARKED`, or both, if all rows have them (`Layout.closings`).

    Raises:
        ValueError: nothing follows the tags, or the "####" with `MARKED` in `closings`.
    """
    if (answer := answer_of(text, config)) != text:
        if not answer.strip():
            raise ValueError(f"nothing after {config.think_close}")
        return reasoning_of(text, config), answer.strip()
    if STATED in closings and (stated := _STATED.search(text)):
        return _MARKED.sub("", text[: stated.start()]).strip(), stated[1]
    if (marked := _MARKED.search(text)) and not _HEADING.search(text[: marked.start()]):
        if MARKED in closings and not marked[1]:
            raise ValueError(f"nothing after {MARKED}")
        if MARKED in closings or _NUMBER.fullmatch(marked[1]):
            return text[: marked.start()].strip(), marked[1]
    if boxed and (inner := last_boxed(text)):
        return text.strip(), inner
    return "", text


def last_boxed(text: str) -> str | None:
    r"""Returns the stripped content of the last \boxed{} that is closed, nested braces included; None without any."""
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


NAMES: Mapping[str, Sequence[Sequence[str]]] = TABLES["names"]
"""Role -> names of its columns, case-insensitive, in groups of falling priority. Two columns of the same group are an
error."""
SOLUTIONS = NAMES["reasoning"][1]
"""Names of columns with worked solutions: reasoning if the data has an answer too, else reasoning and answer."""


@dataclass(frozen=True)
class Layout:
    """The format and the roles of the columns of a data set.

    Attributes:
        format: a key of `named_values.FORMATS`.
        columns: columns by role; a field of a column of objects has a dotted name.
        ignored: unused columns.
        filled: whether Arrow stores contents or arguments of tool calls as structs, in which None means a missing key.
        left_out: columns, and keys of messages with dotted names, that `data.columns` leaves out.
        switches: columns in which false marks a row as unwanted.
        chats: columns with lists of messages.
        closings: the separators `STATED` and `MARKED` that the answers of all rows have.
        first_option: number of the first option, 0 or 1.
        features: features of columns whose values `field_values.plain_value` changes.
        examples: example values of unused columns.
        notes: facts found in the values, for the report.
        images: whether rows may have images.
        turns_by: source of the turns: the chat template; the text of the rows, which is already in the template's form;
            or none, for plain text.
    """

    format: str
    columns: Mapping[str, str]
    ignored: tuple[str, ...]
    filled: bool = False
    left_out: frozenset[str] = frozenset()
    switches: tuple[str, ...] = ()
    chats: frozenset[str] = frozenset()
    closings: frozenset[str] = frozenset()
    first_option: int = 0
    features: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    images: bool = False
    turns_by: Literal["template", "text", "none"] = "template"

    def __str__(self) -> str:
        used = ", ".join(f"{role}={column}" for role, column in self.columns.items())
        unused = [
            column + (f" ({self.examples[column]})" if column in self.examples else "") for column in self.ignored
        ]
        notes = "".join(f"\n{' ' * 17}{note}" for note in self.notes)
        return f"{self.format} ({used})" + (f", not used: {', '.join(unused)}" if unused else "") + notes

    def needed(self, names: Collection[str]) -> list[str]:
        """Returns the columns in `names` that a row is read from, sorted; the whole column for a dotted name."""
        used = {*self.columns.values(), *self.switches}
        return sorted({head for column in used if (head := head_of(column, names))})

    def plain(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of a row with `plain_value` of its cells, and with the fields of dotted names as new cells.

        The row is of `without_decoding`. A field of an empty cell is None.

        Raises:
            RowError: a field does not exist, or its cell is a text that is not valid JSON.
        """
        if not self.features and not any(column not in row for column in self.columns.values()):
            return dict(row)
        made = dict(row)
        for column, feature in self.features.items():
            made[column] = plain_value(row.get(column), feature)
        for column in self.columns.values():
            head = head_of(column, row)
            if head and head != column:
                made[column] = _field(made[head], head, column.removeprefix(head + "."))
        return made


def is_wanted(name: str, value: Any) -> bool | None:
    """Whether a cell marks its row as wanted: true or, if `name` is such as is_bad, false; None for other values."""
    word = str(value).strip().lower()
    words = {**dict.fromkeys(TABLES["switches"]["no"], False), **dict.fromkeys(TABLES["switches"]["yes"], True)}
    on = switch(value) if switch(value) is not None else words.get(word)
    return on if on is None else on != bool(re.fullmatch(TABLES["switches"]["reversed"], name.strip().lower()))


def head_of(column: str, names: Collection[str]) -> str:
    """Returns the longest beginning of a dotted name (a.b.c, a.b, a) that is in `names`; empty if there is none."""
    while column not in names:
        column, dot, _ = column.rpartition(".")
        if not dot:
            return ""
    return column


def _field(value: Any, column: str, fields: str) -> Any:
    """Returns a field (dotted path) of a cell, an object or JSON; None below None; RowError if missing or no JSON."""
    for name in fields.split("."):
        value = parsed(value, column)
        if value is not None and (not isinstance(value, Mapping) or name not in value):
            raise RowError(f"column {column!r} has no field {name!r}: {str(value)[:60]}")
        value = value and value[name]
    return value


def stores_structs(feature: Any, name: str = "") -> bool:
    """Whether a feature of `datasets`, or a dict of them, stores contents or arguments of tool calls as Arrow structs.

    They are structs under the keys arguments, content or value, at any depth; `name` is the key of `feature` itself.
    """
    if isinstance(feature, dict):
        return name in ("arguments", "content", "value") or any(
            stores_structs(inner, key) for key, inner in feature.items()
        )
    return hasattr(feature, "feature") and stores_structs(feature.feature, name)


def detect_layout(
    columns: Sequence[str],
    config: DataConfig,
    empty: Collection[str] = (),
    kinds: Mapping[str, str] = MappingProxyType({}),
    images: bool = False,
) -> Layout:
    """Finds the format and the roles of columns by name; `config.format` and `config.columns` override.

    Args:
        columns: names of the columns.
        config: the data section. An entry `name: ''` in `config.columns` removes the role `name`, or the role of the
            column `name`.
        empty: columns without values, or only with flags; they get no role by name.
        kinds: "turns", "tools", "calls" (of tools) or "images" by column, for columns that hold such values.
        images: whether rows may have images; if not, no column has that role.

    Raises:
        ValueError: `config.columns` names a missing column, or images without `images`; the columns fit no format, or
            not `config.format`; two columns have equally usual names of a role; or messages are in a column of text.
    """
    named, listed = dict(config.columns or {}), shorten(", ".join(columns), 500) or "none"
    left_out = {name for name, column in named.items() if not column and head_of(name, columns)}
    absent = {column for column in named.values() if column and not head_of(column, columns)}
    absent |= {name for name, column in named.items() if not column and name not in NAMES} - left_out
    if absent:
        raise ValueError(f"data.columns: no column {', '.join(sorted(absent))}; the data has {listed}")

    find = partial(_column_of, columns=columns, named=named, skipped={*empty, *left_out}, kinds=kinds)
    fmt = _format(config, find, kinds)
    roles = [role for role in (FORMATS[fmt].roles if fmt else ()) if images or role != "images"]
    if "images" in named and named["images"] and not images:
        raise ValueError("data.columns: images are trained on with model.images=true; set it, or take the role out")
    if fmt == "messages" and "answer" not in named and find("messages"):  # the last reply is in the chat
        roles = [role for role in roles if role not in ("reasoning", "answer")]
    used = {role: column for role in roles if (column := find(role))}
    if (
        fmt == "messages"
        and "messages" not in {*used, *named}
        and kinds.get(asked := find("question") or "") == "turns"
    ):
        used = {"messages": asked} | used
    _check_turns(fmt, used, columns, kinds)
    is_instruction = used.get("question", "").strip().lower() == "instruction"
    if used.get("context", "").strip().lower() == "input" and not is_instruction and "context" not in named:
        del used["context"]
    if used.get("reasoning") == used.get("answer"):  # a solution without another answer is both
        used.pop("answer" if "reasoning" in named else "reasoning", None)
    missing = [role for role in (FORMATS[fmt].needed if fmt else ()) if role not in used]
    if not fmt or missing:
        if not fmt and kinds.get(asked := find("prompt") or find("question") or "") == "turns":
            raise ValueError(_asks_in_turns(asked, None, columns))
        raise ValueError(_missing_text(fmt, missing, columns, empty, kinds, bool(find("prompt"))))
    unused = tuple(column for column in columns if column not in {head_of(name, columns) for name in used.values()})
    chats = frozenset(column for column, kind in kinds.items() if kind == "turns")
    return Layout(fmt, used, unused, left_out=frozenset(left_out), chats=chats, images=images)


def _column_of(
    role: str, columns: Sequence[str], named: Mapping[str, str], skipped: Collection[str], kinds: Mapping[str, str]
) -> str | None:
    """Returns a role's column in `named` (from data.columns), or else the unskipped column with a usual name, or None.

    `kinds`, by column, is only for answers that are tool calls. Raises ValueError if several columns have usual names.
    """
    if role in named:
        return named[role] or None
    by_name = [column for column in columns if column not in skipped]
    for group in NAMES.get(role, [[role]]):
        fitting = [column for column in by_name if column.strip().lower() in group]
        if len(fitting) > 1:
            text = f"ambiguous columns: {role} could be {' or '.join(fitting)}. Choose a column, as in data.columns="
            raise ValueError(f"{text}{{{role}: {fitting[0]}}}")
        if fitting:
            return fitting[0]
    if role == "answer" and _column_of("tools", columns, named, skipped, kinds):  # as in xLAM's data sets
        calls = [column for column in by_name if kinds.get(column) == "calls"]
        return next((column for column in calls if column.strip().lower() == "answers"), None)
    return None


def _check_turns(fmt: str, used: Mapping[str, str], columns: Sequence[str], kinds: Mapping[str, str]) -> None:
    """Raises ValueError if a column of messages has a role in `used` that needs text in format `fmt`."""
    if fmt == "cot" and kinds.get(used.get("question", "")) == "turns":
        raise ValueError(_asks_in_turns(used["question"], used.get("answer"), columns))
    for role in ("text", "context", "options", "reasoning", "answer"):
        if role in used and kinds.get(used[role]) == "turns" and fmt in ("cot", "text"):
            raise ValueError(
                f"column {used[role]!r} holds messages, and {role} is text: set data.columns={{messages: "
                f"{used[role]}}} to train on them, or {{{used[role]}: ''}} to leave them out"
            )


def _missing_text(
    fmt: str,
    missing: Sequence[str],
    columns: Sequence[str],
    empty: Collection[str],
    kinds: Mapping[str, str],
    has_prompt: bool,
) -> str:
    """Returns the error text for roles without a column, with the setting that names them.

    `fmt` is empty if no format fits. `has_prompt` is whether a column could be the prompt.
    """
    if not fmt and {"chosen", "rejected"} <= {column.strip().lower() for column in columns}:
        return (
            "preference rows, pairs of a chosen and a rejected reply, are for dpo. To train on only the chosen "
            "replies: data.columns={question: prompt, answer: chosen}, with the names of your columns"
        )
    wanted = f"format {fmt} needs {' and '.join(missing)}" if fmt else "they fit no format"
    without = f" ({', '.join(empty)} without values)" if empty else ""
    without += " (for grpo, rows with only prompts are data.format=prompt)" if not fmt and has_prompt else ""
    without += " (rows with one reply and a label are for losses=[kto])" if fmt == "preference" else ""
    example = f"{missing[0]}: COLUMN" if fmt else "question: problem, reasoning: rationale, answer: target"
    if not fmt and (chats := [column for column, kind in kinds.items() if kind == "turns"]):
        example = f"messages: {chats[0]}"
    return (
        f"missing columns: {wanted}; the data has {shorten(', '.join(columns), 500) or 'none'}{without}. Name them, "
        f"for example data.columns={{{example}}}, or set data.format"
    )


def _asks_in_turns(asked: str, answer: str | None, columns: Collection[str]) -> str:
    """Returns the error text for a column `asked` of messages without replies, as for GRPO in TRL and verl.

    `answer` is the column of the answers; None: the text names a likely column.
    """
    given = answer or next((f"{name}.ground_truth" for name in columns if name == "reward_model"), "COLUMN")
    return (
        f"column {asked!r} holds messages without a reply. For grpo set data.format=prompt and data.columns={{prompt: "
        f"{asked}, answer: {given}}}; to train on the text of a column as the last reply, set data.columns={{messages: "
        f"{asked}, answer: {given}}}"
    )


def _format(config: DataConfig, find: Callable[[str], str | None], kinds: Mapping[str, str]) -> str:
    """Returns `data.format` or, if it is "auto", the first format that the columns fit; empty if they fit none.

    `find` returns the column of a role, or None.
    """
    if config.format != "auto":
        return config.format
    named = {role for role, column in (config.columns or {}).items() if column} - {"system", "tools"}
    for fmt in ("messages", "prompt_completion", "text"):
        if named & (set(ROLES[fmt]) - set(ROLES["cot"])):
            return fmt
    if named <= {"reasoning", "answer"} and find("messages") and (not named or not find("question")):
        return "messages"
    if named:
        return "cot"
    if find("prompt") and find("completion") and not find("reasoning"):
        return "prompt_completion"
    if (asked := find("question")) and (answer := find("answer")):
        is_reply = answer.strip().lower() in TABLES["replies"]["names"]
        return "messages" if kinds.get(asked) == "turns" and is_reply else "cot"
    return "text" if find("text") else ""


def role_of(turn: Mapping[str, Any]) -> Any:
    """Returns a message's role as chat templates name it (human -> user); other roles unchanged, None without any."""
    role = turn.get("role") or turn.get("from")
    low = str(role).strip().lower()
    return TABLES["roles"].get(low, low if low in ("system", "user", "assistant", "tool") else role)
