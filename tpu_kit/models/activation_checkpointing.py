"""optim.remat=outputs: results of products and of attention are kept, what lies between them is computed again.

That costs next to no FLOPs, as norms, rotary angles and activation functions are none. It keeps some 60 % of what
remat=none does (Qwen2.5-0.5B). In a loop over layers the forward pass of a layer notes these results, in order, and the
loop puts them out. The backward pass goes through the layer once more, and takes them where they would be computed: to
differentiate a product its result is not needed, so nothing reads what is computed in its place, and XLA leaves it out.

Layers that are no loop, on other devices, are checkpointed by torch, whose own means for this is told what to keep.

Dropout whose mask is a function of a seed and of the place, so that a recomputed layer draws the same.

Inside a loop of XLA a generator with a state would draw the same in every turn, or other numbers in the backward loop.
It also costs less there: a few integer operations, fused with the product, and no mask is kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


_LEAST_GAIN = 8  # of a product whose result is as many times wider than what is summed up, as LoRA's second one


class _Tape:
    """What a first pass keeps; or, if that is given, what a second one takes."""

    def __init__(self, kept: Sequence[torch.Tensor] | None = None) -> None:
        self.kept: list[torch.Tensor] = []
        self.known = None if kept is None else iter(kept)


_tape: ContextVar[_Tape | None] = ContextVar("tape", default=None)


@contextmanager
def recording(wanted: bool) -> Iterator[list[torch.Tensor]]:
    """While open, what is to be kept is added to the list that it gives; if it is wanted at all."""
    tape = _Tape()
    token = _tape.set(tape if wanted else None)
    try:
        yield tape.kept
    finally:
        _tape.reset(token)


@contextmanager
def replaying(kept: Sequence[torch.Tensor], wanted: bool) -> Iterator[None]:
    """While open, the same pass takes what it kept in the place of what it would compute."""
    token = _tape.set(_Tape(kept) if wanted else None)
    try:
        yield
    finally:
        _tape.reset(token)


def is_open() -> bool:
    """Whether either is."""
    return _tape.get() is not None


def keep(computed: torch.Tensor) -> torch.Tensor:
    """A result to be kept: itself, or in a second pass the first one's, differentiated as the one computed now."""
    # torch.compile cannot read the variable; what it compiles are no loops, which alone have tapes.
    tape = None if torch.compiler.is_compiling() else _tape.get()
    if tape is None:
        return computed
    if tape.known is None:
        tape.kept.append(computed)
        return computed
    known: torch.Tensor = _Known.apply(computed, next(tape.known))
    return known


def once(count: int, compute: Callable[[], Sequence[torch.Tensor]]) -> Sequence[torch.Tensor]:
    """`count` results to be kept of what autograd does not see; a second pass does not compute them."""
    tape = _tape.get()
    if tape is None:
        return compute()
    if tape.known is None:
        found = compute()
        tape.kept += found
        return found
    return [next(tape.known) for _ in range(count)]


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept.view_as(kept)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        return upstream, None


def keep_products(layer: torch.nn.Module) -> None:
    """Has what the linear modules of a layer give be kept. With an adapter about it, what both give together."""
    for child in layer.children():
        if isinstance(child, torch.nn.Linear) or isinstance(getattr(child, "base_layer", None), torch.nn.Linear):
            child.register_forward_hook(_keep_output)
        else:
            keep_products(child)


def _keep_output(module: torch.nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
    return keep(output)


# ---------------------------------------------------------------------------------------------- layers that are no loop

_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_ATTENTION = "aten._scaled_dot_product_"  # of its kernels


def contexts() -> Any:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint` that keeps the same.

    Products of batches are attention's own scores where it has no kernel, which are large, and not kept.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operation)
    kept = name.startswith(_ATTENTION)
    if name in _PRODUCTS:
        first, second = args[-2:]
        kept = second.shape[1] < _LEAST_GAIN * first.shape[1]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
