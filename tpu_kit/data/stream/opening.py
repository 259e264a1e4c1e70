"""Opens a stream before a run: makes the encoder, chooses held-out rows, and reports on the first rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import Dataset

from tpu_kit.config.loader import DataConfig
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.data.chat.chat_encoding import Example
from tpu_kit.data.prepare import Prepared
from tpu_kit.data.report import DataReport
from tpu_kit.data.rows.field_values import without_decoding
from tpu_kit.data.rows.records import Record, write_records
from tpu_kit.data.stream.packed_shards import TextStream
from tpu_kit.data.stream.shards import ShardError, Shards
from tpu_kit.data.tokenizing import encoder_of
from tpu_kit.machine.chips import MIB

HELD_ROWS = 64
"""Number of first rows that are held out if `data.eval_rows` is null."""
_LOOKED_AT = 1000  # rows after the held-out rows that the report samples
_LOOKED_BYTES = MIB  # limit of their size; the sample has at least one row


@dataclass(frozen=True)
class StreamReport(DataReport):
    """Report about a stream from its first rows; the counts are about these rows only, without packed_rows and fill.

    Attributes:
        shards: text with the number of shards and their tokens.
        held: text about the held-out rows; empty if there are none.
        lengths: tokens per row, not per document.
    """

    shards: str = ""
    held: str = ""

    def __str__(self) -> str:
        middle, tail = np.percentile(self.lengths, [50, 95]).astype(int)
        lines = [
            f"source           {self.source}: {self.layout}",
            f"shards           {self.shards}",
            *([f"held out         {self.held}"] if self.held else []),
            *([f"special tokens   {self._special_text()}"] if self.special_rows else []),
            f"tokens of a row  median {middle}, 95 % up to {tail}, longest {max(self.lengths)}, of the first "
            f"{self.rows_used:,}",
        ]
        return "\n".join(lines + ([f"bad rows         {self.skipped_text}"] if self.skipped else []))


def open_stream(config: DataConfig, tokenizer: Any) -> tuple[TextStream, list[Record]]:
    """Lists the shards of a stream and makes its encoder for format text, whatever `data.format` is.

    Returns:
        The stream, without a folder, and the first rows of its first shard. These are the held-out rows
        (`data.eval_rows`, or `HELD_ROWS` if null) and up to 1,000 more, of JSON and CSV only up to about 1 MiB more.

    Raises:
        ValueError: as `Shards.find` and `encoder_of`, or the first shard has no rows or no text.
    """
    config = replace(config, format="text")
    shards = Shards.find(str(config.source), config.split)
    held = HELD_ROWS if config.eval_rows is None else int(config.eval_rows)
    most = held + _LOOKED_AT
    with TemporaryDirectory() as folder:
        if shards.kind == "parquet":
            rows = without_decoding(shards.head_of_parquet(most))
        else:
            rows = _head(shards, held, most, Path(folder, "head.arrow"))
        encoder = encoder_of(rows, tokenizer, config, str(config.source), None, None)
        names = encoder.layout.needed(rows.column_names)
        features = {} if shards.kind == "parquet" else {name: rows.features[name] for name in names}
        stream = TextStream(shards, encoder, features, tuple(names), held)
        return stream, list(islice(shards.records(shards.all[0], names), len(rows)))


def _head(shards: Shards, held: int, most: int, target: Path) -> Dataset:
    """Returns the first rows of the first JSON or CSV shard as `load_rows`, mapped from the new file `target`.

    Takes `held` rows and up to 1 MiB more, but at most `most` rows. Raises ShardError if no row can be read.
    """
    first, records, size = shards.all[0], list[Record](), 0
    for record in shards.records(first, ()):
        records.append(record)
        size += _bytes_of(record) if len(records) > held else 0
        if len(records) >= most or size > _LOOKED_BYTES:
            break
    if not any(record.values for record in records):
        problem = next((f": {shards.place(first, one.location)}: {one.problem}" for one in records), "; remove it")
        raise ShardError(f"data source {shards.source}: {first} has no rows{problem}")
    write_records(lambda: ((first.file.path, record) for record in records), target)
    return without_decoding(Dataset.from_file(str(target)))


def _bytes_of(record: Record) -> int:
    """Returns the bytes of a row as a line of JSON."""
    return len(json.dumps(record.values, ensure_ascii=False).encode(errors="replace")) + 1


def prepare_stream(config: DataConfig, tokenizer: Any) -> Prepared:
    """Prepares a stream for a run from its first rows: `Prepared.eval` has the held-out rows, `train` the next rows.

    `eval` is None if no row is held out. `train` is only a sample for reports: training reads `stream`.

    Raises:
        ValueError: as `open_stream`; or no row is left to train, or rows cannot be used (`TextStream.check_bad`).
    """
    stream, records = open_stream(config, tokenizer)
    shard = stream.shards.all[0]
    bad = list[tuple[str, str]]()
    parts: tuple[list[tuple[int, Example]], list[tuple[int, Example]]] = [], []
    for number, record in enumerate(records):
        try:
            parts[number >= stream.held].extend((number, document) for document in stream.encode(record))
        except ValueError as error:
            bad.append((stream.shards.place(shard, record.location), str(error)))
    shown = stream.check_bad(bad, len(records))
    held, sample = parts
    if not sample:
        raise ShardError(
            f"data source {config.source}: {shard} has no rows to train besides the {stream.held} held-out rows: "
            "lower data.eval_rows, or put a larger file first"
        )
    train = _packed(stream, sample)
    fingerprint = f"{train.fingerprint()} {config.seed} {config.shuffle} {stream.held}"
    report = replace(
        _report(stream, sample, records), skipped=len(bad), skipped_rows=shown,
        shards=_shards_text(stream, sample, records),
        held=f"the first {stream.held} rows of {shard}, in all epochs" if held else "",
    )  # fmt: skip
    return Prepared(
        train, _packed(stream, held) if held else None, [], [], [], report,
        _report(stream, held, records) if held else None, stream.encoder, None,
        hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest(), stream=stream,
    )  # fmt: skip


def _packed(stream: TextStream, documents: Sequence[tuple[int, Example]]) -> PackedDataset:
    """Packs documents, (row number, document), at least one, by the stream's settings; does not read the stream."""
    ids, masks = ([getattr(one, name) for _, one in documents] for name in Example._fields)
    lengths = np.array([len(each) for each in ids])
    arrays = np.concatenate(ids).astype(np.int32), np.concatenate(masks).astype(bool)
    pad_id = stream.encoder.tokenizer.pad_token_id or 0
    rows = np.array([row for row, _ in documents])
    return PackedDataset(Documents(*arrays, lengths, rows), stream.encoder.config.max_length, pad_id=pad_id)


