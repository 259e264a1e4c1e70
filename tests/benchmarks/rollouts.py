"""Prints the compiled memory of reinforcement learning's programs as a table: `python -m tests.benchmarks.rollouts`.

The compiler's answers are in tests/recorded_rollouts.json. `--compile` compiles all programs again, some minutes per
program; programs compiled before come from a cache. `--readme` writes the largest program of each run into
tpu_kit/planning/README.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.child_processes import REPOSITORY
from tpu_kit.config.loader import TrainConfig, as_trained, load_config
from tpu_kit.config.mesh import Mesh, resolve_mesh
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.compiler.compile_check import compile_programs
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.planning.program_peaks import program_rows

PAGE = REPOSITORY / "tpu_kit" / "planning" / "README.md"
FILE = Path(__file__).parents[1] / "recorded_rollouts.json"
ANSWERS: list[dict[str, Any]] = json.loads(FILE.read_text())
HEADER = (
    "| model | on each device of | program | compiler: its own | what lies beside | in all | formula |\n"
    f"|---|---|---|{'---:|' * 4}\n"
)
SUMMARY = (
    "| model | on each device of | largest program | compiler | formula | error of the others |\n"
    f"|---|---|---|{'---:|' * 3}\n"
)
FIELDS = ("total_bytes", "argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops",
          "bytes_accessed", "hbm_bytes", "compile_seconds", "libtpu", "program")  # fmt: skip


def configuration(answer: dict[str, Any]) -> TrainConfig:
    """The configuration of an answer."""
    return as_trained(load_config(None, ["device_type=tpu", "max_steps=100", *answer["settings"]]))


def mesh_of(answer: dict[str, Any]) -> Mesh | None:
    """The mesh of an answer."""
    text = configuration(answer).launch.mesh
    return resolve_mesh(text, answer["replicas"]) if text else None


def rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The bytes of a device in each program, by formula and by the compiler."""
    memory = estimate(
        configuration(answer), num_replicas=answer["replicas"], mesh=mesh_of(answer)
    )  # fmt: skip
    made: Any = {name: SimpleNamespace(**one) for name, one in answer["programs"].items()}
    return program_rows(memory.programs, made)


def lines(answer: dict[str, Any]) -> str:
    """The lines of the table for an answer."""
    config, text = configuration(answer), ""
    for row in rows(answer):
        own = answer["programs"][row["program"]]["total_bytes"]
        sizes = (own, row["compiler_bytes"] - own, row["compiler_bytes"], row["formula_bytes"])
        figures = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        text += f"| {config.model.name} | {place(answer)} | {row['program']} | {figures} |\n"
    return text


def place(answer: dict[str, Any]) -> str:
    """Returns the slice, and the mesh if the run has one."""
    mesh = configuration(answer).launch.mesh
    return answer["topology"] + (f", mesh {mesh}" if mesh else "")


def summary(answer: dict[str, Any]) -> str:
    """Returns the line of an answer in the README: its largest program, and the formula's errors for the others."""
    found = sorted(rows(answer), key=lambda row: -row["compiler_bytes"])
    errors = [row["formula_bytes"] / row["compiler_bytes"] - 1 for row in found[1:]]
    sizes = " | ".join(f"{found[0][name] / GIB:.2f}" for name in ("compiler_bytes", "formula_bytes"))
    name = configuration(answer).model.name
    return (
        f"| {name} | {place(answer)} | {found[0]['program']} | {sizes} | {min(errors):+.1%} to {max(errors):+.1%} |\n"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="ask the compiler again")
    parser.add_argument("--readme", action="store_true", help="put the largest ones into tpu_kit/planning/README.md")
    options = parser.parse_args()
    for answer in ANSWERS if options.compile else ():
        made = compile_programs(configuration(answer), answer["topology"], answer["replicas"])
        answer["programs"] = {name: {field: getattr(one, field) for field in FIELDS} for name, one in made.items()}
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, ANSWERS)) + "\n]\n")
    printed = HEADER + "".join(map(lines, ANSWERS))
    print(printed, end="")
    if options.readme:
        before, header, rest = PAGE.read_text().partition(SUMMARY)
        assert header, f"{PAGE} has no such table"
        PAGE.write_text(before + header + "".join(map(summary, ANSWERS)) + "\n" + rest.partition("\n\n")[2])


if __name__ == "__main__":
    main()
