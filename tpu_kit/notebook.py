"""What the notebooks call: parameters, secrets, and displays that print text outside IPython."""

import ast
import base64
import contextlib
import contextvars
import html
import importlib
import io
import json
import os
import re
import sys
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.persistence import find_place
from tpu_kit.tracking import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Progress bars here are plain text, which a kernel without widgets need not warn of.
warnings.filterwarnings("ignore", message="IProgress not found")

_PAPERMILL_HEADER = "# Parameters"
_HEADER = re.compile(r"#\s*(@title\s*)?Parameters\b")
_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def parameters(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Find the notebook's parameters: the names that its parameters cells assign, with their present values.

    Papermill adds a cell of its own after the notebook's parameters cell and does not check what it assigns. A kernel
    sees no cell tags, but it keeps the source of what ran (`In`), so cells are told by their first line: the
    notebook's own begins with a comment such as ``# Parameters: change them here``, papermill's is exactly
    ``# Parameters``. Only the last run of each counts, and papermill's only when it ran after the notebook's own. So
    cells may be run again in any order, and variables of other cells are never taken for parameters.

    Args:
        namespace: ``globals()`` of the notebook. A mapping without `In` (a script) is taken whole: its names that
            begin with no underscore and hold plain values are the parameters.

    Raises:
        ConfigError: no parameters cell ran in this kernel, or its source is no Python.
    """
    if "In" not in namespace:
        return {k: v for k, v in namespace.items() if not k.startswith("_") and isinstance(v, _PLAIN)}
    own, injected = "", ""
    for source in namespace["In"]:
        first_line = source.lstrip().partition("\n")[0].rstrip()
        if first_line == _PAPERMILL_HEADER:
            injected = source
        elif _HEADER.match(first_line):
            own, injected = source, ""
    if not own and not injected:
        raise ConfigError(
            ["No parameters cell has run in this kernel: run the cell that begins with '# Parameters' first."]
        )
    try:
        statements = ast.parse(f"{own}\n{injected}").body
    except SyntaxError as error:
        raise ConfigError(
            [f"The parameters cell is not valid Python ({error.msg}): mend it and run it again."]
        ) from None
    names = []
    for statement in statements:
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return {name: namespace[name] for name in names if name in namespace}


def config(namespace: Mapping[str, Any], path: str | Path | None = None, also: Collection[str] = ()) -> TrainConfig:
    """Build the configuration from the notebook's parameters, named by the leaf names of TrainConfig.

    Args:
        namespace: ``globals()`` of the notebook; see `parameters`.
        path: YAML file or shipped config to start from.
        also: parameters that the notebook itself uses and the configuration does not know.

    Raises:
        ConfigError: all that is wrong at once: names that are no parameter (with the nearest that are) and values
            that do not fit.
    """
    given = {name: value for name, value in parameters(namespace).items() if name not in also}
    found = load_config(path, parameters=given)
    # Here, so that the notebook looks for the run's files where `train` will put them.
    return replace(found, output_dir=find_place(found).output_dir, sources=found.sources)


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
    for source, read in (("Colab secrets", _colab_secret), ("Kaggle secrets", _kaggle_secret)):
        # Each service has errors of its own for "no such secret" and "not granted"; elsewhere the import fails.
        with contextlib.suppress(Exception):
            if value := read(name):
                os.environ[name] = value
                return source
    return "not found"


def _colab_secret(name: str) -> str:
    return importlib.import_module("google.colab.userdata").get(name)


def _kaggle_secret(name: str) -> str:
    return importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name)


def show_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Show rows as a table, one column per key of the first row; in plain text a line break in a cell is a slash."""
    columns = list(rows[0]) if rows else []
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    head = "".join(f"<th style='text-align:left'>{html.escape(column)}</th>" for column in columns)
    style = "text-align:left;vertical-align:top;white-space:pre-wrap"
    body = "".join(
        "<tr>" + "".join(f"<td style='{style}'>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
    )
    plain = [[cell.strip().replace("\n", " / ") for cell in row] for row in [columns, *cells]]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in plain]
    _show({"text/html": f"<table><tr>{head}</tr>{body}</table>", "text/plain": "\n".join(map(str.rstrip, lines))})


def show_config(config: TrainConfig) -> None:
    """Show each setting of the configuration, its value, and where the value came from."""
    rows = []
    for section, values in config.to_dict().items():
        leaves = {f"{section}.{k}": v for k, v in values.items()} if isinstance(values, dict) else {section: values}
        rows += [{"setting": k, "value": v, "from": config.sources.get(k, "default")} for k, v in leaves.items()]
    show_table(rows)


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
    _show({"text/html": f"<pre style='white-space:pre-wrap'>{marked}</pre>", "text/plain": plain})


def show_lengths(lengths: Sequence[int], max_length: int) -> None:
    """Show how many tokens the examples have, and how many are longer than `max_length`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.5), layout="constrained")
    axes = figure.add_subplot()
    axes.hist(lengths, bins=40)
    axes.axvline(max_length, color="tab:red", linestyle="--", label=f"max_length {max_length}")
    axes.set(xlabel="tokens in an example", ylabel="examples")
    axes.legend()
    longer = sum(length > max_length for length in lengths)
    _show(_picture(figure, f"{len(lengths)} examples, longest {max(lengths)} tokens, {longer} over {max_length}"))


def show_answers(output_dir: str | Path, rows: int = 4) -> None:
    """Show how the base and the tuned model answered held-out questions, from the eval.json of a run.

    Args:
        output_dir: folder of the run; without an eval.json (`tracking.generate_rows=0`) it says so.
        rows: questions to show, those first where the two differ in being correct.
    """
    path = Path(output_dir) / "eval.json"
    if not path.is_file():
        text = f"no answers in {output_dir}: set generate_rows, and the held-out questions are answered"
        _show({"text/plain": text})
        return
    found = json.loads(path.read_text())
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
            for name, figures, accuracy in shares
        ]
    )
    samples = sorted(found["samples"], key=lambda sample: sample["base"]["correct"] == sample["tuned"]["correct"])
    verdicts = {True: "correct", False: "wrong", None: "not judged"}
    show_table(
        [
            {"question": sample["question"], "expected": sample["expected"]}
            | {name: f"{sample[name]['answer']}\n({verdicts[sample[name]['correct']]})" for name in ("base", "tuned")}
            for sample in samples[:rows]
        ]
    )


def show_curves(output_dir: str | Path) -> None:
    """Show the loss, training and held-out, and the speed of the run in `output_dir`, from its metrics.jsonl."""
    _show(_curves(output_dir))


@contextlib.contextmanager
def live(output_dir: str | Path, every: float = 5.0) -> Iterator[None]:
    """Keep one display of the run's curves up to date while the body runs, and once more at its end.

    The run is in other processes: this reads the metrics.jsonl that they write. Outside IPython only the end is shown.

    Args:
        output_dir: folder of the run.
        every: seconds between looks at the file; the display changes only when the file did.
    """
    if not _in_ipython():
        yield
        show_curves(output_dir)
        return
    from IPython.display import display

    handle = display(_curves(output_dir), raw=True, display_id=True)
    stop = threading.Event()

    def follow() -> None:
        seen = _version(output_dir)
        while not stop.wait(every):
            if (now := _version(output_dir)) != seen:
                seen = now
                handle.update(_curves(output_dir), raw=True)

    # The context names the cell that the output belongs to; a thread starts without one.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(follow,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        handle.update(_curves(output_dir), raw=True)


def _version(output_dir: str | Path) -> tuple[int, int] | None:
    try:
        status = (Path(output_dir) / METRICS_FILE).stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size


def _curves(output_dir: str | Path) -> dict[str, str]:
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
    return _picture(figure, "; ".join(summary) or f"no metrics yet in {output_dir} ({time.strftime('%H:%M:%S')})")


def _picture(figure: "Figure", text: str) -> dict[str, str]:
    # PNG, and no pyplot: the picture is kept in the notebook, and drawing needs neither a backend nor the main thread.
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": text}


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _in_ipython() -> bool:
    # Looked up, not imported: the kit does not depend on IPython, and inside it the module is loaded.
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _show(bundle: dict[str, str]) -> None:
    if _in_ipython():
        from IPython.display import display

        display(bundle, raw=True)
    else:
        print(bundle["text/plain"])
