"""Runs notebooks as batch jobs with papermill: `python -m tpu_kit notebooks FILE.ipynb [out=...] [name=value ...]`.

Notebooks run in order, in a new kernel each time. The terminal shows the cells, their outputs and the progress of
training. The results are executed notebooks and HTML.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from tpu_kit.config.commands import FAILED, OK, PREEMPTED
from tpu_kit.config.fields import SECRET_ADVICE, hide_secrets, is_secret_name, is_secret_value
from tpu_kit.config.loader import ConfigError
from tpu_kit.distributed.preemption import RESULT_TYPE, STOPS
from tpu_kit.notebook.kernel import check_names

_SAME = 1.0  # seconds in which a repeated signal counts once
_WIDTH = 70  # characters of a cell's first line


def run(paths: Sequence[Path], out: Path, parameters: Mapping[str, Any]) -> int:
    """Runs notebooks until one fails or its training is preempted; returns the exit code.

    It is 0 if all ran, 1 for a failure, 75 if preempted or stopped by a signal. The first signal (Ctrl-C or of
    preemption) interrupts the cell, so that training saves; the second kills the kernel. The handlers stay.

    Args:
        paths: the notebooks.
        out: folder of the executed notebooks and their HTML, made if absent.
        parameters: passed to the notebooks that name them. A parameter that no notebook names goes to the notebooks
            that configure a run, which refuse unknown names.

    Raises:
        ConfigError: `paths` is empty, papermill or a file is missing, two files have the same name, a notebook is in
            `out`, or `out` cannot be made. Or a parameter is a secret (papermill writes parameters into the notebook),
            or no notebook takes it. Raised before any notebook runs.
    """
    problems = [] if paths else ["no notebook is given: name files (FILE.ipynb), or --copy FOLDER for the kit's files"]
    problems += [f"{path}: no such notebook" for path in paths if not path.is_file()]
    for name, count in Counter(path.name for path in paths).items():
        if count > 1:
            problems.append(f"{name}: {count} notebooks have this name, and {out} has room for one; rename the others")
    same = [path for path in paths if (out / path.name).resolve() == path.resolve()]
    problems += [f"out={out}: the executed notebook would replace {path}; name another folder" for path in same]
    secrets = [name for name, value in parameters.items() if is_secret_name(name) or is_secret_value(value)]
    if problems := problems + [f"{name}: {SECRET_ADVICE}" for name in secrets]:
        raise ConfigError(problems)
    notebooks = [(path, *_inspect(path)) for path in paths]
    named = {name for _, names, _ in notebooks for name in names}
    if not any(configures for *_, configures in notebooks):
        check_names(parameters, named)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"out={out} cannot be made ({error.strerror}); name another folder"]) from None
    job = _Job()
    for stop in (signal.SIGINT, *STOPS):
        if signal.getsignal(stop) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(stop, job.stop)
    for number, (path, names, configures) in enumerate(notebooks, 1):
        print(f"[{number}/{len(paths)}] {path.name}", flush=True)
        values = {key: value for key, value in parameters.items() if key in names or (configures and key not in named)}
        failure, preempted = job.execute(path, out / path.name, values)
        if preempted or (job.signals and (failure or number < len(paths))):
            stopped = "stopped" if job.number == signal.SIGINT else "preempted"
            print(f"{path.name} was {preempted or f'{stopped} (told to stop); to resume, run this again'}", flush=True)
            return PREEMPTED
        if failure:
            print(f"{path.name} failed: {hide_secrets(str(failure))}", flush=True)
            return FAILED
    return OK


def _inspect(notebook: Path) -> tuple[set[str], bool]:
    """Returns the names of a notebook's parameters, and whether the notebook configures a run.

    Raises:
        ConfigError: papermill is missing, or the file is no notebook.
    """
    try:
        import nbconvert  # noqa: F401 - only to learn whether it is installed
        import papermill
    except ImportError:
        advice = "pip install papermill ipykernel nbconvert"
        raise ConfigError([f"papermill, which runs the notebooks, is not installed: {advice}"]) from None
    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns about parameters that are not in the cell
    try:
        return set(papermill.inspect_notebook(notebook)), "cells.config(" in notebook.read_text()
    except Exception:  # nbformat raises many classes of errors
        raise ConfigError([f"{notebook}: not a notebook; give an .ipynb file of format 4"]) from None


class _Job:
    """Runs notebooks, and passes signals on to the kernel.

    The first signal interrupts the kernel like its stop button: training saves and returns, and no further cell runs.
    The second signal kills the kernel. A repetition within `_SAME` seconds counts as the same signal, because `timeout`
    signals its child and then the child's group.
    """

    def __init__(self) -> None:
        self.signals, self.last, self.number = 0, -math.inf, 0
        self.kernel: Any = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: interrupts the kernel, if any, or kills it at the second signal; skips repetitions."""
        now, before = time.monotonic(), self.last
        if now - before < _SAME:
            return
        self.signals, self.last, self.number = self.signals + 1, now, number
        then = "the run saves and ends; a second signal ends it at once" if self.signals == 1 else "it is ended now"
        print(f"\n   told to stop: {then}", file=sys.stderr, flush=True)
        if self.kernel is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel.pid, signal.SIGINT if self.signals == 1 else signal.SIGKILL)

    def execute(self, path: Path, target: Path, parameters: Mapping[str, Any]) -> tuple[BaseException | None, str]:
        """Runs a notebook; writes it to `target`, and its HTML beside it.

        Returns its error, None if all cells ran, and a text that says why training was preempted and how to resume it,
        "" if it was not.
        """
        import nbformat
        import papermill
        from nbconvert import HTMLExporter
        from papermill.engines import papermill_engines
        from traitlets.config import Config

        papermill_engines.register("tpu_kit", _engine(self))
        options = {"engine_name": "tpu_kit", "kernel_name": "python3", "language": "python", "progress_bar": False}
        start, preempted = time.monotonic(), ""
        # In the main thread, nbclient would handle signals itself and kill the kernel at the first signal.
        with ThreadPoolExecutor(1) as thread:
            failure = thread.submit(papermill.execute_notebook, path, target, dict(parameters), **options).exception()
        if target.is_file():
            # Joins the pieces of a stream, and keeps only the last state of a progress bar.
            exporter = HTMLExporter(config=Config({"CoalesceStreamsPreprocessor": {"enabled": True}}))
            target.with_suffix(".html").write_text(exporter.from_filename(str(target))[0])
            print(f"    {time.monotonic() - start:.0f} s, {target.with_suffix('.html')}", flush=True)
            for output in (output for cell in nbformat.read(target, 4).cells for output in cell.get("outputs", [])):
                result = output.get("data", {}).get(RESULT_TYPE, {})
                if result.get("status") == "preempted":
                    ended = "stopped" if self.number == signal.SIGINT else "preempted"
                    ended = ended if self.signals else result["ended"]
                    preempted = f"{ended} ({result['reason']}); to resume, {result['again']}"
        return failure, preempted


