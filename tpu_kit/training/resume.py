"""Finds the checkpoint that a run continues from, and checks that the run may continue from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, NamedTuple

import torch

from tpu_kit.config.named_values import FUNCTION
from tpu_kit.config.resuming import ANEW, changes
from tpu_kit.config.schema import TrainConfig, flatten
from tpu_kit.data.prepare import Prepared
from tpu_kit.machine.compatibility import code_of, installed_version
from tpu_kit.machine.storage.local_folder import open_folder
from tpu_kit.machine.storage.object_store import is_url, parent
from tpu_kit.model.weights import base_identity
from tpu_kit.model.weights.base_identity import Identity
from tpu_kit.training.checkpoint.layout import lies_around
from tpu_kit.training.checkpoint.manager import list_checkpoints, not_empty, remains
from tpu_kit.training.checkpoint.manifest import Checkpoint, DamagedError, Rejected
from tpu_kit.training.state import read_tensors, sections

Tensors = dict[str, torch.Tensor]

TEACHER, START = "teacher", "start"
"""Documents of a checkpoint with the identities of `distill.teacher` and `lora.adapter`."""
_ROWS = ("data.source", "data.eval_source")


class Record(NamedTuple):
    """Facts about a run that its checkpoints record beside configuration and state, and that a resuming run compares.

    Attributes:
        identities: identities of the base, the teacher and the initial adapter, by name of the document.
        versions: versions of packages and of the user's code, which may differ.
        fingerprint: `Prepared.fingerprint`.
        rows_digest: see `rows_digest`.
        global_batch_size: rows per update.
        shards: for a stream, the version of every file by its name.
    """

    identities: Mapping[str, Identity]
    versions: Mapping[str, str]
    fingerprint: str = ""
    rows_digest: str = ""
    global_batch_size: int | None = None
    shards: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from, with the documents that are read before its tensors.

    Attributes:
        checkpoint: the checkpoint.
        config: the parameters of its run, by dotted name.
        state: the document "state".
        identities: identities of its weights, by name of the document.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    state: Mapping[str, Any]
    identities: Mapping[str, Identity]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ResumePoint:
        """Reads the documents; raises DamagedError."""
        config, state = flatten(checkpoint.document("config")), checkpoint.document("state")
        there = [document for document, _, _ in _WEIGHTS if f"{document}.json" in checkpoint.files]
        return cls(checkpoint, config, state, {document: checkpoint.document(document) for document in there})

    @property
    def step(self) -> int:
        """The number of updates that the checkpoint contains."""
        return self.checkpoint.step

    def is_of(self, checkpoint: Checkpoint | None) -> bool:
        """Whether a checkpoint has the same step and content; False for None."""
        return checkpoint is not None and (checkpoint.step, checkpoint.files) == (self.step, self.checkpoint.files)

    def kept(self, config: TrainConfig) -> TrainConfig:
        """Returns `config` with the checkpoint's `data.eval_rows` and `data.date` if it does not set them.

        lora.tokens=added is replaced by the token names that the first launch found.
        """
        data = config.data
        if config.lora.finds_tokens and self.config.get("lora.tokens"):
            config = replace(config, lora=replace(config.lora, tokens=tuple(self.config["lora.tokens"])))
        rows = self.config.get("data.eval_rows") if data.eval_rows is None else data.eval_rows
        return replace(config, data=replace(data, eval_rows=rows, date=data.date or self.config["data.date"]))

    def compare(self, config: TrainConfig, record: Record) -> Comparison:
        """Compares parameters and weights and, if `record` has them, rows per update and data.

        Rows and weights are compared by content, not by location: another name for the same content is `moved`, not a
        problem. Without `record.rows_digest`, another name for rows is neither. Parameters that a resumed run may
        change are never problems.
        """
        before, now, moved = self.config, config.flat_values(), dict[str, tuple[str, str]]()
        differ = {name: f"{name}: {before[name]!r} there, {now[name]!r} now" for name in changes(before, now)[1]}
        for document, whose, name in _WEIGHTS:
            # Further updates do not depend on the adapter that training started from, so it is compared only if its
            # name differs.
            identity = record.identities.get(document) if document != START or name in differ else None
            began = self.identities.get(document)
            if name not in differ:
                if found := base_identity.differences(began, identity):
                    differ[f"{name} "] = f"the {whose} weights, {name}={config[name]}: {'; '.join(found)}"
            elif before[name] and now[name]:
                if found := base_identity.other_place(began, identity):
                    differ[name] += f", whose weights are not known to be the same: {'; '.join(found)}"
                else:
                    moved[name] = before[name], now[name]
                    del differ[name]
                    if document == base_identity.NAME:
                        differ.pop("model.revision", None)
        if rows := [name for name in _ROWS if name in differ and before[name] and now[name]]:
            same = bool(record.rows_digest) and record.rows_digest == self.state["rows_digest"]
            moved |= {name: (before[name], now[name]) for name in rows if same}
            for name in rows if same or not record.rows_digest else ():  # unread rows are compared later
                del differ[name]
        if record.global_batch_size not in (None, rows_there := self.state["global_batch_size"]):
            differ["rows"] = (
                f"rows per update (optim.batch_size, passes, replicas): {rows_there} there, "
                f"{record.global_batch_size} now"
            )
        if text := _other_files(self.state.get("shards"), record.shards):
            differ["shards"] = text
        other_data = record.fingerprint not in ("", self.state["fingerprint"])
        if other_data and not any(name.startswith(("data.", "shards")) for name in differ):
            differ["data"] = "the data: other rows, tokens or packing than there, though its parameters are the same"
        return Comparison([*differ.values()], moved)

    def refusal(self, config: TrainConfig, record: Record, total: int | None, rows: int | None = None) -> str:
        """Explains why the run may not continue from the checkpoint, with all differences; empty if it may.

        Args:
            config: the run.
            record: the facts about the run that are known so far.
            total: the run's number of updates, if known.
            rows: the number of rows that the checkpoint's updates take with this configuration, if known.
        """
        path, step = self.checkpoint.path, self.step
        if problems := self.compare(config, record).problems:
            listed = "\n  ".join(problems)
            return f"{path} is of another run:\n  {listed}\nSet these back, or start anew: {ANEW}"
        if total is not None and step > total:
            name = "optim.max_steps" if config.optim.max_steps is not None else "optim.epochs"
            return (
                f"{path} has {step} updates, and {name}={config[name]} asks for {total}: the run is past its end. "
                f"Raise {name} to {step} updates or more, or train a shorter run anew: {ANEW}"
            )
        if rows not in (None, self.state["rows"]):
            return (
                f"{path} is of another run: its {step} updates took {self.state['rows']:,} rows, and with this "
                f"configuration they take {rows:,}. With optim.batch_growth_factor, optim.batch_size x "
                "launch.num_replicas must not change: set both back"
            )
        return ""

    def described(self, config: TrainConfig, record: Record) -> list[str]:
        """Returns lines to print: the checkpoint that the run continues from, and the differences that are allowed.

        First there is a line for every moved parameter. The last line begins with "resumed", and has step, path, and
        all other parameters and versions that differ.
        """
        moved = self.compare(config, record).moved
        lines = [
            f"moved            {name}: {earlier} -> {after}, same content" for name, (earlier, after) in moved.items()
        ]
        before, now = self.config, config.flat_values()
        pairs = {name: (now[name], before[name]) for name in changes(before, now)[0]}
        old, new = self.state["versions"], record.versions
        pairs |= {name: (new[name], old[name]) for name in new if old.get(name, new[name]) != new[name]}
        differ = "".join(f"; {name} is {after!r}, was {earlier!r}" for name, (after, earlier) in pairs.items())
        return [*lines, f"resumed          from step {self.step}, {self.checkpoint.path}{differ}"]


def _other_files(before: Mapping[str, str] | None, now: Mapping[str, str] | None) -> str:
    """Describes which files of a stream are new, gone or changed; empty without differences or if a side is unknown."""
    if not before or now is None:
        return ""
    kinds = {
        "has disappeared": [name for name in before if name not in now],
        "is new": [name for name in now if name not in before],
        "has changed": [name for name in now if before.get(name, now[name]) != now[name]],
    }
    found = [f"{shorten(', '.join(names), 300)} {said}" for said, names in kinds.items() if names]
    return f"the shards of data.source: {'; '.join(found)}" if found else ""


class Comparison(NamedTuple):
    """The differences between a run and its checkpoint.

    Attributes:
        problems: differences with which the run may not continue.
        moved: parameters that name another location with the same content: (before, now).
    """

    problems: list[str]
    moved: Mapping[str, tuple[str, str]]


def find_resume_point(config: TrainConfig) -> ResumePoint | None:
    """Returns the newest checkpoint whose documents are not damaged, or None for a new run or resume=never.

    Newer checkpoints that are damaged are set aside later, by the process that writes: `CheckpointManager.newest`.

    Raises:
        ValueError: there is no checkpoint, and checkpoint.resume is must; or there is none, and `remains` or
            `lies_around` finds other files of a run. The folder cannot be read. Or a checkpoint has a format that this
            tpu_kit does not read.
    """
    if config.checkpoint.resume == "never":
        return None
    place = config.checkpoints_place
    try:
        complete, damaged = list_checkpoints(place)
        for checkpoint in reversed(complete):
            try:
                return ResumePoint.read(checkpoint)
            except DamagedError as error:
                damaged.append(Rejected(checkpoint.folder, checkpoint.path, str(error)))
        if found := remains(place, damaged) + lies_around(open_folder(parent(place))):
            raise not_empty(place, found)
    except OSError as error:
        why, local = error.strerror or error, f" ({error.strerror}): set output_dir to a folder that can"
        raise ValueError(f"{place} cannot be read{f': {why}' if is_url(place) else local}") from error
    if config.checkpoint.resume == "must":
        raise ValueError(
            f"checkpoint.resume=must, but {place} has no complete checkpoint: check output_dir, or set "
            "checkpoint.resume=auto to start anew where there is none"
        )
    return None


def weights_of(step: int, config: TrainConfig) -> Tensors:
    """Reads the trained weights (with ema_decay, the average) in a step's checkpoint: CPU tensors, unstacked, by name.

    Raises ValueError if the run has no complete checkpoint of this step, or it is damaged; and OSError.
    """
    checkpoint = next((each for each in list_checkpoints(config.checkpoints_place)[0] if each.step == step), None)
    if checkpoint is None:
        raise ValueError(
            f"{config.checkpoints_place} has lost the checkpoint of step {step}, whose weights are the result: put it "
            "back, or set optim.eval_steps=null for the last weights, and run this again"
        )
    section = "average" if config.optim.ema_decay else "parameters"
    return sections(read_tensors(checkpoint, lambda name: name.startswith(f"{section}/")))[section]


_WEIGHTS = ((base_identity.NAME, "base", "model.name"), (TEACHER, "teacher's", "distill.teacher"),
            (START, "start's", "lora.adapter"))  # fmt: skip


def rows_digest(prepared: Prepared) -> str:
    """Returns a hash of all rows: training rows, held-out rows, and the prompts of reinforcement learning."""
    held = prepared.eval.fingerprint() if prepared.eval else ""
    asked = prepared.tasks.rows.rows if prepared.tasks else []
    rows = json.dumps([prepared.eval_rows, asked], sort_keys=True, default=str)
    return hashlib.blake2b(f"{prepared.fingerprint} {held} {rows}".encode(), digest_size=16).hexdigest()


def versions(config: TrainConfig) -> dict[str, str]:
    """Returns the versions of installed packages, and hashes of the code of the user's functions, by name.

    The packages are tpu_kit, torch, torch_xla, transformers and peft; packages that are missing are left out. Functions
    are named "module:name" in optim.objective, rl.reward_funcs and data.format, with values such as "code 1f2e3d4c".
    """
    names = ("tpu_kit", "torch", "torch_xla", "transformers", "peft")
    found = {name: version for name in names if (version := installed_version(name))}
    formats = [one.format for one in config.data.by_source]
    for name in filter(FUNCTION.fullmatch, (config.optim.objective, *config.rl.reward_funcs, *formats)):
        if code := code_of(name):
            found[name] = f"code {hashlib.blake2s(code, digest_size=4).hexdigest()}"
    return found
