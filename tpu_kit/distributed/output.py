"""Keeps printing from ending a run: the terminal or pipe may be closed, and the encoding may lack characters."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from tpu_kit.config.fields import hide_secrets


class SafeStream:
    """A text stream whose `write` and `flush` never raise.

    Escapes characters that the target cannot encode, drops text once the target is closed or its reader has ended, and
    hides secrets, also in the output of other libraries. Other attributes are the target's.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def write(self, text: str) -> int:
        """Writes a text with secrets replaced by ***; returns the length of the original text."""
        shown = hide_secrets(text)
        try:
            self._target.write(shown)
        except UnicodeEncodeError as error:
            self._target.write(shown.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError):  # the terminal or the reader of the pipe has ended, or the file is closed
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Flushes the target."""
        try:
            self._target.flush()
        except (OSError, ValueError):
            self._drop()

    def _drop(self) -> None:
        """Redirects the target's file descriptor to /dev/null: otherwise Python reports an error at its exit."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._target.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@contextlib.contextmanager
def safe_output() -> Iterator[None]:
    """Replaces sys.stdout and sys.stderr by `SafeStream`s for the block; then flushes and removes them."""
    safe: list[Any] = [
        stream if isinstance(stream, SafeStream) else SafeStream(stream) for stream in (sys.stdout, sys.stderr)
    ]
    with printing_to(*safe):
        try:
            yield
        finally:
            for stream in safe:
                stream.flush()


@contextlib.contextmanager
def printing_to(stdout: Any, stderr: Any) -> Iterator[None]:
    """Replaces sys.stdout and sys.stderr for the block; then restores both, unless the block has set another stream."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = stdout, stderr
    try:
        yield
    finally:
        if sys.stdout is stdout and sys.stderr is stderr:
            sys.stdout, sys.stderr = before
