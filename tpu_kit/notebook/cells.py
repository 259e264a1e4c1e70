"""Functions for the cells of notebooks: the configuration, secrets, displays, and the live view of a run.

A run is in other processes; its displays come from the metrics that it writes. They are replaced in place, so that the
executed notebook holds the last state.
"""

from __future__ import annotations

import contextlib
import contextvars
import html
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from tpu_kit.config import schema
from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic, load_config, read_yaml
from tpu_kit.distributed.progress import ANSWERING_FILE, NO_BAR
from tpu_kit.distributed.replica.runtime import detect
from tpu_kit.machine.checks import Check, verdict
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.storage.output_location import fetch_run, find_place
from tpu_kit.notebook.kernel import (
    Bundle,
    in_ipython,
    new_figure,
    parameters,
    picture,
    shorten_errors,
    show,
    show_table,
)
from tpu_kit.notebook.kernel import show_checks as show_checks
from tpu_kit.training.metrics import METRICS_FILE, read_metrics
from tpu_kit.training.outcome import BEFORE_TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpu_kit.data.prepare import DataReport, Prepared
    from tpu_kit.planning.planner import Plan
    from tpu_kit.recipes.sft import TrainResult

# JupyterLab breaks the lines of a <pre> within words.
_TEXT_STYLE = "font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
_SECRETS: Mapping[str, Callable[[str], str | None]] = {
    "environment": lambda name: os.environ.get(name),
    "Colab secrets": lambda name: importlib.import_module("google.colab.userdata").get(name),
    "Kaggle secrets": lambda name: importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name),
}

# Progress bars are plain text also where ipywidgets is installed: a widget is dead without its kernel. Without its own
# methods tqdm's class for notebooks is the one for text, in modules that have imported it before as well.
with contextlib.suppress(ImportError):  # nothing is installed yet
    from tqdm.notebook import tqdm_notebook  # type: ignore[import-untyped]  # tqdm ships no types

    for _name in {*vars(tqdm_notebook)} & {*vars(tqdm_notebook.__base__)} - {"__module__", "__doc__"}:
        delattr(tqdm_notebook, _name)
shorten_errors()
# Deprecation warnings of libraries, in the processes that a cell starts, would stay in the notebook.
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


def config(
    namespace: Mapping[str, Any], path: str | Path | Mapping[str, Any] | None = None, also: Collection[str] = ()
) -> TrainConfig:
    """Builds the configuration from the notebook's parameters, which have the leaf names of TrainConfig.

    Args:
        namespace: ``globals()`` of the notebook; see `parameters`.
        path: a YAML file, a shipped configuration, or values of a file to start from.
        also: parameters of the notebook itself, which are not in the configuration.

    Raises:
        ConfigError: all problems at once: unknown names (with the nearest known ones) and values that do not fit.
    """
    values = {name: value for name, value in parameters(namespace).items() if name not in also}
    loaded = load_config(path, parameters=values)
    # Here, so that the notebook looks for the run's files where `train` will put them.
    output = find_place(loaded)
    why = {} if output.output_dir == loaded.output_dir else {"output_dir": output.reason}
    return replace(loaded, output_dir=output.output_dir, sources={**loaded.sources, **why})


def start_config(run: TrainConfig, path: str, sections: Collection[str], values: Mapping[str, Any]) -> TrainConfig:
    """Builds the configuration of the training that makes the teacher or the adapter that a run starts from.

    Args:
        run: the run.
        path: a YAML file or a shipped configuration, for all that the run does not give.
        sections: those of the run's, such as its rows and its machine.
        values: by leaf name, over those of the file and of the run.
    """
    shared = {name: value for name, value in run.flat_values().items() if name.partition(".")[0] in sections}
    return config({**shared, **values}, path)


def run_config(namespace: Mapping[str, Any], also: Collection[str] = ()) -> TrainConfig:
    """Reads the configuration of a trained run, which its `run_name` (or `output_dir`) identifies.

    Args:
        namespace: as in `config`; other parameters, such as `num_replicas`, override the values of the run.
        also: as in `config`.

    Raises:
        ConfigError: there is no such run (the text names the runs there), it has not ended, or as in `config`.
    """
    names = ("run_name", "output_dir")
    run = load_config(parameters={name: value for name, value in parameters(namespace).items() if name in names})
    output = find_place(run)
    fetch_run(output, run.run_name)
    folder = replace(run, output_dir=output.output_dir).output_path
    if not (folder / "config.yaml").is_file():
        others = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))) or "none yet"
        where = "mount the Drive that has it (Colab), add the output that has it as an input (Kaggle)"
        advice = f"run 4-train-cot-sft.ipynb first, {where}, or set output_dir to it"
        raise ConfigError([f"run_name: there is no run in {folder}: {advice}. Runs beside it: {others}"])
    if not (folder / "adapter").is_dir():
        raise ConfigError([f"run_name: the run in {folder} has not ended, so it has no adapter: continue its training"])
    return config(namespace, read_yaml(folder / "config.yaml"), also)


