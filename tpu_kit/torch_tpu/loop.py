"""Loops and orders of execution in a function that `program` traces."""

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
    """Adds PyTorch's scan to the traced function, which TorchTPU lowers to a while loop.

    The operation runs below autograd, so the body, which may use autograd, is traced before. TorchTPU loops backward if
    the nodes of the body are annotated so.

    Args:
        body: takes the carry and the slices of one turn, and `constants` if there are any; returns the next carry and
            the outputs of the turn. It may read no other tensors.
        carry: at the start.
        inputs: (N, ...) each.
        reverse: from the last slice to the first; outputs are in the order of the inputs.
        constants: tensors that all turns read.

    Returns:
        The last carry, and the outputs stacked, (N, ...) each.
    """
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

    held = constants or []
    end, last = len(carry), len(carry) + len(inputs)

    def turn(*flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        more = [list(flat[last:])] if constants else []
        state, outputs = body(list(flat[:end]), list(flat[end:last]), *more)
        return tuple(tensor.clone() for tensor in (*state, *outputs))  # none may be an input

    with disable_proxy_modes_tracing():
        like = [*carry, *(tensor[0] for tensor in inputs), *held]
        given = [torch.empty_like(tensor) for tensor in like]
        graph = make_fx(turn)(*given)

    def annotated(*flat: torch.Tensor) -> Any:
        annotate: Any = traceback.annotate  # type: ignore[attr-defined]  # of torch 2.13
        note = annotate({"torch_tpu_scan_reverse": True}) if reverse else contextlib.nullcontext()
        with note:
            return tuple(graph(*flat))

    # The trace has the casts of autocast, for which the operation has no kernel.
    uncast = torch.autocast("tpu", enabled=False)
    with uncast, torch._C._AutoDispatchBelowAutograd(), traceback.preserve_node_meta():
        found = torch.ops.higher_order.scan(annotated, carry, inputs, tuple(held))
    return list(found[:end]), list(found[end:])


def after(done: Tensors, tensors: Tensors) -> Tensors:
    """Returns the tensors, which the traced function then computes with after all of `done`."""
    barrier = torch.tpu.ops.optimization_barrier  # type: ignore[attr-defined]  # torch_tpu adds it
    return list(barrier([*done, *tensors]))[len(done) :]
