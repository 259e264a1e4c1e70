"""Stores checkpoints in an object store, where a rename is not atomic: a marker object is created last, then listed.

<output_dir>/checkpoints/
  step-00000400/
    3f9a1c07b2de/            the files of one attempt to save it, with a unique name
      adapter_model.safetensors, state.json, ... (of several hosts see tpu_kit.checkpointing.parts)
    manifest.0.json          the marker (see manifest.py); it names the folder above; created only if absent
    manifest.1.json          the same step, saved again: the larger number counts, and the other is deleted
    manifest.0.json.corrupt  set aside by `CheckpointManager.newest`
  owner-00000007.json        lists the markers that count; see `Owner`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from tpu_kit.checkpointing.local_store import lock
from tpu_kit.checkpointing.manifest import (
    CORRUPT,
    Checkpoint,
    DamagedError,
    Rejected,
    Select,
    Tensors,
    check_size,
    digest,
    error_number,
    fields_of,
    holder_name,
    in_use,
    seal,
    unseal,
)
from tpu_kit.checkpointing.parts import Attempt
from tpu_kit.hardware.chips import MIB
from tpu_kit.storage.object_store import ObjectFolder

_MARKER = re.compile(r"(step-\d{8,})/manifest\.(\d+)\.json")
_FILE = re.compile(r"(step-\d{8,}/[0-9a-f]{12})/[^/]+")
_OWNER = re.compile(r"owner-(\d{8,})\.json")
_READ_BYTES = 16 * MIB  # of a request


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint in an object store. Its files are read into memory, block by block, and need no temporary folder."""

    objects: ObjectFolder  # the folder of the run's checkpoints
    prefix: str  # of the names of its files
    marker: str  # the name of its manifest

    @property
    def handle(self) -> str:
        """See `Checkpoint.handle`."""
        return self.objects.place(self.marker)

    def verify(self) -> None:
        """Compares all files with what the store tells of them; raises DamagedError at the first that has changed."""
        self.check_listing(self.objects.list())

    def check_listing(self, listing: Mapping[str, tuple[int, str]]) -> None:
        """Raises DamagedError at the first file that is missing or has another size or MD5 in `ObjectFolder.list`."""
        for name, (size, md5) in self.files.items():
            place = self.objects.place(f"{self.prefix}/{name}")
            if f"{self.prefix}/{name}" not in listing:
                raise DamagedError(f"{place} is missing")
            size_now, md5_now = listing[f"{self.prefix}/{name}"]
            check_size(place, size_now, size)
            if md5_now not in ("", md5):
                raise _changed(place)

    def tensors(self, name: str, select: Select | None = None) -> dict[str, Tensor]:
        """See `Checkpoint.tensors`; downloads only the tensors that are kept, whose MD5 is that of the whole file."""
        file = f"{name}.safetensors"
        place, content, found = self.objects.place(f"{self.prefix}/{file}"), hashlib.md5(), dict[str, Tensor]()
        self._check_name(file)
        begin, block = 0, b""  # the last block that was read, and where it begins

        def read(start: int, end: int) -> bytes:
            nonlocal begin, block
            if not begin <= start <= end <= begin + len(block):
                begin, block = start, self._read(file, start, max(end, start + _READ_BYTES))
            content.update(part := block[start - begin : end - begin])
            return part

        try:
            length = int.from_bytes(read(0, 8), "little")
            header = json.loads(read(8, min(8 + length, self.files[file][0])))
            header.pop("__metadata__", None)
            no_numbers = {key: {**entry, "shape": [0], "data_offsets": [0, 0]} for key, entry in header.items()}
            text = json.dumps(no_numbers).encode()
            types = load(len(text).to_bytes(8, "little") + text)
            for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                if select is None or select(key):
                    found[key] = torch.empty(entry["shape"], dtype=types[key].dtype)
                    room = found[key].view(-1).view(torch.uint8).numpy().data
                    start, end = (8 + length + offset for offset in entry["data_offsets"])
                    for at in range(start, end, _READ_BYTES):
                        upto = min(at + _READ_BYTES, end)
                        room[at - start : upto - start] = read(at, upto)
        except DamagedError:  # it is missing
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise _changed(place) from error
        if found.keys() == header.keys() and content.hexdigest() != self.files[file][1]:
            raise _changed(place)
        return found

    def _text(self, name: str) -> str:
        self._check_name(name)
        content = self._read(name)
        if hashlib.md5(content).hexdigest() != self.files[name][1]:
            raise _changed(self.objects.place(f"{self.prefix}/{name}"))
        return content.decode()

    def _read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        try:
            return self.objects.read(f"{self.prefix}/{name}", start, end)
        except FileNotFoundError as error:
            raise DamagedError(f"{self.objects.place(f'{self.prefix}/{name}')} is missing") from error


