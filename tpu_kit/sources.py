"""Rows from where they are: the hub, files here or in a bucket, and the two sources that need no download.

Whatever is wrong with a file is said with the file and the line.
"""

import csv
import hashlib
import importlib.util
import io
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, DownloadConfig, Features, Value, load_dataset, load_from_disk
from fsspec.implementations.local import LocalFileSystem
from pandas import read_csv  # type: ignore[import-untyped]
from pandas.errors import ParserWarning  # type: ignore[import-untyped]

from tpu_kit.columns import KNOWN

GENERATED = ("embedded", "rationales")
"""Sources whose rows come from code in this package or from installed ones; their splits are "train" and "eval"."""

EMBEDDED_ROWS = {"train": 4000, "eval": 500}
"""Rows of the embedded source unless the split says otherwise, as in `train[:100]`."""

_KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")


def load_rows(source: str, split: str = "train", seed: int = 0) -> Dataset:
    """Return the rows of a source as they are.

    Args:
        source: "embedded", "rationales", a path, glob or URL (`gs://...`) of .jsonl, .json, .csv, .tsv or .parquet
            files, a folder that `datasets` wrote or can read, or a data set of the hub, with its configuration after a
            colon if it has several (`openai/gsm8k:main`).
        split: name, also with a slice, as in `train[:1000]`. Files have the one split `train`.
        seed: of the rows that are made by code.

    Raises:
        ValueError: nothing is there, or it cannot be read; the text names the file and, where there is one, the line.
    """
    if source in GENERATED:
        rows = _generated(source, split, seed)
    elif kind := _kind(source):
        rows = _from_files(source, kind, split)
    elif Path(source).is_dir():
        rows = _from_folder(source, split)
    else:
        rows = _from_hub(source, split)
    if not len(rows):
        raise ValueError(f"data source {source}, split {split}: it has no rows")
    return rows


def _kind(source: str) -> str | None:
    suffixes = [suffix for suffix in Path(source).suffixes if suffix not in _COMPRESSED]
    kind = _KINDS.get(suffixes[-1].lower()) if suffixes else None
    if kind is None and ("://" in source or "*" in source or Path(source).is_file()):
        raise ValueError(f"data source {source}: the name must end in {', '.join(_KINDS)}")
    return kind


def _generated(source: str, split: str, seed: int) -> Dataset:
    match = _SPLIT.fullmatch(split)
    if not match or match[1] not in EMBEDDED_ROWS:
        raise ValueError(f'data source {source} has the splits "train" and "eval", as in "train[:100]", not {split!r}')
    name, count = match[1], int(match[2]) if match[2] else None
    if source == "embedded":
        from tpu_kit.embedded import cot_rows

        rows = cot_rows(name, EMBEDDED_ROWS[name] if count is None else count, seed)
    else:
        from tpu_kit.rationales import rationale_rows

        rows = rationale_rows(name, seed)[:count]
    return Dataset.from_list(rows)


def _from_files(source: str, kind: str, split: str) -> Dataset:
    if not re.match(r"train(\[|$)", split):
        raise ValueError(f"data source {source}: files have one split, train, not {split!r}")
    system, found = _find_files(source)
    files = [system.unstrip_protocol(file) if "://" in source else str(file) for file in found]
    # Without the entity tag an object that was replaced is read from the cache of the one before.
    options: dict[str, Any] = {"download_config": DownloadConfig(use_etag=True)}
    if kind == "csv":
        options |= _csv_options(system, found, "\t" if ".tsv" in source else ",")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)  # rows longer than the header
            rows = load_dataset(kind, data_files={"train": files}, split=split, **options)
            if kind == "json" and (field := _only_field(rows)):
                rows = load_dataset(kind, data_files={"train": files}, split=split, field=field, **options)
            if kind == "json":
                rows.data.validate(full=True)  # the reader lets through what is not UTF-8
        return rows
    except Exception as error:
        if kind == "json":
            for file in found:
                _explain_json(system, file)
        raise ValueError(f"data source {source}: cannot be read: {_cause(error)}") from error


