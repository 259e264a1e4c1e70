"""What the cells of notebooks call: the configuration, secrets, displays, and the live view of a run.

A run is in other processes; what is shown of it comes from the metrics that it writes. Its two displays are replaced in
place, so that the executed notebook holds the last state, and needs neither a kernel nor a widget to show it.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import importlib
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tpu_kit.config import schema
from tpu_kit.config.fields import closest
from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic, load_config, stored_values
from tpu_kit.distributed.progress import ANSWERING_FILE, NO_BAR
from tpu_kit.hardware.machine import Check
from tpu_kit.notebook.display import COLOURS, Bundle, in_ipython, picture, show, table
from tpu_kit.notebook.display import show_checks as show_checks
from tpu_kit.notebook.display import show_table as show_table
from tpu_kit.notebook.parameters import explain_missing_names
from tpu_kit.notebook.parameters import parameters as parameters
from tpu_kit.storage.output_location import fetch_run, find_place
from tpu_kit.training.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from tpu_kit.data.prepare import DataReport, Prepared
    from tpu_kit.generation.tree_search import SearchResult
    from tpu_kit.recipes.sft import TrainResult

_SECRETS: Mapping[str, Callable[[str], str]] = {
    "Colab secrets": lambda name: importlib.import_module("google.colab.userdata").get(name),
    "Kaggle secrets": lambda name: importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name),
}
_WIDTH = 40  # characters of the bar

# A kernel must not touch the TPU, which torch-tpu, where it is installed, opens when torch is imported.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# The notebook keeps each state of a tqdm bar, so only what takes longer than 5 s gets one, in child processes too.
os.environ.setdefault("TQDM_DELAY", "5")
# Progress bars are plain text here: a kernel without widgets need not warn.
warnings.filterwarnings("ignore", message="IProgress not found")
explain_missing_names()
# Warnings of libraries to their developers, in the processes that a cell starts, would stay in the notebook.
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


# -------------------------------------------------------------------------------------------- configuration and secrets


def config(
    namespace: Mapping[str, Any], path: str | Path | Mapping[str, Any] | None = None, also: Collection[str] = ()
) -> TrainConfig:
    """Build the configuration from the notebook's parameters, named by the leaf names of TrainConfig.

    Args:
        namespace: ``globals()`` of the notebook; see `parameters`.
        path: YAML file, shipped config, or values of a file to start from.
        also: parameters that the notebook itself uses and the configuration does not know.

    Raises:
        ConfigError: all that is wrong at once: names that are no parameter (with the nearest that are) and values
            that do not fit.
    """
    given = {name: value for name, value in parameters(namespace).items() if name not in also}
    try:
        found = load_config(path, parameters=given)
    except ConfigError as error:
        known = {name: near[0] for name in given if (near := closest(name, also, 0.8))}
        problems = [
            f"{name}: this notebook has no such parameter; did you mean {known[name]}?" if name in known else problem
            for problem in error.problems
            for name in [problem.partition(":")[0]]
        ]
        raise ConfigError(problems) from None
    # Here, so that the notebook looks for the run's files where `train` will put them.
    place = find_place(found)
    why = {} if place.output_dir == found.output_dir else {"output_dir": place.reason}
    return replace(found, output_dir=place.output_dir, sources={**found.sources, **why})


def run_config(namespace: Mapping[str, Any], also: Collection[str] = ()) -> TrainConfig:
    """Read the configuration of a run that was trained, found by its `run_name` (or `output_dir`).

    Args:
        namespace: as in `config`; further parameters override what the run was trained with, such as `num_replicas`.
        also: as in `config`.

    Raises:
        ConfigError: there is no such run, with the names of those there are; or as in `config`.
    """
    names = ("run_name", "output_dir")
    given = {name: value for name, value in parameters(namespace).items() if name in names}
    wanted = load_config(parameters=given)
    place = find_place(wanted)
    fetch_run(place, wanted.run_name)
    folder = replace(wanted, output_dir=place.output_dir).output_path
    if not (folder / "config.yaml").is_file():
        others = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))) or "none yet"
        raise ConfigError(
            [
                f"run_name: there is no run in {folder}: run 4-train-cot-sft.ipynb first, mount the Drive that has it "
                "(Colab), add the output that has it as an input (Kaggle), or set output_dir to it. Runs beside it: "
                f"{others}"
            ]
        )
    return config(namespace, stored_values(folder / "config.yaml"), also)


def secrets(*names: str) -> dict[str, str]:
    """Put secrets into the environment of this process and its children; says where each was found, never its value.

    Looked for in the environment, then Colab's secrets, then Kaggle's; the first wins. A secret that the service does
    not grant to this notebook counts as not found.

    Args:
        names: such as "WANDB_API_KEY" or "HF_TOKEN".

    Returns:
        For each name "environment", "Colab secrets", "Kaggle secrets" or "not found".
    """
    return {name: _find_secret(name) for name in names}


def _find_secret(name: str) -> str:
    if os.environ.get(name):
        return "environment"
    for source, read in _SECRETS.items():
        # Each service has errors of its own for "no such secret" and "not granted"; elsewhere the import fails.
        with contextlib.suppress(Exception):
            if value := read(name):
                os.environ[name] = value
                return source
    return "not found"


# ------------------------------------------------------------------------------------------------------------- displays


def show_cores(checks: Iterable[Check]) -> None:
    """Show what the doctor measured on each core; what this device does not tell is left out."""
    cores = [core for check in checks for core in check.cores]
    told = [name for name in (cores[0] if cores else {}) if any(core[name] is not None for core in cores)]
    show_table([{name: _figure(name, core[name]) for name in told} for core in cores])


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0%}" if name == "of the peak" else f"{value:.3g}"


def show_verdict(checks: Sequence[Check]) -> None:
    """Show whether this machine is ready, or the one thing to fix first."""
    failures = [check for check in checks if check.status == "failure"]
    warnings = [check for check in checks if check.status == "warning"]
    if failures:
        first = failures[0]
        colour, text = COLOURS["failure"], f"Not ready. Fix this first: {first.name}: {first.found}\n→ {first.fix}"
    else:
        notes = "".join(f"\n! {check.name}: {check.found}" for check in warnings)
        colour, text = COLOURS["ok"], f"Ready.{notes}"
    head, _, rest = html.escape(text).partition("\n")
    show(
        {
            "text/html": f"<h3 style='color:{colour}'>{head}</h3><pre style='white-space:pre-wrap'>{rest}</pre>",
            "text/plain": text,
        }
    )


def show_config(config: TrainConfig, *, all_settings: bool = False) -> None:
    """Show the settings that were given, or differ from the defaults: their values, and who set them.

    Args:
        config: the run.
        all_settings: the others too.
    """
    rows, names, defaults = [], schema.parameters(), type(config)()
    for name in names:
        value, source = config[name], config.sources.get(name, "default")
        # The config.yaml that a run writes names every setting.
        if all_settings or value != defaults[name] or source not in ("default", "file"):
            rows.append({"setting": name, "value": value, "from": source})
    show_table(rows)
    if len(rows) < len(names):
        text = f"{len(names) - len(rows)} more have their defaults: show_config(config, all_settings=True)"
        show({"text/plain": text})


def show_data(config: TrainConfig) -> Prepared:
    """Prepare the rows as `train` will, and show what it makes of them: columns, reasoning, held out, batch, minutes.

    Raises:
        ValueError: rows, batch or settings that `train` would refuse.
    """
    from tpu_kit.data.batching import batch_line, updates
    from tpu_kit.planning.planner import LEAST_UPDATES
    from tpu_kit.recipes import sft
    from tpu_kit.training.resume import keep_held_out

    prepared, outlook = sft.check_run(keep_held_out(config))
    print(prepared)
    for note in outlook.notes:
        print(f"plan             {note}")
    replicas = outlook.room.replicas if outlook.room else config.launch.num_replicas or 1
    plan, rows = batch_arithmetic(outlook.config, replicas), len(prepared.train)
    total = sum(1 for _ in updates(rows, plan, outlook.config.optim))
    print(batch_line(rows, plan, total))
    if total < LEAST_UPDATES:
        print(f"plan             {total} updates teach little: raise max_steps or epochs, or lower batch_size")
    print(f"time             {outlook.duration(total)}")
    return prepared


def show_example(spans: Iterable[tuple[str, bool]]) -> None:
    """Show one training example, the text that carries loss highlighted (in plain text: between [[ and ]]).

    Args:
        spans: (text, carries loss) in order.
    """
    marked, plain = "", ""
    for text, carries_loss in spans:
        safe = html.escape(text)
        marked += f"<mark style='background:#b7e4c7;color:#000'>{safe}</mark>" if carries_loss else safe
        plain += f"[[{text}]]" if carries_loss else text
    # JupyterLab breaks the lines of a <pre> within words.
    style = "font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
    show({"text/html": f"<pre style='{style}'>{marked}</pre>", "text/plain": plain})


def show_lengths(report: DataReport, max_length: int) -> None:
    """Show how many tokens the examples have, how many are longer than `max_length`, and how full the rows are.

    Args:
        report: of the rows that are trained on.
        max_length: tokens of a row.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.5), layout="constrained")
    axes, fill = figure.subplots(1, 2, width_ratios=(3, 1))
    # As many whole tokens in each bar: otherwise some bars have none.
    step = max(1, math.ceil((max(report.lengths) - min(report.lengths) + 1) / 40))
    axes.hist(report.lengths, bins=range(min(report.lengths), max(report.lengths) + step + 1, step))
    axes.axvline(max_length, color="tab:red", linestyle="--", label=f"max_length {max_length}")
    axes.set(xlabel="tokens in an example", ylabel="examples")
    axes.legend()
    alone = sum(min(length, max_length) for length in report.lengths) / (len(report.lengths) * max_length)
    bars = fill.barh(["one a row", "as trained"], [100 * alone, 100 * report.fill], color=["tab:gray", "tab:blue"])
    fill.bar_label(bars, fmt="%.0f %%", padding=2)
    fill.set(xlabel="of each row is used", xlim=(0, 130))
    longer = sum(length > max_length for length in report.lengths)
    text = f"{len(report.lengths)} examples, longest {max(report.lengths)} tokens, {longer} over {max_length}; "
    show(picture(figure, f"{text}rows {report.fill:.0%} full, {alone:.0%} with one example in each"))


