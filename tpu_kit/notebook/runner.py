"""`python -m tpu_kit notebooks FILE.ipynb ... [out=runs/notebooks] [name=value ...]`: notebooks as a batch job.

Each runs in a kernel of its own, one after the other, cell by cell on the terminal; what the cells show is told of a
single notebook alone. What is left behind are the executed notebooks, the same as HTML, and a log of what the cells
showed. The first cell that fails ends all, and so does a training run that was preempted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tpu_kit.config.loader import ConfigError
from tpu_kit.notebook.parameters import check_names
from tpu_kit.recipes.sft import RESULT_TYPE

OK, FAILED, PREEMPTED = 0, 1, 75

_TAIL = 15  # lines of the log under an error
_WIDTH = 70


def run(paths: Sequence[Path], out: Path, given: Mapping[str, Any]) -> int:
    """Runs notebooks one after the other; returns the exit code.

    Args:
        paths: the notebooks.
        out: the folder for executed notebooks, HTML and logs.
        given: parameters, each for the notebooks that name it; if none does, for those that configure a run.

    Raises:
        ConfigError: a file is missing, or no notebook has a parameter of that name; nothing has run then.
    """
    if problems := [f"{path}: no such notebook" for path in paths if not path.is_file()]:
        raise ConfigError(problems)
    sets = _dealt(paths, given)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"out={out} cannot be made ({error.strerror}); name a folder that can"]) from None
    with Stop() as stop:
        for number, (path, parameters) in enumerate(zip(paths, sets, strict=True), 1):
            print(f"[{number}/{len(paths)}] {path.name}", flush=True)
            start, target = time.monotonic(), out / path.name
            failure = execute(path, target, parameters, stop, all_of_it=len(paths) == 1)
            if failure:
                print(f"\n{failure}", flush=True)
            else:
                print(f"    {time.monotonic() - start:.0f} s, {target.with_suffix('.html')}", flush=True)
            reason = "" if failure else preemption_of(target)
            if reason or (stop.asked and (failure or number < len(paths))):
                print(f"{path.name} was preempted ({reason or 'told to stop'}): the same command goes on", flush=True)
                return PREEMPTED
            if failure:
                return FAILED
    return OK


def _dealt(paths: Sequence[Path], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each notebook is given: what its parameters cell names; what none of them names is for a run's notebooks."""
    import nbformat

    found = []
    for path in paths:
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        cells = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
        own = {name for source in cells for name in re.findall(r"^(\w+) *=", source, flags=re.MULTILINE)}
        found.append((own, any("cells.config(globals()" in cell.source for cell in code)))
    named = {name for own, _ in found for name in own}
    if not any(configures for _, configures in found):  # what configures a run refuses unknown names itself
        check_names(given, named)
    return [
        {name: value for name, value in given.items() if name in own or (configures and name not in named)}
        for own, configures in found
    ]


def preemption_of(notebook: Path) -> str:
    """Why the training run in an executed notebook was preempted, by the results that its cells show; else empty."""
    import nbformat

    if not notebook.is_file():
        return ""
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    found = [output["data"][RESULT_TYPE] for output in outputs if RESULT_TYPE in output.get("data", {})]
    return next((str(result["reason"]) for result in found if result["status"] == "preempted"), "")


class Stop:
    """Counts SIGINT and SIGTERM while it is entered.

    The first goes to the kernel as its stop button does, so that training saves and returns; the second ends it.

    Attributes:
        asked: how many came.
    """

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        then = "the run saves and ends; once more ends it at once" if self.asked == 1 else "it is ended now"
        print(f"\n   told to stop: {then}", file=sys.stderr, flush=True)

    def execute(self, kernels: Sequence[Any], *notebook: Any, **options: Any) -> Exception | None:
        """Executes a notebook, and passes on the signals that arrive meanwhile.

        Args:
            kernels: the provisioner of the kernel, once it has started.
            notebook: positional arguments of `papermill.execute_notebook`. It runs in another thread: in the main one
                nbclient would handle the signals, and kill the kernel at the first.
            options: its keyword arguments.

        Returns:
            What it failed with: the error of a cell, a kernel that died, a disk that is full.
        """
        import papermill

        logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns of parameters that are not in the cell
        failures: list[Exception] = []

        def work() -> None:
            try:
                papermill.execute_notebook(*notebook, **options)
            except Exception as error:
                failures.append(error)

        thread, sent = threading.Thread(target=work), self.asked
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if kernels and self.asked > sent:
                sent = self.asked
                with contextlib.suppress(ProcessLookupError):
                    os.kill(kernels[0].pid, signal.SIGINT if sent == 1 else signal.SIGKILL)
        return failures[0] if failures else None


