"""Shows the progress of a run: a bar on stderr, and a file that a notebook's live view reads while a model answers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_kit.machine.storage import atomic

NO_BAR = "TPU_KIT_NO_BAR"  # in the environment: a notebook shows progress in its own way
ANSWERING_FILE = "answering.json"  # in a run's folder while a model answers: model, answered, asked
_LOOK = 0.5  # seconds between two readings of the replicas' counts


def open_bar(name: str, total: int | None, initial: int = 0, unit: str = "step") -> Any:
    """Opens a progress bar of tqdm on stderr; it shows nothing where `NO_BAR` is in the environment."""
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

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
        delay=0,  # TQDM_DELAY, which notebook/kernel.py sets, is for the bars of other libraries
        disable=NO_BAR in os.environ,
    )


@contextlib.contextmanager
def follow_answers(counts: Path, run: Path, model: str, asked: int) -> Iterator[None]:
    """Shows the number of complete answers while the body runs.

    Args:
        counts: a folder where each replica writes the number of its complete answers into a file, `*.answered`.
        run: the run's folder; if it exists, `ANSWERING_FILE` is in it until the body ends.
        model: the bar's text, such as "base model".
        asked: number of all answers.
    """
    stop, place, shown = threading.Event(), run / ANSWERING_FILE, -1

    def show() -> None:
        nonlocal shown
        answered = sum(int(file.read_text() or 0) for file in counts.glob("*.answered"))  # empty while it is written
        if answered > shown:
            shown = answered
            bar.update(answered - bar.n)
            if run.is_dir():
                atomic.write_text(place, json.dumps({"model": model, "answered": answered, "asked": asked}))

    def follow() -> None:
        while not stop.wait(_LOOK):
            with contextlib.suppress(OSError):  # a full disk: the code that writes the results reports it
                show()

    with open_bar(model, asked, unit="answer") as bar:
        thread = threading.Thread(target=follow, daemon=True)
        with contextlib.suppress(OSError):
            show()
        thread.start()
        try:
            yield
            show()
        finally:
            stop.set()
            thread.join()
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
