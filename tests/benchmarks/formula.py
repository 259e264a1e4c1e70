"""The memory formula against the TPU compiler, as a table: `python -m tests.benchmarks.formula`.

The compiler's answers are those of tests/recorded_memory.json; with --compile each is asked for again and recorded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from tests.test_memory import ANSWERS, RECORDED, configuration
from tpu_kit.compiler import compile_step
from tpu_kit.memory import estimate

FIELDS = ("total_bytes", "argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops",
          "bytes_accessed", "compile_seconds", "libtpu", "program")  # fmt: skip


def table(folder: Path) -> str:
    """Markdown: the configurations, what either says in GiB, the error; then its median and worst."""
    lines = ["| model | layers | slice | replicas | settings | compiler | formula | error |"]
    lines.append("|---|---:|---|---:|---|---:|---:|---:|")
    errors = []
    for one in ANSWERS:
        found = estimate(configuration(one, folder), num_replicas=one["replicas"]).total_bytes
        errors.append(found / one["total_bytes"] - 1)
        lines.append(
            f"| {one['model']} | {one['layers']} | {one['topology']} | {one['replicas']} "
            f"| {' '.join(one['settings'])} | {one['total_bytes'] / 2**30:.3f} | {found / 2**30:.3f} "
            f"| {errors[-1]:+.1%} |"
        )
    sizes = [abs(error) for error in errors]
    lines += ["", f"{len(errors)} configurations: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}, "
              f"lowest {min(errors):+.1%}."]  # fmt: skip
    return "\n".join(lines)


def record(folder: Path) -> None:
    """Asks the compiler for every answer again and writes the file anew."""
    for one in ANSWERS:
        compiled = compile_step(configuration(one, folder), one["topology"], num_replicas=one["replicas"])
        one |= {name: getattr(compiled, name) for name in FIELDS}
    models = ",\n".join(f"{json.dumps(name)}: {json.dumps(shape)}" for name, shape in RECORDED["models"].items())
    answers = ",\n".join(map(json.dumps, ANSWERS))
    text = f'{{"models": {{\n{models}}},\n"answers": [\n{answers}\n]}}\n'
    (Path(__file__).parents[1] / "recorded_memory.json").write_text(text)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="ask the compiler again; an hour on two cores")
    with tempfile.TemporaryDirectory() as folder:
        if parser.parse_args().compile:
            record(Path(folder))
        print(table(Path(folder)))


if __name__ == "__main__":
    main()
