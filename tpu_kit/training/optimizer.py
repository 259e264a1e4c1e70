"""The optimizers: functions of fp32 tensors, which XLA compiles into the training step.

Those of PyTorch cannot be used there: their step count is a number of the host, so that each step (Adafactor), or one
late step (AdamW, where the bias correction becomes exactly 1), is a program of its own. 8-bit ones need CUDA.

How what is trained lies for the update: small tensors one behind another in a vector, a large one as it is.

A step over hundreds of adapter matrices is then a few operations to trace, and its gradients are few tensors to reduce.
A large tensor gains nothing from it and would be copied into the vector and out of it: of a whole model that is trained
two more copies of all gradients, as a TPU lays rows out in tiles that a vector does not have.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tpu_kit.config.loader import OptimConfig
from tpu_kit.models.activation_checkpointing import mix
from tpu_kit.models.architecture import ALONE
from tpu_kit.xla.sharding import current_mesh


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

    def part(self, turns: int) -> Group:
        """The group of one of `turns` equal parts of a single parameter, as `scan.rewrite` takes it apart."""
        ((name, slot),) = self.slots.items()
        shape = torch.Size([slot.shape[0] // turns, *slot.shape[1:]])
        names = slot.names[: shape[0]] if slot.stacked else slot.names
        return Group({name: replace(slot, shape=shape, names=names)}, self.alone)

    def lay(self, named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A vector of tensors like the parameters, also of a single one."""
        return torch.cat([slot.lay(named[name]) for name, slot in self.slots.items()])

    def turns(self, block: int) -> int:
        """In how many parts it is updated: a stack that is quantised layer by layer, all else at once.

        The blocks of a matrix lie otherwise in a TPU's memory than the matrix: gradient, direction, and both moments in
        fp32 would be there once more, of every layer.
        """
        slot = next(iter(self.slots.values()))
        return slot.shape[0] if self.alone and slot.stacked and block > 1 else 1

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
    """Whether a matrix lies the other way round in a vector: if its rows are short and its columns long.

    Between a vector and (8192, 16) a TPU goes by way of rows of 128, eight times the memory; (16, 8192) is a copy.
    """
    return matrix.shape[-1] < 128 <= matrix.shape[-2]


Moments = dict[str, torch.Tensor]
Named = dict[str, Moments]  # by name of the parameter, and what it is


@dataclass(frozen=True)
class Part:
    """What one parameter has of a group's moment.

    Attributes:
        moment: the group's.
        size: numbers of it.
        lay: a vector of them, from the tensor that is stored.
        take: that tensor, from the vector.
    """

    moment: str
    size: int
    lay: Callable[[torch.Tensor], torch.Tensor]
    take: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer remembers, and what it makes of a gradient.

    On the device a moment is one tensor for a group of parameters. Stored, it is a tensor for each parameter, in an
    order of axes that is the parameter's, so that a slice of a stack's is what the layer alone would have.

    Attributes:
        start: from a group, the moments before the first update: CPU tensors of zeros.
        direction: from the gradient (as of `Group.join`), the moments, the number of updates applied with this one,
            (), the configuration, the group and, of one that draws, `Group.seeds`: the change for a learning rate of 1,
            to be subtracted, in the gradient's shape, and the moments after it.
        parts: what is stored of a parameter, by name.
        block: numbers that share a scale; rows are padded to a multiple of it in a group's vector.
    """

    start: Callable[[Group], Moments]
    direction: Callable[
        [torch.Tensor, Moments, torch.Tensor, OptimConfig, Group, torch.Tensor | None], tuple[torch.Tensor, Moments]
    ]
    parts: Callable[[Slot], dict[str, Part]]
    block: int = 1

    def split(self, moments: Moments, group: Group) -> Named:
        """The moments of a group as they are stored."""
        found: Named = {name: {} for name in group.slots}
        rest = {name: tensor.reshape(-1) for name, tensor in moments.items()}
        for name, slot in group.slots.items():
            for stored, part in self.parts(slot).items():
                own, rest[part.moment] = rest[part.moment].tensor_split([part.size])
                found[name][stored] = part.take(own)
        return found

    def join(self, stored: Mapping[str, Mapping[str, torch.Tensor]], group: Group) -> Moments:
        """What `split` was given."""
        found = self.start(group)
        laid: dict[str, list[torch.Tensor]] = {moment: [tensor.reshape(-1)[:0]] for moment, tensor in found.items()}
        for name, slot in group.slots.items():
            for own, part in self.parts(slot).items():
                laid[part.moment].append(part.lay(stored[name][own]))
        return {moment: torch.cat(laid[moment]).view_as(tensor) for moment, tensor in found.items()}


def _correction(beta: float, applied: torch.Tensor) -> torch.Tensor:
    """1 - beta ** applied, on the device: computed on the host it would be a constant, and be 1.0 one day."""
    return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)


# ------------------------------------------------------------------------------------------------------------- AdamW


def _adamw_start(group: Group) -> Moments:
    return {name: torch.zeros(group.shape) for name in ("first", "second")}


def _adamw_parts(slot: Slot) -> dict[str, Part]:
    return {name: Part(name, slot.size, slot.lay, slot.take) for name in ("first", "second")}


def _adamw(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, *_: object
) -> tuple[torch.Tensor, Moments]:
    """Loshchilov and Hutter, arXiv:1711.05101; the decay of weights is the step's."""
    first = optim.beta1 * moments["first"] + (1 - optim.beta1) * gradient
    second = optim.beta2 * moments["second"] + (1 - optim.beta2) * gradient * gradient
    root = torch.sqrt(second / _correction(optim.beta2, applied))
    return first / _correction(optim.beta1, applied) / (root + optim.eps), {"first": first, "second": second}


