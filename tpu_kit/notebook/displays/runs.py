"""Displays for notebook cells: the live view of a run, and the memory, mesh and settings of a plan.

A run is in other processes; its view reads the metrics that it writes. Displays are updated in place, so that the
executed notebook has the last state.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tpu_kit.distributed.progress import ANSWERING_FILE, NO_BAR
from tpu_kit.machine.chips import GIB
from tpu_kit.notebook.kernel import Bundle, in_ipython, new_figure, picture, show, show_table
from tpu_kit.training.metrics import METRICS_FILE, read_metrics
from tpu_kit.training.outcome import BEFORE_TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpu_kit.planning.planner import Plan


@contextlib.contextmanager
def live(output_dir: str | Path, every: float = 5.0) -> Iterator[None]:
    """Shows the progress and the curves of a run while the `with` block runs, and at its end, also after an error.

    Turns off the run's own bar, because a notebook would keep every redraw. Outside IPython, only prints the first and
    last losses (`grpo`: rewards) at the end, if the block raises nothing.

    Args:
        output_dir: the run's folder.
        every: seconds between reads of the metrics.
    """
    if not in_ipython():
        yield
        show(_curves(output_dir))
        return
    from IPython.display import display

    folder, begun, stop = Path(output_dir), time.time(), threading.Event()
    bar = display(_progress(folder, begun), raw=True, display_id=True)
    plot = display(_curves(folder), raw=True, display_id=True)

    def redraw() -> None:
        bar.update(_progress(folder, begun), raw=True)
        plot.update(_curves(folder), raw=True)

    def follow() -> None:
        drawn = begun
        while not stop.wait(every):
            if (changed := max(_modified(folder / name) for name in (METRICS_FILE, ANSWERING_FILE))) > drawn:
                drawn = changed
                redraw()

    # The context names the cell of the output; a new thread has no context.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    os.environ[NO_BAR] = "1"
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        del os.environ[NO_BAR]
        redraw()


def run_figures(records: list[dict[str, Any]]) -> dict[str, str]:
    """Returns texts for display by name from a run's metrics records; {} without training records.

    The names, if the records have them, are resumed from, compiled programs, tokens/s/chip and MFU (medians), and for
    `grpo` reward (at first, at last), groups of equal rewards and seconds of an update (means). Medians, rewards and
    means leave out the first training record, unless it is the only record.
    """
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return {}
    last, warm = train[-1], train[1:] or train  # the first record includes the compilation
    figures = {"resumed from": f"step {last['resumed_from']}"} if last.get("resumed_from") else {}
    if last.get("compiles"):  # absent without a compiler
        figures["compiled programs"] = str(last["compiles"])
    for name, key, form in (("tokens/s/chip", "tokens_per_second_per_chip", ",.0f"), ("MFU", "mfu", ".1%")):
        # 0 for an update of `grpo` without trained tokens; no MFU on a CPU, whose peak is unknown.
        if values := [record[key] for record in warm if record.get(key)]:
            figures[name] = format(median(values), form)
    if rollouts := [record for record in warm if "reward" in record]:
        figures["reward"] = f"{rollouts[0]['reward']:.3g} at first, {rollouts[-1]['reward']:.3g} at last"
        flat = mean(record["frac_reward_zero_std"] for record in rollouts)
        figures["groups of equal rewards"] = f"{flat:.0%}, without effect on the model"
        parts = [mean(record[f"{part}_seconds"] for record in rollouts) for part in ("rollout", "reward", "step")]
        figures["seconds of an update"] = f"{parts[2]:.2g}: {parts[0]:.2g} to sample, {parts[1]:.2g} to judge"
    return figures


def _progress(folder: Path, begun: float) -> Bundle:
    """Returns a run's progress, or "starting: ...", as text from files changed after `begun` (seconds since 1970)."""

    def bar(share: float) -> str:
        return f"{'█' * round(40 * share):░<40}"

    records = read_metrics(folder) if _modified(folder / METRICS_FILE) > begun else []
    last = next((record for record in reversed(records) if record["kind"] == "train"), None)
    if last is None:
        return {"text/plain": "starting: the first figures come after compilation and the first logged updates"}
    step, total = last["step"], last.get("total_steps")
    left = f", {timedelta(seconds=round(last['eta_seconds']))} left" if last.get("eta_seconds") else ""
    lines = [f"{bar(step / total if total else 0)} {step} of {total or '?'} updates{left}"]
    if _modified(folder / ANSWERING_FILE) > begun:
        with contextlib.suppress(OSError, ValueError):  # the file may be removed or incomplete by now
            now = json.loads((folder / ANSWERING_FILE).read_text())
            share = now["answered"] / now["asked"]
            lines.append(f"{bar(share)} {now['answered']} of {now['asked']} answers, {now['model']}")
    figures = run_figures(records)
    if saved := sorted(folder.glob("checkpoints/step-*/manifest.json")):
        figures["newest checkpoint"] = str(saved[-1].parent)
    lines.append("; ".join(f"{name} {value}" for name, value in figures.items()))
    return {"text/plain": "\n".join(lines)}


