"""How what is trained lies for the update: small tensors one behind another in a vector, a large one as it is.

A step over hundreds of adapter matrices is then a few operations to trace, and its gradients are few tensors to reduce.
A large tensor gains nothing from it and would be copied into the vector and out of it: of a whole model that is trained
two more copies of all gradients, as a TPU lays rows out in tiles that a vector does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from tpu_kit.tensors import ALONE


@dataclass(frozen=True)
class Group:
    """Tensors that are updated as one.

    Attributes:
        names: of the parameters.
        parameters: all that are trained, by name.
        shapes: of each of `names`, as an optimizer sees it: matrices and stacks of them as they lie here, others as
            vectors.
        alone: whether it is a single parameter in its own shape.
    """

    names: list[str]
    parameters: Mapping[str, torch.nn.Parameter]
    shapes: list[torch.Size]
    alone: bool

    def join(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of tensors like the parameters: their values as one tensor."""
        tensors = [named[name] for name in self.names]
        return tensors[0] if self.alone else flat(tensors)

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of such a tensor, by name and in the parameters' shapes."""
        parts = [joined] if self.alone else parts_of(joined, [self.parameters[name] for name in self.names])
        return dict(zip(self.names, parts, strict=True))

    @property
    def shape(self) -> torch.Size:
        """Of what `join` gives."""
        return self.shapes[0] if self.alone else torch.Size([sum(shape.numel() for shape in self.shapes)])


def group(parameters: Mapping[str, torch.nn.Parameter], stacked: Collection[str]) -> list[Group]:
    """The parameters in groups: the small ones, if there are any, then each large one.

    Args:
        parameters: by name, all that are trained.
        stacked: the names of those that are stacks of layers' parameters: a stack of vectors has two axes and is no
            matrix.
    """
    small = {name: parameter for name, parameter in parameters.items() if parameter.numel() < ALONE}
    shapes = [
        _lay(parameter).shape if parameter.ndim - (name in stacked) > 1 else torch.Size([parameter.numel()])
        for name, parameter in small.items()
    ]
    large = {name: parameter for name, parameter in parameters.items() if name not in small}
    assert all(parameter.ndim - (name in stacked) > 1 for name, parameter in large.items()), "a vector of 64 MiB"
    together = [Group(list(small), parameters, shapes, alone=False)] if small else []
    return together + [Group([name], parameters, [one.shape], alone=True) for name, one in large.items()]


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One vector of tensors, one behind another."""
    return torch.cat([_lay(tensor).reshape(-1) for tensor in tensors])


def parts_of(vector: torch.Tensor, like: Collection[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of such a vector, in the shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like])
    turned = [_lay(tensor) for tensor in like]
    return [
        part.view(shape.shape) if shape is tensor else part.view(shape.shape).mT
        for part, shape, tensor in zip(parts, turned, like, strict=True)
    ]


def _lay(tensor: torch.Tensor) -> torch.Tensor:
    """How a matrix lies in a vector: the other way round if its rows are short and its columns long.

    Between a vector and (8192, 16) a TPU goes by way of rows of 128, eight times the memory; (16, 8192) is a copy.
    """
    return tensor.mT if tensor.ndim > 1 and tensor.shape[-1] < 128 <= tensor.shape[-2] else tensor
