"""Prepares rows from memory, as `train` does with a data set passed to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.chat.chat_encoding import Encoder, Example
from tpu_kit.data.prepare import Prepared, prepare
from tpu_kit.data.rows.sources import save_rows


def prepare_rows(config: DataConfig, tokenizer: Any, rows: Any, **options: Any) -> Prepared:
    """Prepares `rows`, a data set or a list of dicts."""
    data = datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows
    source = save_rows(data, Path(datasets.config.HF_DATASETS_CACHE) / "given")
    return prepare(replace(config, source=source), tokenizer, **options)


def examples_of(encoder: Encoder, row: Any) -> list[Example]:
    """Returns the encoded documents of a row."""
    return [encoder.encode(document) for document in encoder.documents(encoder.conversation(row))]
