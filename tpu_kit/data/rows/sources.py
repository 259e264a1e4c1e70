"""Loads the rows of a data source: the hub, local files, files in a bucket, and generated word problems.

Errors about a file have the file and the line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import fsspec
from datasets import (
    Dataset,
    DatasetDict,
    DownloadConfig,
    ReadInstruction,
    get_dataset_config_names,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets import config as datasets_config

from tpu_kit.assets import embedded
from tpu_kit.config.fields import closest
from tpu_kit.data.rows.records import LOCATION, PROBLEM, Record, read_records, write_records
from tpu_kit.machine.hub import ask_hub_once
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.local_folder import is_lfs_pointer

SYNTHETIC = "synthetic"
"""Name of the source of random tokens, which needs no tokenizer."""

SYNTHETIC_ROWS = 4096
"""Number of rows of the synthetic source, unless the split has a slice."""

EMBEDDED_ROWS = {"train": 4000, "eval": 500}
"""Number of rows of `assets.embedded` by split, unless the split has a slice, as in `train[:100]`."""

SHOWN = 5
"""Number of bad rows in an error text."""

_KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_SAVED = ("state.json", "dataset_dict.json")
_ABOUT_ROWS = ("dataset_info.json", "dataset_infos.json")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_VERSION = 6  # increase it if records.py reads other rows, or another problem, from the same file
_SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")


def load_rows(source: str, split: str = "train", seed: int = 0, *, skip: bool = False) -> Dataset:
    """Loads the rows of a source; JSON and CSV files add the columns `records.LOCATION` and `records.PROBLEM`.

    Args:
        source: "embedded", "embedded-pairs" or "embedded-images", a path, glob or URL (`gs://...`) of files, a folder
            of `save_to_disk`, a folder laid out like a data set of the hub, or a data set of the hub. If the last two
            have several configurations, name one after a colon (`openai/gsm8k:main`).
        split: name of a split, optionally with a slice, as in `train[:1000]`. Files have the single split `train`;
            generated rows have `train` and `eval`, with only slices such as `[:1000]`, of any length.
        seed: seed of generated rows.
        skip: as in `check_rows`; an unreadable row of JSON or CSV stays, its cells are None.

    Raises:
        ValueError: the source or split does not exist, cannot be read or has no rows or columns; or a row of JSON or
            CSV cannot be read, unless `skip` allows it.
    """
    if source == "embedded":
        rows = _embedded(split, seed)
    elif source == "embedded-pairs":
        rows = _embedded(split, seed, embedded.preference_rows)
    elif source == "embedded-images":
        rows = _embedded_images(split, seed)
    elif any(os.path.isfile(os.path.join(source, name)) for name in _SAVED):  # false if the folder is not readable
        rows = _from_saved(source, split)
    elif files := find_files(source, split):
        rows = _from_parquet(source, split, files) if files.kind == "parquet" else _from_text(source, split, files)
        if files.kind != "parquet":
            check_rows(rows, rows[PROBLEM][:], source, skip=skip)
    else:
        rows = _from_hub(source, split)
    if not len(rows):
        raise ValueError(f"data source {source}, split {split}: it has no rows, or rows without columns")
    return rows


def check_rows(rows: Dataset, problems: Sequence[str | None], source: str, *, skip: bool) -> tuple[str, ...]:
    """Checks the problems of rows; returns texts "LOCATION: PROBLEM" of the first `SHOWN` bad rows.

    Args:
        rows: result of `load_rows`; without a column `LOCATION`, the text has "row N", from 0.
        problems: problems of the rows; empty or None for a good row.
        source: source of the rows, for the error.
        skip: whether bad rows may be left out, up to half of all rows.

    Raises:
        ValueError: there are bad rows, and `skip` is false or they are more than half.
    """
    bad = [number for number, problem in enumerate(problems) if problem]
    locations = [f"row {number}" for number in bad[:SHOWN]]
    if LOCATION in rows.column_names:
        locations = rows.select(bad[:SHOWN])[LOCATION][:]
    found = [(location, str(problems[number])) for location, number in zip(locations, bad, strict=False)]
    return check_found(found, len(bad), len(problems), source, skip=skip)


def check_found(found: Sequence[tuple[str, str]], bad: int, read: int, source: str, *, skip: bool) -> tuple[str, ...]:
    """Returns texts "LOCATION: PROBLEM" of `found`, or raises ValueError if the bad rows are not allowed.

    `found` has location and problem of the first `SHOWN` bad rows, `bad` is the number of all bad rows, and `read` the
    number of all rows. Bad rows are allowed with `skip`, up to half of all rows. `source` is the source's name for the
    error.
    """
    shown = tuple(f"{location}: {problem}" for location, problem in found)
    most = 2 * bad > read
    if not bad or (skip and not most):
        return shown
    more = f"; and {bad - SHOWN} more" if bad > SHOWN else ""
    advice = "" if most else ", or skip them with data.on_bad_row=skip"
    if skip:
        advice = "; data.on_bad_row=skip skips at most half of the rows, and these are more than half"
    told = []
    for problem, same in groupby(found, key=itemgetter(1)):
        place, *others = (location for location, _ in same)
        told.append(f"{place}: {problem}" + (f" (also {', '.join(others)})" if others else ""))
    raise ValueError(
        f"{source}: {bad} of {read} rows cannot be used: {'; '.join(told)}{more}. Correct or delete them{advice}"
    )


def synthetic_rows(split: str) -> int:
    """Returns the number of rows of the synthetic source: N of "train[:N]"; ValueError unless `split` is of "train"."""
    match = _SPLIT.fullmatch(split)
    if not match or match[1] != "train" or match[2] == "0":
        raise ValueError(f'data source {SYNTHETIC} has the split "train", as in "train[:100]", not {split!r}')
    return int(match[2]) if match[2] else SYNTHETIC_ROWS


class Files(NamedTuple):
    """The files of a source: an fsspec file system, paths in order, and the kind "json", "csv" or "parquet"."""

    system: Any
    paths: list[str]
    kind: str

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yields (path, row) for all rows of JSON or CSV files; raises ValueError as `read_records`."""
        for path in self.paths:
            for record in self.records_of(path):
                yield path, record

    def records_of(self, path: str) -> Iterator[Record]:
        """Yields the rows of a JSON or CSV file; raises ValueError as `read_records`."""
        separator = ("\t" if ".tsv" in Path(path).name.lower() else ",") if self.kind == "csv" else None
        return read_records(self.system, path, separator)


