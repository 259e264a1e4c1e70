"""Runs one notebook with many parameter sets: `python -m tpu_kit sweep notebook.ipynb sweep.yaml`.

`python -m tpu_kit sweep --help` describes the file. All parameter sets are checked before the first run. Each run has
its own kernel and folder, and the run.json there holds its state: a sweep that is started again skips finished runs,
and interrupted runs resume from their newest checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import html
import itertools
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from tpu_kit.config.fields import closest, show
from tpu_kit.config.loader import ConfigError, TrainConfig, read_yaml
from tpu_kit.hardware import chips
from tpu_kit.hardware.machine import Machine
from tpu_kit.notebook.runner import FAILED, OK, PREEMPTED, Accepts, Stop, execute, preemption_of
from tpu_kit.planning import tables
from tpu_kit.storage import atomic
from tpu_kit.storage.output_location import find_place
from tpu_kit.training.metrics import METRICS_FILE, best_evaluation, read_metrics

NOTEBOOK_FILE, PAGE_FILE, LOG_FILE, _RECORD_FILE = "notebook.ipynb", "notebook.html", "log.txt", "run.json"
KEYS = ("fixed", "grid", "runs", "dollars_per_hour", "output_dir")
_NAME_LENGTH = 60
_FIGURES = ("eval_loss", "eval_step", "accuracy", "tokens_per_second", "hours", "dollars")

Status = Literal["waiting", "under way", "finished", "failed"]


# ------------------------------------------------------------------------------------------------------- parameter sets


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: the name of its folder: the swept parameters and a digest of all parameters.
        swept: the parameters that differ between runs.
        parameters: all parameters of the notebook, without those that the sweep sets itself.
    """

    name: str
    swept: Mapping[str, Any]
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        notebook: the notebook.
        folder: holds the tables, and a folder per run.
        warning: why the folder may be lost, and what to do; empty if it is safe.
        trials: the runs, in order.
        dollars_per_hour: price of the machine; None if the file names none.
    """

    notebook: Path
    folder: Path
    warning: str
    trials: Sequence[Trial]
    dollars_per_hour: float | None


def read_sweep(notebook: Path, path: Path) -> Sweep:
    """Reads and checks a sweep, without running or writing anything.

    Raises:
        ConfigError: all problems of the file, of the notebook and of the parameters of any run.
    """
    for file in (notebook, path):
        if not file.is_file():
            raise ConfigError([f"{file}: no such file; give the notebook and the sweep's YAML file"])
    values = read_yaml(path)
    problems = list(_wrong_keys(values))
    if problems:
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    fixed, grid, listed = values.get("fixed") or {}, values.get("grid") or {}, values.get("runs") or []
    combinations = [dict(zip(grid, chosen, strict=True)) for chosen in itertools.product(*grid.values())]
    sets = [{**fixed, **one} for one in [*(combinations if grid else []), *listed]]
    accepts = Accepts.of(notebook)
    if not accepts.configures and "output_dir" not in accepts.own:
        advice = "give it an output_dir parameter and write there"
        raise ConfigError([f"{notebook}: takes no output_dir, so its runs would overwrite each other; {advice}"])
    # A problem that all runs share is reported once.
    problems = list(dict.fromkeys(problem for one in sets for problem in accepts.problems(one)))
    if again := [show(one) for number, one in enumerate(sets) if one in sets[:number]]:
        problems.append(f"{path}: {again[0]} is given twice; remove one of them")
    if problems:
        raise ConfigError(problems)
    place = find_place(TrainConfig(run_name=path.stem, output_dir=values.get("output_dir")))
    if "://" in place.output_dir:
        raise ConfigError([f"{path}: output_dir={place.output_dir}: notebooks and tables need a folder; name one"])
    same = {name for name in sets[0] if all(name in one and one[name] == sets[0][name] for one in sets)}
    trials = [_trial({name: value for name, value in one.items() if name not in same}, one) for one in sets]
    return Sweep(notebook, Path(place.output_dir), place.warning, trials, values.get("dollars_per_hour"))


def _wrong_keys(values: Mapping[str, Any]) -> Iterator[str]:
    for key in values:
        if key not in KEYS:
            near = closest(key, KEYS)
            yield f"{key}: no such key; " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(KEYS)}")
    fixed, grid, listed = values.get("fixed") or {}, values.get("grid") or {}, values.get("runs") or []
    if not isinstance(fixed, Mapping):
        yield f"fixed: {show(fixed)} is not a mapping; write name: value lines"
    if not isinstance(grid, Mapping) or not all(isinstance(choices, list) and choices for choices in grid.values()):
        yield f"grid: {show(grid)} is not a mapping of names to lists; write name: [first, second] lines"
    elif isinstance(fixed, Mapping) and (both := sorted(set(fixed) & set(grid))):
        yield f"grid: {both[0]} is in fixed too; remove one of them"
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        yield f"runs: {show(listed)} is not a list of mappings; write - {{name: value}} lines"
    if not grid and not listed:
        yield "nothing to run; give grid: {learning_rate: [1e-4, 3e-4]}, or a list of runs:"
    price = values.get("dollars_per_hour")
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float) or price < 0):
        yield f"dollars_per_hour: {show(price)} is not a price; give a number, or remove it"


def _trial(swept: Mapping[str, Any], parameters: Mapping[str, Any]) -> Trial:
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:6]
    told = re.sub(r"[^\w.=,+-]+", "_", ",".join(f"{name}={value}" for name, value in swept.items()))
    return Trial("-".join(filter(None, [told[:_NAME_LENGTH], digest])), swept, parameters)


# ----------------------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Record:
    """The state of a run, kept in its folder.

    Attributes:
        status: waiting until it begins, under way until its end is recorded.
        seconds: time of all attempts.
        started: when the last attempt began, seconds since 1970; 0 if it has ended.
        error: the error of a failed run.
        parameters: of the notebook.
    """

    status: Status = "waiting"
    seconds: float = 0.0
    started: float = 0.0
    error: str = ""
    parameters: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Reads the record of a run; without one the run is waiting."""
        path = folder / _RECORD_FILE
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()

    def begin(self, folder: Path, trial: Trial) -> Record:
        """Writes and returns the record of a new attempt."""
        lost = 0.0
        if self.status == "under way" and self.started:  # killed: it ran until it last wrote its log or metrics
            files = [folder / name for name in (METRICS_FILE, LOG_FILE, NOTEBOOK_FILE)]
            lost = max([0.0, *(file.stat().st_mtime - self.started for file in files if file.is_file())])
        return Record("under way", self.seconds + lost, time.time(), "", trial.parameters)._write(folder)

    def end(self, folder: Path, status: Status, error: str) -> Record:
        """Writes and returns the record of an attempt that has ended."""
        seconds = self.seconds + time.time() - self.started
        return replace(self, status=status, seconds=seconds, started=0.0, error=error)._write(folder)

    def _write(self, folder: Path) -> Record:
        folder.mkdir(exist_ok=True)
        atomic.write_text(folder / _RECORD_FILE, json.dumps(asdict(self), indent=1))
        return self


