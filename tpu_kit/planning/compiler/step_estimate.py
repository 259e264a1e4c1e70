"""Estimates the time of a compiled step by the TPU compiler's own cost model, without a chip.

The compiler annotates most instructions with estimated cycles. Their sum over all trips, divided by the clock, compares
programs of the same shapes, because it includes tiles, layouts and data that stays on the chip. For a v5e, a product of
8,192^3 takes 6.4 ms (88 % of the peak), and a streaming addition reaches 57 % of the bandwidth. The estimate was never
compared with a chip; differences below 5 % mean nothing.

Instructions without cycles cost, by formula:

- a kernel, or another instruction: the longer of the times of its FLOPs and its bytes. Splash attention's FLOPs take
  longer if its heads are narrower than the matrix unit;
- an asynchronous copy: its bytes at HBM bandwidth, minus the time of the instructions between its start and its end;
  copies run one after the other;
- a collective: nothing, because `cost.timed` adds its time.

Array sizes tell the kinds of work apart, so programs of other trainers can be read, too.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tpu_kit.machine.chips import Chip
    from tpu_kit.model.shape import Shape
    from tpu_kit.xla.hlo import Cost, Module

_SLICES = {"dynamic-slice", "dynamic-update-slice"}


class Sizes(NamedTuple):
    """Array sizes of a model, which tell kinds of work apart.

    Attributes:
        vocabulary: size of the vocabulary.
        hidden: size of the hidden states.
        rank: rank of the adapters.
        heads: numbers of query heads and of key heads, of all kinds of layers.
        head_dims: head sizes.
        middle: inner sizes of the MLPs.
    """

    vocabulary: int
    hidden: int
    rank: int
    heads: frozenset[int]
    head_dims: frozenset[int]
    middle: frozenset[int]

    @classmethod
    def of(cls, shape: Shape, rank: int) -> Sizes:
        """Returns the sizes of a model with adapters of rank `rank`."""
        middle = {size for kind in shape.kinds for one in kind.mlp_linears for size in (one.inputs, one.outputs)}
        heads = {number for kind in shape.kinds for number in (kind.heads, kind.kv_heads)}
        dims = {kind.head_dim for kind in shape.kinds}
        return cls(
            shape.vocabulary, shape.hidden, rank, frozenset(heads), frozenset(dims), frozenset(middle - {shape.hidden})
        )


def estimated_seconds(module: Module, instructions: list[Cost], sizes: Sizes, chip: Chip) -> dict[str, float]:
    """Estimates the time of a step by kind of work, without collectives.

    Args:
        module: the compiled program.
        instructions: costs from `hlo.instruction_costs`.
        sizes: array sizes of the model.
        chip: the program's target.

    Returns:
        Seconds of a step by kind, the largest first; kinds without instructions are left out. The kinds are "attention
        kernel", "other kernels", "embedding", "loss", "adapters", "base products", "optimizer", "rope, layouts of
        attention", "slices and stacks", "MLP, elementwise", "norms, residuals, casts", "other" and "copies that are
        waited for".
    """
    spent: dict[str, float] = defaultdict(float)
    known = {(one.computation, one.op.name): one for one in instructions}
    alone: dict[str, float] = {}  # seconds of one run of a computation

    def walk(computation: str) -> float:
        now, free = 0.0, 0.0  # seconds since the computation began: current time, and end of the last copy
        ends: dict[str, float] = {}
        for op in module.computations[computation].values():
            if op.opcode in ("while", "call", "conditional"):
                called = [op.attribute("body")] if op.opcode == "while" else op.called
                trips = module.trips[op.name] or 1 if op.opcode == "while" else 1
                now += trips * sum(alone[name] if name in alone else walk(name) for name in called)
            elif op.opcode.endswith("-done") and (end := ends.get(op.operands[0])) is not None:
                spent["copies that are waited for"] += module.runs[computation] * max(0.0, end - now)
                now = max(now, end)
            elif (one := known.get((computation, op.name))) is not None and one.kind != "collective":
                if _is_beside(one):
                    free = ends[op.name] = max(free, now) + one.bytes / chip.hbm_bandwidth
                    continue
                taken = instruction_seconds(one, chip)
                spent[_kind(one, sizes, computation != module.entry)] += one.runs * taken
                now += taken
        alone[computation] = now
        return now

    walk(module.entry)
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def instruction_seconds(one: Cost, chip: Chip) -> float:
    """Returns the seconds of one run of an instruction, by its cycles or else by FLOPs and bytes.

    It is 0 for collectives, and for asynchronous copies without cycles. The chip's clock and speed must be known.
    """
    assert chip.clock is not None and chip.bf16_flops is not None  # known for every chip that can be compiled for
    if one.kind == "collective" or _is_beside(one):
        return 0.0
    if one.cycles is not None:
        return one.cycles / chip.clock
    narrow = 1.0
    if "splash" in one.op.name:
        queries = next(_arrays(shape)[0] for shape in one.operands if shape.startswith(("bf16", "f32")))
        narrow = max(1.0, (chip.matrix_unit or 0) / queries[-1])
    return max(narrow * one.flops / chip.bf16_flops, one.bytes / chip.hbm_bandwidth)


def _is_beside(one: Cost) -> bool:
    """Whether an instruction starts an asynchronous operation for which the compiler estimates no cycles."""
    return one.op.opcode.endswith("-start") and one.cycles is None


def _arrays(shape: str) -> list[list[int]]:
    """Returns the dimensions of all arrays in the text of a shape, without scalars."""
    return [[int(size) for size in found.split(",")] for found in re.findall(r"\w\[([\d,]+)\]", shape)]


def _kind(one: Cost, sizes: Sizes, in_loop: bool) -> str:
    """Returns the kind of work of an instruction; `in_loop`: it is not in the entry computation.

    The kinds are "attention kernel", "other kernels", "embedding", "loss", "adapters", "base products", "optimizer",
    "rope, layouts of attention", "slices and stacks", "MLP, elementwise", "norms, residuals, casts" and "other".
    """
    if one.kind == "kernel":
        return "attention kernel" if "splash" in one.op.name else "other kernels"
    results = _arrays(one.op.shape)
    shapes = [*results, *(array for shape in one.operands for array in _arrays(shape))]
    every = {size for array in shapes for size in array}
    products = [{size for shape in product for array in _arrays(shape) for size in array} for product in one.products]
    if sizes.vocabulary in every:
        return "embedding" if "gather" in one.opcodes and not products else "loss"
    if products:
        adapters = [sizes.rank in product for product in products]
        return "adapters" if all(adapters) else "base products"
    rows = [array for array in results if len(array) >= 3]
    if any(array[-1] in sizes.head_dims | {size // 2 for size in sizes.head_dims} for array in rows) and any(
        sizes.heads.intersection(array[:-1]) for array in rows
    ):
        return "rope, layouts of attention"
    if in_loop and one.opcodes & _SLICES:
        return "slices and stacks"
    if sizes.rank in every:
        return "adapters" if in_loop else "optimizer"
    if sizes.middle & every:
        return "MLP, elementwise"
    if sizes.hidden in every:
        return "norms, residuals, casts"
    return "other"
