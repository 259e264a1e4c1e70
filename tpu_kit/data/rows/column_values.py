"""Finds the layout of a data set by the values of its columns, in addition to their names: `read_layout`.

Reads the values of all rows in Arrow's form, unless a note in the report has a smaller number of rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import shorten
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Audio, ClassLabel, Dataset, Image, Json, Value, Video

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.rows.columns import (
    CLOSINGS,
    HEADED,
    MARKED,
    NAMES,
    TABLES,
    Layout,
    detect_layout,
    head_of,
    is_wanted,
    role_of,
    stores_structs,
)
from tpu_kit.data.rows.field_values import RowError, decoded, is_filled, is_short_float, options_of, plain_value, switch
from tpu_kit.data.rows.messages import becomes_json, is_parts

_SLICE = 10_000  # rows in memory at a time
_SLICE_OF_IMAGES = 32  # the same if cells hold bytes
_CHATS = 2_000  # number of rows whose chats are searched for notes
_FEW = 8  # largest number of different values of a flag
_TURNS = r'(?s)^\s*\[\s*\{.*"(role|from)"\s*:\s*"'
_SAID = r'(?s)"(content|value|tool_calls|function_call)"\s*:'
_CALLS = r'(?s)^\s*\[\s*(\{|"\s*\{).*"arguments\\?"\s*:'
_TOOLS = r'(?s)^\s*\[\s*(\{|"\s*\{).*"name\\?"\s*:.*"parameters\\?"\s*:'
_PARTS = re.compile(r'\s*\[\s*\{\s*"type"\s*:\s*"\w+"\s*,\s*"(text|\w+_url)"\s*:')
_IMAGES = r"^data:(image|audio|video)/|(?i)^\S+\.(png|jpe?g|webp|gif|bmp|mp4|mov|wav|mp3|flac)$"
_ANSWERED = r'"(role|from)"\s*:\s*"(assistant|gpt|chatgpt|bot)"[^{}]*\}\s*\]\s*$'
_SWITCHES, _OPTIONS = (
    re.compile("{names}|{reversed}".format(**TABLES["switches"])),
    re.compile(TABLES["options"]["names"]),
)
_WITHOUT = "objects have fixed fields in Arrow, so fields without a value are left out"
_NO_THOUGHT = rf'(?i)^"?\s*({"|".join(TABLES["flags"]["none"])})\s*"?$'
_WEIGHTS, _LABELS = re.compile("loss|weight"), re.compile("label|kto_tag|(is_)?desirable")


def read_layout(rows: Dataset, names: Sequence[str], config: DataConfig, images: bool = False) -> Layout:
    """Finds format and roles of the columns `names` of a data set by their names and the values of all rows.

    `rows` are the result of `without_decoding`. `images` is whether rows may have images; if not, no column has that
    role. If chats end in a question, a column such as "response" gets the role "answer": their last reply.

    Raises:
        ValueError: as `detect_layout`; columns without a role may change the meaning of a row; or it is not clear which
            column holds the last reply. The text names the columns.
    """
    first = first_values(rows, names)
    empty = [name for name in names if name not in first]
    unknown = [name for name in first if name.strip().lower() not in NAMES["messages"][0]]
    kinds = {name: kind for name in unknown if (kind := _kind_of(rows, name))}
    flags = _flags(rows, [name for name in first if name not in (config.columns or {}).values()])
    layout = detect_layout(names, config, [*empty, *flags], kinds, images)
    layout, config = _with_last_reply(rows, layout, config, names, [*empty, *flags], kinds)
    notes = [
        f"{name} is a flag ({', '.join(values)}), so it is not read as reasoning" for name, values in flags.items()
    ]
    unwanted, others = _switches(rows, layout, first)
    layout = replace(layout, switches=tuple(unwanted))
    features = {name: rows.features[name] for name in layout.needed(names) if _is_converted(rows.features[name])}
    layout = replace(
        layout,
        filled=stores_structs({name: rows.features[name] for name in names}),
        features=features,
        examples={name: _shown(first[name]) for name in layout.ignored if name in first},
    )
    harmful = {name: value for name, value in first.items() if name not in flags}
    _refuse(layout, config, harmful, kinds, others)
    layout, told = _with_values(rows, layout)
    return replace(layout, notes=(*notes, *told, *_notes_of_chats(rows, layout)))


# ------------------------------------------------------------------------------------------------- values of a column


def _slices(rows: Dataset, name: str) -> Iterator[pa.Array]:
    """Yields a column's values, None too, some rows at a time, as Arrow arrays with JSON as text, images undecoded."""
    data = rows.select_columns([name]).with_format("arrow")  # other formats decode images
    size = _SLICE_OF_IMAGES if _holds_bytes(rows.features[name]) else _SLICE
    for start in range(0, len(rows), size):
        array = data[start : start + size].column(name).combine_chunks()
        yield array.storage if isinstance(array, pa.ExtensionArray) else array


