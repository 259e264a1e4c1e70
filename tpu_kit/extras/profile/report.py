"""The profile of a step as text and as a picture, with advice.

Advice follows from a figure of the trace, the recordings or the compiled program. Its gain is an upper bound: the
growth of tokens per second if the named part of a step took no time.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kit.config import text_tables
from tpu_kit.config.loader import BatchPlan, TrainConfig, batch_arithmetic
from tpu_kit.extras.profile.recorder import Recording
from tpu_kit.extras.profile.timeline import PHASES, Trace
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.compiler.compile_check import Compiled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS, LONGEST_NAME = 10, 60
_PREDICTED = "predicted from the compiled program, not measured"

INPUT, TRACING, HOST, EXPOSED = 0.05, 0.1, 0.05, 0.1
"""Shares of a step above which there is advice: waiting for input, tracing, logging, exposed collectives."""
EAGER = 0.35
"""The same for tracing off XLA, which includes the profiler's own time per operation."""
UNEVEN, FILL = 0.15, 0.85
"""The same for the delay of the slowest replica; and the share of tokens in the rows below which there is advice."""


@dataclass(frozen=True)
class Advice:
    """An advised change.

    Attributes:
        rule: the part of a step, or the problem.
        figure: the reason, with its figure.
        change: a parameter with its value, as on the command line, or an action.
        gain: upper bound of the growth of tokens per second, 0.1 for 10 %.
    """

    rule: str
    figure: str
    change: str
    gain: float

    def __str__(self) -> str:
        return f"{self.change}: {self.figure} (at most {self.gain:+.0%} tokens/s)"


@dataclass(frozen=True)
class Cost:
    """The time of an operation in a step.

    Attributes:
        name: of the operation.
        source: file and line, or layer; empty if the trace has none.
        kind: kind of work, as `compile_check.Operation.kind`.
        seconds: per step and device.
    """

    name: str
    source: str
    kind: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a step goes; `str` formats its tables, and a notebook displays its timeline.

    Attributes:
        config: the run, with a number for every "auto".
        device: the device of the run, or of the prediction.
        replicas: number of shards of the batch.
        split: seconds of a step, by `timeline.BUCKETS`.
        costs: times of the operations, in no order.
        recordings: recordings of the replicas; empty if the profile is predicted.
        trace: trace of rank 0; None if predicted.
        compiled: the program; None if measured.
        folder: the folder with the trace; None if predicted.
    """

    config: TrainConfig
    device: str
    replicas: int
    split: Mapping[str, float]
    costs: tuple[Cost, ...]
    recordings: tuple[Recording, ...] = ()
    trace: Trace | None = None
    compiled: Compiled | None = None
    folder: Path | None = None

    @property
    def batch(self) -> BatchPlan:
        """The sizes of an update's batch."""
        return batch_arithmetic(self.config, self.replicas)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.split.values())

    @cached_property
    def advice(self) -> list[Advice]:
        """The advice, largest gain first."""
        advice = [*_slow_parts(self), *(_of_recordings(self) if self.recordings else ())]
        return sorted(advice, key=lambda one: -one.gain)

    def share(self, bucket: str) -> float:
        """The share of a step that a bucket of `BUCKETS` takes, 0 to 1."""
        return self.split[bucket] / self.seconds

    def gain(self, seconds: float) -> float:
        """The growth of tokens per second if a step were shorter by `seconds`, 0.1 for 10 %."""
        return self.seconds / (self.seconds - seconds) - 1

    def __str__(self) -> str:
        how = f"measured over {self.trace.steps} steps" if self.trace else _PREDICTED
        rate = self.batch.tokens_per_update / self.seconds
        name = self.config.model.name
        lines = [f"{name} on {self.device}: {1000 * self.seconds:.1f} ms a step, {rate:,.0f} tokens/s, {how}"]
        for title, rows in _tables(self).items():
            lines += ["", title, text_tables.to_text(rows)]
        lines += ["", *_notes(self), ""]
        lines += ["Advice, the largest gain first:" if self.advice else "Advice: none; no rule found a loss"]
        return "\n".join([*lines, *(f"  {number}. {one}" for number, one in enumerate(self.advice, 1))])

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        _timeline(self).savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _tables(p: Profile) -> dict[str, text_tables.Rows]:
    """Returns the rows of the tables by title, without empty tables."""
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
            {"operation": _short(one.name), "kind": one.kind, "ms": f"{1000 * one.seconds:.3f}", "source": one.source}
            for one in sorted(p.costs, key=lambda one: -one.seconds)[:MOST_ROWS]
        ],
        "Replicas": [
            {"replica": one.rank, "peak GiB": "-" if one.peak_bytes is None else f"{one.peak_bytes / GIB:.2f}"}
            | {f"{name} ms": f"{1000 * seconds / one.steps:.1f}" for name, seconds in one.phases.items()}
            for one in p.recordings
        ],
    }
    return {title: rows for title, rows in rows_of.items() if rows}


