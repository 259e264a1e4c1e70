"""Reads single values of a row: texts, numbers, objects, JSON text, options and switches.

Values become text by one rule: text stays, a number gets its shortest form, an object or a list becomes JSON, and
anything else is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, Json, LargeList, List, Value

_LETTERED = re.compile(r"\(?([A-Za-z])[).:](?:\s+|(?=\S))")
_NO, _YES = ("false", "0", "no", "0.0"), ("true", "1", "yes", "1.0")


class RowError(ValueError):
    """Raised if a row cannot be used; the caller adds its number."""


def text_of(value: Any, place: str) -> str:
    """Returns a value as text: a text unchanged, whole numbers without a decimal point, objects and lists as JSON.

    Args:
        value: text, a number, an object or a list.
        place: names the value in an error, such as "column 'answer'".

    Raises:
        RowError: the value is empty, true or false, not a finite number, or not a JSON value.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{place} is empty")
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        raise RowError(f"{place} holds {str(value).lower()}, a truth value; write the intended text, such as yes")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{place} holds {value}, which is not an answer")
    if isinstance(value, int | float):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if not isinstance(value, Mapping | list):
        raise RowError(f"{place} holds a {type(value).__name__}, text is needed: {str(value)[:60]}")
    if is_empty(value):
        raise RowError(f"{place} is empty")
    return json_of(value, place)


def json_of(value: Any, place: str) -> str:
    """Returns an object or a list as JSON.

    Raises:
        RowError: it contains a value that is not JSON, such as NaN; `place` names it in the error.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RowError(f"{place} holds a {type(value).__name__} that JSON cannot hold: {error}") from error


def is_empty(value: Any) -> bool:
    """Whether a value is None, white space, an object without keys, or a list of only these."""
    if isinstance(value, list):
        return all(map(is_empty, value))
    return not value.strip() if isinstance(value, str) else value is None or value == {}


def alternatives(value: Any) -> list[str]:
    """Returns the nonempty items of a list of texts and numbers, as texts; an empty list for any other value."""
    items = [item for item in value if item is not None] if isinstance(value, list) else []
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        return []
    return [text_of(item, "an answer") for item in items if is_filled(item)]


def parsed(value: Any, column: str) -> Any:
    """Parses a text as JSON (RowError if it is not valid), white space as None; returns other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (json.JSONDecodeError, RecursionError) as error:
        raise RowError(f"column {column!r} is not valid JSON: {error}: {value[:60]!r}") from error


def without_none(value: Any, filled: bool = True) -> Any:
    """Returns a copy of a value without the keys of objects whose values are None, at any depth; lists keep None.

    If `filled` is false, other values of the keys arguments, content and value stay as they are.
    """
    if isinstance(value, Mapping):
        kept = () if filled else ("arguments", "content", "value")
        return {
            key: item if key in kept else without_none(item, filled) for key, item in value.items() if item is not None
        }
    return [without_none(item, filled) for item in value] if isinstance(value, list) else value


