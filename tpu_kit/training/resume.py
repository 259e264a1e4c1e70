"""Selects the checkpoint that a run continues from, and checks that it may."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tpu_kit.config.choices import FUNCTION
from tpu_kit.config.resuming import ANEW, changes
from tpu_kit.config.schema import TrainConfig, flatten
from tpu_kit.data.prepare import Prepared
from tpu_kit.machine.compatibility import installed_version
from tpu_kit.machine.storage.local_folder import open_folder
from tpu_kit.machine.storage.object_store import parent
from tpu_kit.model import base_identity
from tpu_kit.training.checkpoint.layout import lies_around
from tpu_kit.training.checkpoint.manager import CheckpointManager, not_empty, remains, scan
from tpu_kit.training.checkpoint.manifest import Checkpoint, DamagedError, Select
from tpu_kit.training.state import joined, sections

Tensors = dict[str, torch.Tensor]

TEACHER, START = "teacher", "start"
"""Documents of a checkpoint with the identities of `distill.teacher` and `lora.adapter`."""
_ROWS = ("data.source", "data.eval_source")


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


def refuse_early(config: TrainConfig, global_batch: int | None = None, prepared: Prepared | None = None) -> None:
    """Raises ValueError as `check_resume`, before the launch; compares the batch and the data once they are known.

    Where the run would start anew, nothing of another run may lie in its folder.
    """
    with contextlib.suppress(OSError, DamagedError):  # the run itself reports it
        if checkpoint := _newest(config):
            _refuse(checkpoint, _compare(checkpoint, config, global_batch, prepared)[0])
            if config.optim.max_steps is not None:
                _refuse_end(checkpoint, config, config.optim.max_steps)
        elif config.checkpoint.resume != "never":
            place = config.checkpoints_place
            if found := remains(place) + lies_around(open_folder(parent(place))):
                raise not_empty(place, found)


def check_resume(
    checkpoint: Checkpoint, config: TrainConfig, global_batch: int, prepared: Prepared, total: int, quiet: bool
) -> None:
    """Checks that the run may continue from the checkpoint; prints harmless differences.

    The run has `global_batch` rows per update, this data, and `total` updates.

    Raises:
        ValueError: the run differs from the checkpoint's (the text names all differences), or ends before it.
    """
    problems, moved = _compare(checkpoint, config, global_batch, prepared)
    _refuse(checkpoint, problems)
    _refuse_end(checkpoint, config, total)
    if not quiet:
        for name, (earlier, after) in moved.items():
            print(f"moved            {name}: {earlier} -> {after}, same content", flush=True)
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


def _compare(
    checkpoint: Checkpoint, config: TrainConfig, global_batch: int | None, prepared: Prepared | None
) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Compares parameters and weights and, where they are known, rows per update and data.

    Of rows and weights the content counts, not where they are.

    Returns:
        How the run differs, and the parameters that name another place with the same content: before and now.
    """
    before, now = flatten(checkpoint.document("config")), config.flat_values()
    state, moved = checkpoint.document("state"), dict[str, tuple[str, str]]()
    differ = {name: f"{name}: {before[name]!r} there, {now[name]!r} now" for name in changes(before, now)[1]}
    for document, whose, name in _WEIGHTS:
        # Updates no longer depend on the adapter that training started from; another name must be another name for it.
        identity = identity_of(document, config) if document != START or name in differ else None
        began = _identity(checkpoint, document)
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
        same = prepared is not None and rows_digest(prepared) == state["rows_digest"]
        moved |= {name: (before[name], now[name]) for name in rows if same}
        for name in rows if same or prepared is None else ():  # once they are read
            del differ[name]
    if global_batch not in (None, rows_there := state["global_batch_size"]):
        differ["rows"] = f"rows per update (optim.batch_size, passes, replicas): {rows_there} there, {global_batch} now"
    other_data = prepared is not None and prepared.fingerprint != state["fingerprint"]
    if other_data and not any(name.startswith("data.") for name in differ):
        differ["data"] = "the data: other rows, tokens or packing than there, though its parameters are the same"
    return [*differ.values()], moved


_WEIGHTS = ((base_identity.NAME, "base", "model.name"), (TEACHER, "teacher's", "distill.teacher"),
            (START, "start's", "lora.adapter"))  # fmt: skip


def identity_of(document: str, config: TrainConfig) -> base_identity.Identity | None:
    """Returns the identity of the base, the teacher or the adapter that training starts from; None without one."""
    if document == START:
        return base_identity.identify_adapter(config.lora.adapter) if config.lora.adapter else None
    model = config.teacher if document == TEACHER else config.model
    return base_identity.identify(model) if model else None


def rows_digest(prepared: Prepared) -> str:
    """Returns a hash of all rows: trained on, held out, and answered in reinforcement learning."""
    held = prepared.eval.fingerprint() if prepared.eval else ""
    asked = prepared.tasks.rows.rows if prepared.tasks else []
    rows = json.dumps([prepared.eval_rows, asked], sort_keys=True, default=str)
    return hashlib.blake2b(f"{prepared.fingerprint} {held} {rows}".encode(), digest_size=16).hexdigest()


def _refuse(checkpoint: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{checkpoint.path} is of another run:\n  "
            + "\n  ".join(problems)
            + f"\nSet these back, or start anew: {ANEW}"
        )


def versions(config: TrainConfig) -> dict[str, str]:
    """Returns what trains, for the checkpoint: versions of packages, and hashes of the code of own functions."""
    names = ("tpu_kit", "torch", "torch_xla", "transformers", "peft")
    found = {name: version for name in names if (version := installed_version(name))}
    for name in filter(FUNCTION.fullmatch, (config.optim.objective, *config.rl.reward_funcs)):
        if name.startswith("__main__:"):
            continue  # of a notebook's cell: no file
        if code := _own_code(importlib.import_module(name.partition(":")[0])):
            found[name] = f"code {hashlib.blake2s(code, digest_size=4).hexdigest()}"
    return found


def _own_code(module: ModuleType) -> bytes:
    """Returns the files of a module and of those beside it, or of its package, that it imports, one after the other."""
    package, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    if file is None:
        return b""
    folder = Path(file).parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]
    files: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        file = getattr(one, "__file__", None)
        beside = file is not None and Path(file).is_relative_to(folder) and "site-packages" not in Path(file).parts
        if file is None or one.__name__ in files or not (beside or one.__name__.partition(".")[0] == package):
            continue
        files[one.__name__] = Path(file).read_bytes()
        for value in [sys.modules.get(one.__name__.rpartition(".")[0]), *vars(one).values()]:
            of = getattr(value, "__module__", None)
            imported = value if isinstance(value, ModuleType) else sys.modules.get(of) if isinstance(of, str) else None
            waiting += [imported] if isinstance(imported, ModuleType) else []
    return b"".join(files[name] for name in sorted(files))
