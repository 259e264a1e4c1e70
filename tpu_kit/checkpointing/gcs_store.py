"""Commits checkpoints in an object store, which cannot rename: an object is created that names those that count.

<output_dir>/checkpoints/
  step-00000400/
    3f9a1c07b2de/            an attempt to save the step
      adapter_model.safetensors, state.json, ...
      manifest.json          see tpu_kit.checkpointing.manifest
    91b2e07c553d/            set aside by `CheckpointManager.newest`
      manifest.json.corrupt
  owner-00000007.json        names the folders that count; see `BucketStore`
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from tpu_kit.checkpointing.local_store import Entry, FolderStore, Listing, lock
from tpu_kit.checkpointing.manifest import CORRUPT, MANIFEST, Checkpoint, error_number, holder_name, in_use
from tpu_kit.storage.object_store import ObjectFolder

_FOLDER = re.compile(r"step-\d{8,}/[0-9a-f]{12}(?=/)")  # of an attempt
_OWNER = re.compile(r"owner-(\d{8,})\.json")


class BucketStore(FolderStore):
    """The checkpoints of a run in an object store.

    An object store has no locks that die with their holder. The object owner-<number>.json of the largest number names
    the owner and the folders of the checkpoints that count. Each commit, and each new owner, creates the next number if
    no object has that name (if-generation-match=0), which one process can do. So a former owner cannot commit any more,
    and a machine that replaces another one goes on at once, from all that was committed before.

    A former owner may create a deleted number again, but it is not the largest then; that is checked after each
    creation. Nobody deletes the largest number, so what was never the largest never counts. Only the owner deletes what
    has counted.
    """

    files: ObjectFolder
    attempt_name = "step-{step:08d}/{name}"

    def __init__(self, url: str) -> None:
        self.files = ObjectFolder(url)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `FolderStore.writing`; takes the place over from a process of another machine."""
        path = _lock_file(self.files.url)
        with ExitStack() as held:
            try:
                held.enter_context(lock(path, self.files.url))
            except OSError as error:
                raise _no_temporary_folder(error) from error
            held.callback(path.unlink, missing_ok=True)
            self._take_over()
            held.callback(self._release)
            self._clean()
            yield

    def discard(self, checkpoint: Checkpoint) -> None:
        """See `FolderStore.discard`."""
        self._update(drop=[checkpoint.folder])
        self._delete(checkpoint.folder)

    def set_aside(self, folder: str) -> str:
        """See `FolderStore.set_aside`; renames the manifest alone."""
        manifest = f"{folder}/{MANIFEST}"
        self._update(drop=[folder])
        self.files.write(manifest + CORRUPT, self.files.read_all([manifest]).get(manifest, b""))
        self.files.remove([manifest])
        return manifest + CORRUPT

    def restart(self) -> None:
        """See `FolderStore.restart`."""
        names = [name for name in self.files.list() if name.startswith("step-")]
        if names:
            previous = ObjectFolder(f"{self.files.url}.previous")
            previous.remove(previous.list())
            for name in sorted(names, key=lambda name: name.endswith(MANIFEST)):
                self.files.copy(name, previous)
            self._update(drop=self._commits)
            self.files.remove(names)

    def _snapshot(self) -> tuple[Listing, list[str]]:
        listing, _, owner = self._read_owner()
        return listing, owner["commits"]

    @contextmanager
    def _commit(self, folder: str, step: int, shared: bool) -> Iterator[None]:
        self._check()
        replaced = [one for one in self._commits if one.startswith(f"step-{step:08d}/")]
        try:
            yield
            self._update(add=[folder], drop=replaced)
        except ValueError:  # after an OSError the files stay: the commit may have been made, and its answer lost
            with suppress(OSError):
                if folder not in self._snapshot()[1]:  # else the process that has taken over counts on it
                    self._delete(folder)
            raise
        with suppress(OSError):  # else the next run's `_clean` deletes them
            self._delete(*replaced)

    def _put_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Entry:
        with tempfile.TemporaryDirectory(prefix="tpu_kit-upload-") as staging:  # it holds one file at a time
            path = Path(staging, "tensors")
            try:
                entry = self._save(path, tensors)
            except (OSError, SafetensorError) as error:
                raise _no_temporary_folder(error) from error
            self.files.put(path, name)
        return entry

    def _delete(self, *folders: str) -> None:
        self.files.remove(name for folder in folders for name in self.files.list(folder))

    def _clean(self) -> None:
        listing = self.files.list()
        self._check()  # only now: a later owner may have written files before the list was made
        kept = {*self._commits, *(name.rpartition("/")[0] for name in listing if name.endswith(CORRUPT))}
        self.files.remove(name for name in listing if (folder := _FOLDER.match(name)) and folder[0] not in kept)

    def _take_over(self) -> None:
        self._about: dict[str, Any] = {"holder": holder_name(), "id": uuid.uuid4().hex, "released": False}
        while True:
            _, self._number, before = self._read_owner()
            self._commits = before["commits"]
            try:
                self._update()
                break
            except ValueError:  # another process has just committed a checkpoint, or taken over
                continue
        if not before["released"]:
            print(f"{before['holder']} was writing to {self.files.url}: this process takes it over", file=sys.stderr)

    def _release(self) -> None:
        self._about["released"] = True  # so that the next owner is not told of this one
        with suppress(OSError, ValueError):
            self._update()

    def _update(self, add: Iterable[str] = (), drop: Iterable[str] = ()) -> None:
        """Changes the folders that count; raises ValueError if another process has become the owner."""
        dropped = set(drop)
        commits = [*(folder for folder in self._commits if folder not in dropped), *add]
        content = json.dumps({**self._about, "commits": commits}).encode()
        try:
            self.files.create(_owner_name(self._number + 1), content)
        except FileExistsError:
            self._check()  # an update whose answer was lost was made
            return self._update(add, drop)
        self._number += 1
        listing, self._commits = self._check(), commits
        with suppress(OSError):  # the next update deletes them
            self.files.remove(_owner_name(number) for number in _owner_numbers(listing) if number < self._number)

    def _check(self) -> Listing:
        """Lists all objects; raises ValueError if one of them is a later owner's."""
        listing, number, owner = self._read_owner()
        if number > self._number and owner["id"] != self._about["id"]:
            raise in_use(self.files.url, owner["holder"])
        self._number = max(number, self._number)
        return listing

    def _read_owner(self) -> tuple[Listing, int, dict[str, Any]]:
        """Lists all objects; returns the number and the content of the newest owner object too.

        Without one, as in a copy, the number is -1, and all checkpoints count.
        """
        while True:
            listing = self.files.list()
            number = max(_owner_numbers(listing), default=-1)
            if number < 0:
                folders = sorted({folder[0] for folder in map(_FOLDER.match, listing) if folder})
                commits = [folder for folder in folders if f"{folder}/{MANIFEST}" in listing]
                return listing, number, {"released": True, "commits": commits}
            with suppress(FileNotFoundError):  # a commit has replaced it since
                return listing, number, json.loads(self.files.read(_owner_name(number)))


def _lock_file(url: str) -> Path:
    name = hashlib.blake2b(f"{socket.gethostname()} {os.getuid()} {url}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"tpu_kit-{name}.lock")


def _no_temporary_folder(error: Exception) -> OSError:
    text = f"{tempfile.gettempdir()} cannot be written to ({error}): set TMPDIR to another folder"
    return OSError(error_number(error), text)


def _owner_numbers(names: Iterable[str]) -> list[int]:
    return [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]


def _owner_name(number: int) -> str:
    return f"owner-{number:08d}.json"
