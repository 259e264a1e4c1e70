"""Converts rows with the user's function that `data.format` names; it returns messages, a text, or columns.

The results are stored like the rows of a JSON file, and all further steps read them like such a file.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from datasets import Dataset, Features, Value
from datasets import config as datasets_config
from datasets.fingerprint import Hasher

from tpu_kit.config.named_values import FUNCTION, imported
from tpu_kit.data.rows.field_values import RowError, decoded
from tpu_kit.data.rows.records import LOCATION, PROBLEM, Record, as_record, write_records
from tpu_kit.machine.compatibility import code_of

_BATCH = 1000  # rows per call of a function of several rows
_MADE = Features({"made": Value("string"), "problem": Value("string")})


def own_function(name: str) -> Callable[..., Any] | None:
    """Returns the function that `data.format` names; None for a format of the kit.

    Raises:
        ValueError: the function cannot be imported, or cannot be called with a single argument.
    """
    if not FUNCTION.fullmatch(name):
        return None
    try:
        function = imported(name)
    except ValueError as error:
        raise ValueError(f"data.format={name}: {error}") from error
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        takes = f"{name}{inspect.signature(function)}"
        raise ValueError(f"data.format: {takes} is not called with one row; write (row), or (rows) for many") from error
    return function


def own_rows(rows: Dataset, name: str, function: Callable[..., Any], source: str, processes: int | None) -> Dataset:
    """Returns the results of the user's function as rows, with `LOCATION` and `PROBLEM`; caches them in a file.

    A text is the column "text", a list "messages", an object gives its keys. If the function raises an error, or
    returns {}, another type or values that JSON lacks, the row has a problem and no values. The number and order of
    rows stay. The file depends on the rows and the function's code.

    Args:
        rows: result of `without_decoding`; a row with a problem keeps it, and the function does not get it.
        name: name of the function, "module:function".
        function: takes a row and returns its result. If it has a parameter `rows`, it takes a list of rows and returns
            a list of as many results; if that fails, it is called again with lists of one row.
        source: source of the rows, shown with the progress.
        processes: number of processes that call it; None for only this process.

    Raises:
        ValueError: the function reads an object that cannot be hashed.
    """
    code = code_of(name).hex() or _hash_of(function, name)
    key = json.dumps([name, code, rows._fingerprint])
    folder = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit" / "rows"
    target = folder / f"own-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.arrow"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="own-", dir=folder) as part:
            made = rows.map(
                partial(_made, name=name, function=function, features=rows.features),
                batched=True,
                batch_size=_BATCH,
                remove_columns=rows.column_names,
                features=_MADE,
                num_proc=processes,
                cache_file_name=f"{part}/made.arrow",
                new_fingerprint=target.stem,
                desc=f"{name} of {source}",
            )
            places = rows[LOCATION] if LOCATION in rows.column_names else map("row {}".format, range(len(rows)))
            write_records(partial(_records, made, list(places)), target)
    return Dataset.from_file(str(target))


def _hash_of(function: Callable[..., Any], name: str) -> str:
    """Hashes a notebook's or script's function with variables that it reads; ValueError, with `name`, if that fails."""
    try:
        return str(Hasher.hash(function))
    except Exception as error:  # pickling a variable may raise any error
        raise ValueError(
            f"data.format={name}: its code cannot be hashed, because it reads an object that cannot be pickled "
            f"({type(error).__name__}: {error}); make that within the function, or put the function into a file"
        ) from error


def _records(made: Dataset, places: Sequence[str]) -> Iterator[tuple[str, Record]]:
    """Yields "" (no file) and a row for every result of `_made`; `places` are the locations."""
    for place, row in zip(places, made, strict=True):
        record = Record(place, {}, row["problem"]) if row["problem"] else as_record(json.loads(row["made"]), place)
        yield "", record


def _made(cells: Mapping[str, list[Any]], name: str, function: Callable[..., Any], features: Features) -> Any:
    """Returns {"made": [JSON of a result, ...], "problem": [...]} for a batch of rows; per row, either is empty."""
    names = [column for column in cells if column not in (LOCATION, PROBLEM)]
    count = len(next(iter(cells.values())))
    rows = [{column: decoded(cells[column][i], features[column]) for column in names} for i in range(count)]
    problems = [problem or "" for problem in cells.get(PROBLEM, [""] * count)]
    good = [row for row, problem in zip(rows, problems, strict=True) if not problem]
    results = iter(_results(good, name, function))
    made = [("", problem) if problem else next(results) for problem in problems]
    return {"made": [text for text, _ in made], "problem": [problem for _, problem in made]}


def _results(rows: list[dict[str, Any]], name: str, function: Callable[..., Any]) -> list[tuple[str, str]]:
    """Returns (JSON, "") or ("", problem) for every row; if a call with all `rows` fails, makes calls with [row]."""
    if "rows" not in inspect.signature(function).parameters:
        return [_result(row, name, function) for row in rows]
    try:
        several = list(function(rows)) if rows else []
        if len(several) == len(rows):
            return [_result(row, name, partial(_given, value)) for row, value in zip(rows, several, strict=True)]
    except (Exception, SystemExit):  # calls with single rows, below, find the bad row
        pass
    return [_result(row, name, partial(_alone, function)) for row in rows]


def _given(value: Any, row: Any) -> Any:
    """Returns `value`, in place of the user's function."""
    return value


def _alone(function: Callable[[Any], Any], row: Any) -> Any:
    """Returns the result of a function of several rows for one; raises ValueError if it returns another number."""
    (value,) = function([row])
    return value


def _result(row: dict[str, Any], name: str, function: Callable[[Any], Any]) -> tuple[str, str]:
    """Returns (JSON of {"text": ...}, {"messages": ...} or an object, ""); for errors ("", "data.format=NAME ...")."""
    try:
        return _json(function(row)), ""
    except RowError as error:
        return "", f"data.format={name} {error}"
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        shown = shorten(str(row), 120, placeholder="...")
        return "", f"data.format={name} raised {type(error).__name__}: {error} for {shown}"


def _json(value: Any) -> str:
    """Returns a row as JSON: a text as column "text", a list as "messages", an object as is; RowError otherwise."""
    if isinstance(value, str):
        value = {"text": value}
    elif isinstance(value, list | tuple):
        value = {"messages": value}
    if not isinstance(value, Mapping) or not value:
        wanted = "messages, a text, or an object such as {'prompt': ..., 'completion': ...}"
        raise RowError(f"returned {shorten(repr(value), 60, placeholder='...')}; return {wanted}")
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(
            f"returned values that JSON lacks ({error}); return texts, numbers, lists and objects"
        ) from error
