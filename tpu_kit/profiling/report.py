"""A profile as text for a terminal, and as HTML with three pictures for a notebook and for report.html."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from tpu_kit.hardware.chips import GIB, MIB
from tpu_kit.planning import tables
from tpu_kit.planning.cost import factors
from tpu_kit.profiling.timeline import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tpu_kit.profiling.profile import Profile

MOST_COSTS, MOST_LAYERS, MOST_BUFFERS = 10, 8, 6
POWER_USAGE_EFFECTIVENESS = 1.1
"""Energy of the data centre over that of its machines: Google's fleet, https://datacenters.google/efficiency."""
GRAMS_PER_KWH = 480.0
"""CO2 equivalents of the world's electricity: Ember, Global Electricity Review 2024, of 2023."""
COLOURS = ("#2563eb", "#f59e0b", "#dc2626", "#0d9488", "#a3e635", "#d6d3d1")


def to_text(p: Profile) -> str:
    """The tables of a profile."""
    lines = [_headline(p)]
    for title, rows in _tables(p).items():
        lines += ["", title, tables.to_text(rows)]
    lines += [
        "",
        *_notes(p),
        "",
        "Advice, the largest gain first:" if p.advice else "Advice: none; no rule found a loss",
    ]
    lines += [f"  {number}. {one}" for number, one in enumerate(p.advice, 1)]
    return "\n".join(lines)


def to_html(p: Profile) -> str:
    """The tables and the pictures, each with a text for readers without them."""
    parts = [f"<h3>{html.escape(_headline(p))}</h3>"]
    for title, figure in pictures(p):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append(
            f"<h4>{html.escape(title)}</h4><img alt='{html.escape(title)}' src='data:image/png;base64,{data}'>"
        )
    parts += [f"<h4>{html.escape(title)}</h4>{tables.to_html(rows)}" for title, rows in _tables(p).items()]
    parts += [f"<p>{html.escape(note)}</p>" for note in _notes(p)]
    advised = "".join(f"<li>{html.escape(str(one))}</li>" for one in p.advice) or "<li>none; no rule found a loss</li>"
    return "\n".join([*parts, f"<h4>Advice</h4><ol>{advised}</ol>"])


def page(p: Profile) -> str:
    """A whole HTML document."""
    title = html.escape(f"Profile of {p.config.run_name}")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><body>{to_html(p)}</body></html>"
    )


def _headline(p: Profile) -> str:
    how = f"measured over {p.trace.steps} steps" if p.trace else "predicted from the compiled program, not measured"
    rate = p.batch.tokens_per_update / p.seconds
    return f"{p.config.model.name} on {p.device}: {1000 * p.seconds:.1f} ms a step, {rate:,.0f} tokens/s, {how}"


def _tables(p: Profile) -> dict[str, tables.Rows]:
    """The rows of each table by its title."""
    layers: dict[str, float] = {}
    for one in p.costs:
        place = (one.name.rpartition("/")[0] if p.compiled else one.source) or "(not in a module)"
        layers[place] = layers.get(place, 0.0) + one.seconds
    sizes = sorted(p.memory.items(), key=lambda item: -item[1])
    found: dict[str, list[dict[str, object]]] = {
        "Time of a step": [
            {"part": name, "ms": f"{1000 * seconds:.2f}", "share": f"{p.share(name):.1%}"}
            for name, seconds in p.split.items()
        ],
        "Layers that cost most": [
            {"layer": name, "ms": f"{1000 * seconds:.3f}", "share": f"{seconds / sum(layers.values()):.0%}"}
            for name, seconds in sorted(layers.items(), key=lambda item: -item[1])[:MOST_LAYERS]
        ],
        "Operations that cost most": [
            {"operation": one.name, "kind": one.kind, "ms": f"{1000 * one.seconds:.3f}",
             "of the roofline": "-" if one.roofline is None else f"{one.roofline:.0%}", "source": one.source}
            for one in p.costs[:MOST_COSTS]
        ],
        f"Memory of a device at its peak, by {'the compiler' if p.compiled else 'formula'}": [
            {"class": name, "MiB": f"{size / MIB:,.1f}"} for name, size in sizes if size >= MIB / 10
        ],
        "Largest buffers": [
            {"buffer": one.name[:60], "kind": one.kind, "MiB": f"{one.bytes / MIB:,.1f}", "source": one.source}
            for one in (p.compiled.largest_buffers if p.compiled else ())[:MOST_BUFFERS]
        ],
        "Collectives of a step": [
            {"kind": one.kind, "count": one.count, "MB sent": f"{one.moved / 1e6:.2f}",
             "synchronous": f"{one.transfer.synchronous:.0%}"}
            for one in (p.compiled.collectives if p.compiled else ())
        ],
        "Replicas": [
            {"replica": one.rank, "peak GiB": "-" if one.peak_bytes is None else f"{one.peak_bytes / GIB:.2f}"}
            | {f"{name} ms": f"{1000 * seconds / max(1, one.steps):.1f}" for name, seconds in one.phases.items()}
            for one in p.recordings
        ],
    }  # fmt: skip
    return {title: rows for title, rows in found.items() if rows}


