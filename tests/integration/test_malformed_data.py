"""Malformed and unusual data files as input of commands: none ends the process, shows a traceback or goes unnoticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import malformed_files
from tests.support.child_processes import run_python
from tests.support.malformed_files import CASES

# One for each kind of damage; the others are slow tests.
QUICK = (
    "null lines", "a null line after many", "very deep lists", "a deep row alone", "an array of nulls",
    "NUL bytes a.csv",
    "utf-16 a.jsonl", "gz cut off", "gz garbled", "xz garbled", "a key twice, later", "a key twice in an array",
    "half a surrogate pair", "texts that look like dates", "texts and numbers", "a pipe", "a folder of files",
    "a list as ShareGPT's role (chat)", "CSV with a shorter row, the rest not used", "CSV with text after a quote",
    "CSV of messages nested deep", "Parquet cut off", "Parquet of texts that are not UTF-8", "a null line, skipped",
    "a bad row in the second file", "most rows skipped", "a file that may not be read",
)  # fmt: skip


def wrong(folder: Path, names: list[str]) -> dict[str, str]:
    """Runs the cases; returns the wrong outcomes by name, with their descriptions."""
    done = run_python(
        ["-m", "tests.support.malformed_files", str(folder), *names],
        env={"PYTHONWARNINGS": "ignore"}, timeout=3000,
    )  # fmt: skip
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    found = {outcome["name"]: outcome["wrong"] for outcome in told}
    assert list(found) == names
    return {name: text for name, text in found.items() if text}


def test_files_that_once_crashed_or_passed_silently(tmp_path: Path) -> None:
    assert wrong(tmp_path, list(QUICK)) == {}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_every_malformed_file(tmp_path: Path) -> None:
    assert len(CASES) >= 170
    assert wrong(tmp_path, list(CASES)) == {}


# For the output of `train` and `plan`: no traceback, and an error's exit code.
TRAINED = ("null lines", "very deep lists", "an empty cell of CSV, skipped", "gz garbled", "CSV with a longer row")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_commands_refuse_a_malformed_file_without_a_traceback(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    source = malformed_files.make(case, tmp_path / "files")
    settings = [f"data.{key}={value}" for key, value in {"source": source, "eval_rows": 0, **case.settings}.items()]
    run = ["device_type=cpu", "num_replicas=1", "batch_size=1", "max_steps=1", "max_length=128"]
    for command in (["train", f"output_dir={tmp_path / 'run'}", *run], ["plan", "--chip", "v5e", "epochs=1"]):
        done = run_python(
            ["-m", "tpu_kit", *command, *settings],
            env={"HF_DATASETS_CACHE": str(tmp_path / "cache"), "PJRT_DEVICE": None}, cwd=tmp_path, expect=None,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        if command[0] == "plan" or case.refused is None:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 1 and case.name in done.stderr, done.stderr
        if case.refused is None and command[0] == "train":
            assert (
                "bad rows         1 skipped (data.on_bad_row): a.csv, line 2: column 'answer' is empty" in done.stdout
            )
