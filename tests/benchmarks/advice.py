"""Predicted beside measured gains in tokens per second: the embedded model, and what advice can change in its run.

    python -m tests.benchmarks.advice [rounds=3]

A profile of the run predicts each change, as it does for advice. Then the run and the changed runs take turns in one
process, and the median of their ratios is measured. One thread of the CPU computes, and processor time is taken, which
other processes hardly change.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import median

import torch

from tests.support.profile_functions import step_seconds
from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config
from tpu_kit.distributed.launch import launch
from tpu_kit.profiling.advice import gain
from tpu_kit.profiling.profile import Profile, profile

RUNS = {
    "max_length=128": (
        "batch_size=1", "batch_size=16", "gradient_accumulation=4", "remat=full", "max_length=512",
        "max_length=512 batch_size=1", "lora.r=64", "base_dtype=bf16",
    ),
    "max_length=256 packing=false": ("packing=true", "max_length=128 batch_size=8", "batch_size=1"),
}  # fmt: skip
"""The changes of each run."""
WARM_UP, STEPS = 4, 14


def main(arguments: list[str]) -> None:
    """Prints the table."""
    rounds = int(dict(text.split("=") for text in arguments).get("rounds", "3"))
    torch.set_num_threads(1)
    print(f"{'run':<30}{'change':<30}{'measured':>10}{'(least, most)':>15}{'predicted':>12}{'error':>8}")
    for base, changes in RUNS.items():
        for change, ratios, predicted in _compare(rounds, base, changes):
            span, error = f"({min(ratios):.2f}, {max(ratios):.2f})", predicted / median(ratios) - 1
            print(
                f"{base:<30}{change:<30}{median(ratios):>10.2f}{span:>15}{predicted:>12.2f}{error:>+8.0%}", flush=True
            )


def _compare(rounds: int, base: str, changes: Sequence[str]) -> Iterator[tuple[str, list[float], float]]:
    """Yields each change with its measured ratio of each round, and the predicted one."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            load_config("embedded-cot", [
                "device_type=cpu", "num_replicas=1", "base_dtype=fp32", "logging_steps=1", "eval_steps=null",
                "generate_rows=0", "save_steps=10000", "tensorboard=false", f"max_steps={STEPS}",
                f"output_dir={folder}/{number}", *base.split(), *change.split(),
            ])
            for number, change in enumerate(("", *changes))
        ]  # fmt: skip
        found = profile(runs[0], 12)
        times, fill = launch(partial(step_seconds, runs, rounds), runs[0])
    for number, change in enumerate(changes, 1):
        more = _tokens(runs[number]) / _tokens(runs[0])
        if "packing" in change:  # without the padding
            more *= fill[number] / fill[0]
        turns = zip(times[0], times[number], strict=True)
        ratios = [more * median(before[WARM_UP:]) / median(after[WARM_UP:]) for before, after in turns]
        yield change, ratios, 1 + _predicted(found, change, runs[number])


def _tokens(run: TrainConfig) -> int:
    return batch_arithmetic(run, 1).tokens_per_update


def _predicted(found: Profile, change: str, run: TrainConfig) -> float:
    padding = [one.gain for one in found.advice if one.rule == "padding" and one.change == f"data.{change}"]
    won = padding[0] if padding else gain(found, run)
    assert won is not None
    return won


if __name__ == "__main__":
    main(sys.argv[1:])
