"""The updates of a run and the source of their batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import BatchError, Update, prefetch, rows_of, shard_rows, updates
from tpu_kit.data.prepare import Prepared
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.generation.generator import Generator

Tensors = dict[str, torch.Tensor]


class NextUpdateError(ValueError):
    """The next update's batches cannot be made; all replicas raise it before that update."""


class Updates:
    """The updates of a run and their batches of packed rows, which a thread makes ahead.

    Attributes:
        splits: whether the number of passes varies, so that an update is two programs (`step.SplitStep`).
        keeps_state: whether a checkpoint needs `document`.
        generator: answers the held-out rows, whose loss is then not computed; None computes their loss.
        rows: number of packed rows per epoch, or of prompts if the run samples.
    """

    splits = False
    keeps_state = False
    generator: Generator | None = None

    def __init__(self, config: TrainConfig, prepared: Prepared, plan: BatchPlan, rt: Runtime) -> None:
        self._config, self._data, self._plan, self._rt = config, prepared.train, plan, rt
        self._place = prepared.place
        self.rows = len(prepared.train)

    def all(self) -> Iterator[Update]:
        """Yields the updates of the whole run."""
        return updates(self.rows, self._plan, self._config.optim)

    def begin(self, step: int, agreement: PreemptionGuard) -> bool:
        """Prepares tensors that the updates after a step need on the device; returns False if the run has to stop."""
        return True

    def after(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields every update after a step, its tokens on all replicas without padding, and this replica's batches.

        The batches are CPU tensors, one dictionary per pass. An update that may not run may have none.

        Raises:
            NextUpdateError: the batches of an update cannot be made; with several replicas, BatchError instead.
        """
        return prefetch(self._made(step))

    def _made(self, step: int) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields the items of `after`, without a thread."""
        for update in islice(self.all(), step, None):
            taken = rows_of(update, self.rows, self._config.data, self._data.grouping)
            mine = shard_rows(taken, update, self._plan, self._rt.data_shards)
            try:
                batches = [self._data.tensors(part) for part in mine]
            except BatchError as error:
                if self._rt.world_size == 1:  # the others would wait for this replica
                    raise NextUpdateError(str(error)) from error
                raise
            yield update, int(self._data.row_tokens[taken].sum()), batches

    def source_rows(self, update: Update) -> list[int]:
        """Returns the numbers of an update's data set rows (not packed rows), sorted, without repetitions."""
        packed = rows_of(update, self.rows, self._config.data, self._data.grouping)
        return sorted({row for number in packed for row in self._data.source_rows(number)})

    def places(self, update: Update) -> list[str]:
        """Returns the locations of an update's data set rows, for messages."""
        return [self._place(row) for row in self.source_rows(update)]

    def epoch_after(self, update: Update) -> float:
        """Returns the number of epochs completed after an update, as a fraction."""
        return update.epoch + (update.first_row + update.rows) / self.rows

    def metrics(self, window: Sequence[Update]) -> dict[str, float]:
        """Returns further numbers for the log of some updates; called once per window of updates, in order."""
        return {}

    def warnings(self, means: Mapping[str, float], step: int) -> list[str]:
        """Returns new warnings about the means of the log at a step; step 0 is the evaluation before training."""
        return []

    def evaluating(self) -> None:
        """Prepares an evaluation; called on all replicas. Does nothing here."""

    def evaluated(self, step: int) -> None:
        """Ends an evaluation; called on all replicas while the model still has the evaluated weights."""

    def document(self, step: int) -> dict[str, Any]:
        """Returns the JSON state that a checkpoint needs in addition to continue after a step."""
        return {}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Restores the state that `document` returned, before `begin`."""
