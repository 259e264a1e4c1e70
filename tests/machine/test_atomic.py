"""Files and folders that are written under another name and then renamed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.child_processes import run_python
from tpu_kit.machine.storage import atomic


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_file_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    atomic.write_text(tmp_path / "a.json", "one")
    atomic.write_text(tmp_path / "a.json", "zwölf", shared=True)
    with pytest.raises(ZeroDivisionError), atomic.replacing(tmp_path / "a.json") as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "zwölf"
    assert names(tmp_path) == ["a.json"]


def test_processes_that_share_a_place_do_not_share_what_is_not_complete(tmp_path: Path) -> None:
    """Nor do processes of two hosts, which may have equal numbers."""
    with atomic.replacing(tmp_path / "a", shared=True) as first:
        first.write_text("one")
        with atomic.replacing(tmp_path / "a", shared=True) as second:
            second.write_text("two")
        assert (tmp_path / "a").read_text() == "two"
    assert (tmp_path / "a").read_text() == "one" and names(tmp_path) == ["a"]


def test_a_folder_that_two_hosts_make_at_once_is_made_by_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the folder, or moves it away to replace it, just before this process renames its own."""

    def write(name: str) -> None:
        with atomic.replacing(tmp_path / "x", shared=True) as part:
            part.mkdir()
            (part / name).touch()

    plain, rename = os.replace, Path.rename

    def made_before(*paths: Path) -> None:
        monkeypatch.undo()
        write("theirs")
        plain(*paths)

    def moved_before(path: Path, target: Path) -> None:
        monkeypatch.undo()
        path.rename(tmp_path / "moved")
        rename(path, target)

    for module, name, late in ((os, "replace", made_before), (Path, "rename", moved_before)):
        monkeypatch.setattr(module, name, late)
        write("ours")
        assert names(tmp_path / "x") == ["ours"]
    assert names(tmp_path) == ["moved", "moved/ours", "x", "x/ours"]


def write_folder(place: Path, name: str, fail: bool = False) -> None:
    with atomic.replacing(place, durable=True) as part:
        part.mkdir()
        (part / name).touch()
        if fail:
            raise ZeroDivisionError


def test_a_folder_is_replaced_whole_or_stays(tmp_path: Path) -> None:
    place = tmp_path / "x"
    write_folder(place, "one")
    write_folder(place, "two")
    with pytest.raises(ZeroDivisionError):
        write_folder(place, "three", fail=True)
    assert names(tmp_path) == ["x", "x/two"]


@pytest.mark.parametrize("exists", [True, False])
def test_what_a_link_names_is_replaced_and_the_link_stays(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "disk").mkdir()
    for name, make in (("folder", write_folder), ("file", lambda path, _: atomic.write_text(path, "new"))):
        target = tmp_path / "disk" / name
        if exists:
            make(target, "old")
        (tmp_path / name).symlink_to(target)
        make(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink() and (tmp_path / name).resolve() == target
    assert names(tmp_path / "disk") == ["file", "folder", "folder/new"]
    assert (tmp_path / "disk/file").read_text() == "new" and names(tmp_path) == [
        "disk", "disk/file", "disk/folder", "disk/folder/new", "file", "folder"
    ]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_folder_outlives_a_kill_at_each_rename(tmp_path: Path, number: int) -> None:
    """Killed before, between and after the two renames: the old or the new folder is there, or is restored."""
    write_folder(tmp_path / "x", "one")
    code = f"""
import os, signal
from pathlib import Path
from tests.machine.test_atomic import write_folder
calls = []
def killed(rename):
    def call(*arguments):
        calls.append(arguments)
        if len(calls) == {number}:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(*arguments)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return call
os.rename, os.replace = killed(os.rename), killed(os.replace)
write_folder(Path({str(tmp_path / "x")!r}), "two")
"""
    run_python(["-c", code], expect=-signal.SIGKILL)
    whole = {1: ["x/one"], 2: [".x.old/one"], 3: ["x/two"]}[number]
    assert [name for name in names(tmp_path) if name.endswith(("/one", "/two")) and ".part" not in name][-1:] == whole
    with pytest.raises(ZeroDivisionError):
        write_folder(tmp_path / "x", "three", fail=True)
    assert names(tmp_path) == ["x", "x/two" if number == 3 else "x/one"]
    write_folder(tmp_path / "x", "four")
    assert names(tmp_path) == ["x", "x/four"], sys.version
