"""What each update of a run is: its rows, its number of passes and its learning rate; all known before the run starts.

Everything here is a function of the configuration, the number of packed rows and the step, so a resumed run needs
nothing but its step to go on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tpu_kit.config.loader import BatchPlan, DataConfig, OptimConfig
from tpu_kit.data.packing import permutation


@dataclass(frozen=True)
class Update:
    """One optimizer step.

    Attributes:
        step: its number, from 1.
        epoch: passes over the data that were complete before it.
        first_row: where its rows begin in the order of that epoch.
        passes: forward and backward passes per replica (gradient accumulation).
        rows: rows of all replicas and passes together.
    """

    step: int
    epoch: int
    first_row: int
    passes: int
    rows: int


def updates(dataset_rows: int, plan: BatchPlan, optim: OptimConfig) -> Iterator[Update]:
    """Yields the updates of a run in order.

    The last rows of an epoch that do not fill an update are left out; each epoch has another order, so others are.

    Args:
        dataset_rows: packed rows of the training data.
        plan: how rows are dealt to replicas and passes at the start.
        optim: `max_steps` or `epochs` ends the run; `batch_growth_*` multiplies the passes.

    Raises:
        ValueError: there are fewer rows than one update takes.
    """
    step, epoch, first_row = 1, 0, 0
    while optim.max_steps is None or step <= optim.max_steps:
        passes = _passes(step, plan, optim)
        rows = plan.batch_size * plan.num_replicas * passes
        if rows > dataset_rows:
            raise ValueError(too_few_rows(dataset_rows, replace(plan, gradient_accumulation=passes)))
        if first_row + rows > dataset_rows:
            epoch, first_row = epoch + 1, 0
        if optim.max_steps is None:
            assert optim.epochs is not None, "the configuration has one of the two"
            # Half an update of tolerance, so that epochs=1 is a whole epoch however the rows divide.
            if epoch + (first_row + rows / 2) / dataset_rows > optim.epochs and step > 1:
                return
        yield Update(step, epoch, first_row, passes, rows)
        step, first_row = step + 1, first_row + rows


def too_few_rows(dataset_rows: int, plan: BatchPlan) -> str:
    """What to change where the packed rows do not fill one update."""
    rows, replicas, passes = plan.batch_size, plan.num_replicas, plan.gradient_accumulation
    fixes = [f"launch.num_replicas={dataset_rows}"] if dataset_rows < replicas else []
    if fewer := dataset_rows // (replicas * passes):
        fixes = [f"optim.batch_size={fewer}"]
    elif dataset_rows >= replicas:
        fixes = [f"optim.batch_size=1 with optim.gradient_accumulation={dataset_rows // replicas}"]
    return (
        f"data set smaller than one global batch: it has {dataset_rows} rows after packing, and one update takes "
        f"{rows * replicas * passes} ({rows} per replica x {passes} accumulation x {replicas} replicas). Set "
        f"{fixes[0]}, set data.packing=false (a row for each example) or a smaller data.max_length, or give more data"
    )


def batch_line(dataset_rows: int, plan: BatchPlan, total: int) -> str:
    """The batch of a run, for people.

    Args:
        dataset_rows: packed rows of the training data.
        plan: how they are dealt.
        total: updates.
    """
    left = dataset_rows % plan.global_batch_size
    return f"batch            {plan}; {total:,} updates; {left} rows of each epoch are left over"


def rows_of(update: Update, dataset_rows: int, data: DataConfig) -> np.ndarray:
    """The packed rows of an update, over all replicas and passes: (rows,) int64, whatever replicas there are."""
    order = _order(dataset_rows, data.seed, update.epoch, data.shuffle)
    return order[update.first_row : update.first_row + update.rows]


@lru_cache(maxsize=2)  # the epoch that runs, and the next one, whose first batches are made ahead
def _order(rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    order = permutation(rows, seed, epoch, shuffle)
    order.flags.writeable = False  # all updates of the epoch are views of it
    return order


def deal(rows: np.ndarray, update: Update, plan: BatchPlan, rank: int) -> np.ndarray:
    """Those of one replica: (passes, rows of a batch)."""
    return rows.reshape(update.passes, plan.num_replicas, plan.batch_size)[:, rank]


def _passes(step: int, plan: BatchPlan, optim: OptimConfig) -> int:
    """Gradient accumulation at a step: it grows every `batch_growth_steps`, up to `batch_growth_max` rows."""
    passes = plan.gradient_accumulation
    if optim.batch_growth_steps is None:
        return passes
    most = (
        math.inf if optim.batch_growth_max is None else optim.batch_growth_max // (plan.batch_size * plan.num_replicas)
    )
    grown = float(passes)
    for _ in range((step - 1) // optim.batch_growth_steps):
        if grown >= most or optim.batch_growth_factor == 1:
            break
        grown *= optim.batch_growth_factor
    return max(passes, int(min(grown, most)))


def learning_rate(step: int, total_steps: int, optim: OptimConfig, growth: float = 1.0) -> float:
    """The learning rate of a step.

    Warm-up is linear from 0, and the decay linear or a half cosine, as in transformers' schedulers of these names.

    Args:
        step: from 1.
        total_steps: steps of the whole run.
        optim: the schedule.
        growth: how many times larger the batch is than at the start.
    """
    warmup = optim.warmup_steps or math.ceil(optim.warmup_ratio * total_steps)
    done = step - 1
    factor = {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[optim.batch_growth_lr]
    peak = optim.learning_rate * factor
    if done < warmup:
        return peak * done / warmup
    if optim.schedule == "constant":
        return peak
    progress = (done - warmup) / max(1, total_steps - warmup)
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    low = optim.min_learning_rate_ratio
    return peak * (low + (1.0 - low) * shape)
