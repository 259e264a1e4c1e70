"""Loads the rows of a data source: the hub, local files, files in a bucket, and two sources that need no download.

Errors in a file name the file and the line.

The source "embedded" generates its rows with `tpu_kit.assets.embedded`. The source "rationales" reads two packages of
the Python package index:

- `lm-eval` ships the worked examples of its few-shot tasks (MMLU with FLAN's rationales, BIG-Bench Hard, GSM8K): 371
  rows of question, rationale and answer, written by people. Only its task files are read; it is not imported.
- `reasoning-gym` generates school arithmetic problems with rationales from 85 templates (`gsm_symbolic`).

The licences of MMLU, FLAN and BIG-Bench Hard apply to the first package; see their projects.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import (
    Dataset,
    DatasetDict,
    DownloadConfig,
    ReadInstruction,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets import config as datasets_config
from fsspec.implementations.local import LocalFileSystem

from tpu_kit.assets import embedded
from tpu_kit.config.fields import closest
from tpu_kit.data.records import PLACE, PROBLEM, Record, read_records, write_records
from tpu_kit.hardware.host import ask_hub_once
from tpu_kit.storage import atomic

GENERATED = ("embedded", "rationales")
"""Sources whose rows come from installed packages; their splits are "train" and "eval"."""

SYNTHETIC = "synthetic"
"""The source of rows of random tokens, which need no tokenizer."""

SYNTHETIC_ROWS = 4096
"""Rows of the synthetic source, unless the split has a slice."""

EMBEDDED_ROWS = {"train": 4000, "eval": 500}
"""Rows of the embedded source, unless the split has a slice, as in `train[:100]`."""

GENERATED_ROWS = 1500
"""Rows of the source "rationales" that reasoning-gym generates."""

TASK_FILES = ("mmlu/flan_cot_fewshot/mmlu_*.yaml", "bbh/cot_fewshot/[a-z]*.yaml", "gsm8k/gsm8k-cot.yaml")
INSTALL = 'pip install --no-deps "lm-eval==0.4.13" && pip install "reasoning-gym==0.1.25"'
"""Installs both packages; lm-eval's own dependencies are not needed."""

SHOWN = 5
"""Bad rows that an error names."""

