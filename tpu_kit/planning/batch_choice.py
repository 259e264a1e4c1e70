"""Chooses the rows of a pass before a launch: for `optim.batch_size=auto`, and where the data has fewer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.data.batching import too_few_rows
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.planning.planner import MOST_UNTIMED_ROWS, best_batch
from tpu_kit.planning.run_cost import Count
from tpu_kit.training.checkpoint.manager import Checkpoint, list_checkpoints


def filled_batch(config: TrainConfig, replicas: int, rows: int | None) -> tuple[TrainConfig, list[str]]:
    """Lowers the default batch to one that the rows fill."""
    batch = batch_arithmetic(config, replicas)
    if rows is None or config.on_policy or rows >= batch.global_batch_size:
        return config, []
    given = {"optim.batch_size", "optim.global_batch_size", "optim.gradient_accumulation"} & set(config.sources)
    if given or rows < replicas:
        raise ConfigError([too_few_rows(rows, batch)])
    fewer = rows // replicas
    note = f"optim.batch_size={fewer}, not {batch.batch_size}: the data is {rows} rows after packing"
    return replace(config, optim=replace(config.optim, batch_size=fewer)), [note]


def settle_batch(
    config: TrainConfig, room: TargetSlice, exact: bool, count: int | None, began: Mapping[str, Any]
) -> tuple[TrainConfig, str]:
    """Chooses a number for `optim.batch_size=auto`; returns the run and the reason.

    A resumed run keeps the rows of an update, and the rows of a pass where they still divide them. `began` has its
    "batch_size" and "global_batch_size"; it is empty for a new run.
    """
    optim = config.optim
    if isinstance(rows := began.get("batch_size"), int):
        whole = began["global_batch_size"]
        if not config.on_policy:  # else its passes hold what was sampled
            optim = replace(optim, global_batch_size=optim.global_batch_size or whole, gradient_accumulation=1)
        if config.on_policy or (whole == optim.global_batch_size and whole % (rows * room.replicas) == 0):
            why = f"optim.batch_size={rows}, as in the run that this one resumes"
            return replace(config, optim=replace(optim, batch_size=rows)), why
        config = replace(config, optim=optim)
    best = best_batch(config, room, exact, Count(count))
    rows, left = best.update.batch_size, f"that leaves {best.free:.0%} of {room.limit / GIB:.2f} GiB"
    why = f"the fastest {left}, by {best.source}"
    if room.chip.bf16_flops is None:
        why = f"the most {left}, and {MOST_UNTIMED_ROWS} at most"
    return replace(config, optim=replace(config.optim, batch_size=rows)), f"optim.batch_size=auto is {rows}: {why}"


def newest(config: TrainConfig) -> tuple[Checkpoint, Any] | None:
    """Finds the last checkpoint in a run's folder, with its configuration; None without one."""
    try:
        found = list_checkpoints(config.checkpoints_place)[0]
        return (found[-1], found[-1].document("config")) if found else None
    except (OSError, ValueError):  # an object store does not answer, or a file is damaged: the run raises it too
        return None
