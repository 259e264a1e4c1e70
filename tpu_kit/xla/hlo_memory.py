"""The largest buffers at peak memory, from the schedule of a compiled program or from an out-of-memory text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpu_kit.xla.hlo import SHAPE, Instruction, Module, padded_bytes

MOST_BUFFERS = 20  # temporaries and outputs; the compiler's out-of-memory text has as many
MOST_ARGUMENTS = 5

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT])"
_METADATA = re.compile(r'(op_name|source_file|source_line)="?([^" }]*)')
# Instructions whose result is in the memory of the first operand.
_VIEWS = {"bitcast", "opt-barrier", "while", "dynamic-update-slice", "all-reduce", "copy-done", "reshape"}

Value = Any
"""The name of a buffer, None for a value that is no temporary in HBM, or a list of these for a tuple."""


class _Peak:
    """Tracks the live buffers of one computation, instruction by instruction."""

    def __init__(self, module: Module, computation: str, elsewhere: set[str]) -> None:
        self.module, self.instructions = module, module.computations[computation]
        self.by_name = module.by_name(computation)
        self.sizes: dict[str, int] = {}
        self.maker: dict[str, Instruction] = {}
        self.values: dict[str, Value] = {}
        last: dict[str, int] = {}
        for place, one in enumerate(self.instructions):
            for operand in one.operands if one.opcode not in ("parameter", "constant", "get-tuple-element") else ():
                last |= dict.fromkeys(_leaves(self.values[operand]), place)
            self.values[one.name] = self._value(one)
            last |= dict.fromkeys(_leaves(self.values[one.name]), place)
        self.last = last
        # The new carry of a loop, and donated outputs of the program, use the memory of their predecessors.
        for name in elsewhere:
            self.sizes[name] = 0

    def _value(self, one: Instruction) -> Value:
        if one.opcode in ("parameter", "constant", "iota", "after-all", "partition-id", "replica-id"):
            return None
        operands = [self.values[operand] for operand in one.operands]
        if one.opcode == "tuple":
            return operands
        if one.opcode == "get-tuple-element":
            whole = operands[0]
            return whole[int(one.attribute("index") or 0)] if isinstance(whole, list) else None
        if one.opcode == "copy-done" or one.opcode.endswith("-done"):
            whole = operands[0]
            return whole[0 if one.opcode == "copy-done" else 1] if isinstance(whole, list) else whole
        if one.opcode == "copy-start":
            return [*self._new(one)[:1], operands[0], None]
        if one.opcode in _VIEWS:
            return operands[0]
        if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":
            # ((operands), result, context)
            return [operands, next((name for name in self._new(one)[len(operands) :] if name), None), None]
        new = self._new(one)
        for place, operand in self._in_place(one):
            if place < len(new) and operand < len(operands) and not isinstance(operands[operand], list):
                self.sizes.pop(new[place], None)
                new[place] = operands[operand]
        return new if one.shape.startswith("(") else new[0]

    def _new(self, one: Instruction) -> list[Value]:
        made: list[Value] = []
        for number, shape in enumerate(SHAPE.findall(one.shape)):
            size = padded_bytes(shape)
            name = f"{one.name}.{number}" if one.shape.startswith("(") else one.name
            made.append(name if size else None)
            if size:
                self.sizes[name], self.maker[name] = size, one
        return made

    def _in_place(self, one: Instruction) -> list[tuple[int, int]]:
        """Returns (number of the result, number of the operand) of results that overwrite an operand."""
        listed = re.search(r"output_to_operand_aliasing=\{(.*?\})\}", one.rest)
        if listed:
            pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\d*\}", listed[1])
            return [(int(result or 0), int(operand)) for result, operand in pairs]
        if one.opcode != "fusion":
            return []
        inner = self.module.by_name(one.called[0])
        root = self.module.root(one.called[0])
        found = []
        for place, name in enumerate(root.operands if root.opcode == "tuple" else [root.name]):
            part = inner[name]
            while part.opcode == "bitcast":
                part = inner[part.operands[0]]
            if part.opcode != "dynamic-update-slice":
                continue
            part = inner[part.operands[0]]
            while part.opcode in ("bitcast", "copy"):
                part = inner[part.operands[0]]
            if part.opcode == "parameter":
                found.append((place, int(part.operands[0])))
        return found

    def at_most(self) -> tuple[int, list[tuple[int, str, Instruction]]]:
        """Returns the largest sum of live buffers, and the buffers: (bytes, name, instruction that makes it)."""
        ending: dict[int, list[str]] = {}
        for name, place in self.last.items():
            ending.setdefault(place, []).append(name)
        best: tuple[int, list[tuple[int, str, Instruction]]] = (0, [])
        live: set[str] = set()
        total = 0
        for place, one in enumerate(self.instructions):
            new = {name for name in _leaves(self.values[one.name]) if name in self.sizes and name not in live}
            new = {name for name in new if self.maker[name].name == one.name}
            live |= new
            total += sum(self.sizes[name] for name in new)
            inner = self._inside(one)
            if total + inner[0] > best[0]:
                mine = [(self.sizes[name], name, self.maker[name]) for name in live if self.sizes[name]]
                best = total + inner[0], mine + inner[1]
            for name in ending.get(place, ()):
                if name in live:
                    live.discard(name)
                    total -= self.sizes[name]
        return best

    def _inside(self, one: Instruction) -> tuple[int, list[tuple[int, str, Instruction]]]:
        best: tuple[int, list[tuple[int, str, Instruction]]] = (0, [])
        if one.opcode in ("while", "call", "conditional"):
            for name in one.called:
                inner = _Peak(self.module, name, set())
                inner = _Peak(self.module, name, set(_leaves(inner.values[self.module.root(name).name])))
                best = max(best, inner.at_most(), key=lambda found: found[0])
        return best


def at_peak(module: Module, arguments: Sequence[str]) -> tuple[int, list[dict[str, Any]]]:
    """Finds the largest buffers at peak memory.

    The compiler does not report its allocation. This follows the schedule in its text: a result lives from its
    instruction to its last use. It ignores other sharing of memory (a result may overwrite an operand that ends), so
    the sum is an estimate.

    Args:
        module: the program.
        arguments: the names of its parameters, as in `program.Program.arguments`.

    Returns:
        The estimated bytes of temporaries at the peak, and the buffers, largest first: bytes, shape, kind
        ("temporary", "output", "argument"), name (of the model's tensor, for an argument), operation, source.
    """
    plain = _Peak(module, module.entry, set())
    results = plain.values[module.root(module.entry).name]
    results = results if isinstance(results, list) else [results]
    given = {int(number) for number in re.findall(r"\{(\d*)\}: \(\d+, \{\}", module.header) if number}
    donated = {name for place, name in enumerate(results) if place in given and isinstance(name, str)}
    total, live = _Peak(module, module.entry, donated).at_most()
    outputs = set(_leaves(results)) - donated
    largest = sorted(live, key=lambda found: -found[0])[:MOST_BUFFERS]
    found = [
        {"bytes": size, "shape": _short(_shape_of(name, one)), "kind": "output" if name in outputs else "temporary",
         "name": name, **where(one.rest)}
        for size, name, one in largest
    ]  # fmt: skip
    held = [one for one in module.computations[module.entry] if one.opcode == "parameter"]
    held.sort(key=lambda one: -padded_bytes(one.shape))
    found += [
        {"bytes": padded_bytes(one.shape), "shape": _short(one.shape), "kind": "argument",
         "name": arguments[int(one.operands[0])], "operation": "parameter", "source": ""}
        for one in held[:MOST_ARGUMENTS]
    ]  # fmt: skip
    return total, sorted(found, key=lambda one: -one["bytes"])


def where(metadata: str) -> dict[str, str]:
    """Returns operation and source line from XLA's metadata, without the folders of the machine; "" if unknown."""
    named = dict(_METADATA.findall(metadata))
    file = re.sub(r"^.*/site-packages/|^.*/(?=tpu_kit/)", "", named.get("source_file", ""))
    line = named.get("source_line", "")
    # Numbers distinguish scopes of one name; "/jit(" begins the inside of a kernel.
    operation = re.sub(r"\.\d+(?=/|$)", "", named.get("op_name", "")).partition("/jit(")[0]
    if "xla__scan" in operation:  # torch_xla reports wrong lines for the body of a loop
        file = ""
    return {"operation": operation, "source": f"{file}:{line}" if file else ""}


def _shape_of(name: str, one: Instruction) -> str:
    parts = SHAPE.findall(one.shape)
    return parts[int(name.rsplit(".", 1)[1])] if one.shape.startswith("(") else parts[0]


def _short(shape: str) -> str:
    return shape.partition("{")[0]


def _leaves(value: Value) -> list[str]:
    if isinstance(value, list):
        return [name for part in value for name in _leaves(part)]
    return [value] if isinstance(value, str) else []


def parse_out_of_memory(text: str) -> dict[str, Any] | None:
    """Reads an out-of-memory text of the TPU compiler; returns None for another error.

    Returns:
        used_bytes and limit_bytes; reserved_bytes, program_bytes and argument_bytes (None where the text has none); and
        largest_buffers as in `at_peak`. The text rounds sizes to 1 % or better.
    """
    single = re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=(\d+)\)", text)
    if single:
        return {"used_bytes": int(single[1]), "limit_bytes": int(single[2]), "reserved_bytes": None,
                "program_bytes": None, "argument_bytes": None, "largest_buffers": []}  # fmt: skip
    total = re.search(rf"memory space hbm\. Used {_SIZE} of {_SIZE} hbm", text)
    if total is None:
        return None

    def part(name: str) -> int | None:
        size = re.search(rf"^ +{name} +{_SIZE}", text, re.MULTILINE)
        return _bytes(size[1], size[2]) if size else None

    found: dict[str, Any] = {
        "used_bytes": _bytes(total[1], total[2]), "limit_bytes": _bytes(total[3], total[4]),
        "reserved_bytes": part("reserved"), "program_bytes": part("program"), "argument_bytes": part("arguments"),
        "largest_buffers": [],
    }  # fmt: skip
    for block in re.split(r"^ +\d+\. Size: ", text, flags=re.MULTILINE)[1:]:
        size = re.match(_SIZE, block)
        lines = {name: rest for name, rest in re.findall(r"^ +([\w ]+): (.*)$", block, re.MULTILINE)}
        kind = lines.get("Allocation type", "")
        found["largest_buffers"].append({
            "bytes": _bytes(size[1], size[2]) if size else 0,
            "shape": _short(lines.get("Shape", "")),
            "kind": "argument" if "parameter" in kind.lower() or "argument" in kind.lower() else "temporary",
            "name": lines.get("XLA label", "").partition(" = ")[0].lstrip("%"),
            **where(lines.get("Operator", "")),
        })  # fmt: skip
    return found


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
