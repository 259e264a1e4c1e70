"""Rows from files, archives, object stores and the hub, and errors with file and line."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from tests.support.object_store import bucket, object_store
from tpu_kit.data.rows.records import LOCATION, PROBLEM
from tpu_kit.data.rows.sources import load_rows, save_rows

__all__ = ["bucket", "object_store"]  # fixtures

ROWS = [{"question": f"q{i}", "reasoning": "r", "answer": str(i)} for i in range(5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def load(source: str, split: str = "train", seed: int = 0) -> Dataset:
    rows = load_rows(source, split, seed)
    return rows.select_columns([name for name in rows.column_names if name not in (LOCATION, PROBLEM)])


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
    found = load(str(path)).to_list()
    assert [{key: str(value) for key, value in row.items()} for row in found] == ROWS
    assert len(load(str(path), "train[:2]")) == 2


def test_glob_takes_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", lines(ROWS[3:]))
    write(tmp_path / "a.jsonl", lines(ROWS[:3]) + "\n\n")
    assert load(str(tmp_path / "*.jsonl")).to_list() == ROWS
    named = write(tmp_path / "rows [1].jsonl", lines(ROWS[:2]))
    assert load(named).to_list() == ROWS[:2]


def test_a_bucket_is_read_through_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    fsspec.filesystem("memory").pipe("/bucket/rows.jsonl", lines(ROWS).encode())
    assert load("memory://bucket/*.jsonl").to_list() == ROWS


def test_cells_of_csv_that_read_na_stay_text(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.csv", "question,reasoning,answer\nq,NA,None\nq2,,null\n")
    assert load(source)[:] == {"question": ["q", "q2"], "reasoning": ["NA", ""], "answer": ["None", "null"]}


def test_folder_saved_by_datasets(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict(test=Dataset.from_list(ROWS[:2])).save_to_disk(tmp_path / "many")
    assert load(str(tmp_path / "one")).to_list() == ROWS
    assert len(load(str(tmp_path / "many"), "test")) == 2 and len(load(str(tmp_path / "many"), "test[:1]")) == 1
    assert load(str(tmp_path / "one"), "train[1:]").to_list() == ROWS[1:]
    with pytest.raises(ValueError, match="there is no split 'test'; the data has train"):
        load(str(tmp_path / "one"), "test[:1]")
    with pytest.raises(ValueError, match=r"data.split='train\[x\]': .*one has \d+ rows"):
        load(str(tmp_path / "one"), "train[x]")
    with pytest.raises(ValueError, match="there is no split 'train'; the data has test"):
        load(str(tmp_path / "many"))


def test_embedded() -> None:
    train, held = load("embedded", "train[:50]"), load("embedded", "eval[:20]")
    assert (len(train), len(held)) == (50, 20) and train.column_names == ["question", "reasoning", "answer"]
    assert not set(train["question"]) & set(held["question"])
    assert load("embedded", "train[:50]", seed=1)[0] != train[0]
    with pytest.raises(ValueError, match=r'embedded has the splits "train" and "eval", .*not .test'):
        load("embedded", "test")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n\n{"a": 2 "b"}\n',
            r"a.jsonl, line 3, column 9: not valid JSON: Expecting ',' delimiter",
        ),
        ("a.jsonl", '{"a": 1}\n7\n', "line 2: a row must be an object, not 7"),
        ("a.json", '[\n{"a": 1},\n{"a": }\n]', "a.json, line 3, column 7: not valid JSON: Expecting value"),
        ("a.json", '[{"a": 1}, "x"]', "row 1: a row must be an object, not .x"),
        ("a.csv", "a,b\n1,2\n1,2,3,4\n", "a.csv, line 3: 4 cells, and the header has 2"),
        ("a.parquet", "no parquet", "a.parquet: cannot be read"),
        ("a.jsonl", "", "a.jsonl: the file is empty"),
        ("a.csv", "question,answer\n", "a.csv, split train: it has no rows"),
        ("a.xml", "<a/>", "the name must end in .jsonl, .json"),
        ("a.csv", "question,answer,answer\nq,1,2\n", "a.csv: column answer occurs twice; rename one of them"),
        ("a.csv", "question,answer\nq,1,x\n", "a.csv, line 2: 3 cells, and the header has 2"),
        ("a.csv", 'a,b\n"q,1\nq,2\n', "a.csv, line 2: the quotes of a cell do not match .*unexpected end of data"),
        ("a.csv", b"a,b\nq,1\ncaf\xe9,1\n", "a.csv, line 3: not UTF-8 .*; save the file as UTF-8"),
        ("a.jsonl", b'{"a": "q"}\n{"a": "caf\xe9"}\n', "a.jsonl, line 2: not UTF-8 .*; save the file as UTF-8"),
        ("a.jsonl", '{"a": 1}\n'.encode("utf-16"), "a.jsonl, line 1: not UTF-8"),
        ("a.jsonl", '{"a": 1, "a": 2}\n', "a.jsonl, line 1: the key 'a' occurs twice"),
        ("a.jsonl", "\n\n", "a.jsonl, split train: it has no rows"),
        ("a.json", "[]", "a.json, split train: it has no rows"),
        ("a.jsonl.gz", "text", "a.jsonl.gz: cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n{]\n', mtime=0), "a.jsonl.gz, line 2, column 2: not valid JSON"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(write(tmp_path / name, content))


@pytest.mark.parametrize(("value", "read"), [("x", "x"), (2.5, "2.5"), (3.0, "3"), (2**70, str(2**70)), ([7], [7])])
def test_a_type_that_changes_far_into_a_file(tmp_path: Path, value: object, read: object) -> None:
    """Texts and numbers become text. A list stays a list; data/test_prepare.py tests its message with the row."""
    rows = [{"question": "q" * 100, "answer": 7} for _ in range(2_500)]
    found = load(write(tmp_path / "rows.jsonl", lines([*rows, {"question": "q", "answer": value}])))
    assert found[-1] == {"question": "q", "answer": read}
    assert found[0]["answer"] == ("7" if isinstance(read, str) else 7)


@pytest.mark.parametrize(
    "value", [7, 2.5, True, [{"a": None}, {"b": [1.5]}], {"x": 2**63 - 1, "y": "2024-01-01"}, "[1]"]
)
def test_cells_of_json_come_back_as_they_are(tmp_path: Path, value: object) -> None:
    rows = [{"question": "q", "answer": value}, {"question": "2024-01-01", "answer": None}]
    assert load(write(tmp_path / "rows.jsonl", lines(rows))).to_list() == rows


def test_slices_of_files(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", lines(ROWS))
    assert len(load(source, "train[60%:]")) == 2
    assert load(source, "train[:9]").to_list() == ROWS
    with pytest.raises(ValueError, match=r"data.split='train\[x\]': "):
        load(source, "train[x]")


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", lines(ROWS))
    assert load(source).to_list() == ROWS
    assert load(write(tmp_path / "rows.jsonl", lines(ROWS[::-1]))).to_list() == ROWS[::-1]


def test_unreadable_rows_are_counted_or_have_their_reason(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "null\n" * 4 + "\n" + lines(ROWS[:2]))
    write(tmp_path / "b.jsonl", lines(ROWS[2:]) + "[7]\n{bad\n")
    source = str(tmp_path / "*.jsonl")
    text = (
        r"\*.jsonl: 6 of 11 rows cannot be used: a.jsonl, line 1: a row must be an object, not null \(also a.jsonl, "
        r"line 2, .*, a.jsonl, line 4\); b.jsonl, line 4: [^;]*not .7.; and 1 more. Correct .* at most half"
    )
    with pytest.raises(ValueError, match=text):
        load_rows(source, skip=True)
    write(tmp_path / "a.jsonl", "null\n" * 3 + "\n" + lines(ROWS[:2]))
    with pytest.raises(ValueError, match=r"5 of 10 rows cannot be used: .* or skip them with data.on_bad_row=skip$"):
        load_rows(source)
    rows = load_rows(source, skip=True)
    assert [row["answer"] for row in rows] == [None] * 3 + ["0", "1", "2", "3", "4"] + [None] * 2
    assert [bool(problem) for problem in rows[PROBLEM]] == [True] * 3 + [False] * 5 + [True] * 2
    places = ["a.jsonl, line 5", "b.jsonl, line 4", "b.jsonl, line 5, column 2"]
    assert [rows[LOCATION][i] for i in (3, 8, 9)] == places
    assert (
        load_rows(source, "train[3:]", skip=True)[LOCATION][0] == places[0]
        and len(load_rows(source, "train[3:8]")) == 5
    )
    assert not list((tmp_path / "cache").rglob("*.part"))


@pytest.mark.parametrize("content", [lines(ROWS), json.dumps(ROWS), json.dumps(ROWS, indent=1)])
def test_json_as_other_systems_write_it(tmp_path: Path, content: str) -> None:
    for name, text in {"plain": content, "bom": "\ufeff" + content, "windows": content.replace("\n", "\r\n")}.items():
        for kind in ("json", "jsonl"):
            assert load(write(tmp_path / f"{name}.{kind}", text.encode())).to_list() == ROWS


def test_cells_of_csv_are_the_text_that_stands_there(tmp_path: Path) -> None:
    text = '\ufeffquestion,answer\r\n"two\nlines",007\r\nq,1.50\r\n½ 😀,1e5\r\n'
    found = load(write(tmp_path / "rows.csv", text.encode()))[:]
    assert found == {"question": ["two\nlines", "q", "½ 😀"], "answer": ["007", "1.50", "1e5"]}


def test_a_row_of_megabytes(tmp_path: Path) -> None:
    row = ROWS[1] | {"answer": "word " * 1_000_000}
    assert load(write(tmp_path / "rows.jsonl", lines([row, ROWS[0]])))[0] == row


CARD = """---
configs:
- config_name: main
  data_files: [{split: train, path: data/train-*}, {split: test, path: data/test-*}]
