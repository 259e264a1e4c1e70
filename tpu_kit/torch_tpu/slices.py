"""Reads and writes slices at an index on the device; TorchTPU's own indexing would read the index on the host."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tpu_kit.torch_tpu import kernels


def take(stack: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Returns the slice of a stack (G, ...) at `place`, () integer."""
    return kernels.call(functools.partial(_taken), [stack, place.int()], 1)[0]


def write(stack: torch.Tensor, new: torch.Tensor, place: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Returns a new stack (G, B, heads, S, D) with `new` (B, heads, n, D) at `place` () from slot `slot` (1,) on."""
    return kernels.call(functools.partial(_written), [stack, new, place.int(), slot.int()], 1)[0]


def _taken(stack: Any, place: Any) -> Any:
    import jax

    return (jax.lax.dynamic_index_in_dim(stack, place, keepdims=False),)


def _written(stack: Any, new: Any, place: Any, slot: Any) -> Any:
    import jax

    return (jax.lax.dynamic_update_slice(stack, new[None], (place, 0, 0, slot[0], 0)),)
