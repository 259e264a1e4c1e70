"""Functions for notebook cells: configuration, secrets, and displays of rows, answers and runs."""

from __future__ import annotations

import base64
import contextlib
import html
import importlib
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.config import schema
from tpu_kit.config.loader import ConfigError, TrainConfig, load_config, read_yaml
from tpu_kit.distributed.detection import detect
from tpu_kit.machine.checks import Check, verdict
from tpu_kit.machine.storage.output_location import fetch_run, find_place
from tpu_kit.notebook.displays.runs import live as live
from tpu_kit.notebook.displays.runs import run_figures
from tpu_kit.notebook.displays.runs import show_memory as show_memory
from tpu_kit.notebook.displays.runs import show_mesh as show_mesh
from tpu_kit.notebook.displays.runs import show_settings as show_settings
from tpu_kit.notebook.kernel import new_figure, parameters, picture, shorten_errors, show, show_table
from tpu_kit.notebook.kernel import show_checks as show_checks
from tpu_kit.training.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpu_kit.data.prepare import DataReport, Prepared
    from tpu_kit.recipes.result import TrainResult

# JupyterLab breaks the lines of a <pre> within words.
TEXT_STYLE = "font-family:monospace;white-space:pre-wrap;word-break:normal;overflow-wrap:anywhere"
_SECRETS: Mapping[str, Callable[[str], str | None]] = {
    "environment": lambda name: os.environ.get(name),
    "Colab secrets": lambda name: importlib.import_module("google.colab.userdata").get(name),
    "Kaggle secrets": lambda name: importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name),
}

# Progress bars are plain text even if ipywidgets is installed: a widget is dead without its kernel. Without its own
# methods, tqdm's notebook class behaves like its base class for text, also in modules that have imported it already.
with contextlib.suppress(ImportError):  # tqdm is not installed yet
    from tqdm.notebook import tqdm_notebook  # type: ignore[import-untyped]  # tqdm ships no types

    for _name in {*vars(tqdm_notebook)} & {*vars(tqdm_notebook.__base__)} - {"__module__", "__doc__"}:
        delattr(tqdm_notebook, _name)
shorten_errors()
# Deprecation warnings of child processes would stay in the notebook.
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


def config(
    namespace: Mapping[str, Any], path: str | Path | Mapping[str, Any] | None = None, also: Collection[str] = ()
) -> TrainConfig:
    """Builds the configuration from the notebook's parameters, which have the leaf names of TrainConfig.

    The parameter `push_to` sets `hub.model_id`, unless it is None. A null `output_dir` becomes the folder that `train`
    takes, such as a folder of Google Drive on Colab.

    Args:
        namespace: ``globals()`` of the notebook; see `parameters`.
        path: a YAML file, a shipped configuration, or values of a file to start from.
        also: parameters of the notebook itself, which are not in the configuration.

    Raises:
        ConfigError: all problems at once: unknown names (with the nearest known names) and invalid values.
    """
    values = {name: value for name, value in parameters(namespace).items() if name not in also}
    if (repository := values.pop("push_to", None)) is not None:
        values["hub.model_id"] = repository
    loaded = load_config(path, parameters=values)
    # The same choice as in `train`, so that the notebook finds the run's files.
    output = find_place(loaded)
    why = {} if output.output_dir == loaded.output_dir else {"output_dir": output.reason}
    return replace(loaded, output_dir=output.output_dir, sources={**loaded.sources, **why})


def start_config(run: TrainConfig, path: str, sections: Collection[str], values: Mapping[str, Any]) -> TrainConfig:
    """Builds the configuration of a first training, which makes the teacher or the starting adapter of `run`.

    Args:
        run: the run that the first training is for.
        path: a YAML file or a shipped configuration for all other settings.
        sections: sections that are copied from `run`, such as "data" and "launch".
        values: settings by leaf name, which override the file and the run.
    """
    shared = {name: value for name, value in run.flat_values().items() if name.partition(".")[0] in sections}
    return config({**shared, **values}, path)


