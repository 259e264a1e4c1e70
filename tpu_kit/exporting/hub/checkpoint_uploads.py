"""Keeps the newest checkpoint of a run in its repository on the hub, and fetches it on another machine.

The calling process of a run uploads in a thread, so that training does not wait. The repository holds a single
checkpoint, in the folder last-checkpoint. Every commit replaces it completely, and is refused if the branch has moved
on. Earlier checkpoints stay in the history, by their commits.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from tpu_kit.config.hub import read_hub_address
from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.preemption import stops_raise
from tpu_kit.exporting.hub.publish import repeat_command, repository_of
from tpu_kit.exporting.hub.repository import Head, HubRepository
from tpu_kit.machine.chips import GIB, MIB
from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.local_folder import LocalFolder
from tpu_kit.training.checkpoint.manager import list_checkpoints
from tpu_kit.training.checkpoint.manifest import MANIFEST, Checkpoint, read_checkpoint, unseal

FOLDER = "last-checkpoint"
"""The folder of the checkpoint in the repository."""
_LEAST = 300.0  # seconds between the starts of uploads, so that the history grows slowly
_LOOK = 5.0  # seconds between checks for a newer checkpoint
_SPARE = GIB  # free space to leave, beside two checkpoints
_SCRATCH = ".hub"  # folder in the run's folder for the checkpoint that is uploaded or fetched


class CheckpointUploads:
    """A context manager that uploads a run's newest checkpoint while its body trains, and the last one at the end.

    It does nothing unless hub.strategy=checkpoint. A failure never ends the run: it is a warning, and the next upload
    tries a newer checkpoint.

    Args:
        config: the run.
        on: whether this host uploads.
        clock: returns monotonic seconds.
        least: minimum seconds between the starts of uploads.
        look: seconds between checks for a newer checkpoint.

    Attributes:
        count: number of pushed checkpoints.
        bytes: sum of their sizes.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        on: bool = True,
        clock: Callable[[], float] = time.monotonic,
        least: float = _LEAST,
        look: float = _LOOK,
    ) -> None:
        self._config, self._place = config, config.checkpoints_place
        self._on = on and config.hub.model_id is not None and config.hub.strategy == "checkpoint"
        self._repository = repository_of(config)
        self._clock, self._least, self._look = clock, least, look
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint uploads", daemon=True)
        self._begun: float | None = None  # when the last upload began
        self._head: Head | None = None  # the parent of the next commit
        self._manifest, self._tried = b"", b""  # of the checkpoint in the repository; of the last tried upload
        self._lost, self._told = False, ""  # whether another run writes there; the last warning
        self._others = set[tuple[Path | str, float]]()  # checkpoints of an earlier run
        self.count, self.bytes = 0, 0

    def __enter__(self) -> Self:
        if self._on:
            if self._config.checkpoint.resume == "never":  # an earlier run's checkpoints will be moved aside
                self._others = {(one.path, one.created) for one in list_checkpoints(self._place)[0]}
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._on:
            return
        self._ended.set()
        try:
            with stops_raise():
                self._thread.join()
        except (KeyboardInterrupt, SystemExit):  # the thread ends with this process
            _warn(f"the upload of the last checkpoint was cut off; it is complete in {self._place}")
        if self.count and self._head:
            address = f"hf://{self._repository.model_id}@{self._head.sha}"
            print(
                f"hub              {self.count} checkpoints pushed, {self.bytes / MIB:,.1f} MiB, which the history of "
                f"{self._repository.url} keeps; to continue on another machine: checkpoint.source={address}",
                flush=True,
            )

    def _run(self) -> None:
        """Uploads new checkpoints until the body ends, then the last, in two tries if needed; runs in the thread."""
        with _no_bars():
            while not self._ended.wait(self._look):
                if self._begun is None or self._clock() - self._begun >= self._least:
                    self._turn()
            if not self._turn():
                self._turn()  # a commit by hand may have moved the branch

    def _turn(self) -> bool:
        """Uploads the newest checkpoint unless it is already there; returns False if that fails.

        A failure prints a warning, unless the last warning was the same. True also if there is nothing to upload.
        """
        checkpoint = None
        try:
            checkpoint = next(reversed(list_checkpoints(self._place)[0]), None)
            if checkpoint and not self._lost and (checkpoint.path, checkpoint.created) not in self._others:
                self._upload(checkpoint)
        except Exception as error:  # whatever it is, the run goes on
            self._head = None  # read it again
            if checkpoint and not Path(checkpoint.path).exists():  # deleted, because there is a newer checkpoint
                return False
            problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            if problem != self._told:
                self._told = problem
                command = repeat_command(self._config, self._config.output_path)
                _warn(
                    f"{problem}. The run goes on, its checkpoints are complete in {self._place}; the next upload is "
                    f"tried in {self._least / 60:.0f} minutes; after the run: {command}"
                )
            return False
        return True

    def _upload(self, checkpoint: Checkpoint) -> None:
        """Commits a checkpoint unless the repository has it or another run writes there; may raise any error."""
        manifest = (Path(checkpoint.path) / MANIFEST).read_bytes()
        if manifest == self._manifest:
            return
        self._begun, self._tried = self._clock(), manifest
        head = self._head = self._head or self._read_head()
        if manifest == self._manifest or self._lost:
            return
        with held(Path(checkpoint.path), self._config.output_path, checkpoint.size) as folder:
            files = {f"{FOLDER}/{name}": folder / name for name in (*checkpoint.files, MANIFEST)}
            earlier = {name for name in head.files if name.startswith(f"{FOLDER}/")}
            made = self._repository.commit(head, files, earlier, f"Checkpoint of step {checkpoint.step}")
        self._head = Head(made.sha, head.files - {*made.removed} | {*files})
        self._manifest, self._told = manifest, ""
        self.count, self.bytes = self.count + 1, self.bytes + made.bytes

    def _read_head(self) -> Head:
        """Returns the parent of the next commit; sets `_manifest`, and `_lost` if another run pushed a checkpoint."""
        head = self._repository.open()
        there = self._repository.read(head, f"{FOLDER}/{MANIFEST}") or b""
        name = f"hub.model_id={self._repository.model_id}"
        if not self._manifest and there not in (b"", self._tried):
            print(f"hub              {name}: its checkpoint is replaced; it stays in the commit {head.sha}", flush=True)
        elif self._manifest and there not in (self._manifest, self._tried):
            self._lost = True
            _warn(
                f"{name}: another run has pushed a checkpoint there, so this run pushes no more: give every run its "
                "own hub.model_id or hub.revision"
            )
        self._manifest = there
        return head


