"""Shows the progress of a run: a bar on stderr, and while a model answers a file for a notebook's live view."""

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

NO_BAR = "TPU_KIT_NO_BAR"  # environment variable that hides bars, for notebooks that show progress themselves
ANSWERING_FILE = "answering.json"  # exists in a run's folder while a model answers: model, answered, asked
_LOOK = 0.5  # seconds between reads of the replicas' counts


def open_bar(name: str, total: int | None, initial: int = 0, unit: str = "step") -> Any:
    """Returns a tqdm bar on stderr with the text `name`; it shows nothing if the environment has TPU_KIT_NO_BAR.

    The caller updates and closes it. `total` is the number of units, None if it is unknown; `initial` is the number of
    units done before; `unit` is the word for a unit.
    """
    from tqdm.std import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

    # The stderr of a launch is a pipe to a notebook cell or a log: it has no width, and it keeps every redraw.
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
        delay=0,  # notebook/kernel.py sets TQDM_DELAY for the bars of other libraries
        disable=NO_BAR in os.environ,
    )


@contextlib.contextmanager
def follow_answers(counts: Path, run: Path, model: str, asked: int) -> Iterator[None]:
    """Shows the number of complete answers as a bar on stderr, and in a file of `run`, while the block runs.

    Args:
        counts: folder in which each replica writes the number of its complete answers to a file `*.answered`.
        run: the run's folder. If it exists, it contains `ANSWERING_FILE` until the block ends: a JSON object with
            model, answered and asked.
        model: the model's name in the bar and the file, such as "base model".
        asked: number of answers in total.
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
