"""The profile of a step as a text and as a picture."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kit.config import tables
from tpu_kit.hardware.chips import GIB
from tpu_kit.planning.compile_check import Compiled
from tpu_kit.planning.cost import factors
from tpu_kit.profiling.advice import StepTimes
from tpu_kit.profiling.timeline import PHASES, Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 10
_PREDICTED = "predicted from the compiled program, not measured"


@dataclass(frozen=True)
class Cost:
    """The time that an operation takes in a step.

    Attributes:
        name: of the operation.
        source: its file and line, or its layer; empty where the trace has none.
        kind: of the work, as `compile_check.Operation.kind`.
        seconds: of a step on one device.
    """

    name: str
    source: str
    kind: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile(StepTimes):
    """Where the time of a step goes; `str` formats its tables, and a notebook displays its timeline.

    Attributes:
        device: what it ran on, or would run on.
        costs: of the operations.
        trace: of rank 0; None if predicted.
        compiled: the program, if predicted.
        folder: with the trace; None if predicted.
    """

    device: str
    costs: tuple[Cost, ...]
    trace: Trace | None = None
    compiled: Compiled | None = None
    folder: Path | None = None

    def __str__(self) -> str:
        how = f"measured over {self.trace.steps} steps" if self.trace else _PREDICTED
        rate = self.batch.tokens_per_update / self.seconds
        name = self.config.model.name
        lines = [f"{name} on {self.device}: {1000 * self.seconds:.1f} ms a step, {rate:,.0f} tokens/s, {how}"]
        for title, rows in _tables(self).items():
            lines += ["", title, tables.to_text(rows)]
        lines += ["", *_notes(self), ""]
        lines += ["Advice, the largest gain first:" if self.advice else "Advice: none; no rule found a loss"]
        return "\n".join([*lines, *(f"  {number}. {one}" for number, one in enumerate(self.advice, 1))])

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        _timeline(self).savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _tables(p: Profile) -> dict[str, tables.Rows]:
    layers: dict[str, float] = defaultdict(float)
    for one in p.costs:
        if layer := one.name.rpartition("/")[0] if p.compiled else one.source:
            layers[layer] += one.seconds
    rows_of: dict[str, list[dict[str, object]]] = {
        "Time of a step": [
            {"part": name, "ms": f"{1000 * seconds:.2f}", "share": f"{p.share(name):.1%}"}
            for name, seconds in p.split.items()
        ],
        "Layers that cost most": [
            {"layer": name, "ms": f"{1000 * seconds:.3f}"}
            for name, seconds in sorted(layers.items(), key=lambda item: -item[1])[:MOST_ROWS]
        ],
        "Operations that cost most": [
            {"operation": one.name, "kind": one.kind, "ms": f"{1000 * one.seconds:.3f}", "source": one.source}
            for one in sorted(p.costs, key=lambda one: -one.seconds)[:MOST_ROWS]
        ],
        "Replicas": [
            {"replica": one.rank, "peak GiB": "-" if one.peak_bytes is None else f"{one.peak_bytes / GIB:.2f}"}
            | {f"{name} ms": f"{1000 * seconds / one.steps:.1f}" for name, seconds in one.phases.items()}
            for one in p.recordings
        ],
    }
    return {title: rows for title, rows in rows_of.items() if rows}


def _notes(p: Profile) -> list[str]:
    if p.compiled is not None:
        assumed = ", ".join(f"{name} {value:g}" for name, value in factors().items())
        return [f"times are a roofline at assumed efficiencies: {assumed}", f"the step {p.compiled}"]
    first = p.recordings[0]
    counts = ", ".join(f"{count} {name}" for name, count in first.counts.items())
    return [
        f"rows are {first.fill:.1%} full; the first step took {first.first_seconds:.1f} s",
        f"in {first.steps} steps: {counts or 'no counters on this device'}",
        f"the trace and profile.png are in {p.folder}",
    ]


def _timeline(p: Profile) -> Figure:
    """Draws the phases of the host and the operations of each device in the first step.

    A predicted profile has one part after another instead.
    """
    from matplotlib.figure import Figure

    rows: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    if p.trace is None:
        ends = zip(p.split.items(), accumulate(p.split.values()), strict=True)
        rows = {name: [(1000 * (end - seconds), 1000 * seconds)] for (name, seconds), end in ends}
    else:
        begin, end = p.trace.first()
        for one in p.trace.events:
            if (start := max(one.start, begin)) < (stop := min(one.end, end)):
                bars = rows.setdefault(one.device.removeprefix("/device:") or one.name, [])
                bars.append((1000 * (start - begin), 1000 * (stop - start)))
    figure = Figure(figsize=(8, 0.3 * len(rows) + 0.7), layout="constrained")
    axes = figure.subplots()
    for row, bars in enumerate(rows.values()):
        axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{row}")
    axes.set_yticks(range(len(rows)), [*rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step")
    return figure
