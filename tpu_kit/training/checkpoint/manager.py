"""Saves a run's checkpoints in the background, deletes old ones, finds the newest, and lists them for the user."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.resuming import ANEW
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import is_url, join
from tpu_kit.training.checkpoint.gcs_store import BucketStore
from tpu_kit.training.checkpoint.host_parts import Attempt, BackgroundWriter
from tpu_kit.training.checkpoint.local_store import FolderStore
from tpu_kit.training.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    DamagedError,
    Rejected,
    Tensors,
    best_of,
    holder_name,
)

_SHOWN = 6  # most files listed in an error
_UNITS = (("d", 86400), ("h", 3600), ("min", 60))  # units of an age, in seconds


class CheckpointManager(BackgroundWriter):
    """Writes a run's checkpoints, in a single process at a time; other processes use `list_checkpoints`.

    As a context manager, it waits on exit until the last checkpoint is durable; then another process may write.

    Args:
        place: `<output_dir>/checkpoints`, a folder (created if missing) or a URL in an object store.
        keep: number of newest checkpoints that are kept, in addition to the best checkpoint.
        keep_every: checkpoints whose step is a multiple of this are never deleted.
        clock: seconds since the epoch, for the manifests.

    Raises:
        ValueError: `place` cannot be written to, or another process writes there.
    """

    def __init__(
        self,
        place: Path | str,
        keep: int,
        keep_every: int | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        assert keep >= 1 and (keep_every is None or keep_every >= 1), (keep, keep_every)
        self.place, self.keep, self.keep_every, self.clock = place, keep, keep_every, clock
        super().__init__()
        self.rejected: list[Rejected] = []  # checkpoints that `newest` has set aside
        self._durable: int | None = None  # the step of the newest checkpoint that was written or verified
        self._held = ExitStack()
        try:
            self._store = open_store(place)
            self._held.enter_context(self._store.writing())
        except OSError as error:
            why, local = error.strerror, f" ({error.strerror}): set output_dir to a folder that can"
            raise ValueError(f"{place} cannot be written to{f': {why}' if is_url(place) else local}") from error

    def close(self) -> None:
        """Waits until the last checkpoint is durable and releases the lock; raises the errors of `wait`."""
        try:
            super().close()
        finally:
            self._held.close()

    def complete(self) -> list[Checkpoint]:
        """Returns all checkpoints with a valid manifest and files of the right size, by ascending step."""
        return self._store.list_checkpoints()[0]

    def newest(self) -> Checkpoint | None:
        """Verifies the checkpoints from the largest step down; returns the first that is not damaged.

        If there is one, damaged checkpoints of any step are renamed to *.corrupt, reported on stderr, and added to
        `rejected`. Checkpoints of smaller steps are compared only by sizes and listed MD5s. Other files are reported on
        stderr, and stay. Returns None if the folder is empty or missing.

        Raises:
            ValueError: a checkpoint has a format that this tpu_kit does not read; or there is no good checkpoint, but
                other files, such as a damaged checkpoint or part of a copy (see `remains`).
            OSError: `place` cannot be read.
        """
        complete, damaged = self._store.list_checkpoints()
        newest: Checkpoint | None = None
        while complete and newest is None:
            checkpoint = complete.pop()
            try:
                checkpoint.verify()
                newest = checkpoint
            except DamagedError as error:
                damaged.append(Rejected(checkpoint.folder, checkpoint.path, str(error)))
        if newest is None:
            if found := remains(self.place, damaged):
                raise not_empty(self.place, found)
            return None
        for rejected in damaged:
            self._set_aside(rejected)
        for name, what in self._store.contents().strange.items():
            _warn(f"{self._store.files.place(name)} {what}, and is ignored")
        self._durable = newest.step
        return newest

    def restart(self) -> None:
        """Moves all content of `place` to `<place>.previous`, for a run that starts anew; see `FolderStore.restart`."""
        self.wait()
        self._store.restart()

    def withdraw(self, step: int) -> None:
        """Sets aside the checkpoints of `step` and later steps, because the training diverged; warns on stderr.

        First waits for a running write, and raises its error.
        """
        self.wait()
        for checkpoint in self.complete():
            if checkpoint.step >= step:
                aside = self._store.set_aside(checkpoint.folder)
                _warn(f"the checkpoint of step {checkpoint.step} is set aside as {aside}: the training diverged")

    def save(
        self,
        step: int,
        tensors: Tensors,
        documents: Mapping[str, Any],
        metrics: Mapping[str, float],
        best: bool = False,
        attempt: Attempt | None = None,
    ) -> None:
        """Waits for the previous checkpoint, then writes a new one in a thread, replacing any of the same step.

        Before it, `make_room` may delete checkpoints; after it, checkpoints beyond `keep` are deleted. If the write
        fails, the next `save`, `wait` or `poll` raises its OSError or ValueError.

        Args:
            step: number of updates done.
            tensors: file name without ".safetensors" -> CPU tensors, which must not change any more.
            documents: file name without ".json" -> values for `json.dumps`.
            metrics: metrics to show in lists.
            best: whether this checkpoint is the best so far; it is then kept until a better checkpoint is saved.
            attempt: the attempt of several hosts, from `HostParts.save`.

        Raises:
            OSError: the previous checkpoint could not be written, or there is too little space.
            ValueError: another process had become the writer when the previous checkpoint was written.
        """
        self.wait()
        written = {f"{name}.json": json.dumps(content) for name, content in documents.items()}
        assert MANIFEST not in written and all("/" not in name for name in (*written, *tensors)), "bad file names"
        sizes = [value.numel() * value.element_size() for group in tensors.values() for value in group.values()]
        # A header takes about 100 bytes per tensor, and a file is rounded up to the file system's blocks.
        files = len(tensors) + len(written) + 1
        needed = sum(sizes) + sum(len(text.encode()) for text in written.values()) + 256 * len(sizes) + 8192 * files
        self.make_room(step, needed)
        about: dict[str, Any] = {"format": FORMAT, "step": step, "created": self.clock(), "best": best}
        about |= {"metrics": {name: float(value) for name, value in metrics.items()}, "writer": holder_name()}
        self._start(lambda: self._write(about, tensors, written, needed, attempt))

    def _write(
        self, about: dict[str, Any], tensors: Tensors, texts: Mapping[str, str], needed: int, attempt: Attempt | None
    ) -> None:
        """Writes a checkpoint, then deletes surplus checkpoints; `texts` has file names with suffix.

        Raises ValueError if another process has become the writer, and the OSError of `_failure`, which takes `needed`.
        """
        try:
            self._store.write(about, tensors, texts, attempt)
            self._durable = about["step"]
            for surplus in self._surplus(self.keep):
                self._discard(surplus)
        except (OSError, SafetensorError) as error:
            raise self._failure(about["step"], error, needed) from error

    def _surplus(self, keep: int) -> list[Checkpoint]:
        """Returns the checkpoints to delete, by step: all but the `keep` newest, the best, and `keep_every`'s."""
        complete = self.complete()
        best = best_of(complete)
        stay = [best.step] if best is not None else []
        if self.keep_every is not None:
            stay += [checkpoint.step for checkpoint in complete if checkpoint.step % self.keep_every == 0]
        return [checkpoint for checkpoint in complete[:-keep] if checkpoint.step not in stay]

    def _discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint; warns on stderr if that fails."""
        try:
            self._store.discard(checkpoint)
        except OSError as error:  # the run goes on: `save` checks the free space
            _warn(f"{checkpoint.path} could not be deleted ({error.strerror})")

    def _set_aside(self, rejected: Rejected) -> None:
        """Sets a damaged checkpoint aside, adds it to `rejected`, and warns on stderr."""
        aside = self._store.set_aside(rejected.folder)
        self.rejected.append(rejected)
        _warn(f"{rejected.reason}; the checkpoint is set aside as {aside}")

    def make_room(self, step: int, needed: int) -> None:
        """Deletes old checkpoints until a disk has `needed` bytes free; not the newest, the best and `keep_every`'s.

        First waits for the previous checkpoint. Warns of every deletion on stderr. If the space would not suffice, it
        deletes nothing. An object store needs no room. `step` is for messages.

        Raises:
            OSError: the previous checkpoint could not be written, or there is not enough space.
        """
        self.wait()
        if is_url(self.place) or (free := shutil.disk_usage(self.place).free) >= needed:
            return
        surplus = self._surplus(1)
        if free + sum(older.size for older in surplus) < needed:
            raise self._failure(step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)
        while surplus and shutil.disk_usage(self.place).free < needed:
            older = surplus.pop(0)
            _warn(f"{self.place} is full: the checkpoint of step {older.step} makes room for step {step}")
            self._discard(older)

    def _failure(self, step: int, error: Exception, needed: int) -> OSError:
        """Makes the OSError of a failed write, with the code and text of `error` and the step that stays good.

        For an error of the disk it also has the next action and `needed`, the bytes of the checkpoint.
        """
        code = atomic.error_number(error)
        last = f"The checkpoint of step {self._durable} stays good" if self._durable else "There is no earlier one"
        text = f"the checkpoint of step {step} could not be written to {self.place}"
        if is_url(self.place) or getattr(error, "errno", code) is None:  # not a disk error
            return OSError(code, f"{text}: {getattr(error, 'strerror', None) or error}. {last}")
        room = "delete something there or lower checkpoint.keep, or " if code in (errno.ENOSPC, errno.EDQUOT) else ""
        advice = f"It needs {needed:,} bytes: {room}set output_dir to another disk"
        return OSError(code, f"{os.strerror(code)}: {text}. {advice}. {last}")


class HostParts(BackgroundWriter):
    """Writes the shards of this host's devices, on a mesh of several hosts, in the background; see `host_parts`.

    Args:
        place: the `place` of `CheckpointManager`, a URL or a folder that all hosts share.
        host: number of this host, below `hosts`.
        hosts: number of hosts.
        token: a number that is equal on all hosts of a launch and differs between launches.
        make_room: takes the step and the bytes of a part; returns when there is space for the parts of all hosts.
    """

    def __init__(
        self, place: Path | str, host: int, hosts: int, token: int, make_room: Callable[[int, int], None]
    ) -> None:
        super().__init__()
        self._store, self._make_room = open_store(place), make_room
        self._host, self._hosts, self._token, self._saves = host, hosts, token, 0

    def save(self, step: int, tensors: Mapping[str, Tensor]) -> Attempt:
        """Starts to write this host's part of a step, CPU tensors by name; returns the attempt that all hosts share.

        Waits for the previous part; raises its error, and the errors of `make_room`. All hosts save the same steps. On
        host 0 `CheckpointManager.save` commits the attempt.
        """
        self.wait()
        self._make_room(step, sum(tensor.nbytes for tensor in tensors.values()))
        self._saves += 1
        text = f"{self._token} {step} {self._saves}"
        name, part = hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), f"training-{self._host}"
        self._start(lambda: self._store.write_part(step, name, part, tensors))
        return Attempt(name, self._hosts, lambda: self._failed)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def open_store(place: Path | str) -> FolderStore:
    """Returns the store of the checkpoints in a folder or at a URL."""
    return BucketStore(str(place)) if is_url(place) else FolderStore(Path(place))


def list_checkpoints(place: Path | str, *, verify: bool = False) -> tuple[list[Checkpoint], list[Rejected]]:
    """Lists a run's complete checkpoints by ascending step, and its damaged checkpoints; may run beside the writer.

    Args:
        place: `<output_dir>/checkpoints`, a folder or a URL; may be missing.
        verify: whether to read files whose MD5 is not listed, as on a disk; a listed MD5 is always compared.

    Raises:
        ValueError: a checkpoint has a format that this tpu_kit does not read, or the URL cannot be used.
        OSError: `place` cannot be read.
    """
    return open_store(place).list_checkpoints(verify)


def remains(place: Path | str, damaged: Sequence[Rejected] | None = None) -> list[str]:
    """Returns sentences about a checkpoints folder without a complete checkpoint; empty if a run may begin there.

    They are, in this order, about damaged checkpoints, about checkpoints that were set aside, and about other files,
    such as part of a copy or a checkpoint of another tool; see `layout.describe`.

    Args:
        place: as in `list_checkpoints`.
        damaged: the damaged checkpoints from `list_checkpoints`; None lists them, and raises its errors.

    Raises:
        OSError: `place` cannot be read.
    """
    store = open_store(place)
    damaged = store.list_checkpoints()[1] if damaged is None else damaged
    contents = store.contents()
    found = [one.reason for one in damaged]
    found += [f"{store.files.place(name)} was set aside as damaged" for name in contents.aside]
    found += [f"{store.files.place(name)} {what}" for name, what in contents.strange.items()]
    return found


def not_empty(place: Path | str, found: Sequence[str]) -> ValueError:
    """Makes, and does not raise, the error for a run without a complete checkpoint; `found` is from `remains`."""
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return ValueError(
        f"{place} has no complete checkpoint, but this is there:\n  "
        + "\n  ".join([*found[:_SHOWN], *more])
        + f"\nCopy the whole run again or correct output_dir, or start anew: {ANEW}"
    )


def print_checkpoints(run: str, verify: bool = False, as_json: bool = False) -> int:
    """Prints the checkpoints of a run, damaged checkpoints and other files, on stdout.

    Args:
        run: the run's output_dir, or the checkpoints folder there; a folder or a URL.
        verify: whether to read files whose MD5 is not listed, as on a disk; otherwise their sizes are compared.
        as_json: whether to print a JSON object in place of a table. It has "complete" (list with step, created,
            metrics, files, best, path, bytes and age_seconds), "damaged" (list with path and reason), and "others"
            (name -> description).

    Returns:
        The exit code: 0, also without checkpoints; 1 if a checkpoint is damaged or of another format, or the place
        cannot be read. The last two are reported on stderr.

    Raises:
        ConfigError: there is no such local folder.
    """
    place: Path | str = run if is_url(run) else Path(run)
    if isinstance(place, Path):
        place = place / "checkpoints" if (place / "checkpoints").is_dir() else place
        if not place.is_dir():
            raise ConfigError([f"{place}: no such folder"])
    try:
        good, damaged = list_checkpoints(place, verify=verify)
        if is_url(run) and not good and not damaged:
            place = join(run, "checkpoints")
            good, damaged = list_checkpoints(place, verify=verify)
        others = open_store(place).contents().strange
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    best = best_of(good)
    ages = {found.step: time.time() - found.created for found in good}
    if as_json:
        complete = [
            {name: getattr(found, name) for name in ("step", "created", "metrics", "files")}
            | {"best": found is best, "path": str(found.path), "bytes": found.size, "age_seconds": ages[found.step]}
            for found in good
        ]
        rejected = [{"path": str(one.path), "reason": one.reason} for one in damaged]
        print(json.dumps({"complete": complete, "damaged": rejected, "others": others}, indent=1))
        return int(bool(damaged))
    for found in good:
        state = ("verified" if verify else "complete") + ", best" * (found is best)
        values = "  ".join(f"{name} {value:.6g}" for name, value in found.metrics.items())
        size = f"{found.size / 1e6:,.1f} MB"
        print(f"step {found.step:>9,}{size:>14}{_age(ages[found.step]):>9}  {state:<14}  {values}".rstrip())
    for one in damaged:
        print(f"damaged: {one.reason}")
    for name, what in others.items():
        print(f"ignored: {join(place, name)} {what}")
    if not good and not damaged:
        print(f"no checkpoints in {place}")
    return int(bool(damaged))


def _age(seconds: float) -> str:
    """Returns an age in the largest unit of which it has at least two, such as "3 h"; never below 0."""
    unit, length = next((one for one in _UNITS if seconds >= 2 * one[1]), ("s", 1))
    return f"{max(0, seconds) / length:.0f} {unit}"  # a clock may have gone back
