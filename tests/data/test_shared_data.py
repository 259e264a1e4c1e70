"""Data that one process of a host prepares and the others read."""

from __future__ import annotations

import datetime
import functools
import json
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from datasets import Dataset

from tests.distributed.test_hosts import together
from tests.support import training_functions
from tests.support.object_store import free_port
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import DataConfig, load_config
from tpu_kit.data.prepare import Prepared, prepare, prepare_once, read_prepared, write_prepared
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.meeting import Meeting


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("eval_rows", [0, 5])
def test_what_is_read_is_what_was_prepared(tmp_path: Path, eval_rows: int) -> None:
    rows = [{"question": f"{i}?", "answer": i, "day": datetime.date(2024, 1, 1 + i % 9)} for i in range(40)]
    config = DataConfig(max_length=64, eval_rows=eval_rows, on_bad_row="skip")
    data = Dataset.from_list([*rows, {"question": "", "answer": 1, "day": None}])
    made = prepare(config, tiny_tokenizer(), dataset=data)
    write_prepared(made, tmp_path / "prepared")
    write_prepared(made, tmp_path / "prepared")  # in the place of an earlier one
    found = read_prepared(tmp_path / "prepared", tiny_tokenizer(None), config)
    assert [path.name for path in tmp_path.glob("prepared*")] == ["prepared"]
    assert found.fingerprint == made.fingerprint and found.train.fingerprint() == made.train.fingerprint()
    assert (found.report, found.eval_report, found.eval_prompts) == (made.report, made.eval_report, made.eval_prompts)
    assert found.encoder.layout == made.encoder.layout and found.example(3) == made.example(3)
    assert found.eval_rows == [row | {"day": str(row["day"])} for row in made.eval_rows]
    assert found.eval_prompt_ids == made.eval_prompt_ids
    assert [part.tolist() for part in found.questions] == [part.tolist() for part in made.questions]
    assert [len(part) for part in made.questions] == [40 - eval_rows, eval_rows]
    row = {"question": "q", "answer": "a"}
    assert found.encoder.examples(row) == made.encoder.examples(row)
    for one, other in ((found.train, made.train), (found.eval, made.eval)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert not one.documents.input_ids.flags.writeable and len(one) == len(other)
            batches = [data_set.tensors(np.r_[np.arange(len(other)), -1]) for data_set in (one, other)]
            assert all((batches[0][name] == batches[1][name]).all() for name in batches[1])
            assert one.source_rows(0) == other.source_rows(0) and one.fill() == other.fill()


@dataclass
class Replica:
    """The runtime of a replica."""

    local_rank: int
    barrier: Callable[[], Any]


def test_the_first_replica_of_a_host_prepares_and_all_read_the_same(cache: Path) -> None:
    config = DataConfig(max_length=64, eval_rows=2)
    rows = Dataset.from_list([{"question": f"{i}?", "answer": i} for i in range(9)])
    barrier, prepared_by, tokenizers = threading.Barrier(2), [], [tiny_tokenizer(), tiny_tokenizer(None)]

    def replica(rank: int) -> Prepared:
        def make() -> Prepared:
            prepared_by.append(rank)
            return prepare(config, tokenizers[rank], dataset=rows)

        return prepare_once(config, cast(Any, Replica(rank, barrier.wait)), tokenizers[rank], make)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(replica, (0, 1))
    assert prepared_by == [0] and tokenizers[1].chat_template == tokenizers[0].chat_template
    assert first.fingerprint == second.fingerprint and first.report == second.report
    assert first.eval_prompts == second.eval_prompts and not second.train.documents.input_ids.flags.writeable
    assert list((cache / "tpu_kit" / "prepared").iterdir()) == []  # nothing is left on the disk


def test_hosts_may_share_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host prepares, reads and removes its data before the first host reads its own."""
    config, tokenizer = DataConfig(max_length=64, eval_rows=0), tiny_tokenizer()

    def prepared(host: str, then: Callable[[], Any]) -> Prepared:
        rows = Dataset.from_list([{"question": f"{i}?", "answer": host} for i in range(9)])
        monkeypatch.setattr(multiprocessing.current_process(), "authkey", host.encode(), raising=False)
        make, barriers = functools.partial(prepare, config, tokenizer, dataset=rows), iter([then, lambda: None])
        return prepare_once(config, cast(Any, Replica(0, lambda: next(barriers)())), tokenizer, make)

    others: list[Prepared] = []
    first = prepared("one", lambda: others.append(prepared("two", lambda: None)))
    assert len(first.train) and others[0].fingerprint != first.fingerprint
    assert list((cache / "tpu_kit" / "prepared").iterdir()) == []  # nothing is left on the disk


@pytest.mark.slow
def test_one_process_of_each_host_tokenises_and_all_have_the_same(tmp_path: Path, cache: Path) -> None:
    """Two hosts share the folder of the run and the cache."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cot_rows("train", 40)))
    config = load_config(
        None,
        {"source": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path / "run"), "eval_rows": 4, "batch_size": 1,
         "device_type": "cpu", "num_replicas": 2, "max_length": 128, "base_dtype": "fp32"},
    )  # fmt: skip
    config.output_path.mkdir()

    def part(meeting: Meeting) -> None:
        meeting.agree({})
        launch(training_functions.prepared_data, config, meeting=meeting)

    address = f"127.0.0.1:{free_port()}"
    assert together([Hosts(index, ("a", "b"), address) for index in (0, 1)], part, part) == [None, None]
    read = [(tmp_path / "run" / f"rank-{rank}.json").read_text() for rank in range(4)]
    notes: list[dict[str, Any]] = list(map(json.loads, read))
    assert [note.pop("calls") for note in notes] == [[0], [], [2], []]
    assert all(note == notes[0] for note in notes) and notes[0]["mapped"] and len(notes[0]["eval"]) == 4
    assert list((cache / "tpu_kit" / "prepared").iterdir()) == []  # nothing is left on the disk
