"""One body run over the leading dimension of its inputs: a while loop of the program on XLA, else one of Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]


def scan(body: Body, carry: Tensors, inputs: Tensors, *, reverse: bool = False) -> tuple[Tensors, Tensors]:
    """Runs `body` for each slice of `inputs`, without gradients of its own.

    On XLA the body sees tensors that hold nothing, and is traced once. What it needs from outside comes in the carry:
    of a computed tensor that it merely refers to, it would do the computation again in every turn.

    Args:
        body: from the carry and the slices of one turn, the next carry, alike in shapes and dtypes, and what the turn
            puts out.
        carry: what it starts with; no booleans, which the loop does not take.
        inputs: (N, ...) each, one or more.
        reverse: from the last slice to the first; outputs stay in the place of their inputs.

    Returns:
        The last carry, and the outputs stacked, (N, ...) each.
    """
    turns = inputs[0].shape[0]
    if inputs[0].device.type == "xla" and turns > 1:
        # The public `scan` traces the body through AOTAutograd at every step for a backward pass that is not wanted.
        from torch_xla.experimental.scan import _scan_impl_flat

        return _scan_impl_flat(body, carry, inputs, reverse=reverse)
    outputs = []
    for turn in reversed(range(turns)) if reverse else range(turns):
        carry, output = body(carry, [tensor[turn] for tensor in inputs])
        outputs.append(output)
    if reverse:
        outputs.reverse()
    return carry, [torch.stack(column) for column in zip(*outputs, strict=True)]


def in_turn(body: Body, carry: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
    """`scan` for a few turns, unrolled: on XLA no turn begins before all of the one before it is done.

    Of what a loop carries the compiler makes copies: of an MLP's weights, three matrices. Unrolled it makes none.
    """
    outputs: list[Tensors] = []
    done: Tensors = []
    for turn in range(inputs[0].shape[0]):
        before = carry
        carry, output = body(carry, after(done, [tensor[turn] for tensor in inputs]))
        outputs.append(output)
        done = [*output, *(new for new, old in zip(carry, before, strict=True) if new is not old)]
    return carry, [torch.stack(column) for column in zip(*outputs, strict=True)]


def after(done: Tensors, tensors: Tensors) -> Tensors:
    """The same tensors, which on XLA are not there before all of `done` is; elsewhere things happen in order."""
    if not done or tensors[0].device.type != "xla":
        return tensors
    import torch_xla.core.xla_model as xm

    later = [tensor.clone() for tensor in tensors]
    xm.optimization_barrier_([*done, *later])
    return later