def find_files(source: str, split: str) -> Files | None:
    """Finds the files of a path, folder, glob or URL; None for another name, such as a data set of the hub.

    `split` is "train" except for a folder (or FOLDER:CONFIGURATION); a slice after it is ignored.

    Raises:
        ValueError: there is no such split, or no file for a glob, a URL or a name such as rows.jsonl. A file is empty,
            not accessible or of an unknown kind. Files of a folder are of several kinds or in no split, or it has
            several configurations and none is named. The source is a list of data sets of LLaMA-Factory.
    """
    if registry := _registry(source):
        raise ValueError(registry)
    folder, _, subset = (source, "", "") if os.path.isdir(source) else source.rpartition(":")
    if os.path.isdir(folder):
        return _folder_files(folder, subset, split)
    if not (kind := kind_of(source)):
        if "://" in source or "*" in source or os.path.isfile(source):
            raise ValueError(f"data source {source}: the name must end in {', '.join(_KINDS)}")
        return None
    if not re.match(r"train(\[|$)", split):
        raise ValueError(f"data source {source}: files have one split, train, not {split!r}")
    return Files(*_glob(source), kind)


def _folder_files(folder: str, subset: str, split: str) -> Files:
    """Finds the files of a local folder's split as `datasets` does, by README and file names; ignores a slice.

    `subset` is a configuration; empty for the default or the only configuration. Raises ValueError if the configuration
    or the split is missing, or if `subset` is empty and there are several configurations without a default. Files of
    unknown or several kinds in the split, or with a single configuration in no split, raise it too.
    """
    advice = f"data source {folder}: a folder; name the files in it, such as {Path(folder, '*.jsonl')}"
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # it warns about a README without metadata
    try:
        names = get_dataset_config_names(folder)
        if (subset or "default") not in names and (subset or len(names) > 1):
            listed = f"its configurations are {', '.join(names)}; name one, as in {folder}:{names[0]}"
            raise ValueError(f"data source {folder}: {listed}")
        splits = load_dataset_builder(folder, subset or None).config.data_files or {}
    except ValueError:
        raise
    except Exception as error:  # `datasets` raises many classes of errors
        raise ValueError(f"{advice}; none has rows") from error
    name = split.partition("[")[0]
    if name not in splits:
        raise ValueError(f"data.split: there is no split {name!r}; {folder} has {', '.join(map(str, splits))}")
    used = {str(Path(path)) for paths in splits.values() for path in paths}
    if len(names) == 1:  # `datasets` silently ignores files of other kinds and with other split names
        inner = (path.relative_to(folder) for path in Path(folder).rglob("*") if path.name not in _ABOUT_ROWS)
        visible = [path for path in inner if not any(part.startswith(".") for part in path.parts)]
        root = Path(folder).absolute()  # as `datasets` names the files
        left = sorted(str(path) for path in visible if kind_of(path.name) and str(root / path) not in used)
        if left:
            listed = shorten(", ".join(left), 200)
            raise ValueError(f"{advice}, or move away files that are in no split: {listed}")
    paths = sorted(map(str, splits[name]))
    if len(kinds := {kind_of(path) for path in paths}) != 1 or None in kinds:
        listed = ", ".join(sorted(Path(path).suffix for path in paths))
        raise ValueError(f"{advice}; the split {name} has files of the kinds {listed}")
    return Files(fsspec.filesystem("file"), paths, str(kinds.pop()))


