"""The model card of a real run: every figure that the run recorded is there."""

from __future__ import annotations

import json

from tests.recipes.conftest import world
from tests.recipes.test_sft import Configure, configure, records
from tpu_kit.exporting.export import model_card
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
        "- learning rate at its peak: 0.3",
        f"- tokens trained on: {last['tokens']:,}",
        f"- passes over the data: {last['epoch']:.3g}",
        f"- training loss: {last['loss']:.5g}",
        f"- held-out loss: {kept['loss']:.5g} (of these weights, after update {kept['step']})",
        f"- held-out accuracy: {kept['accuracy']:.1%}",
        f"| perplexity | {found['base']['perplexity']:.4g} | {found['tuned']['perplexity']:.4g} |",
        f"| tokens per answer | {found['base']['mean_tokens']:.1f} | {found['tuned']['mean_tokens']:.1f} |",
        f"| well-formed reasoning | {found['base']['format_adherence']:.1%} |",
        "| correct (95 % interval) | 0 of 2 = 0.0%",
        "0 rows only the tuned model answers correctly, 0 only the base",
    ):
        assert line in card, card
