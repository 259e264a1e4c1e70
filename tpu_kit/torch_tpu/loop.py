"""Loops and ordering constraints in functions that `program` traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Tensors = list[torch.Tensor]


def scan(
    body: Callable[..., tuple[Tensors, Tensors]],
    carry: Tensors,
    inputs: Tensors,
    reverse: bool = False,
    constants: Tensors | None = None,
) -> tuple[Tensors, Tensors]:
    """Adds PyTorch's scan to the traced function; TorchTPU lowers it to a while loop.

    The operation runs below autograd, so the body, which may use autograd, is traced first. An annotation of the body's
    nodes makes TorchTPU loop backward.

    Args:
        body: takes lists of tensors: the carry, the slices of an iteration, and `constants` unless they are None or [].
            It returns the next carry, with equal shapes and dtypes, and the outputs of the iteration. It must not read
            other tensors.
        carry: the initial carry.
        inputs: one or more tensors (N, ...).
        reverse: whether to go from the last slice to the first; outputs keep the order of the inputs.
        constants: tensors that all iterations read.

    Returns:
        The final carry, and the outputs stacked to (N, ...).
    """
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    held = constants or []
    end, last = len(carry), len(carry) + len(inputs)

    def turn(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        more = [list(flat[last:])] if constants else []
        state, outputs = body(list(flat[:end]), list(flat[end:last]), *more)
        return tuple(tensor.clone() for tensor in (*state, *outputs))  # results must not be inputs

    with disable_proxy_modes_tracing():
        like = [*carry, *(tensor[0] for tensor in inputs), *held]
        given = [torch.empty_like(tensor) for tensor in like]
        graph = make_fx(turn)(*given)

    def annotated(*flat: torch.Tensor) -> Any:
        annotate: Any = traceback.annotate  # type: ignore[attr-defined]  # torch 2.13
        note = annotate({"torch_tpu_scan_reverse": True}) if reverse else contextlib.nullcontext()
        with note:
            return tuple(graph(*flat))

    # The operation has no kernel for autocast; the trace already contains autocast's casts.
    uncast = torch.autocast("tpu", enabled=False)
    with uncast, torch._C._AutoDispatchBelowAutograd(), traceback.preserve_node_meta():
        found = torch.ops.higher_order.scan(annotated, carry, inputs, tuple(held))
    return list(found[:end]), list(found[end:])


def after(done: Tensors, tensors: Tensors) -> Tensors:
    """Returns `tensors`, made dependent on all of `done` in the traced function."""
    barrier = torch.tpu.ops.optimization_barrier  # type: ignore[attr-defined]  # torch_tpu adds it
    return list(barrier([*done, *tensors]))[len(done) :]
