"""Packs documents into rows of a fixed shape, and plans the rows, passes and learning rate of every update.

All batches have the shape `(batch, length)`, because XLA compiles a program for every shape. Segment ids separate the
documents of a row, and the positions of a document start at 0, so no document attends to another.

Update `u` of an epoch takes rows `u * G` to `(u + 1) * G` of a permutation that depends only on seed and epoch; G is
the global batch size. Replicas and accumulation only divide these rows. A resumed run therefore needs nothing but its
step, and may use another number of replicas.

A text stream (`data.stream`) has no such permutation. Update `u` takes the next rows after update `u - 1`, shard by
shard; the number of rows in a shard is known only after it is tokenised. A resumed run needs its place in the stream:
epoch, shard and row. Replicas and accumulation only divide the rows of an update there, too.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from tpu_kit.config.loader import BatchPlan, DataConfig, OptimConfig

if TYPE_CHECKING:
    from tpu_kit.data.tokenizing import Joined

IGNORED = -100
"""The label of a position without loss, as in `torch.nn.functional.cross_entropy`."""

_RUN = 1 << 16  # tokens that are processed together

T = TypeVar("T")


class BatchError(ValueError):
    """Raised if rows cannot become a batch, for a reason that only shows while the batch is made."""


@dataclass(frozen=True)
class Documents:
    """Tokenised documents in flat arrays, which may be memory-mapped files of a cache.

    Attributes:
        input_ids: int32 (tokens,).
        loss_mask: bool (tokens,), true if a token is predicted with loss.
        lengths: int64 (documents,), tokens per document, at least 1.
        source_rows: int64 (documents,), row of the data set that a document comes from.
        images: images of the documents (`data.images.encoding.DocumentImages`); None for text.
        pairs: int32 (documents, N), fields of `data.pairs.PairTokens`, later of `Unit`; None without pairs.
        places: int64 (documents,), starts of the documents in the flat arrays, which may contain other documents too;
            None if the arrays contain exactly these documents, in order.
    """

    input_ids: np.ndarray | Joined
    loss_mask: np.ndarray | Joined
    lengths: np.ndarray
    source_rows: np.ndarray
    images: Any = None
    pairs: np.ndarray | None = None
    places: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Starts of the documents in the flat arrays, int64 (documents,)."""
        return np.cumsum(self.lengths) - self.lengths if self.places is None else self.places

    def select(self, keep: np.ndarray) -> Documents:
        """Returns the documents for which the bool array `keep`, (documents,), is true; they share the flat arrays."""
        images = None if self.images is None else self.images.select(keep)
        arrays = self.input_ids, self.loss_mask, self.lengths[keep], self.source_rows[keep]
        pairs = None if self.pairs is None else self.pairs[keep]
        return Documents(*arrays, images, pairs, self.starts[keep])

    def runs(self) -> Iterator[tuple[slice, slice]]:
        """Yields runs of documents, in order, that are contiguous in the flat arrays; at least one document must exist.

        Yields:
            The slice of document numbers, and their slice of the flat arrays, which has about 65,536 tokens at most.
        """
        starts, ends = self.starts, self.starts + self.lengths
        apart = (starts[1:] != ends[:-1]) | (np.diff(np.cumsum(self.lengths) // _RUN) > 0)
        for first, last in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(self)]):
            yield slice(first, last), slice(int(starts[first]), int(ends[last - 1]))

    @cached_property
    def loss_tokens(self) -> np.ndarray:
        """Number of tokens with loss per document, int64 (documents,)."""
        counts = np.zeros(len(self), dtype=np.int64)
        for numbers, tokens in self.runs():
            firsts = self.starts[numbers] - tokens.start
            counts[numbers] = np.add.reduceat(self.loss_mask[tokens], firsts, dtype=np.int64)
        return counts


