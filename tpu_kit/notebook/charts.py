"""What notebook 3 shows of plans: tables, and a bar for each setting against the chip's limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tpu_kit.config.loader import batch_arithmetic
from tpu_kit.hardware.chips import GIB
from tpu_kit.models.architecture import read_shape
from tpu_kit.notebook.display import picture, show, show_table
from tpu_kit.planning.memory_estimate import estimate
from tpu_kit.planning.planner import Plan, Setting
from tpu_kit.planning.report import plan_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_BARS, MOST_PARTS = 12, 6
_COLOURS = ("#6b7280", "#2563eb", "#60a5fa", "#0d9488", "#a3e635", "#f59e0b", "#d6d3d1")


def show_plans(plans: Sequence[Plan]) -> None:
    """One row for each slice: does it fit, with which settings, how long, how much."""
    show_table([plan_row(one) for one in plans])


def show_memory(plan: Plan) -> None:
    """What the pick's peak is made of, largest part first."""
    parts = sorted(plan.parts.items(), key=lambda part: -part[1])
    rows = [(name.replace("_", " "), size) for name, size in parts if size >= plan.peak_bytes / 1000]
    rows += [("peak", plan.peak_bytes), (f"a device of {plan.where.name} has", plan.where.limit)]
    show_table(
        [
            {"part": name, "GiB": f"{size / GIB:.3f}", "of the device": f"{size / plan.where.limit:.1%}"}
            for name, size in rows
        ]
    )


def show_settings(plan: Plan) -> None:
    """A bar for every setting, its parts stacked, against what the device has; the pick is marked."""
    settings = sorted(plan.settings, key=lambda one: -one.peak)
    over = [one for one in settings if one.peak > plan.where.limit]
    # Of those beyond the limit the two smallest.
    shown = [one for one in settings if one not in over[:-2]][-MOST_BARS:]
    shown.sort(key=lambda one: (one.config.optim.remat, one.time.seconds), reverse=True)
    fitting = sum(one.peak <= plan.where.limit * (1 - plan.free) for one in plan.settings)
    text = f"{fitting} of {len(plan.settings)} settings fit {plan.where.name}, {plan.free:.0%} of its memory kept free"
    show(picture(_bars(plan, shown), text))


def _bars(plan: Plan, settings: Sequence[Setting]) -> Figure:
    from matplotlib.figure import Figure

    shape = read_shape(plan.config.model)
    chip = plan.where.chip
    found = [dict(estimate(one.config, num_replicas=one.replicas, shape=shape, chip=chip).parts) for one in settings]
    figure = Figure(figsize=(10, 1.7 + 0.36 * max(3, len(settings))), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(settings)
    for place, (name, sizes) in enumerate(_largest_parts(found).items()):
        axes.barh(range(len(settings)), sizes, left=left, label=name, color=_COLOURS[place], height=0.72)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    limit = plan.where.limit / GIB
    axes.axvline(limit, color="black", zorder=3, label=f"limit {limit:.2f} GiB")
    axes.axvline(
        limit * (1 - plan.free), color="black", linestyle=":", zorder=3, label=f"less {plan.free:.0%} kept free"
    )
    wide, mark = 1.5 * limit, "the pick" if plan.fits else "the nearest"
    for row, (one, end) in enumerate(zip(settings, left, strict=True)):
        text = f"{end:.1f} GiB, {_rate(one):,.0f} tokens/s"
        picked = one.config == plan.config
        beyond = end > 0.75 * wide  # no room beside it
        axes.text(
            0.99 * wide if beyond else end + 0.008 * wide, row, f"{text}: {mark}" if picked else text, fontsize=8,
            va="center", ha="right" if beyond else "left", fontweight="bold" if picked else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0}, zorder=4,
        )  # fmt: skip
    axes.set(xlim=(0, wide), xlabel="GiB of one device, by formula", title=f"Settings on {plan.where.name}")
    axes.set_yticks(range(len(settings)), [_label(one) for one in settings], fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _rate(one: Setting) -> float:
    return batch_arithmetic(one.config, one.replicas).tokens_per_update / one.time.seconds


def _label(one: Setting) -> str:
    batch = batch_arithmetic(one.config, one.replicas)
    rows = f"{batch.batch_size} row{'s' if batch.batch_size > 1 else ''}"
    passes = f"{batch.gradient_accumulation} pass{'es' if batch.gradient_accumulation > 1 else ''}"
    return f"{rows}, {passes}, remat={one.config.optim.remat}"


def _largest_parts(found: Sequence[Mapping[str, int]]) -> dict[str, list[float]]:
    """GiB by part and setting: base weights, the parts that are the largest anywhere, and all the rest as one."""
    most = {name: max(parts.get(name, 0) for parts in found) for parts in found for name in parts}
    names = sorted(most, key=lambda name: (name != "base_weights", -most[name]))[:MOST_PARTS]
    stacked = {name.replace("_", " "): [parts.get(name, 0) / GIB for parts in found] for name in names}
    rest = [sum(size for name, size in parts.items() if name not in names) / GIB for parts in found]
    return {**stacked, "the rest": rest}
