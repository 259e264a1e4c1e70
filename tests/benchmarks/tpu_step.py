"""Compares step times by the TPU compiler's cost model with Tunix's, by kind of work.

    python -m tests.benchmarks.tpu_step

A training step is LoRA r=16 on all linear layers, on 4 x 1,024 tokens. With `--decode` it compares a token of 64 rows
with a cache of 512 slots, as `grpo` and evaluation during training decode it. Everything is compiled for one v5e chip;
nothing is run. `tpu_kit/planning/compiler/step_estimate.py` describes the estimate and its omissions. `--settings
remat=outputs` changes settings of our runs. Tunix is compiled by `tpu_peer` with and without recomputation; the faster
variant that fits counts. All answers are cached on disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.benchmarks.tpu_peer import compile_peer
from tpu_kit.config.loader import TrainConfig, as_trained, load_config
from tpu_kit.generation.decoder import BLOCK
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.compiler.compile_check import Compiled, compile_step

CHIP = "v5e:1x1"
ROWS, LENGTH = 4, 1024
SETTINGS = ("device_type=tpu", "max_steps=10", "lora.r=16", f"batch_size={ROWS}", f"max_length={LENGTH}")
DECODED = {"rows": 64, "width": 256, "slots": 512}
SAMPLING = ("rl.max_prompt_length=256", "rl.max_completion_length=256")
MODELS = {
    "qwen2.5-0.5b": ("model.name=Qwen/Qwen2.5-0.5B",),
    "llama-3.2-1b": ("model.name=meta-llama/Llama-3.2-1B",),
    "llama-3.1-8b": ("model.name=meta-llama/Llama-3.1-8B", "base_dtype=int8"),
}


def configuration(model: str, changes: Sequence[str] = ()) -> TrainConfig:
    """The configuration of a model in `MODELS`."""
    return as_trained(load_config(None, [*SETTINGS, *MODELS[model], *changes]))


def seconds(one: Compiled) -> float:
    """The estimated time of a program; infinite if it does not fit."""
    return sum(one.estimated.values()) if one.fits else float("inf")


def table(answers: dict[str, Compiled]) -> str:
    """Formats a column per program: the compiler's figures, then the estimate by kind of work."""
    figures: dict[str, Callable[[Compiled], float | None]] = {
        "GiB": lambda one: one.total_bytes / GIB,
        "TFLOP": lambda one: None if one.flops is None else one.flops / 1e12,
        "HBM GB": lambda one: None if one.hbm_bytes is None else one.hbm_bytes / 1e9,
        "compile s": lambda one: one.compile_seconds,
        "estimated ms": lambda one: 1000 * seconds(one) if one.fits else None,
    }
    rows = {name: [figure(one) for one in answers.values()] for name, figure in figures.items()}
    kinds = dict.fromkeys(kind for one in answers.values() for kind in one.estimated)
    rows |= {f"of it {kind}": [1000 * one.estimated.get(kind, 0.0) for one in answers.values()] for kind in kinds}
    lines = [f"| | {' | '.join(answers)} |", f"|---|{'---:|' * len(answers)}"]
    cells = {name: " | ".join("-" if one is None else f"{one:.2f}" for one in row) for name, row in rows.items()}
    return "\n".join(lines + [f"| {name} | {row} |" for name, row in cells.items()])


def comparison(ours: Compiled, peers: dict[str, Compiled]) -> str:
    """Our time and memory relative to the peer's fastest setting that fits."""
    name, best = min(peers.items(), key=lambda item: seconds(item[1]))
    if not best.fits:
        return "Tunix does not fit."
    return (
        f"Against {name}: {seconds(ours) / seconds(best):.2f} of the time, "
        f"{ours.total_bytes / best.total_bytes:.2f} of the memory."
    )


def of_a_token(block: Compiled) -> Compiled:
    """The figures per decoding step of a program with `BLOCK` steps; memory and compile time stay."""
    estimated = {kind: value / BLOCK for kind, value in block.estimated.items()}
    return replace(
        block, estimated=estimated, flops=(block.flops or 0.0) / BLOCK, hbm_bytes=(block.hbm_bytes or 0.0) / BLOCK
    )


def main() -> None:
    """Compiles the programs and prints a table per model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--settings", nargs="+", default=[], metavar="key=value", help="as on the command line")
    parser.add_argument("--decode", action="store_true", help="a decoded token in place of a training step")
    parser.add_argument("--alone", action="store_true", help="without Tunix, whose environment is made when it is used")
    options = parser.parse_args()
    for model in options.models:
        config = configuration(model, [*options.settings, *(SAMPLING if options.decode else ())])
        if options.decode:
            ours = of_a_token(compile_step(config, CHIP, part="decode", sizes=DECODED))
            asked = {"Tunix": ("decode", tuple(DECODED.values()), "NONE")}
        else:
            ours = compile_step(config, CHIP)
            # qwix 0.1.8 cannot trace the step of an int8 base without recomputation.
            settings = ("NONE", "DECODER") if config.model.base_dtype != "int8" else ("DECODER",)
            asked = {f"Tunix, remat={one}": ("step", (ROWS, LENGTH), one) for one in settings}
        named = {} if options.alone else asked
        peers = {name: compile_peer(model, config, CHIP, *request) for name, request in named.items()}
        print(f"{table({model: ours} | peers)}\n", flush=True)
        if peers:
            print(f"{comparison(ours, peers)}\n", flush=True)


if __name__ == "__main__":
    main()
