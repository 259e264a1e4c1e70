"""Optimizers as functions of fp32 tensors, which XLA compiles into the training step.

PyTorch's optimizers keep the step count on the host. XLA would compile a new program for every step with Adafactor, and
a second program with AdamW at the late step where the bias correction becomes exactly 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from tpu_kit.config.loader import OptimConfig

Moments = dict[str, torch.Tensor]
"""The moments of a parameter by kind, such as "first". A stack of layers' parameters has stacked moments."""

Direction = Callable[[torch.Tensor, Moments, bool], tuple[torch.Tensor, Moments]]
"""Takes a gradient, the moments, and whether the parameter is a stack; returns the value to subtract at a learning rate
of 1, and the new moments."""


class Optimizer(NamedTuple):
    """An optimizer as two functions.

    Attributes:
        start: takes a parameter's shape and whether it is a stack; returns its initial moments, CPU tensors of zeros.
        direction: takes the number of applied updates including the present one, a () tensor, and the configuration;
            returns the `Direction` of this update.
    """

    start: Callable[[Sequence[int], bool], Moments]
    direction: Callable[[torch.Tensor, OptimConfig], Direction]


def relative_rates(
    names: Iterable[str], embeddings: Sequence[str], optim: OptimConfig, plus: float = 1.0
) -> dict[str, float]:
    """Returns the learning rate of each parameter by name, as a multiple of `optim.learning_rate`.

    LoRA's B and DoRA's magnitudes have `plus` times the rate of A (LoRA+, Hayou et al., arXiv:2402.12354, with PEFT's
    groups). All parameters of an embedding have `optim.embedding_learning_rate`, if it is set.

    Args:
        names: names of the trained parameters.
        embeddings: prefixes of the names of the two embeddings' parameters.
        optim: the rates.
        plus: `lora.plus`.

    Raises:
        ValueError: `optim.embedding_learning_rate` is set, but no embedding is trained.
    """
    found, given = {}, optim.embedding_learning_rate
    for name in names:
        found[name] = plus if ".lora_B." in name or ".lora_magnitude_vector." in name else 1.0
        if given is not None and name.startswith(tuple(embeddings)):
            assert optim.learning_rate is not None, "TrainConfig replaces null"
            found[name] = given / optim.learning_rate
    if given is not None and not any(name.startswith(tuple(embeddings)) for name in found):
        raise ValueError(
            f"optim.embedding_learning_rate={given:g}: no embedding is trained; set lora.tokens or lora.full, "
            "name them in lora.targets, or set it to null"
        )
    return found


def is_matrix(shape: Sequence[int], stacked: bool) -> bool:
    """Whether a parameter of this shape is a matrix or a stack of matrices, not a vector or a stack of vectors."""
    return len(shape) - stacked > 1


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes matrices with rows below 128 numbers and columns of at least 128; returns other tensors unchanged.

    To reshape (8192, 16), a TPU pads the rows to 128 numbers, eight times the memory. It copies (16, 8192) directly.
    """
    return tensor.mT if tensor.ndim > 1 and tensor.shape[-1] < 128 <= tensor.shape[-2] else tensor


# ------------------------------------------------------------------------------------------------------------- AdamW


def _adamw_start(shape: Sequence[int], _: bool) -> Moments:
    """Returns zeros of this shape as the moments "first" and "second"."""
    return {kind: torch.zeros(shape) for kind in ("first", "second")}


def _adamw(applied: torch.Tensor, optim: OptimConfig) -> Direction:
    """Returns AdamW's `Direction` (Loshchilov and Hutter, arXiv:1711.05101); the step applies the weight decay.

    `applied` is the number of applied updates with this update, a () tensor.
    """

    def correction(beta: float) -> torch.Tensor:
        """Computes 1 - beta ** applied on the device; on the host it would be a constant of the program."""
        return -torch.expm1(applied * math.log(beta)) if beta else torch.ones_like(applied)

    first_correction, second_correction = correction(optim.beta1), correction(optim.beta2)

    def direction(gradient: torch.Tensor, moments: Moments, _: bool) -> tuple[torch.Tensor, Moments]:
        first = optim.beta1 * moments["first"] + (1 - optim.beta1) * gradient
        second = optim.beta2 * moments["second"] + (1 - optim.beta2) * gradient * gradient
        root = torch.sqrt(second / second_correction)
        return first / first_correction / (root + optim.eps), {"first": first, "second": second}

    return direction


# ---------------------------------------------------------------------------------------------------------- Adafactor


def _adafactor_start(shape: Sequence[int], stacked: bool) -> Moments:
    """Returns zeros: "rows" (..., R) and "columns" (..., C) of a matrix (..., R, C), or "second" of a vector."""
    if not is_matrix(shape, stacked):
        return {"second": torch.zeros(shape)}
    return {"rows": torch.zeros(shape[:-1]), "columns": torch.zeros((*shape[:-2], shape[-1]))}


def _adafactor(applied: torch.Tensor, _: OptimConfig) -> Direction:
    """Returns Adafactor's `Direction` (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5) for a given rate.

    There is no momentum. A matrix's second moment is factored into its means over columns and over rows, and decays by
    1 - t ** -0.8, where t is `applied`, the number of applied updates with this update. The direction of a matrix or
    vector is scaled down to a root mean square of 1 if it is above 1.
    """
    decay = 1 - applied.clamp(min=1) ** -0.8

    def direction(gradient: torch.Tensor, moments: Moments, stacked: bool) -> tuple[torch.Tensor, Moments]:
        if not is_matrix(gradient.shape, stacked):
            values = gradient.reshape(len(gradient) if stacked else 1, -1)
            second = torch.lerp(values * values + 1e-30, moments["second"].view_as(values), decay)
            return _limited(values, second, -1).view_as(gradient), {"second": second.view_as(gradient)}
        values = wide(gradient).contiguous()
        kinds = ("rows", "columns") if values.shape == gradient.shape else ("columns", "rows")
        square = values * values + 1e-30
        rows = torch.lerp(square.mean(-1), moments[kinds[0]], decay)
        columns = torch.lerp(square.mean(-2), moments[kinds[1]], decay)
        second = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
        limited = _limited(values, second, (-2, -1))
        return limited if kinds[0] == "rows" else limited.mT, dict(zip(kinds, (rows, columns), strict=True))

    return direction


def _limited(gradient: torch.Tensor, second: torch.Tensor, axes: int | tuple[int, int]) -> torch.Tensor:
    """Divides a gradient by the root of its second moment; limits the root mean square over `axes` to 1."""
    direction = gradient * torch.rsqrt(second)
    return direction / direction.square().mean(axes, keepdim=True).sqrt().clamp(min=1.0)


OPTIMIZERS = {"adamw": Optimizer(_adamw_start, _adamw), "adafactor": Optimizer(_adafactor_start, _adafactor)}