def _curves(output_dir: str | Path) -> Bundle:
    """Returns curves of training and held-out loss (grpo: reward and accuracy) and speed; a text without metrics."""
    every = read_metrics(output_dir)
    kinds = {"train": ("train",), "eval": (BEFORE_TRAINING, "eval")}
    records = {name: [record for record in every if record["kind"] in of] for name, of in kinds.items()}
    if not any(records.values()):
        return {"text/plain": f"no metrics yet in {output_dir} ({time.strftime('%H:%M:%S')})"}
    figure, (loss, speed) = new_figure(9, 3, columns=2)
    summary, train = [], records["train"]
    rewarded = any("reward" in record for record in train)
    names = {"train": "reward", "eval": "accuracy"} if rewarded else {"train": "loss", "eval": "loss"}
    for (kind, points), marker in zip(records.items(), ".o", strict=True):
        if points := [record for record in points if names[kind] in record]:
            steps = [record["step"] for record in points]
            values = [float("nan") if (value := record[names[kind]]) is None else value for record in points]
            loss.plot(steps, values, marker=marker, label=names[kind] if rewarded else kind)
            if rewarded and kind == "eval":
                low, high = ([record[f"accuracy_{end}"] for record in points] for end in ("low", "high"))
                loss.fill_between(steps, low, high, alpha=0.2, label="its 95 % interval")
            summary.append(f"{kind} {names[kind]} {values[0]:.4f} -> {values[-1]:.4f} at step {steps[-1]}")
    for name in dict.fromkeys(key for record in records["eval"] for key in record if key.startswith("loss/")):
        points = [record for record in records["eval"] if record.get(name) is not None]  # per source of a mix
        loss.plot([one["step"] for one in points], [one[name] for one in points], "--", label=f"eval {name}")
        summary.append(f"eval {name} {points[0][name]:.4f} -> {points[-1][name]:.4f}" if points else name)
    unit = "mean over pairs" if any("logps/chosen" in record for record in train) else "nats per token"
    loss.set(xlabel="step", ylabel="reward, held-out accuracy" if rewarded else f"loss ({unit})")
    loss.legend()
    speed.plot([record["step"] for record in train], [record["tokens_per_second"] for record in train], marker=".")
    speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    return picture(figure, "; ".join(summary))


def _modified(file: Path) -> float:
    """Returns a file's modification time in seconds since 1970; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def show_memory(plan: Plan) -> None:
    """Shows the parts of the peak memory of the plan's setting, largest first, in GiB and % of a device.

    Leaves out parts below a thousandth of the peak; the last rows are the peak and the device's memory.
    """
    parts, limit = dict(sorted(plan.parts.items(), key=lambda part: -part[1])), plan.where.limit
    parts |= {"peak": plan.peak_bytes, f"a device of {plan.where.name} has": limit}
    rows = [
        {"part": name.replace("_", " "), "GiB": f"{size / GIB:.3f}", "of the device": f"{size / limit:.1%}"}
        for name, size in parts.items()
        if size >= plan.peak_bytes / 1000
    ]
    show_table(rows)


def show_mesh(plan: Plan) -> None:
    """Shows devices, tensors (singly from 1 MiB a device) and collectives of the plan's mesh, or that there is none."""
    from tpu_kit.planning.report import collective_rows, mesh_lines, tensor_rows

    if plan.where.mesh is None:
        print(f"no mesh: a replica of the model on each of {plan.where.replicas} devices of {plan.where.name}")
    else:
        print("\n".join(mesh_lines(plan)))
        show_table(tensor_rows(plan, least=2**20))
        show_table(collective_rows(plan))


def show_settings(plan: Plan) -> None:
    """Plots the peak memory of the ten fastest settings that fit and two larger settings; marks limit and choice."""
    count = sum(setting.peak_bytes <= plan.where.limit * (1 - plan.free) for setting in plan.settings)
    text = f"{count} of {len(plan.settings)} settings fit {plan.where.name}, {plan.free:.0%} of its memory kept free"
    show(picture(_bars(plan), text))


def _bars(plan: Plan) -> Figure:
    """Plots the bars of `show_settings`."""
    limit, mark = plan.where.limit, "the pick" if plan.fits else "the nearest"
    fitting = sorted((each for each in plan.settings if each.peak_bytes <= limit), key=lambda each: each.time.seconds)
    over = sorted((each for each in plan.settings if each.peak_bytes > limit), key=lambda each: each.peak_bytes)
    settings = [*over[1::-1], *fitting[9::-1]]
    names, texts = [], []
    for setting in settings:
        passes = f"{setting.update.batch_size} rows x {setting.update.gradient_accumulation} passes"
        names.append(f"{passes}, remat={setting.config.optim.remat}")
        pick = f": {mark}" if setting.config == plan.config else ""
        texts.append(f"{setting.peak_bytes / GIB:.1f} GiB, {setting.speed:,.0f} tokens/s{pick}")
    figure, (axes,) = new_figure(10, 1.7 + 0.36 * max(3, len(settings)))
    axes.bar_label(
        axes.barh(range(len(settings)), [setting.peak_bytes / GIB for setting in settings]), texts, padding=3
    )
    axes.set_yticks(range(len(settings)), names)
    axes.axvline(limit / GIB, color="black", label=f"limit {limit / GIB:.2f} GiB")
    axes.axvline(limit * (1 - plan.free) / GIB, color="black", linestyle=":", label=f"less {plan.free:.0%} kept free")
    axes.set(xlim=(0, 1.5 * limit / GIB), xlabel="GiB of one device, by formula")
    axes.set_title(f"Settings on {plan.where.name}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure
