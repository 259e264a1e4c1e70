"""Checks the refusals of `make release` before it builds, and its check of a wheel. Building takes minutes."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import tpu_kit
from tests.support import release
from tests.support.child_processes import REPOSITORY


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A committed repository with the files that are read before the build: version 1.2.0, not yet dated."""
    root = tmp_path / "clone"
    (root / "tpu_kit").mkdir(parents=True)
    (root / "tpu_kit" / "__init__.py").write_text('"""A kit."""\n\n__version__ = "1.2.0"\n')
    (root / "README.md").write_text("[a](docs/a.md#b) [c](#c) [d](https://d)\n")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.0] - Unreleased\n")
    (root / ".gitignore").write_text("/dist/\n")
    (root / "dist").mkdir()
    (root / "dist" / "tpu_kit-1.1.0.tar.gz").touch()
    commit(root, "init", "--quiet")
    return root


def commit(root: Path, *first: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in ([*first] if first else None, ["add", "--all"], [*who, "commit", "--quiet", "--message", "a"]):
        if arguments:
            subprocess.run(["git", *arguments], cwd=root, check=True)


@pytest.mark.parametrize(
    ("tag", "change", "refusal"),
    [
        (
            "v1.2",
            None,
            "version       the tag is v1.2, and tpu_kit.__version__ is 1.2.0: delete the tag v1.2, then tag v1",
        ),
        ("v1.2.0", None, "version       CHANGELOG.md dates 1.2.0 Unreleased: write the day of the release"),
        (
            "",
            ("CHANGELOG.md", "## [1.1.0] - 2026-01-01"),
            "version       CHANGELOG.md has no section `## [1.2.0] - DATE`",
        ),
        ("", ("tpu_kit/__init__.py", "a = 1"), "commit        tpu_kit/__init__.py sets no __version__"),
    ],
)
def test_a_release_that_does_not_agree_is_refused(
    tag: str, change: tuple[str, str] | None, refusal: str, clone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if change:
        (clone / change[0]).write_text(change[1])
        commit(clone)
    assert release.main(clone, tag) == 1
    *passed, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"✗ {refusal}") and all(line.startswith("✓ commit") for line in passed)
    assert not (clone / "dist").exists(), "of an earlier version"


def test_what_is_not_committed_is_not_released(clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clone / "README.md").write_text("changed")
    (clone / "new.py").touch()
    assert release.main(clone, "") == 1
    assert capsys.readouterr().out == (
        "✗ commit        README.md, new.py differ from the commit: commit, stash or remove them\n"
    )


def test_the_version_of_the_kit_has_its_section_in_the_changelog() -> None:
    assert release.read_version(REPOSITORY) == tpu_kit.__version__
    assert release.check_version(REPOSITORY, "").startswith(f"{tpu_kit.__version__}, ")


def test_links_of_the_readme_lead_to_the_released_files(clone: Path, tmp_path: Path) -> None:
    release.export(clone, tmp_path / "source")
    base = "https://github.com/tpu-kit/tpu_kit/blob/v1.2.0"
    text = (tmp_path / "source" / "README.md").read_text()
    assert text == f"[a]({base}/docs/a.md#b) [c]({base}/README.md#c) [d](https://d)\n"


def test_the_first_commands_of_the_readme_can_be_run() -> None:
    first, second, *_ = release.readme_lines(REPOSITORY)
    assert first.startswith('pip install "tpu_kit[') and second == "python -m tpu_kit doctor"


@pytest.mark.parametrize(
    ("add", "drop", "refusal"),
    [
        ({"tests/test_cli.py": ""}, "", "tests/test_cli.py is not of the package"),
        ({}, "tpu_kit/assets/notebooks/3-plan.ipynb", "tpu_kit/assets/notebooks/3-plan.ipynb is missing"),
        (
            {"tpu_kit/assets/notebooks/3-plan.ipynb": '{"cells": [{"outputs": [1]}]}'},
            "tpu_kit/assets/notebooks/3-plan.ipynb",
            "tpu_kit/assets/notebooks/3-plan.ipynb has outputs",
        ),
        ({}, "", ""),
    ],
)
def test_what_a_wheel_lacks_or_has_too_much_is_told(
    add: dict[str, str], drop: str, refusal: str, wheel: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(tmp_path / wheel.name, "w") as new:
        for name in {*old.namelist()} - {drop}:
            new.writestr(name, old.read(name))
        for name, text in add.items():
            new.writestr(name, text)
    with tarfile.open(tmp_path / "tpu_kit.tar.gz", "w:gz") as sdist:
        sdist.add(REPOSITORY / "LICENSE", "tpu_kit/LICENSE")
    if refusal:
        with pytest.raises(release.Refused, match=f"^{refusal}$"):
            release.check_contents(REPOSITORY, tmp_path)
    else:
        assert "9 notebooks without outputs" in release.check_contents(REPOSITORY, tmp_path)


def test_a_command_that_fails_is_told_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    script.write_text("echo reading\necho 'ERROR: no space is left'\necho bye\nexit 3\n")
    with pytest.raises(release.Refused, match=r"^`\S+ \S+script.sh` ended with 3: ERROR: no space is left$"):
        release.run([shutil.which("bash"), script])