def _holds_bytes(feature: Any) -> bool:
    """Whether cells of a feature of `datasets` hold images, sounds, videos or other bytes, in nested fields too."""
    if isinstance(feature, Image | Audio | Video) or (isinstance(feature, Value) and "binary" in feature.dtype):
        return True
    if isinstance(feature, Mapping):
        return any(map(_holds_bytes, feature.values()))
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return inner is not None and _holds_bytes(inner)


def _is_text(feature: Any) -> bool:
    """Whether Arrow stores the cells of a feature as text: strings and JSON."""
    return isinstance(feature, Json) or (isinstance(feature, Value) and feature.dtype in ("string", "large_string"))


def first_values(rows: Dataset, names: Sequence[str]) -> dict[str, Any]:
    """Returns column -> its first filled value (`is_filled`), as by `plain_value`; without columns that have none."""
    found = {}
    for name in names:
        feature = rows.features[name]
        for array in _slices(rows, name):
            if _is_text(feature):
                blank = r'^(\s*|\[\s*\]|\{\s*\}|null|"")$' if isinstance(feature, Json) else r"^\s*$"
                array = array.filter(pc.invert(pc.match_substring_regex(array, blank)))
            values = (plain_value(item, feature) for item in array.drop_null().to_pylist())
            value = next((value for value in values if is_filled(value)), None)
            if value is not None:
                found[name] = value
                break
    return found


def _count(rows: Dataset, name: str, pattern: str) -> int:
    """Counts the cells of a text column in which a regular expression of Arrow (RE2) is found."""
    return sum(pc.sum(pc.match_substring_regex(array, pattern)).as_py() or 0 for array in _slices(rows, name))


def _distinct(rows: Dataset, name: str, most: int) -> list[Any] | None:
    """Returns sorted distinct nonempty values, texts in lower case; None if over `most`, or for lists or objects."""
    found: set[Any] = set()
    feature = rows.features[name]
    if not isinstance(feature, Value | ClassLabel | Json):
        return None
    for array in _slices(rows, name):
        values = pc.unique(array).drop_null()
        if len(values) > 100 * most:
            return None
        plain = [json.loads(v) if isinstance(feature, Json) else plain_value(v, feature) for v in values.to_pylist()]
        if any(isinstance(value, list | dict) for value in plain):
            return None
        found |= {value.strip().lower() if isinstance(value, str) else value for value in plain}
        if len(found) > most:
            return None
    return sorted(found - {"", None}, key=str)


def _kind_of(rows: Dataset, name: str) -> str:
    """Returns a column's kind: "turns", "tools", "calls" (of tools), "images" (also sounds and videos), or "" if none.

    In a column of text, any cell that looks so decides, for "images" all cells; in other columns the feature decides.
    """
    feature = rows.features[name]
    if _is_text(feature):
        counts = {"turns": 0, "tools": 0, "calls": 0, "images": 0}
        filled = 0
        for array in _slices(rows, name):
            filled += pc.sum(pc.match_substring_regex(array, r"\S")).as_py() or 0
            counts["images"] += pc.sum(pc.match_substring_regex(array, _IMAGES)).as_py() or 0
            lists = array.filter(pc.match_substring_regex(array, r'^\s*\[\s*["{]'))
            turns = lists.filter(pc.match_substring_regex(lists, _TURNS))
            counts["turns"] += pc.sum(pc.match_substring_regex(turns, _SAID)).as_py() or 0
            counts["tools"] += pc.sum(pc.match_substring_regex(lists, _TOOLS)).as_py() or 0
            counts["calls"] += pc.sum(pc.match_substring_regex(lists, _CALLS)).as_py() or 0
        counts["images"] = counts["images"] if counts["images"] == filled else 0
        return next((kind for kind, count in counts.items() if count), "")
    if isinstance(feature, Image | Audio | Video) or (isinstance(feature, Value) and "binary" in feature.dtype):
        return "images"
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    if isinstance(inner, Image | Audio | Video):
        return "images"
    keys = set(inner) if isinstance(inner, dict) else set()
    if {"bytes", "path"} <= keys:
        return "images"
    if inner is feature:
        return ""
    if keys & {"role", "from"} and keys & {"content", "value"}:
        return "turns"
    called = keys | (
        set(inner["function"]) if isinstance(inner, dict) and isinstance(inner.get("function"), dict) else set()
    )
    if "name" in called and called & {"parameters", "arguments"}:
        return "tools" if "parameters" in called else "calls"
    return ""


