"""Stores checkpoints in an object store, where a rename is not atomic: a marker object is created last.

<output_dir>/checkpoints/
  step-00000400/
    3f9a1c07b2de/            the files of one attempt to save it, with a unique name
      adapter_model.safetensors, state.json, ...
    manifest.0.json          the marker (see manifest.py); it names the folder above; created only if absent
    manifest.1.json          the same step, saved again: the larger number counts, and the other is deleted
    manifest.0.json.corrupt  set aside by `CheckpointManager.newest`
  writer-00000000.json       see `Lease`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from tpu_kit.checkpointing.manifest import (
    CORRUPT,
    Checkpoint,
    DamagedError,
    Rejected,
    Tensors,
    check_size,
    digest,
    error_number,
    fields_of,
    holder_name,
    seal,
    unseal,
)
from tpu_kit.storage.object_store import ObjectFolder

_MARKER = re.compile(r"(step-\d{8,})/manifest\.(\d+)\.json")
_FILE = re.compile(r"(step-\d{8,}/[0-9a-f]{12})/[^/]+")
_WRITER = re.compile(r"writer-(\d{8})\.json")
LEASE_SECONDS, BEAT_SECONDS = 60.0, 15.0


@dataclass(frozen=True)
class RemoteCheckpoint(Checkpoint):
    """A checkpoint in an object store; its files are downloaded at their first use, and checked.

    Attributes:
        objects: the folder of the run's checkpoints.
        prefix: the prefix of its files' names.
        marker: the name of its manifest.
    """

    objects: ObjectFolder
    prefix: str
    marker: str

    @property
    def handle(self) -> str:
        """The URL of its marker."""
        return self.objects.place(self.marker)

    def folder(self) -> Path:
        """A temporary folder with all its files, checked; it exists as long as this object."""
        self.verify()
        return self._cache

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raises DamagedError at the first file that is missing, short or long in a listing (name to bytes)."""
        for name, (size, _) in self.files.items():
            place = self.objects.place(f"{self.prefix}/{name}")
            if f"{self.prefix}/{name}" not in sizes:
                raise DamagedError(f"{place} is missing")
            check_size(place, sizes[f"{self.prefix}/{name}"], size)

    def names(self) -> list[str]:
        """Its objects in the order to delete them, the marker first: without it a checkpoint does not count."""
        return [self.marker, *(f"{self.prefix}/{name}" for name in self.files)]

    @cached_property
    def _cache(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="tpu_kit-checkpoint-"))
        weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)
        return path

    def _checked(self, name: str) -> Path:
        self._check_name(name)
        size, sha256 = self.files[name]
        path, place = self._cache / name, self.objects.place(f"{self.prefix}/{name}")
        # Twice, because a broken connection may leave a short file, which is no damage.
        for attempt in range(2):
            try:
                if not path.exists():
                    self.objects.get(f"{self.prefix}/{name}", path)
            except FileNotFoundError as error:
                raise DamagedError(f"{place} is missing") from error
            if digest(path) == sha256:
                return path
            found = path.stat().st_size
            path.unlink()
            if attempt:
                check_size(place, found, size)
        raise DamagedError(f"{place} is not what was written: its SHA-256 is another")


