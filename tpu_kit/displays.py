"""What a notebook shows: tables, texts and pictures that stay in the file, and plain text outside IPython.

Nothing here is a widget: HTML and PNG survive papermill, and are there when the notebook is opened without a kernel.
Styles are of the kind that survives where a frontend strips scripts and most of CSS from what it does not trust.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu_kit.machine import MARKS, Check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tpu_kit.config import TrainConfig
    from tpu_kit.data import DataReport
    from tpu_kit.thoughts import SearchResult

Bundle = dict[str, str]
"""MIME type to content; "text/plain" is always among them."""

RESULT_TYPE = "application/vnd.tpu-kit.result+json"
"""MIME type of what a cell that shows a `TrainResult` keeps besides its text, for who runs the notebook."""

_COLOURS = {"ok": "#15803d", "warning": "#b45309", "failure": "#b91c1c", "skipped": "#6b7280"}
_ROW = "text-align:left;vertical-align:top;white-space:pre-wrap"


def show(bundle: Bundle) -> None:
    """Show in the cell, or print."""
    if in_ipython():
        from IPython.display import display

        display(bundle, raw=True)
    else:
        print(bundle["text/plain"], flush=True)


def in_ipython() -> bool:
    """Whether this process is IPython's, such as a notebook's kernel."""
    # Looked up, not imported: the kit does not depend on IPython, and inside it the module is loaded.
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def show_table(rows: Sequence[Mapping[str, object]]) -> None:
    """Show rows as a table, one column per key of the first row; in plain text a line break in a cell is a slash."""
    show(table(rows))


def table(rows: Sequence[Mapping[str, object]]) -> Bundle:
    """The table of `show_table`."""
    columns = list(rows[0]) if rows else []
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    head = "".join(f"<th style='text-align:left'>{html.escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(map(_html_cell, row)) + "</tr>" for row in cells)
    plain = [[cell.strip().replace("\n", " / ") for cell in row] for row in [columns, *cells]]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in plain]
    return {"text/html": f"<table><tr>{head}</tr>{body}</table>", "text/plain": "\n".join(map(str.rstrip, lines))}


def show_checks(checks: Iterable[Check]) -> list[Check]:
    """Show rows of the doctor as they come, each with its mark and, where there is one, its fix; returns them all."""
    rows: list[Check] = []
    if not in_ipython():
        for check in checks:
            print(check, flush=True)
            rows.append(check)
        return rows
    from IPython.display import display

    handle = display(_checks(rows), raw=True, display_id=True)
    for check in checks:
        rows.append(check)
        handle.update(_checks(rows), raw=True)
    return rows


def _checks(rows: Sequence[Check]) -> Bundle:
    body = ""
    for row in rows:
        mark = f"<b style='color:{_COLOURS[row.status]}'>{MARKS[row.status]}</b>"
        fix = f"<br>→ <code>{html.escape(row.fix)}</code>" if row.fix else ""
        cells = (mark, html.escape(row.name), html.escape(row.found) + fix)
        body += "<tr>" + "".join(f"<td style='{_ROW}'>{cell}</td>" for cell in cells) + "</tr>"
    return {"text/html": f"<table>{body}</table>", "text/plain": "\n".join(map(str, rows)) or "looking ..."}


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
        colour, text = _COLOURS["failure"], f"Not ready. Fix this first: {first.name}: {first.found}\n→ {first.fix}"
    else:
        notes = "".join(f"\n! {check.name}: {check.found}" for check in warnings)
        colour, text = _COLOURS["ok"], f"Ready.{notes}"
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
    rows, defaults = [], _leaves(type(config)().to_dict())
    for name, value in _leaves(config.to_dict()).items():
        source = config.sources.get(name, "default")
        # What a run has written as its config.yaml names every setting.
        if all_settings or value != defaults.get(name) or source not in ("default", "file"):
            rows.append({"setting": name, "value": value, "from": source})
    show_table(rows)
    if len(rows) < len(defaults):
        text = f"{len(defaults) - len(rows)} more have their defaults: show_config(config, all_settings=True)"
        show({"text/plain": text})


def _leaves(sections: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, values in sections.items():
        found |= {f"{section}.{k}": v for k, v in values.items()} if isinstance(values, dict) else {section: values}
    return found


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


def picture(figure: Figure, text: str) -> Bundle:
    """A figure as PNG, and the text in its place.

    Without pyplot: drawing needs neither a backend nor the main thread.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": text}


def _html_cell(text: str) -> str:
    longest = max(map(len, text.splitlines()), default=0)
    # Or the lines of a cell of several would break where the words beside it are many.
    wide = f";min-width:{min(18, longest * 0.6):.0f}em" if "\n" in text else ""
    return f"<td style='{_ROW}{wide}'>{html.escape(text)}</td>"


def _cell(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
