"""What the runs of a sweep came to: how far each is, by its run.json, and the sorted table as text, CSV and HTML."""

from __future__ import annotations

import csv
import html
import json
import math
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from tpu_kit import chips
from tpu_kit.machine import Machine
from tpu_kit.tracking import METRICS_FILE, best_evaluation, read_metrics
from tpu_kit.trials import Sweep, Trial

Status = Literal["waiting", "under way", "finished", "failed"]

NOTEBOOK_FILE, PAGE_FILE, LOG_FILE = "notebook.ipynb", "notebook.html", "log.txt"
_RECORD_FILE = "run.json"


@dataclass(frozen=True)
class Record:
    """How far a run is; kept in its folder.

    Attributes:
        status: waiting until it is begun, under way until it is seen to end.
        seconds: spent on it, in all its attempts.
        started: when the last attempt began, seconds since 1970.
        error: what it failed with.
        parameters: the notebook's.
    """

    status: Status = "waiting"
    seconds: float = 0.0
    started: float = 0.0
    error: str = ""
    parameters: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Reads it; that of a run which has not begun where there is none."""
        path = folder / _RECORD_FILE
        return cls(**json.loads(path.read_text())) if path.is_file() else cls()

    def begin(self, folder: Path, trial: Trial) -> Record:
        """The record of a new attempt, written."""
        lost = 0.0
        if self.status == "under way" and self.started:  # killed: it lived until its log or its metrics were written
            files = [folder / name for name in (METRICS_FILE, LOG_FILE, NOTEBOOK_FILE)]
            lost = max([0.0, *(file.stat().st_mtime - self.started for file in files if file.is_file())])
        return Record("under way", self.seconds + lost, time.time(), "", trial.parameters)._write(folder)

    def end(self, folder: Path, status: Status, error: str) -> Record:
        """The record of an attempt that has ended, written."""
        seconds = self.seconds + time.time() - self.started
        return replace(self, status=status, seconds=seconds, started=0.0, error=error)._write(folder)

    def _write(self, folder: Path) -> Record:
        folder.mkdir(exist_ok=True)
        part = folder / f"{_RECORD_FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1))
        os.replace(part, folder / _RECORD_FILE)
        return self


@dataclass(frozen=True)
class Outcome:
    """A row of the table.

    Attributes:
        trial: the run.
        status: how far it is.
        eval_loss: of the best evaluation, whose weights are the run's adapter, nats per token.
        eval_step: the updates that these weights have.
        accuracy: of the tuned model's answers to held-out questions, 0 to 1.
        tokens_per_second: median over the run's log lines, without the first, which holds the compilation.
        hours: that its notebook took, all attempts together.
        dollars: hours times the price of the machine.
        error: what it failed with.
    """

    trial: Trial
    status: Status
    eval_loss: float | None
    eval_step: int | None
    accuracy: float | None
    tokens_per_second: float | None
    hours: float | None
    dollars: float | None
    error: str

    def row(self) -> dict[str, Any]:
        """By column, as the tables have it."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return {**self.trial.swept, **figures, "status": self.status}


_FIGURES = ("eval_loss", "eval_step", "accuracy", "tokens_per_second", "hours", "dollars")


def outcomes(plan: Sweep) -> list[Outcome]:
    """All runs, the best evaluation first; those without one after them, and those that failed or wait at the end."""
    price = plan.dollars_per_hour if plan.dollars_per_hour is not None else _list_price()
    found = [_outcome(trial, plan.folder / trial.name, price) for trial in plan.trials]
    last = {"finished": 0, "under way": 1, "failed": 2, "waiting": 3}
    return sorted(found, key=lambda one: (last[one.status], math.inf if one.eval_loss is None else one.eval_loss))


