"""Runs notebooks as batch jobs: `python -m tpu_kit notebooks FILE.ipynb ... [out=runs/notebooks] [name=value ...]`.

Each notebook runs in its own kernel, one after the other; the terminal names each cell. The outputs of the cells are
printed for a single notebook only. The results are the executed notebooks, the same as HTML, and a log of the outputs.
The first cell that fails ends the job, and so does a training run that was preempted.
"""

from __future__ import annotations

import ast
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tpu_kit.config.fields import SECRET_ADVICE, closest, is_secret_name, is_secret_value, show
from tpu_kit.config.loader import ConfigError, load_config
from tpu_kit.notebook.kernel import assigned, check_names
from tpu_kit.recipes.sft import RESULT_TYPE

OK, FAILED, PREEMPTED = 0, 1, 75

_TAIL = 15  # lines of the log under an error
_WIDTH = 70
_EACH_ITS_OWN = ("output_dir", "run_name")  # the sweep sets them
_CONFIG = re.compile(
    r"cells\.config\(\s*globals\(\)"
    r"(?:,\s*(?:path\s*=\s*)?(?!also\b)(?P<file>\w+|\"[^\"]*\"|'[^']*')(?=[,\s)]))?"
    r"(?:,\s*also\s*=\s*(?P<also>[\[({][^\])}]*))?"
)
"""The call that hands a notebook's parameters to the configuration of a run."""


@dataclass(frozen=True)
class Accepts:
    """The parameters that a notebook takes, according to its source.

    Attributes:
        notebook: its path, for errors.
        own: names and literals of its parameters cell.
        configures: whether it calls `cells.config`, which takes every parameter of a run.
        file: the configuration file that it starts from, or the name in `own` that holds the file; None without one.
        also: names of `own` that it does not pass to the configuration.
    """

    notebook: Path
    own: Mapping[str, Any]
    configures: bool
    file: str | None
    also: Sequence[str]

    @classmethod
    def of(cls, notebook: Path) -> Accepts:
        """Reads a notebook.

        Raises:
            ConfigError: the packages that run notebooks are missing, it is no notebook, or its
                parameters are not one cell of literals.
        """
        try:
            import nbformat
            import papermill  # noqa: F401 - only to learn whether it is installed
        except ImportError:
            advice = "pip install papermill ipykernel"
            raise ConfigError([f"papermill, which runs the notebooks, is not installed: {advice}"]) from None
        try:
            cells = [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]
        except Exception:  # nbformat raises many kinds of errors
            raise ConfigError([f"{notebook}: not a notebook; give an .ipynb file of format 4"]) from None
        tagged = [cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])]
        if len(tagged) > 1:
            raise ConfigError([f"{notebook}: {len(tagged)} cells are tagged parameters; tag one alone"])
        try:
            own = {name: ast.literal_eval(value) for name, value in assigned("".join(tagged)).items() if value}
        except (SyntaxError, ValueError):
            raise ConfigError([f"{notebook}: its parameters cell may hold name = literal lines alone"]) from None
        call = next((found for cell in cells if (found := _CONFIG.search(cell.source))), None)
        file, also = (call["file"], call["also"] or "") if call else (None, "")
        if file and file not in own:
            file = file[1:-1] if file[0] in "\"'" else None  # None: the notebook computes it
        return cls(notebook, own, call is not None, file, [name for name in own if re.search(rf"\b{name}\b", also)])

    def problems(self, parameters: Mapping[str, Any]) -> list[str]:
        """Returns the problems of a parameter set of a sweep; an empty list if the notebook takes it."""
        found = [f"{name}: each run has its own; remove it" for name in _EACH_ITS_OWN if name in parameters]
        found += _secrets(parameters)
        given = {name: value for name, value in {**self.own, **parameters}.items() if name not in _EACH_ITS_OWN}
        kept = self.also if self.configures else self.own
        for name in kept:
            if name in parameters and not _has_type_of(parameters[name], self.own[name]):
                types = f"{show(parameters[name])} is not of the type of {show(self.own[name])}"
                found.append(f"{name}: {types}; correct it")
        rest = {name: value for name, value in given.items() if name not in kept}
        for name in list(rest):
            if near := closest(name, kept, similarity=0.8 if self.configures else 0.6):
                found.append(f"{name}: no such parameter of {self.notebook}; did you mean {near[0]}?")
                del rest[name]
            elif not self.configures:
                found.append(f"{name}: no such parameter of {self.notebook}; it has {', '.join(self.own)}")
        if self.configures:
            try:
                load_config(None if self.file is None else given.get(self.file, self.file), parameters=rest)
            except ConfigError as error:
                found += error.problems
        return found


