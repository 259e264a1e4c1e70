"""Reads JSON and CSV files row by row into one Arrow file, which keeps the line of each row and why it is bad.

Arrow's own JSON parser is not used: it crashes on a file of `null` lines or of deeply nested rows, converts texts that
look like dates, and reports no line numbers.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Features, Json, Value
from datasets.arrow_writer import ArrowWriter

from tpu_kit.data.columns import KNOWN
from tpu_kit.storage import atomic

PLACE = "tpu_kit:place"
"""The column with the place of a row, such as "rows.jsonl, line 3"."""

PROBLEM = "tpu_kit:problem"
"""The column with the reason why a row cannot be used; None if it can."""

_DEEPEST = 100  # levels of lists and objects in a row; Python's parser fails near 1,000, others crash
_MOST_COLUMNS = 1000
_KINDS = {type(None): "null", str: "text", bool: "true or false", list: "a list"}


class Record(NamedTuple):
    """One row of a file.

    Attributes:
        place: its place: "line 3", or "row 2" of a JSON array, from 0.
        values: column -> cell; empty if the row has a problem.
        problem: why it cannot be used; empty if it can.
    """

    place: str
    values: dict[str, Any]
    problem: str = ""


def read_records(system: Any, file: str, separator: str | None) -> Iterator[Record]:
    """Yields the rows of one file in order.

    Args:
        system: the fsspec file system that holds it.
        file: its path there; the name gives its compression.
        separator: between the cells of CSV; None for JSON (lines, an array, or an object around an array).

    Raises:
        ValueError: the file, not one of its rows, cannot be read; the text names the file and the line.
    """
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "", "compression": "infer"}
    try:
        with system.open(file, "rt", **options) as stream:
            yield from _json(stream, file) if separator is None else _csv(stream, file, separator)
    except ValueError:
        raise
    except Exception as error:  # each compression has its own errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data source {file}: cannot be read: {text}; is the file whole?") from error


def _text_lines(stream: Any, file: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        try:
            line.encode()  # bytes that are not UTF-8 were read as surrogates
        except UnicodeEncodeError as error:
            text = f"data source {file}, line {number}: not UTF-8 text; save the file as UTF-8"
            raise ValueError(text) from error
        if "\0" in line:
            raise ValueError(f"data source {file}, line {number}: NUL bytes, so no text; save the file as UTF-8")
        yield line


# --------------------------------------------------------------------------------------------------------------- JSON


def _json(stream: Any, file: str) -> Iterator[Record]:
    lines = ((number, line) for number, line in enumerate(_text_lines(stream, file), start=1) if line.strip())
    first = list(islice(lines, 2))
    if len(first) == 1 or (first and _is_document(first[0][1], file)):
        stream.seek(0)
        yield from _json_document("".join(_text_lines(stream, file)), file)
        return
    for number, line in chain(first, lines):
        try:
            yield _checked(f"line {number}", _decoder.decode(line))
        except json.JSONDecodeError as error:
            yield Record(f"line {number}, column {error.colno}", {}, _invalid(error))
        except (RecursionError, ValueError) as error:
            yield Record(f"line {number}", {}, _invalid(error))


def _is_document(line: str, file: str) -> bool:
    """Returns whether the first line begins a value of several lines."""
    if line.lstrip().startswith("["):
        return True
    try:
        _decoder.decode(line)
    except (RecursionError, ValueError):
        return ".json" in Path(file).suffixes
    return False


def _json_document(text: str, file: str) -> Iterator[Record]:
    try:
        document = _decoder.decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"data source {file}, {place}: {_invalid(error)}") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"data source {file}, line 1: {_invalid(error)}") from error
    if isinstance(document, dict) and not {name.lower() for name in document} & KNOWN:  # such as {"data": [...]}
        lists = [x for x in document.values() if isinstance(x, list) and any(isinstance(row, dict) for row in x)]
        document = lists[0] if len(lists) == 1 else document
    if isinstance(document, list):
        yield from (_checked(f"row {number}", row) for number, row in enumerate(document))
    else:
        yield _checked("line 1", document)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


_decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)


def _invalid(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg.removesuffix(' at')}"
    return f"nested more than {_DEEPEST} levels deep" if isinstance(error, RecursionError) else str(error)


def _checked(place: str, value: Any) -> Record:
    """Returns a decoded value as a row, with the problem if Arrow could not hold it."""
    if not isinstance(value, dict):
        return Record(place, {}, f"a row must be an object, not {_KINDS.get(type(value), 'a number')}")
    if _is_deep(value):
        return Record(place, {}, f"nested more than {_DEEPEST} levels deep")
    for name, cell in value.items():
        text = cell
        try:
            if isinstance(cell, (dict, list)):
                text = json.dumps(cell, ensure_ascii=False, allow_nan=False)
                Json().decode_example(text)
            f"{name}{text}".encode()
        except UnicodeEncodeError:
            return Record(place, {}, "half of a surrogate pair (\\ud800 to \\udfff), which is no character")
        except ValueError:
            text = "NaN, Infinity or a whole number of more than 64 bits; write null or text"
            return Record(place, {}, f"column {name!r} holds {text}")
    return Record(place, value)


def _is_deep(value: Any, levels: int = _DEEPEST) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(item, levels - 1) for item in items)


# ---------------------------------------------------------------------------------------------------------------- CSV


def _csv(stream: Any, file: str, separator: str) -> Iterator[Record]:
    """Yields the rows of CSV with all cells as text: 007 is not 7, NA and null are words, an empty cell is empty."""
    csv.field_size_limit(sys.maxsize)  # the default refuses cells over 128 KiB
    reader = csv.reader(_text_lines(stream, file), delimiter=separator, strict=True)
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            place, line = f"line {line}", reader.line_num + 1
            if not cells:  # a blank line
                continue
            if not names:
                names = [name or f"Unnamed: {i}" for i, name in enumerate(cells)]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    text = f"column {', '.join(twice)} occurs twice; rename one of them"
                    raise ValueError(f"data source {file}: {text}")
            elif len(cells) == len(names):
                yield Record(place, dict(zip(names, cells, strict=True)))
            else:
                count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                yield Record(place, {}, f"{count}, and the header has {len(names)}")
    except csv.Error as error:
        raise ValueError(
            f"data source {file}, line {line}: the quotes of a cell do not match ({error}); write a quote within "
            'quotes as ""'
        ) from error


# ----------------------------------------------------------------------------------------------------- the Arrow file


def write_records(records: Callable[[], Iterator[tuple[str, Record]]], target: Path) -> None:
    """Writes rows atomically as an Arrow file that `datasets` opens, with the columns `PLACE` and `PROBLEM`.

    A column of texts and numbers becomes text; a column with lists or objects becomes JSON.

    Args:
        records: iterates over the rows, each with its file; called twice.
        target: the file.

    Raises:
        ValueError: there are too many columns.
    """
    kinds: dict[str, set[str]] = {}
    for file, record in records():
        for name, cell in record.values.items():
            found = kinds.setdefault(name, set())
            if cell is not None:
                is_long = isinstance(cell, int) and not -(2**63) <= cell < 2**63
                found.add("str" if is_long else type(cell).__name__)
        if len(kinds) > _MOST_COLUMNS:
            text = f"more than {_MOST_COLUMNS:,} columns; write a row as an object whose keys are the columns"
            raise ValueError(f"data source {file}, {record.place}: there are {text}")
    features = Features({name: _feature(found) for name, found in kinds.items()})
    written = Features(features | {PLACE: Value("string"), PROBLEM: Value("string")})
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(target, shared=True) as part, ArrowWriter(path=str(part), features=written) as writer:
        for file, record in records():
            row = {name: _cell(record.values.get(name), feature) for name, feature in features.items()}
            writer.write(row | {PLACE: f"{Path(file).name}, {record.place}", PROBLEM: record.problem or None})
        writer.finalize()


def _feature(kinds: set[str]) -> Any:
    if kinds in ({"int"}, {"float"}, {"bool"}):
        return Value({"int": "int64", "float": "float64", "bool": "bool"}[kinds.pop()])
    return Value("string") if kinds <= {"str", "int", "float"} else Json()


def _cell(cell: Any, feature: Any) -> Any:
    """Returns a cell as its column stores it; in a column of text NaN and infinity become None."""
    if cell is None or (isinstance(feature, Value) and feature.dtype != "string"):
        return cell
    if isinstance(feature, Json):
        return json.dumps(cell)
    if isinstance(cell, float):
        return (str(int(cell)) if cell.is_integer() else repr(cell)) if math.isfinite(cell) else None
    return str(cell)
