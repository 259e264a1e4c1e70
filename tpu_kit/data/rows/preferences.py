"""Reads preference rows: a chosen and a rejected reply, or a reply and a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.rows.columns import MESSAGE_KEYS, TABLES, Layout, is_wanted, role_of
from tpu_kit.data.rows.field_values import RowError, is_filled, parsed
from tpu_kit.data.rows.schemas import Conversation, history, is_turns, question_of, read_completion

_PROMPT, _COMPLETION = "prompt", "completion"
_TRAINED_KEYS = ("tool_calls", "function_call", *MESSAGE_KEYS, *TABLES["message_keys"]["reasoning"])


def read_pair(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns a row's chosen conversation, and in its field `rejected` the other; `row` is a result of `layout.plain`.

    The prompt is in the first filled column with the role `messages`, `prompt` or `question`. A question, after its
    `history`, becomes a user turn. A text in `prompt` becomes one too if the replies are messages; otherwise prompt and
    reply are plain text, as in TRL. If no column has the prompt, it is the common start of the replies: whole turns, or
    whole words. Chats that repeat the prompt are read without it; texts are not.

    Raises:
        RowError: as `schemas.conversation`; a reply is empty or a list of several texts; only one reply is text; or
            replies of messages have no common prompt.
    """
    columns = layout.columns
    prompt = _prompt(row, layout)
    chosen, rejected = (_reply(row, columns[role], layout) for role in ("chosen", "rejected"))
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise RowError(f"columns {columns['chosen']!r} and {columns['rejected']!r} must both be text or both messages")
    if isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _of_turns(prompt, chosen, rejected, columns)
    elif prompt is None:
        prompt, chosen, rejected = _of_texts(str(chosen), str(rejected))
    read, made = _as_completion(row, layout)
    made[_PROMPT], sides = prompt, []
    for role, value in (("chosen", chosen), ("rejected", rejected)):
        try:
            sides.append(_side({**made, _COMPLETION: value}, read, config))
        except RowError as error:
            text = str(error).replace(f"column {_COMPLETION!r}", f"column {columns[role]!r}")
            raise RowError(text.replace(f"column {_PROMPT!r}", "the prompt")) from error
    return sides[0]._replace(rejected=sides[1])