def _flags(rows: Dataset, names: Sequence[str]) -> dict[str, list[str]]:
    """Returns column -> its distinct words, for columns of `names` with a name of reasoning but few short words."""
    words, found = set(TABLES["flags"]["words"]), {}
    for name in names:
        if name.strip().lower() not in NAMES["reasoning"][0] or (values := _distinct(rows, name, _FEW)) is None:
            continue
        texts = [str(value).lower() for value in values]
        short = all(1 < len(text) <= 24 and len(text.split()) <= 2 and text[-1:] not in ".!?" for text in texts)
        filled = len(rows) - sum(array.null_count for array in _slices(rows, name))
        if texts and (set(texts) <= words or (short and filled >= 3 * len(texts))):
            found[name] = texts
    return found


def _is_converted(feature: Any) -> bool:
    """Whether `plain_value` changes values of a feature."""
    if isinstance(feature, ClassLabel | Mapping | Json) or is_short_float(feature):
        return True
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return inner is not None and _is_converted(inner)


def _shown(value: Any) -> str:
    """Returns a value as text, shortened to 40 characters."""
    return shorten(value if isinstance(value, str) else str(value), 40, placeholder="...")


# ------------------------------------------------------------------------------------- columns that change the meaning


def _with_last_reply(
    rows: Dataset,
    layout: Layout,
    config: DataConfig,
    names: Sequence[str],
    empty: Sequence[str],
    kinds: Mapping[str, str],
) -> tuple[Layout, DataConfig]:
    """Gives a column the role "answer" if chats end in a question and the column has the last reply.

    Returns the new layout, and the config with the role in its `columns`; or both unchanged. Raises ValueError if
    columns may hold the reply, and not exactly one of their names is in "replies" (columns.toml). `names` are the
    columns; `empty` and `kinds` are as in `detect_layout`.
    """
    if layout.format != "messages" or "answer" in layout.columns or "answer" in (config.columns or {}):
        return layout, config
    answers = {*NAMES["answer"][0], *NAMES["answer"][1]}
    candidates = [name for name in layout.ignored if name.strip().lower() in answers and name not in empty]
    candidates = [name for name in candidates if name not in layout.left_out]
    column = layout.columns["messages"]
    if not candidates or column not in rows.features:
        return layout, config
    part = rows.select(_not_answered(rows, column)).select_columns([column, *candidates])
    if not any(
        _ends_in_question(row[column])
        and any(is_filled(decoded(row[name], rows.features[name])) for name in candidates)
        for row in part
    ):
        return layout, config
    replies = [name for name in candidates if name.strip().lower() in TABLES["replies"]["names"]]
    if len(replies) != 1:
        listed = " or ".join(candidates)
        named = f"{{messages: {column}, answer: {candidates[0]}}}"
        raise ValueError(
            f"chats in column {column!r} end in a question, and column {listed} may hold the reply: set data.columns="
            f"{named} to train on it, or {{{candidates[0]}: ''}} to leave it out"
        )
    config = replace(config, columns={**(config.columns or {}), "messages": column, "answer": replies[0]})
    return detect_layout(names, config, empty, kinds, layout.images), config


def _not_answered(rows: Dataset, column: str) -> Sequence[int]:
    """Returns the numbers of rows whose chats may end in a question: JSON texts that surely end in a reply are out."""
    if not _is_text(rows.features[column]):
        return range(len(rows))
    masks = [pc.match_substring_regex(array, _ANSWERED) for array in _slices(rows, column)]
    return [number for number, match in enumerate(pa.chunked_array(masks).to_pylist()) if not match]


def _ends_in_question(value: Any) -> bool:
    """Whether the last turn of a chat, or of its JSON text, is no reply; false if it cannot be read."""
    try:
        turns = json.loads(value) if isinstance(value, str) else value
        return role_of(turns[-1]) not in ("assistant", "function_call", "tool_call")
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RecursionError):
        return False  # reading the row raises the error