def _short(name: str) -> str:
    """Shortens a name for a table: names of GPU kernels have up to hundreds of characters."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def _notes(p: Profile) -> list[str]:
    """Returns the lines below the tables."""
    if p.compiled is not None:
        return ["times are from the TPU compiler's cost model, not measured", f"the step {p.compiled}"]
    first = p.recordings[0]
    counts = ", ".join(f"{count} {name}" for name, count in first.counts.items())
    return [
        f"rows are {first.fill:.1%} full; the first step took {first.first_seconds:.1f} s",
        *([f"in {first.steps} steps: {counts}"] if counts else []),  # a CPU has no counters
        f"the trace and profile.png are in {p.folder}",
    ]


def _timeline(p: Profile) -> Figure:
    """Returns a figure of the host's phases and the devices' operations in the first step.

    For a predicted profile, it shows the parts of a step one after another.
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


# ------------------------------------------------------------------------------------------------------------- advice


def _slow_parts(p: Profile) -> Iterator[Advice]:
    """Yields advice on the parts of a step in which the device does not compute, if they take too large a share."""
    optim, batch = p.config.optim, p.batch
    fixed = " optim.global_batch_size=null" if "optim.global_batch_size" in p.config.sources else ""
    more_rows = f"optim.batch_size={2 * batch.batch_size}{fixed} or more, if it fits"
    on_xla = not p.recordings or p.recordings[0].device_type in ("tpu", "xla-cpu")
    unrolled = on_xla and optim.scan_layers == "off"
    cores = "give this host more free processor cores: a thread per replica makes the batches"
    passes = f"optim.gradient_accumulation={2 * batch.gradient_accumulation}{fixed}"
    for bucket, least, change in (
        ("input wait", INPUT, cores if p.config.distill.files is None else "distill.files=FOLDER on a local disk"),
        ("host tracing", TRACING if on_xla else EAGER, "optim.scan_layers=on" if unrolled else more_rows),
        ("host code", HOST, f"tracking.logging_steps={max(10, 10 * p.config.tracking.logging_steps)}"),
        ("exposed collectives", EXPOSED, more_rows if p.config.launch.mesh is not None else passes),
    ):
        if p.share(bucket) > least:
            spent = f"{1000 * p.split[bucket]:.1f} of {1000 * p.seconds:.1f} ms"
            figure = f"{bucket} takes {p.share(bucket):.0%} of a step ({spent})"
            yield Advice(bucket, figure, change, p.gain(p.split[bucket]))


def _of_recordings(p: Profile) -> Iterator[Advice]:
    """Yields advice on recompilation, host reads, padding and slow replicas, from a measured profile's recordings."""
    first, data = p.recordings[0], p.config.data
    if count := first.counts.get("compiles", 0):
        shapes = "keep the shapes of the step's inputs; pass values that change by step as tensors"
        change = shapes if data.packing else "data.packing=true"
        figure = f"{count} programs were compiled in {first.steps} steps of the steady state"
        yield Advice("recompilation", figure, change, p.gain(p.split["host tracing"]))
    if (reads := first.counts.get("fallbacks", 0) / first.steps) >= 1:
        figure, change = f"the host reads or computes {reads:.0f} values of each step", "compute them on the device"
        yield Advice("host reads", figure, change, p.gain(p.split["host tracing"]))
    if (fill := min(one.fill for one in p.recordings)) < FILL:
        change = f"data.max_length={2 * data.max_length}" if data.packing else "data.packing=true"
        figure = f"only {fill:.0%} of the rows' positions hold tokens; padding costs as much"
        yield Advice("padding", figure, change, 1 / fill - 1)
    times = {one.rank: one.phases["step"] / one.steps for one in p.recordings}
    rank, least = max(times, key=lambda one: times[one]), min(times.values())
    if (later := times[rank] - least) > max(UNEVEN * least, 0.05 * p.seconds):
        figure = (
            f"replica {rank} takes {1000 * times[rank]:.1f} ms to send and trace a step, another {1000 * least:.1f}"
        )
        change = "python -m tpu_kit verify, which measures each core; end other programs on this host"
        yield Advice("slow replica", figure, change, p.gain(min(later, 0.9 * p.seconds)))