def secrets(*names: str) -> dict[str, str]:
    """Puts secrets, such as HF_TOKEN, into the environment of this process and its children.

    Returns:
        The source of each secret, never its value: the first of "environment", "Colab secrets" and "Kaggle secrets"
        that has it, or "not found", also if the service does not grant it to this notebook.
    """
    sources = dict.fromkeys(names, "not found")
    for name in names:
        for source, read in _SECRETS.items():
            # Each service has its own errors for "no such secret" and "not granted"; elsewhere the import fails.
            with contextlib.suppress(Exception):
                if value := read(name):
                    os.environ[name], sources[name] = value, source
                    break
    return sources


def show_verdict(checks: Sequence[Check], config: TrainConfig) -> None:
    """Prints for what this machine is ready, or the problem to fix first."""
    print(verdict(checks, detect(config.launch).device_type))


def show_config(config: TrainConfig, *, all_settings: bool = False) -> None:
    """Shows the settings that were given or differ from the defaults, and where each value came from."""
    rows, names = [], schema.parameters()
    for name, parameter in names.items():
        value, source = config[name], config.sources.get(name, "default")
        # The config.yaml of a run names every setting, defaults included.
        if all_settings or value != parameter.default or source not in ("default", "file"):
            rows.append({"setting": name, "value": value, "from": source})
    show_table(rows)
    if more := len(names) - len(rows):
        print(f"{more} more settings have their defaults: show_config(config, all_settings=True)")


def show_data(config: TrainConfig) -> Prepared:
    """Prepares the rows as `train` does, and shows columns, reasoning, held-out rows, batch and duration.

    Raises:
        ValueError: `train` would refuse the rows, the batch or the settings.
    """
    from tpu_kit.data.batching import updates
    from tpu_kit.recipes import sft
    from tpu_kit.training.losses.rollout import updates_of
    from tpu_kit.training.resume import keep_run

    prepared, outlook = sft.check_run(keep_run(config, date.today().isoformat()))
    replicas = outlook.room.replicas if outlook.room else config.launch.num_replicas or 1
    plan, config, tasks = batch_arithmetic(outlook.config, replicas), outlook.config, prepared.tasks
    made = updates_of(len(tasks.numbers), config) if tasks else updates(len(prepared.train), plan, config.optim)
    total = sum(1 for _ in made)
    os.environ[sft.SHOWN_REPORT] = report = sft.data_report(prepared, plan, total, config)
    print(report)
    for note in outlook.notes:
        print(f"plan             {note}")
    print(f"time             {outlook.duration(total)}")
    return prepared


def show_example(spans: Iterable[tuple[str, bool]]) -> None:
    """Shows one training example with the text that carries loss highlighted (in plain text: between [[ and ]])."""
    marked, plain = "", ""
    for text, carries_loss in spans:
        safe = html.escape(text)
        marked += f"<mark style='background:#b7e4c7;color:#000'>{safe}</mark>" if carries_loss else safe
        plain += f"[[{text}]]" if carries_loss else text
    show({"text/html": f"<pre style='{_TEXT_STYLE}'>{marked}</pre>", "text/plain": plain})


def show_lengths(report: DataReport, max_length: int) -> None:
    """Shows the lengths of the examples against `max_length`, and how full the packed rows are."""
    alone = sum(min(length, max_length) for length in report.lengths) / (len(report.lengths) * max_length)
    longer = sum(length > max_length for length in report.lengths)
    text = f"{len(report.lengths)} examples, longest {max(report.lengths)} tokens, {longer} over {max_length}; "
    text += f"rows {report.fill:.0%} full, {alone:.0%} with one example in each"
    show(picture(_lengths(report, max_length, text), text))