- config_name: other
  data_files: other.jsonl
---
"""


def test_a_folder_as_the_hub_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    for name, rows in (
        ("train-00000-of-00002", ROWS[:3]),
        ("train-00001-of-00002", ROWS[3:]),
        ("test-00000-of-00001", ROWS[:2]),
    ):
        Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{name}.parquet")
    write(tmp_path / "README.md", "# Rows\n")
    assert load(str(tmp_path)).to_list() == ROWS and load(str(tmp_path), "train[:4]").to_list() == ROWS[:4]
    assert load(str(tmp_path), "test").to_list() == ROWS[:2]
    with monkeypatch.context() as here:
        here.chdir(tmp_path.parent)
        assert load(tmp_path.name).to_list() == ROWS, "a relative path"
    with pytest.raises(ValueError, match=r"there is no split 'dev'; .* has (train, test|test, train)"):
        load(str(tmp_path), "dev")
    write(tmp_path / "other.jsonl", lines(ROWS[:1]))
    with pytest.raises(ValueError, match=r"such as /.*\.jsonl, or move away files that are in no split: other.jsonl"):
        load(str(tmp_path))
    write(tmp_path / "README.md", CARD)
    with pytest.raises(ValueError, match=r"its configurations are main, other; name one, as in .*:main"):
        load(str(tmp_path))
    assert load(f"{tmp_path}:main", "test").to_list() == ROWS[:2] and load(f"{tmp_path}:other").to_list() == ROWS[:1]


def test_a_folder_without_rows(tmp_path: Path) -> None:
    write(tmp_path / "notes.bin", "x")
    with pytest.raises(ValueError, match=r"a folder; name the files in it, such as /.*/\*.jsonl; none has rows"):
        load(str(tmp_path))


def test_the_list_of_data_sets_of_llama_factory_is_no_source(tmp_path: Path) -> None:
    path = write(tmp_path / "dataset_info.json", '{"mine": {"file_name": "mine.json"}, "hub": {"hf_hub_url": "a/b"}}')
    for source in (path, str(tmp_path)):
        with pytest.raises(ValueError, match=r"of LLaMA-Factory; name the file, .* \(mine: mine.json, hub: a/b\), and"):
            load(source)


def test_headers_of_csv_with_spaces(tmp_path: Path) -> None:
    source = write(tmp_path / "rows.csv", 'question, answer \nq, "a, b"\n"r", 7\n')
    assert load(source)[:] == {"question": ["q", "r"], "answer": ["a, b", "7"]}
    source = write(tmp_path / "kept.csv", "question,answer\nq, a\n")
    assert load(source)[:] == {"question": ["q"], "answer": [" a"]}


def test_zst_needs_its_package(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard") if importlib.util.find_spec("zstandard") else None
    if zstandard:
        source = write(tmp_path / "rows.jsonl.zst", zstandard.compress(lines(ROWS).encode()))
        assert load(source).to_list() == ROWS
    else:
        with pytest.raises(ValueError, match=r"to read .zst: pip install zstandard"):
            load(write(tmp_path / "rows.jsonl.zst", b"zst"))


def test_objects_of_a_bucket(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP with gcsfs, from an emulator of Google's server."""
    import fsspec

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)

    system = fsspec.filesystem("gs")
    system.pipe(f"{bucket}/rows/b.jsonl", lines(ROWS[3:]).encode())
    system.pipe(f"{bucket}/rows/a.jsonl", lines(ROWS[:3]).encode())
    system.pipe(f"{bucket}/rows.csv", b"question,answer\nq,007\n")
    buffer = io.BytesIO()
    Dataset.from_list(ROWS).to_parquet(buffer)
    system.pipe(f"{bucket}/rows.parquet", buffer.getvalue())
    assert load(f"{bucket}/rows/a.jsonl").to_list() == ROWS[:3]
    assert load(f"{bucket}/rows/*.jsonl").to_list() == ROWS
    assert load(f"{bucket}/rows.parquet", "train[:2]").to_list() == ROWS[:2]
    assert load(f"{bucket}/rows.csv").to_list() == [{"question": "q", "answer": "007"}]

    system.pipe(f"{bucket}/rows/b.jsonl", b"{bad")
    with pytest.raises(ValueError, match=r"b.jsonl, line 1, column 2: not valid JSON"):
        load(f"{bucket}/rows/*.jsonl")
    system.pipe(f"{bucket}/empty.jsonl", b"")
    with pytest.raises(ValueError, match=r"empty.jsonl: the file is empty"):
        load(f"{bucket}/empty.jsonl")
    for missing in (f"{bucket}/none.jsonl", f"{bucket}/none/*.jsonl", "gs://no-such-bucket-tpu-kit/rows.jsonl"):
        with pytest.raises(ValueError, match=r"none|no-such-bucket.*: there is no such file \(or no such bucket\)"):
            load(missing)