def read_labelled(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Returns a prompt with a reply, from a row (result of `layout.plain`); sets `Conversation.label`, true if good.

    The label is the cell of the role `label`, by `is_wanted`. The prompt is as in `read_pair`; a text without a prompt
    is plain text. Without a column `completion` the reply is the last turn of the messages.

    Raises:
        RowError: as `schemas.conversation`; the label is neither true nor false; or there is no reply.
    """
    columns = layout.columns
    name = columns["label"]
    label = is_wanted(name, row.get(name))
    if label is None:
        raise RowError(f"column {name!r} holds {str(row.get(name))[:40]!r}, which is neither true nor false")
    prompt = _prompt(row, layout)
    if "completion" in columns:
        reply: Any = _reply(row, columns["completion"], layout)
    elif isinstance(prompt, list) and len(prompt) > 1 and role_of(prompt[-1]) == "assistant":
        *prompt, last = prompt
        reply = [last]
    else:
        raise RowError("the row has no reply: name its column, as in data.columns={completion: COLUMN}")
    if isinstance(prompt, str) and isinstance(reply, list):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and isinstance(reply, list) and len(reply) > len(prompt):
        repeats = all(map(_same_turn, prompt, reply))
        reply = reply[len(prompt) :] if repeats else reply
    read, made = _as_completion(row, layout)
    return _side({**made, _PROMPT: "" if prompt is None else prompt, _COMPLETION: reply}, read, config)._replace(
        label=label
    )


def _as_completion(row: Mapping[str, Any], layout: Layout) -> tuple[Layout, dict[str, Any]]:
    """Returns the layout of a prompt with a completion, and the row's other cells that it needs."""
    beside = {role: layout.columns[role] for role in ("system", "tools") if role in layout.columns}
    read = replace(layout, columns={_PROMPT: _PROMPT, _COMPLETION: _COMPLETION, **beside})
    return read, {name: row.get(name) for name in beside.values()}


def _side(row: Mapping[str, Any], layout: Layout, config: DataConfig) -> Conversation:
    """Reads the cells "prompt" and "completion" as `read_completion`; text with an empty prompt is plain text."""
    prompt, reply = row[_PROMPT], row[_COMPLETION]
    if prompt == "" and isinstance(reply, str):
        if not reply.strip():
            raise RowError(f"column {_COMPLETION!r} is empty")
        return Conversation(reply, 0)
    return read_completion(row, layout, config)


def _prompt(row: Mapping[str, Any], layout: Layout) -> Any:
    """Returns a row's prompt as messages or plain text, None if it has none; RowError for other values."""
    columns = layout.columns
    for role in ("messages", "prompt"):
        value = row.get(columns.get(role, ""))
        if columns.get(role, "") in layout.chats or role == "messages":
            value = parsed(value, columns.get(role, ""))
        if is_turns(value) or (role == "prompt" and isinstance(value, str) and value.strip()):
            return value
        if role in columns and is_filled(value):
            form = "a list of messages" if role == "messages" else "a text or a list of messages"
            raise RowError(f"column {columns[role]!r} must be {form}, got {str(value)[:60]!r}")
    if "question" not in columns:
        return None
    return [*history(row, layout), {"role": "user", "content": question_of(row, layout)}]


def _reply(row: Mapping[str, Any], column: str, layout: Layout) -> str | list[Any]:
    """Returns a reply as text or as messages; RowError if it is empty, a list of several texts, or another value."""
    value = row.get(column)
    if column in layout.chats:
        value = parsed(value, column)
    if isinstance(value, Mapping) and is_turns([value]):
        value = [value]
    if is_turns(value):
        return list(value)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        if len(value) > 1:
            raise RowError(f"column {column!r} holds {len(value)} replies, but a row has one: write a row per reply")
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        both = layout.format == "preference"
        needs = "a pair needs a chosen and a rejected reply" if both else "kto needs a reply in every row"
        raise RowError(f"column {column!r} has no reply: {str(value)[:60]!r}; {needs}")
    return value


def _of_turns(prompt: Any, chosen: list[Any], rejected: list[Any], columns: Mapping[str, str]) -> tuple[Any, Any, Any]:
    """Returns the messages of the prompt, the chosen and the rejected reply; RowError without a common prompt.

    `prompt` may be None, text or messages; `chosen` and `rejected` may be whole chats. `columns` by role is for errors.
    """
    same = 0
    while same < min(len(chosen), len(rejected)) - 1 and _same_turn(chosen[same], rejected[same]):
        same += 1
    begins = role_of(chosen[0]) not in ("assistant", "tool") or same > 0
    if not begins:
        if prompt is None:
            raise RowError(
                f"columns {columns['chosen']!r} and {columns['rejected']!r} begin with a reply, and the row has no "
                "prompt; name its column, as in data.columns={prompt: COLUMN}"
            )
        return ([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt), chosen, rejected
    if not same:
        raise RowError("the chosen and the rejected chat begin with different turns, so they have no common prompt")
    shared = chosen[:same]
    said = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
    users = [_said(turn) for turn in said if role_of(turn) == "user"]
    if users and users[-1] not in [_said(turn) for turn in shared if role_of(turn) == "user"]:
        return [*said, *shared], chosen[same:], rejected[same:]
    return (said if len(said) > len(shared) else shared), chosen[same:], rejected[same:]


def _said(turn: Mapping[str, Any]) -> str:
    """Returns the content of a message as text without white space around it; empty if it has none."""
    return str(turn.get("content") or turn.get("value") or "").strip()


def _same_turn(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages have the same role, content without white space around it, tool calls and reasoning."""
    rest = [[turn.get(key) or None for key in _TRAINED_KEYS] for turn in (one, other)]
    return role_of(one) == role_of(other) and _said(one) == _said(other) and rest[0] == rest[1]


def _of_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Returns the common prefix of two texts, in whole words, and the rests of `chosen` and of `rejected`.

    A space between prefix and rest belongs to the rest, a line break to the prefix.
    """
    same = common_length(chosen, rejected)
    while same and not chosen[same - 1].isspace():
        same -= 1
    same -= chosen[:same].endswith(" ")
    return chosen[:same], chosen[same:], rejected[same:]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences."""
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)
