"""Selects the checkpoint that a run continues from, checks that it may, and reads checkpoints of format 2.

The second part has all knowledge of format 2, in which each tensor was a vector of many parameters:

- parameters, average, best: one vector each, of all trained parameters in the model's order.
- stacked: number of parameters that were stacks of layers' parameters, (G, ...); 0 without a loop over layers.
- first.0, second.1, ...: moments, by number of the group. The first group was a vector of all parameters with less than
  2**24 numbers, if there were any; each larger parameter was a group of its own, in its own shape.
- applied, usual, streak, window: as in the present format; see `state.TrainState`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from tpu_kit.checkpointing.manager import CheckpointManager, scan
from tpu_kit.checkpointing.manifest import FORMAT, Checkpoint, DamagedError, Keep, every
from tpu_kit.config.loader import ANEW, TrainConfig, batch_arithmetic, changes, migrate, plain
from tpu_kit.distributed.hosts import ONE, Hosts
from tpu_kit.distributed.runtime import device_memory_budget
from tpu_kit.models import base_identity
from tpu_kit.models.architecture import spans
from tpu_kit.models.causal_lm import trainable_parameters
from tpu_kit.training.optimizer import OPTIMIZERS, encode_adamw, group
from tpu_kit.training.state import SCALARS, joined, sections

Tensors = dict[str, torch.Tensor]

_ALONE = 2**24


def find_checkpoint(config: TrainConfig, owned: CheckpointManager | None) -> Checkpoint | None:
    """Returns the checkpoint to continue from, or None to start a new run.

    Args:
        config: the run, with `checkpoint.resume`.
        owned: the manager in the process that writes checkpoints, which moves damaged and unwanted ones aside; None in
            the other processes, which call this function later.

    Raises:
        ValueError: checkpoint.resume=must, and there is no checkpoint.
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


def keep_run(config: TrainConfig, today: str) -> TrainConfig:
    """Sets what the run began with where it continues from a checkpoint: the hub's commit, `data.eval_rows`, `date`.

    A new run begins with the commit that the hub has now, and with today's date. Given rows and dates are kept.
    """
    found, base = None, None
    before: dict[str, Any] = {"data.date": None}
    if config.checkpoint.resume != "never":
        with contextlib.suppress(OSError, DamagedError):  # the run itself reports it
            found = next(reversed(scan(config.checkpoints_place)[0]), None)
            base = _base(found) if found else None
            before |= migrate(found.document("config"))[0] if found else {}
    rows = before.get("data.eval_rows") if config.data.eval_rows is None else config.data.eval_rows
    data = replace(config.data, eval_rows=rows, date=config.data.date or (before["data.date"] if found else today))
    return replace(config, data=data, model=base_identity.pin(config.model, base))


def refuse_early(config: TrainConfig, hosts: Hosts = ONE) -> None:
    """Refuses a run whose configuration differs from its checkpoint's, before the run writes anything.

    `check_resume` also compares the data, and reports unreadable checkpoints.

    Raises:
        ValueError: see `check_resume`.
    """
    if config.checkpoint.resume == "never":
        return
    try:
        found = scan(config.checkpoints_place)[0]
        if not found:
            return
        state = found[-1].document("state")
        problems = [*_other_parameters(found[-1].document("config"), config), *_other_base(found[-1], config)]
    except (OSError, DamagedError):
        return
    if problems:
        with contextlib.suppress(ValueError):  # batch_size is "auto", or the batch does not divide
            room = device_memory_budget(config, hosts=hosts)
            if room is not None:
                problems += _other_rows(state, batch_arithmetic(config, room.replicas).global_batch_size)
        _refuse(found[-1], problems)