def _hidden(content: Any) -> Any:
    """Returns a message's content with *** for secrets, for the executed notebook, its HTML and the terminal."""
    if isinstance(content, dict):
        return {key: _hidden(value) for key, value in content.items()}
    if isinstance(content, list):
        return list(map(_hidden, content))
    return hide_secrets(content) if isinstance(content, str) else content


def _engine(job: _Job) -> Any:
    """Returns a class, a papermill engine that prints cells and outputs, and runs no cell after a signal to `job`."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    displays: dict[str, str] = {}  # text by display id

    class Client(PapermillNotebookClient):
        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
            if job.signals:
                raise RuntimeError("told to stop")
            job.kernel = self.km.provisioner
            lines = [line for line in cell.source.splitlines() if line.strip() and not line.startswith("#")]
            if cell.cell_type == "code" and lines:
                first = textwrap.shorten(lines[0], _WIDTH, placeholder="...")
                print(f"    {cell_index + 1:2}/{len(self.nb.cells)} {first}", flush=True)
            return super().execute_cell(cell, cell_index, *args, **options)

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            content = msg["content"] = _hidden(msg["content"])
            text = content.get("data", {}).get("text/plain", "")
            if display := content.get("transient", {}).get("display_id"):
                before, displays[display] = displays.get(display, ""), text
                text = text.removeprefix(before).strip("\n")  # only the new rows of a growing table
            if content.get("name") == "stdout":
                print(content["text"], end="", flush=True)
            elif text:
                print(text, flush=True)
            return super().process_message(msg, cell, cell_index)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            quiet = ["--IPKernelApp.log_level=40"]  # it warns about a connection that never leaves this machine
            return Client(nb_man, kernel_name=kernel_name, startup_timeout=120, extra_arguments=quiet).execute()

    return Engine
