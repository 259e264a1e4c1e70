"""Reads and writes the files below a folder of this machine, by the methods of `ObjectFolder`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import ObjectFolder, is_url


class LocalFolder:
    """The files below a folder, by names relative to it; the folder may be missing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, name: str) -> Path:
        """The path of a file."""
        return self.path / name

    def list(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """Lists all files, of one folder below if asked: name to (bytes, ""), as a disk computes no digests.

        Follows symbolic links. Raises OSError if a folder cannot be read.
        """
        found, seen = {}, set()
        for parent, folders, names in os.walk(self.path / folder, onerror=_unless_gone, followlinks=True):
            folders[:] = [name for name in folders if name != "lost+found"]  # of a disk: nobody may read it
            if (real := os.path.realpath(parent)) in seen:  # a link to a folder above
                folders.clear()
                continue
            seen.add(real)
            for path in (Path(parent, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime, or a link to nowhere
                    found[path.relative_to(self.path).as_posix()] = (path.stat().st_size, "")
        return found

    def names(self, folder: str = "") -> Sequence[str]:
        """Lists the files, and the folders with a slash at the end, of a folder alone; empty if it is missing."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [f"{path.name}/" if path.is_dir() else path.name for path in (self.path / folder).iterdir()]
        return []

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """A file's content, or a range of it, cut off where the file ends; raises FileNotFoundError."""
        with self.place(name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """The contents of small files, without those that do not exist."""
        contents = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                contents[name] = self.read(name)
        return contents

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces a file, in a folder that exists; it survives a crash of the machine."""
        with atomic.replacing(self.place(name), durable=True) as part:
            part.write_bytes(content)


_LFS = b"version https://git-lfs.github.com/spec/v1"


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins with these bytes is git-lfs's note of where the real file is."""
    return start.startswith(_LFS)


def make_folder(path: Path) -> None:
    """Makes a folder and those above it, unless it is there; raises OSError, for a link to nowhere with its target."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not path.is_symlink():
            raise
        text = f"it is a link to {path.readlink()}, which is not there: mount its disk, or make that folder"
        raise OSError(errno.ENOENT, text) from error


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def open_folder(place: Path | str) -> LocalFolder | ObjectFolder:
    """The files below a path or a URL."""
    return ObjectFolder(str(place)) if is_url(place) else LocalFolder(Path(place))
