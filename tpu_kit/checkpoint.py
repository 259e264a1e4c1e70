"""Checkpoints in a local folder: each is written beside its place, committed by a manifest, found by it, and checked.

<output_dir>/checkpoints/
  step-00000400/             a complete checkpoint; its name means nothing, its manifest.json all
    adapter_model.safetensors, state.json, ...
    manifest.json            see tpu_kit.manifest; written last
  .step-00000412.4711.part/  being written by process 4711, or left by it when it was killed
  .step-00000412.old/        for a moment, while the same step is saved again
  step-00000300.corrupt/     set aside by `Checkpoints.newest`
  .lock                      held by the one process that writes here; names its host and PID
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tpu_kit.manifest import (
    CORRUPT,
    FORMAT,
    MANIFEST,
    OLD,
    PART,
    Checkpoint,
    DamagedError,
    Rejected,
    digest,
    scan,
    seal,
)

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}  # some network and FUSE folders


class Checkpoints:
    """The folder of a run's checkpoints, for the one process that writes them; the others use `scan`.

    A context manager: on the way out the last checkpoint becomes durable, and the folder is free for another process.

    Args:
        folder: `<output_dir>/checkpoints`; made where missing.
        keep: how many of the newest stay; the best one stays beside them.
        clock: seconds since the epoch, for the manifests; tests inject their own.

    Attributes:
        rejected: the damaged ones that `newest` has set aside.

    Raises:
        ValueError: the folder cannot be written to, or another process writes there.
    """

    def __init__(self, folder: Path, keep: int, *, clock: Callable[[], float] = time.time) -> None:
        assert keep >= 1, keep
        self.folder, self.keep, self.clock = folder, keep, clock
        self.rejected: list[Rejected] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock, alone = _lock(folder / ".lock")
            if alone:  # then whoever wrote these is dead
                self._clean()
        except OSError as error:
            raise ValueError(
                f"{folder} cannot be written to ({error.strerror}): set output_dir to a folder that can"
            ) from error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if kind is None:
                raise
            print(failure, file=sys.stderr, flush=True)  # the error on its way tells more than this one

    def close(self) -> None:
        """Waits until the last checkpoint is durable and gives the folder free; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._lock.close()

    def complete(self) -> list[Checkpoint]:
        """All that have a valid manifest and files of the right size, the smallest step first."""
        return scan(self.folder)[0]

    def newest(self) -> Checkpoint | None:
        """The undamaged one of the largest step, all its files read and checked; None if there is none.

        A damaged one that is found on the way is renamed to *.corrupt, told on stderr, and added to `rejected`.

        Raises:
            ValueError: one has a format of a newer tpu_kit.
        """
        good, damaged = scan(self.folder)
        for found in damaged:
            self._set_aside(found)
        for checkpoint in reversed(good):
            try:
                checkpoint.verify()
            except DamagedError as error:
                self._set_aside(Rejected(checkpoint.path, str(error)))
            else:
                return checkpoint
        return None

    def restart(self) -> None:
        """Moves all there is to `<folder>.previous`, in the place of what was there: for a run that starts anew.

        Otherwise an earlier run's larger steps would be its newest, and push its own out.
        """
        self.wait()
        previous = self.folder.with_name(self.folder.name + ".previous")
        entries = [path for path in self.folder.iterdir() if path.is_dir()]
        if entries:
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in entries:
                path.rename(previous / path.name)
            _sync(self.folder)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Any],
        metrics: Mapping[str, float],
        best: bool = False,
    ) -> None:
        """Starts to write a checkpoint and returns; a thread does the rest. One of the same step is replaced.

        Waits for the one before, so that one at most is on its way. An interpreter that ends waits for it, too.

        Args:
            step: updates done.
            tensors: file name without ".safetensors" to CPU tensors; nobody may change them any more.
            documents: file name without ".json" to what `json.dumps` takes; may change later.
            metrics: shown in lists.
            best: whether it is the best so far: it then stays until a better one, beside the newest.

        Raises:
            OSError: the one before could not be written, or there is no room for this one. To make some, older ones
                are deleted, but neither the newest nor the best: what can be gone on from stays.
        """
        self.wait()
        texts = {f"{name}.json": json.dumps(content) for name, content in documents.items()}
        assert MANIFEST not in texts and all("/" not in name for name in (*texts, *tensors)), "bad file names"
        sizes = [value.numel() * value.element_size() for group in tensors.values() for value in group.values()]
        # Headers take some 100 bytes a tensor, and each file is rounded up to the file system's block.
        needed = sum(sizes) + sum(map(len, texts.values())) + 256 * len(sizes) + 8192 * (len(tensors) + len(texts) + 1)
        self._make_room(step, needed)
        about: dict[str, Any] = {"format": FORMAT, "step": step, "created": self.clock(), "best": best}
        about["metrics"] = {name: float(value) for name, value in metrics.items()}
        self._thread = threading.Thread(target=self._run, args=(about, tensors, texts, needed))
        self._thread.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is durable; raises, once, the error that its writing ended in."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(
        self,
        about: dict[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, str],
        needed: int,
    ) -> None:
        part = self.folder / f".step-{about['step']:08d}.{os.getpid()}{PART}"
        try:
            self._write(part, about, tensors, texts)
            for surplus in self._surplus(self.keep):
                self._discard(surplus.path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            # safetensors writes in Rust and has the number in its text alone
            number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
            code = int(number[1]) if number else getattr(error, "errno", None) or errno.EIO
            self._error = self._failure(about["step"], code, needed)
            self._error.__cause__ = error
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            self._error = error

    def _write(
        self, part: Path, about: dict[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, str]
    ) -> None:
        """Files, manifest and name, each durable before the next begins."""
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        for name, group in tensors.items():
            whole = {key: value.contiguous() for key, value in group.items()}
            save_file(whole, part / f"{name}.safetensors", metadata={"format": "pt"})
            with contextlib.suppress(OSError):  # safetensors lets nobody else read it; some folders allow no chmod
                (part / f"{name}.safetensors").chmod(part.stat().st_mode & 0o666)
        for name, text in texts.items():
            (part / name).write_text(text)
        files = {}
        for path in sorted(part.iterdir()):
            _sync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        (part / MANIFEST).write_text(seal({**about, "files": files}))
        _sync(part / MANIFEST)
        _sync(part)
        place, old = self.folder / f"step-{about['step']:08d}", self.folder / f".step-{about['step']:08d}{OLD}"
        replaced = place.exists()
        if replaced:
            place.rename(old)
        part.rename(place)
        _sync(self.folder)
        if replaced:
            self._discard(old)

    def _surplus(self, keep: int) -> list[Checkpoint]:
        """The complete ones that may go: all but the `keep` newest and the last that was the best."""
        complete = self.complete()
        best = [checkpoint for checkpoint in complete if checkpoint.best][-1:]
        return [checkpoint for checkpoint in complete[:-keep] if checkpoint not in best]

    def _discard(self, path: Path) -> None:
        """Deletes a checkpoint; killed in between, it leaves none that looks damaged."""
        gone = path.with_name(f".{path.name.lstrip('.')}.gone{PART}")
        try:
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:  # it costs room, which `save` looks after: no reason to end a run
            print(f"warning: {path} could not be deleted ({error.strerror})", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        """Removes what killed writers have left behind."""
        for path in self.folder.glob(f".*{PART}"):
            shutil.rmtree(path)
        for path in self.folder.glob(f".*{OLD}"):
            place = self.folder / path.name[1 : -len(OLD)]
            if place.exists():
                self._discard(path)
            else:  # killed between the two renames
                path.rename(place)

    def _set_aside(self, found: Rejected) -> None:
        aside = found.path.with_name(found.path.name + CORRUPT)
        while aside.exists():
            aside = aside.with_name(f"{found.path.name}.{time.time_ns()}{CORRUPT}")
        found.path.rename(aside)
        self.rejected.append(found)
        print(f"warning: {found.reason}; the checkpoint is set aside as {aside.name}", file=sys.stderr, flush=True)

    def _make_room(self, step: int, needed: int) -> None:
        """Deletes older ones if there is no room otherwise, and if that makes enough."""
        surplus, free = self._surplus(1), shutil.disk_usage(self.folder).free
        if free + sum(older.size for older in surplus) < needed:
            raise self._failure(step, errno.ENOSPC, needed)
        while surplus and shutil.disk_usage(self.folder).free < needed:
            older = surplus.pop(0)
            text = f"warning: {self.folder} is full: the checkpoint of step {older.step} makes room for step {step}"
            print(text, file=sys.stderr, flush=True)
            self._discard(older.path)

    def _failure(self, step: int, code: int, needed: int) -> OSError:
        try:
            free = f"{shutil.disk_usage(self.folder).free:,}"
            complete = self.complete()
        except (OSError, ValueError):  # this is to tell of another error, and must not hide it
            free, complete = "nobody knows how many", []
        advice = "delete something there or lower checkpoint.keep, or " if code in (errno.ENOSPC, errno.EDQUOT) else ""
        last = f"The checkpoint of step {complete[-1].step} stays good" if complete else "There is no earlier one"
        return OSError(
            code,
            f"{os.strerror(code)}: the checkpoint of step {step} could not be written to {self.folder}. It needs "
            f"{needed:,} bytes, and {free} are free: {advice}set output_dir to another disk. {last}",
        )


def _lock(path: Path) -> tuple[TextIO, bool]:
    """Locks a file until it is closed or this process dies; (file, False) where the file system knows no locks."""
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{path.parent} is being written to by {holder}: end that one first, or set another output_dir"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        print(f"warning: {path.parent} has no file locks: see to it that one run alone writes there", file=sys.stderr)
        return file, False
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file, True


def _sync(path: Path) -> None:
    """Makes a file's content, or a folder's names, outlive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_LOCKS or not path.is_dir():  # some FUSE folders cannot, and need not
            raise
    finally:
        os.close(handle)
