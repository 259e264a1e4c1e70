"""Optimizers as functions of fp32 tensors, which XLA compiles into the training step.

PyTorch's optimizers keep the step count on the host. XLA would then compile a new program for each step (Adafactor) or
for one late step (AdamW, when the bias correction becomes exactly 1). The 8-bit optimizers for PyTorch need CUDA. The
8-bit AdamW here rounds its moments stochastically (`_Code.encode`).

For the update, small parameters are joined in one vector, and each large one keeps its shape. A step over hundreds of
adapter matrices then has few operations to trace and few gradients to reduce. Large parameters are not joined: a TPU
stores matrices in tiles of rows and vectors in another layout, so joining all gradients of a whole model in a vector
and splitting it again would need two more copies of them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.distributed.mesh import current_mesh
from tpu_kit.models.activation_checkpointing import mix
from tpu_kit.models.architecture import ALONE


@dataclass(frozen=True)
class Slot:
    """The layout of a parameter, or of a tensor of its shape, in a vector: rows padded to whole blocks.

    Attributes:
        shape: of the parameter, (G, ...) of a stack.
        names: of the layers' parameters in a stack; else its own name.
        stacked: whether it is a stack of layers' parameters.
        turned: whether its last two axes are swapped in the vector; see `_turned`.
        block: numbers in a block; rows are padded to a multiple of it.
    """

    shape: torch.Size
    names: Sequence[str]
    stacked: bool
    turned: bool
    block: int

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix or a stack of matrices, but not a stack of vectors."""
        return len(self.shape) - self.stacked > 1

    @property
    def laid(self) -> torch.Size:
        """Its shape in the vector, without padding; scalars and stacks of scalars get rows of one number."""
        if self.turned:
            return torch.Size([*self.shape[:-2], self.shape[-1], self.shape[-2]])
        return self.shape if len(self.shape) > self.stacked else torch.Size([*self.shape, 1])

    @property
    def blocked(self) -> torch.Size:
        """The shape `laid` with blocks instead of numbers in a row."""
        return torch.Size([*self.laid[:-1], -(-self.laid[-1] // self.block)])

    @property
    def size(self) -> int:
        """Number of elements in the vector, padding included."""
        return self.blocked.numel() * self.block

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """Makes a vector (`size`,) of a tensor in the parameter's shape."""
        laid = tensor.mT if self.turned else tensor.reshape(self.laid)
        more = self.blocked[-1] * self.block - self.laid[-1]
        return (torch.nn.functional.pad(laid, (0, more)) if more else laid).reshape(-1)

    def take(self, vector: torch.Tensor) -> torch.Tensor:
        """Inverts `lay`."""
        if self.size > self.laid.numel():
            vector = vector.view(*self.laid[:-1], -1)[..., : self.laid[-1]]
        return vector.reshape(self.laid).mT if self.turned else vector.reshape(self.shape)

    def seeds(self) -> torch.Tensor:
        """Returns an int32 seed for each block, from the layer's name and the position, independent of stacking."""
        names = torch.tensor([zlib.crc32(name.encode()) - (1 << 31) for name in self.names], dtype=torch.int32)
        places = torch.arange(self.blocked.numel() // len(names), dtype=torch.int32)
        return mix(mix(places) + mix(names)[:, None]).reshape(-1)


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
        return named[next(iter(self.slots))] if self.alone else self.lay(named)

    def split(self, joined: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inverts `join`."""
        if self.alone:
            return dict.fromkeys(self.slots, joined)
        parts = joined.split([slot.size for slot in self.slots.values()])
        return {name: slot.take(part) for (name, slot), part in zip(self.slots.items(), parts, strict=True)}

    @property
    def stacked(self) -> bool:
        """Whether it is a single stack of layers' parameters."""
        return self.alone and next(iter(self.slots.values())).stacked

    @property
    def shape(self) -> torch.Size:
        """The shape of the result of `join`."""
        slots = list(self.slots.values())
        return slots[0].shape if self.alone else torch.Size([sum(slot.size for slot in slots)])

    def part(self, turns: int) -> Group:
        """Returns the group of one of `turns` equal parts of a single parameter, for `scan.rewrite`."""
        ((name, slot),) = self.slots.items()
        shape = torch.Size([slot.shape[0] // turns, *slot.shape[1:]])
        names = slot.names[: shape[0]] if slot.stacked else slot.names
        return Group({name: replace(slot, shape=shape, names=names)}, self.alone)

    def lay(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Joins tensors in the parameters' shapes into a vector, also a single one."""
        return torch.cat([slot.lay(named[name]) for name, slot in self.slots.items()])

    def turns(self, block: int) -> int:
        """Returns the number of parts of the update: one for each layer of a stack with 8-bit moments, else 1.

        Blocks have another layout in a TPU's memory than a matrix, so that gradient, direction and both moments exist
        once more in fp32: of one layer instead of all layers.
        """
        return self.shape[0] if self.stacked and block > 1 else 1

    @property
    def blocks(self) -> torch.Size:
        """The shape of the blocks: (B,), or (layers, B / layers) for a mesh, which shards the blocks of each layer."""
        count = sum(slot.blocked.numel() for slot in self.slots.values())
        if current_mesh() is None or not self.alone:
            return torch.Size([count])
        layers = self.shape[0] if self.stacked else 1
        return torch.Size([layers, count // layers])

    def seeds(self) -> torch.Tensor:
        """Returns an int32 seed for each block; see `Slot.seeds`."""
        return torch.cat([slot.seeds() for slot in self.slots.values()]).view(self.blocks)


def group(parameters: Mapping[str, torch.Tensor], stacks: Mapping[str, Sequence[str]], block: int = 1) -> list[Group]:
    """Groups the parameters: the small ones together, if there are any, then each large one.

    Args:
        parameters: all trained parameters by name.
        stacks: for each stack of layers' parameters, the names of its slices.
        block: of the optimizer; see `Optimizer`.
    """
    slots = {}
    for name, parameter in parameters.items():
        matrix = parameter.ndim - (name in stacks) > 1
        lies = (parameter.numel() < ALONE and current_mesh() is None) or block > 1
        turned = matrix and lies and _turned(parameter)
        slots[name] = Slot(parameter.shape, stacks.get(name, [name]), name in stacks, turned, block)
    # A vector of several matrices could not be sharded as they are.
    together = current_mesh() is None
    small = {name: slot for name, slot in slots.items() if slot.shape.numel() < ALONE and (together or not slot.matrix)}
    large = {name: slot for name, slot in slots.items() if name not in small}
    assert all(slot.matrix for slot in large.values()), "a vector of 64 MiB"
    joined = [Group(small, alone=False)] if small else []
    return joined + [Group({name: slot}, alone=True) for name, slot in large.items()]


def _turned(matrix: torch.Tensor) -> bool:
    """Whether to swap the axes of a matrix in a vector: if its rows are short and its columns long.

    A TPU converts between a vector and (8192, 16) through rows of 128, which takes eight times the memory. For
    (16, 8192) it copies.
    """
    return matrix.shape[-1] < 128 <= matrix.shape[-2]


Moments = dict[str, torch.Tensor]
Named = dict[str, Moments]  # by name of the parameter, then by name of its stored tensor


@dataclass(frozen=True)
class Part:
    """The part of a group's moment that belongs to one parameter.

    Attributes:
        moment: name of the group's moment.
        size: number of elements.
        lay: makes a vector of the stored tensor.
        take: inverts `lay`.
    """

    moment: str
    size: int
    lay: Callable[[torch.Tensor], torch.Tensor]
    take: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Optimizer:
    """The moments of an optimizer, and its update.

    On the device a moment is one tensor for each group. A checkpoint has one for each parameter, with the parameter's
    order of axes, so that a slice of a stack's moment equals the moment of the layer's parameter.

    Attributes:
        start: makes the moments of a group before the first update: CPU tensors of zeros.
        direction: takes the joined gradient, the moments, the number of applied updates including this one, (), the
            configuration, the group and, for an optimizer that draws, `Group.seeds`. Returns the value to subtract for
            a learning rate of 1, in the gradient's shape, and the new moments.
        parts: the stored tensors of a parameter, by name.
        block: number of elements that share a scale; the rows of a group's vector are padded to a multiple of it.
    """

    start: Callable[[Group], Moments]
    direction: Callable[
        [torch.Tensor, Moments, torch.Tensor, OptimConfig, Group, torch.Tensor | None], tuple[torch.Tensor, Moments]
    ]
    parts: Callable[[Slot], dict[str, Part]]
    block: int = 1

    def split(self, moments: Moments, group: Group) -> Named:
        """Splits the moments of a group into the stored tensors."""
        found: Named = {name: {} for name in group.slots}
        rest = {name: tensor.reshape(-1) for name, tensor in moments.items()}
        for name, slot in group.slots.items():
            for stored, part in self.parts(slot).items():
                own, rest[part.moment] = rest[part.moment].tensor_split([part.size])
                found[name][stored] = part.take(own)
        return found

    def join(self, stored: Mapping[str, Mapping[str, torch.Tensor]], group: Group) -> Moments:
        """Inverts `split`."""
        found = self.start(group)
        laid: dict[str, list[torch.Tensor]] = {moment: [tensor.reshape(-1)[:0]] for moment, tensor in found.items()}
        for name, slot in group.slots.items():
            for own, part in self.parts(slot).items():
                laid[part.moment].append(part.lay(stored[name][own]))
        return {moment: torch.cat(laid[moment]).view_as(tensor) for moment, tensor in found.items()}


def _correction(beta: float, applied: torch.Tensor) -> torch.Tensor:
    """Computes 1 - beta ** applied on the device: on the host it would be a constant, at some step exactly 1.0."""
    return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)


# ------------------------------------------------------------------------------------------------------------- AdamW


def _adamw_start(group: Group) -> Moments:
    return {name: torch.zeros(group.shape) for name in ("first", "second")}


def _adamw_parts(slot: Slot) -> dict[str, Part]:
    return {name: Part(name, slot.size, slot.lay, slot.take) for name in ("first", "second")}


def _adamw(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, *_: object
) -> tuple[torch.Tensor, Moments]:
    """Computes AdamW (Loshchilov and Hutter, arXiv:1711.05101) without the weight decay, which the step applies."""
    first = optim.beta1 * moments["first"] + (1 - optim.beta1) * gradient
    second = optim.beta2 * moments["second"] + (1 - optim.beta2) * gradient * gradient
    root = torch.sqrt(second / _correction(optim.beta2, applied))
    return first / _correction(optim.beta1, applied) / (root + optim.eps), {"first": first, "second": second}


# ---------------------------------------------------------------------------------------------------- AdamW in 8 bits


@dataclass(frozen=True)
class _Code:
    """The code of the values of a block: |value| / scale = (code / levels) ** power, with the value's sign.

    Adjacent codes differ by `power` / code, relative to the value. For a gradient of 1 % of the block's largest, that
    is 10 % in the first moment, 10 % in the second, and 5 % in the root of the second.

    Attributes:
        dtype: of the codes.
        levels: the largest code.
        power: a power of 2.
        least: the smallest code of a value other than zero.
    """

    dtype: torch.dtype
    levels: int
    power: int
    least: int

    def encode(self, values: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns codes and scales, (..., 1), of fp32 blocks (..., 256).

        Stochastic rounding by `draws`, (..., 256) in [0, 1), so that the expectation of the decoded value is the value.
        With rounding to the nearest code, changes of less than half a step would be lost.
        """
        size = values.abs()
        scale = size.amax(-1, keepdim=True)
        share = root = size / scale.clamp(min=torch.finfo(torch.float32).tiny)
        for _ in range(self.power.bit_length() - 1):
            root = root.sqrt()
        low = (root * self.levels).floor().clamp(max=self.levels - 1)
        below, above = self._share(low), self._share(low + 1)
        codes = low + (draws * (above - below) < share - below)
        codes = torch.where(size > 0, codes.clamp(min=self.least), codes)
        return (torch.sign(values) * codes).to(self.dtype), scale

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the fp32 values of codes."""
        values = codes.to(torch.float32)
        return torch.sign(values) * self._share(values) * scale

    def _share(self, codes: torch.Tensor) -> torch.Tensor:
        share = codes / self.levels
        for _ in range(self.power.bit_length() - 1):
            share = share * share
        return share


_BLOCK = 256
# With a second moment of zero the update would be divided by eps alone, so its smallest code is 1.
_CODES = {"first": _Code(torch.int8, 127, 4, 0), "second": _Code(torch.uint8, 255, 8, 1)}


def _adamw8bit_start(group: Group) -> Moments:
    blocks = group.blocks
    return {
        name: value
        for moment, code in _CODES.items()
        for name, value in (
            (f"{moment}_code", torch.zeros(*blocks, _BLOCK, dtype=code.dtype)),
            (f"{moment}_scale", torch.zeros(*blocks, 1)),
        )
    }


def _adamw8bit_parts(slot: Slot) -> dict[str, Part]:
    def lay(scale: torch.Tensor) -> torch.Tensor:
        return (scale.mT if slot.turned else scale).reshape(-1)

    def take(vector: torch.Tensor) -> torch.Tensor:
        return vector.view(slot.blocked).mT if slot.turned else vector.view(slot.blocked)

    codes = {name: Part(name, slot.size, slot.lay, slot.take) for name in ("first_code", "second_code")}
    return codes | {name: Part(name, slot.blocked.numel(), lay, take) for name in ("first_scale", "second_scale")}


def _adamw8bit(
    gradient: torch.Tensor,
    moments: Moments,
    applied: torch.Tensor,
    optim: OptimConfig,
    group: Group,
    seeds: torch.Tensor | None,
) -> tuple[torch.Tensor, Moments]:
    """Computes AdamW with 8-bit moments, in blocks of 256 values of a row with a scale each.

    After Dettmers et al., arXiv:2110.02861, with a code that needs no table, and stochastic rounding, because the
    second moment changes by 0.1 % per update at beta2=0.999. The random numbers depend on the update, the layer's name
    and the position.
    """
    assert seeds is not None
    before = {name: code.decode(moments[f"{name}_code"], moments[f"{name}_scale"]) for name, code in _CODES.items()}
    values = (group.lay(group.split(gradient)) if group.alone else gradient).view(before["first"].shape)
    direction, after = _adamw(values, before, applied, optim)
    coded = {}
    rows = mix(seeds + mix(applied.to(torch.int32)))
    bits = rows[..., None] + torch.arange(_BLOCK, device=rows.device, dtype=torch.int32)
    for name, code in _CODES.items():
        bits = mix(bits)
        draws = (bits & 0xFFFFFF).to(torch.float32) * 2.0**-24
        coded[f"{name}_code"], coded[f"{name}_scale"] = code.encode(after[name], draws)
    if group.alone:
        (slot,) = group.slots.values()
        return slot.take(direction.reshape(-1)), coded
    return direction.view_as(gradient), coded


# ---------------------------------------------------------------------------------------------------------- Adafactor


def _adafactor_start(group: Group) -> Moments:
    parts = [part for slot in group.slots.values() for part in _adafactor_parts(slot).values()]
    return {
        name: torch.zeros(sum(part.size for part in parts if part.moment == name))
        for name in ("rows", "columns", "vectors")
    }


def _adafactor_parts(slot: Slot) -> dict[str, Part]:
    def part(moment: str, shape: torch.Size) -> Part:
        return Part(moment, shape.numel(), lambda tensor: tensor.reshape(-1), lambda vector: vector.view(shape))

    if not slot.matrix:
        return {"second": part("vectors", slot.shape)}
    names = ("columns", "rows") if slot.turned else ("rows", "columns")
    shapes = slot.laid[:-1], slot.laid[:-2] + slot.laid[-1:]
    return {name: part(moment, shape) for name, moment, shape in zip(names, ("rows", "columns"), shapes, strict=True)}


def _adafactor(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, _: OptimConfig, group: Group, *__: object
) -> tuple[torch.Tensor, Moments]:
    """Computes Adafactor (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5) with a given learning rate.

    It has no momentum. The second moment of each matrix is factored into means over columns and over rows. The decay is
    1 - t ** -0.8. A direction with a root mean square above 1, of each matrix or vector, is scaled down to 1.
    """
    decay = 1 - applied.clamp(min=1) ** -0.8
    slots = list(group.slots.values())
    sizes: dict[str, list[int]] = {name: [] for name in moments}
    for slot in slots:
        for part in _adafactor_parts(slot).values():
            sizes[part.moment].append(part.size)
    before = {name: iter(moments[name].split(parts)) for name, parts in sizes.items()}
    after: dict[str, list[torch.Tensor]] = {name: [moments[name][:0]] for name in moments}
    directions = []
    for slot, own in zip(slots, gradient.flatten().split([slot.size for slot in slots]), strict=True):
        values = own.view(slot.laid)
        square = values * values + 1e-30
        if slot.matrix:
            rows = torch.lerp(square.mean(-1), next(before["rows"]).view(slot.laid[:-1]), decay)
            means = square.mean(-2)
            columns = torch.lerp(means, next(before["columns"]).view_as(means), decay)
            estimate = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
            after["rows"].append(rows.flatten())
            after["columns"].append(columns.flatten())
        else:
            estimate = torch.lerp(square, next(before["vectors"]).view(slot.laid), decay)
            after["vectors"].append(estimate.flatten())
        direction = values * torch.rsqrt(estimate)
        rms = direction.square().mean((-2, -1) if slot.matrix else -1, keepdim=True).sqrt()
        directions.append((direction / rms.clamp(min=1.0)).flatten())
    return torch.cat(directions).view_as(gradient), {name: torch.cat(parts) for name, parts in after.items()}


OPTIMIZERS = {
    "adamw": Optimizer(_adamw_start, _adamw, _adamw_parts),
    "adamw8bit": Optimizer(_adamw8bit_start, _adamw8bit, _adamw8bit_parts, _BLOCK),
    "adafactor": Optimizer(_adafactor_start, _adafactor, _adafactor_parts),
}
