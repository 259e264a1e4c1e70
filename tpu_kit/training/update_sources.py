"""The updates of a run, and where their batches come from."""

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
    """The next update cannot be made, for a reason outside the training; all replicas raise it before that update."""


class Updates:
    """The updates of a run and the batches of each: of packed rows, which a thread makes ahead.

    Attributes:
        splits: whether the number of passes changes, so that an update is two programs.
        keeps_state: whether a checkpoint needs a `document`.
        generator: answers held-out rows in place of their loss; None computes the loss.
        rows: number of rows of an epoch.
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
        """Makes what all updates after a step need, on the device; returns False if the run is to stop before."""
        return True

    def after(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields the updates after a step, their tokens on all replicas without padding, and this replica's batches.

        An update that `agreement` does not let run may have no batches.

        Raises:
            NextUpdateError: the batches of an update cannot be made.
        """
        return prefetch(self._made(step))

    def _made(self, step: int) -> Iterator[tuple[Update, int, list[Tensors]]]:
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
        """Returns the data set rows of an update, sorted."""
        packed = rows_of(update, self.rows, self._config.data, self._data.grouping)
        return sorted({row for number in packed for row in self._data.source_rows(number)})

    def places(self, update: Update) -> list[str]:
        """Names the data set rows of an update."""
        return [self._place(row) for row in self.source_rows(update)]

    def epoch_after(self, update: Update) -> float:
        """Returns the epochs that are done after an update."""
        return update.epoch + (update.first_row + update.rows) / self.rows

    def metrics(self, window: Sequence[Update]) -> dict[str, float]:
        """Returns further numbers for the log of some updates, each of which is asked for once."""
        return {}

    def warnings(self, means: Mapping[str, float], step: int) -> list[str]:
        """Returns what to say about the means of a log at a step, once each; step 0 is the first evaluation."""
        return []

    def evaluating(self) -> None:
        """Called on all replicas before the held-out rows are measured."""

    def evaluated(self, step: int) -> None:
        """Called on all replicas after the held-out rows were measured, with the weights that they were measured by."""

    def document(self, step: int) -> dict[str, Any]:
        """Returns what a checkpoint needs besides to continue after a step, of values for JSON."""
        return {}

    def restore(self, document: Mapping[str, Any]) -> None:
        """Continues from a `document`."""
