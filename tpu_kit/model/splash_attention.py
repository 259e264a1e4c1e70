"""Attention by JAX's splash kernel for TPU: "tpu_kit_splash" in transformers' `AttentionInterface`.

The kernel reads grouped key-value heads without repeating them, supports soft caps and windows, skips masked blocks,
and saves one number per query for the backward pass. Calls without segment ids fall back to `attention.sdpa_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.config.mesh import Spec
from tpu_kit.model.attention import SPLASH, as_value, refuse_dropout, refuse_unknown, register_function, sdpa_attention
from tpu_kit.model.loop import activation_checkpointing
from tpu_kit.model.loop.layer_inputs import PLAIN, Visibility
from tpu_kit.xla import pallas, traced_program
from tpu_kit.xla.pallas import SplashSettings
from tpu_kit.xla.sharding import query_shards, training_spec
from tpu_kit.xla.splash_blocks import padded_length


def connect(model: torch.nn.Module, frozen: bool) -> None:
    """Registers "tpu_kit_splash" in transformers, whatever the arguments; see `families.registry`."""
    register()


def register() -> None:
    """Registers "tpu_kit_splash" in transformers; a second call does nothing."""
    register_function(SPLASH, splash_attention)


def splash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    visibility: Visibility = PLAIN,
    spec: Spec | None = None,
    trains: bool = True,
    s_aux: torch.Tensor | None = None,
    causal: bool = True,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention with the splash kernel; transformers calls it.

    Without segment ids (a decode step, a plain forward pass), or if Q and K differ, it falls back to `sdpa_attention`;
    arguments, result and errors are described there. With segment ids, the mask is ignored. On a mesh, `spec` shards
    query, key and value, by default as in training. If not `trains`, the kernel has no gradients.
    """
    length = query.shape[2]
    if not causal or not (visibility.everywhere or sliding_window is not None):
        visibility = visibility._replace(ahead=None, most_ahead=0)
    window = sliding_window if sliding_window is not None and sliding_window < length else None
    if visibility.segment_ids is None or length != key.shape[2]:
        kwargs |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        mask = None if visibility.segment_ids is not None else attention_mask
        return sdpa_attention(module, query, key, value, mask, visibility=visibility, causal=causal, **kwargs)
    refuse_dropout(module, kwargs.pop("dropout", 0.0))
    refuse_unknown(kwargs)
    query, key = as_value(query, key, value)
    query = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    spec = spec or training_spec(key.shape[1])
    padding = padded_length(length, query_shards(spec)) - length
    query, key, value = (F.pad(each, (0, 0, 0, padding)) if padding else each for each in (query, key, value))
    assert visibility.ahead is None or s_aux is None, "the kernel has no sinks if tokens look ahead"
    ids = visibility.kernel_ids(window)
    segments, *others = ((F.pad(each, (0, padding)) if padding else each).to(torch.int32) for each in ids)
    settings = SplashSettings(window, softcap, spec=spec, trains=trains, ahead=visibility.most_ahead, causal=causal)
    sinks = [] if s_aux is None else [s_aux.float()]
    output = splash_kernel(query, key, value, segments, settings, *others, *sinks)
    return output[:, :, :length].transpose(1, 2).contiguous(), None


def splash_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment_ids: torch.Tensor,
    settings: SplashSettings,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Computes attention within segments with JAX's splash kernel, or without a TPU by `sdpa_attention`.

    Args:
        query: (B, heads, S, D), scaled; S is 128, 256, 512 or a multiple of 1024.
        key: (B, key-value heads, S, D).
        value: (B, key-value heads, S, D).
        segment_ids: (B, S) int32.
        settings: settings of the kernel; with `trains`, query, key, value and sinks get gradients.
        *others: optionally, the second tensor of `Visibility.kernel_ids`, (B, S) int32, and sinks (heads,) fp32.

    Returns:
        (B, heads, S, D).
    """
    if not (settings.interpret or traced_program.runs_kernels(query)):
        more = next((each for each in others if each.ndim == 2), None)
        named: Any = {"s_aux": next((each for each in others if each.ndim == 1), None)}
        window = query.shape[2] if settings.ahead and settings.window is None else settings.window
        named |= {"sliding_window": window, "softcap": settings.softcap, "causal": settings.causal}
        named |= {"visibility": Visibility.of_kernel(segment_ids, more, settings.ahead)}
        result, _ = sdpa_attention(torch.nn.Module(), query, key, value, None, scaling=1.0, **named)
        return result.transpose(1, 2)
    if not settings.trains:
        return pallas.splash_forward(settings, query, key, value, segment_ids, *others)[0]
    return _Splash.apply(settings, query, key, value, segment_ids, *others)


class _Splash(torch.autograd.Function):
    """The kernel with gradients for query, key, value and, if given as the last tensor, sinks."""

    @staticmethod
    def forward(ctx: Any, settings: SplashSettings, *tensors: torch.Tensor) -> torch.Tensor:
        output, log_sums = _forward(settings, *tensors)
        ctx.settings = settings
        ctx.save_for_backward(output, log_sums, *tensors)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        output, log_sums, *tensors = ctx.saved_tensors
        # The log sums include the sinks, so the gradients of query, key and value do not need the sinks.
        inputs = [tensor for tensor in tensors if tensor.ndim > 1]
        gradients = pallas.splash_backward(ctx.settings, output, log_sums, upstream.to(output.dtype), *inputs)
        others: list[torch.Tensor | None] = [None] * (len(tensors) - 3)
        if ctx.needs_input_grad[-1]:
            weights = (tensors[-1][:, None] - log_sums).exp()
            others[-1] = -(weights * (output.float() * upstream.float()).sum(-1)).sum((0, 2))
        return (None, *gradients, *others)


def _forward(settings: SplashSettings, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the kernel's output (B, heads, S, D) and log sums (B, heads, S) for the tensors of `splash_kernel`.

    With remat=outputs, a recomputation reuses the first results.
    """
    if not activation_checkpointing.is_open():
        output, log_sums = pallas.splash_forward(settings, *tensors)
        return output, log_sums

    def compute() -> list[torch.Tensor]:
        output, log_sums = pallas.splash_forward(settings, *tensors)
        return [output.transpose(1, 2).flatten(2), log_sums]  # a head of 64 would be padded to 128 lanes

    dense, log_sums = activation_checkpointing.once(2, compute)
    return dense.unflatten(2, (tensors[0].shape[1], -1)).transpose(1, 2), log_sums