def run_config(namespace: Mapping[str, Any], also: Collection[str] = ()) -> TrainConfig:
    """Reads the configuration of a trained run, found by its `run_name` or `output_dir`, also among Kaggle's inputs.

    An address as `output_dir`, such as gs://, is not read: the run is then found in runs/RUN_NAME.

    Args:
        namespace: as in `config`; the parameters given here, such as `num_replicas`, override the run's values.
        also: as in `config`.

    Raises:
        ConfigError: there is no such run (the text names other runs there), it has no adapter, or as in `config`.
    """
    names = ("run_name", "output_dir")
    run = load_config(parameters={name: value for name, value in parameters(namespace).items() if name in names})
    output = find_place(run)
    fetch_run(output, run.run_name)
    folder = replace(run, output_dir=output.output_dir).output_path
    if not (folder / "config.yaml").is_file():
        others = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))) or "none yet"
        where = "mount the Drive that has it (Colab), add the output that has it as an input (Kaggle)"
        advice = f"run 4-train-cot-sft.ipynb first, {where}, or set output_dir to its folder"
        raise ConfigError([f"run_name: there is no run in {folder}: {advice}. Runs beside it: {others}"])
    if not (folder / "adapter").is_dir():
        raise ConfigError([f"run_name: the run in {folder} has not ended, so it has no adapter: continue its training"])
    return config(namespace, read_yaml(folder / "config.yaml"), also)


def secrets(*names: str) -> dict[str, str]:
    """Puts secrets, such as HF_TOKEN, into the environment of this process and its children.

    Returns:
        The sources of the secrets by name, never their values: the first of "environment", "Colab secrets" and
        "Kaggle secrets" that has the secret. "not found" also means that this notebook has no access to it.
    """
    sources = dict.fromkeys(names, "not found")
    for name in names:
        for source, read in _SECRETS.items():
            # Services raise their own errors for "no such secret" and "no access"; elsewhere the import fails.
            with contextlib.suppress(Exception):
                if value := read(name):
                    os.environ[name], sources[name] = value, source
                    break
    return sources


def check_push(config: TrainConfig) -> None:
    """Reads HF_TOKEN and prints the repository that the result goes to; without `hub.model_id` prints how to set it.

    Raises:
        ConfigError: the hub, which is asked, does not let this user push to the repository or cannot be reached, or an
            export format is not possible here.
    """
    from tpu_kit.exporting.hub.publish import describe_push, hub_problems

    if config.hub.model_id is None:
        print('the result stays here: push_to = "your-name/a-name" pushes it to the Hugging Face hub')
        return
    secrets("HF_TOKEN")
    if problems := hub_problems(config):
        raise ConfigError(problems)
    print(describe_push(config))


def show_verdict(checks: Sequence[Check], config: TrainConfig) -> None:
    """Prints whether this machine is ready for the run, by the results `checks`, or the problem to fix first."""
    print(verdict(checks, detect(config.launch).device_type))


def show_config(config: TrainConfig, *, all_settings: bool = False) -> None:
    """Shows the settings that differ from the defaults or were given outside a file, with sources; or all settings."""
    rows, names = [], schema.parameters()
    for name, parameter in names.items():
        value, source = config[name], config.sources.get(name, "default")
        # A run's config.yaml has all settings, so a default from a file is not shown.
        if all_settings or value != parameter.default or source not in ("default", "file"):
            rows.append({"setting": name, "value": value, "from": source})
    show_table(rows)
    if more := len(names) - len(rows):
        print(f"{more} more settings have their defaults: show_config(config, all_settings=True)")


def show_data(config: TrainConfig) -> Prepared:
    """Plans the run as `train` does, and prints the run plan: columns, held-out rows, batch, memory and duration.

    Trains nothing and makes no output folder. Returns the tokenized rows. `train` does not print the same report of the
    rows again.

    Raises:
        ValueError: `train` would refuse the rows, the batch or the settings.
    """
    from tpu_kit.machine.storage.output_location import make_output_folder
    from tpu_kit.recipes.run_data import SHOWN_REPORT
    from tpu_kit.recipes.run_plan import before_fetch, plan_run

    make_output_folder(config, dry=True)
    plan, prepared = plan_run(before_fetch(config))
    os.environ[SHOWN_REPORT] = plan.report
    print(plan)
    return prepared


