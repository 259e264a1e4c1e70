"""Tokenises and packs the shards of a stream ahead of the training, in a process per host.

The process writes a shard while the replicas train on the previous shard, which they map from its files. It is not a
thread, because a thread would compete with the thread that dispatches the steps. At most two shards are kept: a replica
writes an empty file when it begins a shard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from datasets import config as datasets_config

from tpu_kit.data.rows.records import Record
from tpu_kit.data.stream.packed_shards import Ahead, Encoded, PackedShard, Place, TextStream
from tpu_kit.data.stream.shards import ShardError
from tpu_kit.distributed.child_process import end_with_parent

_MOST_PROCESSES = 8  # that tokenise, if data.num_proc is not set
_LOOK = 0.02  # seconds between two checks for a file
_ENDED = "ended"  # file with the reason why the process has ended


@contextlib.contextmanager
def feeding(stream: TextStream, place: Place) -> Iterator[TextStream]:
    """Starts a process, which runs `feed_by_processes` from `place` on with a new temporary folder.

    Yields a copy of the stream with that folder, for the replicas. The folder is in the cache of `datasets`. When the
    block ends, kills the process and deletes the folder.
    """
    cache = Path(datasets_config.HF_DATASETS_CACHE) / "tpu_kit"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stream-", dir=cache, ignore_cleanup_errors=True) as name:
        folder, closing = Path(name), threading.Event()
        pid, ended = _start(pickle.dumps((stream, place, folder)))

        def watch() -> None:
            status = ended()
            if not closing.is_set():
                text = f"the process that tokenises data.source={stream.shards.source} has ended with status {status}"
                _write(folder / _ENDED, f"{text}; its output is printed above")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield replace(stream, folder=folder)
        finally:
            closing.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with its child processes
            watcher.join()


def _start(payload: bytes) -> tuple[int, Callable[[], int]]:
    """Starts the process; returns its id, and a function that sends the payload, waits, and returns the exit status."""
    path = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
    settings = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "USE_TORCH_XLA": "0", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tpu_kit.data.stream.feeder"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        start_new_session=True, env=os.environ | settings,
    )  # fmt: skip

    def ended() -> int:
        process.communicate(payload)  # the process reads it after it has loaded its libraries
        return process.returncode

    return process.pid, ended


def feed(stream: TextStream, place: Place, folder: Path, encoded: Ahead | None = None) -> None:
    """Writes whole shards to `folder`, from the shard of `place` on, epoch after epoch.

    A shard is a subfolder with the shard's number as name. After a shard, waits until all replicas of this host have
    begun it, and deletes the shard before. Returns only if a shard cannot be made: it then writes the error to a file
    for `shards_from`. `encoded` is as in `TextStream.write`.
    """
    number = place.epoch * stream.count + place.shard
    while True:
        try:
            stream.write(number, folder / str(number), encoded)
        except Exception as error:
            text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            _write(folder / f"{number}.error", text)
            return
        while not _begun(folder, number):
            time.sleep(_LOOK)
        shutil.rmtree(folder / str(number - 1), ignore_errors=True)
        number += 1


def _begun(folder: Path, number: int) -> bool:
    """Whether all replicas of this host have begun a shard, by the files that `shards_from` makes."""
    marks = list(folder.glob(f"{number}.begun-*"))
    return bool(marks) and len(marks) == int(marks[0].name.rpartition("-")[2])


def shards_from(
    stream: TextStream, place: Place, reader: int = 0, readers: int = 1, stopped: Callable[[], bool] = lambda: False
) -> Iterator[tuple[int, PackedShard]]:
    """Yields (number, shard) forever, from the shard of `place` on; numbers continue from epoch to epoch.

    Args:
        stream: the stream; without a folder, shards are tokenised here on demand.
        place: a place in the first shard, which is yielded whole.
        reader: index of this replica on its host.
        readers: count of replicas on this host; all yield every shard, and keep it until all begin the next shard.
        stopped: called while the next shard is not ready; if it returns True, the iterator ends.

    Raises:
        ShardError: the process could not make a shard, or has ended; the message has its error.
        ValueError: without a folder, as `TextStream.write`.
    """
    number = place.epoch * stream.count + place.shard
    while True:
        if stream.folder is None:
            with tempfile.TemporaryDirectory() as name:
                stream.write(number, target := Path(name, "shard"))
                shard = stream.read(number, target)
        else:
            target = stream.folder / str(number)
            while not target.exists():
                _raise_if_ended(stream.folder, number)
                if stopped():
                    return
                time.sleep(_LOOK)
            shard = stream.read(number, target)
            (stream.folder / f"{number}.begun-{reader}-{readers}").touch()
        yield number, shard
        number += 1


def _raise_if_ended(folder: Path, number: int) -> None:
    """Raises ShardError if the process could not make shard `number` or has ended."""
    for told in (f"{number}.error", _ENDED):
        with contextlib.suppress(FileNotFoundError):
            raise ShardError((folder / told).read_text())


def _write(path: Path, text: str) -> None:
    """Writes a text file, which appears when it is complete."""
    part = path.with_name(f"{path.name}.part")  # not the folder of a shard that could not be made
    part.write_text(text)
    part.rename(path)


_stream: TextStream | None = None  # set in processes that tokenise


def _begin(stream: TextStream) -> None:
    """Stores the stream in a new process that tokenises, which ends with its parent."""
    global _stream
    end_with_parent()
    _stream = stream


def _encode(block: list[Record]) -> Encoded:
    """Encodes rows in a process that tokenises."""
    assert _stream is not None
    return _stream.encode_all(block)


def feed_by_processes(stream: TextStream, place: Place, folder: Path) -> None:
    """Runs `feed` with `data.num_proc` processes that tokenise blocks of rows.

    A null `data.num_proc` means a quarter of the cores, from 1 to 8. With 1, this process tokenises.
    """
    count = stream.encoder.config.num_proc or max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)) // 4))
    if count == 1:
        return feed(stream, place, folder)
    with ProcessPoolExecutor(count, get_context("fork"), _begin, (stream,)) as pool:

        def encoded(blocks: Iterator[list[Record]]) -> Iterator[tuple[list[Record], Encoded]]:
            ahead = deque[tuple[list[Record], Future[Encoded]]]()
            for block in blocks:
                ahead.append((block, pool.submit(_encode, block)))
                if len(ahead) > 2 * count:
                    block, made = ahead.popleft()
                    yield block, made.result()
            yield from ((block, made.result()) for block, made in ahead)

        feed(stream, place, folder, encoded)


if __name__ == "__main__":
    end_with_parent()
    feed_by_processes(*pickle.load(sys.stdin.buffer))