def _secrets(parameters: Mapping[str, Any]) -> list[str]:
    """Returns the problems of parameters that are secrets: papermill writes each parameter into the notebook."""
    found = [name for name, value in parameters.items() if is_secret_name(name) or is_secret_value(value)]
    return [f"{name}: {SECRET_ADVICE}" for name in found]


def _has_type_of(value: Any, default: Any) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, float) and isinstance(value, int):
        return not isinstance(value, bool)
    return type(value) is type(default) or (isinstance(value, list) and isinstance(default, tuple))


def run(paths: Sequence[Path], out: Path, given: Mapping[str, Any]) -> int:
    """Runs notebooks one after the other; returns the exit code.

    Args:
        paths: the notebooks.
        out: the folder for executed notebooks, HTML and logs.
        given: parameters, each for the notebooks that name it; a name in none of them goes to those that configure a
            run.

    Raises:
        ConfigError: a file is missing, a parameter is a secret, or no notebook has a parameter of that name; no
            notebook has run then.
    """
    if problems := [f"{path}: no such notebook" for path in paths if not path.is_file()] + _secrets(given):
        raise ConfigError(problems)
    accepted = [Accepts.of(path) for path in paths]
    named = {name for one in accepted for name in one.own}
    if not any(one.configures for one in accepted):  # a notebook that configures a run refuses unknown names itself
        check_names(given, named)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError([f"out={out} cannot be made ({error.strerror}); name another folder"]) from None
    with Stop() as stop:
        for number, one in enumerate(accepted, 1):
            path, start = one.notebook, time.monotonic()
            print(f"[{number}/{len(paths)}] {path.name}", flush=True)
            values = {
                name: value
                for name, value in given.items()
                if name in one.own or (one.configures and name not in named)
            }
            target, log_file = out / path.name, (out / path.name).with_suffix(".log")
            failure = execute(path, target, values, stop, log_file, print_outputs=len(paths) == 1)
            if failure:
                tail = log_file.read_text().splitlines()[-_TAIL:]
                print("\n".join([f"\n{_failure(path, failure)}\n", f"The end of {log_file}:", *tail]), flush=True)
            else:
                print(f"    {time.monotonic() - start:.0f} s, {target.with_suffix('.html')}", flush=True)
            reason = "" if failure else preemption_of(target)
            if reason or (stop.asked and (failure or number < len(paths))):
                reason = reason or "told to stop"
                print(f"{path.name} was preempted ({reason}): the same command resumes it", flush=True)
                return PREEMPTED
            if failure:
                return FAILED
    return OK


def _failure(path: Path, error: Exception) -> str:
    from papermill import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        source = textwrap.indent(error.source, "    ")
        return f"{path.name} failed in cell [{error.exec_count}]:\n{source}\n{error.ename}: {error.evalue}"
    return f"{path.name} failed: {type(error).__name__}: {error}"


