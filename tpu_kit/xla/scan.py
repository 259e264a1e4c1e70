"""One body run over the leading dimension of its inputs: a while loop of the program on XLA, else one of Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

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


def rewrite(
    body: Callable[[Tensors, Tensors, Tensors], Tensors],
    state: Tensors,
    inputs: Tensors,
    constants: Tensors,
    turns: int,
) -> None:
    """Gives `state` new values, part after part: on XLA in its own memory, and with the work of one part at a time.

    Args:
        body: from parts of `state` and of `inputs`, and the constants, the new part of each tensor of `state`.
        state: tensors to change; of each a part is as many of its rows as there are for a turn.
        inputs: tensors to read, in parts too.
        constants: whatever else the body needs; no booleans, if there are several turns.
        turns: number of parts, of which the first dimension of each tensor is a multiple.
    """

    def parts(tensors: Tensors, take: Callable[[torch.Tensor, int], torch.Tensor]) -> Tensors:
        return [take(tensor, tensor.shape[0] // turns) for tensor in tensors]

    if turns == 1:
        news = body(state, inputs, constants)
    elif state[0].device.type == "xla":
        take, put = _parts()
        ends = len(constants), len(constants) + len(inputs)

        def turn(carry: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            fixed, read, now = carry[: ends[0]], carry[ends[0] : ends[1]], carry[ends[1] :]
            (place,) = slices
            before, given = (parts(tensors, lambda one, rows: take(one, place, rows=rows)) for tensors in (now, read))
            news = body(before, given, fixed)
            written = [put(one, new, place) for one, new in zip(now, news, strict=True)]
            return [*fixed, *read, *written], []

        carry, _ = scan(turn, [*constants, *inputs, *state], [torch.arange(turns, device=state[0].device)])
        news = carry[ends[1] :]
    else:
        for number in range(turns):
            before, given = (
                parts(tensors, lambda one, rows: one[number * rows : (number + 1) * rows])  # noqa: B023
                for tensors in (state, inputs)
            )
            for old, new in zip(before, body(before, given, constants), strict=True):
                old.copy_(new)
        return
    for old, new in zip(state, news, strict=True):
        old.copy_(new)


@cache
def _parts() -> tuple[Any, Any]:
    """Reads a part of a tensor, and writes one: what torch_xla makes of an index that is a tensor works in no place."""
    import torch_xla.core.xla_builder as xb
    import torch_xla.core.xla_op_registry as registry

    def start(tensor: Any, place: Any, rows: int) -> list[Any]:
        count, zero = (xb.Op.scalar(place.builder(), number, dtype=xb.Type.S64) for number in (rows, 0))
        return [place * count, *[zero] * (tensor.shape().rank - 1)]

    def take(tensor: Any, place: Any, *, rows: int) -> Any:
        return tensor.dynamic_slice(start(tensor, place, rows), [rows, *tensor.shape().sizes[1:]])

    def put(tensor: Any, part: Any, place: Any) -> Any:
        return tensor.dynamic_update_slice(part, start(tensor, place, part.shape().sizes[0]))

    return registry.register("tpu_kit_take_part", take), registry.register("tpu_kit_put_part", put)
