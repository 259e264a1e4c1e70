"""Notebooks as a batch job: output, files, and failures."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.child_processes import run_python
from tpu_kit.cli import main
from tpu_kit.machine.checks import Check

SIGNED = "https://me:s3cret@example.org/rows.jsonl"


def write(path: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.cells[0].metadata.tags = ["parameters"]
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


def test_a_failing_cell_ends_all_with_its_error(tmp_path: Path) -> None:
    checks = "cells.show_checks(Check(name, 'ok', 'good') for name in ('First', 'Second'));"
    said = "from tpu_kit.notebook import cells\nfrom tpu_kit.machine.checks import Check\nprint('said', rows)\n"
    said += "print('and more')\n"
    cells = ("# Parameters: mine\nrows = 1", said + checks, "1 / (rows - 5)")
    write(tmp_path / "a.ipynb", *cells)
    write(tmp_path / "b.ipynb", "# Parameters: mine\nother = 1", "print('never')")
    done = run_python(
        ["-m", "tpu_kit", "notebooks", "a.ipynb", "b.ipynb", "out=done", "rows=5"], cwd=tmp_path, expect=1
    )
    shown, _, failure = done.stdout.partition("a.ipynb failed:")
    # Papermill's parameters are the second cell; of a table that grows, each row is printed once.
    rows = [str(Check(name, "ok", "good")) for name in ("First", "Second")]
    first_lines = ["rows = 1", "rows = 5", "from tpu_kit.notebook import cells", "1 / (rows - 5)"]
    lines = [f"     {number}/4 {line}" for number, line in enumerate(first_lines, 1)]
    expected = ["[1/2] a.ipynb", *lines[:3], "said 5", "and more", "looking ...", *rows, lines[3]]
    assert shown.splitlines()[:-1] == expected
    assert "1 / (rows - 5)" in failure and "ZeroDivisionError: division by zero" in failure
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == ["a.html", "a.ipynb"]
    assert "ZeroDivisionError" in (tmp_path / "done" / "a.html").read_text()
    assert "said 5\\n" in (tmp_path / "done" / "a.ipynb").read_text()


@pytest.mark.parametrize(("name", "value"), [("hf_token", "s3cret"), ("rows", f"hf_{'a1' * 17}"), ("source", SIGNED)])
def test_a_secret_among_the_parameters_reaches_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    write(tmp_path / "a.ipynb", "# Parameters: mine\nrows = ''\nhf_token = ''\nsource = ''", "1")
    monkeypatch.chdir(tmp_path)
    assert main(["notebooks", "a.ipynb", "out=done", f"{name}={value}"]) == 2
    said = capsys.readouterr()
    assert f"{name}: secrets do not belong in" in said.err and value not in said.out + said.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and value in path.read_text()]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["a.ipynb", "row=3"], "row: this notebook has no such parameter; did you mean rows?"),
        (["missing.ipynb"], "missing.ipynb: no such notebook"),
        (["a.ipynb", "b/a.ipynb"], "a.ipynb: 2 notebooks have this name, and runs/notebooks has room for one; rename"),
        (["out=there"], "no notebook is given: name files (FILE.ipynb), or --copy FOLDER for the kit's files"),
        (["a.ipynb", "rows=[1"], "rows: '[1', line 1: not valid YAML: expected ',' or ']', but got '<stream end>'; co"),
        (["a.ipynb", "out=a.ipynb/there"], "cannot be made"),
        (["a.ipynb", "out=."], "out=.: the executed notebook would replace a.ipynb; name another folder"),
    ],
)
def test_bad_arguments(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    problem: str,
) -> None:
    write(tmp_path / "a.ipynb", "# Parameters: mine\nrows = 1")
    monkeypatch.chdir(tmp_path)
    assert main(["notebooks", *arguments]) == 2
    assert problem in capsys.readouterr().err
