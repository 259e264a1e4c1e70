"""Selects the checkpoint that a run continues from, and checks that it may."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tpu_kit.checkpointing.manager import CheckpointManager, scan
from tpu_kit.checkpointing.manifest import Checkpoint, DamagedError, Select
from tpu_kit.config.choices import FUNCTION
from tpu_kit.config.loader import ANEW, TrainConfig, changes, flatten
from tpu_kit.hardware.compatibility import installed_version
from tpu_kit.models import base_identity
from tpu_kit.training.state import joined, sections

Tensors = dict[str, torch.Tensor]


def find_checkpoint(config: TrainConfig, owned: CheckpointManager | None) -> Checkpoint | None:
    """Returns the checkpoint to continue from, or None to start a new run.

    Args:
        config: the run.
        owned: the manager in the process that writes checkpoints, which moves damaged and unwanted ones aside; None in
            the other processes, which call this function later.

    Raises:
        ValueError: checkpoint.resume=must, and there is no checkpoint.
    """
    if owned is not None and config.checkpoint.resume == "never":
        owned.restart()
    checkpoint = owned.newest() if owned is not None else _newest(config)
    if checkpoint is None and config.checkpoint.resume == "must":
        raise ValueError(
            f"checkpoint.resume=must, but {config.checkpoints_place} has no complete checkpoint: check output_dir, or "
            "set checkpoint.resume=auto to start anew where there is none"
        )
    return checkpoint


def _newest(config: TrainConfig) -> Checkpoint | None:
    if config.checkpoint.resume == "never":
        return None
    return next(reversed(scan(config.checkpoints_place)[0]), None)


def keep_run(config: TrainConfig, today: str) -> TrainConfig:
    """Sets the hub's commit, `data.eval_rows` and `data.date` to those that a resumed run began with.

    A new run begins with the commit that the hub has now, and with today's date.
    """
    base: base_identity.Identity | None = None
    before: dict[str, Any] = {}
    with contextlib.suppress(OSError, DamagedError):  # the run itself reports it
        if checkpoint := _newest(config):
            base, before = _identity(checkpoint, base_identity.NAME), flatten(checkpoint.document("config"))
    rows = before.get("data.eval_rows") if config.data.eval_rows is None else config.data.eval_rows
    data = replace(config.data, eval_rows=rows, date=config.data.date or (before["data.date"] if before else today))
    return replace(config, data=data, model=base_identity.pin(config.model, base))


def refuse_early(config: TrainConfig, global_batch: int | None = None, fingerprint: str | None = None) -> None:
    """Raises ValueError as `check_resume`, before the launch; compares the batch and the data once they are known."""
    with contextlib.suppress(OSError, DamagedError):  # the run itself reports it
        if checkpoint := _newest(config):
            _refuse(checkpoint, _problems(checkpoint, config, global_batch, fingerprint))
            if config.optim.max_steps is not None:
                _refuse_end(checkpoint, config, config.optim.max_steps)


def check_resume(
    checkpoint: Checkpoint, config: TrainConfig, global_batch: int, fingerprint: str, total: int, quiet: bool
) -> None:
    """Checks that the run may continue from the checkpoint; prints harmless differences.

    The run has `global_batch` rows per update, data with this fingerprint, and `total` updates.

    Raises:
        ValueError: the run differs from the checkpoint's (the text names all differences), or ends before it.
    """
    _refuse(checkpoint, _problems(checkpoint, config, global_batch, fingerprint))
    _refuse_end(checkpoint, config, total)
    if not quiet:
        before, now = flatten(checkpoint.document("config")), config.flat_values()
        pairs = {name: (now[name], before[name]) for name in changes(before, now)[0]}
        old, new = checkpoint.document("state")["versions"], versions(config)
        pairs |= {name: (new[name], old[name]) for name in new if old.get(name, new[name]) != new[name]}
        differ = "".join(f"; {name} is {after!r}, was {earlier!r}" for name, (after, earlier) in pairs.items())
        print(f"resumed          from step {checkpoint.step}, {checkpoint.path}{differ}", file=sys.stdout, flush=True)


def _refuse_end(checkpoint: Checkpoint, config: TrainConfig, total: int) -> None:
    if checkpoint.step > total:
        name = "optim.max_steps" if config.optim.max_steps is not None else "optim.epochs"
        raise ValueError(
            f"{checkpoint.path} has {checkpoint.step} updates, and {name}={config[name]} asks for {total}: the run is "
            f"past its end. Raise {name} to {checkpoint.step} updates or more, or train a shorter run anew: {ANEW}"
        )


def training_tensors(checkpoint: Checkpoint, select: Select | None = None) -> dict[str, torch.Tensor]:
    """Reads training.safetensors, or the parts of several hosts, as the tensors of `TrainState.to_host`.

    Whole sections may be left out by `select`. Raises DamagedError as `Checkpoint.tensors`.
    """
    if parts := [name.removesuffix(".safetensors") for name in checkpoint.files if name.startswith("training-")]:
        layout = checkpoint.document("layout")
        layout["shapes"] = {name: shape for name, shape in layout["shapes"].items() if select is None or select(name)}
        return joined((checkpoint.tensors(part, select) for part in parts), layout)
    return checkpoint.tensors("training", select)


def weights_of(step: int, config: TrainConfig) -> Tensors:
    """Reads the trained weights of a step, or their average, from its checkpoint; raises ValueError without one."""
    checkpoint = next((each for each in scan(config.checkpoints_place)[0] if each.step == step), None)
    if checkpoint is None:
        raise ValueError(
            f"{config.checkpoints_place} has lost the checkpoint of step {step}, whose weights are the result: put it "
            "back, or set optim.eval_steps=null for the last weights, and run this again"
        )
    section = "average" if config.optim.ema_decay else "parameters"
    return sections(training_tensors(checkpoint, lambda name: name.startswith(f"{section}/")))[section]


def _identity(checkpoint: Checkpoint, name: str) -> base_identity.Identity | None:
    return checkpoint.document(name) if f"{name}.json" in checkpoint.files else None


def _problems(
    checkpoint: Checkpoint, config: TrainConfig, global_batch: int | None, fingerprint: str | None
) -> list[str]:
    """How the run differs in parameters and base weights and, where they are known, in rows per update and data."""
    before, now = flatten(checkpoint.document("config")), config.flat_values()
    problems = [f"{name}: {before[name]!r} there, {now[name]!r} now" for name in changes(before, now)[1]]
    models = ((base_identity.NAME, "base", "model.name", config.model),
              ("teacher", "teacher's", "distill.teacher", config.teacher))  # fmt: skip
    for document, whose, name, model in models:
        identity = base_identity.identify(model) if model else None
        if differ := base_identity.differences(_identity(checkpoint, document), identity):
            problems.append(f"the {whose} weights, {name}={config[name]}: {'; '.join(differ)}")
    state = checkpoint.document("state")
    if global_batch not in (None, rows := state["global_batch_size"]):
        problems.append(f"rows per update (optim.batch_size, passes, replicas): {rows} there, {global_batch} now")
    other_data = fingerprint not in (None, state["fingerprint"])
    if other_data and not any(text.startswith("data.") for text in problems):
        problems.append("the data: other rows, tokens or packing than there, though its parameters are the same")
    return problems


def _refuse(checkpoint: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{checkpoint.path} is of another run:\n  "
            + "\n  ".join(problems)
            + f"\nSet these back, or start anew: {ANEW}"
        )


def versions(config: TrainConfig) -> dict[str, str]:
    """Returns what trains, for the checkpoint: versions of packages, and hashes of the files of own functions."""
    names = ("tpu_kit", "torch", "torch_xla", "transformers", "peft")
    found = {name: version for name in names if (version := installed_version(name))}
    for name in filter(FUNCTION.fullmatch, (config.optim.objective, *config.rl.reward_funcs)):
        if file := getattr(importlib.import_module(name.partition(":")[0]), "__file__", None):
            found[name] = f"code {hashlib.blake2s(Path(file).read_bytes(), digest_size=4).hexdigest()}"
    return found
