"""Shows how far a run is: a bar on stderr, and a file that a notebook's live view reads while a model answers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_kit.storage import atomic

NO_BAR = "TPU_KIT_NO_BAR"  # in the environment: a notebook shows progress in its own way
ANSWERING_FILE = "answering.json"  # in a run's folder while a model answers: model, answered, asked
_LOOK = 0.5  # seconds between two looks at what the replicas have answered


def open_bar(name: str, total: int | None, initial: int = 0, unit: str = "step") -> Any:
    """A progress bar of tqdm on stderr; it shows nothing where `NO_BAR` is in the environment."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]

    # A launch's stderr is a pipe to a notebook cell or a log: no terminal width to follow, and each redraw is kept.
    terminal = sys.stderr.isatty()
    return tqdm(
        desc=name,
        total=total,
        miniters=1,
        initial=initial,
        unit=unit,
        file=sys.stderr,
        ascii=True,
        dynamic_ncols=terminal,
        ncols=None if terminal else 110,
        mininterval=0.5 if terminal else 2.0,
        disable=NO_BAR in os.environ,
    )


@contextlib.contextmanager
def follow_answers(counts: Path, run: Path, model: str, asked: int) -> Iterator[None]:
    """Shows how many answers are complete while the body runs.

    Args:
        counts: a folder where each replica keeps the number of its complete answers in a file, `*.answered`.
        run: the run's folder; where there is one, `ANSWERING_FILE` is in it until the body ends.
        model: what answers, as in "base model".
        asked: answers in all.
    """
    stop, place, told = threading.Event(), run / ANSWERING_FILE, -1

    def look() -> None:
        nonlocal told
        answered = sum(int(file.read_text() or 0) for file in counts.glob("*.answered"))  # empty while it is written
        if answered > told:
            told = answered
            bar.update(answered - bar.n)
            if run.is_dir():
                atomic.write_text(place, json.dumps({"model": model, "answered": answered, "asked": asked}))

    def follow() -> None:
        while not stop.wait(_LOOK):
            with contextlib.suppress(OSError):  # a full disk, which is for who writes results to tell
                look()

    with open_bar(model, asked, unit="answer") as bar:
        thread = threading.Thread(target=follow, daemon=True)
        with contextlib.suppress(OSError):
            look()
        thread.start()
        try:
            yield
            look()
        finally:
            stop.set()
            thread.join()
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
