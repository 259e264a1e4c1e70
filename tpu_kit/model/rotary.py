"""Rotary embeddings: constant frequencies, and rotation by halves on XLA.

In transformers, the longest position of a batch changes the rotary frequencies of the whole batch: beyond a certain
length, "longrope" (Phi-3) uses its long factors and "dynamic" another base. So a document would depend on its
neighbours, and the host would read the device in every step. Up to `max_positions`, the kit keeps frequencies constant.

transformers computes x cos + rotate_half(x) sin for queries and keys, which writes the rotated halves to memory, and
again in the backward pass. On XLA, the kit rotates the two halves separately, with the same rounding. The gradient is
the rotation by the opposite angle.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def max_positions(config: Any) -> int | None:
    """Returns the length up to which a text configuration's rotary frequencies are constant; None without a limit.

    This is max_position_embeddings or, if it is smaller, longrope's original_max_position_embeddings.
    """
    settings = getattr(config, "rope_parameters", None) or {}
    ropes = [one for one in (settings, *settings.values()) if isinstance(one, dict)]  # a dict, or a dict per layer type
    limits = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    limits.append(getattr(config, "max_position_embeddings", None))
    return min((limit for limit in limits if limit), default=None)


def check_length(config: Any, max_length: int) -> None:
    """Raises ValueError if longrope changes the rotary frequencies in rows of `max_length` tokens; see `max_positions`.

    Rows of more than max_position_embeddings pass, because `check_positions` refuses them; so do rows without this
    limit.
    """
    most, limit = getattr(config, "max_position_embeddings", None), max_positions(config)
    if most is not None and limit is not None and limit < max_length <= most:
        raise ValueError(
            f"data.max_length={max_length}: {config.model_type} with longrope changes the rotary frequencies of a "
            f"whole batch when one row has more than {limit} tokens, so a document would depend on its neighbours; "
            f"set data.max_length={limit} or less"
        )


def fix_rotary(model: torch.nn.Module) -> Callable[[], None]:
    """Makes "longrope" and "dynamic" frequencies of a model constant, in place; returns a function that undoes it."""
    before: list[tuple[torch.nn.Module, dict[str, Any]]] = []
    for part in model.modules():
        kind: Any = getattr(part, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in kinds):
            buffers = dict(part.named_buffers(recurse=False))
            before.append((part, {"rope_type": kind, **buffers}))
            part.rope_type = dict.fromkeys(kind, "default") if isinstance(kind, dict) else "default"  # type: ignore[assignment]  # no tensor
            for name, frequencies in buffers.items():
                if name.endswith("original_inv_freq"):
                    setattr(part, name.replace("original_", ""), frequencies.clone())

    def undo() -> None:
        for part, values in before:
            for name, value in values.items():
                setattr(part, name, value)

    return undo


# --------------------------------------------------------------------------------------------------- rotation by halves

_FUNCTION = "apply_rotary_pos_emb"


def connect(model: torch.nn.Module, frozen: bool = True) -> None:
    """Makes the layers of a transformers model rotate by halves on XLA; a second call does nothing.

    Replaces the global `apply_rotary_pos_emb` of the modules that define the layers, also for other models of the
    family. It stays if it computes something else than x cos + rotate_half(x) sin. `frozen` has no effect.
    """
    for module in map(sys.modules.__getitem__, {type(part).__module__ for part in model.modules()}):
        own = vars(module).get(_FUNCTION)
        if own is not None and not hasattr(own, "_tpu_kit_replaces") and _rotates_halves(own):
            replaced = functools.partial(_rotate, own)
            replaced._tpu_kit_replaces = own  # type: ignore[attr-defined]  # a partial takes attributes
            setattr(module, _FUNCTION, replaced)


def _rotates_halves(own: Callable[..., Any]) -> bool:
    """Returns whether a family's function, on an example, computes x cos + rotate_half(x) sin for queries and keys."""
    query, key, angles = (
        torch.arange(24.0, device="cpu").view(1, 1, 3, 8).sin() * factor for factor in (1.0, 2.0, 3.0)
    )
    angles = angles[:, 0, :, :4].repeat(1, 1, 2)
    try:
        for dtype in (torch.float32, torch.bfloat16):  # some families round the result to the queries' dtype
            given = query.to(dtype), key.to(dtype), angles.cos(), angles.sin()
            if not all(map(torch.equal, own(*given), rotate_halves(*given))):
                return False
    except (TypeError, ValueError, RuntimeError, IndexError):  # it has other arguments or results
        return False
    return True


def _rotate(
    own: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Returns (q, k) rotated by halves on XLA; by `own` elsewhere, and if only a part of a head rotates."""
    if q.device.type != "xla" or not cos.shape[-1] == q.shape[-1] == k.shape[-1]:
        return own(q, k, cos, sin, *args, **kwargs)
    return rotate_halves(q, k, cos, sin, *args, **kwargs)


def rotate_halves(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (q, k) like transformers' `apply_rotary_pos_emb`, for `cos` and `sin` with two equal halves."""
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half].unsqueeze(unsqueeze_dim), sin[..., :half].unsqueeze(unsqueeze_dim)
    return _Rotation.apply(q, cos, sin), _Rotation.apply(k, cos, sin)


def _by_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates (..., D) by angles whose cosines and sines are (..., D / 2)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class _Rotation(torch.autograd.Function):
    """`_by_halves` with a gradient for x only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _by_halves(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _by_halves(upstream, cos, -sin).to(ctx.dtype), None, None
