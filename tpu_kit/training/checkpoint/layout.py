"""Defines the names in a run's checkpoints folder. Disks and object stores share them, so that runs can be copied.

<output_dir>/checkpoints/

- step-00000400/: a checkpoint written on a disk, with adapter_model.safetensors, state.json, ... and manifest.json,
  which has the step that counts; see tpu_kit.training.checkpoint.manifest
- step-00000412-1f2e3d4c-3f9a1c07b2de/: the same, written in an object store: a hash of its address, then an attempt
- owner-00000007.json: in an object store, names the valid checkpoints; see `gcs_store.BucketStore`
- step-00000300.corrupt/: set aside by `CheckpointManager`; in an object store the file manifest.json.corrupt in it
- .step-00000412.3f9a1c07b2de.part/: on a disk, an attempt, perhaps of a killed process
- .step-00000412.old/: on a disk, exists briefly while the same step is saved again
- .lock: on a disk, locked by the process that writes here; contains its host and PID
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
"""The content of an owner object; empty if there is no owner object."""

_ATTEMPT = re.compile(r"step-\d{8,}-(?P<place>[0-9a-f]{8})-[0-9a-f]{12}")
_STEP = re.compile(r"step-\d+(-\w+)*")  # looks like a checkpoint, with or without its manifest
_OWNER = re.compile(r"owner-(\d{8,})\.json")
_OF_TRAINER = re.compile(r"checkpoint-\d+")
_ARCHIVE = re.compile(r".*\.(zip|tar|tgz|tbz2|txz|7z|rar)(\.\w+)?|.*\.(gz|bz2|xz|zst)", re.IGNORECASE)


def attempt_name(url: str) -> str:
    """Returns a format string for the names of attempts in the object store at `url`, with `step` and `name`."""
    return f"step-{{step:08d}}-{place_hash(url)}-{{name}}"


def place_hash(url: str) -> str:
    """Returns a URL's hash, 8 hexadecimal digits, to tell attempts made there from checkpoints copied there."""
    return hashlib.blake2b(url.encode(), digest_size=4).hexdigest()


def same_step(folder: str, step: int) -> bool:
    """Whether a folder has the name of a checkpoint of `step`."""
    return re.fullmatch(rf"step-0*{step}(-.*)?", folder) is not None


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoints folder: the names in it, by kind, without owner objects and other hidden names."""

    counted: list[str] = field(default_factory=list)  # checkpoints, perhaps damaged; of equal steps the last is valid
    left: list[str] = field(default_factory=list)  # from killed processes, or not yet committed
    aside: list[str] = field(default_factory=list)  # set aside as damaged
    strange: dict[str, str] = field(default_factory=dict)  # any other file or folder -> its description


def sort_out(listing: Iterable[str], owner: Owner, here: str = "") -> Contents:
    """Sorts the names in a checkpoints folder into `Contents`.

    Folders named *.part are `left`, and checkpoints that were set aside are `aside`. Other folders are `counted` if
    they have a manifest, or files and a checkpoint's name. An owner object restricts this: attempts made here, or where
    the object was made, count only if the object lists them. Folders from elsewhere count until the object drops them.
    The folders that therefore do not count are `left`. Listed folders count even if their files are lost.

    Args:
        listing: the names of all files, relative to the folder.
        owner: the content of the newest owner object; empty if there is none.
        here: `place_hash` of this place; empty on a disk.
    """
    inside: dict[str, set[str]] = {}
    for name in listing:
        folder, _, rest = name.partition("/")
        inside.setdefault(folder, set()).add(rest)
    commits, dropped = owner.get("commits", []), owner.get("dropped", [])
    decided = {here, owner.get("place")} if owner else set()
    found = Contents()
    # The last checkpoint of a step is valid. Hidden names come first, so that a step's new checkpoint supersedes its
    # predecessor (.old). Attempts come next, so that a save on a disk supersedes a copy from an object store.
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
    """Returns the paths in subfolders that are manifests, sorted."""
    return sorted(path for path in inside if path.endswith(f"/{MANIFEST}"))


def describe(name: str, inside: Iterable[str]) -> str:
    """Says why `name` is no checkpoint, as in "is an archive: unpack it", or "is no checkpoint of this tpu_kit".

    Other texts are for a folder with a manifest in a subfolder, and for a checkpoint of transformers' Trainer. `inside`
    is {""} for a file, and for a folder the paths in it.
    """
    inside = set(inside)
    if deeper := _deeper(inside):
        return f"holds {deeper[0]}: it is one folder too deep, or of an earlier tpu_kit"
    if _OF_TRAINER.fullmatch(name) or "trainer_state.json" in inside:
        return (
            "is a checkpoint of transformers' Trainer, which the kit does not continue; to start from its weights, set "
            "lora.adapter to its adapter, or model.name to its whole model"
        )
    if _ARCHIVE.fullmatch(name) and inside == {""}:
        return "is an archive: unpack it"
    return "is no checkpoint of this tpu_kit"


def lies_around(run: LocalFolder | ObjectFolder) -> list[str]:
    """Returns a sentence for every trace of a run in `run`, an output_dir without checkpoints; empty if there are none.

    Traces are checkpoints of transformers' Trainer, archives named "checkpoint..." or "step-...", and checkpoints that
    are not in the folder checkpoints. Two kinds of folders are traces, too: adapter, if it is not empty, and a folder
    with its own folder checkpoints, because it is a run. The sentences are in the order of the names.
    """
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
    """Returns the name of an owner object, such as owner-00000007.json."""
    return f"owner-{number:08d}.json"


def owner_numbers(names: Iterable[str]) -> list[int]:
    """Returns the numbers of the owner objects among `names`."""
    return [int(match[1]) for name in names if (match := _OWNER.fullmatch(name))]


def read_owner(files: LocalFolder | ObjectFolder) -> tuple[Listing, int, Owner]:
    """Returns `files.list()`, the newest owner object's number, and its content; -1 and {} if there is no object."""
    while True:
        listing = files.list()
        number = max(owner_numbers(listing), default=-1)
        if number < 0:
            return listing, number, {}
        with suppress(FileNotFoundError):  # a commit may have replaced it
            return listing, number, json.loads(files.read(owner_name(number)))