def _lengths(report: DataReport, max_length: int, title: str) -> Figure:
    figure, (axes,) = new_figure(8, 2.5)
    # Bars of a fortieth of the axis: of the lengths' own range, those of short rows would be too narrow to see.
    longest = max(max_length, *report.lengths)
    step = -(-longest // 40)
    axes.hist(report.lengths, bins=[*range(0, longest + step + 1, step)])
    axes.axvline(max_length, color="tab:red", linestyle="--", label=f"max_length {max_length}")
    axes.set(xlabel="tokens in an example", ylabel="examples")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    return figure


def show_answers(output_dir: str | Path, rows: int = 4) -> None:
    """Shows the answers of both models to some held-out questions, from the eval.json of a run; see `show_comparison`.

    There is none where `tracking.generate_rows=0`.
    """
    from tpu_kit.generation.evaluation.evaluate import read_comparison

    if answers := read_comparison(Path(output_dir)):
        show_comparison(answers, rows)
    else:
        print(f"no answers in {output_dir} yet: training writes them at its end, where generate_rows asks for them")


def show_comparison(comparison: Mapping[str, Any], rows: int = 4) -> None:
    """Shows base and tuned model side by side: the shares with their intervals, then `rows` questions.

    Questions that only one of them answers correctly come first.
    """
    from tpu_kit.data.held_out import UNKNOWN

    table = []
    for name in ("base", "tuned"):
        figures, accuracy = comparison[name], comparison[name]["accuracy"]
        row = {"model": name, "correct": f"{accuracy['correct']} of {accuracy['total']}"}
        row["95 % interval"] = f"{accuracy['low']:.0%} to {accuracy['high']:.0%}"
        if any(comparison[model].get("reasons", True) for model in ("base", "tuned")):
            row["well-formed reasoning"] = f"{figures['format_adherence']:.0%}"
        row["tokens per answer"] = figures["mean_tokens"]
        table.append(row | ({"perplexity": figures["perplexity"]} if figures.get("perplexity") else {}))
    show_table(table)
    if seen := comparison["seen_in_training"]:
        print(f"{seen} rows were left out: their questions are in the training data too.")
    if not comparison["training_data_known"]:
        print(UNKNOWN)
    samples = sorted(comparison["samples"], key=lambda sample: sample["base"]["correct"] == sample["tuned"]["correct"])
    verdicts = {True: "correct", False: "wrong", None: "not judged"}
    show_table(
        [
            {name: sample[name] for name in ("question", "expected")}
            | {side: f"{sample[side]['answer']}\n({verdicts[sample[side]['correct']]})" for side in ("base", "tuned")}
            for sample in samples[:rows]
        ]
    )


@contextlib.contextmanager
def live(output_dir: str | Path, every: float = 5.0) -> Iterator[None]:
    """Updates the progress and the curves of a run while the body runs, and at its end.

    The run's own bar is off meanwhile: a notebook would keep each redraw. Outside IPython only the final curves show.
    The metrics are read `every` so many seconds.
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

    # The context names the cell that owns the output; a thread starts without a context.
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


def show_run(config: TrainConfig, result: TrainResult) -> None:
    """Shows status, speed, compiled programs, newest checkpoint and adapter of a run that ended."""
    status = f"{result.ended} ({result.reason})" if result.reason else result.ended
    status += f": to resume it, {config.again}" if result.status == "preempted" else ""
    rows = {"status": status, "updates": f"{result.step} of {result.total_steps}"}
    rows |= _figures(read_metrics(config.output_path))
    rows |= {"newest checkpoint": result.checkpoint_dir or "none", "adapter": result.adapter_dir or "none yet"}
    show_table([{"what": name, "value": value} for name, value in rows.items()])


def show_group(output_dir: str | Path) -> None:
    """Shows the prompt and the completions of a group of the last rollout of `grpo`, token by token.

    Tokens that the update makes likelier are green, others red; the darker, the larger the advantage (in plain text |
    is between tokens).
    """
    from tpu_kit.training.losses.rollout import GROUP_FILE

    group = json.loads((Path(output_dir) / GROUP_FILE).read_text())
    print(f"step {group['step']}: {group['prompt']}")
    completions = sorted(group["completions"], key=lambda each: -each["advantage"])
    most = max(abs(each["advantage"]) for each in completions) or 1.0
    marked, plain = "", ""
    for each in completions:
        head = f"reward {each['reward']}, advantage {each['advantage']:+.2f}"
        color = "45,106,79" if each["advantage"] > 0 else "157,2,8"
        style = f"background:rgba({color},{0.5 * abs(each['advantage']) / most:.2f});border-right:1px solid #8888"
        tokens = "".join(f"<span style='{style}'>{html.escape(token)}</span>" for token in each["tokens"])
        marked += f"<p><b>{head}</b>\n{tokens}</p>"
        plain += f"{head}\n{'|'.join(each['tokens'])}\n\n"
    show({"text/html": f"<div style='{_TEXT_STYLE}'>{marked}</div>", "text/plain": plain})


def check_run(config: TrainConfig, result: TrainResult) -> None:
    """Checks that the loss of a run fell and that its weights exist; of a run that was ended early it tells that alone.

    Raises:
        ValueError: the loss of the last logged updates is not below that of the first (not of `grpo`, whose loss is
            about 0), the held-out loss did not fall, or the weights are missing.
    """
    if result.status == "preempted":
        print(f"{result.ended} ({result.reason}): nothing to check; run the training cell again")
        return
    losses = [record["loss"] for record in read_metrics(config.output_path) if record["kind"] == "train"]
    if (
        config.optim.objective != "policy"
        and len(losses) > 1
        and (None in (losses[0], losses[-1]) or losses[-1] >= losses[0])
    ):
        raise ValueError(
            f"the training loss did not fall: {losses[0]} in the first log, {losses[-1]} in the last one; try "
            "optim.learning_rate at a third or three times its value, or more optim.max_steps"
        )
    if result.warning:
        raise ValueError(result.warning)
    name = "adapter_model.safetensors" if config.lora.r else "model.safetensors*"
    if not list(Path(result.adapter_dir).glob(name)):
        raise ValueError(f"{result.adapter_dir} has no {name}: run the training cell again, which writes it")
    print(f"{result.status}: {len(losses)} logs, {Path(result.adapter_dir) / name}")


def _modified(file: Path) -> float:
    """Returns when a file was last changed, in seconds since 1970; 0 if it does not exist."""
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _figures(records: list[dict[str, Any]]) -> dict[str, str]:
    """Returns the figures of the training records by name."""
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        return {}
    last, warm = train[-1], train[1:] or train  # the first record includes the compilation
    figures = {"resumed from": f"step {last['resumed_from']}"} if last.get("resumed_from") else {}
    if last.get("compiles"):  # none without a compiler
        figures["compiled programs"] = str(last["compiles"])
    for name, key, form in (("tokens/s/chip", "tokens_per_second_per_chip", ",.0f"), ("MFU", "mfu", ".1%")):
        if values := [record[key] for record in warm if record.get(key)]:  # of `grpo` without a trained token 0
            figures[name] = format(median(values), form)  # a CPU has no known peak
    if rollouts := [record for record in warm if "reward" in record]:
        figures["reward"] = f"{rollouts[0]['reward']:.3g} at first, {rollouts[-1]['reward']:.3g} at last"
        flat = mean(record["frac_reward_zero_std"] for record in rollouts)
        figures["groups of equal rewards"] = f"{flat:.0%}: they teach nothing"
        parts = [mean(record[f"{part}_seconds"] for record in rollouts) for part in ("rollout", "reward", "step")]
        figures["seconds of an update"] = f"{parts[2]:.2g}: {parts[0]:.2g} to sample, {parts[1]:.2g} to judge"
    return figures


def _progress(folder: Path, begun: float) -> Bundle:
    """Returns the progress of a run from the files that changed after the time `begun`."""

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
        with contextlib.suppress(OSError, ValueError):  # removed or half-written meanwhile
            now = json.loads((folder / ANSWERING_FILE).read_text())
            share = now["answered"] / now["asked"]
            lines.append(f"{bar(share)} {now['answered']} of {now['asked']} answers, {now['model']}")
    figures = _figures(records)
    if saved := sorted(folder.glob("checkpoints/step-*/manifest.json")):
        figures["newest checkpoint"] = str(saved[-1].parent)
    lines.append("; ".join(f"{name} {value}" for name, value in figures.items()))
    return {"text/plain": "\n".join(lines)}


def _curves(output_dir: str | Path) -> Bundle:
    """Returns the curves of training loss, held-out loss and speed of a run."""
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
    loss.set(xlabel="step", ylabel="reward, held-out accuracy" if rewarded else "loss (nats per token)")
    loss.legend()
    speed.plot([record["step"] for record in train], [record["tokens_per_second"] for record in train], marker=".")
    speed.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
    return picture(figure, "; ".join(summary))


def show_memory(plan: Plan) -> None:
    """Shows the parts of the pick's peak memory, the largest part first."""
    parts, limit = dict(sorted(plan.parts.items(), key=lambda part: -part[1])), plan.where.limit
    parts |= {"peak": plan.peak_bytes, f"a device of {plan.where.name} has": limit}
    rows = [
        {"part": name.replace("_", " "), "GiB": f"{size / GIB:.3f}", "of the device": f"{size / limit:.1%}"}
        for name, size in parts.items()
        if size >= plan.peak_bytes / 1000
    ]
    show_table(rows)


def show_mesh(plan: Plan) -> None:
    """Shows the devices of the pick's mesh, the shards of its tensors, and its collectives; or that there is none."""
    from tpu_kit.planning.report import collective_rows, mesh_lines, tensor_rows

    if plan.where.mesh is None:
        print(f"no mesh: a replica of the model on each of {plan.where.replicas} devices of {plan.where.name}")
    else:
        print("\n".join(mesh_lines(plan)))
        show_table(tensor_rows(plan, least=2**20))
        show_table(collective_rows(plan))


def show_settings(plan: Plan) -> None:
    """Shows a bar of the peak memory of every setting against the limit of the device, and marks the pick."""
    count = sum(setting.peak_bytes <= plan.where.limit * (1 - plan.free) for setting in plan.settings)
    text = f"{count} of {len(plan.settings)} settings fit {plan.where.name}, {plan.free:.0%} of its memory kept free"
    show(picture(_bars(plan), text))


def _bars(plan: Plan) -> Figure:
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
