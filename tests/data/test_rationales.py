"""The rows of `make train-real`, out of packages that are optional."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.real_rows import GENERATED_ROWS, generated_rows, split_rows, task_rows

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("lm_eval", "reasoning_gym")), reason="needs their packages"
)


def test_rows() -> None:
    tasks = task_rows()
    assert len(tasks) == 371
    assert all(row["question"] and row["reasoning"] and row["answer"] for row in tasks)
    assert not any("the answer is" in row["reasoning"][-40:].lower() for row in tasks)
    generated = generated_rows(50)
    assert generated == generated_rows(50)
    assert not any("####" in row["reasoning"] for row in generated)


def test_splits_share_no_question() -> None:
    train, held = split_rows().values()
    assert not {row["question"] for row in train} & {row["question"] for row in held}
    assert len(train) + len(held) == 371 + GENERATED_ROWS and len(held) > 150
    lettered = sum(row["answer"].startswith("(") for row in held[:64])
    assert 0 < lettered < 64  # a slice holds rows of both packages