def show_example(spans: Iterable[tuple[str, bool]], pictures: Sequence[Any] = ()) -> None:
    """Shows a training example and highlights the text that carries loss (in plain text: between [[ and ]]).

    Args:
        spans: result of `decoded_example`: (text, whether it carries loss).
        pictures: PIL images to show with the text; runs of image tokens are then shown as "<token> x count".
    """
    marked, plain = "", ""
    if pictures:
        spans = [(_IMAGE_TOKENS.sub(_counted, text), loss) for text, loss in spans]
    for one in pictures:
        plain += f"[{one.width} x {one.height} pixels] "
        marked += f"<img alt='a picture of the row' style='max-height:160px' src='{_data_url(one)}'> "
    for text, carries_loss in spans:
        safe = html.escape(text)
        marked += f"<mark style='background:#b7e4c7;color:#000'>{safe}</mark>" if carries_loss else safe
        plain += f"[[{text}]]" if carries_loss else text
    show({"text/html": f"<pre style='{TEXT_STYLE}'>{marked}</pre>", "text/plain": plain})


_IMAGE_TOKENS = re.compile(r"(<[^<>\s]+>)\1{3,}")


def _counted(tokens: re.Match[str]) -> str:
    """Returns a match of `_IMAGE_TOKENS` as "<token> x count "."""
    return f"{tokens[1]} x {len(tokens[0]) // len(tokens[1])} "


def _data_url(image: Any) -> str:
    """Returns a copy of a PIL image, at most 320 x 320 pixels, as the data URL of a PNG."""
    buffer, small = io.BytesIO(), image.copy()
    small.thumbnail((320, 320))
    small.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def show_lengths(report: DataReport, max_length: int) -> None:
    """Shows the lengths of examples in tokens as histogram, the fill of packed rows, and shares of a mix's sources."""
    alone = sum(min(length, max_length) for length in report.lengths) / (len(report.lengths) * max_length)
    longer = sum(length > max_length for length in report.lengths)
    text = f"{len(report.lengths)} examples, longest {max(report.lengths)} tokens, {longer} over {max_length}; "
    text += f"rows {report.fill:.0%} full, {alone:.0%} with one example per row"
    if report.sources:
        loss = sum(one.loss_tokens for one in report.sources)
        shares = (f"{one.name} {one.loss_tokens / loss:.0%}" for one in report.sources)
        text += f"\nof the tokens with loss {', '.join(shares)}"
    show(picture(_lengths(report, max_length, text), text))