_KINDS = {".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_FILL = f"put files of rows into it ({', '.join(_KINDS)})"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_VERSION = 2  # increase it when records.py reads other rows from the same file
_SPLIT = re.compile(r"(\w+)(?:\[:(\d+)\])?")
_HELD_OUT_SHARE = 8  # one question in eight of "rationales" belongs to the held-out split
_ANSWER = re.compile(r"(?:Therefore,? |So |Thus,? )?the answer is:?\s*(\S.{0,60}?)\.?\s*$", re.IGNORECASE | re.DOTALL)
_OPENING = re.compile(r"^Let's think step by step\.\s*")


def load_rows(source: str, split: str = "train", seed: int = 0, *, skip: bool = False) -> Dataset:
    """Loads the rows of a source.

    Args:
        source: "embedded", "rationales", a path, glob or URL (`gs://...`) of .jsonl, .json, .csv, .tsv or .parquet
            files, a folder that `datasets` wrote or can read, or a data set of the hub, with its configuration after a
            colon if it has several (`openai/gsm8k:main`).
        split: a name, perhaps with a slice, as in `train[:1000]`. Files have one split, `train`.
        seed: of generated rows.
        skip: return unreadable rows as rows of None, with the reason in the column `records.PROBLEM`.

    Raises:
        ValueError: the source does not exist or cannot be read; the text names the file and the line.
    """
    if source in GENERATED:
        rows = _generated(source, split, seed)
    elif text := _text_files(source, split):
        rows = _from_text(source, split, text)
        problems = rows[PROBLEM][:]
        if any(problems):
            _check_problems(rows[PLACE][:], problems, source, skip)
        rows = rows.remove_columns([PLACE] if any(problems) else [PLACE, PROBLEM])
    elif _kind(source):
        rows = _from_parquet(source, split)
    elif Path(source).is_dir():
        rows = _from_folder(source, split)
    else:
        rows = _from_hub(source, split)
    if not len(rows):
        raise ValueError(f"data source {source}, split {split}: it has no rows, or rows without columns")
    return rows


def synthetic_rows(split: str) -> int:
    """Returns the number of rows of the synthetic source; raises ValueError for another split than "train"."""
    match = _SPLIT.fullmatch(split)
    if not match or match[1] != "train" or match[2] == "0":
        raise ValueError(f'data source {SYNTHETIC} has the split "train", as in "train[:100]", not {split!r}')
    return int(match[2]) if match[2] else SYNTHETIC_ROWS


def places(source: str, split: str, numbers: Sequence[int]) -> list[str]:
    """Returns the places of rows of a source, such as "rows.jsonl, line 3"; empty texts where they are unknown."""
    text = None if source in GENERATED or not numbers else _text_files(source, split)
    if text is None:
        return [""] * len(numbers)
    return _from_text(source, split, text).select(numbers)[PLACE][:]


def _check_problems(places: list[str], problems: list[str | None], source: str, skip: bool) -> None:
    bad = [f"{place}: {problem}" for place, problem in zip(places, problems, strict=True) if problem]
    if skip and len(bad) < len(problems):
        return
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    raise ValueError(
        f"data source {source}: {len(bad)} of {len(problems)} rows cannot be read: {'; '.join(bad[:SHOWN])}{more}. "
        "Correct or delete them" + ("" if skip else ", or skip them with data.on_bad_row=skip")
    )


def _suffix(source: str) -> str:
    """Returns the suffix of a file name in lower case, without the suffix of a compression."""
    suffixes = [suffix for suffix in Path(source).suffixes if suffix not in _COMPRESSED]
    return suffixes[-1].lower() if suffixes else ""


def _kind(source: str) -> str | None:
    kind = _KINDS.get(_suffix(source))
    if kind is None and ("://" in source or "*" in source or Path(source).is_file()):
        raise ValueError(f"data source {source}: the name must end in {', '.join(_KINDS)}")
    return kind


class _TextFiles(NamedTuple):
    """The JSON or CSV files of a source.

    Attributes:
        system: their fsspec file system.
        files: their paths there, in order.
        csv: whether they are CSV.
    """

    system: Any
    files: list[str]
    csv: bool

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yields all rows of the files."""
        for file in self.files:
            separator = ("\t" if ".tsv" in Path(file).name.lower() else ",") if self.csv else None
            for record in read_records(self.system, file, separator):
                yield file, record


def _text_files(source: str, split: str) -> _TextFiles | None:
    """Returns the JSON or CSV files of a path, glob, URL or folder; None if it has other files."""
    if kind := _kind(source):
        if kind == "parquet":
            return None
        _only_train(source, split)
        system, found = _find_files(source)
        return _TextFiles(system, found, kind == "csv")
    if not Path(source).is_dir() or _is_saved(source):
        return None
    try:
        files = load_dataset_builder(source).config.data_files or {}
    except Exception as error:
        raise ValueError(f"data source {source}: the folder cannot be read: {_cause(error)}; {_FILL}") from error
    name = split.partition("[")[0]
    if name not in files:
        raise ValueError(f"data source {source}: there is no split {name!r}; the folder has {', '.join(files)}")
    found = [str(file) for file in files[name]]
    kinds = {_KINDS.get(_suffix(file), "") for file in found}
    if kinds not in ({"json"}, {"csv"}):
        return None
    _check_files(LocalFileSystem(), found)
    return _TextFiles(LocalFileSystem(), found, kinds == {"csv"})


def _only_train(source: str, split: str) -> None:
    if not re.match(r"train(\[|$)", split):
        raise ValueError(f"data source {source}: files have one split, train, not {split!r}")


def _from_text(source: str, split: str, text: _TextFiles) -> Dataset:
    stamps = [f"{file} {text.system.ukey(file)}" for file in text.files]
    name = hashlib.blake2b(json.dumps([_VERSION, text.csv, stamps]).encode(), digest_size=16).hexdigest()
    target = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit" / "rows" / f"{name}.arrow"
    if not target.exists():
        try:
            write_records(text.records, target)
        except OSError as error:
            raise ValueError(f"data source {source}: its rows cannot be kept in {target.parent}: {error}") from error
    rows = Dataset.from_file(str(target))
    first, last = _span(source, split, len(rows))
    return rows if (first, last) == (0, len(rows)) else rows.select(range(first, last))


def _span(source: str, split: str, count: int) -> tuple[int, int]:
    """Returns the first row of a split such as `train[10:20%]`, and the row after its last."""
    name = split.partition("[")[0]
    try:
        (part,) = ReadInstruction.from_spec(split).to_absolute({name: count})
    except Exception as error:
        raise ValueError(f"data.split={split!r}: {_cause(error)}; {source} has {count} rows") from error
    return part.from_ or 0, count if part.to is None else part.to


def _from_parquet(source: str, split: str) -> Dataset:
    _only_train(source, split)
    system, found = _find_files(source)
    files = [system.unstrip_protocol(file) if "://" in source else str(file) for file in found]
    try:
        # Without the entity tag, the cache of an object would outlive its replacement.
        options = {"download_config": DownloadConfig(use_etag=True)}
        rows = load_dataset("parquet", data_files={"train": files}, split=split, **options)
        rows.data.validate(full=True)  # the reader accepts text that is not UTF-8
        return rows
    except Exception as error:
        raise ValueError(f"data source {source}: cannot be read: {_cause(error)}") from error


def _find_files(source: str) -> tuple[Any, list[str]]:
    """Returns the file system of a path, glob or URL, and its files in order, none of them empty."""
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(source)
        found = sorted(system.glob(path)) if any(c in path for c in "*?[") else [path]
        _check_files(system, found)
    except ImportError as error:
        raise ValueError(f"data source {source}: {error}; for gs:// run: pip install gcsfs") from error
    except FileNotFoundError:
        found = []
    except ValueError:
        raise
    except Exception as error:  # each kind of storage has its own errors
        advice = "; log in with `gcloud auth application-default login`" if source.startswith("gs://") else ""
        raise ValueError(f"data source {source}: no access: {type(error).__name__}: {error}{advice}") from error
    if any(str(file).endswith(".zst") for file in found) and not importlib.util.find_spec("zstandard"):
        raise ValueError(f"data source {source}: to read .zst: pip install zstandard")
    if not found:
        bucket = " (or no such bucket)" if "://" in source else ""
        names = [] if bucket else [path.name for path in Path(source).absolute().parent.glob("*")]
        near = "".join(f"; did you mean {Path(source).with_name(name)}?" for name in closest(Path(source).name, names))
        raise ValueError(f"data source {source}: there is no such file{bucket}{near or '; check data.source'}")
    return system, found


def _check_files(system: Any, files: list[str]) -> None:
    for file in files:
        info = system.info(file)
        if info["type"] == "directory":
            raise ValueError(f"data source {file}: this is a folder, not a file; rename it, or name the files in it")
        if info["type"] not in ("file", "link"):  # reading a pipe would never end
            raise ValueError(f"data source {file}: this is not a regular file; name another")
        if info["size"] == 0:
            raise ValueError(f"data source {file}: the file is empty; write rows into it, or name another")


def _cause(error: BaseException) -> str:
    text = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    if "corresponds to no data" in text or "BatchSize must be greater than 0" in text:
        return "it has no rows"
    if "column names don't match" in text or "does not exist in schema" in text:
        return f"the columns are not the same in all rows and files: {text}"
    return text


def _is_saved(source: str) -> bool:
    return any((Path(source) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _from_folder(source: str, split: str) -> Dataset:
    try:
        if not _is_saved(source):
            return load_dataset(source, split=split)
        saved = load_from_disk(source)
        for part in saved.values() if isinstance(saved, DatasetDict) else [saved]:
            part.data.validate(full=True)
    except Exception as error:
        raise ValueError(f"data source {source}: the folder cannot be read: {_cause(error)}; {_FILL}") from error
    return pick_split(saved, split)


def _from_hub(source: str, split: str) -> Dataset:
    name, _, subset = source.partition(":")
    ask_hub_once()
    try:
        return load_dataset(name, subset or None, split=split)
    except Exception as error:
        raise ValueError(
            f"data source {source}, split {split}: there is no such file or folder, and the hub gave no such data set: "
            f"{type(error).__name__}: {error}; check the spelling and the network"
        ) from error


def _generated(source: str, split: str, seed: int) -> Dataset:
    match = _SPLIT.fullmatch(split)
    if not match or match[1] not in EMBEDDED_ROWS:
        raise ValueError(f'data source {source} has the splits "train" and "eval", as in "train[:100]", not {split!r}')
    name, count = match[1], int(match[2]) if match[2] else None
    if source == "embedded":
        return Dataset.from_list(embedded.cot_rows(name, EMBEDDED_ROWS[name] if count is None else count, seed))
    return Dataset.from_list(rationale_rows(name, seed)[:count])


def task_rows() -> list[dict[str, str]]:
    """Returns the worked examples of lm-eval's tasks as rows (question, reasoning, answer), always in the same order.

    Raises:
        ValueError: the package is missing, or an example does not end in "the answer is ..." (another version of it).
    """
    import yaml

    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"data.source=rationales needs the package lm-eval: {INSTALL}")
    tasks = Path(next(iter(spec.submodule_search_locations))) / "tasks"
    rows = []
    for file in (file for pattern in TASK_FILES for file in sorted(tasks.glob(pattern))):
        samples = (yaml.safe_load(file.read_text(encoding="utf-8")).get("fewshot_config") or {}).get("samples") or []
        for number, sample in enumerate(samples):
            match = _ANSWER.search(sample["target"])
            if not match:
                raise ValueError(f'{file.name}, example {number}, does not end in "the answer is ...": {INSTALL}')
            reasoning = _OPENING.sub("", sample["target"][: match.start()]).strip()
            question = str(sample.get("question", sample.get("input"))).strip()
            rows.append({"question": question, "reasoning": reasoning, "answer": match[1].strip()})
    return rows


def generated_rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Returns `n` rows (question, reasoning, answer) of reasoning-gym's `gsm_symbolic`.

    Its row i depends on seed + i. The seed is multiplied, because neighbouring seeds would share most rows.

    Raises:
        ValueError: the package, or one of its dependencies, is missing.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"data.source=rationales needs the package reasoning-gym ({error}): {INSTALL}") from error
    made: Any = reasoning_gym.create_dataset("gsm_symbolic", size=n, seed=1_000_003 * seed)
    rows = []
    for i in range(n):
        reasoning = made[i]["metadata"]["answer_cot"].rpartition("####")[0].strip()
        rows.append({"question": made[i]["question"], "reasoning": reasoning, "answer": made[i]["answer"]})
    return rows


def rationale_rows(split: str, seed: int = 0) -> list[dict[str, str]]:
    """Returns the rows of both packages in one split, mixed; no question of one split occurs in the other.

    Args:
        split: "train" or "eval".
        seed: of the generated rows.

    Raises:
        ValueError: a package is missing.
    """
    every = task_rows() + generated_rows(GENERATED_ROWS, seed)
    rows = [row for row in every if embedded.split_of(row["question"], _HELD_OUT_SHARE) == split]
    return sorted(rows, key=lambda row: hashlib.sha256(f"order {row['question']}".encode()).digest())


def pick_split(data: Dataset | DatasetDict, split: str) -> Dataset:
    """Returns the split of a `DatasetDict`, or a `Dataset` as it is.

    Raises:
        ValueError: there is no such split, or the data is neither of the two.
    """
    if isinstance(data, DatasetDict):
        if split not in data:
            raise ValueError(f"data.split: there is no split {split!r}; the data has {', '.join(data)}")
        data = data[split]
    if not isinstance(data, Dataset):
        raise ValueError(f"the data must be a datasets.Dataset, not {type(data).__name__}")
    return data


def kept_place(data: Dataset | DatasetDict, folder: Path) -> Path:
    """Returns the path in `folder` that `keep_rows` writes a data set to, by its content.

    Raises:
        ValueError: the data is not a `Dataset` or `DatasetDict`, or has no rows.
    """
    parts = data.values() if isinstance(data, DatasetDict) else [data]
    if not all(isinstance(part, Dataset) for part in parts):
        raise ValueError(f"the data must be a datasets.Dataset, not {type(data).__name__}")
    if not all(len(part) for part in parts):
        raise ValueError("the data set given has no rows")
    return folder / hashlib.blake2b(" ".join(part._fingerprint for part in parts).encode(), digest_size=8).hexdigest()


def keep_rows(data: Dataset | DatasetDict, folder: Path) -> str:
    """Writes a data set to `kept_place`, so that other processes can load it; returns the path as their source.

    Raises:
        ValueError: as `kept_place`.
    """
    target = kept_place(data, folder)
    if not target.exists():  # a run that is started again finds its rows there
        with atomic.replacing(target, shared=True) as part:
            data.save_to_disk(part)
    return str(target)
