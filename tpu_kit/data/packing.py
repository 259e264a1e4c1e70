"""Documents packed into rows of one fixed shape, and the order in which replicas take them.

Every batch is `(batch, length)` whatever the data: XLA compiles one program for each shape. The documents of a row are
told apart by segment ids and each starts at position 0, so that none sees another.

Rows are packed once for all replicas. Update `u` of an epoch takes rows `u * G` to `(u + 1) * G` of a permutation that
depends on seed and epoch alone, G being the global batch; replicas and accumulation only divide those among themselves.
So a run can go on with another number of replicas, and the place in the data is (epoch, update).
"""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch

IGNORED = -100
"""The label of a position without loss, as in `torch.nn.functional.cross_entropy`."""

T = TypeVar("T")


@dataclass(frozen=True)
class Documents:
    """Tokenised documents one after another in flat arrays.

    Attributes:
        input_ids: int32 (tokens,).
        loss_mask: bool (tokens,), true where a token is predicted with loss.
        lengths: int64 (documents,), none of them 0.
        source_rows: int64 (documents,), the row of the data set that each came from.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    source_rows: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, keep: np.ndarray) -> "Documents":
        """Return the documents where the boolean array `keep` is true."""
        tokens = np.repeat(keep, self.lengths)
        return Documents(self.input_ids[tokens], self.loss_mask[tokens], self.lengths[keep], self.source_rows[keep])


def best_fill(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Deal documents to rows so that hardly a slot stays empty.

    Each row starts with the longest document left and takes those others that fill it most completely: a subset-sum
    over the histogram of lengths, as in the minimum bin slack heuristic of Gupta and Ho (1999). A combination found is
    used for as many rows as there are documents for, so the time depends on how many lengths differ rather than on the
    documents. Best-fit decreasing, as in TRL's `pack_dataset`, leaves a gap in every row when lengths are much alike.

    Args:
        lengths: tokens of each document, 1 to `row_length`.
        row_length: tokens of a row.

    Returns:
        The document numbers row after row, and how many documents each row has (both int64).
    """
    by_length = np.argsort(lengths, kind="stable")
    unique, starts, counts = np.unique(lengths[by_length], return_index=True, return_counts=True)
    sizes, taken, left = unique.tolist(), starts.tolist(), counts.tolist()
    rows: list[np.ndarray] = []
    largest = len(sizes) - 1
    while largest >= 0:
        if not left[largest]:
            largest -= 1
            continue
        combination = _fullest(sizes, left, largest, row_length)
        for _ in range(min(left[i] // copies for i, copies in combination.items())):
            rows.append(np.concatenate([by_length[taken[i] : taken[i] + copies] for i, copies in combination.items()]))
            for i, copies in combination.items():
                taken[i] += copies
                left[i] -= copies
    order = np.concatenate(rows)
    assert np.array_equal(np.sort(order), np.arange(len(lengths))), "packing lost or repeated a document"
    return order, np.array([len(row) for row in rows])


def _fullest(sizes: list[int], left: list[int], largest: int, row_length: int) -> dict[int, int]:
    """Return how many documents of which size (index in `sizes`) fill a row best, one of the largest among them."""
    room = row_length - sizes[largest]
    reachable, stages = 1, []  # bit s: some of the documents looked at so far add up to s
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


class PackedDataset:
    """Rows of `length` tokens, each with one or more whole documents.

    Args:
        documents: what the rows hold; none is longer than `length`.
        length: tokens of a row.
        packing: False puts one document in each row, padded to the same shape.
        pad_id: the token id in empty slots. It is never compared with anything.

    Attributes:
        row_tokens: int64 (rows,), the tokens of each row without padding.
    """

    def __init__(self, documents: Documents, length: int, *, packing: bool = True, pad_id: int = 0) -> None:
        assert len(documents) and documents.lengths.min() > 0 and documents.lengths.max() <= length
        self.documents, self.length, self.pad_id = documents, length, pad_id
        if packing:
            self._order, counts = best_fill(documents.lengths, length)
        else:
            self._order, counts = np.arange(len(documents)), np.ones(len(documents), dtype=np.int64)
        self._row_ends = np.cumsum(counts)
        self._count()

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], length: int, pad_id: int) -> "PackedDataset":
        """Return the data set whose `arrays()` are given, without packing again."""
        made = cls.__new__(cls)
        made.documents = Documents(*(arrays[field.name] for field in fields(Documents)))
        made.length, made.pad_id = length, pad_id
        made._order, made._row_ends = arrays["order"], arrays["row_ends"]
        made._count()
        return made

    def _count(self) -> None:
        lengths = self.documents.lengths
        self.row_tokens = np.add.reduceat(lengths[self._order], np.r_[0, self._row_ends[:-1]])
        self._token_starts = np.cumsum(lengths) - lengths

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all that `from_arrays` needs, by name."""
        documents = {field.name: getattr(self.documents, field.name) for field in fields(Documents)}
        return documents | {"order": self._order, "row_ends": self._row_ends}

    def __len__(self) -> int:
        return len(self._row_ends)

    def documents_of(self, row: int) -> np.ndarray:
        """Return the numbers of the documents in a row, in their order."""
        return self._order[self._row_ends[row - 1] if row else 0 : self._row_ends[row]]

    def source_rows(self, row: int) -> list[int]:
        """Return the rows of the data set whose documents a packed row holds."""
        return self.documents.source_rows[self.documents_of(row)].tolist()

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and loss mask of one document."""
        start = self._token_starts[number]
        part = slice(start, start + self.documents.lengths[number])
        return self.documents.input_ids[part], self.documents.loss_mask[part]

    def fill(self) -> float:
        """Return the share of slots that hold real tokens, the emptiest row left out (the last one is rarely full)."""
        used = self.row_tokens
        if len(used) > 1:
            used = np.delete(used, used.argmin())
        return float(used.mean() / self.length)

    def fingerprint(self) -> str:
        """Return a hash of all rows: equal exactly if the tokens, the loss masks and the packing are."""
        digest = hashlib.blake2b(str(self.length).encode(), digest_size=16)
        tokens = self.documents
        for array in (tokens.input_ids, tokens.loss_mask, tokens.lengths, self._order, self._row_ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def tensors(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return rows as CPU tensors.

        Args:
            rows: row numbers; -1 gives an empty row (no segment, no label).

        Returns:
            input_ids, labels and position_ids, int64 (rows, length), and segment_ids, int32 (rows, length): 1, 2, ...
            for the documents and 0 in empty slots (int32 because TPU attention kernels take no other). Labels are the
            input ids where there is loss, else -100, and are not shifted.
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
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Batch:
    """What one replica takes in one forward pass.

    Attributes:
        tensors: see `PackedDataset.tensors`.
        row_ids: for each row, the rows of the data set it holds; stays on the host, to trace a bad loss to its rows.
    """

    tensors: dict[str, torch.Tensor]
    row_ids: list[list[int]]


def permutation(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the order of rows in an epoch (int64).

    It sorts raw output of a bit generator, which NumPy keeps the same in all versions, unlike `Generator.permutation`.
    """
    if not shuffle:
        return np.arange(rows)
    return np.argsort(np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(rows), kind="stable")


def eval_batches(dataset: PackedDataset, rank: int, world_size: int, batch_size: int) -> Iterator[Batch]:
    """Yield every row once over all replicas, the same number of batches on each; empty rows fill up the last."""
    count = -(-len(dataset) // (batch_size * world_size))
    rows = np.full(count * world_size * batch_size, -1)
    rows[: len(dataset)] = np.arange(len(dataset))
    for mine in rows.reshape(count, world_size, batch_size)[:, rank]:
        yield Batch(dataset.tensors(mine), [dataset.source_rows(row) if row >= 0 else [] for row in mine])


def prefetch(items: Iterator[T], depth: int = 2) -> Iterator[T]:
    """Yield what `items` yields, made ahead by a thread that holds up to `depth` of them.

    An exception of `items` is raised where the item would have been. The thread ends when the generator is closed.
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
