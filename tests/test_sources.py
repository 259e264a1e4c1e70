"""Rows from everywhere, and errors with file and line."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from tpu_kit.sources import load_rows, pick_split

ROWS = [{"question": f"q{i}", "reasoning": "r", "answer": str(i)} for i in range(5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def lines(rows: list) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet"])
def test_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(ROWS).encode()))
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(ROWS[0]), delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        path.write_text(lines(ROWS) if kind == "jsonl" else json.dumps(ROWS))
    found = load_rows(str(path)).to_list()
    assert [{key: str(value) for key, value in row.items()} for row in found] == ROWS
    assert len(load_rows(str(path), "train[:2]")) == 2


def test_glob_takes_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", lines(ROWS[3:]))
    write(tmp_path / "a.jsonl", lines(ROWS[:3]) + "\n\n")
    assert load_rows(str(tmp_path / "*.jsonl")).to_list() == ROWS


def test_a_bucket_is_read_through_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    fsspec.filesystem("memory").pipe("/bucket/rows.jsonl", lines(ROWS).encode())
    assert load_rows("memory://bucket/*.jsonl").to_list() == ROWS


def test_cells_of_csv_that_read_na_stay_text(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.csv", "question,reasoning,answer\nq,NA,None\nq2,,null\n")
    assert load_rows(source)[:] == {"question": ["q", "q2"], "reasoning": ["NA", ""], "answer": ["None", "null"]}


def test_folder_saved_by_datasets(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(test=Dataset.from_list(ROWS[:2])).save_to_disk(tmp_path / "many")
    assert load_rows(str(tmp_path / "one")).to_list() == ROWS
    assert len(load_rows(str(tmp_path / "many"), "test")) == 2
    with pytest.raises(ValueError, match="there is no split 'train'; the data has test"):
        load_rows(str(tmp_path / "many"))


def test_embedded() -> None:
    train, held = load_rows("embedded", "train[:50]"), load_rows("embedded", "eval[:20]")
    assert (len(train), len(held)) == (50, 20) and train.column_names == ["question", "reasoning", "answer"]
    assert not set(train["question"]) & set(held["question"])
    assert load_rows("embedded", "train[:50]", seed=1)[0] != train[0]
    with pytest.raises(ValueError, match=r'embedded has the splits "train" and "eval", .*not .test'):
        load_rows("embedded", "test")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n\n{"a": 2 "b"}\n',
            r"a.jsonl, line 3, column 9: not valid JSON: Expecting ',' delimiter",
        ),
        ("a.jsonl", '{"a": 1}\n7\n', "line 2: a row must be an object, not int"),
        ("a.json", '[\n{"a": 1},\n{"a": }\n]', "a.json, line 3, column 7: not valid JSON: Expecting value"),
        ("a.json", '[{"a": 1}, "x"]', "row 1: a row must be an object, not str"),
        ("a.csv", "a,b\n1,2\n1,2,3,4\n", "cannot be read: .*Expected 2 fields in line 3, saw 4"),
        ("a.parquet", "no parquet", "a.parquet: cannot be read"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        ("a.csv", "question,answer\n", "a.csv: cannot be read: it has no rows"),
        ("a.xml", "<a/>", "the name must end in .jsonl, .json"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load_rows(write(tmp_path / name, content))


def test_missing_files_and_splits(tmp_path: Path) -> None:
    for name in ("none.jsonl", "*.csv", "none/none.parquet"):
        with pytest.raises(ValueError, match=r"data source .*none|\*.*: there is no such file"):
            load_rows(str(tmp_path / name))
    source = write(tmp_path / "a.jsonl", lines(ROWS))
    with pytest.raises(ValueError, match="files have one split, train, not 'test'"):
        load_rows(source, "test")
    with pytest.raises(ValueError, match=r"no-one/no-such-data.* the hub gave no such data set"):
        load_rows("no-one/no-such-data")


def test_what_is_no_dataset() -> None:
    with pytest.raises(ValueError, match=r"must be a datasets.Dataset, not list"):
        pick_split(ROWS, "train")  # type: ignore[arg-type]
