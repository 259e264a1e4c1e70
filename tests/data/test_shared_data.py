"""Data that the launching process prepares and the replicas map."""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.test_hosts import together
from tests.support import training_functions
from tests.support.given_rows import examples_of, prepare_rows
from tests.support.mapped_files import files_of
from tests.support.object_store import free_port
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.assets.embedded import cot_rows
from tpu_kit.config.loader import DataConfig, load_config
from tpu_kit.data.prepare import on_disk
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.meeting import Meeting
from tpu_kit.recipes.run_data import prepare_run


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def left_over(cache: Path) -> list[Path]:
    return list((cache / "tpu_kit").glob("prepared-*"))


@pytest.mark.parametrize("eval_rows", [0, 5])
def test_what_is_read_is_what_was_prepared(cache: Path, eval_rows: int) -> None:
    rows = [{"question": f"{i}?", "answer": i, "day": datetime.date(2024, 1, 1 + i % 9)} for i in range(40)]
    config = DataConfig(max_length=64, eval_rows=eval_rows, on_bad_row="skip")
    rows.append({"question": "", "answer": 1, "day": None})
    expected = prepare_rows(config, tiny_tokenizer(), rows)
    with on_disk(expected) as data, on_disk(expected) as other:  # as two hosts do that share the cache
        result = data.read()
        assert data.folder != other.folder and len(left_over(cache)) == 2
    assert left_over(cache) == []
    assert result.fingerprint == expected.fingerprint and result.train.fingerprint() == expected.train.fingerprint()
    for name in ("report", "eval_report", "eval_rows", "eval_prompts", "eval_prompt_ids"):
        assert getattr(result, name) == getattr(expected, name)
    assert result.example(3) == expected.example(3)
    assert [part.tolist() for part in result.questions] == [part.tolist() for part in expected.questions]
    assert [len(part) for part in result.questions] == [40 - eval_rows, eval_rows]
    row = {"question": "q", "answer": "a"}
    assert result.encoder.layout == expected.encoder.layout
    assert examples_of(result.encoder, row) == examples_of(expected.encoder, row)
    assert result.encoder.tokenizer.chat_template == expected.encoder.tokenizer.chat_template
    assert (result.eval is None) == (eval_rows == 0)
    for mapped, whole in ((result.train, expected.train), (result.eval, expected.eval)):
        if mapped is not None and whole is not None:
            assert files_of(mapped) == {"arrays"} and len(mapped) == len(whole)
            batches = [packed.tensors(np.r_[np.arange(len(whole)), -1]) for packed in (mapped, whole)]
            assert all((batches[0][name] == batches[1][name]).all() for name in batches[1])
            assert mapped.source_rows(0) == whole.source_rows(0) and mapped.fill() == whole.fill()


@pytest.mark.slow
def test_hosts_that_share_the_cache_prepare_once_each_and_all_replicas_have_the_same(
    tmp_path: Path, cache: Path
) -> None:
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
        with on_disk(prepare_run(config)) as data:
            launch(functools.partial(training_functions.prepared_data, data=data), config, meeting=meeting)

    address = f"127.0.0.1:{free_port()}"
    assert together([Hosts(index, ("a", "b"), address) for index in (0, 1)], part, part) == [None, None]
    read = [(tmp_path / "run" / f"rank-{rank}.json").read_text() for rank in range(4)]
    notes: list[dict[str, Any]] = list(map(json.loads, read))
    assert all(note == notes[0] for note in notes) and notes[0]["mapped"] and len(notes[0]["eval"]) == 4
    assert left_over(cache) == []