@contextmanager
def _no_bars() -> Iterator[None]:
    """Turns off huggingface_hub's progress bars, which would disturb the run's own, until the block ends."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


@contextmanager
def held(checkpoint: Path, run: Path, size: int) -> Iterator[Path]:
    """Yields a folder with the files of `checkpoint`: hard links in a scratch folder, deleted after the block.

    They stay even if the run deletes the checkpoint meanwhile. If the file system has no hard links, they are copies.
    The scratch folder is in the run's folder `run`. If the disk has less free space than 2 * `size` bytes and 1 GiB,
    nothing is made, and the yielded folder is `checkpoint` itself.
    """
    if shutil.disk_usage(run).free < 2 * size + _SPARE:
        yield checkpoint
        return
    scratch = run / _SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        for path in checkpoint.iterdir():
            try:
                os.link(path, scratch / path.name)
            except OSError:
                shutil.copyfile(path, scratch / path.name)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def fetch_checkpoint(config: TrainConfig) -> None:
    """Fetches the checkpoint of `checkpoint.source` into the run's folder if its step is above all checkpoints there.

    Does nothing without a source. It is written to `config.output_path`/checkpoints/step-NNNNNNNN. All files are from
    the same commit, and are verified before the checkpoint counts as complete. If `hub.model_id` and `hub.revision` are
    the same place, a missing checkpoint is no error: it is printed.

    Raises:
        ValueError: the checkpoint is missing or damaged, the hub cannot be reached, or the folder is not writable.
    """
    if (source := config.checkpoint.source) is None:
        return
    model_id, revision = read_hub_address(source)
    repository = HubRepository(model_id, revision=revision, option="checkpoint.source")
    head = repository.find()
    text = repository.read(head, f"{FOLDER}/{MANIFEST}") if head else None
    if head is None or text is None:
        what = f"has no {FOLDER}, which a run with hub.strategy=checkpoint pushes" if head else "cannot be found"
        # If the run pushes to the same place, this is its first start. A missing commit is always a mistake.
        if (model_id, revision) != (config.hub.model_id, config.hub.revision):
            raise ValueError(f"checkpoint.source={source} {what}: check its name, and that the token may read it")
        print(f"checkpoint       {source} {what}", flush=True)
        return
    address = f"hf://{model_id}@{head.sha}"
    step = unseal(text, f"{address}/{FOLDER}/{MANIFEST}", address)["step"]
    place = config.output_path / "checkpoints"
    newest = next(reversed(list_checkpoints(place)[0]), None)
    if newest is not None and newest.step >= step:
        print(f"checkpoint       {newest.path} is not older than step {step} of {address}, which is not fetched")
        return
    print(f"fetches          the checkpoint of step {step} of {address}", flush=True)
    scratch = config.output_path / f"{_SCRATCH}-{head.sha[:12]}"  # an interrupted download continues here
    try:
        place.mkdir(parents=True, exist_ok=True)
        repository.fetch(head, FOLDER, scratch)
        read_checkpoint(LocalFolder(scratch), FOLDER, text).verify()
        with atomic.replacing(place / f"step-{step:08d}", durable=True) as part:
            (scratch / FOLDER).rename(part)
    except OSError as error:
        raise ValueError(f"checkpoint.source={source} cannot be written to {place} ({error.strerror})") from error
    shutil.rmtree(scratch, ignore_errors=True)


def _warn(text: str) -> None:
    """Prints a warning to stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