def is_filled(value: Any) -> bool:
    """Whether a cell holds more than None, white space, NaN, or a list or object of only these; 0 and False count."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, Mapping):
        return any(map(is_filled, value.values()))
    if isinstance(value, list):
        return any(map(is_filled, value))
    return value is not None and value == value


def switch(value: Any) -> bool | None:
    """Parses true or false from a bool, 0, 1 or a text (true, yes, 1, ...) in any case; None for other values."""
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    return {**dict.fromkeys(_NO, False), **dict.fromkeys(_YES, True)}.get(text)


def plain_value(value: Any, feature: Any) -> Any:
    """Converts a value of Arrow to the form that its author wrote.

    Decodes JSON, replaces class numbers by names (None for no class), gives a float32 or float16 its shortest form
    (0.1), and removes keys with None from objects that are not JSON. Other values, such as images, stay.

    Args:
        value: a value of `without_decoding`; lists and objects may be decoded already.
        feature: its feature in `datasets`.
    """
    if value is None:
        return None
    if isinstance(feature, Json):
        return json.loads(value) if isinstance(value, str) else value
    if isinstance(feature, ClassLabel):
        return feature.int2str(value) if 0 <= value < feature.num_classes else None
    if isinstance(feature, Value):
        return float(str(np.dtype(feature.dtype).type(value))) if is_short_float(feature) else value
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {key: plain_value(item, feature.get(key)) for key, item in value.items() if item is not None}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return [plain_value(item, inner) for item in value] if isinstance(value, list) and inner is not None else value


def decoded(value: Any, feature: Any) -> Any:
    """Returns a value of `without_decoding` with its JSON decoded, in nested fields too; other values stay."""
    if isinstance(feature, Json):
        return None if value is None else json.loads(value)
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        return {key: decoded(item, feature.get(key)) for key, item in value.items()}
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return [decoded(item, inner) for item in value] if isinstance(value, list) and inner is not None else value


def without_decoding(rows: Dataset) -> Dataset:
    """Returns a view of the rows that gives JSON cells as text, and images as {"bytes": ..., "path": ...}.

    Nested cells too. `datasets` itself would decode JSON with changes, such as of 0.3. The argument stays as it is.
    """

    def changed(feature: Any) -> Any:
        if isinstance(feature, Json):
            return Json(decode=False)
        if isinstance(feature, Image):
            return Image(decode=False)
        if isinstance(feature, dict):
            return {key: changed(inner) for key, inner in feature.items()}
        return replace(feature, feature=changed(feature.feature)) if isinstance(feature, List | LargeList) else feature

    info = rows.info.copy()
    info.features = Features({name: changed(feature) for name, feature in rows.features.items()})
    return Dataset(rows.data, info, rows.split, rows._indices, rows._fingerprint)


def is_short_float(feature: Any) -> bool:
    """Whether a feature of `datasets` stores floats with fewer bits than Python's."""
    return isinstance(feature, Value) and feature.dtype in ("float16", "float32")


def options_of(value: Any, column: str) -> dict[str, str]:
    """Returns the options of a question: label -> text, both stripped, in order; {} for an empty cell.

    Accepts a list of texts, also with letters ("A) yes"), {"label": [...], "text": [...]}, an object from label to
    text, or a list of objects with a label and a text. The JSON text of these is also accepted. Texts without labels
    get A, B, ... `column` is for errors.

    Raises:
        RowError: the value has another form; an option is no text or number; labels are equal, or not as many as texts;
            or there are more than 26 texts without labels.
    """
    if not is_filled(value):
        return {}
    refused = RowError(f"column {column!r} does not hold a list of options: {str(value)[:60]}")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise refused from None
    labels: list[Any] | None = None
    texts = value
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        texts, labels = value["text"], value.get("label")
    elif isinstance(value, Mapping):
        given = {label: text for label, text in value.items() if text is not None}  # Arrow's None is a missing key
        texts, labels = list(given.values()), list(given)
    elif isinstance(value, list) and value and all(isinstance(x, Mapping) and len(x) == 2 for x in value):
        pairs = [_labelled(option) for option in value]
        labels, texts = [label for label, _ in pairs], [text for _, text in pairs]
    if not isinstance(texts, list) or not all(isinstance(x, str | int | float) for x in texts):
        raise refused
    texts = [text_of(text, f"an option of column {column!r}").strip() for text in texts]
    if not labels:
        labels, texts = _own_letters(texts)
    if len(labels) != len(texts) or len(set(map(str, labels))) < len(labels):
        raise RowError(f"column {column!r} has {len(texts)} options and the labels {labels}")
    return {str(label).strip(): text for label, text in zip(labels, texts, strict=True)}


def _labelled(option: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns label and text of an object with two keys; (None, None) if no key means a label."""
    for label in ("label", "key", "id", "letter", "option"):
        if label in option:
            return option[label], next((text for name, text in option.items() if name != label), None)
    return None, None


def _own_letters(texts: list[str]) -> tuple[list[str], list[str]]:
    """Returns labels A, B, ... and texts, without these letters if all texts begin so; RowError above 26 texts."""
    if len(texts) > 26:
        raise RowError(f"there are {len(texts)} options, more than letters; give them labels")
    expected = [chr(ord("A") + i) for i in range(len(texts))]
    matches = [_LETTERED.match(text) for text in texts]
    if len(texts) > 1 and [match[1].upper() if match else "" for match in matches] == expected:
        return [match[1] for match in matches if match], [
            text[match.end() :].strip() for text, match in zip(texts, matches, strict=True) if match
        ]
    return expected, texts