def best_fill(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Assigns documents to rows so that few token slots stay empty.

    A row starts with the longest remaining document and adds the documents that fill it best. They solve a subset-sum
    problem over the histogram of lengths, as in the minimum bin slack heuristic of Gupta and Ho (1999).

    Args:
        lengths: (documents,), tokens per document, 1 to `row_length`.
        row_length: tokens per row.

    Returns:
        The document numbers in the order of the rows, and the number of documents per row (both int64).
    """
    by_length = np.argsort(lengths, kind="stable")
    unique, starts = np.unique(lengths[by_length], return_index=True)
    sizes = unique.tolist()
    return filled_rows(by_length, starts, lambda left, largest: _fullest(sizes, left, largest, row_length))


def filled_rows(
    by_size: np.ndarray, starts: np.ndarray, fullest: Callable[[list[int], int], dict[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns documents to rows by the rule `fullest`, which chooses the documents of the next row.

    Args:
        by_size: document numbers, smallest documents first; at least one.
        starts: index in `by_size` of the first document of every size.
        fullest: takes the number of documents left of every size, and the index of the largest size left. Returns the
            documents of a row as index of size -> number of documents, with at least one of the largest size. More
            rows with these numbers follow while enough documents are left.

    Returns:
        As `best_fill`: the document numbers in the order of the rows, and the number of documents per row (int64).
    """
    taken, left = starts.tolist(), np.diff(np.r_[starts, len(by_size)]).tolist()
    rows: list[np.ndarray] = []
    for largest in reversed(range(len(left))):
        while left[largest]:
            chosen = fullest(left, largest)
            for _ in range(min(left[i] // copies for i, copies in chosen.items())):
                rows.append(np.concatenate([by_size[taken[i] : taken[i] + copies] for i, copies in chosen.items()]))
                for i, copies in chosen.items():
                    taken[i] += copies
                    left[i] -= copies
    order = np.concatenate(rows)
    assert np.array_equal(np.sort(order), np.arange(len(by_size))), "packing lost or repeated a document"
    return order, np.array([len(row) for row in rows])


def _fullest(sizes: list[int], left: list[int], largest: int, row_length: int) -> dict[int, int]:
    """Returns the documents that fill a row best: index in `sizes` -> number of documents, at least one of `largest`.

    `sizes` are in tokens, smallest first; `left` counts the documents left of a size; `largest` is an index in both.
    """
    room = row_length - sizes[largest]
    reachable, stages = 1, []  # bit s is set if some of the documents so far add up to s
    for i in range(largest, -1, -1):
        copies, part = min(left[i] - (i == largest), room // sizes[i]), 1
        if copies <= 0:
            continue
        stages.append((i, reachable))
        while copies:  # 1, 2, 4, ... and the rest: every number of copies is a sum of these
            part = min(part, copies)
            reachable |= (reachable << part * sizes[i]) & ((1 << room + 1) - 1)
            copies, part = copies - part, 2 * part
        if reachable >> room:
            break
    target, combination = reachable.bit_length() - 1, {largest: 1}
    for i, before in reversed(stages):
        while not before >> target & 1:
            target -= sizes[i]
            combination[i] = combination.get(i, 0) + 1
    return combination


@dataclass(frozen=True, eq=False)
class Grouping:
    """The order of groups of packed rows in an epoch.

    Attributes:
        of_rows: int64 (rows,), group of a row.
        turns: whether the groups alternate row by row until all have ended; if not, a group follows another.
    """

    of_rows: np.ndarray
    turns: bool

    def arranged(self, order: np.ndarray) -> np.ndarray:
        """Returns a copy of the row numbers `order` by group, or with `turns` a row of group 0, then of group 1, ...

        Groups are in the order of their numbers, and the turns skip groups that have ended. Rows of a group keep their
        order.
        """
        groups = self.of_rows[order]
        by_group = np.argsort(groups, kind="stable")
        if not self.turns:
            return order[by_group]
        _, firsts, counts = np.unique(groups[by_group], return_index=True, return_counts=True)
        turn = np.empty_like(order)
        turn[by_group] = np.arange(len(order)) - np.repeat(firsts, counts)
        return order[np.lexsort((groups, turn))]

    def fingerprint(self) -> str:
        """Returns a hash of the groups and `turns`, as hex digits."""
        return hashlib.blake2b(self.of_rows.tobytes() + bytes([self.turns]), digest_size=16).hexdigest()


class PackedDataset:
    """Rows of `length` tokens that contain one or more whole documents.

    Args:
        documents: the content of the rows; none is longer than `length`.
        length: tokens per row.
        packing: False puts a single document into a row; unused if `order` is given.
        pad_id: token id of empty slots; no code compares token ids with it.
        order: result of `best_fill`, if the caller has packed the documents; a document may be in several rows.
        grouping: arranges the rows of an epoch; only stored here, for `permutation`.
        further: adds tensors (`ImageColumns` for images, `PairColumns` for pairs) by its method `add`; None for text.

    Attributes:
        row_tokens: int64 (rows,), tokens per row without padding.
        columns: additional tensors in `tensors`: name -> a function of row numbers that returns (rows, length).
    """

    def __init__(
        self, documents: Documents, length: int, *, packing: bool = True, pad_id: int = 0,
        order: tuple[np.ndarray, np.ndarray] | None = None, grouping: Grouping | None = None, further: Any = None,
    ) -> None:  # fmt: skip
        lengths = documents.lengths
        assert len(documents) and lengths.min() > 0 and lengths.max() <= length
        every = np.arange(len(documents))
        by_rows, counts = order or (best_fill(lengths, length) if packing else (every, np.ones_like(every)))
        self._order, self._row_ends, self.further = by_rows, np.cumsum(counts), further
        self.documents, self.length, self.pad_id, self.grouping = documents, length, pad_id, grouping
        self.row_tokens = np.add.reduceat(lengths[self._order], np.r_[0, self._row_ends[:-1]])
        self.columns: Mapping[str, Callable[[np.ndarray], torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self._row_ends)

    def documents_of(self, row: int) -> np.ndarray:
        """Returns the document numbers of a packed row, in order."""
        return self._order[self._row_ends[row - 1] if row else 0 : self._row_ends[row]]

    def source_rows(self, row: int) -> list[int]:
        """Returns the data set row of every document in a packed row, in order; a number may repeat."""
        return self.documents.source_rows[self.documents_of(row)].tolist()

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids (int32) and the loss mask (bool) of a document by its number, both (tokens,)."""
        start = self.documents.starts[number]
        part = slice(start, start + self.documents.lengths[number])
        return self.documents.input_ids[part], self.documents.loss_mask[part]

    def column(self, values: np.ndarray) -> Callable[[np.ndarray], torch.Tensor]:
        """Makes an entry of `columns` from a value per token: (tokens,), for all documents in order, without gaps.

        The entry takes row numbers (-1 is an empty row), and returns their values as a CPU tensor (rows, length) of the
        same dtype, 0 in empty slots.
        """
        starts = np.cumsum(self.documents.lengths) - self.documents.lengths

        def read(rows: np.ndarray) -> torch.Tensor:
            column = np.zeros((len(rows), self.length), dtype=values.dtype)
            for i, row in enumerate(rows):
                numbers = self.documents_of(row) if row >= 0 else ()
                parts = [values[starts[n] :][: self.documents.lengths[n]] for n in numbers]
                column[i, : sum(map(len, parts))] = np.concatenate([*parts, values[:0]])
            return torch.from_numpy(column)

        return read

    def fill(self) -> float:
        """Returns the share of slots that hold tokens, without the emptiest row if there are several."""
        used = self.row_tokens
        if len(used) > 1:
            used = np.delete(used, used.argmin())
        return float(used.mean() / self.length)

    def fingerprint(self) -> str:
        """Returns a hash (hex digits) of tokens, loss masks, row length, packing and `further`, not of `grouping`."""
        digest = hashlib.blake2b(str(self.length).encode(), digest_size=16)
        tokens = self.documents
        for flat in (tokens.input_ids, tokens.loss_mask):
            for _, run in tokens.runs():
                digest.update(np.ascontiguousarray(flat[run]).data)
        for array in (tokens.lengths, self._order, self._row_ends):
            digest.update(np.ascontiguousarray(array).data)
        if self.further is not None:
            digest.update(self.further.fingerprint())
        return digest.hexdigest()

    def tensors(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns rows as CPU tensors; raises BatchError if `further` does, as for damaged pictures.

        Args:
            rows: row numbers; -1 gives an empty row (no segment, no label).

        Returns:
            input_ids, labels and position_ids, int64 (rows, length), and segment_ids, int32 for TPU attention kernels:
            1, 2, ... for the documents of a row and 0 in empty slots. Labels are the input ids where tokens carry loss,
            else -100, and are not shifted. Positions count from 0 in every document. Also the tensors of `columns`, by
            name, and the tensors that `further` adds.
        """
        shape = (len(rows), self.length)
        ids, labels = np.full(shape, self.pad_id, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        positions, segments = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int32)
        for i, row in enumerate(rows):
            end = 0
            for segment, number in enumerate(self.documents_of(row) if row >= 0 else (), start=1):
                tokens, loss = self.document(number)
                here = slice(end, end := end + len(tokens))
                ids[i, here], positions[i, here], segments[i, here] = tokens, np.arange(len(tokens)), segment
                labels[i, here] = np.where(loss, tokens, IGNORED)
        arrays = {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensors |= {name: read(rows) for name, read in self.columns.items()}
        if self.further is not None:
            self.further.add(self, rows, tensors)
        return tensors


@lru_cache(maxsize=2)  # the current epoch, and the next epoch, whose first batches are prefetched
def permutation(
    rows: int, seed: int, epoch: int, shuffle: bool = True, grouping: Grouping | None = None, shard: int = 0
) -> np.ndarray:
    """Returns the row numbers 0 to `rows` - 1 in the order of an epoch, or for a stream of a shard in an epoch.

    The array is (rows,) int64, read-only and cached. With `shuffle`, the order is random and depends on `seed`, `epoch`
    and `shard` (0 without a stream); it is the same in all versions of NumPy. Without `shuffle`, rows keep their order.
    Then `grouping.arranged` changes the order, unless `grouping` is None.
    """
    order = np.arange(rows)
    if shuffle:
        order = np.argsort(
            np.random.PCG64(np.random.SeedSequence([seed, epoch, shard])).random_raw(rows), kind="stable"
        )
    if grouping is not None:
        order = grouping.arranged(order)
    order.flags.writeable = False  # the updates of the epoch are views of it
    return order


def eval_batches(
    dataset: PackedDataset, shards: Sequence[int], data_size: int, batch_size: int, chosen: np.ndarray | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields this process's part of all rows, or of the row numbers in `chosen`, in order, as batches of `tensors`.

    Every step takes the next `data_size * batch_size` rows; empty rows fill the last step. Data shard n, from 0, gets
    block n of `batch_size` rows. A batch has the blocks of `shards`: `len(shards) * batch_size` rows.

    Args:
        dataset: the rows.
        shards: numbers of the data shards of this process.
        data_size: number of data shards of all processes.
        batch_size: rows per data shard and step.
        chosen: row numbers; None means all rows.
    """
    chosen = np.arange(len(dataset)) if chosen is None else chosen
    count = -(-len(chosen) // (batch_size * data_size))
    rows = np.full(count * data_size * batch_size, -1)
    rows[: len(chosen)] = chosen
    for mine in rows.reshape(count, data_size, batch_size)[:, shards].reshape(count, -1):
        yield dataset.tensors(mine)


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yields the items of an iterator; a thread computes up to `depth` items ahead, from the first request on.

    An exception of `items` is raised in place of the item, and ends the generator. At its end, or when it is closed,
    the generator waits until the thread has computed its present item and has ended.
    """
    end: Any = object()
    executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        ahead = deque(executor.submit(next, items, end) for _ in range(depth))
        while (item := ahead.popleft().result()) is not end:
            ahead.append(executor.submit(next, items, end))
            yield item
    finally:
        executor.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------- updates


@dataclass(frozen=True)
class Update:
    """The plan of an optimizer step.

    Attributes:
        step: number of the step, from 1.
        epoch: complete passes over the data before it, from 0.
        first_row: index of its first row in the order of that epoch.
        passes: forward and backward passes per replica.
        rows: number of packed rows of all replicas and passes.
    """

    step: int
    epoch: int
    first_row: int
    passes: int
    rows: int


def updates(dataset_rows: float, plan: BatchPlan, optim: OptimConfig) -> Iterator[Update]:
    """Yields the updates of a run in order.

    The last rows of an epoch that do not fill an update are left out. All updates of a stream are in epoch 0.

    Args:
        dataset_rows: number of packed rows; infinity for a stream, which needs `max_steps`.
        plan: rows, replicas and passes of the first update.
        optim: `max_steps` ends the run, or if null `epochs`: an update is left out if more than half of it lies behind
            the end, but a run has at least one update. `batch_growth_*` multiplies the passes.

    Raises:
        ValueError: on iteration, at an update that takes more rows than there are; has the text of `too_few_rows`.
    """
    step, epoch, first_row = 1, 0, 0
    while optim.max_steps is None or step <= optim.max_steps:
        passes = _passes(step, plan, optim)
        rows = plan.batch_size * plan.num_replicas * passes
        if rows > dataset_rows:
            raise ValueError(too_few_rows(int(dataset_rows), replace(plan, gradient_accumulation=passes)))
        if first_row + rows > dataset_rows:
            epoch, first_row = epoch + 1, 0
        if optim.max_steps is None:
            assert optim.epochs is not None, "the configuration has max_steps or epochs"
            # The tolerance of half an update makes epochs=1 a whole epoch for any number of rows.
            if epoch + (first_row + rows / 2) / dataset_rows > optim.epochs and step > 1:
                return
        yield Update(step, epoch, first_row, passes, rows)
        step, first_row = step + 1, first_row + rows


def too_few_rows(dataset_rows: int, plan: BatchPlan) -> str:
    """Returns an error text, with settings that fit: `dataset_rows` packed rows do not fill an update of `plan`."""
    rows, replicas, passes = plan.batch_size, plan.num_replicas, plan.gradient_accumulation
    fixes = [f"launch.num_replicas={dataset_rows}"] if dataset_rows < replicas else []
    if fewer := dataset_rows // (replicas * passes):
        fixes = [f"optim.batch_size={fewer}"]
    elif dataset_rows >= replicas:
        fixes = [f"optim.batch_size=1 with optim.gradient_accumulation={dataset_rows // replicas}"]
    return (
        f"data set smaller than one global batch: it has {dataset_rows} packed rows, and an update takes "
        f"{rows * replicas * passes} (batch_size {rows} x gradient_accumulation {passes} x replicas {replicas}). Set "
        f"{fixes[0]}, data.packing=false (one example per row) or a smaller data.max_length, or give more data"
    )


def rows_of(update: Update, dataset_rows: int, data: DataConfig, grouping: Grouping | None = None) -> np.ndarray:
    """Returns the row numbers of an update, of `dataset_rows` packed rows: (rows of all replicas and passes,) int64."""
    order = permutation(dataset_rows, data.seed, update.epoch, data.shuffle, grouping)
    return order[update.first_row : update.first_row + update.rows]


def shard_rows(rows: np.ndarray, update: Update, plan: BatchPlan, shards: Sequence[int]) -> np.ndarray:
    """Returns the part of `rows` (`rows_of`) for data shards by number: (passes, shards * plan.batch_size) int64."""
    return rows.reshape(update.passes, plan.num_replicas, plan.batch_size)[:, shards].reshape(update.passes, -1)


def _passes(step: int, plan: BatchPlan, optim: OptimConfig) -> int:
    """Returns the passes of a step (from 1): every `batch_growth_steps` steps they grow by a factor, rounded down.

    `batch_growth_max` limits the rows of an update over all replicas; never fewer passes than in the plan. A null
    `batch_growth_steps` means no growth, a null `batch_growth_max` no limit.
    """
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
    """Returns the learning rate of a step.

    Warm-up is linear from 0, the rate of step 1. It takes `warmup_steps`, or if these are 0 the share `warmup_ratio` of
    all steps, rounded up; if both are 0, step 1 has the peak. The decay to `min_learning_rate_ratio` of the peak is
    linear or a half cosine, and would end at step `total_steps` + 1. With "constant" there is none.

    Args:
        step: number of the step, from 1.
        total_steps: steps of the whole run.
        optim: the schedule.
        growth: ratio of the batch size to the first batch size. `batch_growth_lr` multiplies the peak by it ("linear"),
            by its square root ("sqrt") or not ("none").
    """
    warmup = optim.warmup_steps or math.ceil(optim.warmup_ratio * total_steps)
    done = step - 1
    factor = {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[optim.batch_growth_lr]
    assert optim.learning_rate is not None, "TrainConfig replaces null"
    peak = optim.learning_rate * factor
    if done < warmup:
        return peak * done / warmup
    if optim.schedule == "constant":
        return peak
    progress = (done - warmup) / max(1, total_steps - warmup)
    shape = 1.0 - progress if optim.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    low = optim.min_learning_rate_ratio
    return peak * (low + (1.0 - low) * shape)
