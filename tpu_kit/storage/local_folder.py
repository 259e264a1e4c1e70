"""Reads and writes the files below a folder of this machine, by the methods of `ObjectFolder`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from tpu_kit.storage import atomic


class LocalFolder:
    """The files below a folder, by names relative to it; the folder may be missing."""

    digest_kind = "sha256"

    def __init__(self, path: Path) -> None:
        self.path = path

    def place(self, name: str) -> Path:
        """The path of a file."""
        return self.path / name

    def list(self, folder: str = "") -> dict[str, tuple[int, str]]:
        """Lists all files, of one folder below if asked: name to (bytes, ""), as a disk computes no digests."""
        found = {}
        for path in (Path(parent, name) for parent, _, names in os.walk(self.path / folder) for name in names):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                found[path.relative_to(self.path).as_posix()] = (path.stat().st_size, "")
        return found

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
