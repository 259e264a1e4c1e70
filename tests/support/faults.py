"""Kills the importing process at a chosen operation on files or on an object store; for child processes of tests.

tpu_kit has no code for this: `arm` replaces the functions that it calls. Any child process can use it, including a
training run:

    faults.arm(7)               # SIGKILL before the 7th operation from now on
    faults.arm(7, torn=True)    # ... in the middle of it: half of a file is written; a rename is done
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_kit.training.checkpoint import local_store

FILE_OPERATIONS = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir", "open")
_count = 0


def operations() -> int:
    """Returns the number of operations since `arm`."""
    return _count


def arm(die_at: int, torn: bool = False) -> None:
    """Replaces all writing functions so that the process dies at the `die_at`-th call from now on."""
    for name in FILE_OPERATIONS:
        setattr(os, name, _dying(getattr(os, name), die_at, torn))
    for name in ("write_bytes", "write_text"):
        setattr(Path, name, _dying(getattr(Path, name), die_at, torn, _half_content))
    local_store.save_file = _dying(local_store.save_file, die_at, torn, _half_file)
    gcsfs = sys.modules.get("gcsfs.core")
    if gcsfs is not None:
        request = gcsfs.GCSFileSystem._request

        async def dying(*arguments: Any, **named: Any) -> Any:
            last = _next(die_at)
            if last and not torn:
                _die()
            answer = await request(*arguments, **named)
            if last:
                _die()
            return answer

        gcsfs.GCSFileSystem._request = dying


def _dying(
    function: Callable[..., Any], die_at: int, torn: bool, half: Callable[..., None] | None = None
) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if not _next(die_at):
            return function(*arguments, **named)
        try:
            if torn:
                (half or _whole)(function, *arguments, **named)
        finally:  # some operations fail, such as making a folder that exists
            _die()

    return call


def _whole(function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    function(*arguments, **named)


def _half_content(write: Callable[..., Any], path: Path, content: Any, **named: Any) -> None:
    write(path, content[: len(content) // 2], **named)


def _half_file(save_file: Callable[..., Any], tensors: Any, path: Path, **named: Any) -> None:
    save_file(tensors, path, **named)
    os.truncate(path, path.stat().st_size // 2)


def _next(die_at: int) -> bool:
    global _count
    _count += 1
    return _count == die_at


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
