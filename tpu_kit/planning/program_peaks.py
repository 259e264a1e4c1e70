"""The memory of a device during each program of a run, by formula and, if it was asked, by the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.model.shape import Shape
from tpu_kit.model.sharding.sharding_rules import cache_spec
from tpu_kit.planning.memory.argument_memory import item_bytes, padded

if TYPE_CHECKING:
    from tpu_kit.planning.compiler.compile_check import Compiled


def cache_bytes(config: TrainConfig, shape: Shape, rows: int, slots: int, mesh: Mesh | None) -> int:
    """Returns a device's bytes of keys and values in the compute dtype; `rows` are a replica's or the whole mesh's.

    `slots` are tokens of a row. Layers that read another layer's keys have no cache.
    """
    size, mesh = item_bytes(config.model.base_dtype), mesh or Mesh()
    total = 0
    for kind, count in shape.counted:
        if not kind.cached_heads:
            continue
        one = (rows, kind.cached_heads, slots, kind.head_dim)
        total += 2 * count * padded(mesh.shard_shape(mesh.fitted(cache_spec(mesh, one), one), one), size, free=True)
    return total


@dataclass(frozen=True)
class ProgramPeak:
    """The memory of a device while a program runs.

    Attributes:
        name: "step", "prefill", "samples", "decode", "accumulate" or "apply".
        arguments: bytes of the buffers that it reads, by name.
        results: bytes of the new buffers that it returns.
        temporaries: bytes of the buffers that exist only while it runs, by name.
        code: bytes of the program.
        beside: bytes of all other allocated buffers, without the code of other programs.
        moment: the moment of its peak, such as "backward"; empty for programs with one moment.
    """

    name: str
    arguments: Mapping[str, int]
    results: int
    temporaries: Mapping[str, int]
    code: int
    beside: Mapping[str, int]
    moment: str = ""

    @property
    def own(self) -> int:
        """Bytes that the compiler counts for the program."""
        return sum(self.arguments.values()) + self.results + sum(self.temporaries.values()) + self.code

    @property
    def total(self) -> int:
        """Bytes of the device, with the other buffers."""
        return self.own + sum(self.beside.values())


def program_rows(programs: Sequence[ProgramPeak], made: Mapping[str, Compiled]) -> list[dict[str, Any]]:
    """Returns a row per program with a device's peak bytes, by formula and by the compiler's figures `made`.

    The keys are "program", "formula_bytes" and "compiler_bytes" (None without figures). The bytes include buffers
    beside the program, and the code of all programs, because it stays on the device.
    """
    codes, compiled = sum(one.code for one in programs), sum(one.code_bytes or 0 for one in made.values())
    exact = {name: one.total_bytes - (one.code_bytes or 0) + compiled for name, one in made.items()}
    return [
        {"program": one.name, "formula_bytes": one.total - one.code + codes,
         "compiler_bytes": exact[one.name] + sum(one.beside.values()) if one.name in exact else None}
        for one in programs
    ]  # fmt: skip
