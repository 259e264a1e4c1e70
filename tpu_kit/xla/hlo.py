"""Reads a program compiled for TPU: trip counts of loops, collectives, costs; and out-of-memory errors.

The text of a compiled program is XLA's `HloModule.to_string()`: computations of instructions,
`%name = shape opcode(operands), ...`, in execution order.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

MOST_TRIPS = 2**16
"""Limit for counting the trips of a loop; loops of a training step have far fewer."""

_COMPUTATION = re.compile(r"^(ENTRY )?(%?([\w.\-]+) .*\{\n((?: .*\n)*)\})", re.MULTILINE)
_INSTRUCTION = re.compile(r"^ +(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$", re.MULTILINE)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?")
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
_PRODUCTS = {"dot", "convolution"}
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
# Attributes of a send from a device to its host for a collective between slices; a target is, e.g., "{1,2}x{0:7}".
_BETWEEN_SLICES = re.compile(r"_xla_megascale_target=\"\{([\d,:]+)\}.*_xla_megascale_transfer_type=\"(\w+)\"")
# Instructions that move no bytes, or whose bytes are counted elsewhere: at the start of a copy, in the body of a loop.
_MOVES_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional",
                  "opt-barrier", "after-all", "partition-id", "replica-id", "add-dependency"}  # fmt: skip
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
# Operations on integers, by opcode or by direction of a comparison.
_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "and": operator.and_, "or": operator.or_,
    "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
    "not": operator.not_, "maximum": max, "minimum": min, "select": lambda which, yes, no: yes if which else no,
    **dict.fromkeys(("copy", "copy-start", "copy-done", "bitcast", "bitcast-convert", "convert", "reshape"), int),
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """An instruction, which is a line of a computation's text.

    Attributes:
        root: whether it is the computation's result.
        name: the name without the percent sign.
        shape: text of the result's shape, layout included.
        opcode: for example "fusion".
        inside: text in the parentheses; the number of a "parameter", the value of a "constant", otherwise operands.
        rest: text after the parentheses: attributes and metadata.
    """

    root: bool
    name: str
    shape: str
    opcode: str
    inside: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands, without the percent sign."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @property
    def called(self) -> list[str]:
        """The names of the computations that it runs: of a fusion, call, loop, reduction or conditional."""
        names = re.findall(r"(?:calls|body|condition|to_apply|(?:true|false)_computation)=%?([\w.\-]+)", self.rest)
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        return names + (re.findall(r"%?([\w.\-]+)", branches[1]) if branches else [])

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute such as "body" or "index"; "" without it."""
        value = re.search(rf"(?:^|[ ,{{]){name}=%?([\w.\-]+)", self.rest)
        return value[1] if value else ""


# From jaxlib 0.10 on, the settings of a kernel are on a separate line. torch_tpu omits the names of splash attention
# kernels; the first setting identifies them.
_KERNEL_SETTINGS = re.compile(r"\{\n(\"[^\n]*)\n\}")
_UNNAMED = re.compile(
    r'^ +%(custom-call[\w.]*) = .*"tpu_custom_call".*\{"xprof_metadata":"\{\\"(block_q\w*)', re.MULTILINE
)
_SPLASH = {"block_q": "splash_mha_fwd", "block_q_dkv": "splash_mha_dkv", "block_q_dq": "splash_mha_dq"}


def _named(text: str) -> str:
    """Rewrites a program's text as torch_xla writes it: a kernel's settings on its line, names of splash kernels."""
    text = _KERNEL_SETTINGS.sub(r"{\1}", text)
    names = {name: f"{_SPLASH[first]}.{name}" for name, first in _UNNAMED.findall(text)}
    return re.sub(r"%(custom-call[\w.]*)", lambda found: f"%{names.get(found[1], found[1])}", text)