def test_a_bucket_without_access(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    class Refused(Exception):
        pass

    def info(path: str) -> None:
        raise Refused("Anonymous caller does not have storage.objects.get access, 401")

    monkeypatch.setattr(fsspec.filesystem("memory"), "info", info)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda source: (fsspec.filesystem("memory"), source))
    with pytest.raises(
        ValueError,
        match=r"gs://private/a.jsonl: no access: Refused: Anonymous caller .*; check the network; log in with `gc",
    ):
        load("gs://private/a.jsonl")


def test_missing_files_and_splits(tmp_path: Path) -> None:
    for name in ("none.jsonl", "*.csv", "none/none.parquet"):
        with pytest.raises(ValueError, match=r"data source .*none|\*.*: there is no such file"):
            load(str(tmp_path / name))
    source = write(tmp_path / "a.jsonl", lines(ROWS))
    with pytest.raises(ValueError, match="files have one split, train, not 'test'"):
        load(source, "test")
    with pytest.raises(ValueError, match=r"no-one/no-such-data.* the hub gave no such data set"):
        load("no-one/no-such-data")


def test_rows_in_memory_are_kept_where_other_processes_find_them(tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    source = save_rows(data, tmp_path)
    assert load(source).to_list() == ROWS
    assert save_rows(data, tmp_path) == source != save_rows(Dataset.from_list(ROWS[:3]), tmp_path)
    both = save_rows(DatasetDict(train=data, test=Dataset.from_list(ROWS[:2])), tmp_path)
    assert (len(load(both)), len(load(both, "test"))) == (5, 2)
    with pytest.raises(ValueError, match=r"must be a datasets.Dataset, not list"):
        save_rows(ROWS, tmp_path)
    with pytest.raises(ValueError, match="the data set given has no rows"):
        save_rows(data.select([]), tmp_path)
