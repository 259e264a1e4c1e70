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
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Features, Json, Value
from datasets.arrow_writer import ArrowWriter

from tpu_kit.machine.storage import atomic

LOCATION = "tpu_kit:location"
"""The column with the location of a row, such as "rows.jsonl, line 3"."""

PROBLEM = "tpu_kit:problem"
"""The column with the reason why a row cannot be read; None if it can."""


_CHUNK = 2**20  # bytes that are read at a time to count lines


class Record(NamedTuple):
    """One row of a file.

    Attributes:
        location: "line 3", or "row 2" of a JSON array, from 0.
        values: column -> cell; empty if the row has a problem.
        problem: why it cannot be read; empty if it can.
    """

    location: str
    values: dict[str, Any]
    problem: str = ""


def read_records(system: Any, file: str, separator: str | None) -> Iterator[Record]:
    """Yields the rows of one file in order.

    Args:
        system: the fsspec file system that holds it.
        file: its path there; the name gives its compression.
        separator: between the cells of CSV; None for JSON: an object on each line, or an array of them.

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


def read_lines(system: Any, file: str, start: int, end: int) -> Iterator[Record]:
    """Yields the rows of a part of a file of JSON lines: those of the lines that begin in a range of bytes.

    Their locations are "byte N", as the lines before the part are not read; `line_of` counts them.

    Args:
        system: the fsspec file system that holds it.
        file: its path there; it is not compressed.
        start: the first byte of the range.
        end: the byte after the last one.

    Raises:
        ValueError: the file is no text, or a JSON array, which cannot be divided.
    """
    with system.open(file, "rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # the rest of a line that begins before
        position = stream.tell()
        while position < end and (line := stream.readline()):
            location, position = f"byte {position}", position + len(line)
            try:
                text = line.decode("utf-8" if location != "byte 0" else "utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"data source {file}, {location}: not UTF-8 text; save the file as UTF-8") from error
            if location == "byte 0" and text.startswith("["):
                raise ValueError(
                    f"data source {file}: a JSON array of this size cannot be divided; write a row on each line"
                )
            if text:
                value, _, problem = _decode(text, 1)
                yield Record(location, {}, problem) if problem else as_record(value, location)


def line_of(system: Any, file: str, location: str) -> str:
    """Returns the location of a row of `read_lines` by its line; any other location as it is."""
    if not location.startswith("byte "):
        return location
    left, lines = int(location.removeprefix("byte ")), 1
    with system.open(file, "rb") as stream:
        while chunk := stream.read(min(left, _CHUNK)):
            left, lines = left - len(chunk), lines + chunk.count(b"\n")
    return f"line {lines}"


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
    begin = next((line for line in stream if line.strip()), "")
    stream.seek(0)
    if begin.lstrip().startswith("["):  # an array of rows, perhaps over many lines, or an array on each line
        array, location, problem = _decode("".join(_text_lines(stream, file)), 1)
        if not problem:
            yield from (as_record(row, f"row {number}") for number, row in enumerate(array))
            return
        if _decode(begin, 1)[2]:
            raise ValueError(f"data source {file}, {location}: {problem}")
        stream.seek(0)
    for number, line in enumerate(_text_lines(stream, file), start=1):
        if line.strip():
            value, location, problem = _decode(line.rstrip(), number)
            yield Record(location, {}, problem) if problem else as_record(value, location)


def _decode(text: str, line: int) -> tuple[Any, str, str]:
    """Returns the value of a text that begins on a line, its location, and why it is not valid (empty if it is)."""
    try:
        return _DECODER.decode(text), f"line {line}", ""
    except json.JSONDecodeError as error:
        location = f"line {line + error.lineno - 1}, column {error.colno}"
        return None, location, f"not valid JSON: {error.msg.removesuffix(' at')}"
    except RecursionError:
        return None, f"line {line}", "nested too deep"
    except ValueError as error:
        return None, f"line {line}", str(error)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


_DECODER, _ENCODER = json.JSONDecoder(object_pairs_hook=_object), json.JSONEncoder(ensure_ascii=False)


_NOT_FINITE = (math.inf, -math.inf)


def as_record(value: Any, location: str) -> Record:
    """Returns a decoded value as a row, or why Arrow cannot hold it; cells of NaN and infinity become null."""
    if not isinstance(value, dict):
        return Record(location, {}, f"a row must be an object, not {json.dumps(value)[:30]}")
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return Record(location, {}, "half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return Record(
        location, {name: None if cell in _NOT_FINITE or cell != cell else cell for name, cell in value.items()}
    )


# ---------------------------------------------------------------------------------------------------------------- CSV


def _csv(stream: Any, file: str, separator: str) -> Iterator[Record]:
    """Yields the rows of CSV with all cells as text: 007 is not 7, NA and null are words, an empty cell is empty.

    White space around the names of columns is cut off, and before a cell if the header has it after each separator.
    """
    csv.field_size_limit(sys.maxsize)  # the default refuses cells over 128 KiB
    header = next((line for line in stream if line.strip()), "")
    stream.seek(0)
    spaced = separator + " "
    spaced_out = spaced in header and header.count(spaced) == header.count(separator)
    reader = csv.reader(_text_lines(stream, file), delimiter=separator, strict=True, skipinitialspace=spaced_out)
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            location, line = f"line {line}", reader.line_num + 1
            if not cells:  # a blank line
                continue
            if not names:
                names = [name.strip() or f"Unnamed: {i}" for i, name in enumerate(cells)]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    text = f"column {', '.join(twice)} occurs twice; rename one of them"
                    raise ValueError(f"data source {file}: {text}")
            elif len(cells) == len(names):
                yield Record(location, dict(zip(names, cells, strict=True)))
            else:
                count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                yield Record(location, {}, f"{count}, and the header has {len(names)}")
    except csv.Error as error:
        raise ValueError(
            f"data source {file}, line {line}: the quotes of a cell do not match ({error}); write a quote within "
            'quotes as ""'
        ) from error


# ----------------------------------------------------------------------------------------------------- the Arrow file


def write_records(records: Callable[[], Iterator[tuple[str, Record]]], target: Path) -> None:
    """Writes rows atomically as an Arrow file that `datasets` opens, with the columns `LOCATION` and `PROBLEM`.

    A column of texts and numbers becomes text; a column with lists or objects becomes JSON.

    Args:
        records: iterates over the rows, each with its file, or "" if the location names it; called twice.
        target: the file.
    """
    kinds: dict[str, set[type]] = {}
    for _, record in records():
        for name, cell in record.values.items():
            kinds.setdefault(name, set()).update([] if cell is None else [_kind(cell)])
    features = Features({name: _feature(types) for name, types in kinds.items()})
    columns = Features(features | {LOCATION: Value("string"), PROBLEM: Value("string")})
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(target, shared=True) as part, ArrowWriter(path=str(part), features=columns) as writer:
        for file, record in records():
            row = {name: stored_cell(record.values.get(name), feature) for name, feature in features.items()}
            place = f"{Path(file).name}, {record.location}" if file else record.location
            writer.write(row | {LOCATION: place, PROBLEM: record.problem or None})
        writer.finalize()


def _kind(cell: Any) -> type:
    """Returns the type of a cell; a whole number that Arrow's 64 bits cannot hold is stored as text."""
    return str if type(cell) is int and not -(2**63) <= cell < 2**63 else type(cell)


def _feature(types: set[type]) -> Any:
    if types in ({int}, {float}, {bool}):
        return Value({int: "int64", float: "float64", bool: "bool"}[types.pop()])
    return Value("string") if types <= {str, int, float} else Json()


def stored_cell(cell: Any, feature: Any) -> Any:
    """Returns a cell as its column stores it; in a column of text, whole numbers have no decimal point."""
    if cell is None or (isinstance(feature, Value) and feature.dtype != "string"):
        return cell
    if isinstance(feature, Json):
        return json.dumps(cell)
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
