"""The model card of a real run: every figure that the run recorded is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from huggingface_hub import ModelCard

from tests.exporting.test_export import EVAL
from tests.recipes.conftest import world
from tests.recipes.test_sft import Configure, configure, records
from tests.support.hub import Hub
from tpu_kit.config.loader import load_config
from tpu_kit.exporting.card import base_licence, model_card
from tpu_kit.recipes import sft

__all__ = ["configure", "world"]  # fixtures


def test_a_card_has_the_figures_of_its_run(configure: Configure) -> None:
    answered = {"source": "embedded", "split": "train[:48]", "eval_generate_rows": 2, "generate_rows": 2}
    rates = {"learning_rate": 0.3, "schedule": "constant", "max_grad_norm": 0}
    config = configure(eval_steps=2, logging_steps=2, generate_tokens=2, **answered, **rates)
    result = sft.train(config)
    card = model_card(config, config.output_path, "merged weights", None, "load it", ["checked"])
    last, evaluated = records(config, "train")[-1], records(config, "eval")
    kept = min(evaluated, key=lambda record: record["loss"])
    assert kept["loss"] == result.metrics["eval_loss"] and len(evaluated) == 3
    found = json.loads((config.output_path / "eval.json").read_text())
    for line in (
        "- updates: 6",
        "- peak learning rate: 0.3",
        f"- tokens trained on: {last['tokens']:,}",
        f"- passes over the data: {last['epoch']:.3g}",
        f"- training loss: {last['loss']:.5g}",
        f"- held-out loss: {kept['loss']:.5g} (of these weights, after update {kept['step']})",
        f"- held-out accuracy: {kept['accuracy']:.1%}",
        f"| perplexity | {found['base']['perplexity']:.4g} | {found['tuned']['perplexity']:.4g} |",
        f"| tokens per answer | {found['base']['mean_tokens']:.1f} | {found['tuned']['mean_tokens']:.1f} |",
        f"| well-formed reasoning | {found['base']['format_adherence']:.1%} |",
        "| correct (95 % interval) | 0 of 2 = 0.0%",
        "0 rows are correct only with the tuned model, 0 only with the base",
    ):
        assert line in card, card


def test_what_the_hub_reads_of_a_card(hub: Hub, tmp_path: Path) -> None:
    licence = {"license": "other", "license_name": "gemma", "license_link": "https://ai.google.dev/gemma/terms"}
    hub.models["google/base"] = {"id": "google/base", "cardData": {**licence, "language": ["en"]}}
    (tmp_path / "eval.json").write_text(json.dumps(EVAL))
    record = {"kind": "train", "step": 8, "loss": 1.5, "tokens": 9, "epoch": 1.0, "seconds": 5400, "device": "8 x v5e"}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    config = load_config(None, {
        "model.name": "google/base", "model.revision": "a" * 40, "data.source": "openai/gsm8k:main",
        "data.eval_split": "test", "run_name": "sums",
    })  # fmt: skip
    found = base_licence("google/base", None)
    assert found == licence and base_licence("google/none", None) == {}
    text = model_card(config, tmp_path, "an adapter", "google/base", "-", [], relation="adapter", licence=found)
    card = ModelCard(text)
    values = card.data.to_dict()
    assert values | licence == values and "language" not in values
    assert (values["base_model"], values["base_model_relation"]) == ("google/base", "adapter")
    assert values["datasets"] == ["openai/gsm8k"] and f"**google/base** (commit {'a' * 40})" in card.text
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.dataset_config, result.dataset_split) == ("openai/gsm8k", "main", "test")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.8889)
    name = "accuracy (Wilson's 95 % interval 0.565 to 0.980, 9 rows; against the base p = 0.03, McNemar's exact test)"
    assert result.metric_name == name and "- trained for 1.5 hours on 8 x v5e" in card.text
    assert "The licence is the base model's; the data's licence applies too." in card.text

    local = replace(config, data=replace(config.data, source=str(tmp_path / "rows.jsonl"), eval_split=None))
    values = ModelCard(model_card(local, tmp_path, "an adapter", None, "-", [], relation="adapter")).data.to_dict()
    assert not {"base_model", "base_model_relation", "datasets", "model-index", "license"} & {*values}
