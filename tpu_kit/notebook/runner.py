"""Runs notebooks as batch jobs, by papermill: `python -m tpu_kit notebooks FILE.ipynb ... [out=...] [name=value ...]`.

Each notebook runs in its own kernel, one after the other; the terminal names each cell. The outputs of the cells are
printed for a single notebook only. The results are the executed notebooks, the same as HTML, and a log of the outputs.
The first cell that fails ends the job, and so does a training run that was preempted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tpu_kit.config.fields import SECRET_ADVICE, is_secret_name, is_secret_value
from tpu_kit.config.loader import ConfigError
from tpu_kit.notebook.kernel import assigned, check_names
from tpu_kit.recipes.sft import RESULT_TYPE

OK, FAILED, PREEMPTED = 0, 1, 75

_TAIL = 15  # lines of the log under an error
_WIDTH = 70


def run(paths: Sequence[Path], out: Path, parameters: Mapping[str, Any]) -> int:
    """Runs notebooks one after the other; returns the exit code.

    Args:
        paths: the notebooks.
        out: the folder for executed notebooks, HTML and logs.
        parameters: each goes to the notebooks that name it, or, where none does, to those that configure a run, which
            refuse an unknown name themselves.

    Raises:
        ConfigError: papermill or a file is missing, a parameter is a secret (papermill writes parameters into the
            notebook), or no notebook takes it; no notebook has run then.
    """
    problems = [f"{path}: no such notebook" for path in paths if not path.is_file()]
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
    job = _Job(print_outputs=len(paths) == 1)
    handlers = {number: signal.signal(number, job.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number, (path, names, configures) in enumerate(notebooks, 1):
            print(f"[{number}/{len(paths)}] {path.name}", flush=True)
            values = {
                name: value for name, value in parameters.items() if name in names or (configures and name not in named)
            }
            failed, reason = job.execute(path, out / path.name, values)
            if job.signals and (failed or number < len(paths)):
                reason = reason or "told to stop"
            if reason:
                print(f"{path.name} was preempted ({reason}): the same command resumes it", flush=True)
                return PREEMPTED
            if failed:
                return FAILED
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return OK


def _inspect(notebook: Path) -> tuple[set[str], bool]:
    """Returns the names that a notebook's parameters cell assigns, and whether the notebook configures a run.

    Raises:
        ConfigError: papermill is missing, the file is no notebook, or its parameters cell is not Python.
    """
    try:
        import nbconvert  # noqa: F401 - only to learn whether it is installed
        import nbformat
        import papermill  # noqa: F401 - as above
    except ImportError:
        advice = "pip install papermill ipykernel nbconvert"
        raise ConfigError([f"papermill, which runs the notebooks, is not installed: {advice}"]) from None
    try:
        cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
        tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
        names = set(assigned("\n".join(tagged)))
    except Exception:  # nbformat raises many kinds of errors
        advice = "give an .ipynb file of format 4, whose parameters cell is Python"
        raise ConfigError([f"{notebook}: not a notebook; {advice}"]) from None
    return names, any("cells.config(" in cell.source for cell in cells)


class _Job:
    """Runs notebooks, and passes signals on to the kernel.

    The first signal interrupts the kernel as its stop button does, so that training saves and returns; the second one
    ends the kernel.

    Args:
        print_outputs: whether to print the outputs of cells.
    """

    def __init__(self, print_outputs: bool) -> None:
        self.print_outputs = print_outputs
        self.signals: list[int] = []
        self.kernel: Any = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM."""
        self.signals.append(number)
        first = len(self.signals) == 1
        then = "the run saves and ends; a second signal ends it at once" if first else "it is ended now"
        print(f"\n   told to stop: {then}", file=sys.stderr, flush=True)
        if self.kernel:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel.pid, signal.SIGINT if first else signal.SIGKILL)

    def execute(self, path: Path, target: Path, parameters: Mapping[str, Any]) -> tuple[bool, str]:
        """Runs one notebook; writes it, its HTML and its log.

        Papermill runs in another thread: in the main thread nbclient would handle the signals, and kill the kernel at
        the first one.

        Returns:
            Whether it failed (which is printed with the end of its log), and why its training run was preempted.
        """
        import nbformat
        import papermill
        from nbconvert import HTMLExporter
        from papermill.engines import papermill_engines
        from traitlets.config import Config

        logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns about parameters that are not in the cell
        failures: list[Exception] = []
        self.kernel = None

        def work() -> None:
            try:
                papermill.execute_notebook(
                    path, target, dict(parameters), engine_name="tpu_kit", kernel_name="python3", language="python",
                    progress_bar=False,
                )  # fmt: skip
            except Exception as error:  # of a cell, a dead kernel, a full disk
                failures.append(error)

        start, log_file = time.monotonic(), target.with_suffix(".log")
        with log_file.open("a") as log:
            papermill_engines.register("tpu_kit", _engine(self, log))
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        reason, page = "", target.with_suffix(".html")
        if target.is_file():
            # Joins the pieces of a stream, and keeps the last state of a progress bar, which redraws its line.
            config = Config({"CoalesceStreamsPreprocessor": {"enabled": True}})
            page.write_text(HTMLExporter(config=config).from_filename(str(target))[0])
            outputs = [output for cell in nbformat.read(target, 4).cells for output in cell.get("outputs", [])]
            results = [output["data"][RESULT_TYPE] for output in outputs if RESULT_TYPE in output.get("data", {})]
            reason = next((str(result["reason"]) for result in results if result["status"] == "preempted"), "")
        if not failures:
            print(f"    {time.monotonic() - start:.0f} s, {page}", flush=True)
            return False, reason
        error = failures[0]
        text = f"{path.name} failed: {type(error).__name__}: {error}"
        if isinstance(error, papermill.PapermillExecutionError):
            source = textwrap.indent(error.source, "    ")
            text = f"{path.name} failed in cell [{error.exec_count}]:\n{source}\n{error.ename}: {error.evalue}"
        tail = log_file.read_text().splitlines()[-_TAIL:]
        print("\n".join([f"\n{text}\n", f"The end of {log_file}:", *tail]), flush=True)
        return True, ""