def show_answers(output_dir: str | Path, rows: int = 4) -> None:
    """Show how the base and the tuned model answered held-out questions, from the eval.json of a run.

    Args:
        output_dir: folder of the run; without an eval.json (`tracking.generate_rows=0`) it says so.
        rows: questions to show, those first where the two differ in being correct.
    """
    path = Path(output_dir) / "eval.json"
    if not path.is_file():
        text = f"no answers in {output_dir} yet: they come when training has finished; set generate_rows for them"
        show({"text/plain": text})
        return
    show_comparison(json.loads(path.read_text()), rows)


def show_comparison(found: Mapping[str, Any], rows: int = 4) -> None:
    """Show base and tuned side by side: the shares with their intervals, then single questions.

    Args:
        found: `evaluate.Comparison.to_dict()`, or an eval.json.
        rows: as in `show_answers`.
    """
    shares = [(name, found[name], found[name]["accuracy"]) for name in ("base", "tuned")]
    show_table(
        [
            {
                "model": name,
                "correct": f"{accuracy['correct']} of {accuracy['total']}",
                "95 % interval": f"{accuracy['low']:.0%} to {accuracy['high']:.0%}",
                "well-formed reasoning": f"{figures['format_adherence']:.0%}",
                "tokens per answer": figures["mean_tokens"],
            }
            | ({"perplexity": figures["perplexity"]} if figures.get("perplexity") else {})
            for name, figures, accuracy in shares
        ]
    )
    if found.get("seen_in_training"):
        text = f"{found['seen_in_training']} rows were left out: the training data ask the same questions."
        show({"text/html": f"<p>{text}</p>", "text/plain": text})
    samples = sorted(found["samples"], key=lambda sample: sample["base"]["correct"] == sample["tuned"]["correct"])
    verdicts = {True: "correct", False: "wrong", None: "not judged"}
    show_table(
        [
            {"question": sample["question"], "expected": sample["expected"]}
            | {name: f"{sample[name]['answer']}\n({verdicts[sample[name]['correct']]})" for name in ("base", "tuned")}
            for sample in samples[:rows]
        ]
    )


