"""Makes the image tensors of packed rows; a pool of threads decodes their pictures."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.batching import IGNORED, BatchError, Documents, PackedDataset
from tpu_kit.data.images.encoding import DocumentImages, ImageEncoding
from tpu_kit.data.images.packing import best_fill_of_images, fewest_images
from tpu_kit.data.images.prompts import PicturedIds, pixels_of, put_index
from tpu_kit.data.rows.columns import Layout
from tpu_kit.data.rows.field_values import RowError
from tpu_kit.data.rows.schemas import conversation
from tpu_kit.model.families import vision

MOST_BROKEN, BROKEN_SHARE = 10, 0.01
"""Allowed rows with damaged pictures: this number, plus this share of the rows with pictures."""


class ImageCounts(NamedTuple):
    """Counts of the images of packed rows, for the report.

    Attributes:
        pictures: pictures in the used documents.
        documents: used documents with pictures.
        tokens: soft tokens of these pictures.
        slots: used image slots.
        room: image slots of a row.
        rows: packed rows.
        dropped: pictures of documents that were too long.
    """

    pictures: int
    documents: int
    tokens: int
    slots: int
    room: int
    rows: int
    dropped: int

    def lines(self, all_tokens: int) -> list[str]:
        """Returns the report's lines on pictures and on slots; `all_tokens` counts the used documents' text as well."""
        share = self.tokens / all_tokens
        tiles = f" in {self.slots:,} tiles" if self.slots != self.pictures else ""
        dropped = f"; {self.dropped:,} more dropped with documents that were too long" if self.dropped else ""
        used = self.slots / (self.room * self.rows)
        return [
            f"images           {self.pictures:,}{tiles} in {self.documents:,} documents, {self.tokens:,} tokens "
            f"({share:.0%}){dropped}",
            f"images of a row  {self.room} at most (images_per_row), {used:.0%} of them used",
        ]


class _Source(NamedTuple):
    """The rows of one source, and the reader of their pictures."""

    name: str
    rows: Dataset
    layout: Layout
    config: DataConfig
    encoding: ImageEncoding


class ImageColumns:
    """Makes the image tensors of packed rows; picklable. Pictures are opened and decoded anew for every batch.

    Args:
        tokens: the `Tokenized` of the documents.
        images: images of the documents.
        room: image slots of a row.

    Attributes:
        room: image slots of a row.
    """

    def __init__(self, tokens: Any, images: DocumentImages, room: int) -> None:
        self.room, self.images = room, images
        self._parts: list[tuple[int, _Source]] = []  # sources, with the numbers of their first rows
        for part, first in tokens.sources():
            rows = part.rows.select_columns(part.encoder.layout.needed(part.rows.column_names))
            encoder = part.encoder
            self._parts.append((first, _Source(part.source, rows, encoder.layout, encoder.config, encoder.images)))
        self._processor = tokens.encoder.images.processor
        self._start()

    def _start(self) -> None:
        """Sets the state that is not pickled: no threads yet, and no row counted as broken."""
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._broken = set[int]()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_pool")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def pictures(self, row: int, count: int | None = None) -> list[Any]:
        """Decodes the first `count` pictures of data set row `row`, or all, as PIL's RGB; may raise RowError."""
        images, source = self._images(row, count)
        return [source.encoding.files.decoded(image) for image in images]

    def _images(self, row: int, count: int | None) -> tuple[tuple[Any, ...], _Source]:
        """Returns the first `count` images of data set row `row`, or all, undecoded paths or bytes; and its source."""
        first, source = self._part(row)
        return conversation(source.rows[int(row) - first], source.layout, source.config).images[:count], source

    def _part(self, row: int) -> tuple[int, _Source]:
        """Returns the source of row `row`, counted over all sources, after the number of the source's first row."""
        return next(part for part in reversed(self._parts) if part[0] <= row)

    def with_pictures(self, ids: list[int], documents: Documents, number: int) -> list[int]:
        """Returns the token ids of a document as `PicturedIds`, or `ids` itself if the document has no pictures.

        Opens no picture. `ids` are all ids of document `number` of `documents`, the documents of `images`.
        """
        slots = self.images.of(number).tolist()
        if not slots:
            return ids
        images, source = self._images(documents.source_rows[number], int(self.images.pictures[number]))
        return PicturedIds(ids, images, slots, source.encoding.files, self._processor)

    def fingerprint(self) -> bytes:
        """Returns bytes to hash: the processor's `identity`, and counts and digests of all documents' pictures."""
        images = self.images
        arrays = (images.pictures, images.slots, images.tokens, images.digests)
        return self._processor.identity.encode() + b"".join(one.tobytes() for one in arrays)

    def add(self, dataset: PackedDataset, rows: np.ndarray, tensors: dict[str, torch.Tensor]) -> None:
        """Adds the image tensors of `rows` to `tensors`, on the CPU, with the rows as the first axis.

        Names and other axes are as in `vision.columns_of`. If a picture of a document cannot be decoded, all its
        pictures stay zeros, and its labels become `IGNORED`. A warning on stderr names its data set row, once.

        Args:
            dataset: the packed documents of the images.
            rows: numbers of packed rows; -1 is an empty row.
            tensors: result of `PackedDataset.tensors` for these rows, changed in place, its labels too.

        Raises:
            BatchError: this object has met too many data set rows with damaged pictures: more than `MOST_BROKEN` plus
                `BROKEN_SHARE` times the number of documents with pictures.
        """
        processor = self._processor
        for name, (shape, dtype) in vision.columns_of(processor.sizes, self.room, dataset.length).items():
            tensors[name] = torch.zeros(len(rows), *shape, dtype=dtype)
        index, jobs = tensors["image_index"].fill_(-1), []
        if processor.sizes.axes:  # text's; images' follow below
            tensors["axis_positions"][:] = tensors["position_ids"][:, None]
        for i, row in enumerate(rows):
            end = slot = 0
            for number in dataset.documents_of(row) if row >= 0 else ():
                ids, _ = dataset.document(number)
                start, end = end, end + len(ids)
                if not (counts := self.images.of(number)).size:
                    continue
                put_index(index[i, start:end], ids, counts.tolist(), processor, slot)
                jobs.append((i, slice(slot, slot + len(counts)), slice(start, end), number))
                slot += len(counts)
        documents = dataset.documents
        made = self._threads().map(lambda job: self._pixels(documents, job[3]), jobs)
        for (i, slots, here, number), one in zip(jobs, made, strict=True):
            if isinstance(one, RowError):
                self._count_broken(int(documents.source_rows[number]), one)
                tensors["labels"][i, here] = IGNORED
                continue
            pixels, positions = one
            tensors["pixels"][i, slots] = torch.from_numpy(pixels)
            if positions is not None:
                tensors["patch_positions"][i, slots] = torch.from_numpy(positions)
            if processor.sizes.axes:
                axes = processor.axes(dataset.document(number)[0], self.images.of(number).tolist(), positions)
                tensors["axis_positions"][i, :, here] = torch.from_numpy(axes)

    def _threads(self) -> ThreadPoolExecutor:
        """Returns the pool of at most 8 decoding threads, started at the first call."""
        with self._lock:  # replicas may be threads of one process
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), thread_name_prefix="decode")
            return self._pool

    def _pixels(self, documents: Documents, number: int) -> tuple[np.ndarray, np.ndarray | None] | RowError:
        """Returns `pixels_of` for document `number`, or the RowError that it raises."""
        try:
            images, source = self._images(documents.source_rows[number], int(self.images.pictures[number]))
            return pixels_of(images, self.images.of(number).tolist(), source.encoding.files, self._processor)
        except RowError as error:
            return error

    def _count_broken(self, row: int, error: RowError) -> None:
        """Counts data set row `row` as damaged, once, and warns on stderr; BatchError, as `add`, for too many."""
        with self._lock:
            if row in self._broken:  # counted in an earlier epoch
                return
            self._broken.add(row)
            broken, most = len(self._broken), MOST_BROKEN + BROKEN_SHARE * (self.images.pictures > 0).sum()
        first, source = self._part(row)
        text = f"row {row - first} of {source.name}, counted from 0: {error}"
        if broken > most:
            raise BatchError(f"{broken} rows have pictures that cannot be decoded, the last is {text}; correct them")
        print(f"warning: {text}; its document carries no loss", file=sys.stderr, flush=True)


