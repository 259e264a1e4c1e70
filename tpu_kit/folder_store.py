"""Checkpoints in a folder of this machine: each is written beside its place, then renamed.

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
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from safetensors.torch import save_file
from torch import Tensor

from tpu_kit.lease import holder_name
from tpu_kit.manifest import CORRUPT, MANIFEST, OLD, PART, Checkpoint, Rejected, digest, scan, seal

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}  # some network and FUSE folders


class FolderStore:
    """The checkpoints of a run in a folder, for the one process that writes them.

    Args:
        folder: `<output_dir>/checkpoints`; made where missing.

    Raises:
        ValueError: another process writes there.
        OSError: it cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._lock, alone = _lock(folder / ".lock")
        try:
            if alone:  # then whoever wrote these is dead
                self._clean()
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Gives the folder free for another process."""
        self._lock.close()

    def scan(self) -> tuple[list[Checkpoint], list[Rejected]]:
        """See `tpu_kit.manifest.scan`."""
        return scan(self.folder)

    @property
    def known(self) -> list[Checkpoint]:
        """The complete ones, as far as can be told."""
        with contextlib.suppress(OSError, ValueError):
            return self.scan()[0]
        return []

    def free(self) -> int | None:
        """Bytes that can be written."""
        return shutil.disk_usage(self.folder).free

    def write(
        self, about: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]], texts: Mapping[str, str]
    ) -> None:
        """Files, manifest and name, each durable before the next begins; raises OSError or SafetensorError."""
        part = self.folder / f".step-{about['step']:08d}.{os.getpid()}{PART}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            self._fill(part, about, tensors, texts)
            place, old = self.folder / f"step-{about['step']:08d}", self.folder / f".step-{about['step']:08d}{OLD}"
            replaced = place.exists()
            if replaced:
                place.rename(old)
            part.rename(place)
            _sync(self.folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        if replaced:
            self._remove(old)

    def _fill(
        self,
        part: Path,
        about: Mapping[str, Any],
        tensors: Mapping[str, Mapping[str, Tensor]],
        texts: Mapping[str, str],
    ) -> None:
        for name, group in tensors.items():
            whole = {key: value.contiguous() for key, value in group.items()}
            save_file(whole, part / f"{name}.safetensors", metadata={"format": "pt"})
            with contextlib.suppress(OSError):  # safetensors lets nobody else read it; some folders allow no chmod
                (part / f"{name}.safetensors").chmod(part.stat().st_mode & 0o666)
        for name, text in texts.items():
            (part / name).write_bytes(text.encode())
        files = {}
        for path in sorted(part.iterdir()):
            _sync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        (part / MANIFEST).write_text(seal({**about, "files": files}))
        _sync(part / MANIFEST)
        _sync(part)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint; killed in between, it leaves none that looks damaged."""
        self._remove(Path(checkpoint.path))

    def set_aside(self, found: Rejected) -> str:
        """Lets a damaged one no longer count, and keeps all there is of it; returns its new name."""
        path = Path(found.path)
        aside = path.with_name(path.name + CORRUPT)
        while aside.exists():
            aside = aside.with_name(f"{path.name}.{time.time_ns()}{CORRUPT}")
        path.rename(aside)
        return aside.name

    def restart(self) -> None:
        """Moves all there is to `<folder>.previous`, in the place of what was there."""
        previous = self.folder.with_name(self.folder.name + ".previous")
        entries = [path for path in self.folder.iterdir() if path.is_dir()]
        if entries:
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in entries:
                path.rename(previous / path.name)
            _sync(self.folder)

    def _remove(self, path: Path) -> None:
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
                self._remove(path)
            else:  # killed between the two renames
                path.rename(place)


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
    file.write(f"{holder_name()}\n")
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
