"""Measures the effect of each memory-saving method by the TPU compiler: `python -m tests.benchmarks.memory`.

It compiles a LoRA step (r=16, all linear layers) of Qwen2.5-0.5B's shape on 4 x 1024 tokens for one v5e chip; nothing
is run. Bytes are arguments + (outputs - aliased) + temporaries + code. Traffic and FLOPs count every iteration of a
loop. "HBM" is the traffic between HBM and the chip; "accessed" is the compiler's own count, which includes on-chip
memory. Unrolled programs take minutes to compile. Answers are cached on disk, so an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.planning.compiler.compile_check import Compiled, Effort, compile_step

CHIP, BATCH, LENGTH, RANK = "v5e:1x1", 4, 1024, 16
GIB = 2**30
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
PLAIN = {"scan_layers": "off", "attention": "sdpa", "remat": "full"}
SCAN = {"scan_layers": "on", "mlp_tile": None}
BEST = {"scan_layers": "on", "mlp_tile": 2048, "attention": "splash", "loss_chunk": 256}
# Settings that differ from plain checkpointing.
ROWS: dict[str, dict[str, Any]] = {
    "plain checkpointing": {},
    "loss in chunks of 256": {"loss_chunk": 256},
    "splash": {"attention": "splash"},
    "scan": SCAN,
    "scan, MLP tiles of 2048": SCAN | {"mlp_tile": 2048},
    "scan, splash": SCAN | {"attention": "splash"},
    "scan, splash, chunks of 256": SCAN | {"attention": "splash", "loss_chunk": 256},
    "all: scan, splash, chunks, tiles": BEST,
    "all, chunks of 512": BEST | {"loss_chunk": 512},
    "all, tiles of 1024": BEST | {"mlp_tile": 1024},
    "all, results kept": BEST | {"remat": "outputs"},
}
PLAIN_ROW, BEST_ROW = "plain checkpointing", "all: scan, splash, chunks, tiles"
QUICK = ("scan, splash", BEST_ROW)


@dataclass(frozen=True)
class Report:
    """All compiled programs.

    Attributes:
        layers: The model's number of layers.
        rows: By name, the steps on `BATCH` rows.
        largest: By name, the largest batch that compiles, and its total bytes.
    """

    layers: int
    rows: dict[str, Compiled]
    largest: dict[str, tuple[int, int]]

    def goals(self) -> dict[str, tuple[bool, str]]:
        """By goal that the rows cover: whether it is met, and the figures. Empty unless all layers are there."""
        if self.layers != MODEL["num_hidden_layers"]:
            return {}
        best, plain = (self.rows.get(name) for name in (BEST_ROW, PLAIN_ROW))
        found = {}
        if best is not None:
            found["1.5 GiB in all"] = best.total_bytes <= 1.5 * GIB, _memory(best)
            moved, accessed = (best.hbm_bytes or math.inf) / 1e9, (best.bytes_accessed or math.inf) / 1e9
            found["100 GB of HBM traffic a step"] = moved <= 100, f"{moved:.1f}; accessed, on-chip too: {accessed:.1f}"
        if best is not None and plain is not None:
            seconds = best.compile_seconds, plain.compile_seconds
            found["a tenth of the unrolled step's compile time"] = (
                seconds[0] <= seconds[1] / 10, f"{seconds[0]:.0f} of {seconds[1]:.0f} s; low effort is for the search"
            )  # fmt: skip
        if {PLAIN_ROW, BEST_ROW} <= self.largest.keys():
            rows = self.largest[BEST_ROW][0], self.largest[PLAIN_ROW][0]
            found["4 x plain checkpointing's largest batch"] = rows[0] >= 4 * rows[1], f"{rows[0]} and {rows[1]} rows"
        return found

    def __str__(self) -> str:
        words = ("total GiB", "arguments", "temporaries", "code", "HBM GB", "accessed", "TFLOP", "seconds")
        lines = [
            f"Qwen2.5-0.5B's shape, {self.layers} layers, LoRA r=16, {BATCH} x {LENGTH} tokens, {CHIP}, by libtpu",
            "",
        ]
        lines += [f"{'':<34}" + "".join(f"{word:>12}" for word in words)]
        lines += [line(name, row) for name, row in self.rows.items()]
        for name, (batch, size) in self.largest.items():
            lines.append(f"largest batch, {name}: {batch} rows, {size / GIB:.2f} GiB")
        return "\n".join(
            [
                *lines,
                "",
                *(f"{'met' if met else 'NOT MET':<8}{goal}: {why}" for goal, (met, why) in self.goals().items()),
            ]
        )


def line(name: str, row: Compiled) -> str:
    """A row of the table."""
    parts = (row.total_bytes, row.argument_bytes, row.temporary_bytes, row.code_bytes)
    figures = [f"{part / GIB:.3f}" if part is not None else "-" for part in parts]
    figures += [f"{(moved or 0) / 1e9:.1f}" for moved in (row.hbm_bytes, row.bytes_accessed)]
    figures += [f"{(row.flops or 0) / 1e12:.2f}", f"{row.compile_seconds:.0f}"]
    return f"{name:<34}" + "".join(f"{one:>12}" for one in figures)


def _memory(best: Compiled) -> str:
    """Formats a step's memory by kind."""
    assert best.argument_bytes is not None and best.temporary_bytes is not None
    return (
        f"{best.total_bytes / GIB:.3f}, of which {best.argument_bytes / GIB:.3f} are arguments and "
        f"{best.temporary_bytes / GIB:.3f} temporaries"
    )


