"""Notebooks as a batch job: what is told, what is left behind, how a failure ends."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.child_processes import run_python
from tpu_kit.cli import main
from tpu_kit.hardware.machine import Check

SIGNED = "https://me:s3cret@example.org/rows.jsonl"


def write(path: Path, *cells: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.cells[0].metadata.tags = ["parameters"]
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


def test_a_failing_cell_ends_all_with_its_error_and_the_log(tmp_path: Path) -> None:
    checks = "cells.show_checks(Check(name, 'ok', 'good') for name in ('First', 'Second'));"
    said = "from tpu_kit.notebook import cells\nfrom tpu_kit.hardware.machine import Check\nprint('said', rows)\n"
    said += "print('and more')\n"
    cells = ("# Parameters: mine\nrows = 1", said + checks, "1 / (rows - 5)")
    write(tmp_path / "a.ipynb", *cells)
    write(tmp_path / "b.ipynb", "# Parameters: mine\nother = 1", "print('never')")
    done = run_python(
        ["-m", "tpu_kit", "notebooks", "a.ipynb", "b.ipynb", "out=done", "rows=5"], cwd=tmp_path, expect=1
    )
    lines = done.stdout.splitlines()
    *rows, took = [lines.pop(4) for _ in range(3)]
    assert took.strip().endswith(" s")
    assert rows == [f"{' ' * 10}{Check(name, 'ok', 'good')}" for name in ("First", "Second")]
    assert lines[0] == "[1/2] a.ipynb" and "b.ipynb" not in done.stdout
    assert [line.split()[0] for line in lines[1:5]] == ["1/4", "2/4", "3/4", "4/4"]  # papermill's cell is one of them
    tail = "\n".join(lines[5:])
    assert "a.ipynb failed in cell [4]:\n    1 / (rows - 5)\nZeroDivisionError: division by zero" in tail
    assert "The end of done/a.log:" in tail and "said 5\nand more" in tail
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == ["a.html", "a.ipynb", "a.log"]
    assert tail.count("✓ First") == 1, "of a table that grows, each row is logged once"
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
        (["out=there"], "required: FILE.ipynb; write python -m tpu_kit notebooks [-h] FILE.ipynb [FILE.ipynb ...]"),
        (["a.ipynb", "rows=[1"], "rows: '[1' cannot be read; quote it"),
        (["a.ipynb", "out=a.ipynb/there"], "cannot be made"),
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
