"""Lists the shards of a stream, which are files or parts of files, and checks that they have not changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset_builder
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tpu_kit.data.rows.records import Record, line_of, read_lines
from tpu_kit.data.rows.sources import Files, find_files, kind_of
from tpu_kit.machine.chips import MIB
from tpu_kit.machine.hub import ask_hub_once

PART_BYTES = 64 * MIB
"""Largest size of a shard: larger files are divided. Training starts once the first shard is tokenised."""
MOST_BYTES = 256 * MIB
"""Largest size of a file that cannot be divided."""

_SAVED = ("state.json", "dataset_dict.json")  # files of `save_to_disk`
_BATCH = 256  # rows of parquet in memory
_SAMPLES, _SAMPLE = 8, 64 * 1024  # number and bytes of the parts of a local file that identify it
_VERSIONS = ("md5Hash", "crc32c", "ETag", "etag", "blob_id")  # keys of a store's object info that depend on the content


class ShardError(ValueError):
    """Raised if a shard has disappeared or changed, lacks a column or rows to train, or could not be made."""


class StreamFile(NamedTuple):
    """A file of a stream.

    Attributes:
        path: path in its file system.
        name: path below the common folder of all files.
        size: bytes.
        version: a text that changes with the content.
        parts: number of shards in the file.
    """

    path: str
    name: str
    size: int
    version: str
    parts: int

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed, so that its size says little about its content."""
        return Path(self.path).suffix.lower() in (".gz", ".bz2", ".xz", ".zst")


class Shard(NamedTuple):
    """A part of a file, counted from 0."""

    file: StreamFile
    part: int

    def __str__(self) -> str:
        parts = self.file.parts
        return self.file.name if parts == 1 else f"{self.file.name} (part {self.part + 1} of {parts})"


