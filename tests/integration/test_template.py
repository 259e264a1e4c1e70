"""The training notebook as a template: a copy in an empty folder, the kit as a wheel, and one's own rows beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.child_processes import REPOSITORY, child_environment, run_python

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
ROWS = [
    {"question": f"What is {a} plus {b}?", "reasoning": f"{a} + {b} = {a + b}.", "answer": str(a + b)}
    for a in range(2, 12)
    for b in range(2, 12)
]
MINE = {
    "source": "my_rows.jsonl", "format": "auto", "max_steps": 4, "warmup_steps": 1, "batch_size": 2, "max_length": 64,
    "eval_rows": 4, "eval_steps": 4, "logging_steps": 2, "save_steps": 4, "generate_rows": 0,
}  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, wheel: Path) -> Path:
    """A folder outside the repository with a copy of the notebook and rows of one's own, and the kit installed."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "mine.ipynb").write_bytes(TRAIN.read_bytes())
    (tmp_path / "desk" / "my_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "desk"


def environment(desk: Path, **changes: str | None) -> dict[str, str | None]:
    return {"PYTHONPATH": str(desk.parent / "installed"), "OMP_NUM_THREADS": "1", **changes}


def run_notebook(desk: Path, environment: dict[str, str | None], **parameters: Any) -> tuple[int, str, list[Any]]:
    """Runs the copy as a batch job does; returns the exit status, what papermill wrote, and the cells."""
    given = [part for name, value in {**MINE, **parameters}.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", "mine.ipynb", "out.ipynb", "--no-progress-bar", *given]
    done = subprocess.run(
        command, cwd=desk, env=child_environment(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout, nbformat.read(desk / "out.ipynb", as_version=4).cells


def test_a_copy_of_the_notebook_trains_on_rows_of_ones_own(desk: Path) -> None:
    where = environment(desk, PJRT_DEVICE=None)
    found = run_python("import tpu_kit; print(tpu_kit.__file__)", cwd=desk, env=where).stdout
    assert Path(found.strip()).is_relative_to(desk.parent / "installed")
    status, printed, cells = run_notebook(desk, where, device_type="cpu")
    assert status == 0, printed
    run = desk / "runs" / "notebook-4"
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert {path.name for path in desk.iterdir()} == {"mine.ipynb", "my_rows.jsonl", "out.ipynb", "runs"}
    shown = "\n".join(str(output) for cell in cells if cell.cell_type == "code" for output in cell.outputs)
    for text in ("my_rows.jsonl: cot (question=question", "100 read, 96 used", "<mark", " plus ", "image/png"):
        assert text in shown, text
