"""The model card of an export: what it is, what it was tuned on and how, what it is worth, and what was checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig, from_dict
from tpu_kit.training.metrics import best_evaluation, read_metrics


def hub_id(name: str) -> str | None:
    """The base model's name on the hub, or None if it is none: a folder, or the embedded model."""
    local = name == "embedded" or name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).is_dir()
    return None if local else name


def model_card(config: TrainConfig, run_dir: Path, kind: str, base: str | None, use: str, checks: Sequence[str]) -> str:
    """The text of README.md, with the front matter that the hub reads.

    Args:
        config: the run.
        run_dir: its folder, with eval.json and metrics.jsonl where it wrote them.
        kind: what the export is, such as "merged weights in bf16".
        base: the base model's name on the hub, if it has one.
        use: how it is loaded, in Markdown.
        checks: one line for each.
    """
    front = ["---", *([f"base_model: {base}"] if base else []), "pipeline_tag: text-generation"]
    front += ["tags:", "- tpu_kit", *(["- lora"] if config.lora.r else []), "---"]
    named = base or Path(config.model.name).name
    source = config.data.source if hub_id(str(config.data.source)) else Path(str(config.data.source)).name
    method = f"LoRA, r = {config.lora.r}, alpha = {config.lora.alpha}" if config.lora.r else "all weights trained"
    dtype = config.model.base_dtype
    method += f", over base weights in {dtype}" if config.lora.r else f", computed in {dtype}"
    parts = [
        "\n".join(front),
        f"# {config.run_name}",
        f"{kind[0].upper()}{kind[1:]}, tuned with tpu_kit from **{named}** on **{source}** ({method}). The "
        "licences of the base model and of the data apply.",
        "## Use\n\n" + use,
        "## Results\n\n" + _results(config, run_dir),
        "## Checked when it was exported\n\n" + "\n".join(f"- {check}" for check in checks),
        f"## Configuration\n\n```yaml\n{_settings(config)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _results(config: TrainConfig, run_dir: Path) -> str:
    """A table of the base and the tuned model, and what the run's metrics say."""
    lines = []
    if (path := run_dir / "eval.json").is_file():
        found = json.loads(path.read_text())
        lines += ["| on held-out rows | base | tuned |", "|---|---|---|"]
        base, tuned = found["base"], found["tuned"]
        lines.append(f"| correct (95 % interval) | {_accuracy(base)} | {_accuracy(tuned)} |")
        lines.append(f"| well-formed reasoning | {base['format_adherence']:.1%} | {tuned['format_adherence']:.1%} |")
        lines.append(f"| tokens per answer | {base['mean_tokens']:.1f} | {tuned['mean_tokens']:.1f} |")
        if base.get("perplexity") and tuned.get("perplexity"):
            lines.append(f"| perplexity | {base['perplexity']:.4g} | {tuned['perplexity']:.4g} |")
        lines += ["", f"{found['gained']} rows only the tuned model answers correctly, {found['lost']} only the base "
                  f"(p = {found['p_value']:.2g}, McNemar's exact test).", ""]  # fmt: skip
    lines += [f"- {name}: {value}" for name, value in _training(config, read_metrics(run_dir)).items()]
    return "\n".join(lines) or "The run measured none: set tracking.generate_rows to have held-out rows answered."


def _training(config: TrainConfig, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The run's figures by name: where it ended, and the evaluation of the weights that it kept."""
    found = {}
    if trained := [record for record in records if record["kind"] == "train"]:
        last = trained[-1]
        found = {"updates": f"{last['step']:,}", "learning rate at its peak": f"{config.optim.learning_rate:g}"}
        found |= {"tokens trained on": f"{last['tokens']:,}", "passes over the data": f"{last['epoch']:.3g}"}
        found |= {"training loss": f"{last['loss']:.5g}"} if last["loss"] is not None else {}
    newest = [record for record in records if record["kind"] == "eval"][-1:]
    kept = best_evaluation(records if config.optim.eval_steps is not None else newest)  # as `trainer.Trainer.weights`
    if kept is not None:
        found["held-out loss"] = f"{kept['loss']:.5g} (of these weights, after update {kept['step']:,})"
        found |= {"held-out accuracy": f"{kept['accuracy']:.1%}"} if kept["accuracy"] is not None else {}
    return found


def _accuracy(summary: dict[str, Any]) -> str:
    found = summary["accuracy"]
    if not found["total"]:
        return "no row has an answer"
    share = found["correct"] / found["total"]
    return f"{found['correct']} of {found['total']} = {share:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def _settings(config: TrainConfig) -> str:
    """The configuration, with the last part alone of paths on the machine that it ran on."""

    def portable(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: portable(inner) for name, inner in value.items()}
        return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value

    return from_dict(portable(config.to_dict())).to_yaml().rstrip()
