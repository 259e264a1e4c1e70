"""Measures the gain of grpo over a weak start on held-out problems, by seed, also with random rewards.

    python -m tests.benchmarks.grpo FOLDER [--seeds 1 2 3 4 5] [--rewards auto random]

Start and settings are notebook 7's. A seed changes the start (`train embedded-cot`), the problems and the samples. Each
run prints both accuracies on 500 held-out problems with Wilson's interval, McNemar's p and its processor seconds. At
the end it prints the mean gain over the seeds with its 95 % interval (Student's t). Runs with results in FOLDER are not
repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import load_config, of_rewards
from tpu_kit.generation.evaluation.evaluate import compare, evaluate
from tpu_kit.recipes.grpo import grpo
from tpu_kit.recipes.run_data import prepare_run
from tpu_kit.recipes.sft import train

HELD_OUT = 500
START = 65  # updates; a stronger start has less to learn
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5 % quantiles of Student's t, by number of seeds
REWARDS = {"auto": "auto", "random": "tests.support.reward_functions:random"}


def trained_start(folder: Path, seed: int) -> tuple[dict[str, Any], str]:
    """Trains a start; returns the settings shared by a seed's runs, and the start's adapter."""
    here = {"device_type": "cpu", "num_replicas": 1, "seed": seed}
    start = load_config("embedded-cot", here | {
        "max_steps": START, "base_dtype": "fp32", "eval_rows": 16, "generate_rows": 0, "eval_steps": None,
        "output_dir": str(folder / f"start-{seed}"),
    })  # fmt: skip
    return here, str(train(start).adapter_dir)


def measure(folder: Path, seed: int, rewards: str, **settings: Any) -> dict[str, Any]:
    """Trains a start, then trains it by rewards; returns both accuracies."""
    here, adapter = trained_start(folder, seed)
    clock = time.process_time()
    config = load_config("embedded-grpo", here | {
        "lora.adapter": adapter, "output_dir": str(folder / f"{rewards}-{seed}"), "eval_rows": HELD_OUT,
        "eval_steps": None, "eval_generate_rows": 0, "remat": "none", "reward_funcs": [REWARDS[rewards]], **settings,
    })  # fmt: skip
    result = grpo(config)
    seconds = time.process_time() - clock
    asked = replace(config, tracking=replace(config.tracking, generate_rows=HELD_OUT, generate_tokens=80))
    prepared = prepare_run(of_rewards(asked))
    found = compare(evaluate(asked, prepared, adapter), evaluate(asked, prepared, result.adapter_dir))
    sides = {name: vars(side.accuracy) for name, side in (("before", found.base), ("after", found.tuned))}
    return {"seed": seed, "rewards": rewards, **sides, "p": found.p_value, "seconds": seconds, "steps": result.step}


def main() -> None:
    """Measures all seeds and prints the gains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rewards", nargs="+", choices=list(REWARDS), default=["auto", "random"])
    parser.add_argument("--max-steps", type=int, default=150)
    options = parser.parse_args()
    for rewards in options.rewards:
        gains = []
        for seed in options.seeds:
            file = options.folder / f"{rewards}-{seed}.json"
            if not file.exists():
                found = measure(options.folder, seed, rewards, max_steps=options.max_steps)
                file.write_text(json.dumps(found))
            found = json.loads(file.read_text())
            before, after = found["before"], found["after"]
            gains.append(100 * (after["correct"] - before["correct"]) / before["total"])
            sides = " -> ".join(
                f"{s['correct'] / s['total']:.1%} ({s['low']:.1%} to {s['high']:.1%})" for s in (before, after)
            )
            print(
                f"RESULT {rewards} seed {seed}: {sides}, p = {found['p']:.2g}, {found['seconds']:.0f} CPU s", flush=True
            )
        mean = sum(gains) / len(gains)
        if len(gains) in _T:
            spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1) / len(gains))
            half = _T[len(gains)] * spread
            print(f"RESULT {rewards}: mean gain {mean:+.1f} points, 95 % {mean - half:+.1f} to {mean + half:+.1f}")


if __name__ == "__main__":
    main()
