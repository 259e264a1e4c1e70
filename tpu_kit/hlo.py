"""Reading the TPU compiler's text of a compiled program: its loops with their trips, its collectives.

The text is XLA's own (`HloModule.to_string()`): computations of instructions, `%name = shape opcode(operands), ...`, in
the order in which they run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

MOST_TRIPS = 1_000_000
"""A loop is followed so far; nothing in a training step comes near."""

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
         "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "f8e5m2": 8, "f8e4m3fn": 8}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SAME = {"copy", "bitcast", "bitcast-convert", "convert", "reshape", "opt-barrier"}


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: its name, without the percent sign.
        shape: the text of its result's shape, layout included.
        opcode: for example "fusion".
        operands: names of the instructions it takes; for "parameter" its number, for "constant" the value.
        rest: the text after the operands: attributes, metadata.
        root: whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """A computation or number that the attributes name, such as "body" or "index"."""
        found = re.search(rf"(?:^|[ ,{{]){name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def called(self) -> list[str]:
        """Computations that run when this does."""
        found = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", self.rest)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        return found + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


class Module:
    """A compiled program.

    Attributes:
        computations: the instructions of each, in the order in which they run.
        entry: the name of the one that is the program.
    """

    def __init__(self, text: str) -> None:
        self._texts: dict[str, str] = {}
        self.computations: dict[str, list[Instruction]] = {}
        self.header, self.entry = text.partition("\n")[0], ""
        lines: list[str] = []
        for line in text.splitlines()[1:]:
            if line.endswith("{") and not line.startswith(" "):
                lines = [line.removeprefix("ENTRY ")]
                name = lines[0].split(" ", 1)[0].removeprefix("%")
                self.entry = name if line.startswith("ENTRY ") else self.entry
            elif line.startswith("}"):
                self._texts[name] = "\n".join([*lines, "}"])
                self.computations[name] = [_instruction(one) for one in lines[1:]]
            elif lines:
                lines.append(line)
        assert self.entry, "no ENTRY in the compiled text"

    def root(self, computation: str) -> Instruction:
        """The result of a computation."""
        return next(one for one in reversed(self.computations[computation]) if one.root)

    def by_name(self, computation: str) -> dict[str, Instruction]:
        """Its instructions by name."""
        return self._indexed.setdefault(computation, {one.name: one for one in self.computations[computation]})

    @cached_property
    def _indexed(self) -> dict[str, dict[str, Instruction]]:
        return {}

    def part(self, computation: str) -> str:
        """A module of which `computation` is the program."""
        needed, queue = dict.fromkeys([computation]), [computation]
        while queue:
            for one in self.computations[queue.pop()]:
                new = [name for name in one.called if name not in needed]
                needed |= dict.fromkeys(new)
                queue += new
        others = "\n\n".join(self._texts[name] for name in self._texts if name in needed and name != computation)
        return f"HloModule part\n\n{others}\n\nENTRY {self._texts[computation]}\n"

    def loops(self, computation: str) -> Iterator[tuple[Instruction, str, str]]:
        """While loops that run in a computation, or in what it calls: (loop, its body, the computation it is in)."""
        for one in self.computations[computation]:
            if one.opcode == "while":
                body = one.attribute("body")
                assert body is not None
                yield one, body, computation
            elif one.opcode in ("call", "conditional"):
                for name in one.called:
                    yield from self.loops(name)

    def trips(self) -> dict[str, int | None]:
        """How often each loop turns, by the loop's name; None where that cannot be told from the text."""
        found: dict[str, int | None] = {}
        queue = [self.entry]
        while queue:
            for loop, body, where in self.loops(queue.pop()):
                found[loop.name] = self._trips(loop, where)
                queue.append(body)
        return found

    def _trips(self, loop: Instruction, where: str) -> int | None:
        """Follows the loop's counters: the compiler splits a 64-bit one in two, so no pattern would do."""
        condition, body = loop.attribute("condition"), loop.attribute("body")
        assert condition is not None and body is not None
        state = _Scalars(self, where, None).value(loop.operands[0])
        for trips in range(MOST_TRIPS):
            going = _Scalars(self, condition, [state]).result()
            if going is None or not isinstance(state, list):
                return None
            if not going:
                return trips
            state = _Scalars(self, body, [state]).result()
        return None

    def weights(self) -> dict[str, int]:
        """How often each computation runs, of those that are not part of a fusion; an unknown loop counts as one."""
        trips, found = self.trips(), {self.entry: 1}
        queue = [self.entry]
        while queue:
            name = queue.pop()
            for loop, body, _ in self.loops(name):
                found[body] = found.get(body, 0) + found[name] * (trips[loop.name] or 1)
                queue.append(body)
            for one in self.computations[name]:
                if one.opcode in ("call", "conditional"):
                    found |= {called: found.get(called, 0) + found[name] for called in one.called}
        return found

    def collectives(self) -> list[dict[str, Any]]:
        """Per kind: how many run in a step, and the bytes of their results."""
        found: dict[str, list[int]] = {}
        for name, times in self.weights().items():
            for one in self.computations[name]:
                kind = one.opcode.removesuffix("-start")
                if kind not in _COLLECTIVES:
                    continue
                arrays = _ARRAY.findall(one.shape)
                # The start of most collectives returns what it was given, too.
                given = len(arrays) > 1 and one.opcode in ("all-gather-start", "collective-permute-start")
                sizes = [logical_bytes(array[0], array[1]) for array in (arrays[1:2] if given else arrays)]
                count, total = found.setdefault(kind, [0, 0])
                found[kind] = [count + times, total + times * sum(sizes)]
        return [{"kind": kind, "count": count, "bytes": total} for kind, (count, total) in found.items()]


