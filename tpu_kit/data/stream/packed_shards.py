"""Tokenises and packs the documents of a shard into files; memory holds only some rows at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpu_kit.data.batching import Documents, PackedDataset, best_fill, permutation
from tpu_kit.data.chat.chat_encoding import Encoder, Example
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.records import Record, stored_cell
from tpu_kit.data.rows.sources import SHOWN, check_found
from tpu_kit.data.stream.shards import Shard, ShardError, Shards
from tpu_kit.data.tokenizing import split_text

_ARRAYS = {"input_ids": np.int32, "loss_mask": np.bool_, "lengths": np.int64, "source_rows": np.int64,
           "order": np.int64, "counts": np.int64}  # fmt: skip
_ABOUT = "about.json"
_BLOCK = 2**18  # characters of rows that are tokenised together


class Place(NamedTuple):
    """Position in a stream: before a packed row of a shard, in the order of training.

    Attributes:
        epoch: complete passes over all shards before it.
        shard: number of the shard.
        row: number of the row; the rows before it were trained in this epoch.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0


class PackedShard(NamedTuple):
    """A packed shard with its order of training.

    Attributes:
        data: packed rows.
        order: row numbers in the order of training.
        skipped: text about rows that could not be used; empty if there are none.
    """

    data: PackedDataset
    order: np.ndarray
    skipped: str