def _find_files(source: str) -> tuple[Any, list[str]]:
    """Return the file system of a path, glob or URL, and its files in order, none of them empty."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(source)
        found = sorted(system.glob(path)) if any(c in path for c in "*?[") else [path]
        sizes = {file: system.info(file)["size"] for file in found}
    except ImportError as error:
        raise ValueError(f"data source {source}: {error}; for gs:// it is: pip install gcsfs") from error
    except FileNotFoundError:
        found = []
    except Exception as error:  # each kind of storage has its own
        advice = "; log in with `gcloud auth application-default login`" if source.startswith("gs://") else ""
        raise ValueError(f"data source {source}: no access: {type(error).__name__}: {error}{advice}") from error
    if any(str(file).endswith(".zst") for file in found) and not importlib.util.find_spec("zstandard"):
        raise ValueError(f"data source {source}: to read .zst: pip install zstandard")
    if not found:
        bucket = " (or no such bucket)" if "://" in source else ""
        raise ValueError(f"data source {source}: there is no such file{bucket}")
    if empty := [file for file in found if sizes[file] == 0]:
        raise ValueError(f"data source {empty[0]}: the file is empty")
    return system, found


def _csv_options(system: Any, found: list[str], separator: str) -> dict[str, Any]:
    """Have all cells read as the text they are: 007 is not 7, NA and null are words, an empty cell is empty text."""
    try:
        with system.open(found[0], "rt", encoding="utf-8-sig", compression="infer", newline="") as stream:
            line = stream.readline()
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(system, found[0])) from error
    except (OSError, EOFError) as error:  # not what its name says it is compressed with
        raise ValueError(f"data source {found[0]}: cannot be read: {_cause(error)}") from error
    names = next(csv.reader([line], delimiter=separator))
    if twice := sorted({name for name in names if name and names.count(name) > 1}):
        raise ValueError(f"data source {found[0]}: column {', '.join(twice)} occurs twice; rename one of them")
    columns = read_csv(io.StringIO(line), sep=separator).columns
    features = Features({name: Value("string") for name in columns})
    return {"features": features, "sep": separator, "keep_default_na": False, "index_col": False}


def _only_field(rows: Dataset) -> str | None:
    """Return the field that holds the rows where a JSON file is one object around them, as in {"data": [...]}."""
    if len(rows) != 1 or {name.lower() for name in rows.column_names} & KNOWN:
        return None
    held = [name for name, value in rows[0].items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return held[0] if len(held) == 1 else None


def _cause(error: BaseException) -> str:
    text = " ".join(str(error.__cause__ or error).split())
    if "corresponds to no data" in text:
        return "it has no rows"
    if isinstance(error.__cause__ or error, ParserWarning):
        return "there are rows with more cells than the header has names"
    if "column names don't match" in text or "does not exist in schema" in text:
        return f"the columns are not the same in all rows and files: {text}"
    return text


def _not_utf8(system: Any, file: str) -> str:
    with system.open(file, "rb", compression="infer") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"data source {file}, line {number}: not UTF-8 ({error.reason}); save the file as UTF-8"
    return f"data source {file}: not UTF-8; save the file as UTF-8"


def _explain_json(system: Any, file: str) -> None:
    """Raise with file and line what is wrong with a JSON file; return if nothing was found."""
    kinds: dict[str, type] = {}
    try:
        with system.open(file, "rt", encoding="utf-8-sig", compression="infer") as stream:
            for place, record in _json_records(stream, file):
                if not isinstance(record, dict):
                    raise ValueError(f"{file}, {place}: a row must be an object, not {type(record).__name__}")
                for name, value in record.items():
                    kind, before = type(value), kinds.get(name, type(value))
                    if value is not None and kind is not before:
                        raise ValueError(
                            f"{file}, {place}: column {name!r} is {kind.__name__}, and {before.__name__} above; "
                            "write all of it as text"
                        )
                    if value is not None:
                        kinds[name] = kind
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(system, file)) from error
    except (OSError, EOFError) as error:  # not what its name says it is compressed with
        raise ValueError(f"data source {file}: cannot be read: {_cause(error)}") from error


def _json_records(stream: Any, file: str) -> Iterator[tuple[str, Any]]:
    """Yield the records of JSON lines or of one JSON array, each with where it stands."""
    array = stream.read(64).lstrip().startswith("[")
    stream.seek(0)
    try:
        if array:
            yield from ((f"row {i}", record) for i, record in enumerate(json.load(stream)))
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except json.JSONDecodeError as error:
        line_number = error.lineno if array else number
        raise ValueError(f"{file}, line {line_number}, column {error.colno}: not valid JSON: {error.msg}") from error


def _from_folder(source: str, split: str) -> Dataset:
    try:
        if not any((Path(source) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json")):
            return load_dataset(source, split=split)
        saved = load_from_disk(source)
    except Exception as error:
        for file in sorted(Path(source).rglob("*.json*")):
            _explain_json(LocalFileSystem(), str(file))
        raise ValueError(f"data source {source}: the folder cannot be read: {_cause(error)}") from error
    return pick_split(saved, split)


def pick_split(data: Dataset | DatasetDict, split: str) -> Dataset:
    """Return the split of a `DatasetDict`, or a `Dataset` as it is.

    Raises:
        ValueError: there is no such split, or it is neither of the two.
    """
    if isinstance(data, DatasetDict):
        if split not in data:
            raise ValueError(f"data.split: there is no split {split!r}; the data has {', '.join(data)}")
        data = data[split]
    if not isinstance(data, Dataset):
        raise ValueError(f"the data must be a datasets.Dataset, not {type(data).__name__}")
    return data


def kept_place(data: Dataset | DatasetDict, folder: Path) -> Path:
    """Where `keep_rows` writes a data set, by its content; writes nothing.

    Raises:
        ValueError: it is no `Dataset` or `DatasetDict`, or has no rows.
    """
    parts = data.values() if isinstance(data, DatasetDict) else [data]
    if not all(isinstance(part, Dataset) for part in parts):
        raise ValueError(f"the data must be a datasets.Dataset, not {type(data).__name__}")
    if not all(len(part) for part in parts):
        raise ValueError("the data set given has no rows")
    return folder / hashlib.blake2b(" ".join(part._fingerprint for part in parts).encode(), digest_size=8).hexdigest()


def keep_rows(data: Dataset | DatasetDict, folder: Path) -> str:
    """Write a data set that is in memory where other processes find it; return the source to give them.

    Raises:
        ValueError: as `kept_place`.
    """
    target = kept_place(data, folder)
    if not target.exists():  # a run that is started again finds its rows there
        made = target.with_name(f"{target.name}.part")
        data.save_to_disk(made)
        made.rename(target)
    return str(target)


def _from_hub(source: str, split: str) -> Dataset:
    name, _, subset = source.partition(":")
    try:
        return load_dataset(name, subset or None, split=split)
    except Exception as error:
        raise ValueError(
            f"data source {source}, split {split}: it is no file or folder here, and the hub gave no such data set: "
            f"{type(error).__name__}: {error}"
        ) from error