def _switches(rows: Dataset, layout: Layout, first: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Finds unused columns that may mark rows as unwanted; `first` has the first values by column.

    Returns:
        The columns in which some rows are marked as unwanted; and by column a description of weights and of labels that
        are neither true nor false.
    """
    unwanted, others = [], {}
    for name in layout.ignored:
        low = name.strip().lower()
        if name not in first or name in layout.left_out or not _SWITCHES.fullmatch(low):
            continue
        is_label = _LABELS.fullmatch(low) and layout.format in ("prompt_completion", "messages")
        switches = [
            (switch if is_label else partial(is_wanted, name))(value) for value in _distinct(rows, name, _FEW) or [None]
        ]
        if None not in switches:
            unwanted += [name] * (False in switches)
        elif _WEIGHTS.search(low) and isinstance(first[name], int | float):
            others[name] = "weights of rows, which are not supported"
        elif is_label:
            others[name] = "whether a row is wanted, which must be true or false"
    return unwanted, others


def _refuse(
    layout: Layout, config: DataConfig, first: Mapping[str, Any], kinds: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Raises ValueError if unused columns in `first` may change a row's meaning, by name, `kinds` or `others`.

    All three are by column: first values, kinds of `_kind_of`, and descriptions from `_switches`.
    """
    patterns = {**TABLES["refused"]["any"], **TABLES["refused"].get(layout.format, {})}
    named = {role for role, column in (config.columns or {}).items() if column}
    if layout.format == "cot" and "reasoning" in layout.columns:
        patterns = dict(TABLES["refused"]["any"])
    if not named & {"answer", "completion", "messages"}:
        patterns |= TABLES["refused"]["replies"]
    unused = [name for name in layout.ignored if name in first and name not in layout.left_out]
    dropped = {role for role, column in (config.columns or {}).items() if not column}
    options = [name for name in unused if _OPTIONS.fullmatch(name.strip().lower())]
    problems = {}
    for name in unused:
        low = name.strip().lower()
        if any(low in group for role in dropped for group in NAMES.get(role, ())):
            continue  # data.columns removes its role
        if low in NAMES["messages"][0] and named & {"question", "prompt", "text"}:
            continue  # data.columns names other columns to read
        looks = TABLES["refused"]["values"].get(kinds.get(name, ""))
        why = next((why for pattern, why in patterns.items() if re.fullmatch(pattern, low)), looks)
        why = others.get(name, why)
        if name in options and len(options) > 1 and layout.format == "cot":
            why = "an option of the question; put all into one column, options"
        if why:
            problems[name] = f"{name!r} ({_shown(first[name])}) may hold {why}"
    if problems:
        role = _role_for(layout, problems)
        empty = ", ".join(f"{name}: ''" for name in problems)
        raise ValueError(
            f"columns without a role that may change the meaning of a row: {'; '.join(problems.values())}. These rows "
            f"are read as {layout}. {role}To leave them out, set data.columns={{{empty}}}"
        )


def _role_for(layout: Layout, problems: Mapping[str, str]) -> str:
    """Returns the advice to give columns a role."""
    if layout.format != "text":
        return "Give them a role in data.columns if they have one. "
    named = f"{{question: {layout.columns['text']}, answer: {next(iter(problems))}}}"
    return f"Name the columns of a question and its reply, as in data.columns={named}. "


# -------------------------------------------------------------------------------------- facts of the values of columns


def _with_values(rows: Dataset, layout: Layout) -> tuple[Layout, list[str]]:
    """Returns the layout with `closings` and `first_option` as found in the values, and notes for the report."""
    told = []
    if layout.filled:
        told.append(_WITHOUT)
    if layout.format == "messages" and "answer" in layout.columns:
        column = layout.columns["answer"]
        told.append(f"{column} is the last reply of a chat; the replies before it carry no loss")
    if "history" in layout.columns:
        told.append(f"the replies in {layout.columns['history']} carry loss too")
    for role in ("question", "context", "answer", "prompt", "completion", "system"):
        column = layout.columns.get(role, "")
        head = head_of(column, rows.column_names) if column else ""
        if not head or column in layout.chats or (role == "answer" and "tools" in layout.columns):
            continue
        if role == "answer" and layout.format == "prompt":
            continue
        if count := _objects(rows, layout, column):
            told.append(f"{count:,} of {len(rows):,} cells of {column} are objects or lists, read as JSON text")
            told += [f"{column}: {_WITHOUT}"] * (not isinstance(rows.features[head], Json | Value))
    column = layout.columns.get("answer", "")
    if column in rows.features and _is_text(rows.features[column]) and "reasoning" not in layout.columns:
        filled, found = _count(rows, column, r"\S"), []
        for closing, pattern in CLOSINGS.items():
            if not (
                count := _count(rows, column, pattern) - (_count(rows, column, HEADED) if closing == MARKED else 0)
            ):
                continue
            if count == filled:
                found.append(closing)
                told.append(f"{column}: all end in a line {closing!r}; the text before that is read as reasoning")
            else:
                numbers = ", except before a number" * (closing == MARKED)
                told.append(
                    f"{column}: {count:,} of {filled:,} end in a line {closing!r}; as not all do, the text before is "
                    f"not read as reasoning{numbers}"
                )
        layout = replace(layout, closings=frozenset(found))
    thought = layout.columns.get("reasoning", "")
    if thought in rows.features and _is_text(rows.features[thought]) and (count := _count(rows, thought, _NO_THOUGHT)):
        told.append(f"{thought}: {count:,} cells with a word such as N/A are read as no reasoning")
    if "options" in layout.columns and column:
        base, note = _first_option(rows, layout)
        layout, told = replace(layout, first_option=base), told + note
    return layout, told


def _objects(rows: Dataset, layout: Layout, column: str) -> int:
    """Counts the cells of a column, or of its field (dotted name), that are trained as JSON: objects and lists."""
    head = head_of(column, rows.column_names)
    feature = rows.features[head]
    if isinstance(feature, Value | ClassLabel) and head == column:
        return 0
    if isinstance(feature, Json) and not _count(rows, head, r"^\s*[\[{]"):
        return 0
    count = 0
    for row in rows.select_columns([head]):
        try:
            value = layout.plain(row)[column]
        except RowError:
            continue  # reading the row raises the error
        count += isinstance(value, list | Mapping) and not is_parts(value)
    return count


def _first_option(rows: Dataset, layout: Layout) -> tuple[int, list[str]]:
    """Returns the number of the first option (0 or 1, 0 if unknown), and [a note], or [] if no answer is a number."""
    numbers, last = set(), False
    options, answer = layout.columns["options"], layout.columns["answer"]
    if head_of(answer, rows.column_names) != answer or head_of(options, rows.column_names) != options:
        return 0, []
    for row in rows.select_columns([options, answer]):
        said = str(layout.plain(row)[answer]).strip()
        if not said.isdecimal():
            continue
        try:
            given = options_of(row[options], options)
        except ValueError:
            continue  # reading the row raises the error
        if given and said not in given and said not in given.values():
            numbers.add(int(said))
            last |= int(said) == len(given)
    if not numbers:
        return 0, []
    base = int(last and 0 not in numbers)
    span = f"{min(numbers)} to {max(numbers)}"
    return base, [f"{answer} holds numbers of options ({span}), read as counted from {base}"]


def _notes_of_chats(rows: Dataset, layout: Layout) -> list[str]:
    """Returns notes on the first `_CHATS` chats: unread keys, contents stored as JSON, and replies at the start."""
    column = layout.columns.get("messages", "")
    if column not in rows.features:
        return []
    systems = [name for name in (layout.columns.get("system", ""),) if name in rows.features]
    part = rows.select(range(min(len(rows), _CHATS))).select_columns([column, *systems])
    known = {key for name in ("read", "switches", "details", "reasoning") for key in TABLES["message_keys"][name]}
    unread: dict[str, str] = {}
    greeted = objects = parts = 0
    for row in part:
        try:
            turns = json.loads(row[column]) if isinstance(row[column], str) else row[column]
            greeted += role_of(turns[0]) == "assistant" and not any(is_filled(row[name]) for name in systems)
            for turn in turns:
                content = turn.get("content", turn.get("value"))
                objects += role_of(turn) != "tool" and becomes_json(content)
                parts += isinstance(content, str) and _PARTS.match(content) is not None
                for key in turn.keys() - known - unread.keys():
                    if is_filled(turn[key]):
                        unread[key] = _shown(turn[key])
        except (ValueError, TypeError, AttributeError, IndexError, KeyError, RecursionError):
            continue  # reading the row raises the error
    which = "" if len(part) == len(rows) else f" of the first {len(part):,}"
    notes = []
    if greeted:
        notes.append(f"{greeted:,} chats{which} begin with a reply, which carries no loss")
    if objects:
        notes.append(f"{objects:,} contents{which} are objects or lists, read as JSON text")
    if parts:
        notes.append(f"{parts:,} contents{which} are JSON text of parts, kept as they are")
    if unread:
        listed = ", ".join(f"{key} ({value})" for key, value in sorted(unread.items()))
        notes.append(f"keys of messages{which} that are only passed to the chat template: {listed}")
    return notes