def check_resume(
    found: Checkpoint, config: TrainConfig, global_batch: int, fingerprint: str, total: int, quiet: bool
) -> None:
    """Checks that the run may continue from the checkpoint; prints harmless differences.

    Args:
        found: the checkpoint.
        config: the run.
        global_batch: its rows per update.
        fingerprint: of its data.
        total: its updates.
        quiet: print nothing.

    Raises:
        ValueError: the run differs from the checkpoint's (the text names all differences), or ends before it.
    """
    state, stored = found.document("state"), found.document("config")
    problems = [*_other_parameters(stored, config), *_other_base(found, config), *_other_rows(state, global_batch)]
    if state["fingerprint"] != fingerprint and not any(problem.startswith("data.") for problem in problems):
        problems.append("the data: other rows, tokens or packing than there, though its parameters are the same")
    _refuse(found, problems)
    if found.step > total:
        raise ValueError(_too_short(found, config, total))
    if not quiet:
        (before, notes), now = migrate(stored), plain(config)
        differ = "".join(f"; {name} is {now[name]!r}, was {before[name]!r}" for name in changes(before, now)[0])
        print(f"resumed          from step {found.step}, {found.path}{differ}", file=sys.stdout, flush=True)
        if _base(found) is None:
            notes = [*notes, "it does not say with which base weights the run began; they are not compared"]
        for note in notes:
            print(f"note: {found.path}: {note}", file=sys.stderr, flush=True)


def training_tensors(found: Checkpoint, model: torch.nn.Module, keep: Keep = every) -> dict[str, torch.Tensor]:
    """Reads training.safetensors, or the parts of several hosts, as the tensors of `TrainState.to_host`.

    Args:
        found: the checkpoint, of any readable format.
        model: of the run, without stacks.
        keep: whole sections to read; format 2 has none.

    Raises:
        ValueError: the tensors do not fit the model; or see `Checkpoint.tensors`.
    """
    optimizer = migrate(found.document("config"))[0]["optim.optimizer"]
    if parts := [name.removesuffix(".safetensors") for name in found.files if name.startswith("training-")]:
        layout = found.document("layout")
        layout["shapes"] = {name: shape for name, shape in layout["shapes"].items() if keep(name)}
        return joined((found.tensors(part, keep) for part in parts), layout, OPTIMIZERS[optimizer])
    saved = found.tensors("training", keep if found.format == FORMAT else every)
    if found.format == FORMAT:
        return saved
    tensors = convert(saved, model, optimizer)
    if optimizer == "adamw8bit":  # format 2 had other blocks
        stored, kept = sections(tensors), OPTIMIZERS[optimizer]
        for one in group(trainable_parameters(model), {}, kept.block):
            moments = encode_adamw(stored["moments/first"], stored["moments/second"], one)
            for name, kinds in kept.split(moments, one).items():
                tensors |= {f"moments/{kind}/{name}": tensor for kind, tensor in kinds.items()}
    return tensors


def weights_of(step: int, config: TrainConfig, model: torch.nn.Module) -> Tensors:
    """Reads the trained weights of a step from its checkpoint: the average where there is one.

    Raises:
        ValueError: there is no checkpoint of this step.
    """
    found = next((one for one in scan(config.checkpoints_place)[0] if one.step == step), None)
    if found is None:
        raise ValueError(f"{config.checkpoints_place} has lost the checkpoint of step {step}, whose weights are wanted")
    section = "average" if config.optim.ema_decay else "parameters"
    return sections(training_tensors(found, model, lambda name: name.startswith(f"{section}/")))[section]


def _other_parameters(stored: Mapping[str, Any], config: TrainConfig) -> list[str]:
    before, now = migrate(stored)[0], plain(config)
    return [f"{name}: {before[name]!r} there, {now[name]!r} now" for name in changes(before, now)[1]]


def _base(found: Checkpoint) -> base_identity.Identity | None:
    known = f"{base_identity.NAME}.json" in found.files
    return found.document(base_identity.NAME) if known else None


def _other_base(found: Checkpoint, config: TrainConfig) -> list[str]:
    differ = base_identity.differences(_base(found), base_identity.identify(config.model))
    return [f"the base weights, model.name={config.model.name}: {'; '.join(differ)}"] if differ else []


