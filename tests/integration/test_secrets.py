"""No byte that a command prints or writes contains a secret of the environment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.support.child_processes import REPOSITORY, run_python
from tpu_kit import cli
from tpu_kit.config.fields import hide_secrets

PLANTED = {
    "HF_TOKEN": "hf_" + "Zq3Yw8Rt5Up2Lk9Jh4Gf7Ds1Ma6Nb0\n",
    "WANDB_API_KEY": "0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c",
    "KAGGLE_KEY": "b5e1d0c7f2a94836b1c0d9e8f7a65432",
    "GOOGLE_API_KEY": "AIza" + "SyZz9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzKEY+q",
    "AWS_ACCESS_KEY_ID": "AKIAQ7ZX3M5N8P2R4T6V",
    "OPENAI_API_KEY": "sk-proj-4tR7yU2iO9pA6sD3fG8hJ5kL",
    "GITHUB_TOKEN": "ghp_Aa1Bb2Cc3Dd4Ee5Ff6Gg7Hh8Ii9Jj0Kk1Ll2",
    "MY_DB_PASSWORD": 'tr"icky\\pass word',
    "HTTPS_PROXY": "http://proxyuser:pr0xy%21pass@127.0.0.1:9",
    "DATABASE_URL": "postgres://dbuser:dbS3cretpw@db.example/x",
    "SERVICE_CREDENTIALS": '{"private_key": "-----BEGIN-----\\nMIIEvQIBADANBgkq"}',
}
PARTS = [
    *(value.strip() for name, value in PLANTED.items() if "://" not in value),
    "pr0xy%21pass", "pr0xy!pass", "dbS3cretpw", "MIIEvQIBADANBgkq", 'tr\\"icky',
]  # fmt: skip
LEAKING = """
import os
import requests
def reward(completions, **columns):
    raise RuntimeError(" | ".join(map(str, os.environ.values())))
def loss(model, batch):
    print(dict(os.environ))
    raise RuntimeError(" | ".join(map(repr, os.environ.values())))
"""
TRAINS = ["data.source=synthetic", "max_steps=2", "max_length=128", "batch_size=2", "eval_rows=0", "generate_rows=0"]


def leaks(text: str) -> list[str]:
    return [part for part in PARTS if part in text]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    yield


@pytest.mark.parametrize("form", [str, repr, json.dumps, quote, lambda one: repr(f"b{one!r}"), str.encode])
def test_no_form_of_a_secret_stays_in_a_text(planted: None, form: object) -> None:
    text = " and ".join(str(form(value)) for value in PLANTED.values())  # type: ignore[operator]
    assert leaks(text) and not leaks(hide_secrets(text)), hide_secrets(text)


def test_a_path_and_a_short_value_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("TOY_KEY", "on")
    assert hide_secrets(f"{tmp_path} is on") == f"{tmp_path} is on"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["doctor", "embedded-cot", "model.name=someone/model"], None),
        (["plan", "embedded-cot", "data.source=https://me:dbS3cretpw@host/x.jsonl"], 2),
        (["train", "model.name={AWS_SECRET_ACCESS_KEY}"], None),
    ],
)
def test_a_command_prints_none(
    planted: None, arguments: list[str], status: int | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = [text.format(**PLANTED) for text in arguments]
    found = cli.main([*given, f"output_dir={tmp_path}"])
    said = capsys.readouterr()
    assert status in (None, found) and said.out + said.err
    assert not leaks(said.out + said.err)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and leaks(path.read_text(errors="replace"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["doctor", "embedded-cot"], None),
        (["doctor", "--json", "embedded-cot", "tracking.wandb=online"], None),
        (["plan", "llama-8b-v6e"], 0),
        (["train", *TRAINS, "tracking.wandb=offline", "device_type=cpu"], 0),
        (["train", *TRAINS, "optim.objective=leaking:loss", "device_type=cpu"], None),
        (["train", *TRAINS, "optim.objective=leaking:loss", "device_type=xla-cpu"], None),
        (["grpo", *TRAINS, "rl.reward_funcs=[leaking:reward]", "device_type=cpu"], None),
        (["generate", "prompts=missing.txt", "model.name=someone/model"], None),
        (["evaluate", "eval_rows=4", "device_type=cpu"], None),
        (["verify", "report=report.json", "device_type=cpu"], None),
        (["train", *TRAINS, "data.source=someone/rows"], 1),
        (["notebooks", str(REPOSITORY / "notebooks" / "1-install.ipynb")], None),
        (["notebooks", "leaks.ipynb"], 1),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else None,
)
def test_no_byte_that_a_command_prints_or_writes_has_one(
    arguments: list[str], status: int | None, tmp_path: Path
) -> None:
    (tmp_path / "leaking.py").write_text(LEAKING)
    cells = ["import os, sys", "print(dict(os.environ))", "os.environ", "raise ValueError(dict(os.environ))"]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [
        {"cell_type": "code", "id": str(place), "source": cell, "metadata": {}, "outputs": [], "execution_count": None}
        for place, cell in enumerate(cells)]}  # fmt: skip
    (tmp_path / "leaks.ipynb").write_text(json.dumps(notebook))
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    environment = {**PLANTED, "PYTHONPATH": path, "HF_HOME": str(tmp_path / "hf")}
    done = run_python(["-m", "tpu_kit", *arguments], env=environment, cwd=tmp_path, timeout=900, expect=status)
    assert done.stdout + done.stderr
    assert not leaks(done.stdout + done.stderr)
    written = [file for file in tmp_path.rglob("*") if file.is_file() and file.name not in ("leaking.py",)]
    wrong = {
        str(file.relative_to(tmp_path)): found for file in written if (found := leaks(file.read_text(errors="replace")))
    }
    assert not wrong
