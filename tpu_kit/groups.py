"""How what is trained lies for the update: small tensors one behind another in a vector, a large one as it is.

A step over hundreds of adapter matrices is then a few operations to trace, and its gradients are few tensors to reduce.
A large tensor gains nothing from it and would be copied into the vector and out of it: of a whole model that is trained
two more copies of all gradients, as a TPU lays rows out in tiles that a vector does not have.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tpu_kit.dropout import mix
from tpu_kit.tensors import ALONE


@dataclass(frozen=True)
class Slot:
    """How a parameter, or a tensor of its shape, lies in a vector: `laid`, its rows padded to whole blocks.

    Attributes:
        shape: of the parameter, (G, ...) if it is a stack.
        names: of the parameters in it: one for each layer of a stack, else its own.
        stacked: whether it is a stack of layers' parameters.
        turned: whether its last two axes change places in the vector; see `_turned`.
        block: numbers in a block; rows are padded to a multiple of it.
    """

    shape: torch.Size
    names: Sequence[str]
    stacked: bool
    turned: bool
    block: int

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix or a stack of them; a stack of vectors has two axes and is none."""
        return len(self.shape) - self.stacked > 1

    @property
    def laid(self) -> torch.Size:
        """The shape in which it lies, without padding; a row of one number for a scalar, or for each of a stack."""
        if self.turned:
            return torch.Size([*self.shape[:-2], self.shape[-1], self.shape[-2]])
        return self.shape if len(self.shape) > self.stacked else torch.Size([*self.shape, 1])

    @property
    def blocked(self) -> torch.Size:
        """The same, with the blocks of a row in place of its numbers; the last block of a row may be padded."""
        return torch.Size([*self.laid[:-1], -(-self.laid[-1] // self.block)])

    @property
    def size(self) -> int:
        """Numbers in the vector, with padding."""
        return self.blocked.numel() * self.block

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """A vector (`size`,) of a tensor in the parameter's shape."""
        laid = tensor.mT if self.turned else tensor.reshape(self.laid)
        more = self.blocked[-1] * self.block - self.laid[-1]
        return (torch.nn.functional.pad(laid, (0, more)) if more else laid).reshape(-1)

    def take(self, vector: torch.Tensor) -> torch.Tensor:
        """What `lay` was given."""
        if self.size > self.laid.numel():
            vector = vector.view(*self.laid[:-1], -1)[..., : self.laid[-1]]
        return vector.reshape(self.laid).mT if self.turned else vector.reshape(self.shape)

    def seeds(self) -> torch.Tensor:
        """A number for each block, int32, from the layer's name and the place in its parameter: stacked or not."""
        names = torch.tensor([zlib.crc32(name.encode()) - (1 << 31) for name in self.names], dtype=torch.int32)
        places = torch.arange(self.blocked.numel() // len(names), dtype=torch.int32)
        return mix(mix(places) + mix(names)[:, None]).reshape(-1)


@dataclass(frozen=True)
class Group:
    """Tensors that are updated as one.

    Attributes:
        slots: for each parameter, by name, how it lies.
        alone: whether it is a single parameter in its own shape.
    """

    slots: Mapping[str, Slot]
    alone: bool

    def join(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Of tensors like the parameters: their values as one tensor."""
        return named[next(iter(self.slots))] if self.alone else self.lay(named)

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of such a tensor, by name and in the parameters' shapes."""
        if self.alone:
            return dict.fromkeys(self.slots, joined)
        parts = joined.split([slot.size for slot in self.slots.values()])
        return {name: slot.take(part) for (name, slot), part in zip(self.slots.items(), parts, strict=True)}

    @property
    def shape(self) -> torch.Size:
        """Of what `join` gives."""
        slots = list(self.slots.values())
        return slots[0].shape if self.alone else torch.Size([sum(slot.size for slot in slots)])

    def lay(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A vector of tensors like the parameters, also of a single one."""
        return torch.cat([slot.lay(named[name]) for name, slot in self.slots.items()])

    def seeds(self) -> torch.Tensor:
        """A number for each block, int32; see `Slot.seeds`."""
        return torch.cat([slot.seeds() for slot in self.slots.values()])


def group(parameters: Mapping[str, torch.Tensor], stacks: Mapping[str, Sequence[str]], block: int = 1) -> list[Group]:
    """The parameters in groups: the small ones, if there are any, then each large one.

    Args:
        parameters: by name, all that are trained.
        stacks: of each that is a stack of layers' parameters, the names that these have without it.
        block: numbers in a block of the optimizer; see `optimizer.Optimizer`.
    """
    slots = {}
    for name, parameter in parameters.items():
        matrix, lies = parameter.ndim - (name in stacks) > 1, parameter.numel() < ALONE or block > 1
        turned = matrix and lies and _turned(parameter)
        slots[name] = Slot(parameter.shape, stacks.get(name, [name]), name in stacks, turned, block)
    small = {name: slot for name, slot in slots.items() if slot.shape.numel() < ALONE}
    large = {name: slot for name, slot in slots.items() if name not in small}
    assert all(slot.matrix for slot in large.values()), "a vector of 64 MiB"
    together = [Group(small, alone=False)] if small else []
    return together + [Group({name: slot}, alone=True) for name, slot in large.items()]


def _turned(matrix: torch.Tensor) -> bool:
    """Whether a matrix lies the other way round in a vector: if its rows are short and its columns long.

    Between a vector and (8192, 16) a TPU goes by way of rows of 128, eight times the memory; (16, 8192) is a copy.
    """
    return matrix.shape[-1] < 128 <= matrix.shape[-2]
