"""Defines the format of a checkpoint: reads it and checks it against its manifest.

The manifest has a format number, the step, the time, metrics, and the size and MD5 of every file. Object stores compute
the same digest, so a checkpoint can be copied from a folder to an object store and back. A folder without a valid
manifest is not a checkpoint. Tensors are safetensors, everything else is JSON (Python's, with NaN and Infinity), and
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tpu_kit.machine.chips import MIB
from tpu_kit.machine.storage.local_folder import LocalFolder
from tpu_kit.machine.storage.object_store import ObjectFolder, leads_out

MANIFEST = "manifest.json"
FORMAT = 4
CORRUPT = ".corrupt"  # suffix of a checkpoint that is set aside
_READ_BYTES = 16 * MIB  # per request


Tensors = Mapping[str, Mapping[str, Tensor]]
"""File name without ".safetensors" -> the CPU tensors of the file by name."""


Select = Callable[[str], bool]
"""Takes a tensor's name; returns whether to read the tensor."""


class DamagedError(ValueError):
    """A checkpoint differs from its manifest or has none; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. Its files are read into memory block by block."""

    step: int  # number of updates done
    path: Path | str  # its folder or URL, for users
    created: float  # seconds since the epoch on the writer's clock; checkpoints are ordered by step
    metrics: dict[str, float]  # from `CheckpointManager.save`
    best: bool  # whether it was the run's best checkpoint when it was saved; see `best_of`
    files: dict[str, tuple[int, str]]  # name -> (bytes, MD5), without the manifest
    source: LocalFolder | ObjectFolder = field(repr=False, compare=False)  # the folder of the run's checkpoints
    folder: str  # its name in `source`

    @property
    def size(self) -> int:
        """Bytes of all its files, without the manifest."""
        return sum(size for size, _ in self.files.values())

    def check(self, listing: Mapping[str, tuple[int, str]]) -> None:
        """Raises DamagedError for the first file that `listing` lacks, or that has another size or MD5 there.

        `listing` is from `source.list`; an empty MD5 in it is not compared.
        """
        for name, (size, digest) in self.files.items():
            if f"{self.folder}/{name}" not in listing:
                raise DamagedError(f"{self._place(name)} is missing")
            size_now, digest_now = listing[f"{self.folder}/{name}"]
            if size_now != size:
                raise DamagedError(f"{self._place(name)} has {size_now:,} bytes, and had {size:,} when it was written")
            if digest_now not in ("", digest):
                raise self._changed(name)

    def verify(self, *names: str) -> None:
        """Raises DamagedError as `check`, or for the first file (of `names`, if given) whose content has changed."""
        self.check(listing := self.source.list(self.folder))
        for name in names or self.files:
            if not listing[f"{self.folder}/{name}"][1] and self._digest(name) != self.files[name][1]:
                raise self._changed(name)

    def document(self, name: str) -> Any:
        """Returns the parsed `<name>.json`.

        Raises ValueError if the checkpoint has no such file, and DamagedError if this file has changed, or any file of
        the checkpoint is missing or has another size.
        """
        self._open(file := f"{name}.json")
        content = self._read(file)
        if new_digest(content).hexdigest() != self.files[file][1]:
            raise self._changed(file)
        return json.loads(content)

    def tensors(self, name: str, select: Select | None = None) -> dict[str, Tensor]:
        """Reads the CPU tensors of `<name>.safetensors` by name; `select` takes a name and chooses, None chooses all.

        Raises ValueError and DamagedError as `document`.
        """
        self._open(file := f"{name}.safetensors")
        if select is not None:  # without `select` the digest is computed while reading
            self.verify(file)
        content, found = new_digest(), dict[str, Tensor]()
        begin, block = 0, b""  # the last block that was read, and its offset

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
        except DamagedError:  # the file is missing
            raise
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise self._changed(file) from error
        if select is None and content.hexdigest() != self.files[file][1]:
            raise self._changed(file)
        return found

    def _open(self, name: str) -> None:
        """Raises ValueError if there is no such file, and DamagedError as `check` for any file of the checkpoint."""
        if name not in self.files:
            raise ValueError(f"{self.path} holds no {name}; it holds {', '.join(sorted(self.files))}")
        self.check(self.source.list(self.folder))

    def _read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Reads a file of the checkpoint, or its bytes `start` to `end`; raises DamagedError if it is missing."""
        try:
            return self.source.read(f"{self.folder}/{name}", start, end)
        except FileNotFoundError as error:
            raise DamagedError(f"{self._place(name)} is missing") from error

    def _digest(self, name: str) -> str:
        """Reads a file and returns its MD5 in hexadecimal, for a file whose MD5 `source.list` does not have."""
        found, size = new_digest(), self.files[name][0]
        for start in range(0, size, _READ_BYTES):
            found.update(self._read(name, start, min(start + _READ_BYTES, size)))
        return found.hexdigest()

    def _place(self, name: str) -> Path | str:
        """Returns the path or URL of a file of the checkpoint."""
        return self.source.place(f"{self.folder}/{name}")

    def _changed(self, name: str) -> DamagedError:
        """Makes the error for a file whose MD5 differs."""
        return DamagedError(f"{self._place(name)} has changed since it was written: its MD5 differs")


@dataclass(frozen=True)
class Rejected:
    """A damaged checkpoint and the reason."""

    folder: str  # see `Checkpoint`
    path: Path | str
    reason: str


def holder_name() -> str:
    """Returns the name of this process for manifests, locks and errors: "process PID on HOST"."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def in_use(place: Path | str, holder: str) -> ValueError:
    """Makes the error for a place where another process writes; `holder` is the result of its `holder_name`."""
    text = f"{place} is being written to by {holder}"
    return ValueError(f"{text}: end that process first, or set another run_name or output_dir")


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Returns the best of checkpoints, given by ascending step: the last that was the best when saved, or None."""
    return next((checkpoint for checkpoint in reversed(checkpoints) if checkpoint.best), None)


def read_checkpoint(source: LocalFolder | ObjectFolder, folder: str, text: bytes | None) -> Checkpoint:
    """Makes the checkpoint in the folder `folder` of `source` from its manifest's text, without a look at its files.

    Raises DamagedError if `text` is None, because the manifest is missing, and the errors of `unseal`.
    """
    place = source.place(f"{folder}/{MANIFEST}")
    if text is None:
        raise DamagedError(f"{place} is missing")
    manifest = unseal(text, place, source.place(folder))
    files = {name: (entry["bytes"], entry["md5"]) for name, entry in manifest["files"].items()}
    about = {name: manifest[name] for name in ("step", "created", "metrics", "best")}
    return Checkpoint(path=source.place(folder), files=files, source=source, folder=folder, **about)


def unseal(text: bytes, file: Path | str, place: Path | str) -> dict[str, Any]:
    """Returns the manifest that `seal` made, without its SHA-256; errors name its `file` and the checkpoint's `place`.

    Raises:
        DamagedError: it is no manifest, its content has changed, or it names a file outside of the checkpoint.
        ValueError: this tpu_kit does not read the format.
    """
    try:
        manifest: dict[str, Any] = json.loads(text)
        sealed = manifest.pop("sha256") == _seal(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{file} is not a manifest") from error
    if not sealed:
        raise DamagedError(f"{file} has changed since it was written: its SHA-256 differs")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{place} has format {manifest['format']}, and this tpu_kit reads {FORMAT}: use the tpu_kit that wrote it, "
            "or set another output_dir"
        )
    if bad := next(filter(leads_out, manifest["files"]), None):
        raise DamagedError(f"{file} names {bad!r}, which is outside of {place}: no run has written that")
    return manifest


def seal(manifest: Mapping[str, Any]) -> str:
    """Returns the manifest's text with the SHA-256 of its content, which also detects a flipped bit in a metric."""
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1)


def _seal(manifest: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a manifest that does not contain it yet, in hexadecimal."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def new_digest(content: bytes = b"") -> Any:
    """Returns an MD5 hash object, which detects errors of disks and networks, but does not protect from attackers."""
    return hashlib.md5(content, usedforsecurity=False)


def file_digest(path: Path) -> str:
    """Returns the MD5 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, new_digest).hexdigest()
