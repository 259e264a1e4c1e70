"""Rows from where they are: the hub, files here or in a bucket, and the two sources that need no download.

Whatever is wrong with a file is said with the file and the line.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

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
    from fsspec.core import url_to_fs

    if not re.match(r"train(\[|$)", split):
        raise ValueError(f"data source {source}: files have one split, train, not {split!r}")
    try:
        system, path = url_to_fs(source)
    except ImportError as error:
        raise ValueError(f"data source {source}: {error}; for gs:// it is: pip install gcsfs") from error
    found = sorted(system.glob(path)) if any(c in path for c in "*?[") else [path] if system.exists(path) else []
    if not found:
        raise ValueError(f"data source {source}: there is no such file")
    for file in found:
        if not system.size(file):
            raise ValueError(f"data source {file}: the file is empty")
    files = [system.unstrip_protocol(file) if "://" in source else str(file) for file in found]
    options: dict[str, Any] = {}
    if kind == "csv":  # a cell that reads NA or null is text, and an empty one is empty text
        options = {"keep_default_na": False, "sep": "\t" if ".tsv" in source else ","}
    try:
        return load_dataset(kind, data_files={"train": files}, split=split, **options)
    except Exception as error:
        if kind == "json":
            for file in found:
                _explain_json(system, file)
        cause = str(error.__cause__ or error).strip()
        if "corresponds to no data" in cause:
            cause = "it has no rows"
        raise ValueError(f"data source {source}: cannot be read: {cause}") from error


def _explain_json(system: Any, file: str) -> None:
    """Raise with file and line what is wrong with a JSON file; return if nothing was found."""
    with system.open(file, "rt", encoding="utf-8", compression="infer") as stream:
        for place, record in _json_records(stream, file):
            if not isinstance(record, dict):
                raise ValueError(f"{file}, {place}: a row must be an object, not {type(record).__name__}")


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
        raise ValueError(f"data source {source}: the folder cannot be read: {error.__cause__ or error}") from error
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


def _from_hub(source: str, split: str) -> Dataset:
    name, _, subset = source.partition(":")
    try:
        return load_dataset(name, subset or None, split=split)
    except Exception as error:
        raise ValueError(
            f"data source {source}, split {split}: it is no file or folder here, and the hub gave no such data set: "
            f"{type(error).__name__}: {error}"
        ) from error
