"""Reads JSON and CSV files row by row into one Arrow file, and reports the place and the fault of each bad row.

Arrow's JSON parser is not used: it crashes on a file of `null` lines or of deeply nested rows, converts texts that look
like dates, and reports no line numbers.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from datasets import Features, Json, Value

from tpu_kit.data.columns import KNOWN
from tpu_kit.storage import atomic

PROBLEM = "tpu_kit:problem"
"""The column with the reason why a row cannot be used; present only if a row has a problem."""

_DEEPEST = 100  # levels of lists and objects in a row; Python's parser fails near 1,000, others crash
_MOST_COLUMNS = 1000
_BATCH_ROWS, _BATCH_CHARACTERS = 1000, 2**25  # limits of a batch in memory
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CHARACTER = re.compile(r"\S")
_LONG_NUMBER = re.compile(r"\d{19}")
_MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}


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


class _TwiceError(ValueError):
    pass


def _is_suspect(text: str) -> bool:
    """Returns whether rows of a text may be nested too deeply or hold half a character, so that each is checked."""
    return text.count("[") + text.count("{") > _DEEPEST or _SURROGATE.search(text) is not None


def read_records(system: Any, file: str, separator: str | None) -> Iterator[Record]:
    """Yields the rows of one file in order.

    Args:
        system: the fsspec file system that holds it.
        file: its path there; the name gives its compression.
        separator: between the cells of CSV; None for JSON (lines, an array, or an object around an array).

    Raises:
        ValueError: the file, not one of its rows, cannot be read; the text names the file and the line.
    """
    try:
        with system.open(
            file, "rt", encoding="utf-8-sig", compression="infer", newline=None if separator is None else ""
        ) as stream:
            yield from _json(stream, file) if separator is None else _csv(stream, file, separator)
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(system, file)) from error
    except ValueError:
        raise
    except Exception as error:  # each compression has its own errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data source {file}: cannot be read: {text}; is the file whole?") from error


def _not_utf8(system: Any, file: str) -> str:
    with system.open(file, "rb") as raw:
        start = raw.read(8)
    if kind := next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None):
        return f"data source {file}, line 1: not UTF-8; the file is {kind[1:]}: have its name end in {kind}"
    with system.open(file, "rb", compression="infer") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"data source {file}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8"
    return f"data source {file}: not UTF-8; save the file as UTF-8"


def _without_nul(lines: Iterator[str], file: str) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise ValueError(f"data source {file}, line {number}: NUL bytes, so no text; save the file as UTF-8")
        yield line


# --------------------------------------------------------------------------------------------------------------- JSON


def _json(stream: Any, file: str) -> Iterator[Record]:
    lines = ((i, line) for i, line in enumerate(_without_nul(stream, file), start=1) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    number, line = first
    parsed = _parsed_line(number, line)
    if line.lstrip().startswith("[") or (isinstance(parsed, json.JSONDecodeError) and _is_unfinished(line, parsed)):
        stream.seek(0)
        yield from _json_document("".join(_without_nul(stream, file)), file)
        return
    second = next(lines, None)
    if second is None and isinstance(parsed, Record) and (field := _only_field(parsed.values)):
        yield from _json_array(parsed.values[field], _is_suspect(line))
        return
    for number, line in itertools.chain([first], [second] if second else [], lines):
        parsed = _parsed_line(number, line)
        if isinstance(parsed, json.JSONDecodeError):
            place = f"line {number}, column {parsed.colno}"
            parsed = Record(place, {}, f"not valid JSON: {parsed.msg.removesuffix(' at')}")
        yield parsed


def _is_unfinished(line: str, error: json.JSONDecodeError) -> bool:
    """Returns whether a line is the beginning of an object that continues on the next lines."""
    in_text = error.msg.startswith("Invalid control character")
    return line.lstrip().startswith("{") and error.pos >= len(line.rstrip()) and not in_text


def _parsed_line(number: int, line: str) -> Record | json.JSONDecodeError:
    place = f"line {number}"
    try:
        value = _decoder.decode(line)
    except json.JSONDecodeError as error:
        return error
    except (RecursionError, ValueError) as error:
        return Record(place, {}, _unreadable(error))
    return _record(place, value, _is_suspect(line))


def _json_document(text: str, file: str) -> Iterator[Record]:
    """Yields the rows of a JSON array, of an object around an array, or of several values one after another."""
    values: list[tuple[str, Any]] = []
    line, end, start = 1, 0, _first_character(text, 0)
    try:
        while start < len(text):
            line += text.count("\n", end, start)
            place = f"line {line}"
            value, end = _decoder.raw_decode(text, start)
            line += text.count("\n", start, end)
            values.append((place, value))
            start = _first_character(text, end)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{file}, {place}: not valid JSON: {error.msg.removesuffix(' at')}") from error
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{file}, {place}: {_unreadable(error)}") from error
    suspect = _is_suspect(text)
    if len(values) == 1 and isinstance(values[0][1], list):
        yield from _json_array(values[0][1], suspect)
    elif len(values) == 1 and isinstance(values[0][1], dict) and (field := _only_field(values[0][1])):
        yield from _json_array(values[0][1][field], suspect)
    else:
        yield from (_record(place, value, suspect) for place, value in values)


def _first_character(text: str, start: int) -> int:
    found = _CHARACTER.search(text, start)
    return found.start() if found else len(text)


def _json_array(values: list[Any], suspect: bool) -> Iterator[Record]:
    yield from (_record(f"row {i}", value, suspect) for i, value in enumerate(values))


def _only_field(values: dict[str, Any]) -> str | None:
    """Returns the field with the rows of a file that is one object, such as {"data": [...]}; None without one."""
    if {name.lower() for name in values} & KNOWN:
        return None
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    held = [name for name, items in lists.items() if any(isinstance(item, dict) for item in items)]
    return held[0] if len(held) == 1 else None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common()
        raise _TwiceError(f"the key {twice!r} occurs twice")
    return values


_decoder = json.JSONDecoder(object_pairs_hook=_pairs)


def _unreadable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"nested more than {_DEEPEST} levels deep"
    if isinstance(error, _TwiceError):
        return str(error)
    return f"a whole number of more than {sys.get_int_max_str_digits():,} digits; write it as text"


def _record(place: str, value: Any, suspect: bool) -> Record:
    """Checks one decoded value."""
    if not isinstance(value, dict):
        kinds = {type(None): "null", str: "text", bool: "true or false", list: "a list"}
        return Record(place, {}, f"a row must be an object, not {kinds.get(type(value), 'a number')}")
    if suspect:
        if _is_too_deep(value):
            return Record(place, {}, f"nested more than {_DEEPEST} levels deep")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return Record(place, {}, "half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    for name, cell in value.items():
        if isinstance(cell, (dict, list)) and (problem := _cell_problem(cell)):
            return Record(place, {}, f"column {name!r} holds {problem}")
    return Record(place, value)


def _is_too_deep(value: Any, levels: int = _DEEPEST) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_too_deep(item, levels - 1) for item in items)


def _cell_problem(cell: Any) -> str:
    """Returns the value in a list or an object that cannot be stored; empty without one."""
    try:
        text = json.dumps(cell, allow_nan=False)
    except ValueError:
        return "NaN or Infinity, which are not JSON; write null"
    if _LONG_NUMBER.search(text):
        try:
            Json().decode_example(text)
        except ValueError:
            return "a whole number of more than 64 bits; write it as text"
    return ""


# ---------------------------------------------------------------------------------------------------------------- CSV


def _csv(stream: Any, file: str, separator: str) -> Iterator[Record]:
    """Yields the rows of CSV with all cells as text: 007 is not 7, NA and null are words, an empty cell is empty."""
    csv.field_size_limit(sys.maxsize)  # the default refuses cells over 128 KiB
    reader = csv.reader(_without_nul(stream, file), delimiter=separator, strict=True)
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
                continue
            if len(cells) != len(names):
                count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                yield Record(place, {}, f"{count}, and the header has {len(names)}")
            else:
                yield Record(place, dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise ValueError(
            f"data source {file}, line {line}: the quotes of a cell do not match ({error}); write a quote within "
            'quotes as ""'
        ) from error


# ----------------------------------------------------------------------------------------------------- the Arrow file


def keep_records(records: Callable[[], Iterator[tuple[str, Record]]], target: Path) -> None:
    """Writes rows atomically as an Arrow file that `datasets` opens.

    A column of texts and numbers becomes text, with the numbers as `schemas` writes them; a column with lists or
    objects becomes JSON.

    Args:
        records: iterates over the rows, each with its file; called twice.
        target: the file.

    Raises:
        ValueError: the files have different columns, no columns, or too many.
    """
    features = _features(records())
    schema = features.arrow_schema
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic.replacing(target, shared=True) as part,
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_stream(sink, schema) as writer,
    ):
        for batch in _batches(records()):
            arrays = [_array([_cell(record, name) for record in batch], features[name]) for name in schema.names]
            writer.write_batch(pa.record_batch(arrays, schema=schema))


def _features(records: Iterator[tuple[str, Record]]) -> Features:
    kinds: dict[str, set[str]] = {}  # of the whole source
    first_file, first_columns, problems = "", set[str](), False
    for file, group in itertools.groupby(records, key=lambda pair: pair[0]):
        columns: set[str] = set()
        for _, record in group:
            problems = problems or bool(record.problem)
            for name, cell in record.values.items():
                columns.add(name)
                found = kinds.setdefault(name, set())
                if cell is not None:
                    found.add(_storage(cell))
            if len(kinds) > _MOST_COLUMNS:
                raise ValueError(
                    f"data source {file}, {record.place}: there are {len(kinds):,} columns by then; write a row as "
                    "an object whose keys are the columns"
                )
        if not first_file:
            first_file, first_columns = file, columns
        if columns and first_columns and columns != first_columns:
            only = [f"{name!r} is only in {first_file}" for name in sorted(first_columns - columns)]
            only += [f"{name!r} is only in {file}" for name in sorted(columns - first_columns)]
            raise ValueError(f"the columns are not the same in all files: {', '.join(only[:5])}")
        first_columns = first_columns or columns
    made = {name: _feature(found) for name, found in kinds.items()}
    return Features(made | ({PROBLEM: Value("string")} if problems else {}))


def _storage(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool) and not -(2**63) <= cell < 2**63:
        return "big"
    return type(cell).__name__


def _feature(kinds: set[str]) -> Any:
    if kinds in ({"int"}, {"float"}, {"bool"}):
        return Value({"int": "int64", "float": "float64", "bool": "bool"}[kinds.pop()])
    return Value("string") if kinds <= {"str", "int", "float", "big"} else Json()


def _cell(record: Record, name: str) -> Any:
    return record.problem or None if name == PROBLEM else record.values.get(name)


def _array(cells: list[Any], feature: Any) -> Any:
    if isinstance(feature, Json):
        texts = [None if cell is None else json.dumps(cell) for cell in cells]
        kind = feature()
        return pa.ExtensionArray.from_storage(kind, pa.array(texts, kind.storage_type))
    if feature.dtype == "string":
        cells = [_text(cell) for cell in cells]
    return pa.array(cells, feature())


def _text(cell: Any) -> str | None:
    """Returns a cell of a column of texts and numbers as text; NaN and infinity become None."""
    if isinstance(cell, float):
        with contextlib.suppress(ValueError, OverflowError):
            return str(int(cell)) if cell == int(cell) else repr(cell)
        return None
    return cell if cell is None or isinstance(cell, str) else str(cell)


def _batches(records: Iterator[tuple[str, Record]]) -> Iterator[list[Record]]:
    batch: list[Record] = []
    size = 0
    for _, record in records:
        batch.append(record)
        size += sum(len(cell) for cell in record.values.values() if isinstance(cell, str))
        if len(batch) == _BATCH_ROWS or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
