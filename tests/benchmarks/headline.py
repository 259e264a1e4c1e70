"""Prints the memory and speed of shipped configurations by the TPU compiler: `python -m tests.benchmarks.headline`.

Each row is a configuration as `train` uses it, compiled at full effort for its named chip, which takes a minute or two.
Programs compiled before come from a cache. Nothing is run: speed and cost follow the compiler's cost model. --readme
writes the table into tpu_kit/planning/README.md, as `make test-slow` does.
"""

from __future__ import annotations

import argparse

from tests.support.child_processes import REPOSITORY
from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.machine import chips
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import timed

GIB = 2**30
ROWS = (
    "llama-8b-v5e", "llama-8b-v5e batch_size=1", "llama-8b-v5e batch_size=1 max_length=2048",
    "llama-8b-v5e batch_size=1 max_length=8192", "llama-8b-v5e batch_size=1 base_dtype=int4", "llama-3b-8k-v5e",
    "qwen-14b-v5e", "gemma-4-e2b-v5e", "qwen3.5-4b-v5e", "llama-8b-v6e", "qwen-14b-v6e",
)  # fmt: skip
"""A configuration's name, which ends in its chip, and changed settings."""
COLUMNS = (
    "configuration", "base", "rows x tokens", "GiB", "TFLOP a step", "HBM GB", "tokens/s", "$ a million tokens"
)  # fmt: skip
PAGE = REPOSITORY / "tpu_kit" / "planning" / "README.md"
HEADER = f"| {' | '.join(COLUMNS)} |\n|---|---|---|---|{'---:|' * 4}\n"


def configuration(row: str) -> TrainConfig:
    """The configuration of a row."""
    name, *settings = row.split()
    return load_config(name, ["device_type=tpu", *settings])


def known(row: str) -> str:
    """The beginning of a line, which needs no compiler."""
    config = configuration(row)
    assert isinstance(config.optim.batch_size, int)
    return f"| `{row}` | {config.model.base_dtype} | {config.optim.batch_size} x {config.data.max_length:,} | "


def line(row: str) -> str:
    """A line of the table."""
    config, chip = configuration(row), chips.chip(row.split()[0].rpartition("-")[2])
    found = compile_step(config, f"{chip.name}:1x1")
    assert found.fits, f"{row}: {found}"
    assert found.flops and found.hbm_bytes and chip.price and isinstance(config.optim.batch_size, int)
    seconds = timed(sum(found.estimated.values()), 0.0, (), chip).seconds
    speed = config.optim.batch_size * config.data.max_length / seconds
    return known(row) + (
        f"{found.total_bytes / GIB:.2f} of {found.limit_bytes / GIB:.2f} | {found.flops / 1e12:.0f} | "
        f"{found.hbm_bytes / 1e9:.0f} | {speed:,.0f} | {chip.price.on_demand / speed / 3600 * 1e6:.2f} |\n"
    )


def publish(lines: list[str]) -> None:
    """Replaces the table in tpu_kit/planning/README.md."""
    before, header, rest = PAGE.read_text().partition(HEADER)
    assert header, f"{PAGE} has no such table"
    PAGE.write_text(before + header + "".join(lines) + "\n" + rest.partition("\n\n")[2])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", action="store_true", help="put the table into tpu_kit/planning/README.md")
    options = parser.parse_args()
    lines = [line(row) for row in ROWS]
    print(HEADER + "".join(lines), end="")
    if options.readme:
        publish(lines)


if __name__ == "__main__":
    main()
