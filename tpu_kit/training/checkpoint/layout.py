"""Defines the names in a run's checkpoints folder: the same on disks and in object stores, so that runs can be copied.

<output_dir>/checkpoints/
  step-00000400/             a complete checkpoint, from a disk; only its manifest counts, not its name
    adapter_model.safetensors, state.json, ...
    manifest.json            see tpu_kit.training.checkpoint.manifest
  step-00000412-1f2e3d4c-3f9a1c07b2de/   likewise, from an object store: with a hash of its address, and an attempt
  owner-00000007.json        of an object store: the folders that count there; see `gcs_store.BucketStore`
  step-00000300.corrupt/     set aside by `CheckpointManager.newest`; in an object store the file manifest.json.corrupt
  .step-00000412.3f9a1c07b2de.part/  on a disk: an attempt, or what a killed process has left of it
  .step-00000412.old/        on a disk, for a moment, while the same step is saved again
  .lock                      on a disk: held by the one process that writes here; names its host and PID
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tpu_kit.machine.storage.atomic import PART
from tpu_kit.machine.storage.local_folder import LocalFolder
from tpu_kit.machine.storage.object_store import ObjectFolder
from tpu_kit.training.checkpoint.manifest import CORRUPT, MANIFEST

Listing = Mapping[str, tuple[int, str]]
Owner = Mapping[str, Any]
"""The content of an owner object; empty where there is none."""

_ATTEMPT = re.compile(r"step-\d{8,}-(?P<place>[0-9a-f]{8})-[0-9a-f]{12}")
_STEP = re.compile(r"step-\d+(-\w+)*")  # looks like a checkpoint, with or without its manifest
_OWNER = re.compile(r"owner-(\d{8,})\.json")
_OF_TRAINER = re.compile(r"checkpoint-\d+")
_ARCHIVE = re.compile(r".*\.(zip|tar|tgz|tbz2|txz|7z|rar)(\.\w+)?|.*\.(gz|bz2|xz|zst)", re.IGNORECASE)


def attempt_name(url: str) -> str:
    """The name of an attempt in the object store at a URL, to be formatted with its `step` and `name`."""
    return f"step-{{step:08d}}-{place_hash(url)}-{{name}}"


def place_hash(url: str) -> str:
    """Tells attempts of this place from checkpoints that were copied here."""
    return hashlib.blake2b(url.encode(), digest_size=4).hexdigest()


def same_step(folder: str, step: int) -> bool:
    """Whether a folder's name is one of a step."""
    return re.fullmatch(rf"step-0*{step}(-.*)?", folder) is not None


@dataclass(frozen=True)
class Contents:
    """What lies in a checkpoints folder, by the names of its folders."""

    counted: list[str] = field(default_factory=list)  # checkpoints; of one step the last one counts
    left: list[str] = field(default_factory=list)  # of killed processes, or not yet committed
    aside: list[str] = field(default_factory=list)
    strange: dict[str, str] = field(default_factory=dict)  # any other file or folder, and what it seems to be


def sort_out(listing: Iterable[str], owner: Owner, here: str = "") -> Contents:
    """Sorts the files of a checkpoints folder, by name, into what they belong to.

    Without an owner object, all folders with a manifest are checkpoints. With one, an attempt is one if the owner says
    so, at the place of the owner object and `here`; and what comes from another place, until the owner drops it.

    Args:
        listing: the names of all files.
        owner: the newest owner object.
        here: `place_hash` of the place; empty on a disk.
    """
    inside: dict[str, set[str]] = {}
    for name in listing:
        folder, _, rest = name.partition("/")
        inside.setdefault(folder, set()).add(rest)
    commits, dropped = owner.get("commits", []), owner.get("dropped", [])
    decided = {here, owner.get("place")} if owner else set()
    found = Contents()
    # Hidden names come first, so that a step's new checkpoint hides the old one that it is about to replace, and
    # attempts before other names, so that what a run saves on a disk hides what came from an object store.
    for folder in sorted(inside, key=lambda name: (name[0] != ".", not _ATTEMPT.fullmatch(name), name)):
        names, attempt = inside[folder], _ATTEMPT.fullmatch(folder)
        if folder.endswith(PART):
            found.left.append(folder)
        elif names != {""} and (folder.endswith(CORRUPT) or MANIFEST + CORRUPT in names):
            found.aside.append(folder)
        elif folder not in commits and (folder in dropped or (attempt and attempt["place"] in decided)):
            found.left.append(folder)
        elif (
            MANIFEST in names or folder in commits or (_STEP.fullmatch(folder) and names != {""} and not _deeper(names))
        ):
            found.counted.append(folder)
        elif not folder.startswith(".") and not (names == {""} and _OWNER.fullmatch(folder)):
            found.strange[folder] = describe(folder, names)
    found.counted.extend(name for name in commits if name not in inside)  # its files are lost
    return found


def _deeper(inside: Iterable[str]) -> list[str]:
    return sorted(path for path in inside if path.endswith(f"/{MANIFEST}"))


def describe(name: str, inside: Iterable[str]) -> str:
    """Says what a file (`inside` is {""}), or a folder with these files inside, seems to be."""
    inside = set(inside)
    if deeper := _deeper(inside):
        return f"holds {deeper[0]}: it is one folder too deep, or of an earlier tpu_kit"
    if _OF_TRAINER.fullmatch(name) or "trainer_state.json" in inside:
        return (
            "is a checkpoint of transformers' Trainer, which the kit does not continue; it can be a start: set "
            "lora.adapter to its adapter, or model.name to its whole model"
        )
    if _ARCHIVE.fullmatch(name) and inside == {""}:
        return "is an archive: unpack it"
    return "is no checkpoint of this tpu_kit"


def lies_around(run: LocalFolder | ObjectFolder) -> list[str]:
    """Says what in a run's folder, which has no checkpoints, tells of a run; empty if nothing does."""
    names, found = run.names(), []
    for name in sorted(names):
        folder, plain = name.endswith("/"), name.rstrip("/")
        if _OF_TRAINER.fullmatch(plain) or (_ARCHIVE.fullmatch(name) and name.startswith(("checkpoint", "step-"))):
            found.append(f"{run.place(plain)} {describe(plain, [''] if not folder else [])}")
        elif folder and (_STEP.fullmatch(plain) and f"{MANIFEST}" in run.names(plain)):
            found.append(f"{run.place(plain)} is a checkpoint: set output_dir to the folder that holds its folder")
        elif plain == "adapter" and folder and run.names(plain):
            found.append(f"{run.place(plain)} is the result of a run whose checkpoints are not there")
        elif folder and plain != "checkpoints" and "checkpoints/" in run.names(plain):
            found.append(f"{run.place(plain)} is a run: to continue it, set output_dir={run.place(plain)}")
    return found


def owner_name(number: int) -> str:
    """The name of an owner object."""
    return f"owner-{number:08d}.json"


def owner_numbers(names: Iterable[str]) -> list[int]:
    """The numbers of the owner objects among names."""
    return [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]


def read_owner(files: LocalFolder | ObjectFolder) -> tuple[Listing, int, Owner]:
    """Lists all files; returns the number and the content of the newest owner object too, or -1 and nothing."""
    while True:
        listing = files.list()
        number = max(owner_numbers(listing), default=-1)
        if number < 0:
            return listing, number, {}
        with suppress(FileNotFoundError):  # a commit has replaced it since
            return listing, number, json.loads(files.read(owner_name(number)))