def _changed(place: str) -> DamagedError:
    return DamagedError(f"{place} is not what was written: its MD5 is another")


class BucketStore:
    """The checkpoints of a run in an object store, for the one process that writes them.

    Raises:
        ValueError: another process writes there, or the URL is not usable.
        OSError: the object store cannot be written to; the text says what to do.
    """

    def __init__(self, url: str) -> None:
        self.objects = ObjectFolder(url)
        with contextlib.ExitStack() as held:
            path = _lock_file(self.objects.url)
            try:  # against processes of this machine
                file, _ = lock(path, self.objects.url)
            except OSError as error:
                raise _no_temporary_folder(error) from error
            held.callback(file.close)
            held.callback(path.unlink, missing_ok=True)
            self._owner = Owner(self.objects)
            held.callback(self._owner.close)
            self._clean()
            self._held = held.pop_all()

    def close(self) -> None:
        """Releases the place for another process."""
        self._held.close()

    def write(
        self, about: Mapping[str, Any], tensors: Tensors, texts: Mapping[str, str], attempt: Attempt | None = None
    ) -> None:
        """Uploads the files, creates the marker, then commits it.

        Args:
            about: the manifest without its files.
            tensors: by name of the file.
            texts: by name of the file.
            attempt: of several hosts, whose parts become files of the checkpoint.

        Raises:
            ValueError: another process has become the owner in the meantime.
            OSError: the object store, or the temporary folder of this machine, cannot be written to.
        """
        step = f"step-{about['step']:08d}"
        names = self.objects.list()
        self._owner.check(names)
        older = sorted(int(match[2]) for name in names if (match := _MARKER.match(name)) and match[1] == step)
        marker = f"{step}/manifest.{older[-1] + 1 if older else 0}.json"
        prefix = f"{step}/{attempt.name if attempt else uuid.uuid4().hex[:12]}"
        files = _put_tensors(self.objects, prefix, tensors)
        for name, text in texts.items():
            self.objects.write(f"{prefix}/{name}", content := text.encode())
            files[name] = {"bytes": len(content), "md5": hashlib.md5(content).hexdigest()}
        if attempt is not None:
            parts = attempt.receipts(lambda: self._receipts(prefix))
            self.objects.remove(f"{prefix}/{name.replace('.safetensors', '.json')}" for name in parts)
            files |= parts
        manifest = seal({**about, "folder": prefix.rpartition("/")[2], "files": files}).encode()
        try:
            self.objects.create(marker, manifest)
            self._owner.update(add=[marker])
        except (FileExistsError, ValueError) as error:
            mine = [] if isinstance(error, FileExistsError) else [marker]
            with contextlib.suppress(OSError):  # else the next run's `_clean` removes them
                self.objects.remove([*mine, *(f"{prefix}/{name}" for name in files)])
            self._owner.check(self.objects.list())
            raise
        for number in older:
            self._discard_replaced(f"{step}/manifest.{number}.json")

    def _receipts(self, prefix: str) -> dict[str, bytes]:
        receipts = [name for name in self.objects.list() if re.fullmatch(rf"{prefix}/training-\d+\.json", name)]
        return {name.rpartition("/")[2]: text for name, text in self.objects.read_all(receipts).items()}

    def discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint, its marker first; if killed in between, it leaves none that looks damaged."""
        assert isinstance(checkpoint, RemoteCheckpoint)
        self._owner.update(drop=[checkpoint.marker])
        self.objects.remove([checkpoint.marker, *(f"{checkpoint.prefix}/{name}" for name in checkpoint.files)])

    def set_aside(self, path: Path | str) -> str:
        """Renames the marker of a checkpoint so that no scan finds it; returns its new name."""
        marker = str(path).removeprefix(f"{self.objects.url}/")
        aside = marker + CORRUPT
        if aside in self.objects.list():
            aside = f"{marker}.{uuid.uuid4().hex[:6]}{CORRUPT}"
        self.objects.write(aside, self.objects.read(marker))
        self._owner.update(drop=[marker])
        self.objects.remove([marker])
        return aside

    def restart(self) -> None:
        """Moves all checkpoints to `<url>.previous`, whose content it deletes."""
        names = [name for name in self.objects.list() if name.startswith("step-")]
        if not names:
            return
        previous = ObjectFolder(f"{self.objects.url}.previous")
        _remove_markers_first(previous, list(previous.list()))
        for name in sorted(names, key=lambda name: bool(_MARKER.fullmatch(name))):
            self.objects.copy(name, previous)
        self._owner.update(drop=self._owner.commits)
        _remove_markers_first(self.objects, names)

    def _discard_replaced(self, marker: str) -> None:
        """Deletes a checkpoint that a later one of the same step has replaced."""
        try:
            self.discard(_read(self.objects, marker, self.objects.read(marker)))
        except (OSError, ValueError) as error:
            print(f"warning: {self.objects.place(marker)} could not be deleted ({error})", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        """Removes the leftovers of killed writers: files without a marker, and replaced checkpoints."""
        listing = self.objects.list()
        markers = [name for name in listing if name in self._owner.commits]
        newest: dict[str, RemoteCheckpoint] = {}
        unclear = set()
        for marker, text in sorted(self.objects.read_all(markers).items(), key=lambda item: _number(item[0])):
            step = marker.partition("/")[0]
            try:
                checkpoint = _read(self.objects, marker, text)
                checkpoint.check_listing(listing)
            except ValueError:
                unclear.add(step)  # `newest` reports it
                continue
            if step in newest:
                self.discard(newest[step])
            newest[step] = checkpoint
        kept = {checkpoint.prefix for checkpoint in newest.values()}
        unclear |= {name.partition("/")[0] for name in listing if name.endswith(CORRUPT)}
        for name in listing:
            match = _FILE.fullmatch(name)
            late = _MARKER.fullmatch(name) and name not in self._owner.commits  # a former owner's
            if late or (match and match[1] not in kept and name.partition("/")[0] not in unclear):
                self.objects.remove([name])


def _lock_file(url: str) -> Path:
    name = hashlib.blake2b(f"{socket.gethostname()} {os.getuid()} {url}".encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"tpu_kit-{name}.lock")


def write_part(url: str, step: int, attempt: str, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Uploads the part `name` of one of several hosts, then its receipt; see `parts`."""
    objects, prefix = ObjectFolder(url), f"step-{step:08d}/{attempt}"
    (entry,) = _put_tensors(objects, prefix, {name: tensors}).values()
    objects.write(f"{prefix}/{name}.json", json.dumps(entry).encode())