def _outcome(trial: Trial, folder: Path, price: float | None) -> Outcome:
    record, metrics = Record.read(folder), read_metrics(folder)
    best = best_evaluation(metrics)
    rates = [one["tokens_per_second"] for one in metrics if one["kind"] == "train"]
    accuracy = best.get("accuracy") if best else None
    if (path := folder / "eval.json").is_file():
        accuracy = json.loads(path.read_text())["tuned"]["accuracy"]["share"]
    hours = record.seconds / 3600 if record.seconds else None
    return Outcome(
        trial=trial,
        status=record.status,
        eval_loss=best["loss"] if best else None,
        eval_step=best["step"] if best else None,
        accuracy=accuracy,
        tokens_per_second=statistics.median(rates[1:] or rates) if rates else None,
        hours=hours,
        dollars=None if hours is None or price is None else hours * price,
        error=record.error,
    )


def _list_price() -> float | None:
    """Dollars per hour of this machine's TPU on demand; None where there is none."""
    found = Machine().tpus()
    price = chips.chip(found[0]).price if found else None
    return price.on_demand * len(found) if price else None


def write_tables(plan: Sweep) -> str:
    """Writes results.csv and results.html, each at once or not at all; returns the table as text."""
    found = outcomes(plan)
    names = list(dict.fromkeys(name for trial in plan.trials for name in trial.swept))
    columns = [*names, *_FIGURES, "status"]
    rows = [one.row() for one in found]
    part = plan.folder / "results.csv.part"
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*columns, "folder", "error"])
        writer.writeheader()
        for one, row in zip(found, rows, strict=True):
            writer.writerow({**row, "folder": one.trial.name, "error": one.error})
    os.replace(part, plan.folder / "results.csv")
    part = plan.folder / "results.html.part"
    part.write_text(_page(plan, columns, found))
    os.replace(part, plan.folder / "results.html")

    cells = [columns, *([_cell(name, row.get(name)) for name in columns] for row in rows)]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, wide, strict=True)) for row in cells]
    errors = [f"{one.trial.name}: {one.error}" for one in found if one.status == "failed"]
    return "\n".join([*lines, *errors, f"tables in {plan.folder}: results.html, results.csv"])


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    formats = {"accuracy": ".1%", "tokens_per_second": ",.0f", "hours": ".3f", "dollars": ".2f", "eval_loss": ".4f"}
    return f"{value:{formats[name]}}" if name in formats else str(value)


def _page(plan: Sweep, columns: list[str], found: list[Outcome]) -> str:
    """A page that needs nothing but a browser: the table, each row with a link to its notebook."""
    fixed = {name: value for name, value in plan.trials[0].parameters.items() if name not in plan.trials[0].swept}
    lines = []
    for one in found:
        row = one.row()
        cells = [html.escape(_cell(name, row.get(name))) for name in columns]
        pages = [name for name in (PAGE_FILE, NOTEBOOK_FILE) if (plan.folder / one.trial.name / name).is_file()]
        if pages:
            cells[-1] = f'<a href="{quote(one.trial.name)}/{pages[0]}">{cells[-1]}</a>'
        if one.error:
            cells[-1] += f"<br><small>{html.escape(one.error)}</small>"
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in columns)
    same = html.escape(", ".join(f"{name}={value}" for name, value in fixed.items()) or "nothing")
    return _PAGE.format(title=html.escape(f"{plan.folder.name}: {plan.notebook.name}"), same=same, head=head,
                        rows="\n".join(lines), time=time.strftime("%Y-%m-%d %H:%M"))  # fmt: skip


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em; color: #222 }}
table {{ border-collapse: collapse }}
th, td {{ padding: .3em .9em; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top }}
th {{ border-bottom: 2px solid #555 }}
td:last-child, th:last-child {{ text-align: left }}
tr:nth-child(2) {{ background: #e9f7ef }}
</style>
<h1>{title}</h1>
<p>The lowest loss on held-out rows first. The same in every run: {same}. Written {time}.</p>
<table>
<tr>{head}</tr>
{rows}
</table>
</html>
"""
