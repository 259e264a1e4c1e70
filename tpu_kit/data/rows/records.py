"""Converts JSON and CSV files to an Arrow file that also stores the line numbers and the problems of the rows.

Does not use Arrow's JSON parser, which crashes on files of `null` lines or deeply nested rows, converts texts that look
like dates, and reports no line numbers.
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
"""Name of the column with the location of a row, such as "rows.jsonl, line 3"."""

PROBLEM = "tpu_kit:problem"
"""Name of the column with the reason why a row cannot be read; None if it can be read."""


_CHUNK = 2**20  # bytes per read while counting lines


class Record(NamedTuple):
    """A row of a file.

    Attributes:
        location: "line 3", "line 3, column 5" of an error, "row 2" (from 0) of a JSON array, or as `read_lines`.
        values: cells by column; empty if the row has a problem.
        problem: why the row cannot be read; empty if it can.
    """

    location: str
    values: dict[str, Any]
    problem: str = ""


def read_records(system: Any, file: str, separator: str | None) -> Iterator[Record]:
    """Yields the rows of a file in order, without blank lines; a row that cannot be read has a problem.

    Args:
        system: the fsspec file system of the file.
        file: path in that file system; the suffix gives the compression.
        separator: separator of cells in CSV, which are all text; None for JSON: an object per line, or an array.

    Raises:
        ValueError: the file cannot be opened or decompressed, is not UTF-8 text, or is an array that is not valid JSON;
            a CSV file has a column twice, or quotes that do not match. The text names the file and, if known, the line.
    """
    options = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "", "compression": "infer"}
    try:
        with system.open(file, "rt", **options) as stream:
            yield from _json(stream, file) if separator is None else _csv(stream, file, separator)
    except ValueError:
        raise
    except Exception as error:  # compressions raise different classes of errors
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"data source {file}: cannot be read: {text}; is the file whole?") from error


def read_lines(system: Any, file: str, start: int, end: int) -> Iterator[Record]:
    """Yields the rows of a part of a JSON lines file: of all nonblank lines that begin in a range of bytes.

    Their locations are "byte N", because the lines before the part are not read; `line_of` converts them. A line that
    cannot be read gives a row with a problem.

    Args:
        system: the fsspec file system of the file.
        file: path in that file system; the file is not compressed.
        start: first byte of the range.
        end: byte after the range.

    Raises:
        ValueError: the part is not UTF-8 text, or begins a JSON array, which cannot be divided.
    """
    with system.open(file, "rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()  # the rest of a line that begins before the range
        position = stream.tell()
        while position < end and (line := stream.readline()):
            location, position = f"byte {position}", position + len(line)
            try:
                text = line.decode("utf-8" if location != "byte 0" else "utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise ValueError(f"data source {file}, {location}: not UTF-8 text; save the file as UTF-8") from error
            if location == "byte 0" and text.startswith("["):
                raise ValueError(
                    f"data source {file}: a JSON array of this size cannot be divided; write one row per line"
                )
            if text:
                value, _, problem = _decode(text, 1)
                yield Record(location, {}, problem) if problem else as_record(value, location)


def line_of(system: Any, file: str, location: str) -> str:
    """Converts a location "byte N" of `read_lines` to "line M", by reading `file`; returns others unchanged."""
    if not location.startswith("byte "):
        return location
    left, lines = int(location.removeprefix("byte ")), 1
    with system.open(file, "rb") as stream:
        while chunk := stream.read(min(left, _CHUNK)):
            left, lines = left - len(chunk), lines + chunk.count(b"\n")
    return f"line {lines}"


def _text_lines(stream: Any, file: str) -> Iterator[str]:
    """Yields the lines of a text stream, with their ends; raises ValueError at a line that is not UTF-8 or has NUL."""
    for number, line in enumerate(stream, start=1):
        try:
            line.encode()  # bytes that are not UTF-8 were read as surrogates
        except UnicodeEncodeError as error:
            text = f"data source {file}, line {number}: not UTF-8 text; save the file as UTF-8"
            raise ValueError(text) from error
        if "\0" in line:
            raise ValueError(f"data source {file}, line {number}: NUL bytes, so not text; save the file as UTF-8")
        yield line


# --------------------------------------------------------------------------------------------------------------- JSON


def _json(stream: Any, file: str) -> Iterator[Record]:
    """Yields the rows of an array of objects, or of JSON lines; a line that is not valid gives a row with a problem.

    Raises ValueError for an array that is not valid, and as `_text_lines`.
    """
    begin = next((line for line in stream if line.strip()), "")
    stream.seek(0)
    if begin.lstrip().startswith("["):  # an array of rows, possibly over many lines, or an array per line
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
    """Decodes JSON that begins at `line` of a file: (value, "line N", ""), or (None, "line N[, column M]", error)."""
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
    """Returns a JSON object from its keys and values; raises ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return values


_DECODER, _ENCODER = json.JSONDecoder(object_pairs_hook=_object), json.JSONEncoder(ensure_ascii=False)


_NOT_FINITE = (math.inf, -math.inf)


def as_record(value: Any, location: str) -> Record:
    """Returns the row of a decoded value; with a problem if it is no object or has half of a surrogate pair.

    Cells that are NaN or infinite become None; inside of lists and objects, they stay.
    """
    if not isinstance(value, dict):
        return Record(location, {}, f"a row must be an object, not {json.dumps(value)[:30]}")
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return Record(location, {}, "half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return Record(
        location, {name: None if cell in _NOT_FINITE or cell != cell else cell for name, cell in value.items()}
    )


# ---------------------------------------------------------------------------------------------------------------- CSV


def _csv(stream: Any, file: str, separator: str) -> Iterator[Record]:
    """Yields the rows of CSV with all cells as text: 007 is not 7, NA and null are words, an empty cell is empty.

    Strips white space around column names, and before cells if the header has it after every separator. A row with
    another number of cells has a problem; a column name that occurs twice and unmatched quotes raise ValueError.
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

    A column keeps its type if all its cells, None aside, are int, all float, or all bool. Other columns of texts and
    numbers (also int with float), columns of None, and int over 64 bits become text. The rest becomes JSON.

    Args:
        records: returns an iterator of (file, row), whose file is "" if the row's location names it. Called twice.
        target: path of the Arrow file; its folder is made, and an existing file replaced.
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
    """Returns the type that a cell is stored with; whole numbers over 64 bits are stored as text."""
    return str if type(cell) is int and not -(2**63) <= cell < 2**63 else type(cell)


def _feature(types: set[type]) -> Any:
    """Returns the feature of `datasets` for a column whose cells have the types of `_kind`."""
    if types in ({int}, {float}, {bool}):
        return Value({int: "int64", float: "float64", bool: "bool"}[types.pop()])
    return Value("string") if types <= {str, int, float} else Json()


def stored_cell(cell: Any, feature: Any) -> Any:
    """Converts a cell for a column with the type `feature`, which is Json or a `Value`; None stays None.

    Json columns get JSON text, columns of strings get text (2.0 becomes "2"), and other columns get the cell unchanged.
    """
    if cell is None or (isinstance(feature, Value) and feature.dtype != "string"):
        return cell
    if isinstance(feature, Json):
        return json.dumps(cell)
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)
