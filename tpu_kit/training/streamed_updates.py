"""The updates of a run on streamed text: every update takes the stream's next rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, TrainConfig
from tpu_kit.data.batching import PackedDataset, Update, prefetch, shard_rows, updates
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.stream.feeder import shards_from
from tpu_kit.data.stream.packed_shards import Place, TextStream
from tpu_kit.distributed.preemption import PreemptionGuard
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.training.update_sources import NextUpdateError, Tensors, Updates


class _Rows(NamedTuple):
    """Rows of one shard that belong to one update."""

    number: int  # of the shard, counted over all epochs
    data: PackedDataset
    rows: np.ndarray


class StreamUpdates(Updates):
    """The updates of a stream. An update may have rows of several shards, and no row is left out."""

    keeps_state = True

    def __init__(self, config: TrainConfig, prepared: Prepared, plan: BatchPlan, rt: Runtime) -> None:
        super().__init__(config, prepared, plan, rt)
        assert prepared.stream is not None
        self._stream: TextStream = prepared.stream
        self._start = Place()
        self._made_until: dict[int, tuple[Place, float]] = {}  # step -> position and epochs after it
        self._parts: dict[int, list[_Rows]] = {}  # step -> its rows, kept until the log after the next
        self._skipped: dict[int, str] = {}  # shard -> text about its skipped rows, until a warning has it
        self._told = set[int]()

    def all(self) -> Iterator[Update]:
        """See `Updates.all`; `first_row` counts from the start of the run."""
        return updates(math.inf, self._plan, self._config.optim)

    def after(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """See `Updates.after`; waits for a shard unless the run has to stop."""
        return prefetch(self._streamed(step, agreement))

    def _streamed(self, step: int, agreement: PreemptionGuard) -> Iterator[tuple[Update, int, list[Tensors]]]:
        """Yields the items of `after`, without a thread."""
        readers = self._rt.world_size // self._rt.num_hosts
        number, used, shard, wanted_for = 0, 0, None, step + 1
        shards = shards_from(
            self._stream, self._start, self._rt.local_rank, readers, lambda: agreement.stopped_before(wanted_for)
        )
        try:
            for update in islice(self.all(), step, None):
                parts, wanted, wanted_for = list[_Rows](), update.rows, update.step
                while wanted:
                    if shard is None or used == len(shard.order):
                        used = self._start.row if shard is None else 0
                        if (received := next(shards, None)) is None:
                            yield update, 0, []
                            return
                        number, shard = received
                        if shard.skipped and number % self._stream.count not in self._told:
                            self._skipped[number % self._stream.count] = shard.skipped
                    taken = shard.order[used : used + wanted]
                    parts.append(_Rows(number, shard.data, taken))
                    used, wanted = used + len(taken), wanted - len(taken)
                assert shard is not None
                self._note(update.step, parts, number, used, len(shard.order))
                mine = shard_rows(np.arange(update.rows), update, self._plan, self._rt.data_shards)
                tokens = sum(int(part.data.row_tokens[part.rows].sum()) for part in parts)
                yield update, tokens, [_tensors(parts, numbers) for numbers in mine]
        except ValueError as error:
            raise self._ended(error) from error
        finally:
            shards.close()  # type: ignore[attr-defined]  # a generator

    def _ended(self, error: ValueError) -> ValueError:
        """Makes the error for a shard: NextUpdateError on a single host, whose replicas all end before this update."""
        return NextUpdateError(str(error)) if self._rt.num_hosts == 1 else ValueError(str(error))

    def _note(self, step: int, parts: list[_Rows], number: int, used: int, rows: int) -> None:
        """Records an update's rows, and the place after it: `used` of `rows` rows of shard `number` are trained."""
        count = self._stream.count
        place = Place(*divmod(number, count), used) if used < rows else Place(*divmod(number + 1, count))
        self._made_until[step] = place, (number + used / rows) / count
        self._parts[step] = parts

    def epoch_after(self, update: Update) -> float:
        """See `Updates.epoch_after`."""
        return self._made_until[update.step][1]

    def places(self, update: Update) -> list[str]:
        """See `Updates.places`; empty for an update that `metrics` has forgotten."""
        rows = {(part.number, row) for part in self._parts.get(update.step, ())
                for number in part.rows.tolist() for row in part.data.source_rows(number)}  # fmt: skip
        return [f"{row} of {self._stream.shard(number)}" for number, row in sorted(rows)]

    def metrics(self, window: Sequence[Update]) -> dict[str, float]:
        """Returns "shard", the last row's shard, from 0; forgets the updates before the window."""
        for kept in (self._made_until, self._parts):
            for step in [step for step in kept if step < window[0].step]:
                del kept[step]
        return {"shard": float(self._parts[window[-1].step][-1].number % self._stream.count)}

    def warnings(self, means: Mapping[str, float], step: int) -> list[str]:
        """Returns a text about skipped rows for every new shard that has some."""
        found, self._skipped = self._skipped, {}
        self._told |= found.keys()
        return [*found.values()]

    def document(self, step: int) -> dict[str, Any]:
        """See `Updates.document`: the position in the stream after a step."""
        return dict(self._made_until[step][0]._asdict())

    def restore(self, document: Mapping[str, Any]) -> None:
        """See `Updates.restore`."""
        self._start = Place(**document)


def _tensors(parts: Sequence[_Rows], numbers: np.ndarray) -> Tensors:
    """Returns the tensors of an update's rows with these numbers, which count the rows of all `parts`."""
    ends = np.cumsum([len(part.rows) for part in parts])
    of_part = np.searchsorted(ends, numbers, side="right")
    starts = ends - [len(part.rows) for part in parts]
    pieces = [
        parts[part].data.tensors(parts[part].rows[numbers[of_part == part] - starts[part]])
        for part in dict.fromkeys(of_part.tolist())
    ]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
