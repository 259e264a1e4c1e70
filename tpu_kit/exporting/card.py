"""Writes the card of an exported model: README.md with the front matter that the hub reads, from the run's records.

Facts that a run does not record, such as the language of its rows, are left out, not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.data.held_out import UNKNOWN
from tpu_kit.generation.evaluation.accuracy import Accuracy
from tpu_kit.generation.evaluation.comparison import read_comparison
from tpu_kit.machine.compatibility import installed_version
from tpu_kit.machine.host import is_path
from tpu_kit.training.metrics import best_evaluation, read_metrics

_LICENCE = ("license", "license_name", "license_link")
_VERSIONS = ("tpu_kit", "torch", "torch_xla", "transformers", "peft")


def hub_id(name: str) -> str | None:
    """Returns a model's name if it can be a name on the hub, "owner/name"; None for a folder or the embedded model."""
    local = name == "embedded" or name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).is_dir()
    return None if local else name


def hub_data(source: str | None) -> str | None:
    """Returns the name of the hub data set in `source`, without its configuration; None for other sources."""
    if not source or is_path("data.source", source) or re.search(r"[*?\[]", source):
        return None
    return hub_id(source.partition(":")[0])


def base_licence(base: str, revision: str | None) -> dict[str, str]:
    """Asks the hub for the card of the base model `base`, and returns license, license_name and license_link by name.

    Missing fields, and fields that are not texts, are left out. The result is empty if the hub does not answer or the
    model has no card. `revision` None is main.
    """
    from huggingface_hub import HfApi

    try:
        about: Any = HfApi().model_info(base, revision=revision, timeout=10).card_data or {}
    except Exception:  # errors of the hub and of the network: the card names the base, whose licence holds anyway
        return {}
    return {name: value for name in _LICENCE if isinstance(value := about.get(name), str)}


def model_card(
    config: TrainConfig,
    run_dir: Path,
    kind: str,
    base: str | None,
    use: str,
    checks: Sequence[str],
    *,
    relation: str | None = None,
    licence: Mapping[str, str] = {},
) -> str:
    """Returns the text of README.md, rendered from model_card.jinja; raises ValueError if eval.json is damaged.

    Args:
        config: the run.
        run_dir: the run's folder; eval.json and metrics.jsonl in it are used if they exist.
        kind: the kind of export, such as "merged weights in bf16".
        base: the base model's name on the hub; None leaves out base_model and its relation, and names the model's
            folder.
        use: how to load the export, in Markdown.
        checks: comparisons and notes, a text for each line of a list.
        relation: to the base model: "adapter", "finetune" or "quantized".
        licence: of the base model, as `base_licence` returns it.
    """
    from huggingface_hub import ModelCard, ModelCardData

    dtype, records, answers = config.model.base_dtype, read_metrics(run_dir), read_comparison(run_dir) or {}
    method = f"LoRA, r = {config.lora.r}, alpha = {config.lora.alpha}" if config.lora.r else "all weights trained"
    method += f", over base weights in {dtype}" if config.lora.r else f", computed in {dtype}"
    sides = [answers["base"], answers["tuned"]] if answers else []
    shares = [Accuracy.of(side["accuracy"]["correct"], side["accuracy"]["total"]) for side in sides]
    newest = [record for record in records if record["kind"] == "eval"][-1:]
    versions = {name: version for name in _VERSIONS if (version := installed_version(name))}
    sources = [str(one.source) for one in config.data.by_source]
    trained = [hub_data(source) for source in sources]
    held = hub_data(config.data.eval_source or (sources[0] if len(sources) == 1 else None))
    fields: dict[str, Any] = {**licence, "datasets": list(dict.fromkeys(filter(None, (*trained, held)))) or None}
    if base:
        fields |= {"base_model": base, "base_model_relation": relation}
    if held and answers and shares[1].total:
        fields |= {"model_name": config.run_name, "eval_results": _results(config, held, shares[1], answers)}
    card = ModelCard.from_template(
        ModelCardData(
            pipeline_tag="text-generation", tags=["tpu_kit", *(["lora"] if config.lora.r else [])], **fields
        ),
        str(Path(__file__).with_name("model_card.jinja")),
        config=config, settings=_settings(config), kind=kind, use=use, checks=checks, method=method, base=base,
        named=base or Path(config.model.name).name, commit=config.model.revision if base else None, licence=licence,
        source=", ".join(
            source if on_hub else Path(source).name for source, on_hub in zip(sources, trained, strict=True)
        ),
        answers=answers, sides=sides, unknown=UNKNOWN, shares=shares, versions=versions,
        last=next((record for record in reversed(records) if record["kind"] == "train"), None),
        # The evaluation of the exported weights, as `trainer.Trainer.weights` chooses them.
        best=best_evaluation(records if config.optim.eval_steps is not None else newest),
    )  # fmt: skip
    return str(card)


def _results(config: TrainConfig, data: str, share: Accuracy, answers: Mapping[str, Any]) -> list[Any]:
    """Returns a list with an `EvalResult`: the tuned model's accuracy `share` on the hub's data set `data`.

    `answers` is the content of eval.json, which has the p-value of the comparison with the base.
    """
    from huggingface_hub import EvalResult

    source = config.data.eval_source or str(config.data.source)
    interval = f"Wilson's 95 % interval {share.low:.3f} to {share.high:.3f}, {share.total} rows"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=data,
            dataset_name=data,
            dataset_config=source.partition(":")[2] or None,
            dataset_split=config.data.eval_split or config.data.split,
            metric_type="accuracy",
            metric_value=round(share.share, 4),
            metric_name=f"accuracy ({interval}; against the base p = {answers['p_value']:.2g}, McNemar's exact test)",
        )
    ]


def _settings(config: TrainConfig) -> str:
    """Returns the configuration as YAML, with only the last part of local paths."""

    def portable(value: Any) -> Any:
        """Returns a value in which texts that look like local paths are only their last part."""
        if isinstance(value, dict):
            return {name: portable(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [portable(inner) for inner in value]
        return Path(value).name if isinstance(value, str) and value.startswith(("/", "~", "./", "../")) else value

    return load_config(portable(config.to_dict())).to_yaml().rstrip()