def sweep(notebook: Path, path: Path) -> int:
    """Runs the notebook with the parameter sets of a YAML file; returns the exit code.

    Raises:
        ConfigError: see `read_sweep`; nothing has run then.
    """
    plan = read_sweep(notebook, path)
    try:
        return _run_all(plan)
    except OSError as error:
        print(f"{plan.folder}: {error.strerror or error}; make room there, or set output_dir", file=sys.stderr)
        return FAILED


def _run_all(plan: Sweep) -> int:
    """Runs the unfinished trials, and writes and prints the tables; returns the exit code."""
    print(f"{len(plan.trials)} runs of {plan.notebook}, in {plan.folder}", flush=True)
    if plan.warning:
        print(f"warning: {plan.warning}", file=sys.stderr, flush=True)
    plan.folder.mkdir(parents=True, exist_ok=True)
    with _alone(plan.folder), Stop() as stop:
        for number, trial in enumerate(plan.trials, 1):
            if stop.asked:
                break
            swept = ", ".join(f"{name}={value}" for name, value in trial.swept.items()) or "all as fixed"
            print(f"\n{number} of {len(plan.trials)}: {swept}", flush=True)
            record = Record.read(plan.folder / trial.name)
            if record.status == "finished":
                print("   finished before")
                continue
            status = _run(plan, trial, record, stop)
            write_tables(plan)
            if status == "under way":
                break
    statuses = {Record.read(plan.folder / trial.name).status for trial in plan.trials}
    print(f"\n{write_tables(plan)}")
    if statuses & {"under way", "waiting"}:
        print("\nnot all runs have finished: the same command continues")
        return PREEMPTED
    return FAILED if "failed" in statuses else OK


def _run(plan: Sweep, trial: Trial, record: Record, stop: Stop) -> str:
    folder = plan.folder / trial.name
    if record.status != "waiting":
        print("   failed before; runs again" if record.status == "failed" else "   was under way; resumes", flush=True)
    record = record.begin(folder, trial)
    given = {**trial.parameters, "output_dir": str(folder), "run_name": trial.name}
    error = execute(plan.notebook, folder / NOTEBOOK_FILE, given, stop, folder / LOG_FILE)
    # A run that was stopped is neither finished nor failed: the next sweep resumes it.
    stopped = preemption_of(folder / NOTEBOOK_FILE) if error is None else stop.asked
    status: Status = "under way" if stopped else "finished" if error is None else "failed"
    record = record.end(folder, status, _text(error) if error else "")
    print(f"   {record.status} after {record.seconds / 60:.1f} min")
    if record.status == "failed":
        print(f"   {record.error}\n   see {folder / NOTEBOOK_FILE} and {LOG_FILE} beside it", flush=True)
    return record.status


