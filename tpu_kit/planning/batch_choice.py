"""Chooses the rows of a pass and `optim.remat` before a launch, for `auto`, and where the data has fewer rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.data.batching import too_few_rows
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.planning.planner import MOST_UNTIMED_ROWS, best_setting
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


def settle(
    config: TrainConfig, room: TargetSlice, exact: bool, count: int | None, began: Mapping[str, Any]
) -> tuple[TrainConfig, list[str]]:
    """Chooses what `auto` leaves open of `optim.batch_size` and `optim.remat`; returns the run and the reasons.

    A resumed run keeps the rows of an update, and the rows of a pass where they still divide them. `began` has its
    "batch_size" and "global_batch_size"; it is empty for a new run.
    """
    notes = list[str]()
    if config.optim.batch_size == "auto" and isinstance(began.get("batch_size"), int):
        config, notes = _resumed(config, room, began["batch_size"], began["global_batch_size"])
    choices = ("batch_size", "remat") if room.device_type == "tpu" else ("batch_size",)
    names = [name for name in choices if getattr(config.optim, name) == "auto"]
    if not names:
        return config, notes
    best = best_setting(config, room, exact, Count(count))
    why = f"the fastest that leaves {best.free:.0%} of {room.limit / GIB:.2f} GiB, by {best.source}"
    if room.chip.bf16_flops is None:
        why = f"the most that leaves {best.free:.0%} of {room.limit / GIB:.2f} GiB, and {MOST_UNTIMED_ROWS} at most"
    elif not best.fits:
        why = "which takes least"
    values: dict[str, Any] = {name: getattr(best.config.optim, name) for name in names}
    notes += [f"optim.{name}=auto is {value}: {why}" for name, value in values.items()]
    return replace(config, optim=replace(config.optim, **values)), notes


def _resumed(config: TrainConfig, room: TargetSlice, rows: int, whole: int) -> tuple[TrainConfig, list[str]]:
    """Keeps the rows of an update, and those of a pass where they still divide them."""
    optim = config.optim
    if not config.on_policy:  # else its passes hold what was sampled
        optim = replace(optim, global_batch_size=optim.global_batch_size or whole, gradient_accumulation=1)
        if whole != optim.global_batch_size or whole % (rows * room.replicas):
            return replace(config, optim=optim), []
    note = f"optim.batch_size={rows}, as in the run that this one resumes"
    return replace(config, optim=replace(optim, batch_size=rows)), [note]


def newest(config: TrainConfig) -> tuple[Checkpoint, Any] | None:
    """Finds the last checkpoint in a run's folder, with its configuration; None without one."""
    try:
        found = list_checkpoints(config.checkpoints_place)[0]
        return (found[-1], found[-1].document("config")) if found else None
    except (OSError, ValueError):  # an object store does not answer, or a file is damaged: the run raises it too
        return None
