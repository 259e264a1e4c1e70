"""Commits checkpoints in an object store, which cannot rename: a commit creates an object that lists valid checkpoints.

layout.py lists the names, which folders on disks share.
"""

from __future__ import annotations

import hashlib
import json
import os
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

from tpu_kit.machine.storage import atomic
from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.training.checkpoint.layout import (
    Contents,
    Listing,
    Owner,
    attempt_name,
    owner_name,
    owner_numbers,
    place_hash,
    read_owner,
    same_step,
    sort_out,
)
from tpu_kit.training.checkpoint.local_store import Entry, FolderStore, lock
from tpu_kit.training.checkpoint.manifest import CORRUPT, MANIFEST, Checkpoint, holder_name, in_use


class BucketStore(FolderStore):
    """The checkpoints of a run in an object store, below `url`.

    An object store has no locks that end with their holder. The object owner-<number>.json with the largest number
    names the owner and the valid checkpoints. A commit, or a new owner, creates the next number on the condition that
    no such object exists (if-generation-match=0), so only a single process succeeds. A former owner therefore cannot
    commit any more, and a replacement machine continues at once from all committed checkpoints.

    A former owner may create a deleted number again, but the number is not the largest; every creation is followed by
    a check for that. The largest number is never deleted, so an object that was never the largest never becomes valid.
    Only the owner deletes checkpoints that were valid.

    A checkpoint copied from another place, which its name tells, is valid until the owner drops it: `dropped` has its
    name as long as it has files.
    """

    files: ObjectFolder

    def __init__(self, url: str) -> None:
        self.files = ObjectFolder(url)
        self._here = place_hash(self.files.url)
        self.attempt_name = attempt_name(self.files.url)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes this process the owner in the context, takes over from another machine's owner, and removes leftovers.

        If the former owner has not released the store, prints a note on stderr; its next commit raises ValueError. The
        end of the context releases the store. Leftovers are the folders in `Contents.left`.

        Raises:
            ValueError: another process of this user on this machine writes there.
            OSError: the store or this machine's temporary folder cannot be written to.
        """
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
        """See `FolderStore.discard`; raises ValueError if another process has become the owner."""
        self._update(drop=[checkpoint.folder])
        self._delete(checkpoint.folder)

    def set_aside(self, folder: str) -> str:
        """Renames a checkpoint's manifest to *.corrupt so that it no longer counts; returns FOLDER/NAME of that file.

        `folder` is a name, as `Checkpoint.folder`. Its other files stay. For a lost manifest the new file is empty.
        Raises OSError, and ValueError if another process has become the owner.
        """
        manifest = f"{folder}/{MANIFEST}"
        self._update(drop=[folder])
        self.files.write(manifest + CORRUPT, self.files.read_all([manifest]).get(manifest, b""))
        self.files.remove([manifest])
        return manifest + CORRUPT

    def restart(self) -> None:
        """Moves all objects but owner objects to the URL with the suffix `.previous`, which loses its old objects.

        Does nothing if there are none. Raises OSError, and ValueError if another process has become the owner.
        """
        listing = self.files.list()
        if names := [name for name in listing if not owner_numbers([name])]:
            previous = ObjectFolder(f"{self.files.url}.previous")
            previous.remove(previous.list())
            for name in sorted(names, key=lambda name: name.endswith(MANIFEST)):
                self.files.copy(name, previous)
            self._update(drop=self._sorted(listing, self._about).counted)
            self.files.remove(names)

    def _snapshot(self) -> tuple[Listing, Contents]:
        listing, _, owner = read_owner(self.files)
        return listing, self._sorted(listing, owner)

    def _sorted(self, listing: Listing, owner: Owner) -> Contents:
        """Calls `sort_out` for this store."""
        return sort_out(listing, owner, self._here)

    @contextmanager
    def _commit(self, folder: str, step: int, shared: bool) -> Iterator[None]:
        """Makes the attempt in `folder` the checkpoint of `step` at the end of the context; `shared` has no effect.

        Deletes the step's earlier checkpoint. Keeps the attempt's files after an OSError. Raises as `discard`.
        """
        self._check()
        replaced = [one for one in self._about["commits"] if same_step(one, step)]
        try:
            yield
            self._update(add=[folder], drop=replaced)
        except ValueError:  # after an OSError the files stay: the commit may have succeeded, and its response was lost
            with suppress(OSError):
                if folder not in self._snapshot()[1].counted:  # otherwise the new owner has adopted it
                    self._delete(folder)
            raise
        with suppress(OSError):  # the next run's `_clean` tries again
            self._delete(*replaced)

    def _put_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Entry:
        """Uploads the safetensors object `name` by way of this machine's temporary folder; returns its size and MD5."""
        with tempfile.TemporaryDirectory(prefix="tpu_kit-upload-") as staging:  # for a single file at a time
            path = Path(staging, "tensors")
            try:
                entry = self._save(path, tensors)
            except (OSError, SafetensorError) as error:
                raise _no_temporary_folder(error) from error
            self.files.put(path, name)
        return entry

    def _delete(self, *folders: str) -> None:
        """Removes all objects in folders, given by name."""
        self.files.remove(name for folder in folders for name in self.files.list(folder))

    def _clean(self) -> None:
        """Removes the folders in `Contents.left`; raises as `discard`."""
        listing = self.files.list()
        self._check()  # after the list, because a later owner may have written files before it
        left = set(self._sorted(listing, self._about).left)
        self.files.remove(name for name in listing if name.partition("/")[0] in left)

    def _take_over(self) -> None:
        """Makes this process the owner; prints a note on stderr if the former owner has not released its ownership."""
        while True:
            listing, self._number, before = read_owner(self.files)
            contents = self._sorted(listing, before)
            self._about: dict[str, Any] = {
                "holder": holder_name(), "id": uuid.uuid4().hex, "released": False, "place": self._here,
                "commits": contents.counted, "dropped": contents.left,
            }  # fmt: skip
            try:
                self._update()
                break
            except ValueError:  # another process has just committed a checkpoint or taken over
                continue
        if not before.get("released", True):
            print(f"{before['holder']} was writing to {self.files.url}: this process takes it over", file=sys.stderr)

    def _release(self) -> None:
        """Marks the ownership as released, if this process still has it; ignores errors of the store."""
        self._about["released"] = True  # the next owner then prints no takeover
        with suppress(OSError, ValueError):
            self._update()

    def _update(self, add: Iterable[str] = (), drop: Iterable[str] = ()) -> None:
        """Creates the next owner object, and deletes older owner objects; raises ValueError if there is another owner.

        `add` are folders that become valid checkpoints; `drop` are folders that become invalid and enter "dropped".
        """
        commits = [*(folder for folder in self._about["commits"] if folder not in {*drop}), *add]
        about = {**self._about, "commits": commits, "dropped": sorted({*self._about["dropped"], *drop})}
        try:
            self.files.create(owner_name(self._number + 1), json.dumps(about).encode())
        except FileExistsError:
            self._check()  # the update may have succeeded, and its response was lost
            return self._update(add, drop)
        self._number += 1
        listing, self._about = self._check(), about
        there = {name.partition("/")[0] for name in listing}
        about["dropped"] = [folder for folder in about["dropped"] if folder in there]
        with suppress(OSError):  # the next update tries again
            self.files.remove(owner_name(number) for number in owner_numbers(listing) if number < self._number)

    def _check(self) -> Listing:
        """Returns the listing of all objects; raises ValueError if another process has made a later owner object."""
        listing, number, owner = read_owner(self.files)
        if number > self._number and owner["id"] != self._about["id"]:
            raise in_use(self.files.url, owner["holder"])
        self._number = max(number, self._number)
        return listing


def _lock_file(url: str) -> Path:
    """Returns the path of this user's lock file for a URL, in this machine's temporary folder."""
    name = hashlib.blake2b(f"{socket.gethostname()} {os.getuid()} {url}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"tpu_kit-{name}.lock")


def _no_temporary_folder(error: Exception) -> OSError:
    """Makes the error for a temporary folder that cannot be written to, with the next action."""
    text = f"{tempfile.gettempdir()} cannot be written to ({error}): set TMPDIR to another folder"
    return OSError(atomic.error_number(error), text)