def _text(error: Exception) -> str:
    """Returns the cell and the kind of an error, with the first and the last line of its text."""
    from papermill import PapermillExecutionError

    kind, text = type(error).__name__, str(error)
    if isinstance(error, PapermillExecutionError):
        kind, text = f"cell [{error.exec_count}], {error.ename}", error.evalue
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["(no text)"]
    return f"{kind}: {lines[0] if len(lines) == 1 else f'{lines[0]} {lines[-1]}'}"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            problem = f"{folder}: another sweep is running there, PID {lock.read() or 'unknown'}"
            raise ConfigError([f"{problem}; wait for it, or set another output_dir"]) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


# --------------------------------------------------------------------------------------------------------------- tables


def results(plan: Sweep) -> list[dict[str, Any]]:
    """Reads the results of all runs: finished runs by their loss, then the others by their status.

    Returns:
        For each run its swept parameters; eval_loss (nats per token) and eval_step of the best evaluation, whose
        weights are the run's adapter; accuracy of the tuned model on held-out questions, 0 to 1; tokens_per_second, the
        median over the logs without the first, which includes compilation; hours of all attempts; dollars; status;
        folder; error.
    """
    price = plan.dollars_per_hour if plan.dollars_per_hour is not None else _list_price()
    rows = [_result(trial, plan.folder / trial.name, price) for trial in plan.trials]
    last = {"finished": 0, "under way": 1, "failed": 2, "waiting": 3}
    return sorted(
        rows, key=lambda row: (last[row["status"]], math.inf if row["eval_loss"] is None else row["eval_loss"])
    )


def _result(trial: Trial, folder: Path, price: float | None) -> dict[str, Any]:
    record, metrics = Record.read(folder), read_metrics(folder)
    best = best_evaluation(metrics)
    rates = [one["tokens_per_second"] for one in metrics if one["kind"] == "train"]
    accuracy = best.get("accuracy") if best else None
    if (path := folder / "eval.json").is_file():
        accuracy = json.loads(path.read_text())["tuned"]["accuracy"]["share"]
    hours = record.seconds / 3600 if record.seconds else None
    return {
        **trial.swept,
        "eval_loss": best["loss"] if best else None,
        "eval_step": best["step"] if best else None,
        "accuracy": accuracy,
        "tokens_per_second": statistics.median(rates[1:] or rates) if rates else None,
        "hours": hours,
        "dollars": None if hours is None or price is None else hours * price,
        "status": record.status,
        "folder": trial.name,
        "error": record.error,
    }


def _list_price() -> float | None:
    """Returns the list price per hour, on demand, of this machine's TPU in dollars; None without a TPU."""
    found = Machine().tpus()
    price = chips.chip(found[0]).price if found else None
    return price.on_demand * len(found) if price else None


def write_tables(plan: Sweep) -> str:
    """Writes results.csv and results.html, each atomically; returns the table as text."""
    import pandas as pd

    found = results(plan)
    columns = [*dict.fromkeys(name for trial in plan.trials for name in trial.swept), *_FIGURES, "status"]
    with atomic.replacing(plan.folder / "results.csv") as part:
        pd.DataFrame(found, columns=[*columns, "folder", "error"], dtype=object).to_csv(part, index=False)
    rows = [{name: _cell(name, one.get(name)) for name in columns} for one in found]
    atomic.write_text(plan.folder / "results.html", _page(plan, rows, found))
    errors = [f"{one['folder']}: {one['error']}" for one in found if one["status"] == "failed"]
    lines = [tables.to_text(rows, ">"), *errors, f"tables in {plan.folder}: results.html, results.csv"]
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    formats = {"accuracy": ".1%", "tokens_per_second": ",.0f", "hours": ".3f", "dollars": ".2f", "eval_loss": ".4f"}
    return f"{value:{formats[name]}}" if name in formats else str(value)


def _page(plan: Sweep, rows: list[dict[str, str]], found: list[dict[str, Any]]) -> str:
    """Returns a page with the table, in which each row links to its notebook."""
    fixed = {name: value for name, value in plan.trials[0].parameters.items() if name not in plan.trials[0].swept}
    linked = []
    for one, row in zip(found, rows, strict=True):
        status, folder = row["status"], one["folder"]
        pages = [name for name in (PAGE_FILE, NOTEBOOK_FILE) if (plan.folder / folder / name).is_file()]
        if pages:
            status = f'<a href="{quote(folder)}/{pages[0]}">{status}</a>'
        if one["error"]:
            status += f"<br><small>{html.escape(one['error'])}</small>"
        linked.append(row | {"status": tables.Html(status)})
    same = html.escape(", ".join(f"{name}={value}" for name, value in fixed.items()) or "nothing")
    return _PAGE.format(title=html.escape(f"{plan.folder.name}: {plan.notebook.name}"), same=same,
                        table=tables.to_html(linked), time=time.strftime("%Y-%m-%d %H:%M"))  # fmt: skip


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em; color: #222 }}
table {{ border-collapse: collapse }}
th, td {{ padding: .3em .9em; border-bottom: 1px solid #ddd }}
th {{ border-bottom: 2px solid #555 }}
tr:nth-child(2) {{ background: #e9f7ef }}
</style>
<h1>{title}</h1>
<p>Sorted by the loss on held-out rows. The same in every run: {same}. Written {time}.</p>
{table}
</html>
"""
