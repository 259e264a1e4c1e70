"""The notebooks, run by papermill in kernels of their own as a batch job runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat

from tpu_kit import manifest
from tpu_kit.testing import REPOSITORY, child_environment
from tpu_kit.tracking import read_metrics

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
SMALL: dict[str, Any] = {"device_type": "cpu", "max_steps": 8, "generate_rows": 2, "eval_rows": 4, "max_length": 128,
                         "logging_steps": 1, "save_steps": 100, "batch_size": 2, "warmup_steps": 1}  # fmt: skip


def start(folder: Path, **changes: Any) -> subprocess.Popen[str]:
    """Papermill on notebook 4, in a folder of its own, on its way."""
    given = [part for name, value in {**SMALL, **changes}.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", str(TRAIN), "out.ipynb", "--no-progress-bar", *given]
    environment = {**child_environment({"PJRT_DEVICE": None}), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def text_of(folder: Path) -> str:
    """All that the executed notebook shows as text."""
    cells = nbformat.read(folder / "out.ipynb", as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in outputs)


def kernel_of(run: subprocess.Popen[str]) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == run.pid
            if is_child and "ipykernel_launcher" in (path / "cmdline").read_text():
                return int(path.name)
        except (OSError, IndexError):
            continue
    raise AssertionError("papermill has no kernel")


def test_a_kernel_that_is_told_to_stop_saves_and_the_notebook_goes_on(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=5000)
    folder, deadline = tmp_path / "runs" / "notebook-4", time.monotonic() + 240
    while not [record for record in read_metrics(folder) if record["step"] >= 3]:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()[0]
        time.sleep(0.05)
    os.kill(kernel_of(run), signal.SIGTERM)
    out, _ = run.communicate(timeout=240)
    assert run.returncode != 0, out  # a batch job that was preempted has not done its work
    shown = text_of(tmp_path)
    stopped = re.search(r"preempted at step (\d+) of 5000 \(SIGTERM received\)", shown)
    assert stopped and "run this again: the same cell" in shown
    assert manifest.scan(folder / "checkpoints", verify=True)[0][-1].step == int(stopped[1])

    # It goes on from there; ends at once, since as many updates are made as are asked for now.
    again = start(tmp_path, max_steps=int(stopped[1]) + 2)
    out, _ = again.communicate(timeout=400)
    assert again.returncode == 0, out
    shown = text_of(tmp_path)
    assert f"from step {stopped[1]}," in shown and f"finished at step {int(stopped[1]) + 2}" in shown
