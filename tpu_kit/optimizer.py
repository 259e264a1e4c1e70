"""The optimizers: functions of fp32 tensors, which XLA compiles into the training step.

Those of PyTorch cannot be used there: their step count is a number of the host, so that each step (Adafactor), or one
late step (AdamW, where the bias correction becomes exactly 1), is a program of its own. 8-bit ones need CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tpu_kit.config import OptimConfig

Moments = dict[str, torch.Tensor]
_BLOCK = 256  # values that share a scale in 8 bits
_LEVELS = 127


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer remembers, and what it makes of a gradient.

    Attributes:
        start: from the shape of the gradient and those of the parameters that it joins (`groups.Group`), the moments
            before the first update: CPU tensors of zeros.
        direction: from the gradient, the moments, the number of updates applied with this one, (), the configuration
            and the parameters' shapes: the change for a learning rate of 1, to be subtracted, in the gradient's shape,
            and the moments after it.
    """

    start: Callable[[torch.Size, Sequence[torch.Size]], Moments]
    direction: Callable[
        [torch.Tensor, Moments, torch.Tensor, OptimConfig, Sequence[torch.Size]], tuple[torch.Tensor, Moments]
    ]


def _numbers(shapes: Sequence[torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes)


def _correction(beta: float, applied: torch.Tensor) -> torch.Tensor:
    """1 - beta ** applied, on the device: computed on the host it would be a constant, and be 1.0 one day."""
    return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)


# ------------------------------------------------------------------------------------------------------------- AdamW


def _adamw_start(shape: torch.Size, _: Sequence[torch.Size]) -> Moments:
    return {name: torch.zeros(shape) for name in ("first", "second")}


def _adamw(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, _: Sequence[torch.Size]
) -> tuple[torch.Tensor, Moments]:
    """Loshchilov and Hutter, arXiv:1711.05101; the decay of weights is the step's."""
    first = optim.beta1 * moments["first"] + (1 - optim.beta1) * gradient
    second = optim.beta2 * moments["second"] + (1 - optim.beta2) * gradient * gradient
    root = torch.sqrt(second / _correction(optim.beta2, applied))
    return first / _correction(optim.beta1, applied) / (root + optim.eps), {"first": first, "second": second}


# ---------------------------------------------------------------------------------------------------- AdamW in 8 bits


def _adamw8bit_start(shape: torch.Size, _: Sequence[torch.Size]) -> Moments:
    blocks = math.ceil(shape.numel() / _BLOCK)
    return {
        name: value
        for moment in ("first", "root_second")
        for name, value in (
            (moment, torch.zeros(blocks, _BLOCK, dtype=torch.int8)),
            (f"{moment}_scale", torch.zeros(blocks, 1)),
        )
    }


def _adamw8bit(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, shapes: Sequence[torch.Size]
) -> tuple[torch.Tensor, Moments]:
    """AdamW whose moments are 8-bit between updates, in blocks of 256 with a scale each.

    After Dettmers et al., arXiv:2110.02861, with a code that needs no table: the square root of a value's share of the
    block's largest, in 127 levels, so that a value of 1/16,000 of the largest is still told from zero. Of the second
    moment the root is coded, which is what divides.
    """
    before = {"first": _decode(moments, "first", gradient), "second": _decode(moments, "root_second", gradient) ** 2}
    direction, after = _adamw(gradient, before, applied, optim, shapes)
    return direction, _encode("first", after["first"]) | _encode("root_second", after["second"].sqrt())


def _encode(name: str, values: torch.Tensor) -> Moments:
    blocks = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % _BLOCK)).view(-1, _BLOCK)
    size = blocks.abs()
    scale = size.amax(1, keepdim=True)
    codes = torch.round((size / scale.clamp(min=1e-38)).sqrt() * _LEVELS)
    # What is not zero must not become it: a direction would be divided by eps alone.
    codes = torch.where(size > 0, codes.clamp(min=1), codes)
    return {name: (torch.sign(blocks) * codes).to(torch.int8), f"{name}_scale": scale}


def _decode(moments: Moments, name: str, like: torch.Tensor) -> torch.Tensor:
    codes = moments[name].to(torch.float32)
    values = codes * codes.abs() * (moments[f"{name}_scale"] / _LEVELS**2)
    return values.flatten()[: like.numel()].view_as(like)


# ---------------------------------------------------------------------------------------------------------- Adafactor


def _adafactor_start(_: torch.Size, shapes: Sequence[torch.Size]) -> Moments:
    matrices = [shape for shape in shapes if len(shape) > 1]
    return {
        "rows": torch.zeros(sum(shape.numel() // shape[-1] for shape in matrices)),
        "columns": torch.zeros(sum(shape.numel() // shape[-2] for shape in matrices)),
        "vectors": torch.zeros(_numbers([shape for shape in shapes if len(shape) < 2])),
    }


def _adafactor(
    gradient: torch.Tensor, moments: Moments, applied: torch.Tensor, optim: OptimConfig, shapes: Sequence[torch.Size]
) -> tuple[torch.Tensor, Moments]:
    """Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with a learning rate from outside and no momentum.

    The second moment of a matrix is the product of its means over columns and over rows; of a stack of matrices, for
    each of them. The decay is 1 - t ** -0.8, and a direction of a root mean square above 1 is scaled down to it.
    """
    decay = 1 - applied.clamp(min=1) ** -0.8
    sizes = {"rows": [], "columns": [], "vectors": []}  # type: dict[str, list[int]]
    for shape in shapes:
        if len(shape) > 1:
            sizes["rows"].append(shape.numel() // shape[-1])
            sizes["columns"].append(shape.numel() // shape[-2])
        else:
            sizes["vectors"].append(shape.numel())
    before = {name: iter(moments[name].split(parts)) for name, parts in sizes.items()}
    after: dict[str, list[torch.Tensor]] = {name: [moments[name][:0]] for name in moments}
    directions = []
    for shape, part in zip(shapes, gradient.flatten().split([shape.numel() for shape in shapes]), strict=True):
        values = part.view(shape)
        square = values * values + 1e-30
        if len(shape) > 1:
            rows = torch.lerp(square.mean(-1), next(before["rows"]).view(shape[:-1]), decay)
            columns = torch.lerp(square.mean(-2), next(before["columns"]).view(*shape[:-2], shape[-1]), decay)
            estimate = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
            after["rows"].append(rows.flatten())
            after["columns"].append(columns.flatten())
        else:
            estimate = torch.lerp(square, next(before["vectors"]).view(shape), decay)
            after["vectors"].append(estimate.flatten())
        direction = values * torch.rsqrt(estimate)
        over = tuple(range(-min(2, len(shape)), 0))
        rms = direction.square().mean(over, keepdim=True).sqrt() if over else direction.abs()
        directions.append((direction / rms.clamp(min=1.0)).flatten())
    return torch.cat(directions).view_as(gradient), {name: torch.cat(parts) for name, parts in after.items()}


OPTIMIZERS = {
    "adamw": Optimizer(_adamw_start, _adamw),
    "adamw8bit": Optimizer(_adamw8bit_start, _adamw8bit),
    "adafactor": Optimizer(_adafactor_start, _adafactor),
}
