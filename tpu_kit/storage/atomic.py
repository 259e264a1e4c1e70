"""Files and folders that are there whole or not at all: each is written beside its place and renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART, OLD = ".part", ".old"  # how the names end beside the place: what is being written, and what it replaces
_CANNOT_SYNC = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}  # folders of some FUSE file systems, which need not


@contextmanager
def replacing(path: Path, *, shared: bool = False, durable: bool = False) -> Iterator[Path]:
    """Gives a path beside `path` to write a file or a folder to, and moves what was written there to `path`.

    Where the block raises, `path` stays as it was. What a killed process has left is removed by the next one that
    writes there, or stays hidden where the place is shared.

    Args:
        path: the file or folder to make or replace; its parent must exist once the block ends.
        shared: several processes may write there at the same time, so each writes beside it under its own name.
        durable: what was written outlives a crash of the machine, too; files in a folder are for the block to `sync`.
    """
    hidden = f".{path.name}.{os.getpid()}" if shared else f".{path.name}"
    part, old = path.with_name(hidden + PART), path.with_name(hidden + OLD)
    _remove(part)
    if old.exists():
        old.rename(part if path.exists() else path)  # to `path` after a kill between the two renames below
        _remove(part)
    try:
        yield part
        if durable:
            sync(part)
        if part.is_dir() and path.exists():
            path.rename(old)
        os.replace(part, path)
        if durable:
            sync(path.parent)
    finally:
        _remove(part)
    if old.exists():
        old.rename(part)  # so that no half of it is taken for the folder where a kill interrupts its removal
        _remove(part)


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Makes or replaces a file with a text in UTF-8."""
    with replacing(path, shared=shared) as part:
        part.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Makes a file's content, or a folder's names, outlive a crash of the machine."""
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