def _other_rows(state: Mapping[str, Any], now: int) -> list[str]:
    before = state["global_batch_size"]
    return [f"rows per update: {before} there, {now} now"] if before != now else []


def _refuse(found: Checkpoint, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"{found.path} is of another run:\n  " + "\n  ".join(problems) + f"\nSet these back, or start anew: {ANEW}"
        )


def _too_short(found: Checkpoint, config: TrainConfig, total: int) -> str:
    """Explains that a checkpoint has more updates than the run."""
    name = "optim.max_steps" if config.optim.max_steps is not None else "optim.epochs"
    text = (
        f"{found.path} has {found.step} updates, and {name}={config[name]} asks for {total}: the run is past its end. "
        f"Raise {name} to {found.step} updates or more, or train a shorter run anew: another output_dir, or "
        "checkpoint.resume=never (which moves the old checkpoints aside)"
    )
    kept = next((one for one in scan(config.checkpoints_place)[0] if one.step == total), None)
    return text if kept is None else f"{text}. The adapter as it was after {total} updates is in {kept.path}"


def versions() -> dict[str, str]:
    """Returns the versions of the installed packages that train, for the checkpoint."""
    found = {}
    for name in ("tpu_kit", "torch", "torch_xla", "transformers", "peft"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --------------------------------------------------------------------------------------------- checkpoints of format 2


@dataclass(frozen=True)
class _Parameter:
    """A trained parameter of format 2.

    Attributes:
        names: of the layers' parameters in a stack; else its own name.
        shape: (G, ...) of a stack.
        stacked: whether it was a stack.
    """

    names: list[str]
    shape: tuple[int, ...]
    stacked: bool

    @property
    def matrix(self) -> bool:
        return len(self.shape) - self.stacked > 1

    @property
    def turned(self) -> bool:
        """Whether its last two axes were swapped in a vector."""
        return len(self.shape) > 1 and self.shape[-1] < 128 <= self.shape[-2]

    def laid(self) -> tuple[int, ...]:
        """Returns its shape in a vector."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape

    def take(self, part: torch.Tensor) -> torch.Tensor:
        """Returns a part of a vector in the parameter's shape."""
        return part.view(self.laid()).mT if self.turned else part.view(self.shape)

    def layers(self, tensor: torch.Tensor) -> Tensors:
        """Splits a tensor of a stack by the names of the layers' parameters."""
        return dict(zip(self.names, tensor.unbind() if self.stacked else [tensor], strict=True))


def convert(saved: Mapping[str, torch.Tensor], model: Any, optimizer: str) -> Tensors:
    """Converts the tensors of a checkpoint of format 2 to those of `TrainState.to_host`.

    It decodes the moments of adamw8bit to fp32, as moments/first and moments/second.

    Args:
        saved: the tensors of training.safetensors.
        model: the trained model, without stacks.
        optimizer: of the run.

    Raises:
        ValueError: the tensors do not fit the model.
    """
    count = int(saved["stacked"]) if "stacked" in saved else 0
    parameters = list(_stacked(model) if count else _parameters(model.named_parameters()))
    sizes = [prod(one.shape) for one in parameters]
    if sum(sizes) != len(saved["parameters"]) or sum(one.stacked for one in parameters) != count:
        raise ValueError(
            f"the checkpoint's weights do not fit this model: it has {len(saved['parameters']):,} numbers in "
            f"{count} stacks of layers, and the model {sum(sizes):,} in {sum(one.stacked for one in parameters)}. Use "
            "the model of the run, and the version of transformers that state.json in the checkpoint names"
        )
    found: Tensors = {name: saved[name] for name in SCALARS}
    for section in ("parameters", "average", "best"):
        if section in saved:
            for one, part in zip(parameters, saved[section].split(sizes), strict=True):
                found |= {f"{section}/{name}": tensor for name, tensor in one.layers(one.take(part)).items()}
    small = [one for one in parameters if prod(one.shape) < _ALONE]
    groups = ([small] if small else []) + [[one] for one in parameters if prod(one.shape) >= _ALONE]
    for number, parts in enumerate(groups):
        alone = prod(parts[0].shape) >= _ALONE
        moments = {name.partition(".")[0]: part for name, part in saved.items() if name.endswith(f".{number}")}
        read = _adafactor if optimizer == "adafactor" else _adam
        for one, kinds in zip(parts, read(moments, parts, alone), strict=True):
            for kind, tensor in kinds.items():
                found |= {f"moments/{kind}/{name}": part for name, part in one.layers(tensor).items()}
    return found


def _adam(moments: Tensors, group: list[_Parameter], alone: bool) -> Iterator[Tensors]:
    if "root_second" in moments:  # adamw8bit
        count = sum(prod(one.shape) for one in group)
        root = _decoded(moments, "root_second")[:count]
        moments = {"first": _decoded(moments, "first")[:count], "second": root * root}
    sizes = [prod(one.shape) for one in group]
    parts = {kind: moment.flatten().split(sizes) for kind, moment in moments.items()}
    for place, one in enumerate(group):
        yield {kind: part[place].view(one.shape) if alone else one.take(part[place]) for kind, part in parts.items()}


def _decoded(moments: Tensors, name: str) -> torch.Tensor:
    """Decodes blocks of 256 values with a scale each: 127 levels of the root of value / scale, with its sign."""
    codes = moments[name].to(torch.float32)
    return (codes * codes.abs() * (moments[f"{name}_scale"] / 127**2)).flatten()


def _adafactor(moments: Tensors, group: list[_Parameter], alone: bool) -> Iterator[Tensors]:
    """Splits Adafactor's moments: means of squares over columns and over rows for matrices, squares for vectors."""
    used = dict.fromkeys(moments, 0)

    def take(kind: str, shape: Sequence[int]) -> torch.Tensor:
        start, used[kind] = used[kind], used[kind] + prod(shape)
        return moments[kind][start : used[kind]].view(*shape)

    for one in group:
        if not one.matrix:
            yield {"second": one.take(take("vectors", [prod(one.shape)]))}
            continue
        laid = one.shape if alone else one.laid()
        rows, columns = take("rows", laid[:-1]), take("columns", (*laid[:-2], laid[-1]))
        turned = one.turned and not alone
        yield {"rows": columns, "columns": rows} if turned else {"rows": rows, "columns": columns}


def _parameters(named: Iterator[tuple[str, torch.nn.Parameter]]) -> Iterator[_Parameter]:
    return (_Parameter([name], tuple(one.shape), False) for name, one in named if one.requires_grad)


def _stacked(model: Any) -> Iterator[_Parameter]:
    """Yields the trained parameters in the model's order, with the stacks of each run in place of the layers."""
    decoder = model.get_decoder()
    start = next(f"{name}." for name, part in model.named_modules() if part is decoder.layers)
    placed = False
    for name, parameter in model.named_parameters():
        if not name.startswith(start):
            yield from _parameters(iter([(name, parameter)]))
        elif not placed:
            placed = True
            yield from _runs(decoder, start)


def _runs(decoder: Any, start: str) -> Iterator[_Parameter]:
    layers = list(decoder.layers)
    kinds = getattr(decoder.config, "layer_types", None) or [None] * len(layers)
    keys = [
        (kind, [(name, one.shape, one.dtype, one.requires_grad) for name, one in layer.named_parameters()])
        for kind, layer in zip(kinds, layers, strict=True)
    ]
    first = 0
    for period, turns in spans(keys):
        end = first + period * turns
        for offset in range(first, first + period):
            for name, one in layers[offset].named_parameters():
                if one.requires_grad:
                    names = [f"{start}{place}.{name}" for place in range(offset, end, period)]
                    yield _Parameter(names, (turns, *one.shape), True)
        first = end
