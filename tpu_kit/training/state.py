"""The state of training: parameters, the optimizer's moments, their average and the sums for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from typing import Any

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.config.mesh import Spec
from tpu_kit.distributed.mesh import current_mesh
from tpu_kit.distributed.runtime import Runtime
from tpu_kit.models import causal_lm as models
from tpu_kit.models import partition
from tpu_kit.models.layer_scan import restacked, stacked_names, stacked_prefixes, unstacked
from tpu_kit.training.optimizer import OPTIMIZERS, Group, Moments, Slot, group_parameters, join_moments, split_moments
from tpu_kit.xla.sharding import constrain

SCALARS = ("applied", "usual", "streak", "window")
# The sums in `TrainState.window`.
WINDOW = ("loss_sum", "tokens", "grad_norm_sum", "skipped", "first_skipped_step")


class TrainState:
    """The state of training on the device.

    Moments, gradients and the average have one tensor for each group of parameters (`optimizer.Group`). On the host and
    in a checkpoint they have one for each parameter of each layer, independent of stacks and groups.

    Attributes:
        parameters: the trained parameters by name, fp32.
        stacks: as `layer_scan.stacked_names` returns them.
        optimizer: from `optimizer.OPTIMIZERS`.
        groups: the groups in which parameters are updated.
        moments: of the optimizer, by key and number of the group; see `optimizer.Moments`.
        average: exponential moving average of the parameters, by number of the group, or None.
        applied: () number of applied updates, skipped ones excluded.
        usual: () running mean of the loss per token, to detect an exploding loss.
        streak: () consecutive skipped updates.
        window: (5 + N,) sums since `window_open` was 0: those of `WINDOW`, then the N extra sums of the objective.
        report: (7 + N,) copy of window, usual and streak for the host. Each step makes a new tensor, so that the host
            can read the old one while the next step runs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        optim: OptimConfig,
        saved: Mapping[str, torch.Tensor] | None = None,
        extra_sums: int = 0,
    ) -> None:
        """Creates a new state, or restores one from tensors of `to_host`; `restore` sets the model's own parameters."""
        self.parameters = models.trainable_parameters(model)
        wrong = [name for name, parameter in self.parameters.items() if parameter.dtype != torch.float32]
        assert not wrong, f"trained in other than fp32: {wrong[:3]}"
        self.stacks, self.tied = stacked_names(model), current_mesh() is not None and partition.is_tied(model)
        self.optimizer = OPTIMIZERS[optim.optimizer]
        self.groups = group_parameters(self.parameters, self.stacks)
        # Zeros made on XLA would be constants of the first program, and the second step would compile again.
        zeros = {name: torch.zeros(len(WINDOW) + extra_sums if name == "window" else ()) for name in SCALARS}
        before = None if saved is None else sections(saved)
        self.moments: Moments = {
            f"{name}.{number}": partition.move(moment, device, self.spec(group, moment), copy=saved is not None)
            for number, group in enumerate(self.groups)
            for name, moment in self._start(group, before).items()
        }
        start = zeros if saved is None else saved
        self.applied, self.usual, self.streak, self.window = (partition.move(start[name], device) for name in zeros)
        self.report = self.window
        self.average = None
        if optim.ema_decay:
            now: Mapping[str, torch.Tensor] = self.parameters
            if before is not None and "average" in before:
                now = {name: restacked(self.stacks, before["average"], name) for name in self.parameters}
            parts = [(group, group.join(now).detach()) for group in self.groups]
            copies = [partition.move(part, device, self.spec(group, part), copy=True) for group, part in parts]
            self.average = dict(enumerate(copies))

    def _start(self, group: Group, saved: Mapping[str, Mapping[str, torch.Tensor]] | None) -> Moments:
        """Returns a group's moments on the host: zeros, or the saved ones."""
        zeros = self.optimizer.start(group)
        if saved is None:
            return zeros
        return join_moments(zeros, group, lambda kind, name: restacked(self.stacks, saved[f"moments/{kind}"], name))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the state on the device, by section and name; moments and the average by group."""
        found = {name: getattr(self, name) for name in SCALARS}
        found |= {f"moments/{name}": moment for name, moment in self.moments.items()}
        found |= {f"average/{number}": part for number, part in (self.average or {}).items()}
        return found | {f"parameters/{name}": parameter for name, parameter in self.parameters.items()}

    def to_host(self, runtime: Runtime) -> dict[str, torch.Tensor]:
        """Copies the state to CPU tensors.

        Returns:
            For each unstacked parameter of each layer "parameters/NAME", "average/NAME" if there is an average, and
            "moments/KIND/NAME"; and applied, usual, streak and window.
        """
        tensors = self.tensors()
        values = dict(zip(tensors, runtime.to_host(list(tensors.values())), strict=True))
        return stored(values, self.groups)

    def part(self, runtime: Runtime) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Copies the shards that this host saves to the CPU.

        Returns:
            The shards, by the name in `tensors` and the box, such as "parameters/NAME@0:4,8:16"; and the layout for
            `joined`, of values for JSON.
        """
        tensors = self.tensors()
        shards = {
            f"{name}@{','.join(f'{part.start}:{part.stop}' for part in box)}": piece
            for name, pieces in zip(tensors, runtime.pieces(list(tensors.values())), strict=True)
            for box, piece in pieces
        }
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        groups = [[group.alone, {name: asdict(slot) for name, slot in group.slots.items()}] for group in self.groups]
        return shards, {"shapes": shapes, "groups": groups}

    def spec(self, group: Group, tensor: torch.Tensor) -> Spec:
        """How a group's tensor is sharded on a mesh: as its parameter, if it has its shape; else it is not sharded."""
        name = next(iter(group.slots))
        if group.alone and tensor.shape == group.shape:
            return partition.spec_of(name, self.parameters[name], name in self.stacks, self.tied)
        return (None,) * tensor.ndim

    def pinned(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        """Shards a gradient or a new value of a group as its parameter; the compiler would choose another sharding."""
        return constrain(tensor, self.spec(group, tensor))

    def specs(self, model: torch.nn.Module) -> dict[str, Spec]:
        """How all tensors of the model and of this state are sharded: by name in the model, or "moments.first.0"."""
        stacks = tuple(stacked_prefixes(model))
        found = {
            name: partition.spec_of(name, tensor, name.startswith(stacks), self.tied)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        for number, group in enumerate(self.groups):
            for name, moment in of_group(self.moments, number).items():
                found[f"moments.{name}.{number}"] = self.spec(group, moment)
            if self.average is not None:
                found[f"average.{number}"] = self.spec(group, self.average[number])
        return found

    def named(self, joined: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Splits one tensor for each group into tensors by name, in the parameters' shapes."""
        return {
            name: part
            for group, each in zip(self.groups, joined, strict=True)
            for name, part in group.split(each).items()
        }

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Makes the model use the average instead of the parameters. Swaps references and computes nothing."""
        if self.average is None:
            yield
            return
        current = {name: parameter.data for name, parameter in self.parameters.items()}
        for name, part in self.named(self.average.values()).items():
            self.parameters[name].data = part
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                parameter.data = current[name]


def stored(values: Mapping[str, torch.Tensor], groups: Sequence[Group]) -> dict[str, torch.Tensor]:
    """Makes what `TrainState.to_host` returns of CPU copies of `TrainState.tensors`, or of some sections of them."""
    given, found = sections(values), {name: values[name] for name in SCALARS if name in values}
    kept = {name: given[name] for name in ("parameters",) if name in given}
    for number, group in enumerate(groups):
        if "average" in given:
            kept.setdefault("average", {}).update(group.split(given["average"][str(number)]))
        for kind, moments in split_moments(of_group(given.get("moments", {}), number), group).items():
            kept.setdefault(f"moments/{kind}", {}).update(moments)
    stacks = {name: list(slot.names) for group in groups for name, slot in group.slots.items() if slot.stacked}
    for section, named in kept.items():
        found |= {f"{section}/{name}": tensor for name, tensor in unstacked(stacks, named).items()}
    return found


def joined(parts: Iterable[Mapping[str, torch.Tensor]], layout: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Makes what `TrainState.to_host` returns of the shards of all hosts; raises ValueError if some are missing."""
    shapes, whole, filled = layout["shapes"], dict[str, torch.Tensor](), Counter[str]()
    for part in parts:
        for key, piece in part.items():
            name, _, text = key.rpartition("@")
            box = tuple(slice(*map(int, place.split(":"))) for place in text.split(",") if place)
            if name not in whole:
                whole[name] = torch.empty(shapes[name], dtype=piece.dtype)
            whole[name][box] = piece
            filled[name] += piece.numel()
    if lacking := [name for name, shape in shapes.items() if filled[name] != prod(shape)]:
        raise ValueError(f"the parts of the checkpoint lack shards of {len(lacking)} tensors, such as {lacking[0]}")
    groups = [
        Group({name: Slot(**{**slot, "shape": torch.Size(slot["shape"])}) for name, slot in slots.items()}, alone)
        for alone, slots in layout["groups"]
    ]
    return stored(whole, groups)


def sections(saved: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Groups the tensors of `TrainState.to_host` by section ("parameters", "moments/first") and name."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in saved.items():
        section, _, name = key.rpartition("/")
        found.setdefault(section, {})[name] = tensor
    return found


def restore(model: torch.nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    """Sets the parameters of a model on the CPU to those of `TrainState.to_host`; raises ValueError if they differ."""
    parameters, stacks, there = models.trainable_parameters(model), stacked_names(model), sections(saved)["parameters"]
    wanted = {name: tensor.shape for name, tensor in unstacked(stacks, parameters).items()}
    found = {name: tensor.shape for name, tensor in there.items()}
    if differ := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        shapes = [tuple(named[differ[0]]) if differ[0] in named else "none" for named in (found, wanted)]
        raise ValueError(
            f"the checkpoint's weights do not fit this model: {len(differ)} of {len(wanted)} differ, such as "
            f"{differ[0]}: {shapes[0]} there, {shapes[1]} now. Use the model of the run, and the versions of "
            "transformers and peft that state.json in the checkpoint names"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            if current_mesh() is None:
                parameter.copy_(restacked(stacks, there, name))
            else:  # which may be mapped from a file, in bf16
                parameter.data = restacked(stacks, there, name)


def of_group(moments: Moments, number: int) -> Moments:
    """Returns the moments of one group, by key without the group's number."""
    return {name.rpartition(".")[0]: moment for name, moment in moments.items() if name.endswith(f".{number}")}