def _engine(job: _Job, log: IO[str]) -> Any:
    """Returns a papermill engine that prints the cells and logs their outputs."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    class Client(PapermillNotebookClient):
        _broken = False  # whether something was printed after the cell's name

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._shown: dict[str, str] = {}  # by the display's id

        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
            if job.signals and job.kernel is None:
                raise RuntimeError("told to stop while the kernel started")
            job.kernel = self.km.provisioner
            if cell.cell_type != "code":
                return super().execute_cell(cell, cell_index, *args, **options)
            code = [one for one in self.nb.cells if one.cell_type == "code"]
            lines = [line for line in cell.source.splitlines() if line.strip() and not line.startswith("#")]
            first = textwrap.shorten(lines[0], _WIDTH, placeholder="...") if lines else ""
            name = f"    {code.index(cell) + 1:2}/{len(code)} {first:<{_WIDTH}}"
            print(name, end="", flush=True)
            log.write(f"\n{name.strip()}\n")
            self._broken, start = False, time.monotonic()
            try:
                return super().execute_cell(cell, cell_index, *args, **options)
            finally:
                before = " " * len(name) if self._broken else ""
                print(f"{before} {time.monotonic() - start:5.1f} s", flush=True)

        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            kind, content = msg["msg_type"], msg["content"]
            text = content["text"] if kind == "stream" else content.get("data", {}).get("text/plain", "")
            if display := content.get("transient", {}).get("display_id"):
                before, self._shown[display] = self._shown.get(display, ""), text
                text = text.removeprefix(before).lstrip("\n")  # the new rows of a table that grows
            if text and kind in ("stream", "display_data", "update_display_data", "execute_result"):
                text += "\n" if kind != "stream" else ""
                log.write(text)
                log.flush()
                is_progress = kind == "update_display_data"
                if is_progress:
                    text = "".join(f"          {line[:150]}\n" for line in text.splitlines())
                if is_progress or (job.print_outputs and content.get("name") != "stderr"):
                    print(text if self._broken else f"\n{text}", end="", flush=True)
                    self._broken = True
            return super().process_message(msg, cell, cell_index)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            quiet = ["--IPKernelApp.log_level=40"]  # it warns about a connection that stays on this machine
            client = Client(nb_man, kernel_name=kernel_name, timeout=None, startup_timeout=120, extra_arguments=quiet)
            return client.execute(stderr=log)  # what libraries write past Python

    return Engine