class BucketStore:
    """The checkpoints of a run in an object store, for the one process that writes them.

    Args:
        url: gs://bucket/.../checkpoints.

    Raises:
        ValueError: another process writes there, or the URL is not usable.
        OSError: the object store cannot be written to; the text says what to do.
    """

    def __init__(self, url: str) -> None:
        self.objects = ObjectFolder(url)
        self.known: list[Checkpoint] = []  # of the last scan, in case the next one fails
        self._lease = Lease(self.objects)
        try:
            self._clean()
        except BaseException:
            self._lease.close()
            raise

    def close(self) -> None:
        """Releases the place for another process."""
        self._lease.close()

    def scan(self) -> tuple[list[Checkpoint], list[Rejected]]:
        """See `tpu_kit.checkpointing.manager.scan`."""
        self.known, rejected = scan_bucket(self.objects.url)
        return self.known, rejected

    def free(self) -> int | None:
        """Bytes that can be written: an object store has no limit."""
        return None

    def write(self, about: Mapping[str, Any], tensors: Tensors, texts: Mapping[str, str]) -> None:
        """Uploads the files, then creates the marker.

        Raises:
            ValueError: another process has saved this step, or taken the folder, in the meantime; the text names it.
            OSError: the object store, or the temporary folder of this machine, cannot be written to.
        """
        step = f"step-{about['step']:08d}"
        older = sorted(
            int(match[2]) for name in self.objects.list() if (match := _MARKER.match(name)) and match[1] == step
        )
        prefix, marker = f"{step}/{uuid.uuid4().hex[:12]}", f"{step}/manifest.{older[-1] + 1 if older else 0}.json"
        files = {**self._put_tensors(prefix, tensors), **self._put_texts(prefix, texts)}
        manifest = seal({**about, "folder": prefix.rpartition("/")[2], "files": files}).encode()
        try:
            self._lease.check()
            self.objects.create(marker, manifest)
        except (FileExistsError, ValueError) as error:
            with contextlib.suppress(OSError):  # else the next run's `_clean` removes them
                self.objects.remove([f"{prefix}/{name}" for name in files])
            if isinstance(error, ValueError):
                raise
            writer = unseal(self.objects.read(marker), marker, marker).get("writer", "another process")
            raise ValueError(
                f"{self.objects.url} is being written to by {writer}: it has just saved step {about['step']}, too; end "
                "one of the two, or set another output_dir"
            ) from error
        for number in older:
            self._discard_replaced(f"{step}/manifest.{number}.json")

    def _put_tensors(self, prefix: str, tensors: Tensors) -> dict[str, dict[str, Any]]:
        files = {}
        with tempfile.TemporaryDirectory(prefix="tpu_kit-upload-") as staging:
            for name, group in tensors.items():  # the disk holds one file at a time
                path = Path(staging, f"{name}.safetensors")
                whole = {key: value.contiguous() for key, value in group.items()}
                try:
                    save_file(whole, path, metadata={"format": "pt"})
                    files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
                except (OSError, SafetensorError) as error:
                    text = f"{tempfile.gettempdir()} cannot be written to ({error}): set TMPDIR to another folder"
                    raise OSError(error_number(error), text) from error
                self.objects.put(path, f"{prefix}/{path.name}")
                path.unlink()
        return files

    def _put_texts(self, prefix: str, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        files = {}
        for name, text in texts.items():
            content = text.encode()
            self.objects.write(f"{prefix}/{name}", content)
            files[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return files

    def discard(self, checkpoint: Checkpoint) -> None:
        """Deletes a checkpoint, its marker first; if killed in between, it leaves none that looks damaged."""
        assert isinstance(checkpoint, RemoteCheckpoint)
        self.objects.remove(checkpoint.names())

    def set_aside(self, found: Rejected) -> str:
        """Renames the marker of a checkpoint so that no scan finds it; returns its new name."""
        marker = str(found.path).removeprefix(f"{self.objects.url}/")
        aside = marker + CORRUPT
        while aside in self.objects.list():
            aside = f"{marker}.{uuid.uuid4().hex[:6]}{CORRUPT}"
        self.objects.write(aside, self.objects.read(marker))
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
        _remove_markers_first(self.objects, names)

    def _discard_replaced(self, marker: str) -> None:
        """Deletes a checkpoint that a later one of the same step has replaced."""
        try:
            self.discard(_read(self.objects, marker, self.objects.read(marker)))
        except (OSError, ValueError) as error:
            print(f"warning: {self.objects.place(marker)} could not be deleted ({error})", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        """Removes the leftovers of killed writers: files without a marker, and replaced checkpoints."""
        sizes = self.objects.list()
        markers = [name for name in sizes if _MARKER.fullmatch(name)]
        newest: dict[str, RemoteCheckpoint] = {}
        unclear = set()
        for marker, text in sorted(self.objects.read_all(markers).items(), key=lambda item: _number(item[0])):
            step = marker.partition("/")[0]
            try:
                checkpoint = _read(self.objects, marker, text)
                checkpoint.check_sizes(sizes)
            except ValueError:
                unclear.add(step)  # `newest` reports it
                continue
            if step in newest:
                self.discard(newest[step])
            newest[step] = checkpoint
        kept = {checkpoint.prefix for checkpoint in newest.values()}
        unclear |= {name.partition("/")[0] for name in sizes if name.endswith(CORRUPT)}
        for name in sizes:
            match = _FILE.fullmatch(name)
            if match and match[1] not in kept and name.partition("/")[0] not in unclear:
                self.objects.remove([name])


def scan_bucket(url: str, *, verify: bool = False) -> tuple[list[Checkpoint], list[Rejected]]:
    """`tpu_kit.checkpointing.manager.scan` of an object store."""
    objects = ObjectFolder(url)
    sizes = objects.list()
    found: dict[int, Checkpoint] = {}
    rejected = []
    texts = objects.read_all([name for name in sizes if _MARKER.fullmatch(name)])
    for marker in sorted(texts, key=_number):
        try:
            checkpoint = _read(objects, marker, texts[marker])
            checkpoint.check_sizes(sizes)
            if verify:
                checkpoint.verify()
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


class Lease:
    """The right of one process at a time to write to a folder of an object store, from construction to `close`.

    An object store has no locks that die with their holder. Here the holder owns the object writer-<number>.json of the
    largest number, and a thread rewrites it every BEAT_SECONDS. Another process takes the folder by creating the next
    number, which only one process can do, if the holder has released it, is a dead process of the same machine, or has
    not changed its object for LEASE_SECONDS: no clocks of two machines are compared. Numbers are never used twice.

    Its limit: a holder that is frozen for LEASE_SECONDS and wakes up between its check and the commit that follows can
    still commit one checkpoint. That checkpoint is whole, since all files have names of their own.

    Raises:
        ValueError: another process holds it; its host and PID are named.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: ObjectFolder) -> None:
        self.folder = folder
        self._content = {"holder": holder_name(), **_identity(), "beat": 0, "released": False}
        self._stop = threading.Event()
        older = self._numbers()
        if older:
            self._wait_for(older[-1])
        self._name = _writer_name(older[-1] + 1 if older else 0)
        try:
            folder.create(self._name, self._text())
        except FileExistsError as error:
            raise self._refused(json.loads(folder.read(self._name))) from error
        try:
            self.check()
            folder.remove(map(_writer_name, older))
        except BaseException:
            with contextlib.suppress(OSError):
                self._write(released=True)
            raise
        self._thread = threading.Thread(target=self._beat, daemon=True, name="tpu_kit-lease")
        self._thread.start()

    def check(self) -> None:
        """Makes sure that the folder is still held; raises ValueError if another process has taken it."""
        numbers = self._numbers()
        newest = _writer_name(numbers[-1]) if numbers else self._name  # the next beat writes a deleted one again
        if newest != self._name:
            raise self._refused(json.loads(self.folder.read(newest)))

    def close(self) -> None:
        """Releases the folder."""
        self._stop.set()
        self._thread.join(BEAT_SECONDS)
        with contextlib.suppress(OSError):  # then the next process waits for LEASE_SECONDS
            self._write(released=True)

    def _numbers(self) -> list[int]:
        return sorted(int(match[1]) for name in self.folder.list() if (match := _WRITER.fullmatch(name)))

    def _text(self) -> bytes:
        return json.dumps(self._content).encode()

    def _write(self, **changes: Any) -> None:
        self._content |= changes
        self.folder.write(self._name, self._text())

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next one may succeed; `check` decides
                self._write(beat=self._content["beat"] + 1)

    def _wait_for(self, number: int) -> None:
        """Returns when no process holds the folder; raises ValueError when one is alive."""
        first = self._read(number)
        alive = _alive(first)
        if first.get("released") or alive is False:
            return
        if alive:
            raise self._refused(first)
        waits = f"waiting {LEASE_SECONDS:g} s to see if it still is"
        print(f"{first.get('holder')} was writing to {self.folder.url}: {waits}", file=sys.stderr, flush=True)
        end = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, LEASE_SECONDS / 10))
            now = self._read(number)
            if now.get("released"):
                return
            if now != first:
                raise self._refused(now)

    def _read(self, number: int) -> dict[str, Any]:
        try:
            found = json.loads(self.folder.read(_writer_name(number)))
        except FileNotFoundError:  # another process has taken it over; `check` will find that
            return {"released": True}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _refused(self, other: dict[str, Any]) -> ValueError:
        holder = other.get("holder", "another process")
        return ValueError(
            f"{self.folder.url} is being written to by {holder}: end that one first, or set another output_dir"
        )


def _writer_name(number: int) -> str:
    return f"writer-{number:08d}.json"


def _identity() -> dict[str, Any]:
    """Identifies this process; its machine is empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        machine = ""
    return {"machine": machine, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: int) -> str | None:
    """When a process of this machine began, in clock ticks; None if there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _alive(other: dict[str, Any]) -> bool | None:
    """Whether a holder runs; None if it is on another machine."""
    machine = _identity()["machine"]
    if not machine or other.get("machine") != machine or not isinstance(other.get("pid"), int):
        return None
    return _started(other["pid"]) == other.get("started")
