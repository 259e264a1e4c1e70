"""Preparation keeps no tokens in memory; they are read from the mapped files of the cache."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.support.mapped_files import files_of
from tests.support.tiny_tokenizer import tiny_tokenizer
from tpu_kit.config.loader import load_config
from tpu_kit.data.chat.new_tokens import occurrences
from tpu_kit.data.prepare import Prepared, on_disk, prepare


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def prepared(data: dict[str, Any]) -> Prepared:
    return prepare(load_config(None, {"data": data}).data, tiny_tokenizer())


def test_tokens_lie_in_the_mapped_files_of_the_cache(tmp_path: Path) -> None:
    """The files of each tokenising process, of each source of a mix, and of held-out rows."""
    for name in ("a", "b"):
        rows = [{"question": f"{name} {i}?", "answer": f"{i}"} for i in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"source": str(tmp_path / "a.jsonl")}, {"source": str(tmp_path / "b.jsonl"), "weight": 0.5}]
    made = prepared({"source": sources, "max_length": 64, "eval_rows": 5, "num_proc": 2})
    assert made.eval is not None
    files = files_of(made.train)
    assert len(files) == 4 and all(file.endswith(".arrow") for file in files) and files_of(made.eval) == files


def test_preparing_copies_no_tokens(tmp_path: Path) -> None:
    row = {"text": "".join(chr(97 + i * i % 7) for i in range(150_000))}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i}{row['text']}"}) + "\n" for i in range(4)))
    data = {"source": str(tmp_path / "rows.jsonl"), "max_length": 512, "eval_rows": 0, "too_long": "split"}
    expected = prepared(data)  # fills the cache
    tokens = expected.report.tokens
    tracemalloc.start()
    try:
        made = prepared(data)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        counts = occurrences(made.train.documents)
        with on_disk(made) as written:
            written.read()
        _, later = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    print(f"{most / tokens:.2f} and {(later - before) / tokens:.2f} bytes a token, of {tokens:,}")
    assert made.fingerprint == expected.fingerprint and counts.sum() == tokens
    assert max(most, later - before) < 3 * tokens, "the ids alone are 4 bytes a token"
