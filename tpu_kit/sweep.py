"""`python -m tpu_kit sweep notebook.ipynb sweep.yaml`: many parameter sets through one notebook, one after the other.

What the file holds is told in trials.py, what comes out in outcomes.py. Papermill runs each set in a kernel of its own;
its folder's run.json says how far it is. So a sweep that is run again skips what is finished, and what was under way
goes on from its newest checkpoint, as any run does.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_kit.config import ConfigError
from tpu_kit.headless import Stop, preemption_of, write_html
from tpu_kit.outcomes import LOG_FILE, NOTEBOOK_FILE, Record, outcomes, write_tables
from tpu_kit.trials import Sweep, Trial, read_sweep

OK, FAILED, PREEMPTED = 0, 1, 75
DETAILS = """\
sweep.yaml holds:

  fixed: {source: my_rows.jsonl, max_steps: 200}   every run has these
  grid: {learning_rate: [1e-4, 3e-4], r: [8, 32]}  every combination of these
  runs: [{learning_rate: 1e-3, r: 4}]              and these sets besides, or in place of a grid
  dollars_per_hour: 9.6                            of the machine; by default the list price of the TPU here
  output_dir: runs/rates                           by default the file's name, where `train` would write

Each run has a folder there, with the executed notebook, its log, and all that `train` writes; results.html and
results.csv beside them are sorted by the loss on held-out rows. The same command again skips what is finished, goes on
with what was under way, and tries again what failed.

Exit codes: 0 all finished, 1 some failed, 2 bad arguments, 75 told to stop (the same command goes on)."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: the arguments, the file or the parameters of any run are wrong; nothing has run then.
    """
    if len(arguments) != 2 or any(one.startswith("-") for one in arguments):
        raise ConfigError(
            [f"{' '.join(arguments) or 'no arguments'}: it takes two files: sweep notebook.ipynb sweep.yaml"]
        )
    plan = read_sweep(*map(Path, arguments))
    try:
        import papermill  # noqa: F401
    except ImportError:
        raise ConfigError(
            ["papermill, which runs the notebooks, is not installed: pip install papermill ipykernel"]
        ) from None
    try:
        return run(plan)
    except OSError as error:
        print(f"{plan.folder}: {error.strerror or error}; make room there, or set output_dir", file=sys.stderr)
        return FAILED


def run(plan: Sweep) -> int:
    """Runs what is not finished yet, and writes and prints the tables; returns the exit code."""
    print(f"{len(plan.trials)} runs of {plan.notebook}, in {plan.folder}", flush=True)
    if plan.warning:
        print(f"warning: {plan.warning}", file=sys.stderr, flush=True)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone(plan.folder), Stop() as stop:
        for number, trial in enumerate(plan.trials, 1):
            if stop.asked:
                break
            print(f"\n{number} of {len(plan.trials)}: {_told(trial)}", flush=True)
            record = Record.read(plan.folder / trial.name)
            if record.status == "finished":
                print("   finished before")
                continue
            status = _run(plan, trial, record, stop)
            write_tables(plan)
            if status == "under way":
                break
    found = outcomes(plan)
    print(f"\n{write_tables(plan)}")
    if any(one.status in ("under way", "waiting") for one in found):
        print("\nnot all have finished: the same command goes on")
        return PREEMPTED
    return FAILED if any(one.status == "failed" for one in found) else OK


def _told(trial: Trial) -> str:
    return ", ".join(f"{name}={value}" for name, value in trial.swept.items()) or "all as fixed"


def _run(plan: Sweep, trial: Trial, record: Record, stop: Stop) -> str:
    folder = plan.folder / trial.name
    if record.status != "waiting":
        print("   failed before; once more" if record.status == "failed" else "   was under way; goes on", flush=True)
    record = record.begin(folder, trial)
    error = _execute(plan.notebook, trial, folder, stop)
    if (folder / NOTEBOOK_FILE).is_file():
        write_html(folder / NOTEBOOK_FILE)
    # A run that was stopped is neither finished nor failed: it goes on next time.
    stopped = preemption_of(folder / NOTEBOOK_FILE) if error is None else stop.asked
    record = record.end(folder, "under way" if stopped else "finished" if error is None else "failed", error or "")
    print(f"   {record.status} after {record.seconds / 60:.1f} min")
    if record.status == "failed":
        print(f"   {record.error}\n   see {folder / NOTEBOOK_FILE} and {LOG_FILE} beside it", flush=True)
    return record.status


def _execute(notebook: Path, trial: Trial, folder: Path, stop: Stop) -> str | None:
    """Runs the notebook in a new kernel of this Python, whatever it names; returns what it failed with."""
    import papermill
    from jupyter_client.manager import AsyncKernelManager

    logging.getLogger("papermill").setLevel(logging.ERROR)  # it warns of parameters that are not in the cell
    kernels: list[Any] = []
    failures: list[str] = []

    def work() -> None:
        given = {**trial.parameters, "output_dir": str(folder), "run_name": trial.name}
        try:
            with (folder / LOG_FILE).open("a") as log:

                class Kernel(AsyncKernelManager):
                    async def start_kernel(self, **options: Any) -> None:  # type: ignore[override]
                        await super().start_kernel(**options, stderr=log)  # what its libraries write past Python
                        kernels.append(self.provisioner)

                papermill.execute_notebook(
                    notebook, folder / NOTEBOOK_FILE, given, kernel_manager_class=Kernel, kernel_name="python3",
                    language="python", stdout_file=log, stderr_file=log, progress_bar=sys.stderr.isatty(),
                )  # fmt: skip
        except papermill.PapermillExecutionError as error:
            failures.append(f"cell [{error.exec_count}], {error.ename}: {_short(error.evalue)}")
        except Exception as error:  # a kernel that died, a disk that is full: the other runs may still do
            failures.append(f"{type(error).__name__}: {_short(str(error))}")

    stop.attend(work, kernels)
    return failures[0] if failures else None


def _short(text: str) -> str:
    """The first and the last line of an error, which hold what happened and what to do."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no text)"]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            problem = f"{folder}: a sweep is running there already, PID {lock.read() or 'unknown'}"
            raise ConfigError([f"{problem}; wait for it, or set another output_dir"]) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