def configuration(model: Path, settings: dict[str, Any], batch: int = BATCH) -> TrainConfig:
    """A configuration of the model's shape; `settings` override plain checkpointing."""
    return load_config({
        "model.name": str(model), "lora.r": RANK, "max_length": LENGTH, "batch_size": batch, "max_steps": 10,
        "device_type": "tpu", "loss_chunk": batch * LENGTH, **PLAIN, **settings,
    })  # fmt: skip


def largest_batch(model: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """Finds the largest batch that fits, and its bytes: guessed from two quick compiles, then verified at full effort.

    It also verifies that a batch 2 % larger does not fit.
    """

    def total(batch: int, effort: Effort) -> Compiled:
        return compile_step(configuration(model, settings, batch), CHIP, effort=effort)

    low, high = total(BATCH, "low"), total(4 * BATCH, "low")
    slope = (high.total_bytes - low.total_bytes) / (3 * BATCH)
    batch = int(BATCH + (low.limit_bytes - low.total_bytes) / slope)
    step = max(1, batch // 50)
    while not (found := total(batch, "full")).fits:
        batch -= step
    while (more := total(batch + step, "full")).fits:
        batch, found = batch + step, more
    return batch, found.total_bytes


def measure(layers: int, names: list[str], effort: Effort, largest: bool) -> Report:
    """Compiles the named rows for a model with `layers` layers."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"qwen-{layers}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
        rows = {}
        for name in names:
            rows[name] = compile_step(configuration(model, ROWS[name]), CHIP, effort=effort)
            print(line(name, rows[name]), file=sys.stderr, flush=True)
        batches = {name: largest_batch(model, ROWS[name]) for name in (PLAIN_ROW, BEST_ROW)} if largest else {}
        return Report(layers, rows, batches)


def main() -> None:
    """Prints the table, as text or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two layers, two rows, the compiler's low effort")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), help="some rows only")
    parser.add_argument("--largest", action="store_true", help="find the largest batches, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        report = measure(2, list(QUICK), "low", largest=False)
    else:
        report = measure(MODEL["num_hidden_layers"], args.rows, "full", args.largest)
    if args.json:
        rows = {name: row.to_dict() for name, row in report.rows.items()}
        print(json.dumps(asdict(report) | {"rows": rows, "goals": report.goals()}))
    else:
        print(report)


if __name__ == "__main__":
    main()
