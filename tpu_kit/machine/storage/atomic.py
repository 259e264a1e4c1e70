"""Writes files and folders atomically: each is written to a temporary path next to it, then renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART, OLD = ".part", ".old"  # suffixes beside the place: of the new content, and of the content that it replaces
_MADE_MEANWHILE = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
_CANNOT_SYNC = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}  # folders of some FUSE file systems cannot be synced


@contextmanager
def replacing(path: Path, *, shared: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yields a path beside `path` for a new file or folder, and renames that to `path` when the block ends.

    If the block raises, `path` is unchanged. Of a symbolic link, what it names is made or replaced, on its own disk.

    Args:
        path: the file or folder to make or replace; its parent must exist once the block ends.
        shared: whether several processes may write there at the same time. Else the next writer removes what a killed
            process has left.
        durable: whether the result must survive a crash of the machine; the block must `sync` the files of a folder.
    """
    path = path.resolve() if path.is_symlink() else path
    hidden = f".{path.name}.{secrets.token_hex(4)}" if shared else f".{path.name}"
    part, old = path.with_name(hidden + PART), path.with_name(hidden + OLD)
    _remove(part)
    if old.exists():
        old.rename(part if path.exists() else path)  # to `path` after a kill between the two renames below
        _remove(part)
    try:
        yield part
        if durable:
            sync(part)
        while True:
            try:
                if part.is_dir() and path.exists():
                    path.rename(old)
                os.replace(part, path)
                break
            except OSError as error:
                # Another process has made the folder, or moved it away, between these lines.
                if not shared or error.errno not in _MADE_MEANWHILE or not part.exists():
                    raise
                _remove(old)
        if durable:
            sync(path.parent)
    finally:
        _remove(part)
    if old.exists():
        old.rename(part)  # so that a kill during its removal leaves no half folder named `old`
        _remove(part)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes a UTF-8 text file atomically."""
    with replacing(path, shared=shared) as part:
        part.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's names, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()


def error_number(error: Exception) -> int:
    """The errno of a system error; libraries written in Rust have it only in their text."""
    number = None if isinstance(error, OSError) else re.search(r"os error (\d+)", str(error))
    return int(number[1]) if number else getattr(error, "errno", None) or errno.EIO
