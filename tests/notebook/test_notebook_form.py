"""The form of the shipped notebooks, as readers, Colab, papermill and git expect it. Nothing runs."""

from __future__ import annotations

import ast
import json
import re
import statistics
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.child_processes import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
NAMES = ["1-install", "2-verify", "3-plan", "4-train-cot-sft", "5-inference", "6-distill", "7-grpo", "8-preference",
         "9-images"]  # fmt: skip
COLAB = "https://colab.research.google.com/github/tpu-kit/tpu_kit/blob/main/notebooks"
KAGGLE = "https://kaggle.com/kernels/welcome?src=https://github.com/tpu-kit/tpu_kit/blob/main/notebooks"
# Forms of keys; 40 hexadecimal digits are a W&B key.
SECRET = re.compile(
    r"\b(hf_\w{20,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AIza[\w-]{30,}|AKIA[A-Z0-9]{16}|[0-9a-f]{40})\b"
)

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path, kind: str = "code") -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def test_there_are_nine() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


def unclean(raw: dict[str, Any]) -> list[str]:
    """Traces of the machine on which a notebook ran."""
    found = [name for name in raw["metadata"] if name not in ("kernelspec", "language_info")]
    if raw["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("kernelspec")
    for cell in raw["cells"]:
        found += ["outputs"] if cell.get("outputs") else []
        found += ["execution_count"] if cell.get("execution_count") is not None else []
        found += [name for name in cell["metadata"] if name != "tags"]
        found += [tag for tag in cell["metadata"].get("tags", []) if tag != "parameters"]
    return found + (["secret"] if SECRET.search(json.dumps(raw)) else [])


@each_notebook
def test_notebook_is_clean(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    raw = json.loads(path.read_text())
    assert unclean(raw) == []
    assert not [cell for cell in raw["cells"] if "attachments" in cell]


@pytest.mark.parametrize(
    ("cell", "metadata", "expected"),
    [
        ({"outputs": [{"output_type": "stream", "name": "stdout", "text": "1"}]}, {}, "outputs"),
        ({"execution_count": 3}, {}, "execution_count"),
        ({"metadata": {"papermill": {"duration": 1}}}, {}, "papermill"),
        ({"metadata": {"tags": ["injected-parameters"]}}, {}, "injected-parameters"),
        ({}, {"papermill": {"parameters": {}}}, "papermill"),
        ({}, {"widgets": {}}, "widgets"),
        ({"source": "token = 'hf_abcdefghijklmnopqrstuvwxyz'"}, {}, "secret"),
        ({"source": "key = '0123456789abcdef0123456789abcdef01234567'"}, {}, "secret"),
    ],
)
def test_what_is_unclean(cell: dict[str, Any], metadata: dict[str, Any], expected: str) -> None:
    clean = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": "a = 1"}
    raw = {"metadata": {"kernelspec": {"name": "python3"}, **metadata}, "cells": [{**clean, **cell}]}
    assert unclean(raw) == [expected]


@each_notebook
def test_cells_call_and_are_short(path: Path) -> None:
    # A parameter takes two lines; the next test looks at that cell.
    sources = [cell.source for cell in cells_of(path) if "parameters" not in cell.metadata.get("tags", [])]
    for source in sources:
        # A line for the shell or IPython is not Python.
        tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE))
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(tree) if isinstance(node, definitions)], source
        assert len(source.splitlines()) <= 15, source
    assert statistics.median(len(source.splitlines()) for source in sources) <= 5


@each_notebook
def test_one_parameters_cell_of_commented_literals(path: Path) -> None:
    cells = cells_of(path)
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert cells[0] is tagged[0], "they come first"
    first_line, *lines = tagged[0].source.splitlines()
    assert first_line.startswith("# Parameters: ")
    for statement in ast.parse(tagged[0].source).body:
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)  # papermill leaves values derived from another parameter stale
    # One comment per parameter, in the form that Colab shows beside the field.
    assert all(line.startswith("# @markdown ") for line in lines[::2]), lines[::2]
    assert all(re.search(r"^\w+ = .*# @param ", line) for line in lines[1::2]), lines[1::2]
    assert len(lines) % 2 == 0


def test_each_installs_the_kit_by_the_same_cell() -> None:
    """Colab and Kaggle give each notebook a machine of its own. Notebook 1 shows the rest of the installation."""
    first, *others = [cells_of(path)[1].source for path in NOTEBOOKS]
    assert len(set(others)) == 1 and others[0].startswith("import glob\n")
    *shared, last = others[0].splitlines()
    assert last == 'importlib.import_module("tpu_kit.notebook.install").ensure(kit_source)'
    assert first.splitlines() == shared and shared[-1].startswith("assert ")
    for path in NOTEBOOKS:
        assert 'kit_source = "git"' in cells_of(path)[0].source


@each_notebook
def test_form_of_a_parameter_fits_its_value(path: Path) -> None:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "raw": object}
    source = cells_of(path)[0].source
    for name, value, form in re.findall(r"^(\w+) = (.*?)\s+# @param (.*)$", source, flags=re.MULTILINE):
        if form.startswith("["):
            choices, _ = json.JSONDecoder().raw_decode(form)
            assert ast.literal_eval(value) in choices, name
        else:
            (kind,) = re.fullmatch(r'{type:"(\w+)"}', form).groups()
            assert isinstance(ast.literal_eval(value), kinds[kind]), name


@each_notebook
def test_papermill_reads_the_parameters(path: Path) -> None:
    from papermill.inspection import inspect_notebook

    source = cells_of(path)[0].source
    assert set(inspect_notebook(path)) == {node.targets[0].id for node in ast.parse(source).body}


@each_notebook
def test_parameters_are_checked_before_anything_trains(path: Path) -> None:
    code = "\n".join(cell.source for cell in cells_of(path))
    if trains := re.search(r"\b(train|distill|grpo)\(", code):
        assert 0 < code.find("globals()") < trains.start(), "a wrong parameter is told after hours"


@each_notebook
def test_first_cell_says_what_to_expect(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert f"({COLAB}/{path.name})" in first.source and f"({KAGGLE}/{path.name})" in first.source
    assert "**At the end you have**" in first.source
    for row in ("Hardware", "Time", "Cost", "Before", "After"):
        assert re.search(rf"^\| {row} \| \S", first.source, flags=re.MULTILINE), row
    assert re.search(r"minute|second", first.source)


@each_notebook
def test_links_lead_to_the_notebooks_before_and_after(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    targets = re.findall(r"\]\(([^)#:]+\.(?:ipynb|md))\)", text)
    for target in targets:
        assert (path.parent / target).exists() or Path(target).stem in NAMES, target
    beside = [NAMES[i] for i in (NAMES.index(path.stem) - 1, NAMES.index(path.stem) + 1) if 0 <= i < len(NAMES)]
    assert {f"{name}.ipynb" for name in beside} <= set(targets)


@each_notebook
def test_says_what_to_do_when_it_goes_otherwise(path: Path) -> None:
    text = "\n".join(cell.source for cell in cells_of(path, "markdown"))
    assert "you should see" in text.lower()
    assert "three likely causes" in text
    checks = ("assert ", "cells.check_run(")
    assert any(check in cell.source for cell in cells_of(path) for check in checks), (
        "it must fail where it has not worked"
    )