def _report(
    stream: TextStream, documents: Sequence[tuple[int, Example]], records: Sequence[Record]
) -> StreamReport:  # fmt: skip
    """Counts documents, given as (row number in `records`, document); the caller adds the text of the shards."""
    by_row = dict[int, int]()
    for row, document in documents:
        by_row[row] = by_row.get(row, 0) + len(document.input_ids)
    special = [found for row in by_row if (found := _special(stream, records[row]))]
    tokens = sum(by_row.values())
    return StreamReport(
        source=stream.shards.source, layout=str(stream.encoder.layout), rows_read=len(records), rows_used=len(by_row),
        documents=len(documents), tokens=tokens, loss_tokens=sum(sum(one.loss_mask) for _, one in documents),
        packed_rows=0, fill=1.0, lengths=tuple(by_row.values()), all_tokens=tokens,
        special_rows=len(special), special_names=tuple(sorted({*special})[:3]),
        special_split=stream.encoder.config.special_text == "split",
    )  # fmt: skip


def _special(stream: TextStream, record: Record) -> str:
    """Returns the first text of a special token in a row; empty if there is none."""
    return stream.encoder.special.find(record.values.get(stream.encoder.layout.columns["text"]))


def _shards_text(stream: TextStream, sample: Sequence[tuple[int, Example]], records: Sequence[Record]) -> str:
    """Describes the number and size of the shards, and their tokens, estimated from the documents in `sample`.

    `records` are the first rows of the stream; `sample` has the documents of the rows that are not held out.
    """
    shards, first = stream.shards, stream.shards.all[0]
    counts = f"{stream.count:,} of {len(shards.files):,} file{'s' if len(shards.files) > 1 else ''}"
    text = f"{counts}, {shards.size / MIB:,.1f} MiB"
    rows = records[stream.held :]
    per_row = sum(len(one.input_ids) for _, one in sample) / len(rows)
    if shards.kind == "parquet":
        with shards.system.open(first.file.path, "rb") as file:
            of_file = pq.ParquetFile(file).metadata.num_rows * per_row
    elif first.file.is_compressed:
        return f"{text}; the number of tokens is not known, because they are compressed"
    else:
        of_file = first.file.size / (sum(map(_bytes_of, rows)) / len(rows)) * per_row
    epoch = of_file / first.file.size * shards.size
    return f"{text}; about {_rounded(of_file / first.file.parts)} tokens per shard, {_rounded(epoch)} per epoch"


def _rounded(count: float) -> str:
    """Formats a number with two significant digits."""
    return f"{float(f'{count:.2g}'):,.0f}"
