"""Stores checkpoints in a folder of this machine: each is written to a temporary folder next to it, then renamed.

<output_dir>/checkpoints/
  step-00000400/             a complete checkpoint; only its manifest counts, not its name
    adapter_model.safetensors, state.json, ...
    manifest.json            see tpu_kit.checkpointing.manifest; written last
  .step-00000412.part/       being written, or left by a process that was killed
  .step-00000412.3f9a1c07b2de.part/  the parts of several hosts; see tpu_kit.checkpointing.parts
  .step-00000412.old/        for a moment, while the same step is saved again
  step-00000300.corrupt/     set aside by `CheckpointManager.newest`
  .lock                      held by the one process that writes here; names its host and PID
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import save_file
from torch import Tensor

from tpu_kit.checkpointing.manifest import (
    CORRUPT,
    MANIFEST,
    Checkpoint,
    Tensors,
    digest,
    holder_name,
    in_use,
    seal,
)
from tpu_kit.checkpointing.parts import Attempt
from tpu_kit.storage import atomic
from tpu_kit.storage.atomic import OLD, PART

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}  # some network and FUSE folders


class FolderStore:
    """The checkpoints of a run in a folder, for the one process that writes them.

    Raises:
        ValueError: another process writes there.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock, alone = lock(folder / ".lock", folder)
        try:
            if alone:  # the writers of leftovers are dead
                self._clean()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Releases the folder for another process."""
        self._lock.close()

    def write(
        self, about: Mapping[str, Any], tensors: Tensors, texts: Mapping[str, str], attempt: Attempt | None = None
    ) -> None:
        """Writes files, then manifest, then name, each durable before the next; see `BucketStore.write`."""
        place = self.folder / f"step-{about['step']:08d}"
        with atomic.replacing(place, durable=True) as part:
            part.mkdir()
            files = {}
            if attempt is not None:
                come = _parts(self.folder, about["step"], attempt.name)
                files = attempt.receipts(lambda: {path.name: path.read_bytes() for path in come.glob("*.json")})
                for name in files:
                    (come / name).rename(part / name)
                shutil.rmtree(come, ignore_errors=True)
            for name, group in tensors.items():
                files |= _save(part / f"{name}.safetensors", group)
            for name, text in texts.items():
                (part / name).write_bytes(text.encode())
                files |= _entry(part / name)
            (part / MANIFEST).write_text(seal({**about, "files": files}))
            atomic.sync(part / MANIFEST)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint; if killed in between, it leaves none that looks damaged. Raises OSError."""
        self._remove(Path(checkpoint.path))

    def set_aside(self, path: Path | str) -> str:
        """Renames a checkpoint so that no scan finds it; returns its new name."""
        aside = Path(f"{path}{CORRUPT}")
        if aside.exists():
            aside = Path(f"{path}.{time.time_ns()}{CORRUPT}")
        Path(path).rename(aside)
        return aside.name

    def restart(self) -> None:
        """Moves all checkpoints to `<folder>.previous`, whose content it deletes."""
        previous = self.folder.with_name(self.folder.name + ".previous")
        entries = [path for path in self.folder.iterdir() if path.is_dir()]
        if entries:
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in entries:
                path.rename(previous / path.name)
            atomic.sync(self.folder)

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f".{path.name.lstrip('.')}.gone{PART}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)

    def _clean(self) -> None:
        """Removes the leftovers of killed writers."""
        for path in self.folder.glob(f".*{PART}"):
            shutil.rmtree(path)
        for path in self.folder.glob(f".*{OLD}"):
            place = self.folder / path.name[1 : -len(OLD)]
            if place.exists():
                self._remove(path)
            else:  # killed between the two renames
                path.rename(place)


def write_part(folder: Path, step: int, attempt: str, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Writes the part `name` of one of several hosts, then its receipt; see `parts`."""
    part = _parts(folder, step, attempt)
    part.mkdir(parents=True, exist_ok=True)
    entry = _save(part / f"{name}.safetensors", tensors)
    with atomic.replacing(part / f"{name}.json", durable=True) as receipt:
        receipt.write_text(json.dumps(entry[f"{name}.safetensors"]))
        atomic.sync(receipt)


def _parts(folder: Path, step: int, attempt: str) -> Path:
    return folder / f".step-{step:08d}.{attempt}{PART}"


def _save(path: Path, group: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Writes tensors; returns the entry of the manifest."""
    save_file({key: value.contiguous() for key, value in group.items()}, path, metadata={"format": "pt"})
    with contextlib.suppress(OSError):  # safetensors writes with mode 600; some folders allow no chmod
        path.chmod(path.parent.stat().st_mode & 0o666)
    return _entry(path)


def _entry(path: Path) -> dict[str, dict[str, Any]]:
    """Makes a file durable; returns its entry of the manifest."""
    atomic.sync(path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": digest(path)}}


def lock(path: Path, place: Path | str) -> tuple[TextIO, bool]:
    """Locks a file until it is closed or this process dies; (file, False) if the file system has no locks.

    Raises:
        ValueError: another process holds it, and writes to the place.
    """
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise in_use(place, holder) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            file.close()
            raise
        print(f"warning: {path.parent} has no file locks: make sure that only one run writes there", file=sys.stderr)
        return file, False
    file.truncate(0)
    file.write(f"{holder_name()}\n")
    file.flush()
    return file, True
