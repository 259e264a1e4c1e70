"""Writes files and folders atomically: to a temporary path in the same folder, which is then renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART, OLD = ".part", ".old"  # suffixes of the temporary paths of the new content and of the replaced content
_MADE_MEANWHILE = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
_CANNOT_SYNC = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}  # folders of some FUSE file systems cannot be synced


@contextmanager
def replacing(path: Path, *, shared: bool = False, durable: bool = False) -> Iterator[Path]:
    """Yields a temporary path where the block makes a file or folder, and renames it to `path` when the block ends.

    Nothing exists at the temporary path at first. If the block raises, `path` is unchanged, and the temporary path is
    removed. If `path` is a symbolic link, the link's target is made or replaced.

    Args:
        path: the file or folder to make or replace; its parent must exist when the block ends.
        shared: whether several processes may write to `path` at the same time. If not, the next writer removes the
            temporary path of a killed process.
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
                # Between these lines, another process has made the folder or moved it away.
                if not shared or error.errno not in _MADE_MEANWHILE or not part.exists():
                    raise
                _remove(old)
        if durable:
            sync(path.parent)
    finally:
        _remove(part)
    if old.exists():
        old.rename(part)  # a kill during the removal must not leave an incomplete folder named `old`
        _remove(part)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Writes a UTF-8 text file atomically, in an existing folder; `shared` as in `replacing`."""
    with replacing(path, shared=shared) as part:
        part.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flushes a file's content, or a folder's entries, to disk, so that they survive a crash of the machine.

    Raises OSError; does nothing for a folder on a file system that cannot sync folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Removes a file or a whole folder, if it exists; ignores errors in a folder."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif path.exists():
        path.unlink()


def error_number(error: Exception) -> int:
    """Returns the errno of a system error, by default EIO; errors of Rust libraries have it only in their text."""
    number = None if isinstance(error, OSError) else re.search(r"os error (\d+)", str(error))
    return int(number[1]) if number else getattr(error, "errno", None) or errno.EIO