def preemption_of(notebook: Path) -> str:
    """Returns why the training run of an executed notebook was preempted, from the results in its cells; else empty."""
    import nbformat

    if not notebook.is_file():
        return ""
    cells = nbformat.read(notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    found = [output["data"][RESULT_TYPE] for output in outputs if RESULT_TYPE in output.get("data", {})]
    return next((str(result["reason"]) for result in found if result["status"] == "preempted"), "")


class Stop:
    """Counts SIGINT and SIGTERM while it is entered.

    `execute` passes the first to the kernel as its stop button does, so that training saves and returns; the second
    ends the kernel.

    Attributes:
        asked: number of signals.
    """

    def __init__(self) -> None:
        self.asked = 0

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._count) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1
        then = "the run saves and ends; a second signal ends it at once" if self.asked == 1 else "it is ended now"
        print(f"\n   told to stop: {then}", file=sys.stderr, flush=True)


def execute(
    path: Path, target: Path, parameters: Mapping[str, Any], stop: Stop, log_file: Path, print_outputs: bool = False
) -> Exception | None:
    """Runs one notebook in a new kernel of this Python; prints each cell and its progress.

    Papermill runs in another thread: in the main thread nbclient would handle the signals, and kill the kernel at the
    first.

    Args:
        path: the notebook.
        target: where the executed notebook goes, with its HTML beside it.
        parameters: of the notebook.
        stop: counts the signals that are passed on.
        log_file: receives the outputs of the cells, after those of earlier attempts.
        print_outputs: whether to print the outputs too.

    Returns:
        The error that ended it: of a cell, a dead kernel, a full disk.
    """
    import papermill
    from papermill.engines import papermill_engines

    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns about parameters that are not in the cell
    kernels: list[Any] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            papermill.execute_notebook(
                path, target, dict(parameters), engine_name="tpu_kit", kernel_name="python3", language="python",
                progress_bar=False,
            )  # fmt: skip
        except Exception as error:
            failures.append(error)

    with log_file.open("a") as log:
        papermill_engines.register("tpu_kit", _engine(log, print_outputs, kernels))
        thread, sent = threading.Thread(target=work), stop.asked
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if kernels and stop.asked > sent:
                sent = stop.asked
                with contextlib.suppress(ProcessLookupError):
                    os.kill(kernels[0].pid, signal.SIGINT if sent == 1 else signal.SIGKILL)
    if target.is_file():
        _write_html(target)
    return failures[0] if failures else None


def _engine(log: IO[str], print_outputs: bool, kernels: list[Any]) -> Any:
    """Returns a papermill engine that prints the cells, logs their outputs, and adds its kernel to `kernels`."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine

    class Client(PapermillNotebookClient):
        _broken = False  # whether something was printed after the cell's name

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._shown: dict[str, str] = {}  # by the display's id

        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
            kernels[:] = [self.km.provisioner]
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
                log.write(text if kind == "stream" else f"{text}\n")
                log.flush()
                if kind == "update_display_data":  # progress
                    self._print("".join(f"          {line[:150]}\n" for line in text.splitlines()))
                elif print_outputs and content.get("name") != "stderr":
                    self._print(text if kind == "stream" else f"{text}\n")
            return super().process_message(msg, cell, cell_index)

        def _print(self, text: str) -> None:
            print(text if self._broken else f"\n{text}", end="", flush=True)
            self._broken = True

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            quiet = ["--IPKernelApp.log_level=40"]  # it warns about a connection that stays on this machine
            client = Client(nb_man, kernel_name=kernel_name, timeout=None, startup_timeout=120, extra_arguments=quiet)
            return client.execute(stderr=log)  # what libraries write past Python

    return Engine


def _write_html(notebook: Path) -> None:
    """Writes an executed notebook as a page beside it, where nbconvert is installed."""
    try:
        from nbconvert import HTMLExporter
        from traitlets.config import Config
    except ImportError:
        return
    # Joins the pieces of a stream, and keeps the last state of a progress bar, which redraws its line.
    config = Config({"CoalesceStreamsPreprocessor": {"enabled": True}})
    page, _ = HTMLExporter(config=config).from_filename(str(notebook))
    notebook.with_suffix(".html").write_text(page)
