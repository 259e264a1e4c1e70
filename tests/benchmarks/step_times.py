"""Compares a step's time by formula with the TPU compiler's cost model: `python -m tests.benchmarks.step_times`.

The compiler's answers are in tests/recorded_times.json, for settings of three models that were drawn once at random.
`--missing` compiles the settings without an answer and writes each answer at once. `--readme` writes the last line of
the table into tpu_kit/planning/README.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path
from typing import Any

from tests.benchmarks.tpu_step import CHIP, MODELS, configuration
from tests.support.child_processes import REPOSITORY
from tpu_kit.machine.slices import find_slice
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import HOST_SECONDS
from tpu_kit.planning.run_on_slice import Setting

FILE = Path(__file__).parents[1] / "recorded_times.json"
PAGE = REPOSITORY / "tpu_kit" / "planning" / "README.md"
HEADING = "## Time by formula against the compiler's cost model\n"
INTRODUCTION = """
`python -m tests.benchmarks.step_times` prints the time of 24 steps on one v5e, by the compiler's cost model and by the
formula of `plan`. Each of three models has eight settings that were drawn once. The formula's constants were fitted to
these steps; fitted to a random two thirds, the median error of the rest is 5 %. The setting that is fastest by formula
takes at most 2 % more time than the compiler's fastest; many settings differ by less than the cost model tells apart.
Steps without `remat=outputs` were compiled when loops still zeroed their stacks, which is 1 % of their time. Meshes,
experts, layers with a state, full fine-tuning and other chips were not compared.

"""
SEED, EACH = 20261128, 8
CHOICES = (
    [f"max_length={length}" for length in (512, 1024, 2048, 4096)],
    [f"batch_size={rows}" for rows in (1, 2, 4, 8)],
    ["", "remat=outputs"],
    ["", "", "mlp_tile=null"],
    ["", "", "loss_chunk=2048"],
    ["", "", "lora.r=64"],
)


def setting(one: dict[str, Any]) -> Setting:
    """The planned run of a recorded answer."""
    config = configuration(one["model"], one["settings"])
    return Setting(config, read_shape(config.model), find_slice(CHIP, 1))


def drawn() -> list[dict[str, Any]]:
    """Draws `EACH` settings per model that fit the chip by formula, in the order of `MODELS`."""
    chosen, found = random.Random(SEED), list[dict[str, Any]]()
    for model in MODELS:
        mine: list[dict[str, Any]] = []
        while len(mine) < EACH:
            settings = [text for text in map(chosen.choice, CHOICES) if text]
            one = {"model": model, "settings": settings}
            if one not in mine and setting(one).fits:
                mine.append(one)
        found += mine
    return found


def correlation(first: list[float], second: list[float]) -> float:
    """Spearman's correlation of two lists; equal values share a rank."""
    ranks = [
        [sum(other < value for other in values) + sum(other <= value for other in values) for value in values]
        for values in (first, second)
    ]
    return statistics.correlation(*ranks)


def table(answers: list[dict[str, Any]]) -> str:
    """Formats the settings as Markdown: both times, the errors, and the rank correlations."""
    lines = ["| model | settings | compiler ms | formula ms | error |", "|---|---|---:|---:|---:|"]
    errors, ranks = [], {"of all": (list[float](), list[float]())}
    for one in (answer for answer in answers if "estimated" in answer):
        run, compiled = setting(one), 1000 * (sum(one["estimated"].values()) + HOST_SECONDS)
        formula = 1000 * run.time.seconds
        errors.append(formula / compiled - 1)
        for name in ("of all", f"of {one['model']}"):
            for values, value in zip(ranks.setdefault(name, ([], [])), (compiled, formula), strict=True):
                values.append(value / run.update.tokens_per_update)
        lines.append(
            f"| {one['model']} | {' '.join(one['settings'])} | {compiled:.1f} | {formula:.1f} | {errors[-1]:+.1%} |"
        )
    found = ", ".join(f"{correlation(*values):.2f} {name}" for name, values in ranks.items())
    sizes = [abs(error) for error in errors]
    return "\n".join(
        [*lines, "", f"Median error {statistics.median(sizes):.1%}, lowest {min(errors):+.1%}, highest "
         f"{max(errors):+.1%}. Spearman's correlation of the times of a token:\n{found}."]
    )  # fmt: skip


def record(answers: list[dict[str, Any]]) -> None:
    """Compiles the settings without an answer, and writes each answer to the file at once."""
    for one in answers:
        if "estimated" not in one:
            compiled = compile_step(configuration(one["model"], one["settings"]), CHIP)
            one |= {"estimated": dict(compiled.estimated), "total_bytes": compiled.total_bytes,
                    "compile_seconds": compiled.compile_seconds, "program": compiled.program}  # fmt: skip
            FILE.write_text("[\n" + ",\n".join(map(json.dumps, answers)) + "\n]\n")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="compile what is not recorded")
    parser.add_argument("--readme", action="store_true", help="put the last line into tpu_kit/planning/README.md")
    options = parser.parse_args()
    answers = json.loads(FILE.read_text()) if FILE.exists() else drawn()
    if options.missing:
        record(answers)
    printed = table(answers)
    print(printed)
    if options.readme:
        before, _, rest = PAGE.read_text().partition(HEADING)
        after = rest.partition("\n## ")[2]
        summary = printed.rpartition("\n\n")[2]
        PAGE.write_text(f"{before}{HEADING}{INTRODUCTION}{summary}\n" + (f"\n## {after}" if after else ""))


if __name__ == "__main__":
    main()
