"""The time of a training step by the TPU compiler's cost model, by kind of work: `python -m tests.benchmarks.tpu_step`.

LoRA r=16 on all linear layers, 4 x 1,024 tokens, compiled for one v5e chip; nothing is run. The estimate and what it
leaves out: `tpu_kit/planning/compiler/step_estimate.py`. With `--settings remat=outputs` the runs have other settings.
The compiler's answers are kept on disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.compiler.compile_check import Compiled, compile_step

CHIP = "v5e:1x1"
SETTINGS = ("device_type=tpu", "max_steps=10", "lora.r=16", "batch_size=4", "max_length=1024")
MODELS = {
    "qwen2.5-0.5b": ("model.name=Qwen/Qwen2.5-0.5B",),
    "llama-3.2-1b": ("model.name=meta-llama/Llama-3.2-1B",),
    "llama-3.1-8b": ("model.name=meta-llama/Llama-3.1-8B", "base_dtype=int8"),
}


def configuration(model: str, changes: Sequence[str] = ()) -> TrainConfig:
    """The run of a model in `MODELS`."""
    return load_config(None, [*SETTINGS, *MODELS[model], *changes])


def table(answers: dict[str, Compiled]) -> str:
    """A column for each model: the compiler's figures, and below them the estimate by kind of work."""
    figures = {
        "GiB": lambda one: one.total_bytes / GIB,
        "TFLOP": lambda one: (one.flops or 0.0) / 1e12,
        "HBM GB": lambda one: (one.hbm_bytes or 0.0) / 1e9,
        "compile s": lambda one: one.compile_seconds,
        "estimated ms": lambda one: 1000 * sum(one.estimated.values()),
    }
    rows = {name: [figure(one) for one in answers.values()] for name, figure in figures.items()}
    kinds = dict.fromkeys(kind for one in answers.values() for kind in one.estimated)
    rows |= {f"of it {kind}": [1000 * one.estimated.get(kind, 0.0) for one in answers.values()] for kind in kinds}
    lines = [f"| | {' | '.join(answers)} |", f"|---|{'---:|' * len(answers)}"]
    return "\n".join(lines + [f"| {name} | {' | '.join(f'{one:.2f}' for one in row)} |" for name, row in rows.items()])


def main() -> None:
    """Compiles the steps and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--settings", nargs="+", default=[], metavar="key=value", help="as on the command line")
    options = parser.parse_args()
    print(table({name: compile_step(configuration(name, options.settings), CHIP) for name in options.models}))


if __name__ == "__main__":
    main()
