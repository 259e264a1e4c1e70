"""Rows of installed packages; the packages themselves are optional."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tpu_kit.data import sources

INSTALLED = all(importlib.util.find_spec(name) for name in ("lm_eval", "reasoning_gym"))


def test_missing_packages_name_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs the package lm-eval: pip install --no-deps "lm-eval==0.4.13" && pip'):
        sources.task_rows()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r'reasoning-gym .*pip install "reasoning-gym==0.1.25"'):
        sources.generated_rows(1)


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match=r'the splits "train" and "eval", .*not \'test\''):
        sources.load_rows("rationales", "test")


@pytest.mark.skipif(not INSTALLED, reason=sources.INSTALL)
def test_rows() -> None:
    tasks = sources.task_rows()
    assert len(tasks) == 371
    assert all(row["question"] and row["reasoning"] and row["answer"] for row in tasks)
    assert not any("the answer is" in row["reasoning"][-40:].lower() for row in tasks)
    generated = sources.generated_rows(50)
    assert generated == sources.generated_rows(50)
    assert not any("####" in row["reasoning"] for row in generated)
    assert not {row["question"] for row in generated} & {row["question"] for row in sources.generated_rows(50, 1)}


@pytest.mark.skipif(not INSTALLED, reason=sources.INSTALL)
def test_splits_share_no_question() -> None:
    train, held = sources.rationale_rows("train"), sources.rationale_rows("eval")
    assert not {row["question"] for row in train} & {row["question"] for row in held}
    assert len(train) + len(held) == 371 + sources.GENERATED_ROWS and len(held) > 150
    assert train == sources.rationale_rows("train")
    lettered = sum(row["answer"].startswith("(") for row in held[:64])
    assert 0 < lettered < 64  # a slice holds rows of both packages
