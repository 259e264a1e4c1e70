"""Reads and writes files below a local folder with the methods of `ObjectFolder`."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import ObjectFolder, is_url


class LocalFolder:
    """Accesses the files below a folder by names relative to it; the folder need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, name: str) -> Path:
        """Returns the path of a file."""
        return self.path / name

    def list(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """Maps the names of all files, or of the files below `folder`, to (bytes, ""): a disk computes no digests.

        Names are relative to this object's folder. Empty if the folder does not exist. Follows symbolic links. Raises
        OSError if a folder cannot be read.
        """
        found, seen = {}, set()
        for parent, folders, names in os.walk(self.path / folder, onerror=_unless_gone, followlinks=True):
            folders[:] = [name for name in folders if name != "lost+found"]  # a file system's own folder, unreadable
            if (real := os.path.realpath(parent)) in seen:  # a link to a folder above
                folders.clear()
                continue
            seen.add(real)
            for path in (Path(parent, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime, or a broken link
                    found[path.relative_to(self.path).as_posix()] = (path.stat().st_size, "")
        return found

    def names(self, folder: str = "") -> Sequence[str]:
        """Lists a folder without its subfolders' contents; folder names end in "/". Empty if it does not exist."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return [f"{path.name}/" if path.is_dir() else path.name for path in (self.path / folder).iterdir()]
        return []

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Returns a file's content, or the bytes `start` to `end` that exist; raises FileNotFoundError."""
        with self.place(name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else end - start)

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Returns the contents of small files by name, without files that do not exist."""
        contents = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                contents[name] = self.read(name)
        return contents

    def write(self, name: str, content: bytes) -> None:
        """Makes or replaces a file in an existing folder; it survives a crash of the machine."""
        with atomic.replacing(self.place(name), durable=True) as part:
            part.write_bytes(content)


_LFS = b"version https://git-lfs.github.com/spec/v1"


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins with these bytes is a Git LFS pointer in place of the real file."""
    return start.startswith(_LFS)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents if they do not exist.

    Raises OSError if it cannot. If `path` is a link to a folder that does not exist, the text names that folder.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not path.is_symlink():
            raise
        text = f"it is a link to {path.readlink()}, which does not exist: mount its disk, or make that folder"
        raise OSError(errno.ENOENT, text) from error


def _unless_gone(error: OSError) -> None:
    """Raises an error of `os.walk`, except for a folder that does not exist."""
    if not isinstance(error, FileNotFoundError):
        raise error


def open_folder(place: Path | str) -> LocalFolder | ObjectFolder:
    """Opens a path as `LocalFolder`, a URL as `ObjectFolder`, with its errors."""
    return ObjectFolder(str(place)) if is_url(place) else LocalFolder(Path(place))