def show_tree(found: SearchResult) -> None:
    """Show the tree that a search has left behind, the chain that won in bold, in plain text with a star."""
    show({"text/html": found._repr_html_(), "text/plain": str(found)})


# ---------------------------------------------------------------------------------------------------------------- a run


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

    files, stop = [Path(output_dir) / name for name in (METRICS_FILE, ANSWERING_FILE)], threading.Event()
    old = seen = [_version(file) for file in files]  # what an earlier run has left says nothing of this one
    bar = display(_progress(output_dir, started=False), raw=True, display_id=True)
    plot = display(_curves(output_dir), raw=True, display_id=True)

    def redraw(curves: bool = True) -> None:
        started, answering = (_version(file) not in (None, before) for file, before in zip(files, old, strict=True))
        bar.update(_progress(output_dir, started, answering), raw=True)
        if curves:
            plot.update(_curves(output_dir), raw=True)

    def follow() -> None:
        nonlocal seen
        while not stop.wait(every):
            if (now := [_version(file) for file in files]) != seen:
                changed, seen = now[0] != seen[0], now
                redraw(curves=changed)

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


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
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
    return found | ({"MFU": f"{median(shares):.1%}"} if shares else {})  # of a CPU no peak is known


def _progress(output_dir: str | Path, started: bool, answering: bool = False) -> Bundle:
    records = read_metrics(output_dir) if started else []
    last = next((record for record in reversed(records) if record["kind"] == "train"), None)
    if last is None:
        text = "starting: the first figures come after the first logged updates, compilation included"
        return {"text/html": f"<i>{text}</i>", "text/plain": text}
    step, total = last["step"], last.get("total_steps")
    left = f", {timedelta(seconds=round(last['eta_seconds']))} left" if last.get("eta_seconds") else ""
    full = round(_WIDTH * step / total) if total else 0
    bar = f"{'█' * full}{'░' * (_WIDTH - full)} {step} of {total or '?'} updates{left}"
    if answering:
        with contextlib.suppress(OSError, ValueError):  # it was removed meanwhile: all are answered
            said = json.loads((Path(output_dir) / ANSWERING_FILE).read_text())
            full = round(_WIDTH * said["answered"] / said["asked"])
            bar += (
                f"\n{'█' * full}{'░' * (_WIDTH - full)} {said['answered']} of {said['asked']} answers, {said['model']}"
            )
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

    records = {kind: [one for one in read_metrics(output_dir) if one["kind"] == kind] for kind in ("train", "eval")}
    if not any(records.values()):
        text = f"no metrics yet in {output_dir} ({time.strftime('%H:%M:%S')})"
        return {"text/html": f"<i>{html.escape(text)}</i>", "text/plain": text}
    figure = Figure(figsize=(9, 3), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    summary = []
    for (kind, points), marker in zip(records.items(), ".o", strict=True):
        if points:
            steps = [record["step"] for record in points]
            values = [float("nan") if record["loss"] is None else record["loss"] for record in points]
            loss.plot(steps, values, marker=marker, label=kind)
            summary.append(f"{kind} loss {values[0]:.4f} -> {values[-1]:.4f} at step {steps[-1]}")
    loss.set(xlabel="step", ylabel="loss (nats per token)")
    loss.legend()
    train = records["train"]
    speed.plot([record["step"] for record in train], [record["tokens_per_second"] for record in train], marker=".")
    speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    return picture(figure, "; ".join(summary))
