"""A run's checkpoints: written in the background, the newest, the best and every M-th kept, the newest found again.

They are in a folder (tpu_kit.folder_store) or an object store (tpu_kit.bucket_store).
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from tpu_kit.bucket_store import BucketStore
from tpu_kit.folder_store import FolderStore
from tpu_kit.lease import holder_name
from tpu_kit.manifest import FORMAT, MANIFEST, Checkpoint, DamagedError, Rejected, best_of, error_number
from tpu_kit.storage import is_url


class Checkpoints:
    """A run's checkpoints, for the one process that writes them; the others use `tpu_kit.manifest.scan`.

    A context manager: on the way out the last checkpoint becomes durable, and the place is free for another process.

    Args:
        place: `<output_dir>/checkpoints`, a folder (made where missing) or a URL in an object store.
        keep: how many of the newest stay; the best one stays beside them.
        keep_every: those whose step is a multiple of it stay for good.
        clock: seconds since the epoch, for the manifests; tests inject their own.

    Attributes:
        rejected: the damaged ones that `newest` has set aside.

    Raises:
        ValueError: the place cannot be written to, or another process writes there.
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
        self.rejected: list[Rejected] = []
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._store: FolderStore | BucketStore
        try:
            self._store = BucketStore(str(place)) if is_url(place) else FolderStore(Path(place))
        except OSError as error:
            why = (
                f": {error.strerror}" if is_url(place) else f" ({error.strerror}): set output_dir to a folder that can"
            )
            raise ValueError(f"{place} cannot be written to{why}") from error

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
        """Waits until the last checkpoint is durable and gives the place free; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._store.close()

    def complete(self) -> list[Checkpoint]:
        """All that have a valid manifest and files of the right size, the smallest step first."""
        return self._store.scan()[0]

    def newest(self) -> Checkpoint | None:
        """The undamaged one of the largest step, all its files read and checked; None if there is none.

        A damaged one that is found on the way is renamed to *.corrupt, told on stderr, and added to `rejected`.

        Raises:
            ValueError: one has a format of a newer tpu_kit.
            OSError: the place cannot be read; nothing is set aside for that.
        """
        good, damaged = self._store.scan()
        for found in damaged:
            self._set_aside(found)
        for checkpoint in reversed(good):
            try:
                checkpoint.verify()
            except DamagedError as error:
                self._set_aside(Rejected(checkpoint.handle, str(error)))
            else:
                return checkpoint
        return None

    def restart(self) -> None:
        """Moves all there is to `<place>.previous`, in the place of what was there: for a run that starts anew.

        Otherwise an earlier run's larger steps would be its newest, and push its own out.
        """
        self.wait()
        self._store.restart()

    def withdraw(self, step: int) -> None:
        """Sets aside those of this step and of later ones, undamaged but of a training that has gone wrong."""
        self.wait()
        for checkpoint in self.complete():
            if checkpoint.step >= step:
                aside = self._store.set_aside(Rejected(checkpoint.handle, ""))
                text = (
                    f"warning: the checkpoint of step {checkpoint.step} is set aside as {aside}: the training diverged"
                )
                print(text, file=sys.stderr, flush=True)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        documents: Mapping[str, Any],
        metrics: Mapping[str, float],
        best: bool = False,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Starts to write a checkpoint and returns; a thread does the rest. One of the same step is replaced.

        Waits for the one before, so that one at most is on its way. An interpreter that ends waits for it, too, if it
        goes to a folder; for an object store call `close`.

        Args:
            step: updates done.
            tensors: file name without ".safetensors" to CPU tensors; nobody may change them any more.
            documents: file name without ".json" to what `json.dumps` takes; may change later.
            metrics: shown in lists.
            best: whether it is the best so far: it then stays until a better one, beside the newest.
            texts: file name to what `Checkpoint.text` returns, such as the log up to this step.

        Raises:
            OSError: the one before could not be written, or there is no room for this one. To make some, older ones
                are deleted, but not the newest, the best, or what `keep_every` names: what can be gone on from stays.
            ValueError: another process has written there in the meantime.
        """
        self.wait()
        written = {f"{name}.json": json.dumps(content) for name, content in documents.items()} | dict(texts or {})
        assert MANIFEST not in written and all("/" not in name for name in (*written, *tensors)), "bad file names"
        sizes = [value.numel() * value.element_size() for group in tensors.values() for value in group.values()]
        # Headers take some 100 bytes a tensor, and each file is rounded up to the file system's block.
        files = len(tensors) + len(written) + 1
        needed = sum(sizes) + sum(len(text.encode()) for text in written.values()) + 256 * len(sizes) + 8192 * files
        self._make_room(step, needed)
        about: dict[str, Any] = {"format": FORMAT, "step": step, "created": self.clock(), "best": best}
        about |= {"metrics": {name: float(value) for name, value in metrics.items()}, "writer": holder_name()}
        self._thread = threading.Thread(target=self._run, args=(about, tensors, written, needed))
        self._thread.start()

    def poll(self) -> None:
        """Raises what `wait` would if the last writing has ended in an error; returns at once in any case."""
        if self._error is not None:
            self.wait()

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
        try:
            self._store.write(about, tensors, texts)
            for surplus in self._surplus(self.keep):
                self._discard(surplus)
        except (OSError, SafetensorError) as error:
            self._error = self._failure(about["step"], error, needed)
            self._error.__cause__ = error
        except Exception as error:
            self._error = error

    def _surplus(self, keep: int) -> list[Checkpoint]:
        """The complete ones that may go: all but the `keep` newest, the best, and every M-th."""
        complete = self.complete()
        best = best_of(complete)
        stay = [best.step] if best is not None else []
        if self.keep_every is not None:
            stay += [checkpoint.step for checkpoint in complete if checkpoint.step % self.keep_every == 0]
        return [checkpoint for checkpoint in complete[:-keep] if checkpoint.step not in stay]

    def _discard(self, checkpoint: Checkpoint) -> None:
        try:
            self._store.discard(checkpoint)
        except OSError as error:  # it costs room, which `save` looks after: no reason to end a run
            print(f"warning: {checkpoint.path} could not be deleted ({error.strerror})", file=sys.stderr, flush=True)

    def _set_aside(self, found: Rejected) -> None:
        aside = self._store.set_aside(found)
        self.rejected.append(found)
        print(f"warning: {found.reason}; the checkpoint is set aside as {aside}", file=sys.stderr, flush=True)

    def _make_room(self, step: int, needed: int) -> None:
        """Deletes older ones if there is no room otherwise, and if that makes enough."""
        free = self._store.free()
        if free is None or free >= needed:
            return
        surplus = self._surplus(1)
        if free + sum(older.size for older in surplus) < needed:
            raise self._failure(step, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)
        while surplus and (self._store.free() or 0) < needed:
            older = surplus.pop(0)
            text = f"warning: {self.place} is full: the checkpoint of step {older.step} makes room for step {step}"
            print(text, file=sys.stderr, flush=True)
            self._discard(older)

    def _failure(self, step: int, error: Exception, needed: int) -> OSError:
        """What `error` means for the user."""
        code = error_number(error)
        known = self._store.known
        last = f"The checkpoint of step {known[-1].step} stays good" if known else "There is no earlier one"
        begin = f"the checkpoint of step {step} could not be written to {self.place}"
        if isinstance(self._store, BucketStore):
            return OSError(code, f"{begin}: {getattr(error, 'strerror', None) or error}. {last}")
        try:
            free = f"{self._store.free():,}"
        except OSError:  # this is to tell of another error, and must not hide it
            free = "nobody knows how many"
        advice = "delete something there or lower checkpoint.keep, or " if code in (errno.ENOSPC, errno.EDQUOT) else ""
        return OSError(
            code,
            f"{os.strerror(code)}: {begin}. It needs {needed:,} bytes, and {free} are free: {advice}set output_dir to "
            f"another disk. {last}",
        )
