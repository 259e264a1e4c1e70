"""Reads the text of a program that the TPU compiler has compiled: loops and their trips, collectives, FLOPs, bytes.

The text is XLA's `HloModule.to_string()`: computations of instructions, `%name = shape opcode(operands), ...`, in
execution order.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

MOST_TRIPS = 1_000_000
"""Limit for counting the trips of a loop, far above those of a training step."""

_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
         "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "f8e5m2": 8, "f8e4m3fn": 8}  # fmt: skip
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
# What a device sends to its host for a collective between slices, whose target is such as "{1,2}x{0:7}".
_BETWEEN_SLICES = re.compile(r"_xla_megascale_target=\"\{([\d,:]+)\}.*_xla_megascale_transfer_type=\"(\w+)\"")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SAME = {"copy", "bitcast", "bitcast-convert", "convert", "reshape", "opt-barrier"}


@dataclass(frozen=True)
class Instruction:
    """A line of a computation.

    Attributes:
        name: without the percent sign.
        shape: text of the result's shape, layout included.
        opcode: for example "fusion".
        operands: names of instructions; for "parameter" its number, for "constant" the value.
        rest: text after the operands: attributes and metadata.
        root: whether it is the computation's result.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, name: str) -> str | None:
        """Returns the computation or number of an attribute such as "body" or "index"."""
        found = re.search(rf"(?:^|[ ,{{]){name}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None

    @property
    def called(self) -> list[str]:
        """The computations that this instruction runs."""
        found = re.findall(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)", self.rest)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        return found + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])


@dataclass(frozen=True)
class Loop:
    """A while loop of a program.

    Attributes:
        name: of its instruction.
        body: the computation that it repeats.
        caller: the computation that contains it.
        trips: how often the body runs; None where the text does not determine it.
    """

    name: str
    body: str
    caller: str
    trips: int | None


class Module:
    """A compiled program.

    Attributes:
        computations: the instructions of each computation by its name, in execution order.
        entry: name of the computation that is the program.
        runs: how often each computation outside of fusions runs in a step; a loop of unknown trips counts as one trip.
        loops: the while loops.
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
        self.runs, self.loops = self._walk()

    def root(self, computation: str) -> Instruction:
        """Returns the result of a computation."""
        return next(one for one in reversed(self.computations[computation]) if one.root)

    @cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """The instructions of each computation by name."""
        return {name: {one.name: one for one in inside} for name, inside in self.computations.items()}

    def part(self, computation: str) -> str:
        """Returns the text of a module whose program is `computation`."""
        needed, queue = dict.fromkeys([computation]), [computation]
        while queue:
            for one in self.computations[queue.pop()]:
                new = [name for name in one.called if name not in needed]
                needed |= dict.fromkeys(new)
                queue += new
        others = "\n\n".join(self._texts[name] for name in self._texts if name in needed and name != computation)
        return f"HloModule part\n\n{others}\n\nENTRY {self._texts[computation]}\n"

    def alone(self, computation: str, one: Instruction) -> str:
        """Returns the text of a module whose program is one instruction of a computation."""
        names, given = self.by_name[computation], dict.fromkeys(one.operands)
        parameters = [f"  %{name} = {names[name].shape} parameter({number})" for number, name in enumerate(given)]
        called = [self.part(name).replace("ENTRY ", "") for name in one.called]
        others = "\n\n".join(text.partition("\n\n")[2] for text in called)
        operands = ", ".join(f"%{name}" for name in one.operands)
        rest = re.sub(r", control-predecessors=\{[^}]*\}", "", one.rest)
        line = f"  ROOT %{one.name} = {one.shape} {one.opcode}({operands}){rest}"
        return "\n".join(["HloModule alone\n", others, "ENTRY %alone {", *parameters, line, "}\n"])

    def _walk(self) -> tuple[dict[str, int], list[Loop]]:
        """Returns the runs of each computation outside of fusions, and the loops."""
        runs, loops, queue = {self.entry: 1}, [], [self.entry]
        while queue:
            caller = queue.pop()
            for one in self.computations[caller]:
                if one.opcode == "while":
                    loops.append(Loop(one.name, one.attribute("body") or "", caller, self._trips(one, caller)))
                    called, times = [loops[-1].body], loops[-1].trips or 1
                else:
                    called, times = one.called if one.opcode in ("call", "conditional") else [], 1
                runs |= {name: runs.get(name, 0) + runs[caller] * times for name in called}
                queue += called
        return runs, loops

    def _trips(self, loop: Instruction, caller: str) -> int | None:
        """Evaluates the loop's counters. No pattern finds them, as the compiler splits a 64-bit counter in two."""
        condition, body = loop.attribute("condition"), loop.attribute("body")
        assert condition is not None and body is not None
        state = _Scalars(self, caller, None).value(loop.operands[0])
        for trips in range(MOST_TRIPS):
            going = _Scalars(self, condition, [state]).result()
            if going is None or not isinstance(state, list):
                return None
            if not going:
                return trips
            state = _Scalars(self, body, [state]).result()
        return None

    def collectives(self) -> list[dict[str, Any]]:
        """Returns, for each kind of collective, what runs in a step; the keys are those of `compile_check.Collective`.

        The compiler writes an asynchronous collective as a chain of fusions that compute beside it. Each of them
        contains the collective, so a chain is counted once by its channel. A reduce-scatter is a fusion of an
        all-reduce and a slice, named all-reduce-scatter; it is synchronous.

        Between slices, the compiler leaves a collective to the hosts: a device sends its operand to its host, and
        receives the result. These are rows of their own.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, times in self.runs.items():
            for one, kind, synchronous in self._collectives_in(name, set()):
                arrays = _ARRAY.findall(one.shape)
                # The start of these collectives also returns its operand.
                given = len(arrays) > 1 and one.opcode in ("all-gather-start", "collective-permute-start")
                size = sum(logical_bytes(array[0], array[1]) for array in (arrays[1:2] if given else arrays))
                group = _group_size(one.rest)
                moved = size * (group - 1) / group * (2 if kind == "all-reduce" else 1)
                if kind == "collective-permute":
                    moved = size
                if kind == "reduce-scatter":
                    size //= group if one.opcode == "all-reduce" else 1
                    moved = size * (group - 1)
                _add(found, kind, times, size, moved, synchronous)
            for one in self.computations[name]:
                if one.opcode == "send" and (across := _BETWEEN_SLICES.search(one.rest)):
                    first, _, last = across[1].partition(":")
                    slices = int(last) - int(first) + 1 if last else first.count(",") + 1
                    kind = across[2].lower().replace("_", "-")
                    size = logical_bytes(*_ARRAY.findall(one.shape)[0][:2])
                    moved = size * (slices - 1) / slices * (2 if kind == "all-reduce" else 1)
                    _add(found, f"{kind} between slices", times, size, moved, True, over_dcn=True)
        return list(found.values())

    def _collectives_in(
        self, computation: str, chains: set[str], fused: bool = False
    ) -> Iterator[tuple[Instruction, str, bool]]:
        """Yields (collective, its kind, whether it is synchronous) of a computation and the fusions in it."""
        scatters = computation.startswith("all-reduce-scatter")
        for one in self.computations[computation]:
            kind = one.opcode.removesuffix("-start")
            if kind in _COLLECTIVES:
                channel = one.attribute("channel_id")
                if fused and channel is not None and channel in chains:
                    continue
                chains.add(channel or "")
                asynchronous = one.opcode.endswith("-start") or (fused and not scatters)
                yield one, "reduce-scatter" if scatters else kind, not asynchronous
            elif one.opcode in ("fusion", "async-start", "custom-call"):
                for name in one.called:
                    if name in self.computations:
                        yield from self._collectives_in(name, chains, fused=True)


def _add(
    found: dict[str, dict[str, Any]], kind: str, times: int, size: int, moved: float, synchronous: bool, **fixed: bool
) -> None:
    row = found.setdefault(kind, {"kind": kind, "count": 0, "bytes": 0, "moved": 0.0, "synchronous": 0.0, **fixed})
    row["count"] += times
    row["bytes"] += times * size
    row["moved"] += times * moved
    row["synchronous"] += times * moved if synchronous else 0.0


def _group_size(attributes: str) -> int:
    """Returns the number of devices that take part in a collective together."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(found[1])
    found = re.search(r"replica_groups=\{\{([\d,]+)\}", attributes)
    return len(found[1].split(",")) if found else 2


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
    """Returns the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise AssertionError(f"unbalanced: {text[:200]}")


def logical_bytes(dtype: str, dimensions: str) -> int:
    """Returns the bytes of an array without padding; 0 for tokens and other opaque types."""
    return math.prod(int(size) for size in dimensions.split(",") if size) * _BITS.get(dtype, 0) // 8


def padded_bytes(shape: str) -> int:
    """Returns the bytes of an array in HBM, padded to tiles: 8 x 128 x 2 for `bf16[4,100]{1,0:T(8,128)(2,1)}`.

    Returns:
        0 if the array is not in HBM: the layout has S(1) for on-chip memory, and S(2) and above for others.
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
        sizes = [sizes[int(axis)] for axis in reversed(order.split(","))]  # the first is the minor-most
    tile = re.search(r"T\(([\d,]+)\)", layout)
    if tile:
        sides = [int(side) for side in tile[1].split(",")]
        sizes = [1] * (len(sides) - len(sizes)) + sizes
        kept = len(sizes) - len(sides)
        sizes[kept:] = [-(-size // side) * side for size, side in zip(sizes[kept:], sides, strict=True)]
    return math.prod(sizes) * _BITS[dtype] // 8


class _Scalars:
    """Evaluates the integers of a computation from its arguments; None for values that depend on others."""

    def __init__(self, module: Module, computation: str, arguments: list[Any] | None) -> None:
        self.module, self.computation, self.arguments = module, computation, arguments
        self.value = cache(self._value)

    def result(self) -> Any:
        return self.value(self.module.root(self.computation).name)

    def _value(self, name: str) -> Any:
        one = self.module.by_name[self.computation][name]
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


SHAPE = re.compile(r"\w+\[[\d,]*\](?:\{[^{}]*\})?")
# Instructions that move no bytes, or whose bytes count elsewhere: at the start of a copy, in the body of a loop.
MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional",
          "opt-barrier", "after-all", "partition-id", "replica-id", "add-dependency"}  # fmt: skip
_READS_PART = {"dynamic-slice", "slice", "gather"}


class Cost(NamedTuple):
    """FLOPs and bytes."""

    flops: float
    bytes: float


def later_trips(module: Module, analyse: Callable[[str], dict[str, float]]) -> Cost:
    """Returns the cost of all trips of the loops of a step after the first one.

    Args:
        module: the program.
        analyse: XLA's cost analysis of a module's text: "flops" and "bytes accessed", with one trip of each loop and
            without the FLOPs of kernels.
    """
    flops = sum(
        (times - 1) * _own_flops(one)
        for name, times in module.runs.items()
        for one in module.computations[name]
        if one.opcode == "custom-call"
    )
    moved = 0.0
    for loop in module.loops:
        if later := module.runs[loop.body] - module.runs[loop.caller]:
            once = analyse(module.part(loop.body))
            flops, moved = flops + later * once["flops"], moved + later * once["bytes accessed"]
    return Cost(flops, moved)


def _own_flops(kernel: Instruction) -> float:
    """Returns a kernel's own estimate of its FLOPs; 0 without one."""
    estimate = re.search(r'"cost_estimate":(\{[^}]*\})', kernel.rest)
    return float(json.loads(estimate[1]).get("flops", 0)) if estimate else 0.0


def operations(module: Module, analyse: Callable[[str], dict[str, float]]) -> Iterator[tuple[Instruction, str, Cost]]:
    """Yields each instruction outside of fusions: (instruction, kind of work, cost of all its runs in a step).

    The kinds are "matrix product", "kernel", "collective", "copy" and "elementwise". The bytes are those that are read
    from HBM and written to it, padded to tiles. Unlike XLA's cost analysis they exclude operands and results in on-chip
    memory. Of a sliced or gathered operand they count the part, and of a buffer updated in place the update.

    Args:
        module: the program.
        analyse: as in `later_trips`.
    """
    for name, times in module.runs.items():
        for one in module.computations[name]:
            if one.opcode in MOVES_NOTHING or one.opcode.endswith("-done"):
                continue
            inside = [one.opcode, *(part.opcode for called in one.called for part in module.computations[called])]
            flops = 0.0
            if one.opcode.removesuffix("-start") in _COLLECTIVES or {*inside} & {*_COLLECTIVES}:
                kind = "collective"
            elif one.opcode == "custom-call":
                kind = "kernel"
                flops = splash_flops(one) or _own_flops(one)
            elif {"dot", "convolution"} & {*inside}:
                kind, flops = "matrix product", analyse(module.alone(name, one))["flops"]
            else:
                kind = "copy" if one.opcode.startswith(("copy", "slice-start", "dynamic-slice")) else "elementwise"
            yield one, kind, Cost(times * flops, times * _moved(module, name, one))


def splash_flops(one: Instruction) -> float:
    """Computes the FLOPs of a splash kernel, which has no estimate of its own; 0 for other instructions.

    A block of Bq queries and Bk keys takes 2 Bq Bk D FLOPs for each matrix product: two forward (scores, output), five
    backward (scores again, and the gradients of weights, query, key and value). The shape of the kernel's first operand
    gives the number of blocks: a causal mask leaves i + 1 blocks in row i, a window at most the width of the grid.
    """
    if one.opcode != "custom-call" or "splash_mha" not in one.name:
        return 0.0
    forward = "splash_mha_fwd" in one.name
    given = re.search(r"operand_layout_constraints=\{(.*?)\}\}", one.rest)
    sides = ("block_kv", "block_q") if forward else ("block_kv_dkv", "block_q_dkv")
    block = re.search(r"{}_(\d+).*{}_(\d+)".format(*sides), one.name)
    assert given and block, one.name
    arrays = [[int(size) for size in sizes.split(",")] for sizes in re.findall(r"\w+\[([\d,]+)\]", given[1])]
    queries = re.search(r"(?:bf16|f32)\[([\d,]+)\]", given[1])
    assert queries, one.name
    (_, *grid), (*rows, heads, _, size) = arrays[0], [int(size) for size in queries[1].split(",")]
    batch = math.prod(rows)  # a batch of one row has no axis
    visited = sum(min(row + 1, *grid) for row in range(max(grid)))
    return (4 if forward else 10) * batch * heads * visited * int(block[1]) * int(block[2]) * size


def _moved(module: Module, computation: str, one: Instruction) -> int:
    shapes = SHAPE.findall(one.shape)
    if one.opcode in ("copy-start", "slice-start"):  # (to, from, context) and (from, to, context)
        to = shapes[0 if one.opcode == "copy-start" else 1]
        return _size(to) * sum(padded_bytes(shape) > 0 for shape in shapes[:2])
    names = module.by_name[computation]
    operands = [names[name].shape for name in one.operands]
    if one.opcode == "fusion":
        read = [_read(module, one.called[0], number) for number in range(len(operands))]
        new = written(module, one.called[0])
    else:
        read = [_size(one.shape) if one.opcode in _READS_PART and not number else math.inf
                for number in range(len(operands))]  # fmt: skip
        new = [math.inf] * len(shapes)
        if one.opcode == "dynamic-update-slice":
            read[0], new = 0, [_size(operands[1])]
    pairs = [*zip(map(_bytes, operands), read, strict=True), *zip(map(padded_bytes, shapes), new, strict=True)]
    return int(sum(min(whole, part) for whole, part in pairs))


def _bytes(shape: str) -> int:
    return sum(padded_bytes(part) for part in SHAPE.findall(shape))


def _size(shape: str) -> int:
    """Returns the padded bytes in any memory space."""
    return _bytes(re.sub(r"S\(\d+\)", "", shape))


def _read(module: Module, fused: str, number: int) -> float:
    """Returns the most bytes that a fused computation reads of a parameter; infinity for all of them."""
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


def written(module: Module, fused: str) -> list[float]:
    """Returns the most bytes that a fused computation writes of each result.

    The bytes are those of the update where a result overwrites an operand, and infinity elsewhere.
    """
    names, root = module.by_name[fused], module.root(fused)
    found: list[float] = []
    for name in root.operands if root.opcode == "tuple" else [root.name]:
        one = names[name]
        while one.opcode == "bitcast":
            one = names[one.operands[0]]
        index = 0
        if one.opcode == "get-tuple-element":
            index, one = int(one.attribute("index") or 0), names[one.operands[0]]
        if one.opcode == "fusion":
            inner = written(module, one.called[0])
            found += inner if one.root else inner[index : index + 1]
        else:
            update = one.opcode == "dynamic-update-slice"
            parts = (
                len(SHAPE.findall(one.shape)) if one.root else 1
            )  # a reduction of several arrays has several results
            found += [_size(names[one.operands[1]].shape) if update else math.inf] * parts
    return found
