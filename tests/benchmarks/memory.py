"""What each way to save memory is worth, by the TPU compiler: `python -m tests.benchmarks.memory`.

The step of LoRA r=16 on all linear layers of Qwen2.5-0.5B's shape, 4 x 1024 tokens, compiled for one v5e chip; nothing
is run. Bytes are arguments + (outputs - aliased) + temporaries + code. Traffic and FLOPs count every turn of a loop;
attention kernels report none of their own. Unrolled programs compile for minutes; the compiler module keeps answers
on disk, so that a second run is quick.
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

from tpu_kit.compiler import Compiled, Effort, compile_step
from tpu_kit.config import TrainConfig, from_dict

CHIP, BATCH, LENGTH = "v5e:1x1", 4, 1024
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
PLAIN = {"scan_layers": "off", "attention": "sdpa", "remat": "full", "loss_chunk": BATCH * LENGTH}
SCAN = {"scan_layers": "on", "mlp_tile": None}
BEST = {"scan_layers": "on", "mlp_tile": 2048, "attention": "splash", "loss_chunk": 256}
# What differs from plain checkpointing.
ROWS: dict[str, dict[str, Any]] = {
    "plain checkpointing": {},
    "nothing computed again": {"remat": "none"},
    "loss in chunks of 256": {"loss_chunk": 256},
    "flash": {"attention": "flash"},
    "splash": {"attention": "splash"},
    "scan": SCAN,
    "scan, MLP tiles of 2048": SCAN | {"mlp_tile": 2048},
    "scan, splash": SCAN | {"attention": "splash"},
    "scan, splash, chunks of 256": SCAN | {"attention": "splash", "loss_chunk": 256},
    "scan, flash, chunks, tiles": BEST | {"attention": "flash"},
    "all: scan, splash, chunks, tiles": BEST,
    "all, chunks of 512": BEST | {"loss_chunk": 512},
    "all, tiles of 1024": BEST | {"mlp_tile": 1024},
}
PLAIN_ROW, BEST_ROW = "plain checkpointing", "all: scan, splash, chunks, tiles"
QUICK = ("scan, splash", BEST_ROW)


@dataclass(frozen=True)
class Report:
    """All that was compiled.

    Attributes:
        rows: the steps of `BATCH` rows, by name.
        largest: by name the largest batch that compiles, and its total bytes.
    """

    rows: dict[str, Compiled]
    largest: dict[str, tuple[int, int]]

    def goals(self) -> dict[str, bool]:
        """Which goals are met, of those whose rows are there."""
        best, plain, found = self.rows.get(BEST_ROW), self.rows.get(PLAIN_ROW), {}
        if best is not None:
            found["1.5 GiB in all"] = best.total_bytes <= 1.5 * 2**30
            found["100 GB of traffic a step"] = (best.bytes_accessed or math.inf) <= 100e9
        if best is not None and plain is not None:
            found["a tenth of the unrolled step's compile time"] = best.compile_seconds <= plain.compile_seconds / 10
            # Checkpointing computes every layer's forward pass twice; 1 % for what is no matrix product.
            found["no more FLOPs than one more forward pass"] = (best.flops or math.inf) <= (plain.flops or 0) * 1.01
        if {PLAIN_ROW, BEST_ROW} <= self.largest.keys():
            found["4 x plain checkpointing's largest batch"] = (
                self.largest[BEST_ROW][0] >= 4 * self.largest[PLAIN_ROW][0]
            )
        return found

    def __str__(self) -> str:
        head = f"{'':<34}" + "".join(
            f"{word:>12}"
            for word in ("total GiB", "arguments", "temporaries", "code", "traffic GB", "TFLOP", "seconds")
        )
        lines = [f"Qwen2.5-0.5B's shape, LoRA r=16, {BATCH} x {LENGTH} tokens, {CHIP}, by libtpu", "", head]
        for name, row in self.rows.items():
            parts = (row.total_bytes, row.argument_bytes, row.temporary_bytes, row.code_bytes)
            figures = [f"{part / 2**30:.3f}" if part is not None else "-" for part in parts]
            figures += [f"{(row.bytes_accessed or 0) / 1e9:.1f}", f"{(row.flops or 0) / 1e12:.2f}"]
            lines.append(f"{name:<34}" + "".join(f"{one:>12}" for one in [*figures, f"{row.compile_seconds:.0f}"]))
        for name, (batch, size) in self.largest.items():
            lines.append(f"largest batch, {name}: {batch} rows, {size / 2**30:.2f} GiB")
        if best := self.rows.get(BEST_ROW):
            lines += ["", f"largest buffers of {BEST_ROW!r} at the peak:"]
            buffers = [one for one in best.largest_buffers if one.kind != "argument"][:8]
            lines += [f"  {one.bytes / 2**20:7.1f} MiB  {one.shape:<26} {one.operation}" for one in buffers]
        return "\n".join(
            [*lines, "", *(f"{'met     ' if met else 'NOT MET '}{goal}" for goal, met in self.goals().items())]
        )


def configuration(model: Path, settings: dict[str, Any], batch: int = BATCH) -> TrainConfig:
    """A run of the model's shape; `settings` are what differs from plain checkpointing."""
    return from_dict({
        "model.name": str(model), "lora.r": 16, "max_length": LENGTH, "batch_size": batch, "max_steps": 10,
        "device_type": "tpu", **PLAIN, **settings,
    })  # fmt: skip


def largest_batch(model: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """The largest batch that fits, and its bytes: guessed from two quick compiles, then verified at full effort."""

    def total(batch: int, effort: Effort) -> Compiled:
        return compile_step(configuration(model, settings, batch), CHIP, effort=effort)

    low, high = total(BATCH, "low"), total(4 * BATCH, "low")
    slope = (high.total_bytes - low.total_bytes) / (3 * BATCH)
    batch = int(BATCH + (low.limit_bytes - low.total_bytes) / slope)
    while not (found := total(batch, "full")).fits:
        batch -= max(1, batch // 50)
    return batch, found.total_bytes


def measure(layers: int, names: list[str], effort: Effort, largest: bool) -> Report:
    """Compiles the named rows for a model of so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"qwen-{layers}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
        rows = {}
        for name in names:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows[name] = compile_step(configuration(model, ROWS[name]), CHIP, effort=effort)
        batches = {name: largest_batch(model, ROWS[name]) for name in (PLAIN_ROW, BEST_ROW)} if largest else {}
        return Report(rows, batches)


def main() -> None:
    """Prints the table, or the same as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="two layers, two rows, the compiler's low effort")
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), help="some rows only")
    parser.add_argument("--largest", action="store_true", help="find the largest batches, too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.smoke:  # the goals are for the whole model at full effort
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
