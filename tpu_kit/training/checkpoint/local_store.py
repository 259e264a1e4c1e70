"""Commits checkpoints in a folder of this machine; `gcs_store` shares the protocol.

An attempt to save a step writes its files, and the parts of several hosts, into a folder with a random name, then the
manifest. Then an atomic operation makes the checkpoint valid: here a rename. layout.py lists the names.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.atomic import OLD, PART
from tpu_kit.machine.storage.local_folder import LocalFolder, make_folder
from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.training.checkpoint.host_parts import Attempt
from tpu_kit.training.checkpoint.layout import (
    Contents,
    Listing,
    owner_name,
    owner_numbers,
    read_owner,
    same_step,
    sort_out,
)
from tpu_kit.training.checkpoint.manifest import (
    CORRUPT,
    MANIFEST,
    Checkpoint,
    DamagedError,
    Rejected,
    Tensors,
    file_digest,
    holder_name,
    in_use,
    new_digest,
    read_checkpoint,
    seal,
)

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.ENOLCK}  # some network and FUSE folders

Entry = dict[str, Any]
"""Size and MD5 of a file, in a manifest."""


class FolderStore:
    """The checkpoints of a run. Any process may read and write parts; only the process in `writing` may do the rest."""

    files: LocalFolder | ObjectFolder
    attempt_name = f".step-{{step:08d}}.{{name}}{PART}"

    def __init__(self, place: Path) -> None:
        self.folder, self.files = place, LocalFolder(place)

    def list_checkpoints(self, verify: bool = False) -> tuple[list[Checkpoint], list[Rejected]]:
        """Returns the complete checkpoints by ascending step, and the damaged checkpoints.

        It compares the files' sizes, and the MD5s that an object store lists. With `verify` it also reads the files
        without a listed MD5, on a disk all files. Both lists are empty if the folder is missing. The writer may change
        files meanwhile, so two scans must agree on damage. Raises ValueError for a checkpoint of another format, and
        OSError.
        """
        damaged: list[Rejected] = []
        while True:
            good, now = self._look(verify)
            if now == damaged:
                return good, damaged
            damaged = now

    def _look(self, verify: bool) -> tuple[list[Checkpoint], list[Rejected]]:
        """Scans the folder once; arguments, result and errors as in `list_checkpoints`."""
        listing, contents = self._snapshot()
        folders = contents.counted
        manifests = self.files.read_all(f"{folder}/{MANIFEST}" for folder in folders)
        found: dict[int, Checkpoint] = {}
        rejected = []
        for folder in folders:
            try:
                checkpoint = read_checkpoint(self.files, folder, manifests.get(f"{folder}/{MANIFEST}"))
                checkpoint.check(listing)
                if verify:
                    checkpoint.verify()
                found[checkpoint.step] = checkpoint
            except DamagedError as error:
                rejected.append(Rejected(folder, self.files.place(folder), str(error)))
        return [found[step] for step in sorted(found)], rejected

    def contents(self) -> Contents:
        """Returns the names in the checkpoints folder, by kind; raises OSError."""
        return self._snapshot()[1]

    def write_part(self, step: int, attempt: str, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes `name`.safetensors, a host's part, then its receipt `name`.json, into the folder of `Attempt.name`."""
        folder = self.attempt_name.format(step=step, name=attempt)
        entry = self._put_tensors(f"{folder}/{name}.safetensors", tensors)
        self._put(f"{folder}/{name}.json", json.dumps(entry))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes this process the writer in the context; makes the folder, and removes killed processes' leftovers.

        A replaced checkpoint whose successor is missing gets its name back. Without file locks it changes no folder,
        and prints a warning on stderr.

        Raises:
            ValueError: another process writes there.
            OSError: the folder cannot be written to; the message names the next action.
        """
        make_folder(self.folder)
        with lock(self.folder / ".lock", self.folder) as alone:
            if alone:  # the processes that wrote the leftovers have ended
                self._clean()
            yield

    def write(
        self, about: Mapping[str, Any], tensors: Tensors, texts: Mapping[str, str], attempt: Attempt | None = None
    ) -> None:
        """Writes the files, then the manifest, then commits the checkpoint; it replaces a checkpoint of the same step.

        Args:
            about: the manifest without its files; its "step" names the folder.
            tensors: file name without ".safetensors" -> CPU tensors by name.
            texts: file name -> content.
            attempt: the attempt of several hosts, whose parts become files of the checkpoint: waits for their receipts.

        Raises:
            ValueError: another process has become the writer, in an object store.
            OSError: the folder, or this machine's temporary folder, cannot be written to; or a part was not written.
            SafetensorError: a file of tensors could not be written to the folder.
        """
        step, name = about["step"], attempt.name if attempt else secrets.token_hex(6)
        folder = self.attempt_name.format(step=step, name=name)
        with self._commit(folder, step, shared=attempt is not None):
            entries = attempt.receipts(lambda: self._receipts(folder)) if attempt else {}
            for name, group in tensors.items():
                entries[f"{name}.safetensors"] = self._put_tensors(f"{folder}/{name}.safetensors", group)
            for name, text in texts.items():
                entries[name] = self._put(f"{folder}/{name}", text)
            self._put(f"{folder}/{MANIFEST}", seal({**about, "files": entries}))

    def discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint; if killed meanwhile, it leaves no damaged checkpoint. Raises OSError."""
        self._remove(self.folder / checkpoint.folder)

    def set_aside(self, folder: str) -> str:
        """Renames a checkpoint's folder to *.corrupt, so that it no longer counts; returns the new name.

        `folder` is a name, as `Checkpoint.folder`. If FOLDER.corrupt exists, the new name is FOLDER.NUMBER.corrupt. If
        the folder does not exist, it only returns the name. Raises OSError.
        """
        aside = self.folder / f"{folder}{CORRUPT}"
        if aside.exists():
            aside = self.folder / f"{folder}.{time.time_ns()}{CORRUPT}"
        with suppress(FileNotFoundError):  # an owner object lists it, but its files are lost
            (self.folder / folder).rename(aside)
        return aside.name

    def restart(self) -> None:
        """Moves all but .lock and lost+found to `previous`, whose old content is deleted; does nothing if empty."""
        previous = self.previous
        entries = [path for path in self.folder.iterdir() if path.name not in (".lock", previous.name, "lost+found")]
        if entries:
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in entries:
                path.rename(previous / path.name)
            atomic.sync(self.folder)

    @property
    def previous(self) -> Path:
        """Where `restart` moves files: `<folder>.previous`, or in a mount or read-only parent `<folder>/.previous`."""
        folder = self.folder.resolve()
        beside = folder.with_name(f"{folder.name}.previous")
        inside = os.path.ismount(folder) or not os.access(folder.parent, os.W_OK)
        return folder / ".previous" if inside else beside

    def _snapshot(self) -> tuple[Listing, Contents]:
        """Returns the sizes and MD5s of all files by name, and the names in the folder by kind."""
        listing, _, owner = read_owner(self.files)  # copied from an object store, if there is an owner object
        return listing, sort_out(listing, owner)

    @contextmanager
    def _commit(self, folder: str, step: int, shared: bool) -> Iterator[None]:
        """Makes `folder`, which gets its files in the context, the checkpoint of `step`, in place of an earlier one.

        If the context or the commit raises, deletes the folder, unless it is `shared` by several hosts.
        """
        part = self.folder / folder
        part.mkdir(exist_ok=True)
        try:
            yield
            with atomic.replacing(self.folder / f"step-{step:08d}", durable=True) as new:
                part.rename(new)
        except BaseException:
            if not shared:  # in a shared folder other hosts may still write
                shutil.rmtree(part, ignore_errors=True)
            raise
        with suppress(OSError):  # the next commit tries again
            self._settle(step)

    def _settle(self, step: int) -> None:
        """Removes traces of an object store: other copies of a committed step, invalid folders and owner objects."""
        listing, contents = self._snapshot()
        left = [name for name in contents.left if not name.endswith(PART)]
        others = [name for name in contents.counted if same_step(name, step) and name != f"step-{step:08d}"]
        for name in [*left, *others]:
            self._remove(self.folder / name)
        for number in sorted(owner_numbers(listing)):
            (self.folder / owner_name(number)).unlink()

    def _put_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Entry:
        """Writes the safetensors file `name` durably, with the permissions of its folder; returns its size and MD5."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = self._save(path, tensors)
        with suppress(OSError):  # safetensors sets mode 600; some file systems have no chmod
            path.chmod(path.parent.stat().st_mode & 0o666)
        atomic.sync(path)
        return entry

    def _save(self, path: Path, tensors: Mapping[str, Tensor]) -> Entry:
        """Writes a safetensors file; returns its size and MD5."""
        save_file({key: value.contiguous() for key, value in tensors.items()}, path, metadata={"format": "pt"})
        return {"bytes": path.stat().st_size, "md5": file_digest(path)}

    def _put(self, name: str, text: str) -> Entry:
        """Writes a text file, durably on a disk; returns its size and MD5."""
        self.files.write(name, content := text.encode())
        return {"bytes": len(content), "md5": new_digest(content).hexdigest()}

    def _receipts(self, folder: str) -> dict[str, bytes]:
        """Returns the contents of the receipts in an attempt's folder, by file name such as training-3.json."""
        receipts = (name for name in self.files.list(folder) if re.fullmatch(r"training-\d+\.json", Path(name).name))
        return {Path(name).name: text for name, text in self.files.read_all(receipts).items()}

    def _remove(self, path: Path) -> None:
        """Renames a folder to a hidden name, then deletes it, so that a kill leaves no incomplete checkpoint."""
        gone = path.with_name(f".{path.name.lstrip('.')}.gone{PART}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        shutil.rmtree(gone)

    def _clean(self) -> None:
        """Deletes folders of broken attempts; deletes replaced checkpoints, or restores them without a successor."""
        for path in self.folder.glob(f".*{PART}"):
            shutil.rmtree(path)
        for path in self.folder.glob(f".*{OLD}"):
            place = self.folder / path.name[1 : -len(OLD)]
            if place.exists():
                self._remove(path)
            else:  # killed between the two renames
                path.rename(place)


@contextmanager
def lock(path: Path, place: Path | str) -> Iterator[bool]:
    """Locks a file for the context and yields True; yields False, with a warning, if its file system has no locks.

    Makes the file if it is missing, and writes this process's name into it. The lock also ends if this process ends.

    Raises:
        ValueError: another process holds the lock; the message says that it writes to `place`.
        OSError: the file cannot be opened or locked for another reason.
    """
    with path.open("a+") as file:
        try:
            import fcntl  # not on Windows

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise in_use(place, file.read().strip() or "another process") from error
        except (OSError, ImportError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            text = f"warning: {path.parent} has no file locks: make sure that only one run writes there"
            print(text, file=sys.stderr)
            yield False
            return
        file.truncate(0)
        file.write(f"{holder_name()}\n")
        file.flush()
        yield True