class Module:
    """A compiled program, parsed from its text; AssertionError for a text that cannot be read.

    Attributes:
        text: the text of the program.
        computations: the instructions of each computation by name, in execution order.
        entry: name of the program's main computation.
        runs: number of executions per step of each computation outside fusions; loops of unknown length count once.
        trips: number of trips of each while loop, by the name of its instruction; None if the text does not tell.
    """

    def __init__(self, text: str) -> None:
        text = _named(text)
        self.text, self._texts = text, dict[str, str]()
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        for entry, whole, name, lines in _COMPUTATION.findall(text):
            self._texts[name] = whole
            matches = [*_INSTRUCTION.finditer(lines)]
            assert len(matches) == lines.count("\n"), f"an instruction of {name} cannot be read"
            self.computations[name] = {match[2]: Instruction(bool(match[1]), *match.groups()[1:]) for match in matches}
            self.entry = name if entry else self.entry
        assert self.entry, "no ENTRY in the compiled text"
        self.runs, self.trips = {self.entry: 1}, dict[str, int | None]()
        queue = [self.entry]
        while queue:
            caller = queue.pop()
            for op in self.computations[caller].values():
                called, times = op.called if op.opcode in ("call", "conditional") else [], 1
                if op.opcode == "while":
                    self.trips[op.name] = self._count_trips(op, caller)
                    called, times = [op.attribute("body")], self.trips[op.name] or 1
                self.runs |= {name: self.runs.get(name, 0) + self.runs[caller] * times for name in called}
                queue += called

    def _count_trips(self, loop: Instruction, caller: str) -> int | None:
        """Counts trips by executing the loop's counters, which may be split in two; None if unknown or over MOST_TRIPS.

        `caller` is the computation that contains the loop.
        """
        state = self._evaluate(caller, loop.operands[0], None)
        for trips in range(MOST_TRIPS):
            more = self._evaluate(loop.attribute("condition"), None, [state])
            if not more:
                return None if more is None else trips
            state = self._evaluate(loop.attribute("body"), None, [state])
        return None

    def _evaluate(self, computation: str, name: str | None, arguments: list[Any] | None) -> Any:
        """Evaluates instruction `name` of a computation, None for its result, to an integer or a list for a tuple.

        Returns None if it depends on other values. `arguments` are the values of the computation's parameters; None if
        unknown. Integers have unlimited width here: counters of so few trips do not overflow.
        """
        names = self.computations[computation]

        @cache
        def value(name: str) -> Any:
            op = names[name]
            if op.opcode == "parameter":
                return arguments[int(op.inside)] if arguments else None
            if op.opcode == "while" or not re.match(r"\(|(pred|[su]\d+)\[\]", op.shape):
                return None
            if op.opcode == "constant":
                return int({"true": "1", "false": "0"}.get(op.inside, op.inside))
            values = [value(operand) for operand in op.operands]
            if op.opcode == "tuple":
                return values
            if op.opcode == "get-tuple-element":
                return values[0][int(op.attribute("index"))] if isinstance(values[0], list) else None
            if op.opcode in ("fusion", "call"):
                return self._evaluate(op.called[0], None, values)
            compute = _INTEGERS.get(op.attribute("direction") or op.opcode)
            return compute(*values) if compute and all(isinstance(each, int) for each in values) else None

        return value(name or next(op.name for op in names.values() if op.root))

    def collectives(self) -> list[dict[str, Any]]:
        """Returns a dict for each kind of collective with a device's totals of a step; [] without collectives.

        Its keys are kind, such as "all-reduce", count, bytes, moved, synchronous and over_dcn. `bytes` are the bytes of
        the results. `moved` are the bytes that a device sends one way in a ring. `synchronous` is the part of `moved`
        during which nothing is computed. Collectives between slices, which hosts run, have separate dicts, with
        over_dcn true and a kind such as "all-reduce between slices".
        """
        rows: dict[str, dict[str, Any]] = {}
        chains = set[str]()
        for name, times in self.runs.items():  # callers come before their loops, into which their chains may extend
            for kind, size, moved, waited in self._transfers(name, chains):
                row = rows.setdefault(kind, {"kind": kind, "count": 0, "bytes": 0, "moved": 0.0, "synchronous": 0.0,
                                             "over_dcn": kind.endswith("between slices")})  # fmt: skip
                for field, value in (("count", 1), ("bytes", size), ("moved", moved), ("synchronous", waited)):
                    row[field] += times * value
        return list(rows.values())

    def _transfers(self, computation: str, chains: set[str], fused: bool = False) -> Iterator[tuple[Any, ...]]:
        """Yields (kind, bytes of the result, bytes that a device sends one way in a ring, synchronous bytes of these).

        The compiler writes an asynchronous collective as a chain of fusions that compute at the same time. Every fusion
        of the chain contains the collective, even in a loop between its start and its end. So a chain, identified by
        its channel, counts once, at its start: `chains` collects the channels. A reduce-scatter is a synchronous fusion
        of an all-reduce and a slice, named all-reduce-scatter. `fused` is whether the computation is in a fusion.
        """
        scatters = computation.startswith("all-reduce-scatter")
        for op in self.computations[computation].values():
            kind, channel = op.opcode.removesuffix("-start"), op.attribute("channel_id")
            sizes = [_bytes(array) for array in _ARRAY.finditer(op.shape)]
            if kind in _COLLECTIVES and not (fused and channel and channel in chains):
                chains.add(channel)
                # The start of these collectives also returns its operand.
                twice = len(sizes) > 1 and op.opcode in ("all-gather-start", "collective-permute-start")
                groups = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]+)\})", op.rest)
                group = int(groups[1] or groups[2].count(",") + 1) if groups else 2
                kind, size = "reduce-scatter" if scatters else kind, sum(sizes[1:2] if twice else sizes)
                size //= group if scatters else 1
                moved = _sent(kind, size, group)
                yield kind, size, moved, 0.0 if op.opcode.endswith("-start") or (fused and not scatters) else moved
            elif op.opcode == "send" and (across := _BETWEEN_SLICES.search(op.rest)):
                first, _, last = across[1].partition(":")
                kind, slices = across[2].lower().replace("_", "-"), int(last) - int(first) + 1 if last else 0
                moved = _sent(kind, sizes[0], slices or first.count(",") + 1)
                yield f"{kind} between slices", sizes[0], moved, moved
            elif op.opcode in ("fusion", "async-start", "custom-call"):
                for name in filter(self.computations.get, op.called):
                    yield from self._transfers(name, chains, fused=True)

    def alone(self, computation: str, op: Instruction) -> str:
        """Returns the text of a module whose program is the instruction `op` alone; its operands become parameters.

        `computation` is the name of the computation that contains `op`. The module has all computations that `op` runs.
        """
        queue, needed, names = op.called, set[str](), self.computations[computation]
        while queue:
            if (name := queue.pop()) not in needed:
                needed.add(name)
                queue += [called for inner in self.computations[name].values() for called in inner.called]
        called = [text for name, text in self._texts.items() if name in needed]
        operands = enumerate(dict.fromkeys(op.operands))
        parameters = [f"  %{name} = {names[name].shape} parameter({number})" for number, name in operands]
        rest = re.sub(r", control-predecessors=\{[^}]*\}", "", op.rest)
        line = f"  ROOT %{op.name} = {op.shape} {op.opcode}({op.inside}){rest}"
        return "\n".join(["HloModule alone\n", *called, "ENTRY %alone {", *parameters, line, "}\n"])


