"""The largest buffers of a compiled program, and the figures of an out-of-memory text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from tpu_kit.xla.hlo import MOVES_NOTHING, SHAPE, Instruction, Module, padded_bytes, written

MOST_BUFFERS = 20  # temporaries and outputs; the compiler's out-of-memory text has as many
MOST_ARGUMENTS = 5

_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([BKMGT])"
_METADATA = re.compile(r'(op_name|source_file|source_line)="?([^" }]*)')
# Instructions whose result is in the memory of the first operand.
_VIEWS = {"dynamic-update-slice", "all-reduce", "reshape"}


def largest_buffers(module: Module, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Lists the largest buffers in HBM that a program allocates, and its largest arguments.

    The compiler does not report its allocation. These are the results of the instructions in the text, without those
    that overwrite an operand; they need not be in memory at the same time.

    Args:
        module: the program.
        arguments: the names of its parameters, as in `program.Program.arguments`.

    Returns:
        For each buffer, largest first: bytes, shape, kind ("temporary", "output", "argument"), name (of the model's
        tensor, for an argument), operation, source.
    """
    root = module.root(module.entry)
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    donated = {outputs[int(number)] for number in re.findall(r"\{(\d+)\}: \(\d+, \{\}", module.header)}
    found: dict[Any, dict[str, Any]] = {}  # equal buffers of one operation once
    for name in module.runs:
        for one in module.computations[name]:
            if one.opcode in MOVES_NOTHING | _VIEWS or one.opcode.endswith("-done") or one.name in donated:
                continue
            kind = "output" if name == module.entry and one.name in outputs else "temporary"
            origin = where(one.rest)
            for shape in _new_arrays(module, one):
                found.setdefault((shape, kind, *origin.values()), _buffer(shape, kind, one.name) | origin)
    held = [one for one in module.computations[module.entry] if one.opcode == "parameter"]
    given = [_buffer(one.shape, "argument", arguments[int(one.operands[0])]) for one in held]
    given = [one | {"operation": "parameter", "source": ""} for one in given]
    largest = sorted(found.values(), key=_bytes_of)[:MOST_BUFFERS] + sorted(given, key=_bytes_of)[:MOST_ARGUMENTS]
    return sorted(largest, key=_bytes_of)


def _bytes_of(buffer: dict[str, Any]) -> int:
    return -int(buffer["bytes"])


def _buffer(shape: str, kind: str, name: str) -> dict[str, Any]:
    return {"bytes": padded_bytes(shape), "shape": shape.partition("{")[0], "kind": kind, "name": name}


def _new_arrays(module: Module, one: Instruction) -> list[str]:
    """Returns the shapes of the results that do not overwrite an operand."""
    shapes = SHAPE.findall(one.shape)
    if one.opcode == "copy-start":  # (to, from, context)
        return shapes[:1]
    if one.opcode.endswith("-start") and one.opcode != "all-reduce-start":  # ((operands), result, context)
        return shapes[len(one.operands) :][:1]
    kept = [math.inf] * len(shapes)
    if one.opcode == "fusion":
        kept = written(module, one.called[0])
    elif listed := re.search(r"output_to_operand_aliasing=\{(.*?\})\}", one.rest):
        over = {int(result or 0) for result in re.findall(r"\{(\d*)\}: \(", listed[1])}
        return [shape for number, shape in enumerate(shapes) if number not in over]
    return [shape for shape, part in zip(shapes, kept, strict=True) if part == math.inf]


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


def parse_out_of_memory(text: str) -> dict[str, Any] | None:
    """Reads an out-of-memory text of the TPU compiler; returns None for another error.

    Returns:
        used_bytes and limit_bytes; reserved_bytes, program_bytes and argument_bytes (None where the text has none); and
        largest_buffers as in `largest_buffers`. The text rounds sizes to 1 % or better.
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
            "shape": lines.get("Shape", "").partition("{")[0],
            "kind": "argument" if "parameter" in kind.lower() or "argument" in kind.lower() else "temporary",
            "name": lines.get("XLA label", "").partition(" = ")[0].lstrip("%"),
            **where(lines.get("Operator", "")),
        })  # fmt: skip
    return found


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
