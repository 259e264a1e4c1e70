"""Optimizers as functions of fp32 tensors, which XLA compiles into the training step.

PyTorch's optimizers keep the step count on the host. XLA would then compile a new program for each step (Adafactor) or
for one late step (AdamW, when the bias correction becomes exactly 1).

Small parameters are updated as one vector, so that hundreds of adapter matrices have few operations to trace and few
gradients to reduce. Large ones keep their shape: a TPU stores vectors in another layout than matrices, so a vector of
all gradients would need two more copies of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.distributed.mesh import current_mesh
from tpu_kit.models.architecture import ALONE


@dataclass(frozen=True)
class Slot:
    """The layout of a parameter, or of a tensor of its shape, in a vector.

    Attributes:
        shape: of the parameter, (G, ...) of a stack.
        names: of the layers' parameters in a stack; else its own name.
        stacked: whether it is a stack of layers' parameters.
        transposed: whether its last two axes are swapped in the vector; see `_is_transposed`.
    """

    shape: torch.Size
    names: Sequence[str]
    stacked: bool
    transposed: bool

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix or a stack of matrices, but not a stack of vectors."""
        return len(self.shape) - self.stacked > 1

    @property
    def vector_shape(self) -> torch.Size:
        """Its shape in the vector; scalars and stacks of scalars get rows of one number."""
        if self.transposed:
            return torch.Size([*self.shape[:-2], self.shape[-1], self.shape[-2]])
        return self.shape if len(self.shape) > self.stacked else torch.Size([*self.shape, 1])

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a vector of a tensor in the parameter's shape."""
        return (tensor.mT if self.transposed else tensor).reshape(-1)

    def unflatten(self, vector: torch.Tensor) -> torch.Tensor:
        """Inverts `flatten`."""
        return vector.reshape(self.vector_shape).mT if self.transposed else vector.reshape(self.shape)