def _notes(p: Profile) -> list[str]:
    notes = []
    if p.recordings:
        first = p.recordings[0]
        notes.append(f"rows are {first.fill:.1%} full; the first step took {first.first_seconds:.1f} s")
        counts = ", ".join(f"{count} {name}" for name, count in first.counts.items())
        notes.append(f"in {first.steps} steps: {counts or 'no counters on this device'}")
        notes += [*first.causes, *(f"reads the device: {line}" for line in first.reads)]
    else:
        assumed = ", ".join(f"{name} {value:g}" for name, value in factors().items())
        notes.append(f"times are a roofline at assumed efficiencies: {assumed}")
    notes.append(energy(p))
    if p.folder:
        notes.append(f"trace and report.html are in {p.folder}")
    return notes


def energy(p: Profile) -> str:
    """Estimates energy and carbon of a million tokens."""
    if p.chip is None or p.chip.watts is None:
        return f"energy: not estimated; the power of {p.chip.name if p.chip else p.device} is not published"
    joules = p.chip.watts * p.chips * p.seconds / p.batch.tokens_per_update * 1e6
    hours = joules / 3.6e6 * POWER_USAGE_EFFECTIVENESS
    return (
        f"energy, an estimate: {hours:.3g} kWh and {hours * GRAMS_PER_KWH:.3g} g CO2e for a million tokens, from "
        f"{p.chip.watts:g} W a chip ({p.chip.sources['watts']}), {POWER_USAGE_EFFECTIVENESS:g} times that in the data "
        f"centre, and {GRAMS_PER_KWH:g} g/kWh"
    )


def pictures(p: Profile) -> Iterator[tuple[str, Figure]]:
    """The timeline of a step, the time by kind of operation, and the memory over a step."""
    yield "Timeline of a step", _timeline(p)
    kinds: dict[str, float] = {}
    for one in p.costs:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + 1000 * one.seconds
    yield "Time by kind of operation", _bars(kinds, "ms of a step, all streams of a device")
    if p.trace and p.trace.memory:
        figure, axes = _axes(2.5)
        begin, end = p.trace.first()
        points = [(1000 * (at - begin), size / MIB) for at, size in p.trace.memory if begin <= at <= end]
        axes.plot(*zip(*points, strict=True), drawstyle="steps-post")
        axes.set(xlabel="ms", ylabel="MiB allocated")
        yield "Memory over a step", figure
    else:
        sizes = {name: size / MIB for name, size in p.memory.items() if size >= MIB / 10}
        yield "Memory at the peak of a step", _bars(sizes, "MiB of a device")


def _timeline(p: Profile) -> Figure:
    """The phases of the host and the operations of each device in the first step; predicted, one part after another."""
    rows: dict[str, list[tuple[float, float]]] = {}
    if p.trace is None:
        ends = zip(p.split.items(), accumulate(p.split.values()), strict=True)
        rows = {name: [(1000 * (end - taken), 1000 * taken)] for (name, taken), end in ends}
    else:
        rows = {phase: [] for phase in PHASES}
        begin, end = p.trace.first()
        for one in p.trace.events:
            if (start := max(one.start, begin)) < (stop := min(one.end, end)):
                rows.setdefault(one.device.removeprefix("/device:") or one.name, []).append(
                    (1000 * (start - begin), 1000 * (stop - start))
                )
    figure, axes = _axes(0.3 * len(rows) + 0.7)
    for place, bars in enumerate(rows.values()):
        axes.broken_barh(bars, (place - 0.4, 0.8), color=COLOURS[min(place, len(COLOURS) - 1)])
    axes.set_yticks(range(len(rows)), [*rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms")
    return figure


def _bars(values: dict[str, float], label: str) -> Figure:
    figure, axes = _axes(max(1.5, 0.35 * len(values) + 0.8))
    ordered = sorted(values.items(), key=lambda item: item[1])
    bars = axes.barh([name for name, _ in ordered], [value for _, value in ordered], color=COLOURS[0])
    axes.bar_label(bars, fmt="%.1f", padding=2)
    axes.margins(x=0.15)
    axes.set(xlabel=label)
    return figure


def _axes(height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()
