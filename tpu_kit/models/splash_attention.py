"""Splash attention, the Pallas kernel of JAX that reads grouped key-value heads as they are, as a torch function.

It takes soft caps and windows, skips the blocks that these mask, and keeps a number a query, of which flash keeps 256.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu_kit.models import activation_checkpointing
from tpu_kit.xla import pallas
from tpu_kit.xla.pallas import SplashSettings


def splash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment_ids: torch.Tensor, settings: SplashSettings
) -> torch.Tensor:
    """Causal attention within segments; the query comes scaled.

    Args:
        query: (B, heads, S, D) on XLA; S is 128, 256, 512 or a multiple of 1024.
        key: (B, key-value heads, S, D).
        value: (B, key-value heads, S, D).
        segment_ids: (B, S) int32.
        settings: of the kernel.

    Returns:
        (B, heads, S, D).
    """
    output: torch.Tensor = _Splash.apply(query, key, value, segment_ids, settings)
    return output


class _Splash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segment_ids: torch.Tensor,
        settings: SplashSettings,
    ) -> torch.Tensor:
        output, log_sums = _kept_forward(settings, query, key, value, segment_ids)
        ctx.settings = settings
        ctx.save_for_backward(query, key, value, segment_ids, output, log_sums)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = pallas.splash_backward(ctx.settings, *ctx.saved_tensors, upstream.to(ctx.saved_tensors[0].dtype))
        return (*gradients, None, None)


def _kept_forward(settings: SplashSettings, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logs of the forward kernel; with remat=outputs a second pass takes those of the first (`remat`)."""
    if not activation_checkpointing.is_open():
        output, log_sums = pallas.splash_forward(settings, *tensors)
        return output, log_sums

    def compute() -> list[torch.Tensor]:
        output, log_sums = pallas.splash_forward(settings, *tensors)
        return [output.transpose(1, 2).flatten(2), log_sums]  # heads of 64 would each fill 128 lanes

    dense, log_sums = activation_checkpointing.once(2, compute)
    return dense.unflatten(2, (tensors[0].shape[1], -1)).transpose(1, 2), log_sums
