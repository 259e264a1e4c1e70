"""Measures the gain of dpo over a weak start on held-out problems, beside fine-tuning on the chosen replies only.

    python -m tests.benchmarks.dpo FOLDER [--seeds 1 2 3 4 5] [--ways dpo sft] [--steps 120]

The start is notebook 8's (`train embedded-cot`, 65 updates). From it, dpo trains an adapter, and plain fine-tuning on
the chosen replies of the same pairs trains another, with the same rate and number of updates. A seed changes the start
and the pairs. Each run prints the share of 500 held-out problems solved before and after with Wilson's interval,
McNemar's p, and for dpo the share of held-out pairs that are right. Runs with results in FOLDER are not repeated.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.grpo import HELD_OUT, trained_start
from tpu_kit.config.loader import load_config
from tpu_kit.config.sections.preference import PreferenceConfig
from tpu_kit.generation.evaluation.evaluate import compare, evaluate
from tpu_kit.recipes.preference import configured, dpo
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.recipes.sft import train


def measure(folder: Path, seed: int, way: str, steps: int) -> dict[str, Any]:
    """Trains a start, then trains from it by `way`; returns both accuracies."""
    here, adapter = trained_start(folder, seed)
    config = load_config("embedded-dpo", here | {
        "lora.adapter": adapter, "output_dir": str(folder / f"{way}-{seed}"), "eval_rows": HELD_OUT, "max_steps": steps,
        "eval_steps": None, "eval_generate_rows": 0, "remat": "none",
    })  # fmt: skip
    if way == "sft":
        rate = configured(config).optim.learning_rate
        config = replace(
            config, preference=PreferenceConfig(), data=replace(config.data, format="preference"),
            optim=replace(config.optim, learning_rate=rate),
        )  # fmt: skip
    result = (dpo if way == "dpo" else train)(config)
    config = configured(config) if way == "dpo" else config
    asked = replace(config, tracking=replace(config.tracking, generate_rows=HELD_OUT, generate_tokens=80))
    prepared = prepare_run(asked)
    found = compare(evaluate(asked, prepared, adapter), evaluate(asked, prepared, result.adapter_dir))
    sides = {name: vars(side.accuracy) for name, side in (("before", found.base), ("after", found.tuned))}
    right = result.metrics.get("eval_rewards/accuracies")
    return {"seed": seed, "way": way, **sides, "p": found.p_value, "right_pairs": right}


def main() -> None:
    """Measures all seeds and prints the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--ways", nargs="+", choices=["dpo", "sft"], default=["dpo", "sft"])
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    gains: dict[str, list[float]] = {way: [] for way in options.ways}
    for seed in options.seeds:
        for way in options.ways:
            file = options.folder / f"{way}-{seed}.json"
            if not file.exists():
                found = measure(options.folder, seed, way, options.steps)
                file.write_text(json.dumps(found))
            found = json.loads(file.read_text())
            before, after = found["before"], found["after"]
            gains[way].append(100 * (after["correct"] - before["correct"]) / before["total"])
            sides = " -> ".join(
                f"{s['correct'] / s['total']:.1%} ({s['low']:.1%} to {s['high']:.1%})" for s in (before, after)
            )
            right = "" if found["right_pairs"] is None else f", {found['right_pairs']:.1%} of held-out pairs right"
            print(f"RESULT {way} seed {seed}: {sides}, p = {found['p']:.2g}{right}", flush=True)
    for way, each in gains.items():
        print(f"RESULT {way}: mean gain {sum(each) / len(each):+.1f} points over {len(each)} seeds")


if __name__ == "__main__":
    main()
