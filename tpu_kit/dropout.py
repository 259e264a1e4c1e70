"""Dropout whose mask is a function of a seed and of the place, so that a recomputed layer draws the same.

Inside a loop of XLA a generator with a state would draw the same in every turn, or other numbers in the backward loop.
It also costs less there: a few integer operations, fused with the product, and no mask is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

_HIGH = 0x7FFFFFFF


class SeededDropout(torch.nn.Module):
    """`torch.nn.Dropout` that draws from its buffer `seed`, () int32, which the caller sets for every call.

    Args:
        p: probability of zero.
        site: number of this dropout within the layer: two of one layer draw apart.
    """

    seed: torch.Tensor

    def __init__(self, p: float, site: int) -> None:
        super().__init__()
        self.p, self.site = p, site
        self.register_buffer("seed", torch.zeros((), dtype=torch.int32), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Zeroes each value with probability `p` and scales the others; the identity in evaluation."""
        if not self.training:
            return values
        return _Dropout.apply(values, self.seed, self.p, self.site)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seed: torch.Tensor, p: float, site: int) -> torch.Tensor:
        ctx.save_for_backward(seed)
        ctx.p, ctx.site = p, site
        return _masked(values, seed, p, site)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _masked(upstream, ctx.saved_tensors[0], ctx.p, ctx.site), None, None, None


def _masked(values: torch.Tensor, seed: torch.Tensor, p: float, site: int) -> torch.Tensor:
    scale = 1.0 / (1.0 - p)
    kept = keep_mask(values.shape, seed, p, site, values.device)
    return torch.where(kept, values * scale, torch.zeros_like(values))


def keep_mask(shape: torch.Size, seed: torch.Tensor, p: float, site: int, device: torch.device) -> torch.Tensor:
    """The mask: booleans, true with probability 1 - p, the same on every device for equal arguments.

    A hash of row and column with the seed: the finaliser of Chris Wellons' lowbias32 (public domain), applied to each.
    """
    columns = torch.arange(shape[-1], device=device, dtype=torch.int32)
    rows = torch.arange(shape.numel() // shape[-1], device=device, dtype=torch.int32)
    # Odd constants keep seed, site and row from cancelling out. int32 wraps around, on XLA as on a CPU.
    rows = mix(rows * 0x3C6EF373 + mix(seed + (site + 1) * 0x1E3779B1))
    bits = mix(columns + rows[:, None]) & _HIGH
    return (bits >= int(p * (_HIGH + 1))).view(shape)


def mix(values: torch.Tensor) -> torch.Tensor:
    """A bijection of int32 in which every bit of the input stirs every bit of the output."""
    values = (values ^ _shift(values, 16)) * 0x7FEB352D
    values = (values ^ _shift(values, 15)) * (0x846CA68B - (1 << 32))
    return values ^ _shift(values, 16)


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right that fills with zeros; that of int32 fills with the sign.

    On XLA `>>` is a division, which rounds towards zero, and the function with a number makes int64 of int32.
    """
    return torch.bitwise_right_shift(values, torch.full_like(values, bits)) & ((1 << (32 - bits)) - 1)
