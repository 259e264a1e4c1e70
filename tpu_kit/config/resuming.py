"""The parameters that may change when a run resumes; a change of any other parameter makes it a different run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Parameters of the run's length, evaluations, machine and order of computation. The resume check compares the global
# batch instead of its split over replicas and passes, and the hash of the data.
FREE = {
    "optim.max_steps", "optim.epochs", "optim.eval_steps", "optim.early_stop_patience", "optim.batch_size",
    "optim.gradient_accumulation", "optim.global_batch_size", "optim.on_nan", "optim.loss_chunk", "optim.remat",
    "optim.scan_layers", "optim.max_loss_rise", "optim.mlp_tile", "model.attention", "model.quant_cache",
    "data.num_proc", "data.images_per_row", "distill.files", "output_dir", "run_name",
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "launch", "tracking", "hub")

ANEW = (
    "another run_name (or output_dir, if it is set), or checkpoint.resume=never (which moves the old checkpoints aside)"
)
"""How to start a new run in place of an earlier one."""


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns two lists of parameters that differ: (may change, make it a different run).

    `before` and `now` are plain values by dotted name; a parameter that either lacks is not compared.
    """
    differ = [name for name in now if name in before and before[name] != now[name]]
    free = [name for name in differ if name in FREE or name.partition(".")[0] in FREE_SECTIONS]
    return free, [name for name in differ if name not in free]