def _put_tensors(objects: ObjectFolder, prefix: str, tensors: Tensors) -> dict[str, dict[str, Any]]:
    files = {}
    with tempfile.TemporaryDirectory(prefix="tpu_kit-upload-") as staging:
        for name, group in tensors.items():  # the disk holds one file at a time
            path = Path(staging, f"{name}.safetensors")
            whole = {key: value.contiguous() for key, value in group.items()}
            try:
                save_file(whole, path, metadata={"format": "pt"})
                files[path.name] = {"bytes": path.stat().st_size, "md5": digest(path, "md5")}
            except (OSError, SafetensorError) as error:
                raise _no_temporary_folder(error) from error
            objects.put(path, f"{prefix}/{path.name}")
            path.unlink()
    return files


def _no_temporary_folder(error: Exception) -> OSError:
    text = f"{tempfile.gettempdir()} cannot be written to ({error}): set TMPDIR to another folder"
    return OSError(error_number(error), text)


def scan_bucket(url: str) -> tuple[list[Checkpoint], list[Rejected]]:
    """`tpu_kit.checkpointing.manager.scan` of an object store, which tells the MD5 of all files."""
    objects = ObjectFolder(url)
    listing = objects.list()
    owner = read_owner(objects, listing)[1]
    found: dict[int, Checkpoint] = {}
    rejected = []
    texts = objects.read_all([name for name in listing if _MARKER.fullmatch(name) and counts(name, owner)])
    for marker in sorted(texts, key=_number):
        try:
            checkpoint = _read(objects, marker, texts[marker])
            checkpoint.check_listing(listing)
            found[checkpoint.step] = checkpoint
        except DamagedError as error:
            if marker in objects.list():  # else the writer has just deleted it
                rejected.append(Rejected(objects.place(marker), str(error)))
    return [found[step] for step in sorted(found)], rejected


