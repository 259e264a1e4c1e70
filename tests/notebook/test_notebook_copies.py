"""`python -m tpu_kit notebooks --copy FOLDER`, from the command to the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.child_processes import REPOSITORY
from tpu_kit.cli import main

SHIPPED = {path.name: path.read_bytes() for path in (REPOSITORY / "notebooks").glob("*.ipynb")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_missing_notebooks_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "my notebooks"
    assert main(["notebooks", "--copy", str(folder)]) == 0
    assert contents(folder) == SHIPPED and len(SHIPPED) == 9
    told = capsys.readouterr().out
    assert f"Copied into {folder}: 1-install.ipynb, " in told
    assert "Already" not in told
    assert f"python -m tpu_kit notebooks '{folder}/4-train-cot-sft.ipynb'`" in told
    (folder / "3-plan.ipynb").unlink()
    (folder / "mine.txt").write_text("mine")
    assert main(["notebooks", "--copy", str(folder)]) == 0
    told = capsys.readouterr().out
    assert f"into {folder}: 3-plan.ipynb\n" in told
    assert "Already there, and equal: 1-install.ipynb, " in told
    assert contents(folder) == {**SHIPPED, "mine.txt": b"mine"}


def test_no_changed_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "2-verify.ipynb").write_text("{}")
    (tmp_path / "7-grpo.ipynb").write_bytes(SHIPPED["7-grpo.ipynb"] + b"\n")
    before = contents(tmp_path)
    assert main(["notebooks", "--copy", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    for name in before:
        assert (
            f"{tmp_path / name} is not the kit's notebook (edited, run, or of another version), so nothing was copied; "
            "rename it, or name another folder"
        ) in told
    assert contents(tmp_path) == before, "none of the others was written either"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--copy", "gs://bucket/folder"], "--copy gs://bucket/folder: notebooks are opened from a disk; name a local"),
        (["--copy", "a-file"], "--copy a-file: cannot be written to (File exists); name another folder"),
        (
            ["--copy", "new", "a.ipynb", "max_steps=2", "out=there"],
            "--copy runs no notebook: leave out a.ipynb, max_steps=2, out",
        ),
        ([], "no notebook is given: name files (FILE.ipynb), or --copy FOLDER for the kit's files"),
    ],
)
def test_what_cannot_be_copied_is_told(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert main(["notebooks", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]