def packed_with_images(
    documents: Documents, tokens: Any, epoch: Any, pad_id: int, at_least: int, room: int | None
) -> tuple[PackedDataset, ImageCounts]:
    """Packs documents into rows of at most K image slots, at least 1; returns the rows, and counts with `dropped` 0.

    Without `data.packing`, every row has one document.

    Args:
        documents: the used documents, with `images`.
        tokens: their `Tokenized`.
        epoch: the `mixing.Epoch` of their numbers.
        pad_id: id of padding tokens.
        at_least: the largest number of image slots of a training or held-out document.
        room: K, such as the training rows' for held-out rows; None: `data.images_per_row`. If that is null too, K is
            the result of `fewest_images` for `at_least`; without packing, it is `at_least`.

    Raises:
        ValueError: a document has more images or tiles than `data.images_per_row`.
    """
    config, images = tokens.encoder.config, documents.images
    given = config.images_per_row
    if given is not None and images.slots.max() > given:
        worst = int(images.slots.argmax())
        raise ValueError(
            f"data.images_per_row={given}: {tokens.place(documents.source_rows[worst])} has "
            f"{images.slots[worst]} images or tiles; raise it, or set it to null"
        )
    length = config.max_length
    room = room or given
    if room is None:
        room = fewest_images(documents.lengths, images.slots, length, max(1, at_least)) if config.packing else at_least
    room = max(1, room)

    def fill(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not config.packing:
            return np.arange(len(members)), np.ones(len(members), dtype=np.int64)
        return best_fill_of_images(documents.lengths[members], images.slots[members], length, room)

    order, grouping = epoch.packed(fill)
    further = ImageColumns(tokens, images, room)
    dataset = PackedDataset(documents, length, pad_id=pad_id, order=order, grouping=grouping, further=further)
    counts = ImageCounts(
        int(images.pictures.sum()), int((images.pictures > 0).sum()), int(images.tokens.sum()), int(images.slots.sum()),
        room, len(dataset), 0,
    )  # fmt: skip
    return dataset, counts