class Encoded(NamedTuple):
    """The documents of some rows.

    Attributes:
        input_ids: int32 (tokens,).
        loss_mask: bool (tokens,).
        lengths: tokens per document.
        rows: row number of a document, counted from the first of these rows.
        problems: numbers and problems of rows that cannot be used.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: list[int]
    rows: list[int]
    problems: list[tuple[int, str]]


Ahead = Callable[[Iterator[list[Record]]], Iterator[tuple[list[Record], Encoded]]]


@dataclass(frozen=True)
class TextStream:
    """A stream of plain text; picklable.

    Attributes:
        shards: the shards.
        encoder: encoder of the rows.
        features: features of JSON and CSV columns, to convert numbers to text; empty for parquet.
        columns: columns that a row is read from.
        held: number of first rows of the first shard that are held out in all epochs.
        folder: folder in which a process of this host writes packed shards ahead of the training; None without it.
    """

    shards: Shards
    encoder: Encoder
    features: Mapping[str, Any]
    columns: tuple[str, ...]
    held: int
    folder: Path | None = None

    @cached_property
    def count(self) -> int:
        """Number of shards."""
        return len(self.shards.all)

    def shard(self, number: int) -> Shard:
        """Returns a shard by its number, which continues from epoch to epoch."""
        return self.shards.all[number % self.count]

    def encode(self, record: Record) -> list[Example]:
        """Encodes a row as documents of at most `data.max_length` tokens; raises RowError if it cannot be used."""
        if record.problem:
            raise RowError(record.problem)
        row = {name: record.values.get(name) for name in self.columns}
        try:
            if self.features:
                row = {name: stored_cell(cell, self.features[name]) for name, cell in row.items()}
            talk = self.encoder.conversation(row)
            whole = [self.encoder.encode(document) for document in self.encoder.documents(talk)]
        except RowError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:  # an unexpected form
            raise RowError(f"it cannot be read as text: {type(error).__name__}: {error}") from error
        return [part for document in whole for part in split_text(document, self.encoder.config)]

    def encode_all(self, records: Sequence[Record]) -> Encoded:
        """Encodes several rows with `encode`; rows that cannot be used are in `problems`, and raise nothing."""
        documents, numbers, problems = list[Example](), list[int](), list[tuple[int, str]]()
        for number, record in enumerate(records):
            try:
                made = self.encode(record)
            except RowError as error:
                problems.append((number, str(error)))
            else:
                documents += made
                numbers += [number] * len(made)
        ids = np.fromiter(chain.from_iterable(one.input_ids for one in documents), np.int32)
        mask = np.fromiter(chain.from_iterable(one.loss_mask for one in documents), np.bool_)
        return Encoded(ids, mask, [len(document.input_ids) for document in documents], numbers, problems)

    def check_bad(self, bad: list[tuple[str, str]], read: int) -> tuple[str, ...]:
        """Returns texts of the first of the bad rows, (location, problem), out of `read` rows.

        Raises ValueError if there are any, or with `data.on_bad_row=skip` if they are more than half.
        """
        skip = self.encoder.config.on_bad_row == "skip"
        return check_found(bad[:SHOWN], len(bad), read, self.shards.source, skip=skip)

    def write(self, number: int, target: Path, encoded: Ahead | None = None) -> None:
        """Tokenises and packs a shard into a folder, which appears when it is complete.

        Args:
            number: number of the shard, which continues from epoch to epoch.
            target: the folder, which does not exist yet.
            encoded: takes an iterator of blocks, which are lists of rows, and yields (block, `encode_all(block)`) in
                order, for example from other processes; None does it here.

        Raises:
            ValueError: the shard cannot be read, has changed since it was listed, or has no documents; or rows cannot
                be used, as `check_bad`.
        """
        shard, first = self.shard(number), 0 if number % self.count else self.held
        self.shards.check(shard)
        part = target.with_suffix(".part")
        part.mkdir(parents=True)
        lengths, rows, bad, read = list[int](), list[int](), list[tuple[str, str]](), first
        with open(part / "input_ids", "wb") as ids, open(part / "loss_mask", "wb") as masks:
            blocks = _blocks(islice(self.shards.records(shard, self.columns), first, None))
            for block, made in (encoded or self._encoded)(blocks):
                ids.write(made.input_ids.data)
                masks.write(made.loss_mask.data)
                lengths += made.lengths
                rows += [read + row for row in made.rows]
                for row, problem in made.problems:
                    told = len(bad) < SHOWN
                    bad.append((self.shards.place(shard, block[row].location) if told else "", problem))
                read += len(block)
                if len(bad) >= SHOWN and self.encoder.config.on_bad_row == "stop":
                    break
        shown = self.check_bad(bad, read - first)
        if not lengths:
            besides = f" besides the {first} held-out rows: lower data.eval_rows" if first else ": remove it"
            raise ShardError(f"data source {self.shards.source}: {shard} has no rows to train{besides}")
        order, counts = best_fill(np.array(lengths), self.encoder.config.max_length)
        for name, values in (("lengths", lengths), ("source_rows", rows), ("order", order), ("counts", counts)):
            np.asarray(values, _ARRAYS[name]).tofile(part / name)
        more = f"; and {len(bad) - len(shown)} more" if len(bad) > len(shown) else ""
        skipped = f"{shard}: {len(bad)} rows skipped (data.on_bad_row): {'; '.join(shown)}{more}" if bad else ""
        (part / _ABOUT).write_text(json.dumps({"skipped": skipped}))
        os.rename(part, target)

    def _encoded(self, blocks: Iterator[list[Record]]) -> Iterator[tuple[list[Record], Encoded]]:
        """Yields every block with its documents, encoded in this process."""
        return ((block, self.encode_all(block)) for block in blocks)

    def read(self, number: int, folder: Path) -> PackedShard:
        """Returns shard `number`, mapped from the files in `folder`, the `target` of `write`.

        Its `order` depends on seed, epoch and shard; without `data.shuffle` it is the order of the packed rows.
        """
        config, pad_id = self.encoder.config, self.encoder.tokenizer.pad_token_id or 0
        arrays = {name: np.memmap(folder / name, kind, "r") for name, kind in _ARRAYS.items()}
        order = arrays.pop("order"), arrays.pop("counts")
        data = PackedDataset(Documents(**arrays), config.max_length, pad_id=pad_id, order=order)
        epoch, shard = divmod(number, self.count)
        rows = permutation(len(data), config.seed, epoch, config.shuffle, shard=shard)
        return PackedShard(data, rows, json.loads((folder / _ABOUT).read_text())["skipped"])


def _blocks(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Groups rows into lists of about 262,144 characters, and at most 4,096 rows."""
    block, size = list[Record](), 0
    for record in records:
        block.append(record)
        size += sum(len(cell) for cell in record.values.values() if isinstance(cell, str))
        if size >= _BLOCK or len(block) >= _BLOCK // 64:
            yield block
            block, size = [], 0
    if block:
        yield block