def _instruction(line: str) -> Instruction:
    left, _, right = line.strip().partition(" = ")
    end = _closing(right, 0) if right.startswith("(") else right.index(" ") - 1
    opcode, _, _ = right[end + 2 :].partition("(")
    start = end + 2 + len(opcode)
    stop = _closing(right, start)
    inside = right[start + 1 : stop]
    operands = (inside,) if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", inside))
    name = left.removeprefix("ROOT ").removeprefix("%")
    return Instruction(name, right[: end + 1], opcode, operands, right[stop + 1 :], left.startswith("ROOT "))


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise AssertionError(f"unbalanced: {text[:200]}")


def logical_bytes(dtype: str, dimensions: str) -> int:
    """Bytes of an array without padding; of a token or other opaque thing 0."""
    return math.prod(int(size) for size in dimensions.split(",") if size) * _BITS.get(dtype, 0) // 8


def padded_bytes(shape: str) -> int:
    """Bytes of an array in HBM, tiles filled up: `bf16[4,100]{1,0:T(8,128)(2,1)}` takes 8 x 128 x 2.

    Returns:
        0 where it is not in HBM: the layout says S(1) for on-chip memory, S(2) and up for others.
    """
    found = _ARRAY.match(shape)
    if found is None or found[1] not in _BITS:
        return 0
    dtype, dimensions, order, layout = found.groups()
    layout = layout or ""
    space = re.search(r"S\((\d+)\)", layout)
    if space and space[1] != "0":
        return 0
    sizes = [int(size) for size in dimensions.split(",") if size]
    if order:
        sizes = [sizes[int(place)] for place in reversed(order.split(","))]  # the order is from the minor-most on
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile:
        sides = [int(side) for side in tile[1].split(",")]
        sizes = [1] * (len(sides) - len(sizes)) + sizes
        kept = len(sizes) - len(sides)
        sizes[kept:] = [-(-size // side) * side for size, side in zip(sizes[kept:], sides, strict=True)]
    return math.prod(sizes) * _BITS[dtype] // 8


class _Scalars:
    """The integers of a computation, as far as they follow from its arguments. What does not is None."""

    def __init__(self, module: Module, computation: str, arguments: list[Any] | None) -> None:
        self.module, self.computation, self.arguments = module, computation, arguments
        self.value = cache(self._value)

    def result(self) -> Any:
        return self.value(self.module.root(self.computation).name)

    def _value(self, name: str) -> Any:
        one = self.module.by_name(self.computation)[name]
        if one.opcode == "parameter":
            return self.arguments[int(one.operands[0])] if self.arguments else None
        if one.opcode == "tuple":
            return [self.value(operand) for operand in one.operands]
        if one.opcode == "get-tuple-element":
            whole = self.value(one.operands[0])
            return whole[int(one.attribute("index") or 0)] if isinstance(whole, list) else None
        if one.opcode in ("copy-start", "copy-done"):
            return self.value(one.operands[0])
        if one.opcode == "while" or (not one.shape.startswith("(") and "[]" not in one.shape):
            return None
        if one.opcode in ("fusion", "call"):
            called = one.called[0]
            return _Scalars(self.module, called, [self.value(operand) for operand in one.operands]).result()
        if one.opcode == "constant":
            text = one.operands[0]
            return {"true": 1, "false": 0}.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)
        values = [self.value(operand) for operand in one.operands]
        if one.opcode == "select" and values[0] is not None:
            return values[1] if values[0] else values[2]
        if any(not isinstance(value, int) for value in values):
            return None
        kind = one.shape.partition("[")[0]
        return _wrap(_arithmetic(one, values), kind)


def _arithmetic(one: Instruction, values: list[int]) -> int | None:
    if one.opcode in _SAME:
        return values[0]
    if one.opcode == "not":
        return int(not values[0]) if one.shape.startswith("pred") else ~values[0]
    if len(values) != 2:
        return None
    left, right = values
    if one.opcode == "compare":
        return int({"LT": left < right, "LE": left <= right, "GT": left > right, "GE": left >= right,
                    "EQ": left == right, "NE": left != right}[one.attribute("direction") or ""])  # fmt: skip
    table: dict[str, Callable[[int, int], int]] = {
        "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
        "maximum": max, "minimum": min,
    }  # fmt: skip
    return table[one.opcode](left, right) if one.opcode in table else None


def _wrap(value: int | None, dtype: str) -> int | None:
    if value is None or dtype not in _BITS:
        return None
    bits = _BITS[dtype]
    value %= 2**bits
    return value - 2**bits if dtype.startswith("s") and value >= 2 ** (bits - 1) else value