def _sent(kind: str, size: int, group: int) -> float:
    """Returns the bytes that a device sends one way in a ring of `group` devices for a result of `size` bytes."""
    special = {"all-reduce": 2 * size * (group - 1) / group, "reduce-scatter": size * (group - 1)}
    return float(special.get(kind, size if kind == "collective-permute" else size * (group - 1) / group))


def _bytes(array: re.Match[str], padded: bool = False) -> int:
    """Returns the bytes of an array; if `padded`, its bytes in HBM with padded tiles, 0 if it is in another memory.

    `array` is a match of `_ARRAY`. A layout `{1,0:T(8,128)(2,1)S(1)}` has the axes, minor-most first, the tiles, and
    the memory space unless it is HBM.
    """
    dtype, dimensions, order, layout = array.groups(default="")
    sizes = [int(size) for size in dimensions.split(",") if size]
    if padded and re.search(r"S\([1-9]", layout):
        return 0
    if padded and (tile := re.search(r"T\(([\d,]+)\)", layout)):
        sides = [int(side) for side in tile[1].split(",")]
        sizes = [1] * (len(sides) - len(sizes)) + [sizes[int(axis)] for axis in reversed(order.split(",")) if axis]
        sides = [1] * (len(sizes) - len(sides)) + sides
        sizes = [-(-size // side) * side for size, side in zip(sizes, sides, strict=True)]
    bits = re.search(r"\d+", "8" if dtype == "pred" else dtype)  # none for tokens
    return math.prod(sizes) * int(bits[0]) // 8 if bits else 0


class Cost(NamedTuple):
    """The cost of one execution of an instruction.

    Attributes:
        computation: name of its computation.
        op: the instruction.
        operands: the shapes of its operands.
        opcodes: its opcode, and the opcodes of instructions fused into it.
        products: for every matrix product in it, the shapes of the result and of the operands.
        kind: "matrix product", "collective", "kernel", "copy" or "elementwise".
        runs: number of executions in a step.
        flops: floating point operations; for splash attention by formula.
        bytes: bytes read from and written to HBM.
    """

    computation: str
    op: Instruction
    operands: list[str]
    opcodes: set[str]
    products: list[list[str]]
    kind: str
    runs: int
    flops: float
    bytes: float

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of the time in cycles; None if there is none."""
        found = _CYCLES.search(self.op.rest)
        return int(found[1]) if found else None


def instruction_costs(module: Module, analyse: Callable[[str], dict[str, float]]) -> list[Cost]:
    """Returns the costs of the instructions of a program; a fusion counts as a single instruction.

    Instructions that move no bytes are left out, such as parameters, constants, tuples, bitcasts, loops, calls and the
    ends of asynchronous operations. The instructions in the body of a loop are included.

    Args:
        module: the program.
        analyse: XLA's cost analysis of a module's text. It counts only the slice of a sliced operand, and only the
            update of a buffer updated in place. It ignores memory spaces, tiles and kernels.
    """
    found = []
    for name, runs in module.runs.items():
        for op in module.computations[name].values():
            if op.opcode in _MOVES_NOTHING or op.opcode.endswith("-done") or _ALLOCATES in op.rest:
                continue
            fused = [module.computations[called] for called in op.called]
            opcodes = {each.opcode for names in fused for each in names.values()}
            opcodes |= {op.opcode, op.opcode.removesuffix("-start")}
            kind = "copy" if op.opcode.startswith(("copy", "slice-start", "dynamic-slice")) else "elementwise"
            kind = "matrix product" if opcodes & _PRODUCTS else kind
            kind = "collective" if opcodes & _COLLECTIVES else "kernel" if op.opcode == "custom-call" else kind
            cost = {} if kind == "kernel" else analyse(module.alone(name, op))
            operands = [module.computations[name][operand].shape for operand in op.operands]
            flops = _kernel_flops(op, operands) if kind == "kernel" else cost.get("flops", 0.0)
            products = [
                [each.shape, *(names[one].shape for one in each.operands)]
                for names in fused
                for each in names.values()
                if each.opcode in _PRODUCTS
            ] or [[op.shape, *operands]] * (op.opcode in _PRODUCTS)
            moved = _hbm_bytes(op, operands, cost)
            found.append(Cost(name, op, operands, opcodes, products, kind, runs, flops, moved))
    return found


def costs(
    module: Module,
    instructions: list[Cost],
    analyse: Callable[[str], dict[str, float]],
    accessed_once: float,
    seconds: Callable[[Cost], float] = lambda one: 0.0,
) -> dict[str, Any]:
    """Computes the costs of a step with all trips of its loops.

    Args:
        module: the program.
        instructions: from `instruction_costs`.
        analyse: as in `instruction_costs`; it counts a loop as one trip.
        accessed_once: bytes accessed according to the TPU compiler's analysis, which counts a loop as one trip.
        seconds: returns the seconds of one execution of an instruction; by default 0.

    Returns:
        flops, hbm_bytes, bytes_accessed (in any memory), and operations: a list with a dict for each origin and kind:
        operation, source (see `origin`), kind (see `Cost`), flops, bytes (of HBM) and seconds, summed over the step.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in instructions:
        key = {**origin(one.op.rest), "kind": one.kind}
        row: dict[str, Any] = rows.setdefault((*key.values(),), {**key, "flops": 0.0, "bytes": 0.0, "seconds": 0.0})
        row["flops"] += one.runs * one.flops
        row["bytes"] += one.runs * one.bytes
        row["seconds"] += one.runs * seconds(one)
    later = 0.0  # bytes of all trips of loops except the first
    for name, runs in module.runs.items():
        for op in module.computations[name].values():
            if op.opcode == "while":
                trips = module.runs[op.attribute("body")] - runs
                later += trips * analyse(module.alone(name, op))["bytes accessed"]
    return {
        "operations": list(rows.values()),
        "flops": sum(row["flops"] for row in rows.values()),
        "hbm_bytes": sum(row["bytes"] for row in rows.values()),
        "bytes_accessed": accessed_once * (1 + later / analyse(module.text)["bytes accessed"]),
    }


def _hbm_bytes(op: Instruction, operands: list[str], cost: dict[str, float]) -> float:
    """Returns the bytes that an instruction reads from and writes to HBM, padded to tiles.

    `operands` are their shapes; `cost` is XLA's analysis of the instruction, which tells the share that it reads or
    writes, except for kernels, collectives and copies.
    """
    results = [array[0] for array in _ARRAY.finditer(op.shape)]
    if op.opcode == "copy-start":  # (to, from, context)
        results, operands = results[:2], []
    keys = [f"out{{{at}}}" for at in range(len(results))] if op.shape.startswith("(") else ["out{}"]
    keys += [f"{at}{{}}" for at in range(len(operands))]
    total, whole = 0.0, op.opcode.removesuffix("-start") in _COLLECTIVES | {"custom-call", "copy"}
    for shape, key in zip(results + operands, keys, strict=True):
        arrays = [*_ARRAY.finditer(shape)]
        share = 1.0 if whole else cost.get(f"bytes accessed{key}", 0.0) / max(1, sum(map(_bytes, arrays)))
        total += share * sum(_bytes(array, padded=True) for array in arrays)
    return total


def _kernel_flops(kernel: Instruction, operands: list[str]) -> float:
    """Returns the FLOPs of a kernel: its own estimate, else 0, or for a splash kernel, which has none, by formula.

    A matrix product of Bq queries and Bk keys takes 2 Bq Bk D FLOPs. There are two products forward (scores, output)
    and five backward (scores again; gradients of weights, query, key and value). The unfused backward pass has a kernel
    for the query's gradient and another kernel for the rest; both compute scores and the gradient of weights. The first
    of the shapes `operands` is the mask in blocks: a causal mask leaves i + 1 blocks in row i, a window at most the
    width of the grid.
    """
    if "splash_mha" not in kernel.name:
        estimate = re.search(r'"cost_estimate":(\{[^}]*\})', kernel.rest)
        return float(json.loads(estimate[1]).get("flops", 0)) if estimate else 0.0
    arrays = [_ARRAY.match(shape) for shape in operands]
    shapes = [(array[1], [int(size) for size in array[2].split(",")]) for array in arrays if array and array[2]]
    grid, queries = shapes[0][1][1:], next(sizes for dtype, sizes in shapes if dtype in ("bf16", "f32"))
    visited = sum(min(row + 1, *grid) for row in range(max(grid)))
    # Results: both gradients as sums in fp32, both gradients, and for the fused kernel also the query's gradient.
    apart = len(_ARRAY.findall(kernel.shape)) == 4
    products = 2 if "splash_mha_fwd" in kernel.name else 3 if "splash_mha_dq" in kernel.name else 5 - apart
    block = queries[-2] // max(grid)
    return float(2 * products * math.prod(queries[:-2]) * visited * block**2 * queries[-1])


def origin(metadata: str) -> dict[str, str]:
    """Returns {"operation": path in the model, "source": "file:line"} from the `rest` of an `Instruction`.

    An unknown value is ""; the source is so for bodies of loops, too. Files are relative to site-packages or the kit.
    """
    named = dict(re.findall(r'(op_name|source_file|source_line)="?([^" }]*)', metadata))
    file = re.sub(r"^.*/site-packages/|^.*/(?=tpu_kit/)", "", named.get("source_file", ""))
    # Numbers distinguish scopes with equal names; "/jit(" begins the inside of a kernel.
    operation = re.sub(r"\.\d+(?=/|$)", "", named.get("op_name", "")).partition("/jit(")[0]
    file = "" if "xla__scan" in operation else file  # torch_xla reports wrong lines for the body of a loop
    operation = operation.removeprefix("create_scan_op/custom_kernel")  # torch_tpu gives kernels no other name
    file = "" if file.startswith(("torch_tpu/", "-")) else file  # the code that lowers, or a line of the program
    return {"operation": operation, "source": f"{file}:{named.get('source_line', '')}" if file else ""}


def parse_out_of_memory(text: str) -> dict[str, int | None] | None:
    """Parses an out-of-memory error of the TPU compiler; returns None for other errors.

    Returns:
        used_bytes, the program's need of HBM, or the size of a single allocation that is larger than the memory; and
        argument_bytes, None if the text does not have it. The text rounds sizes to 1 % or better.
    """
    if single := re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=\d+\)", text):
        return {"used_bytes": int(single[1]), "argument_bytes": None}
    # Before the first size, libtpu 0.0.21 writes the first text, libtpu 0.0.52 the second.
    used_by = r"(?:memory space hbm. Used|total memory required for HLO temporaries \()"
    sizes = [re.search(rf"{before} ?([\d.]+)([BKMGT])", text) for before in (used_by, r"\n +arguments +")]
    used, argument = (round(float(size[1]) * 1024 ** "BKMGT".index(size[2])) if size else None for size in sizes)
    return None if used is None else {"used_bytes": used, "argument_bytes": argument}