def _registry(source: str) -> str:
    """Returns the error text for a source that is LLaMA-Factory's list of data sets, or its folder; empty otherwise."""
    path = Path(source, _ABOUT_ROWS[0]) if os.path.isdir(source) else Path(source)
    if path.name != _ABOUT_ROWS[0] or not path.is_file():
        return ""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        keys = ("file_name", "hf_hub_url", "ms_hub_url")
        sets = {name: about for name, about in entries.items() if {*about} & {*keys}}
    except (OSError, ValueError, AttributeError, TypeError):
        return ""
    where = {name: next(about[key] for key in keys if key in about) for name, about in sets.items()}
    listed = shorten(", ".join(f"{name}: {place}" for name, place in where.items()), 300)
    advice = f"name the file, or the data set of the hub, of one of them in data.source ({listed}), and its columns in "
    return f"data source {source}: a list of data sets of LLaMA-Factory; {advice}data.columns" if sets else ""


def kind_of(path: str) -> str | None:
    """Returns "json", "csv" or "parquet" by a file's name, ignoring the suffix of a compression; None if unknown."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in _COMPRESSED]
    return _KINDS.get(suffixes[-1].lower()) if suffixes else None


def _from_text(source: str, split: str, files: Files) -> Dataset:
    """Returns the rows of JSON or CSV files, sliced as `split`, from an Arrow file cached for paths, sizes and times.

    Rows that cannot be read stay, with `PROBLEM`. Raises ValueError if a file cannot be read, or the rows not cached.
    """
    stamps = [f"{path} {files.system.ukey(path)}" for path in files.paths]
    name = hashlib.blake2b(json.dumps([_VERSION, files.kind, stamps]).encode(), digest_size=16).hexdigest()
    target = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit" / "rows" / f"{name}.arrow"
    if not target.exists():
        try:
            write_records(files.records, target)
        except OSError as error:
            raise ValueError(f"data source {source}: its rows cannot be cached in {target.parent}: {error}") from error
    return _sliced(Dataset.from_file(str(target)), split, source)


def _sliced(rows: Dataset, split: str, source: str) -> Dataset:
    """Returns the rows of a slice such as train[10:20%] of its split `rows`; raises ValueError for an invalid slice."""
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({split.partition("[")[0]: len(rows)})
    except Exception as error:
        raise ValueError(f"data.split={split!r}: {_cause(error)}; {source} has {len(rows)} rows") from error
    return rows.select(range(part.from_ or 0, len(rows) if part.to is None else part.to))


def _from_parquet(source: str, split: str, files: Files) -> Dataset:
    """Returns the rows of Parquet files; raises ValueError if they cannot be read, or hold texts that are not UTF-8."""
    paths = [files.system.unstrip_protocol(path) if "://" in source else path for path in files.paths]
    try:
        # Without the entity tag, the cache would keep an object that has been replaced.
        options = {"download_config": DownloadConfig(use_etag=True)}
        rows = load_dataset("parquet", data_files={split.partition("[")[0]: paths}, split=split, **options)
        rows.data.validate(full=True)  # the reader accepts text that is not UTF-8
        return rows
    except Exception as error:
        raise ValueError(f"data source {source}: cannot be read: {_cause(error)}") from error


def _from_saved(source: str, split: str) -> Dataset:
    """Returns the rows of a split, also with a slice, of a folder of `save_to_disk`.

    A single `Dataset` is the split "train", and also the split of its own name.

    Raises:
        ValueError: the folder cannot be read, or has no such split or slice.
    """
    try:
        rows = load_from_disk(source)
        for part in rows.values() if isinstance(rows, DatasetDict) else [rows]:
            part.data.validate(full=True)
    except Exception as error:
        raise ValueError(f"data source {source}: the folder cannot be read: {_cause(error)}") from error
    if isinstance(rows, Dataset):
        rows = DatasetDict({"train": rows, str(rows.split or "train").partition("[")[0]: rows})
    if (name := split.partition("[")[0]) not in rows:
        raise ValueError(f"data.split: there is no split {name!r}; the data has {', '.join(rows)}")
    return _sliced(rows[name], split, source)


def _from_hub(source: str, split: str) -> Dataset:
    """Downloads a data set of the hub, NAME or NAME:CONFIGURATION, or reads its cache; returns the rows of `split`.

    Raises ValueError if that fails.
    """
    name, _, subset = source.partition(":")
    ask_hub_once()
    try:
        return load_dataset(name, subset or None, split=split)
    except Exception as error:
        raise ValueError(
            f"data source {source}, split {split}: there is no such file or folder, and the hub gave no such data set: "
            f"{type(error).__name__}: {error}; check the spelling and the network"
        ) from error


def _glob(source: str) -> tuple[Any, list[str]]:
    """Returns the fsspec file system of a path, glob or URL, and its files, sorted.

    Raises ValueError if there is no file, or a file is empty, no regular file, or not accessible.
    """
    from fsspec.core import url_to_fs

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback of each error that it raises
    try:
        system, path = url_to_fs(source)
        paths = sorted(system.glob(path)) if any(c in path for c in "*?[") and not system.exists(path) else [path]
        for path in paths:
            if (info := system.info(path))["type"] not in ("file", "link"):  # reading a pipe would never end
                raise ValueError(f"data source {path}: this is not a regular file; name another file")
            if info["size"] == 0:
                raise ValueError(f"data source {path}: the file is empty; write rows to it, or name another file")
            if info["size"] < 1024 and is_lfs_pointer(system.cat_file(path)):
                raise ValueError(f"data source {path}: this is a Git LFS pointer, not the file: run `git lfs pull`")
    except ImportError as error:
        raise ValueError(f"data source {source}: {error}; for gs:// run: pip install gcsfs") from error
    except FileNotFoundError:
        paths = []
    except ValueError:
        raise
    except Exception as error:  # storages raise different classes of errors
        advice = "; check the network; log in with `gcloud auth application-default login`"
        advice *= source.startswith("gs://")
        raise ValueError(f"data source {source}: no access: {type(error).__name__}: {error}{advice}") from error
    if any(path.endswith(".zst") for path in paths) and not importlib.util.find_spec("zstandard"):
        raise ValueError(f"data source {source}: to read .zst: pip install zstandard")
    if not paths:
        bucket = " (or no such bucket)" if "://" in source else ""
        names = [] if bucket else [path.name for path in Path(source).absolute().parent.glob("*")]
        near = "".join(f"; did you mean {Path(source).with_name(name)}?" for name in closest(Path(source).name, names))
        raise ValueError(f"data source {source}: there is no such file{bucket}{near or '; check data.source'}")
    return system, paths


def _cause(error: BaseException) -> str:
    """Returns the text of an error's cause, or of the error, on one line."""
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    return "it has no rows" if "corresponds to no data" in text or "BatchSize must be greater" in text else text