@dataclass(frozen=True)
class Shards:
    """All shards of a stream, in order; picklable.

    Attributes:
        source: `data.source`.
        system: the file system of fsspec.
        kind: "json", "csv" or "parquet".
        files: the files.
    """

    source: str
    system: Any
    kind: str
    files: tuple[StreamFile, ...]

    @classmethod
    def find(cls, source: str, split: str = "train") -> Shards:
        """Lists the shards of a path, glob, folder, URL or data set of the hub.

        Reads samples of local files for their `version`. `split` is the name of a split of a data set or of a folder
        laid out like one; other files have the single split "train".

        Raises:
            ValueError: there are no such files or split, or they have several kinds, or are of `save_to_disk`; or a
                file that cannot be divided (CSV, compressed) has more than `MOST_BYTES`.
        """
        if any(os.path.isfile(os.path.join(source, name)) for name in _SAVED):
            raise ValueError(
                f"data source {source}: rows in memory or of save_to_disk cannot be streamed; write them with "
                "rows.to_parquet, or set data.streaming=false"
            )
        system, paths, kind = find_files(source, split) or _hub_files(source, split)
        folder = os.path.dirname(paths[0]) if len(paths) == 1 else os.path.commonpath(paths)
        return cls(source, system, kind, tuple(_described(system, path, folder, kind) for path in paths))

    @cached_property
    def all(self) -> tuple[Shard, ...]:
        """The shards, in order."""
        return tuple(Shard(file, part) for file in self.files for part in range(file.parts))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def versions(self) -> dict[str, str]:
        """Returns the versions of the files by name."""
        return {file.name: file.version for file in self.files}

    def check(self, shard: Shard) -> None:
        """Raises ShardError if the file of a shard has disappeared or changed since it was listed."""
        path = shard.file.path
        self.system.invalidate_cache()
        try:
            now = _version(self.system, path, self.system.info(path))
        except FileNotFoundError as error:
            raise ShardError(f"data source {self.source}: {shard} has disappeared; put it back") from error
        if now != shard.file.version:
            raise ShardError(f"data source {self.source}: {shard} has changed since the run began; put it back")

    def records(self, shard: Shard, columns: Sequence[str]) -> Iterator[Record]:
        """Yields the rows of a shard; rows of parquet have only these columns, other rows have all columns.

        A row of JSON or CSV that cannot be read has a `Record.problem`.

        Raises:
            ValueError: on iteration, if the file cannot be read, or is parquet and lacks a column.
        """
        path, part, parts = shard.file.path, shard.part, shard.file.parts
        if self.kind == "parquet":
            for first, batch in self._batches(shard, columns):
                rows = enumerate(batch.to_pylist(), start=first)
                yield from (Record(f"row {number}", values) for number, values in rows)
        elif parts == 1:
            yield from Files(self.system, [path], self.kind).records_of(path)
        else:
            size = shard.file.size
            yield from read_lines(self.system, path, size * part // parts, size * (part + 1) // parts)

    def place(self, shard: Shard, location: str) -> str:
        """Returns the file and line (or row) of `Record.location` for an error text; may read the file up to there."""
        return f"{shard.file.name}, {line_of(self.system, shard.file.path, location)}"

    def head_of_parquet(self, rows: int) -> Dataset:
        """Returns up to `rows` first rows of the first parquet shard, with all columns.

        Raises ShardError if it has none, and ValueError if its file cannot be read.
        """
        tables, count = list[pa.RecordBatch](), 0
        for _, batch in self._batches(self.all[0], None):
            tables.append(batch)
            count += len(batch)
            if count >= rows:
                break
        if not count:
            raise ShardError(f"data source {self.source}: {self.all[0]} has no rows; remove it")
        return Dataset(pa.Table.from_batches(tables).slice(0, rows))

    def _batches(self, shard: Shard, columns: Sequence[str] | None) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yields batches of rows of a parquet shard, after the number of their first row in the file.

        `columns=None` means all. Raises ValueError if the file cannot be read, or lacks a column.
        """
        path, part, parts = shard.file.path, shard.part, shard.file.parts
        with self.system.open(path, "rb") as stream:
            try:
                file = pq.ParquetFile(stream)
            except pa.ArrowInvalid as error:
                raise ValueError(f"data source {path}: cannot be read: {error}; is the file whole?") from error
            if lacking := sorted({*(columns or ())} - {*file.schema_arrow.names}):
                there = ", ".join(file.schema_arrow.names)
                raise ShardError(f"data source {self.source}: {shard} has no column {', '.join(lacking)}, but {there}")
            count = file.metadata.num_rows
            first, last, begin = count * part // parts, count * (part + 1) // parts, 0
            for group in range(file.metadata.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                if begin < last and end > first:
                    for batch in file.iter_batches(_BATCH, row_groups=[group], columns=columns and [*columns]):
                        low, high = max(first - begin, 0), min(last - begin, len(batch))
                        if low < high:
                            yield begin + low, batch.slice(low, high - low)
                        begin += len(batch)
                begin = end


def _described(system: Any, path: str, folder: str, kind: str) -> StreamFile:
    """Describes a file below `folder`; raises ValueError if it is too large and cannot be divided."""
    info = system.info(path)
    size, name = int(info["size"]), os.path.relpath(path, folder)
    file = StreamFile(path, name, size, _version(system, path, info), 1)
    whole = kind == "csv" or file.is_compressed
    if whole and size > MOST_BYTES:
        raise ValueError(
            f"data source {path}: a shard has at most {MOST_BYTES // MIB} MiB, and this file has {size // MIB}; CSV "
            "and compressed files cannot be divided: write several files, or parquet"
        )
    return file if whole else file._replace(parts=max(1, -(-size // PART_BYTES)))


def _version(system: Any, path: str, info: dict[str, Any]) -> str:
    """Returns a text that identifies a file's content, and is equal for copies on other hosts; reads a local file."""
    size = int(info["size"])
    if isinstance(system, LocalFileSystem):  # modification times of copies differ
        digest = hashlib.blake2b(digest_size=12)
        with system.open(path, "rb") as stream:
            spread = [max(0, size - _SAMPLE) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
            for start in spread if size > _SAMPLES * _SAMPLE else range(0, size, _SAMPLE):
                stream.seek(start)
                digest.update(stream.read(_SAMPLE))
        return f"{size} {digest.hexdigest()}"
    return f"{size} {next((info[key] for key in _VERSIONS if info.get(key)), None) or system.ukey(path)}"


def _hub_files(source: str, split: str) -> Files:
    """Returns the files of a split of a data set of the hub, at its present commit; raises ValueError without them."""
    name, _, subset = source.partition(":")
    ask_hub_once()
    try:
        splits = load_dataset_builder(name, subset or None).config.data_files or {}
    except Exception as error:  # `datasets` and the hub raise many classes of errors
        raise ValueError(
            f"data source {source}: there is no such file or folder, and the hub gave no such data set: "
            f"{type(error).__name__}: {error}; check the spelling and the network"
        ) from error
    if split not in splits:
        raise ValueError(f"data.split: there is no split {split!r}; {source} has {', '.join(map(str, splits))}")
    urls = [str(url) for url in splits[split]]
    if len(kinds := {kind_of(url) for url in urls}) != 1 or None in kinds:
        raise ValueError(f"data source {source}: a stream reads parquet, JSON lines or CSV, no other kinds of files")
    return Files(url_to_fs(urls[0])[0], [url_to_fs(url)[1] for url in urls], str(kinds.pop()))
