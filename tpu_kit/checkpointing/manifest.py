"""Defines the format of a checkpoint: reads it and checks it against its manifest.

The manifest holds a format number, the step, the time, metrics, and the size and digest of every file: SHA-256, or in
an object store the MD5 that the store computes too. A folder without a valid manifest is no checkpoint. Tensors are
safetensors, everything else is JSON (Python's, with NaN and Infinity): nothing is unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tpu_kit.storage.atomic import PART
from tpu_kit.storage.object_store import leads_out

MANIFEST = "manifest.json"
FORMAT = 3
CORRUPT = ".corrupt"  # suffix of a checkpoint that is set aside


Tensors = Mapping[str, Mapping[str, Tensor]]
"""File name without ".safetensors" -> the CPU tensors of the file by name."""


Select = Callable[[str], bool]
"""Whether a tensor of a file is wanted, by its name."""


class DamagedError(ValueError):
    """A checkpoint differs from its manifest, or has none; the text names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int  # updates done
    path: Path | str  # its folder or URL, for users
    created: float  # seconds since the epoch, by the writer's clock; the order is by step
    metrics: dict[str, float]  # of `CheckpointManager.save`
    best: bool  # whether it was the best of its run when it was saved; see `best_of`
    files: dict[str, tuple[int, str]]  # name to (bytes, digest), without the manifest

    @property
    def size(self) -> int:
        """Bytes of all its files without the manifest."""
        return sum(size for size, _ in self.files.values())

    @property
    def handle(self) -> Path | str:
        """What is renamed to set it aside: its folder, or the URL of its marker."""
        return self.path

    def tensors(self, name: str, select: Select | None = None) -> dict[str, Tensor]:
        """Reads CPU tensors of `<name>.safetensors`, by default all; see `document` for the errors."""
        self._check_file(f"{name}.safetensors")
        with safe_open(Path(self.path, f"{name}.safetensors"), framework="pt") as file:
            # They are mapped from the file: copies outlive a checkpoint that is deleted later.
            return {key: file.get_tensor(key).clone() for key in filter(select, file.keys())}

    def document(self, name: str) -> Any:
        """Reads `<name>.json`; raises DamagedError, and ValueError if there is no such file."""
        return json.loads(self._text(f"{name}.json"))

    def _text(self, name: str) -> str:
        self._check_file(name)
        return Path(self.path, name).read_bytes().decode()

    def verify(self) -> None:
        """Checks the content of all files; raises DamagedError at the first that has changed."""
        for name in self.files:
            self._check_file(name)

    def _check_file(self, name: str) -> None:
        """Raises DamagedError if the content of a file has changed."""
        self._check_name(name)
        _check_sizes(self)
        path = Path(self.path, name)
        if digest(path) != self.files[name][1]:
            raise DamagedError(f"{path} is not what was written: its SHA-256 is another")

    def _check_name(self, name: str) -> None:
        if name not in self.files:
            raise ValueError(f"{self.path} holds no {name}; it holds {', '.join(sorted(self.files))}")


@dataclass(frozen=True)
class Rejected:
    """A damaged checkpoint, and the reason."""

    path: Path | str
    reason: str


def holder_name() -> str:
    """The name of this process in manifests, locks and errors."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def in_use(place: Path | str, holder: str) -> ValueError:
    """Makes the error for a place where another process writes."""
    return ValueError(f"{place} is being written to by {holder}: end that one first, or set another output_dir")


def best_of(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """The best of checkpoints in the order of their steps: the last that was better than all before it."""
    return next((checkpoint for checkpoint in reversed(checkpoints) if checkpoint.best), None)


def scan_folder(folder: Path, *, verify: bool = False) -> tuple[list[Checkpoint], list[Rejected]]:
    """`checkpointing.manager.scan` of a folder."""
    found: dict[int, Checkpoint] = {}
    rejected = []
    # Hidden names come first, so that a step's new checkpoint hides the old one that it is about to replace.
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir() or path.suffix in (PART, CORRUPT):
            continue
        if not (path / MANIFEST).exists() and not path.name.startswith("step-"):
            continue  # no checkpoint
        try:
            checkpoint = _read(path)
            if verify:
                checkpoint.verify()
            found[checkpoint.step] = checkpoint
        except DamagedError as error:
            if path.exists():  # else the writer has just deleted it
                rejected.append(Rejected(path, str(error)))
    return [found[step] for step in sorted(found)], rejected


def _read(path: Path) -> Checkpoint:
    """Reads a checkpoint's manifest, and checks the sizes of its files."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise DamagedError(f"{path / MANIFEST} is missing") from error
    checkpoint = Checkpoint(path=path, **fields_of(unseal(text, path / MANIFEST, path)))
    _check_sizes(checkpoint)
    return checkpoint


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Raises DamagedError at the first file that is missing, short or long; reads none of them."""
    for name, (size, _) in checkpoint.files.items():
        path = Path(checkpoint.path, name)
        if not path.exists():
            raise DamagedError(f"{path} is missing")
        check_size(path, path.stat().st_size, size)


def unseal(text: bytes, file: Path | str, place: Path | str) -> dict[str, Any]:
    """Reads a manifest that `seal` made; errors name its file and the checkpoint's place.

    Raises:
        DamagedError: its content has changed.
        ValueError: this tpu_kit does not read its format.
    """
    try:
        manifest: dict[str, Any] = json.loads(text)
        sealed = manifest.pop("sha256") == _seal(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(f"{file} is no manifest") from error
    if not sealed:
        raise DamagedError(f"{file} is not what was written: its SHA-256 is another")
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{place} has format {manifest['format']}, and this tpu_kit reads {FORMAT}: use the tpu_kit that wrote it, "
            "or set another output_dir"
        )
    if bad := next(filter(leads_out, [manifest.get("folder", ""), *manifest["files"]]), None):
        raise DamagedError(f"{file} names {bad!r}, which is outside of {place}: no run has written that")
    return manifest


def fields_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Checkpoint` that its manifest holds."""
    files = {name: (entry["bytes"], entry.get("md5") or entry["sha256"]) for name, entry in manifest["files"].items()}
    return {"files": files} | {name: manifest[name] for name in ("step", "created", "metrics", "best")}


def check_size(path: Path | str, now: int, then: int) -> None:
    """Raises DamagedError if a file's size is not what it was."""
    if now != then:
        raise DamagedError(f"{path} has {now:,} bytes, and had {then:,} when it was written")


def seal(manifest: Mapping[str, Any]) -> str:
    """The manifest's text with the SHA-256 of its content, which also detects a flipped bit in a metric."""
    return json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1)


def _seal(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def digest(path: Path, kind: str = "sha256") -> str:
    """A digest of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def error_number(error: Exception) -> int:
    """The errno of a system error; safetensors, written in Rust, has it only in its text."""
    number = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return int(number[1]) if number else getattr(error, "errno", None) or errno.EIO
