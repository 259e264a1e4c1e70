"""The training notebook as a template: a copy in an empty folder, the kit from a wheel, and the user's rows."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.child_processes import REPOSITORY, child_environment
from tpu_kit.config.loader import ModelConfig
from tpu_kit.model.weights.source import load_tokenizer

TRAIN = REPOSITORY / "notebooks" / "4-train-cot-sft.ipynb"
ROWS = [
    {"question": f"What is {a} plus {b}?", "reasoning": f"{a} + {b} = {a + b}.", "answer": str(a + b)}
    for a in range(2, 12)
    for b in range(2, 12)
]


@pytest.fixture
def desk(tmp_path: Path, wheel: Path) -> Path:
    """A folder outside the repository with a copy of the notebook and the user's rows; the kit is installed too."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk" / "mine.ipynb").write_bytes(TRAIN.read_bytes())
    (tmp_path / "desk" / "my_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path / "desk"


def environment(desk: Path, **changes: str | None) -> dict[str, str | None]:
    return {"PYTHONPATH": str(desk.parent / "installed"), "OMP_NUM_THREADS": "1", **changes}


def run_notebook(desk: Path, environment: dict[str, str | None], **parameters: Any) -> tuple[int, str, list[Any]]:
    """Runs the copy like a batch job; returns the exit status, papermill's output, and the cells."""
    given = [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    command = [sys.executable, "-m", "papermill", "mine.ipynb", "out.ipynb", "--no-progress-bar", *given]
    done = subprocess.run(
        command, cwd=desk, env=child_environment(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=500,
    )  # fmt: skip
    return done.returncode, done.stdout, nbformat.read(desk / "out.ipynb", as_version=4).cells


def assignments(section: str) -> dict[str, str]:
    """Returns the assignments that a section of notebooks/README.md makes in the parameters cell, by name."""
    text = (REPOSITORY / "notebooks" / "README.md").read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"`(\w+) = ([^`]+)`", text))


def set_parameters(notebook: Path, values: dict[str, str]) -> None:
    """Writes lines into the parameters cell, as a user does."""
    found = nbformat.read(notebook, as_version=4)
    (cell,) = [cell for cell in found.cells if "parameters" in cell.metadata.get("tags", [])]
    for name, value in values.items():
        line = f"{name} = {value}"
        cell.source, count = re.subn(rf"^{name} = .*$", line.replace("\\", ""), cell.source, flags=re.MULTILINE)
        cell.source += "" if count else f"\n{line}"
    nbformat.write(found, notebook)


def keep_in_cache(home: Path, name: str) -> None:
    """Puts a tiny model of that name into the hub client's cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.save_pretrained(folder / "snapshots" / ("0" * 40))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 1024}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder / "snapshots" / ("0" * 40))


def test_the_five_lines_of_the_readme_train_on_rows_of_ones_own(desk: Path) -> None:
    given = assignments("Copy a notebook as a template")
    assert {"config_file", "name", "source", "learning_rate"} == set(given)
    (desk / "my_rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:60]))
    set_parameters(desk / "mine.ipynb", {**given, "run_name": '"my-run"'})
    keep_in_cache(desk.parent / "hf", ast.literal_eval(given["name"]))
    where = environment(desk, PJRT_DEVICE=None, HF_HOME=str(desk.parent / "hf"), PYTHONDONTWRITEBYTECODE=None)
    status, printed, cells = run_notebook(desk, where)
    assert status == 0, printed
    assert (desk / "runs" / "my-run" / "adapter" / "adapter_model.safetensors").is_file()
    assert any((desk.parent / "installed").rglob("*.pyc")), "the kit of the wheel ran"
    assert {path.name for path in desk.iterdir()} == {"mine.ipynb", "my_rows.jsonl", "out.ipynb", "runs"}
    sources = [cell.source for cell in cells if cell.cell_type == "code"]
    data = sources.index("data = cells.show_data(config)")
    assert data < next(number for number, source in enumerate(sources) if "train(config)" in source)
    told = str([cell for cell in cells if cell.cell_type == "code"][data].outputs)
    for text in (
        "my_rows.jsonl: cot (question=question, reasoning=reasoning, answer=answer)", "60 read, 54 used",
        "with reasoning   54 of 54 replies", "held out         6, a tenth of the 60 different questions",
        "generate_rows=64: there are only 6 held-out rows",
        "plan             optim.batch_size lowered from ", "; 80 updates; ", "time             at least ",
    ):  # fmt: skip
        assert text in told, (text, told)
    shown = "\n".join(str(output) for cell in cells if cell.cell_type == "code" for output in cell.outputs)
    assert "<mark" in shown and " plus " in shown and "image/png" in shown
