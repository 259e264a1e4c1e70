"""A run, watched from the notebook that started it: progress, figures and curves, out of the metrics that it writes.

The run is in other processes. What is shown are two displays, replaced in place: a table with a bar of characters, and
a picture. So the last state is in the executed notebook, and needs neither a kernel nor a widget to be seen.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tpu_kit.displays import Bundle, in_ipython, picture, show, show_table, table
from tpu_kit.tracking import METRICS_FILE, NO_BAR, read_metrics

if TYPE_CHECKING:
    from tpu_kit.config import TrainConfig
    from tpu_kit.sft import TrainResult

_WIDTH = 40  # characters of the bar


@contextlib.contextmanager
def live(output_dir: str | Path, every: float = 5.0) -> Iterator[None]:
    """Keep progress and curves of a run up to date while the body runs, and once more at its end.

    The run's own bar of text is off meanwhile: a notebook would keep each redraw. Outside IPython only the end is
    shown.

    Args:
        output_dir: folder of the run.
        every: seconds between looks at its metrics; the displays change only when these did.
    """
    if not in_ipython():
        yield
        show_curves(output_dir)
        return
    from IPython.display import display

    seen, stop = _version(output_dir), threading.Event()
    old = seen  # metrics of an earlier run say nothing of this one
    bar = display(_progress(output_dir, started=False), raw=True, display_id=True)
    plot = display(_curves(output_dir), raw=True, display_id=True)

    def redraw() -> None:
        bar.update(_progress(output_dir, started=_version(output_dir) != old), raw=True)
        plot.update(_curves(output_dir), raw=True)

    def follow() -> None:
        nonlocal seen
        while not stop.wait(every):
            if (now := _version(output_dir)) != seen:
                seen = now
                redraw()

    # The context names the cell that the output belongs to; a thread starts without one.
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


def show_curves(output_dir: str | Path) -> None:
    """Show the loss, training and held-out, and the speed of the run in `output_dir`, from its metrics.jsonl."""
    show(_curves(output_dir))


def show_run(config: TrainConfig, result: TrainResult) -> None:
    """Show how a run ended: status, speed, compiled programs, and where the checkpoint and the adapter are."""
    status = f"{result.status} ({result.reason})" if result.reason else result.status
    status += ": run the cell again to go on" if result.status == "preempted" else ""
    records = read_metrics(config.output_path)
    rows = {"status": status, "updates": f"{result.step} of {result.total_steps}", **_figures(records)}
    rows |= {"newest checkpoint": result.checkpoint_dir or "none", "adapter": result.adapter_dir or "none yet"}
    show_table([{"what": name, "value": value} for name, value in rows.items()])


def check_run(config: TrainConfig, result: TrainResult) -> None:
    """Check that a run has learned something and has written its weights; of one that was preempted, say that alone.

    Args:
        config: the run.
        result: what `train` returned.

    Raises:
        ValueError: the loss of the last logged updates is not below that of the first, or the weights are missing.
    """
    if result.status == "preempted":
        show({"text/plain": f"preempted ({result.reason}): nothing to check yet; run again to go on"})
        return
    losses = [record["loss"] for record in read_metrics(config.output_path) if record["kind"] == "train"]
    if len(losses) > 1 and not (None not in (losses[0], losses[-1]) and losses[-1] < losses[0]):
        raise ValueError(
            f"the training loss did not fall: {losses[0]} in the first log, {losses[-1]} in the last one; try a third "
            "or three times optim.learning_rate, or more optim.max_steps"
        )
    name = "adapter_model.safetensors" if config.lora.r else "model.safetensors*"
    if not list(Path(result.adapter_dir).glob(name)):
        raise ValueError(f"{result.adapter_dir} has no {name}: run the training cell again, which writes it")
    show({"text/plain": f"{result.status}: {len(losses)} logs, {Path(result.adapter_dir) / name}"})


def _version(output_dir: str | Path) -> tuple[int, int] | None:
    try:
        status = (Path(output_dir) / METRICS_FILE).stat()
    except OSError:  # not there yet; or nothing can be there, which is for `train` to tell
        return None
    return status.st_mtime_ns, status.st_size


def _figures(records: list[dict[str, Any]]) -> dict[str, str]:
    """What the training records say, for people."""
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return {}
    # The first window holds the compilation, which is not the speed.
    rates = [rate for record in train[1:] or train if (rate := record.get("tokens_per_second_per_chip")) is not None]
    shares = [share for record in train[1:] or train if (share := record.get("mfu")) is not None]
    last = train[-1]
    found = {"went on from": f"step {last['resumed_from']}"} if last.get("resumed_from") else {}
    found |= {"compiled programs": str(last.get("compiles", "unknown"))}
    found |= {"tokens/s/chip": f"{median(rates):,.0f}"} if rates else {}
    return found | {"MFU": f"{median(shares):.1%}" if shares else "no peak is known of this device"}


def _progress(output_dir: str | Path, started: bool) -> Bundle:
    records = read_metrics(output_dir) if started else []
    last = next((record for record in reversed(records) if record["kind"] == "train"), None)
    if last is None:
        text = "starting: the first figures come after the first logged updates, compilation included"
        return {"text/html": f"<i>{text}</i>", "text/plain": text}
    step, total = last["step"], last.get("total_steps")
    left = f", {timedelta(seconds=round(last['eta_seconds']))} left" if last.get("eta_seconds") else ""
    full = round(_WIDTH * step / total) if total else 0
    bar = f"{'█' * full}{'░' * (_WIDTH - full)} {step} of {total or '?'} updates{left}"
    figures = _figures(records)
    saved = sorted(Path(output_dir).glob("checkpoints/step-*/manifest.json"))
    if saved:
        figures["newest checkpoint"] = str(saved[-1].parent)
    shown = table([{"what": name, "value": value} for name, value in figures.items()])["text/html"]
    plain = "; ".join(f"{name} {value}" for name, value in figures.items())
    drawn = f"<pre style='font-family:monospace;color:#15803d'>{html.escape(bar)}</pre>"
    return {"text/html": f"{drawn}{shown}", "text/plain": f"{bar}; {plain}"}


def _curves(output_dir: str | Path) -> Bundle:
    from matplotlib.figure import Figure

    records = read_metrics(output_dir)
    figure = Figure(figsize=(9, 3), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    summary = []
    for kind, marker in (("train", "."), ("eval", "o")):
        points = [record for record in records if record["kind"] == kind]
        if points:
            steps = [record["step"] for record in points]
            values = [float("nan") if record["loss"] is None else record["loss"] for record in points]
            loss.plot(steps, values, marker=marker, label=kind)
            summary.append(f"{kind} loss {values[0]:.4f} -> {values[-1]:.4f} at step {steps[-1]}")
    loss.set(xlabel="step", ylabel="loss (nats per token)")
    if summary:
        loss.legend()
    train = [record for record in records if record["kind"] == "train"]
    speed.plot([record["step"] for record in train], [record["tokens_per_second"] for record in train], marker=".")
    speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    return picture(figure, "; ".join(summary) or f"no metrics yet in {output_dir} ({time.strftime('%H:%M:%S')})")