@dataclass(frozen=True)
class Group:
    """Parameters that are updated as one tensor.

    Attributes:
        slots: the layouts of the parameters, by name.
        alone: whether it is a single parameter in its own shape.
    """

    slots: Mapping[str, Slot]
    alone: bool

    def join(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Joins tensors in the parameters' shapes into one tensor."""
        if self.alone:
            return named[next(iter(self.slots))]
        return torch.cat([slot.flatten(named[name]) for name, slot in self.slots.items()])

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inverts `join`."""
        if self.alone:
            return dict.fromkeys(self.slots, joined)
        parts = joined.split([slot.shape.numel() for slot in self.slots.values()])
        return {name: slot.unflatten(part) for (name, slot), part in zip(self.slots.items(), parts, strict=True)}

    @property
    def shape(self) -> torch.Size:
        """The shape of the result of `join`."""
        slots = list(self.slots.values())
        return slots[0].shape if self.alone else torch.Size([sum(slot.shape.numel() for slot in slots)])


def group_parameters(parameters: Mapping[str, torch.Tensor], stacks: Mapping[str, Sequence[str]]) -> list[Group]:
    """Groups the trained parameters: the small ones together, if there are any, then each large one.

    `stacks` has the names of the slices of each stack of layers' parameters.
    """
    slots, together = {}, current_mesh() is None  # a vector of several matrices could not be sharded as they are
    for name, parameter in parameters.items():
        matrix = parameter.ndim - (name in stacks) > 1
        transposed = matrix and together and parameter.numel() < ALONE and _is_transposed(parameter)
        slots[name] = Slot(parameter.shape, stacks.get(name, [name]), name in stacks, transposed)
    small = {name: slot for name, slot in slots.items() if slot.shape.numel() < ALONE and (together or not slot.matrix)}
    large = {name: slot for name, slot in slots.items() if name not in small}
    assert all(slot.matrix for slot in large.values()), "a vector of 64 MiB"
    joined = [Group(small, alone=False)] if small else []
    return joined + [Group({name: slot}, alone=True) for name, slot in large.items()]


def _is_transposed(matrix: torch.Tensor) -> bool:
    """Whether to swap the axes of a matrix in a vector: if its rows are short and its columns long.

    A TPU converts between a vector and (8192, 16) through rows of 128, which takes eight times the memory. For
    (16, 8192) it copies.
    """
    return matrix.shape[-1] < 128 <= matrix.shape[-2]


Moments = dict[str, torch.Tensor]
"""The moments of a group by kind, such as "first", or by "KIND:PARAMETER" where a moment belongs to one parameter."""


def split_moments(moments: Moments, group: Group) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the moments of a group by kind and name of the parameter, as a checkpoint has them.

    A slice of a stack's moment equals the moment of the layer's parameter.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, moment in moments.items():
        kind, _, name = key.partition(":")
        found.setdefault(kind, {}).update({name: moment} if name else group.split(moment))
    return found


def join_moments(like: Moments, group: Group, read: Callable[[str, str], torch.Tensor]) -> Moments:
    """Inverts `split_moments`; `like` has the keys of the result, and `read` takes the kind and the parameter."""
    pairs = {key: key.partition(":")[::2] for key in like}
    return {
        key: read(kind, name) if name else group.join({slot: read(kind, slot) for slot in group.slots})
        for key, (kind, name) in pairs.items()
    }


@dataclass(frozen=True)
class Optimizer:
    """The moments of an optimizer, and its update.

    Attributes:
        start: makes the moments of a group before the first update: CPU tensors of zeros.
        direction: takes the joined gradient, the moments, the number of applied updates including this one, (), the
            configuration and the group. Returns the value to subtract for a learning rate of 1, in the gradient's
            shape, and the new moments.
    """

    start: Callable[[Group], Moments]
    direction: Callable[[torch.Tensor, Moments, torch.Tensor, OptimConfig, Group], tuple[torch.Tensor, Moments]]


def _correction(beta: float, applied: torch.Tensor) -> torch.Tensor:
    """Computes 1 - beta ** applied on the device: on the host it would be a constant, at some step exactly 1.0."""
    return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)


# ------------------------------------------------------------------------------------------------------------- AdamW


def _adamw_start(group: Group) -> Moments:
    return {name: torch.zeros(group.shape) for name in ("first", "second")}


def _adamw(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, _: Group
) -> tuple[torch.Tensor, Moments]:
    """Computes AdamW (Loshchilov and Hutter, arXiv:1711.05101) without the weight decay, which the step applies."""
    first = optim.beta1 * moments["first"] + (1 - optim.beta1) * gradient
    second = optim.beta2 * moments["second"] + (1 - optim.beta2) * gradient * gradient
    root = torch.sqrt(second / _correction(optim.beta2, applied))
    return first / _correction(optim.beta1, applied) / (root + optim.eps), {"first": first, "second": second}


# ---------------------------------------------------------------------------------------------------------- Adafactor


def _adafactor_start(group: Group) -> Moments:
    found: Moments = {}
    for name, slot in group.slots.items():
        shape = slot.shape
        if slot.matrix:
            found |= {f"rows:{name}": torch.zeros(shape[:-1]), f"columns:{name}": torch.zeros(shape[:-2] + shape[-1:])}
        else:
            found[f"second:{name}"] = torch.zeros(shape)
    return found


def _adafactor(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, _: OptimConfig, group: Group
) -> tuple[torch.Tensor, Moments]:
    """Computes Adafactor (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5) with a given learning rate.

    It has no momentum. The second moment of each matrix is factored into means over columns and over rows. The decay is
    1 - t ** -0.8. A direction with a root mean square above 1, of each matrix or vector, is scaled down to 1.
    """
    decay = 1 - applied.clamp(min=1) ** -0.8
    sizes, after, directions = [slot.shape.numel() for slot in group.slots.values()], {}, []
    for (name, slot), own in zip(group.slots.items(), gradient.flatten().split(sizes), strict=True):
        values = own.view(slot.vector_shape)
        square = values * values + 1e-30
        if slot.matrix:
            # The rows of the vector's layout are the parameter's columns where it is transposed.
            row_key, column_key = (f"{kind}:{name}" for kind in ("rows", "columns")[:: -1 if slot.transposed else 1])
            after[row_key] = rows = torch.lerp(square.mean(-1), moments[row_key], decay)
            after[column_key] = columns = torch.lerp(square.mean(-2), moments[column_key], decay)
            estimate = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
        else:
            estimate = torch.lerp(square, moments[f"second:{name}"].view(slot.vector_shape), decay)
            after[f"second:{name}"] = estimate.view(slot.shape)
        direction = values * torch.rsqrt(estimate)
        rms = direction.square().mean((-2, -1) if slot.matrix else -1, keepdim=True).sqrt()
        directions.append((direction / rms.clamp(min=1.0)).flatten())
    return torch.cat(directions).view_as(gradient), after


OPTIMIZERS = {
    "adamw": Optimizer(_adamw_start, _adamw),
    "adafactor": Optimizer(_adafactor_start, _adafactor),
}