# ---------------------------------------------------------------------------------------------------- AdamW in 8 bits


@dataclass(frozen=True)
class _Code:
    """How the numbers of a block are coded: share of the largest = (code / levels) ** power, with their sign.

    Codes next to each other are `power` / code apart, relative to the number. A gradient of a hundredth of the block's
    largest has a first moment on a grid of 10 %, a second one of 10 %, a root of that of 5 %.

    Attributes:
        dtype: of the codes.
        levels: the largest code.
        power: a power of 2.
        least: the smallest code of what is not zero.
    """

    dtype: torch.dtype
    levels: int
    power: int
    least: int

    def encode(self, values: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales, (B, 1), of fp32 blocks (B, 256).

        Rounded up where `draws`, (B, 256) in [0, 1), is less than the way to the next code: the expectation of what
        is decoded is the value. Rounded to the nearest, a change of less than half a step would never add up.
        """
        size = values.abs()
        scale = size.amax(1, keepdim=True)
        share = root = size / scale.clamp(min=torch.finfo(torch.float32).tiny)
        for _ in range(self.power.bit_length() - 1):
            root = root.sqrt()
        low = (root * self.levels).floor().clamp(max=self.levels - 1)
        below, above = self._share(low), self._share(low + 1)
        codes = low + (draws * (above - below) < share - below)
        codes = torch.where(size > 0, codes.clamp(min=self.least), codes)
        return (torch.sign(values) * codes).to(self.dtype), scale

    def decode(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The fp32 values of codes."""
        values = codes.to(torch.float32)
        return torch.sign(values) * self._share(values) * scale

    def _share(self, codes: torch.Tensor) -> torch.Tensor:
        share = codes / self.levels
        for _ in range(self.power.bit_length() - 1):
            share = share * share
        return share


_BLOCK = 256
# A second moment of zero would let eps alone divide, so it keeps a code; a first one may end.
_CODES = {"first": _Code(torch.int8, 127, 4, 0), "second": _Code(torch.uint8, 255, 8, 1)}


def _adamw8bit_start(group: Group) -> Moments:
    blocks = sum(slot.blocked.numel() for slot in group.slots.values())
    return {
        name: value
        for moment, code in _CODES.items()
        for name, value in (
            (f"{moment}_code", torch.zeros(blocks, _BLOCK, dtype=code.dtype)),
            (f"{moment}_scale", torch.zeros(blocks, 1)),
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
    """AdamW whose moments are 8-bit between updates, in blocks of 256 of a row with a scale each.

    After Dettmers et al., arXiv:2110.02861, with a code that needs no table and stochastic rounding: at beta2=0.999 the
    second moment changes by 0.1 % an update. What is drawn depends on the update, the layer's name and the place in it.
    """
    assert seeds is not None
    before = {name: code.decode(moments[f"{name}_code"], moments[f"{name}_scale"]) for name, code in _CODES.items()}
    values = (group.lay(group.split(gradient)) if group.alone else gradient).view(-1, _BLOCK)
    direction, after = _adamw(values, before, applied, optim)
    coded = {}
    rows = mix(seeds + mix(applied.to(torch.int32)))
    bits = rows[:, None] + torch.arange(_BLOCK, device=rows.device, dtype=torch.int32)
    for name, code in _CODES.items():
        bits = mix(bits)
        draws = (bits & 0xFFFFFF).to(torch.float32) * 2.0**-24
        coded[f"{name}_code"], coded[f"{name}_scale"] = code.encode(after[name], draws)
    if group.alone:
        (slot,) = group.slots.values()
        return slot.take(direction.view(-1)), coded
    return direction.view_as(gradient), coded


def encode_adamw(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], group: Group) -> Moments:
    """The moments of `adamw8bit`, rounded to the nearest codes, from AdamW's: fp32, by name, like the parameters."""
    found = {}
    for (name, code), values in zip(_CODES.items(), (first, second), strict=True):
        laid = group.lay(values).view(-1, _BLOCK)
        found[f"{name}_code"], found[f"{name}_scale"] = code.encode(laid, torch.full_like(laid, 0.5))
    return found


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
    """Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with a learning rate from outside and no momentum.

    The second moment of a matrix is the product of its means over columns and over rows; of a stack of matrices, for
    each of them. The decay is 1 - t ** -0.8, and a direction of a root mean square above 1 is scaled down to it: that
    of each matrix, and of each vector of a stack.
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
