"""Failures of a terminal do not end a run."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child_processes import PYTHONPATH, child_environment
from tpu_kit.distributed.output import SafeStream, safe_output


def test_what_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("ascii", r"zw\xf6lf \u2713"), ("latin-1", r"zw\u00f6lf \u2713"), ("utf-8", "zwölf ✓")):
        held = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(held, encoding=encoding))
        with safe_output(), safe_output():
            print("zwölf ✓", flush=True)
        assert held.getvalue().decode(encoding).strip() == shown.replace(r"\u00f6", "ö")
        assert isinstance(sys.stdout, io.TextIOWrapper)


def test_text_for_a_reader_that_has_gone_is_dropped() -> None:
    reader, writer = os.pipe()
    stream = SafeStream(os.fdopen(writer, "w"))
    os.close(reader)
    for _ in range(3):
        assert stream.write("text") == 4
        stream.flush()
    stream.close()
    SafeStream(stream).write("closed")


def test_a_command_whose_reader_goes_away_ends_well() -> None:
    command = [sys.executable, "-m", "tpu_kit", "train", "--help"]
    environment = child_environment({"PYTHONIOENCODING": "ascii"}) | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


def test_a_run_on_a_terminal_that_has_gone_saves_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpu_kit.config.loader import load_config
    from tpu_kit.recipes import sft

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None:
            self.write("")

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, Gone())
    values = {"device_type": "cpu", "max_steps": 1, "warmup_steps": 0, "eval_steps": None, "eval_rows": 2,
              "generate_rows": 1, "generate_tokens": 2, "output_dir": str(tmp_path)}  # fmt: skip
    assert sft.train(load_config("embedded-cot", values)).status == "finished"
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file() and (tmp_path / "eval.json").is_file()
