"""Which checkpoint a run goes on from, and whether it may."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any

import torch

from tpu_kit import legacy_checkpoint
from tpu_kit.checkpoint import Checkpoints
from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.groups import group
from tpu_kit.identity import ANEW, changes, plain
from tpu_kit.manifest import FORMAT, Checkpoint, DamagedError, scan
from tpu_kit.migration import migrate
from tpu_kit.model import trainable_parameters
from tpu_kit.optimizer import OPTIMIZERS, encode_adamw
from tpu_kit.rooms import find_room
from tpu_kit.step import sections


def find_checkpoint(config: TrainConfig, owned: Checkpoints | None) -> Checkpoint | None:
    """The checkpoint to go on from, or None to start anew.

    Args:
        config: its `checkpoint.resume` says whether.
        owned: the folder, for the process that writes there: it reads all, and sets what is damaged, or not wanted,
            aside. The others come after it.

    Raises:
        ValueError: resume=must, and there is none.
    """
    if config.checkpoint.resume == "never":
        if owned is not None:
            owned.restart()
        return None
    place = config.checkpoints_place
    found = owned.newest() if owned is not None else next(reversed(scan(place)[0]), None)
    if found is None and config.checkpoint.resume == "must":
        raise ValueError(
            f"checkpoint.resume=must, but {place} has no complete checkpoint: check output_dir, or set "
            "checkpoint.resume=auto to start anew where there is none"
        )
    return found


def refuse_early(config: TrainConfig) -> None:
    """Refuses a run whose configuration is not that of the checkpoint it would go on from; before anything is written.

    Only `check_resume` knows the data. What cannot be read is left to it, too.

    Raises:
        ValueError: as `check_resume`.
    """
    if config.checkpoint.resume == "never":
        return
    try:
        found = scan(config.checkpoints_place)[0]
        if not found:
            return
        state, problems = found[-1].document("state"), _other_parameters(found[-1].document("config"), config)
    except (OSError, DamagedError):
        return
    if problems:
        with contextlib.suppress(ValueError):  # of a batch that is "auto" or does not divide
            room = find_room(config)
            if room is not None:
                problems += _other_rows(state, batch_arithmetic(config, room.replicas).global_batch_size)
        _refuse(found[-1], problems)


def check_resume(
    found: Checkpoint, config: TrainConfig, global_batch: int, fingerprint: str, total: int, quiet: bool
) -> None:
    """Makes sure that the run is the one that wrote the checkpoint; prints what differs and does no harm.

    Args:
        found: the checkpoint.
        config: the run that wants to go on.
        global_batch: its rows per update.
        fingerprint: of its data.
        total: its updates.
        quiet: print nothing.

    Raises:
        ValueError: something differs that makes it another run, all of it named; or it is to end before the checkpoint.
    """
    state, stored = found.document("state"), found.document("config")
    problems = [*_other_parameters(stored, config), *_other_rows(state, global_batch)]
    if state["fingerprint"] != fingerprint and not any(problem.startswith("data.") for problem in problems):
        problems.append("the data: other rows, tokens or packing than there, though its parameters are the same")
    _refuse(found, problems)
    if found.step > total:
        raise ValueError(_too_short(found, config, total))
    if not quiet:
        (before, notes), now = migrate(stored), plain(config)
        differ = "".join(f"; {name} is {now[name]!r}, was {before[name]!r}" for name in changes(before, now)[0])
        print(f"resumed          from step {found.step}, {found.path}{differ}", file=sys.stdout, flush=True)
        for note in notes:
            print(f"note: {found.path}: {note}", file=sys.stderr, flush=True)


def training_tensors(found: Checkpoint, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of training.safetensors, as `TrainState.to_host` has them.

    Args:
        found: the checkpoint, of any format that can be read.
        model: of the run, as it was loaded: its layers are not stacked.

    Raises:
        ValueError: they are of another model; or as `Checkpoint.tensors`.
    """
    saved = found.tensors("training")
    if found.format == FORMAT:
        return saved
    optimizer = migrate(found.document("config"))[0]["optim.optimizer"]
    tensors = legacy_checkpoint.convert(saved, model, optimizer)
    if optimizer == "adamw8bit":  # in other blocks since then
        stored, kept = sections(tensors), OPTIMIZERS[optimizer]
        for one in group(trainable_parameters(model), {}, kept.block):
            moments = encode_adamw(stored["moments/first"], stored["moments/second"], one)
            for name, kinds in kept.split(moments, one).items():
                tensors |= {f"moments/{kind}/{name}": tensor for kind, tensor in kinds.items()}
    return tensors


def _other_parameters(stored: Mapping[str, Any], config: TrainConfig) -> list[str]:
    before, now = migrate(stored)[0], plain(config)
    return [f"{name}: {before[name]!r} there, {now[name]!r} now" for name in changes(before, now)[1]]


def _other_rows(state: Mapping[str, Any], now: int) -> list[str]:
    before = state["global_batch_size"]
    return [f"rows per update: {before} there, {now} now"] if before != now else []


def _refuse(found: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{found.path} is of another run:\n  " + "\n  ".join(problems) + f"\nSet these back, or start anew: {ANEW}"
        )


def _too_short(found: Checkpoint, config: TrainConfig, total: int) -> str:
    """What to do where a run has made more updates than it is asked for now."""
    name = "optim.max_steps" if config.optim.max_steps is not None else "optim.epochs"
    text = (
        f"{found.path} has {found.step} updates, and {name}={config[name]} asks for {total}: the run is past its end. "
        f"Raise {name} to {found.step} updates or more, or train a shorter run anew: another output_dir, or "
        "checkpoint.resume=never (which moves the old checkpoints aside)"
    )
    kept = next((one for one in scan(config.checkpoints_place)[0] if one.step == total), None)
    return text if kept is None else f"{text}. The adapter as it was after {total} updates is in {kept.path}"


def versions() -> dict[str, str]:
    """Versions of what trains, for the checkpoint."""
    found = {}
    for name in ("tpu_kit", "torch", "torch_xla", "transformers", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