def _read(objects: ObjectFolder, marker: str, text: bytes) -> RemoteCheckpoint:
    """Reads a checkpoint from the text of its marker."""
    step = marker.partition("/")[0]
    manifest = unseal(text, objects.place(marker), objects.place(step))
    prefix = f"{step}/{manifest['folder']}"
    return RemoteCheckpoint(
        path=objects.place(prefix), objects=objects, prefix=prefix, marker=marker, **fields_of(manifest)
    )


def _number(marker: str) -> int:
    match = _MARKER.fullmatch(marker)
    assert match is not None, marker
    return int(match[2])


def _remove_markers_first(objects: ObjectFolder, names: list[str]) -> None:
    objects.remove(sorted(names, key=lambda name: not _MARKER.fullmatch(name)))


class Owner:
    """The right of one process to commit checkpoints to a folder of an object store.

    An object store has no locks that die with their holder. The object owner-<number>.json of the largest number names
    the owner and lists the markers that count (`commits`). Each commit, and each new owner, creates the next number if
    no object has that name (if-generation-match=0), which one process can do. So a former owner cannot commit any more,
    and a machine that replaces another one goes on at once. A former owner may create a deleted number again, but it is
    not the largest then; that is checked after each creation.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        self.folder = folder
        self._content: dict[str, Any] = {"holder": holder_name(), "id": uuid.uuid4().hex, "released": False}
        names = folder.list()
        self._number, before = read_owner(folder, names)
        self.commits = [name for name in names if _MARKER.fullmatch(name) and counts(name, before)]
        if before and not before.get("released"):
            holder = before.get("holder", "another process")
            print(f"{holder} was writing to {folder.url}: this process takes it over", file=sys.stderr, flush=True)
        self.update()

    def update(self, add: Iterable[str] = (), drop: Iterable[str] = ()) -> None:
        """Changes the markers that count; raises ValueError if another process has become the owner."""
        gone, name = set(drop), _owner_name(self._number + 1)
        commits = [one for one in self.commits if one not in gone] + list(add)
        try:
            self.folder.create(name, json.dumps({**self._content, "commits": commits}).encode())
        except FileExistsError:
            self._number, other = read_owner(self.folder, self.folder.list())
            if other is None or other.get("id") != self._content["id"]:
                raise self._refused(other or {}) from None
            self.update(add, drop)  # an update whose answer was lost was made
            return
        names = self.folder.list()
        self._number += 1
        self.check(names)
        self.commits = commits
        with contextlib.suppress(OSError):  # the next update deletes them
            self.folder.remove(_owner_name(number) for number in _owner_numbers(names) if number < self._number)

    def check(self, names: Iterable[str]) -> None:
        """Makes sure that none of the objects is a later owner's; raises ValueError else."""
        if max(_owner_numbers(names), default=-1) > self._number:
            raise self._refused(read_owner(self.folder, names)[1] or {})

    def close(self) -> None:
        """Releases the folder, so that the next owner is not told of this one."""
        self._content["released"] = True
        with contextlib.suppress(OSError, ValueError):
            self.update()

    def _refused(self, other: dict[str, Any]) -> ValueError:
        return in_use(self.folder.url, other.get("holder", "another process"))


def read_owner(folder: ObjectFolder, names: Iterable[str]) -> tuple[int, dict[str, Any] | None]:
    """Returns the number and the content of the newest owner object; (-1, None) where there is none."""
    numbers = _owner_numbers(names)
    while numbers:
        try:
            found = json.loads(folder.read(_owner_name(numbers[-1])))
        except FileNotFoundError:  # a commit has replaced it since
            numbers = _owner_numbers(folder.list())
            continue
        return numbers[-1], found
    return -1, None


def counts(marker: str, owner: dict[str, Any] | None) -> bool:
    """Whether a marker is of a committed checkpoint; without an owner object, as in a copy, each is."""
    return owner is None or marker in owner["commits"]


def _owner_numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(match[1]) for name in names if (match := _OWNER.fullmatch(name)))


def _owner_name(number: int) -> str:
    return f"owner-{number:08d}.json"
