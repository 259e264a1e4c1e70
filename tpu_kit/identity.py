"""What makes a run another one: which parameters may change when it goes on from a checkpoint, and which may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.migration import flatten

# How long to train, when to look, where and in what order of computation to run. How rows are split over replicas and
# passes is compared by the global batch, and the data by its hash.
FREE = {
    "optim.max_steps", "optim.epochs", "optim.eval_steps", "optim.early_stop_patience", "optim.batch_size",
    "optim.gradient_accumulation", "optim.global_batch_size", "optim.on_nan", "optim.loss_chunk", "optim.remat",
    "optim.scan_layers", "optim.max_loss_rise", "optim.mlp_tile", "model.attention", "model.quant_cache",
    "data.num_proc", "output_dir", "run_name",
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "launch", "tracking")

ANEW = "another output_dir, or checkpoint.resume=never (which moves the old checkpoints aside)"
"""How a run starts anew where another one has been."""


def plain(config: TrainConfig) -> dict[str, Any]:
    """Every parameter by dotted name, as JSON has its value."""
    return flatten(config.to_dict())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters that differ: those that may, and those that make it another run.

    Args:
        before: plain values by dotted name. A parameter that it lacks is not compared.
        now: the same, of every parameter.
    """
    differ = [name for name in now if name in before and before[name] != now[name]]
    free = [name for name in differ if name in FREE or name.partition(".")[0] in FREE_SECTIONS]
    return free, [name for name in differ if name not in free]


def is_another(before: TrainConfig, now: TrainConfig, replicas: int) -> bool:
    """Whether a run of the one configuration cannot go on with the other, on as many replicas."""
    rows = [batch_arithmetic(config, replicas).global_batch_size for config in (before, now)]
    return rows[0] != rows[1] or bool(changes(plain(before), plain(now))[1])
