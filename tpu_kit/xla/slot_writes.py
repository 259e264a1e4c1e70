"""Writes into the key/value cache of generation, in place in a TPU's program."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tpu_kit.torch_tpu import slices
from tpu_kit.torch_tpu.program import is_traced

_SLOTS = 16  # rows in a tile of bf16; a TPU writes whole tiles


def write_slot(stack: torch.Tensor, new: torch.Tensor, place: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """Returns `stack` with `new` in buffer `place` from `slot` on: on CPU and GPU `stack` itself, else a new tensor.

    torch_xla lowers `index_copy` to a scatter, which a TPU cannot run in place. The compiler gives the stack the layout
    of the written values; with the layout of a single slot, attention would copy whole buffers. In a stack of several
    buffers, a single slot is read and written together with its neighbours.

    Args:
        stack: (G, B, heads, S, D).
        new: (B, heads, n, D), of the same dtype.
        place: index of the buffer, () int64 on the stack's device.
        slot: the first slot, (1,) int64 on the stack's device, at most S - n.
    """
    if is_traced(stack):
        return slices.write(stack, new, place, slot)
    if stack.device.type != "xla":
        stack[place].index_copy_(2, slot + torch.arange(new.shape[2], device=new.device), new)
        return stack
    count = min(_SLOTS, stack.shape[3]) if new.shape[2] == 1 and stack.shape[0] > 1 else new.shape[2]
    first = slot if count == new.shape[2] else (slot & -_SLOTS).clamp(max=stack.shape[3] - count)
    return _slot_writer(count)(stack, new, place, first, slot - first)


@cache
def _slot_writer(count: int) -> Any:
    """Returns an operation that writes `count` slots, with old values around a single new slot at the place `own`.

    It takes the stack, the new values, the buffer's index, the first slot to write, and `own`, counted from that slot.
    """
    import torch_xla.core.xla_builder as xb
    import torch_xla.core.xla_op_registry as registry

    def lower(stack: Any, new: Any, place: Any, first: Any, own: Any) -> Any:
        zero = xb.Op.scalar(first.builder(), 0, dtype=xb.Type.S64)
        start, part = [place, zero, zero, first.reshape(()), zero], new.broadcast((1,))
        if count > new.shape().sizes[2]:
            sizes = [1, *new.shape().sizes[:2], count, new.shape().sizes[3]]
            places = xb.Op.iota(first.builder(), xb.Shape.create(xb.Type.S64, sizes), 3)
            alone = new.reshape([1, *new.shape().sizes[:2], sizes[4]]).broadcast_in_dim(sizes, (0, 1, 2, 4))
            mine = places == own.reshape(()).broadcast(sizes)
            part = mine.select(alone, stack.dynamic_slice(start, sizes))
        return stack.dynamic_update_slice(part, start)

    return registry.register(f"tpu_kit_write_{count}_slots", lower)