def _embedded(split: str, seed: int, make: Callable[..., list[dict[str, str]]] = embedded.cot_rows) -> Dataset:
    """Returns the rows that `make` generates for "train" or "eval", with [:N] for N rows; ValueError for others."""
    match = _SPLIT.fullmatch(split)
    if not match or match[1] not in EMBEDDED_ROWS:
        raise ValueError(f'data source embedded has the splits "train" and "eval", as in "train[:100]", not {split!r}')
    count = int(match[2]) if match[2] else EMBEDDED_ROWS[match[1]]
    return Dataset.from_list(make(match[1], count, seed))


def _embedded_images(split: str, seed: int) -> Dataset:
    """Returns rows with pictures of "train" or "eval", with [:N] for N rows, and caches them; ValueError for others."""
    from tpu_kit.assets import pictures

    match = _SPLIT.fullmatch(split)
    if not match or match[1] not in pictures.ROWS:
        raise ValueError(
            f'data source embedded-images has the splits "train" and "eval", as in "train[:100]", not {split!r}'
        )
    count = int(match[2]) if match[2] else pictures.ROWS[match[1]]
    code = hashlib.blake2b(Path(pictures.__file__).read_bytes(), digest_size=8).hexdigest()
    path = (
        Path(datasets_config.HF_DATASETS_CACHE)
        / "tpu_kit"
        / "rows"
        / f"images-{code}-{match[1]}-{count}-{seed}.parquet"
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as part:
            Dataset.from_list(pictures.rows(match[1], count, seed)).to_parquet(str(part))
    return Dataset.from_parquet(str(path))


def saved_rows_path(data: Dataset | DatasetDict, folder: Path) -> Path:
    """Returns the path in `folder` to which `save_rows` writes a data set; its name is a hash of the fingerprints.

    Raises:
        ValueError: the data is not a `Dataset` or `DatasetDict`, or it or a split has no rows.
    """
    parts = [*data.values()] if isinstance(data, DatasetDict) else [data]
    if wrong := [type(part).__name__ for part in parts if not isinstance(part, Dataset)]:
        raise ValueError(f"the data must be a datasets.Dataset, not {wrong[0]}")
    if not all(map(len, parts)):
        raise ValueError("the data set given has no rows")
    return folder / hashlib.blake2b(" ".join(part._fingerprint for part in parts).encode(), digest_size=8).hexdigest()


def save_rows(data: Dataset | DatasetDict, folder: Path) -> str:
    """Writes a data set to `saved_rows_path`, unless it is there; returns the path as a source for `load_rows`.

    Raises ValueError as `saved_rows_path`.
    """
    target = saved_rows_path(data, folder)
    if not target.exists():  # a resumed run finds its rows there
        with atomic.replacing(target, shared=True) as part:
            data.save_to_disk(part)
    return str(target)