def execute(path: Path, target: Path, parameters: Mapping[str, Any], stop: Stop, all_of_it: bool = False) -> str:
    """Runs one notebook, telling each cell and the progress that it shows.

    Args:
        path: the notebook.
        target: where the executed one goes; its log and its HTML beside it.
        parameters: of the notebook.
        stop: what hears of signals.
        all_of_it: tell what the cells show, too.

    Returns:
        The cell that failed, its error and the end of the log; empty if none failed.
    """
    from papermill import PapermillExecutionError
    from papermill.engines import papermill_engines

    kernels: list[Any] = []
    log_file = target.with_suffix(".log")
    with log_file.open("w") as log:
        papermill_engines.register("tpu_kit", _engine(log, all_of_it, kernels))
        error = stop.execute(kernels, path, target, dict(parameters), engine_name="tpu_kit", progress_bar=False)
    if target.is_file():
        write_html(target)
    if error is None:
        return ""
    failure = f"{path.name} failed: {type(error).__name__}: {error}"
    if isinstance(error, PapermillExecutionError):
        source = textwrap.indent(error.source, "    ")
        failure = f"{path.name} failed in cell [{error.exec_count}]:\n{source}\n{error.ename}: {error.evalue}"
    tail = log_file.read_text().splitlines()[-_TAIL:]
    return "\n".join([failure, "", f"The end of {log_file}:", *tail])


def _engine(log: IO[str], all_of_it: bool, kernels: list[Any]) -> Any:
    """A papermill engine that tells what runs, keeps what the cells show, and adds its kernel to `kernels`."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    class Client(PapermillNotebookClient):
        _broken = False  # something was told after the cell's name

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._shown: dict[str, str] = {}  # by the display's id

        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
            kernels[:] = [self.km.provisioner]
            if cell.cell_type != "code":
                return super().execute_cell(cell, cell_index, *args, **options)
            code = [one for one in self.nb.cells if one.cell_type == "code"]
            name = f"    {code.index(cell) + 1:2}/{len(code)} {_first_line(cell.source):<{_WIDTH}}"
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
                text = text.removeprefix(before).lstrip("\n")  # of a table that grows, its new rows
            if text and kind in ("stream", "display_data", "update_display_data", "execute_result"):
                log.write(text if kind == "stream" else f"{text}\n")
                log.flush()
                if kind == "update_display_data":  # progress
                    self._tell("".join(f"          {line[:150]}\n" for line in text.splitlines()))
                elif all_of_it and content.get("name") != "stderr":
                    self._tell(text if kind == "stream" else f"{text}\n")
            return super().process_message(msg, cell, cell_index)

        def _tell(self, text: str) -> None:
            print(text if self._broken else f"\n{text}", end="", flush=True)
            self._broken = True

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            quiet = ["--IPKernelApp.log_level=40"]  # it warns of a connection that stays on this machine
            return Client(
                nb_man, kernel_name=kernel_name, timeout=None, startup_timeout=120, extra_arguments=quiet
            ).execute()

    return Engine


def _first_line(source: str) -> str:
    """The first line of a cell that says something, shortened."""
    lines = [line for line in source.splitlines() if line.strip() and not line.startswith("#")]
    line = lines[0] if lines else ""
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def write_html(notebook: Path) -> None:
    """Write an executed notebook as a page beside it, where nbconvert is installed."""
    try:
        from nbconvert import HTMLExporter
    except ImportError:
        return
    import nbformat

    made = nbformat.read(notebook, as_version=4)
    for cell in made.cells:
        outputs: list[Any] = []
        for output in cell.get("outputs", []):
            if outputs and output.output_type == "stream" and output.name == outputs[-1].get("name"):
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":  # keep the last state of a progress bar, which redraws its line
                output.text = re.sub(r"[^\n]*\r(?=[^\n])", "", output.text)
        if "outputs" in cell:
            cell.outputs = outputs
    html, _ = HTMLExporter().from_notebook_node(made, {"metadata": {"name": notebook.stem}})
    notebook.with_suffix(".html").write_text(html)
