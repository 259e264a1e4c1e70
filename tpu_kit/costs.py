"""What a step costs by the TPU compiler's text: FLOPs and bytes, loop bodies counted as often as they run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tpu_kit.hlo import Instruction, Module, padded_bytes

_ARRAY = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")
# Nothing moves, or it is counted where it moves: at the start of a copy, in the body of a loop.
_STILL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional",
          "opt-barrier", "after-all", "partition-id", "replica-id", "add-dependency"}  # fmt: skip
_READS_PART = {"dynamic-slice", "slice", "gather"}


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes."""

    flops: float
    bytes: float

    def plus(self, other: Cost, times: float) -> Cost:
        """This and `times` the other."""
        return Cost(self.flops + times * other.flops, self.bytes + times * other.bytes)


def count_trips(module: Module, analyse: Callable[[str], dict[str, float]]) -> tuple[Cost, Cost]:
    """The cost of a step, with loop bodies counted as often as they run, and with each counted once.

    Args:
        module: the program.
        analyse: XLA's cost analysis of a module's text: "flops" and "bytes accessed", loop bodies counted once, kernels
            without FLOPs.
    """
    trips = module.trips()

    @cache
    def once(name: str) -> Cost:
        cost = analyse(module.part(name))
        return Cost(cost["flops"] + _kernel_flops(module, name), cost["bytes accessed"])

    @cache
    def all_trips(name: str) -> Cost:
        total = once(name)
        for loop, body, _ in module.loops(name):
            total = total.plus(all_trips(body), trips[loop.name] or 1).plus(once(body), -1)
        return total

    return all_trips(module.entry), once(module.entry)


def _kernel_flops(module: Module, computation: str) -> float:
    """What the kernels of a computation say of themselves; loop bodies counted once."""
    total = 0.0
    for one in module.computations[computation]:
        estimate = re.search(r'"cost_estimate":(\{[^}]*\})', one.rest) if one.opcode == "custom-call" else None
        total += float(json.loads(estimate[1]).get("flops", 0)) if estimate else 0.0
        if one.opcode in ("while", "call", "conditional"):
            total += sum(_kernel_flops(module, name) for name in one.called)
    return total


def splash_flops(module: Module) -> float:
    """FLOPs of all splash kernels of a step, which say nothing of themselves, by formula.

    A block of Bq queries and Bk keys takes 2 Bq Bk D FLOPs for each matrix product: two forward (scores, output), five
    backward (scores again, and the gradients of weights, query, key and value). The kernel's first operand says how
    many blocks there are: a causal mask leaves i + 1 of row i, and a window at most the width of the grid.
    """
    return sum(
        times * _splash(one)
        for name, times in module.weights().items()
        for one in module.computations[name]
        if one.opcode == "custom-call" and "splash_mha" in one.name
    )


def _splash(one: Instruction) -> float:
    forward = "splash_mha_fwd" in one.name
    given = re.search(r"operand_layout_constraints=\{(.*?)\}\}", one.rest)
    sides = ("block_kv", "block_q") if forward else ("block_kv_dkv", "block_q_dkv")
    block = re.search(r"{}_(\d+).*{}_(\d+)".format(*sides), one.name)
    assert given and block, one.name
    arrays = [[int(size) for size in sizes.split(",")] for sizes in re.findall(r"\w+\[([\d,]+)\]", given[1])]
    queries = re.search(r"(?:bf16|f32)\[([\d,]+)\]", given[1])
    assert queries, one.name
    (_, *grid), (*rows, heads, _, size) = arrays[0], [int(size) for size in queries[1].split(",")]
    batch = math.prod(rows)  # a single row has no axis
    visited = sum(min(row + 1, *grid) for row in range(max(grid)))
    return (4 if forward else 10) * batch * heads * visited * int(block[1]) * int(block[2]) * size


def hbm_bytes(module: Module) -> float:
    """Bytes that a step's instructions read from HBM and write to it, tiles filled up.

    An operand or result that the compiler keeps in on-chip memory is none of them, though cost analyses count it; of
    what is only sliced or gathered the part is counted, and of what is updated in place the update.
    """
    return sum(
        times * _moved(module, name, one) for name, times in module.weights().items()
        for one in module.computations[name] if one.opcode not in _STILL and not one.opcode.endswith("-done")
    )  # fmt: skip


def _moved(module: Module, computation: str, one: Instruction) -> int:
    shapes = _ARRAY.findall(one.shape)
    if one.opcode in ("copy-start", "slice-start"):  # (to, from, context) and (from, to, context)
        to = shapes[0 if one.opcode == "copy-start" else 1]
        return _size(to) * sum(padded_bytes(shape) > 0 for shape in shapes[:2])
    names = module.by_name(computation)
    operands = [names[name].shape for name in one.operands]
    if one.opcode == "fusion":
        read = [_read(module, one.called[0], number) for number in range(len(operands))]
        written = _written(module, one.called[0])
    else:
        read = [_size(one.shape) if one.opcode in _READS_PART and not number else math.inf
                for number in range(len(operands))]  # fmt: skip
        written = [math.inf] * len(shapes)
        if one.opcode == "dynamic-update-slice":
            read[0], written = 0, [_size(operands[1])]
    pairs = [*zip(map(_bytes, operands), read, strict=True), *zip(map(padded_bytes, shapes), written, strict=True)]
    return int(sum(min(whole, part) for whole, part in pairs))


def _bytes(shape: str) -> int:
    return sum(padded_bytes(part) for part in _ARRAY.findall(shape))


def _size(shape: str) -> int:
    """Padded bytes, wherever it lies."""
    return _bytes(re.sub(r"S\(\d+\)", "", shape))


def _read(module: Module, fused: str, number: int) -> float:
    """How many bytes of its parameter a fused computation reads at most; infinity for all."""
    inside = module.computations[fused]
    aliases = {one.name for one in inside if one.opcode == "parameter" and one.operands[0] == str(number)}
    total = 0.0
    for one in inside:
        places = [place for place, name in enumerate(one.operands) if name in aliases and one.opcode != "parameter"]
        if not places:
            continue
        if one.opcode == "bitcast" and not one.root:
            aliases.add(one.name)
        elif one.opcode in _READS_PART and places == [0]:
            total += _size(one.shape)
        elif one.opcode == "fusion":
            total += sum(_read(module, one.called[0], place) for place in places)
        elif one.opcode != "dynamic-update-slice" or places != [0]:
            return math.inf
    return total


def _written(module: Module, fused: str) -> list[float]:
    """How many bytes of each of its results a fused computation writes at most; infinity for all."""
    names, root = module.by_name(fused), module.root(fused)
    found: list[float] = []
    for name in root.operands if root.opcode == "tuple" else [root.name]:
        one = names[name]
        while one.opcode == "bitcast":
            one = names[one.operands[0]]
        index = 0
        if one.opcode == "get-tuple-element":
            index, one = int(one.attribute("index") or 0), names[one.operands[0]]
        if one.opcode == "fusion":
            inner = _written(module, one.called[0])
            found += inner if one.root else inner[index : index + 1]
        else:
            update = one.opcode == "dynamic-update-slice"
            parts = len(_ARRAY.findall(one.shape)) if one.root else 1  # a reduction of several arrays has several
            found += [_size(names[one.operands[1]].shape) if update else math.inf] * parts
    return found