def _lengths(report: DataReport, max_length: int, title: str) -> Figure:
    """Plots a histogram of lengths with max_length, below `title`, and for a mix the shares of tokens by source."""
    figure, (axes, *others) = new_figure(8, 2.5, columns=2 if report.sources else 1)
    for by_source in others:
        for shift, name in enumerate(("tokens", "loss_tokens")):
            counts = [getattr(one, name) for one in report.sources]
            places = [place + 0.4 * shift for place in range(len(counts))]
            by_source.barh(places, [count / sum(counts) for count in counts], height=0.4, label=name.replace("_", " "))
        by_source.set_yticks(range(len(report.sources)), [one.name for one in report.sources])
        by_source.set(xlabel="share of an epoch")
        by_source.legend()
    # Bins of a fortieth of the axis: bins of the lengths' range would be too narrow to see if all rows are short.
    longest = max(max_length, *report.lengths)
    step = -(-longest // 40)
    axes.hist(report.lengths, bins=[*range(0, longest + step + 1, step)])
    axes.axvline(max_length, color="tab:red", linestyle="--", label=f"max_length {max_length}")
    axes.set(xlabel="tokens in an example", ylabel="examples")
    axes.set_title(title, fontsize="medium")
    axes.legend()
    return figure


def show_answers(output_dir: str | Path, rows: int = 4) -> None:
    """Shows answers of base and tuned model to `rows` held-out questions in a run's eval.json, as `show_comparison`.

    A run with `tracking.generate_rows=0` writes no eval.json; without the file, prints so.
    """
    from tpu_kit.generation.evaluation.comparison import read_comparison

    if answers := read_comparison(Path(output_dir)):
        show_comparison(answers, rows)
    else:
        print(f"no answers in {output_dir} yet: training writes them at its end if generate_rows is not 0")


def show_blind_answers(config: TrainConfig, prepared: Prepared) -> float:
    """Answers held-out questions of `prepared`, with black pictures, by the run's adapter; shows how many are correct.

    It is a control: without the pictures, a model that uses them can only guess. tracking.generate_rows limits the
    questions (0 = all). `prepared` does not change; errors are as in `evaluate`.

    Returns:
        The share of correct answers, 0 to 1.
    """
    from tpu_kit.generation.evaluation.evaluate import evaluate

    asked: list[Any] = prepared.eval_prompt_ids
    black = [ids.blackened() if hasattr(ids, "pictures") else ids for ids in asked]
    accuracy = evaluate(config, replace(prepared, eval_prompt_ids=black), config.output_path / "adapter").accuracy
    show_table([{"model": "tuned, black pictures", "correct (95 % interval)": str(accuracy)}])
    return accuracy.share


def show_comparison(comparison: Mapping[str, Any], rows: int = 4) -> None:
    """Shows base and tuned model side by side: the shares of correct answers with intervals, then `rows` questions.

    `comparison` is the content of eval.json. Questions that only one of the models answers correctly come first.
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


def show_run(config: TrainConfig, result: TrainResult) -> None:
    """Shows status, number of updates, `run_figures`, newest checkpoint and adapter of an ended run as a table."""
    status = f"{result.ended} ({result.reason})" if result.reason else result.ended
    status += f": to resume it, {config.again}" if result.status == "preempted" else ""
    rows = {"status": status, "updates": f"{result.step} of {result.total_steps}"}
    rows |= run_figures(read_metrics(config.output_path))
    rows |= {"newest checkpoint": result.checkpoint_dir or "none", "adapter": result.adapter_dir or "none yet"}
    show_table([{"what": name, "value": value} for name, value in rows.items()])


def show_group(output_dir: str | Path) -> None:
    """Shows a prompt and its group of completions from the last rollout of `grpo` in a run's folder, token by token.

    The largest advantage comes first. Completions with an advantage above 0 are green, others red; a larger size of the
    advantage is darker. Plain text has | between tokens. Raises FileNotFoundError if the run has no rollout yet.
    """
    from tpu_kit.training.losses.sampled_updates import GROUP_FILE

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
    show({"text/html": f"<div style='{TEXT_STYLE}'>{marked}</div>", "text/plain": plain})


def check_run(config: TrainConfig, result: TrainResult) -> None:
    """Checks that the loss of a run fell and that its weights exist; prints the result. A preempted run passes.

    The training loss of `grpo` and `dpo` is not checked, because it varies more between rows than it falls; nor is the
    loss of a single log.

    Raises:
        ValueError: the last logged training loss is not below the first or not finite, `result.warning` says that the
            held-out loss did not fall, or the adapter's folder has no weights.
    """
    if result.status == "preempted":
        print(f"{result.ended} ({result.reason}): nothing to check; run the training cell again")
        return
    losses = [record["loss"] for record in read_metrics(config.output_path) if record["kind"] == "train"]
    if (
        config.recipe in ("train", "distill")
        and len(losses) > 1
        and (None in (losses[0], losses[-1]) or losses[-1] >= losses[0])
    ):
        raise ValueError(
            f"the training loss did not fall: {losses[0]} in the first log, {losses[-1]} in the last; try "
            "optim.learning_rate at a third or three times its value, or more optim.max_steps"
        )
    if result.warning:
        raise ValueError(result.warning)
    name = "adapter_model.safetensors" if config.lora.r else "model.safetensors*"
    if not list(Path(result.adapter_dir).glob(name)):
        raise ValueError(f"{result.adapter_dir} has no {name}: run the training cell again, which writes it")
    print(f"{result.status}: {len(losses)} logs, {Path(result.adapter_dir) / name}")
