"""Shards of a stream: the division of files, the rows made from them, and messages about broken files."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import load_config
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.stream import feeder, opening, shards
from tpu_kit.data.stream.opening import prepare_stream
from tpu_kit.data.stream.packed_shards import PackedShard, Place
from tpu_kit.data.stream.shards import ShardError, Shards


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(name: str, count: int) -> list[str]:
    """Texts of about 2 to 40 tokens, and a text longer than a row."""
    return [f"{name} {i}: " + "Two and three make five. " * (30 if i == 7 else i % 6) for i in range(count)]


def write(path: str, rows: list[Any], column: str = "text") -> None:
    rows = [row if isinstance(row, dict) else {column: row} for row in rows]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(source: str = "*.jsonl", **settings: Any) -> Prepared:
    values = {"source": source, "streaming": True, "max_steps": 5, "max_length": 64, "eval_rows": 0} | settings
    return prepare_stream(load_config(None, values).data, tiny_tokenizer())


def written(prepared: Prepared, number: int, folder: Path) -> PackedShard:
    target = folder / f"shard-{number}"
    prepared.stream.write(number, target)
    return prepared.stream.read(number, target)


def documents(shard: PackedShard) -> list[tuple[int, list[int]]]:
    """The source row and the tokens of all documents, in the order of the file."""
    data = shard.data
    return [(int(data.documents.source_rows[i]), data.document(i)[0].tolist()) for i in range(len(data.documents))]


def test_the_error_of_a_shard_that_was_begun_reaches_the_replicas(tmp_path: Path) -> None:
    """The broken row is the last, so that the folder of the shard exists already."""
    write("a.jsonl", texts("a", 30))
    stream = replace(opened().stream, folder=tmp_path)
    with Path("a.jsonl").open("a") as file:
        file.write("{]\n")
    feeder.feed(stream, Place(), tmp_path)
    with pytest.raises(ShardError, match=r"a\.jsonl"):
        next(feeder.shards_from(stream, Place()))


def test_a_shard_is_what_the_same_rows_in_memory_are(tmp_path: Path) -> None:
    write("a.jsonl", [{"text": text, "url": 1} for text in texts("a", 40)])
    prepared = opened()
    shard = written(prepared, 0, tmp_path)
    whole = prepare(load_config(None, {"source": "a.jsonl", "format": "text", "too_long": "split", "max_length": 64,
                                       "eval_rows": 0}).data, tiny_tokenizer())  # fmt: skip
    assert shard.data.fingerprint() == whole.train.fingerprint() == prepared.train.fingerprint()
    assert np.array_equal(shard.data.documents.source_rows, whole.train.documents.source_rows)
    assert any(rows.count(7) > 1 for rows in [[row for row, _ in documents(shard)]]), "the long text is split"
    ordered = [written(opened(shuffle=on), number, tmp_path / f"{on}{number}").order.tolist()
               for on in (False, True) for number in (0, 1)]  # fmt: skip
    assert ordered[0] == ordered[1] == list(range(len(shard.data))) == sorted(ordered[2]) == sorted(ordered[3])
    assert len({*map(tuple, ordered)}) == 3, "another order in each epoch"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_parts_of_a_file_have_each_row_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": text} for text in texts("ä", 50)]
    if kind == "jsonl":
        write("a.jsonl", [*rows[:20], {"text": "  "}, *rows[20:]])
        lines = Path("a.jsonl").read_text().splitlines(keepends=True)
        Path("a.jsonl").write_text("\ufeff" + "".join([*lines[:10], "\n", *lines[10:20], *lines[21:]]))
    else:
        datasets.Dataset.from_list(rows).to_parquet("a.parquet", batch_size=16)
    whole = [documents(written(opened(f"a.{kind}"), 0, tmp_path / "whole"))]
    monkeypatch.setattr(shards, "_BATCH", 7)
    for parts in (2, 5):
        monkeypatch.setattr(shards, "PART_BYTES", -(-Path(f"a.{kind}").stat().st_size // parts))
        prepared = opened(f"a.{kind}")
        assert prepared.stream.count == parts
        divided = [documents(written(prepared, number, tmp_path / str(parts))) for number in range(parts)]
        assert all(divided)
        texts_of = [[ids for part in found for _, ids in part] for found in (whole, divided)]
        assert texts_of[0] == texts_of[1]
    assert re.search(
        r"shards           5 of 1 file, .*; about [\d,]+ tokens per shard, [\d,]+ per epoch", str(prepared)
    )


def test_the_first_rows_are_held_out_in_all_epochs(tmp_path: Path) -> None:
    write("a.jsonl", texts("a", 20))
    write("b.jsonl", texts("b", 9))
    prepared = opened(eval_rows=6)
    assert prepared.eval is not None and {*prepared.eval.documents.source_rows.tolist()} == set(range(6))
    first, second, again = (written(prepared, number, tmp_path) for number in (0, 1, 2))
    assert [row for row, _ in documents(first) if row < 6] == [] and {row for row, _ in documents(second)} == {
        *range(9)
    }
    assert documents(first) == documents(again)
    assert "held out         the first 6 rows of a.jsonl, in all epochs" in str(prepared)
    write("c.jsonl", texts("c", 80))
    assert len({*opened("c.jsonl", eval_rows=None).eval.documents.source_rows.tolist()}) == opening.HELD_ROWS


def test_bad_rows_of_a_part_are_told_by_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"text": text} for text in texts("a", 60)]
    rows[3] = {"text": {"a": 1}}
    rows[50] = {"text": None}
    write("a.jsonl", rows)
    size = Path("a.jsonl").stat().st_size
    monkeypatch.setattr(shards, "PART_BYTES", -(-size // 2))
    with pytest.raises(ValueError, match=r"1 of \d+ rows cannot be used: a.jsonl, line 4: column 'text' holds a dict"):
        opened()
    write("a.jsonl", [*rows[:3], *rows[4:]])
    monkeypatch.setattr(opening, "_LOOKED_AT", 20)
    prepared = opened()
    with pytest.raises(ValueError, match=r"1 of \d+ rows cannot be used: a.jsonl, line 50: column 'text' is empty"):
        written(prepared, 1, tmp_path)
    shard = written(opened(on_bad_row="skip"), 1, tmp_path / "skip")
    expected = "a.jsonl (part 2 of 2): 1 rows skipped (data.on_bad_row): a.jsonl, line 50: column 'text' is empty"
    assert shard.skipped == expected
    write("b.jsonl", ["a text", *[{"text": i % 2 == 0} for i in range(9)]])
    with pytest.raises(ValueError, match=r"9 of 10 rows cannot be used: .*skips at most half of the rows"):
        opened("b.jsonl", on_bad_row="skip")


def test_rows_are_read_as_text_is(tmp_path: Path) -> None:
    """Numbers among texts, a column with another name, and the text of a special token."""
    write("a.jsonl", [{"body": "one <|im_end|> two", "n": 1}, {"body": 5, "n": 2}, {"body": "six", "n": 3}])
    for special in ("keep", "split"):
        settings = {"columns": {"text": "body"}, "special_text": special}
        prepared = opened("a.jsonl", **settings)
        whole = prepare(load_config(None, {"source": "a.jsonl", "format": "text", "too_long": "split", "max_length": 64,
                                           "eval_rows": 0, **settings}).data, tiny_tokenizer())  # fmt: skip
        assert written(prepared, 0, tmp_path / special).data.fingerprint() == whole.train.fingerprint()
        assert "special tokens   1 row holds the text of a special token, such as <|im_end|>" in str(prepared)


def test_files_that_change_or_disappear_are_named(tmp_path: Path) -> None:
    for name in "abc":
        write(f"{name}.jsonl", texts(name, 20))
    stream = opened().stream
    write("b.jsonl", texts("B", 20))
    with pytest.raises(ValueError, match=r"data source \*.jsonl: b.jsonl has changed since the run began; put it back"):
        stream.write(1, tmp_path / "1")
    Path("c.jsonl").unlink()
    with pytest.raises(ValueError, match=r"data source \*.jsonl: c.jsonl has disappeared; put it back"):
        stream.write(2, tmp_path / "2")
    write("b.jsonl", texts("b", 20))
    stream.write(4, tmp_path / "4")


def test_versions_are_those_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        write(f"{name}/a.jsonl", texts("a", 90))
        write(f"{name}/b.jsonl", texts("b", 5))
    found = [Shards.find(f"{name}/*.jsonl").versions() for name in ("here", "there")]
    assert found[0] == found[1] and [*found[0]] == ["a.jsonl", "b.jsonl"]
    monkeypatch.setattr(shards, "_SAMPLE", 100)
    before = Shards.find("here/*.jsonl").versions()
    text = Path("here/a.jsonl").read_text()
    Path("here/a.jsonl").write_text(text[:-9] + text[-9:].replace("five", "FIVE").replace("0", "1"))
    after = Shards.find("here/*.jsonl").versions()
    assert [name for name in before if before[name] != after[name]] == ["a.jsonl"]


def test_objects_of_a_bucket_are_a_stream(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    for name in "ab":
        with fsspec.open(f"{bucket}/{name}.jsonl", "wt") as file:
            file.write("".join(json.dumps({"text": text}) + "\n" for text in texts(name, 30)))
    monkeypatch.setattr(shards, "PART_BYTES", 1000)
    prepared = opened(f"{bucket}/*.jsonl")
    count = prepared.stream.count
    assert count > 4
    found = [row for number in range(count) for row in documents(written(prepared, number, tmp_path))]
    monkeypatch.setattr(shards, "PART_BYTES", 10**6)
    write("a.jsonl", texts("a", 30))
    write("b.jsonl", texts("b", 30))
    local = opened()
    whole = [row for number in range(2) for row in documents(written(local, number, tmp_path / "local"))]
    assert [ids for _, ids in found] == [ids for _, ids in whole]
    with fsspec.open(f"{bucket}/b.jsonl", "wt") as file:
        file.write(json.dumps({"text": "another"}) + "\n")
    with pytest.raises(ValueError, match=r"b.jsonl \(part \d of \d\) has changed since the run began"):
        prepared.stream.write(count - 1, tmp_path / "last")


def test_what_is_no_stream_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, source: str = "*.jsonl", **settings: Any) -> None:
        with pytest.raises(ValueError, match=text):
            opened(source, **settings)

    refused(r"data source \*.jsonl: there is no such file; check data.source")
    write("a.jsonl", [{"question": "a", "answer": "b"}])
    refused(
        r"missing columns: format text needs text; the data has question, answer. Name them, for example data.columns"
    )
    Path("b.jsonl").write_text("\n \n")
    refused("data source b.jsonl: b.jsonl has no rows; remove it", "b.jsonl")
    write("c.jsonl", ["a text"])
    refused("c.jsonl has no rows to train besides the 64 held-out rows: lower data.eval_rows", "c.jsonl",
            eval_rows=64)  # fmt: skip
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk("saved")
    refused("data source saved: rows in memory or of save_to_disk cannot be streamed; write them with", "saved")
    with gzip.open("d.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "a text"}) + "\n")
    assert "the number of tokens is not known, because they are compressed" in str(opened("d.jsonl.gz"))
    monkeypatch.setattr(shards, "MOST_BYTES", 10)
    refused("CSV and compressed files cannot be divided: write several files, or parquet", "d.jsonl.gz")
    Path("e.json").write_text(json.dumps([{"text": "a text"}] * 30))
    monkeypatch.setattr(shards, "PART_BYTES", 300)
    refused("e.json: a JSON array of this size cannot be divided; write one row per line", "e.json")
    monkeypatch.setattr(shards, "PART_BYTES", 10**6)
    datasets.Dataset.from_list([{"text": "a text"}]).to_parquet("p1.parquet")
    datasets.Dataset.from_list([{"body": "a text"}]).to_parquet("p2.parquet")
    with pytest.raises(ValueError, match=r"p2.parquet has no column text, but body"):
        opened("p*.parquet").stream.write(1, tmp_path / "1")
    write("f1.jsonl", ["a text"])
    Path("f2.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match=r"f2.jsonl has no rows to train: remove it"):
        opened("f?.jsonl").stream.write(1, tmp_path / "2")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_steps": None}, "optim.max_steps: null but a stream has no end; set the number of updates"),
        ({"source": ["a.jsonl", "b.jsonl"]}, "is a mix, but a stream is one source; name its files by a glob"),
        ({"source": "embedded"}, "data.source: 'embedded' is no text file; name files"),
        ({"source": "embedded-pairs"}, "data.source: 'embedded-pairs' is no text file; name files"),
        ({"format": "messages"}, "data.format: 'messages' is not plain text, but a stream is; set it to text"),
        ({"too_long": "drop"}, "data.too_long: 'drop' loses parts of long texts, but a stream must split them"),
        ({"packing": False}, "data.packing: false leaves rows unfilled, but a stream fills them; remove it"),
        ({"curriculum": "level"}, "data.curriculum: 'level' sorts all rows, but a stream reads them in parts"),
        ({"split": "train[:9]"}, "data.split: 'train[:9]' is a part, but a stream does not count its rows"),
        ({"eval_source": "e.jsonl"}, "data.eval_source: 'e.jsonl' is not for a stream, which holds out its first"),
        ({"eval_split": "dev"}, "data.eval_split: 'dev' is not for a stream, which holds out its first data.eval_rows"),
        ({"eval_rows": 0.1}, "data.eval_rows: 0.1 is a share, but a stream does not count its rows; set a"),
        ({"images": True}, "model.images: true is for chats with images, but a stream is plain text"),
        ({"objective": "policy"}, "optim.objective: 'policy' needs prompts, but a stream is plain text; use train"),
        ({"teacher": "a", "on_policy": True, "labels_weight": 0}, "distill.on_policy: true needs prompts"),
        ({"teacher": "a", "files": "f"}, "distill.files: 'f' holds logits of rows known before training"),
        ({"objective": "preference"}, "optim.objective: 'preference' needs pairs of replies"),
        ({"generate_rows": 4}, "tracking.generate_rows: 4 needs prompts, but a stream is plain text; set it to 0"),
        ({"eval_generate_rows": 4}, "tracking.eval_generate_rows: 4 needs prompts, but a stream is plain text"),
    ],
)  # fmt: skip
def test_what_a_stream_does_not_have_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, {"source": "a.jsonl", "streaming": True, "max_steps": 5} | settings)
    assert any(text in problem for problem in error.value.problems), error.value.problems


def test_long_texts_are_split_unless_it_is_told_otherwise() -> None:
    values = {"source": "a.jsonl", "streaming": True, "max_steps": 5}
    config = load_config(None, values)
    assert config.data.too_long == "split" and load_config(None, {"source": "a.jsonl"}).data.too_long == "truncate"
    assert load_config(config.to_dict()) == config
