"""What the TPU compiler says of a step, as a plain record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Effort = Literal["full", "low"]


@dataclass(frozen=True)
class Buffer:
    """One of the largest buffers at the peak.

    Attributes:
        bytes: its size in HBM, tiles filled up.
        shape: such as "bf16[4,1024,4864]".
        kind: "temporary", "output" or "argument".
        name: the compiler's name for it; of an argument, the model's.
        operation: where in the model it comes from, such as "model/layers/3/mlp/aten__mm".
        source: file and line of the Python code that made it.
    """

    bytes: int
    shape: str
    kind: str
    name: str
    operation: str
    source: str


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind, such as "all-reduce": how many a step runs, and the bytes of their results."""

    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the TPU compiler says of a step. Bytes are of one device; a figure is None where the step does not fit.

    Attributes:
        chip: the chip's short name in `chips`.
        topology: the slice it was compiled for, such as "v5e:2x4".
        num_replicas: devices that share the update.
        batch_size: rows of each in a pass.
        gradient_accumulation: passes.
        effort: of the compiler; "low" is some 6 times quicker, and its temporaries differ by 1.5 to 8 %, mostly down.
        fits: whether the step runs: it compiled, and its total is within the limit.
        limit_bytes: what a program can have of a device's memory.
        argument_bytes: weights, state and batch.
        output_bytes: what the step returns: the new state.
        aliased_bytes: the part of the outputs that is written over arguments.
        temporary_bytes: what is alive only during the step, at its peak.
        code_bytes: the program.
        peak_bytes: the compiler's own figure of that name, for information: nowhere does it say what it counts, and it
            is neither the total nor always below it. None of answers that were kept before it was asked for.
        total_bytes: arguments + (outputs - aliased) + temporaries + code; of what did not compile, what the compiler
            says it would use (to 1 %, unaliased outputs not counted).
        flops: floating point operations of a step on one device, loop bodies counted at every trip. Kernels count what
            they say of themselves, and splash attention, which says nothing, by formula (`costs.splash_flops`).
        bytes_accessed: bytes that its instructions read and write, counted so, too, wherever these lie.
        hbm_bytes: those of them that come from HBM or go there, the rest being in on-chip memory (`costs.hbm_bytes`).
        collectives: by kind.
        largest_buffers: those alive at the peak, largest first.
        loop_trips: how often each loop turns, by its name; None where the text does not tell (counted as once).
        out_of_memory: the compiler's text, of what does not fit.
        trace_seconds: time to trace the step, and `compile_seconds` to compile it. From the cache: what it took then.
        trace_host_bytes: the most memory that the process took while tracing.
        compile_seconds: see above.
        libtpu: version of the compiler.
        program: a hash of the program.
        cached: whether nothing was compiled, because the answer was known.
    """

    chip: str
    topology: str
    num_replicas: int
    batch_size: int
    gradient_accumulation: int
    effort: Effort
    fits: bool
    limit_bytes: int
    argument_bytes: int | None = None
    output_bytes: int | None = None
    aliased_bytes: int | None = None
    temporary_bytes: int | None = None
    code_bytes: int | None = None
    peak_bytes: int | None = None
    total_bytes: int
    flops: float | None = None
    bytes_accessed: float | None = None
    hbm_bytes: float | None = None
    collectives: tuple[Collective, ...] = ()
    largest_buffers: tuple[Buffer, ...] = ()
    loop_trips: Mapping[str, int | None]
    out_of_memory: str | None = None
    trace_seconds: float
    trace_host_bytes: int
    compile_seconds: float
    libtpu: str
    program: str
    cached: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; `from_dict` takes them back."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Compiled:
        """What `to_dict` returned."""
        lists = {
            "collectives": tuple(Collective(**one) for one in values["collectives"]),
            "largest_buffers": tuple(Buffer(**one) for one in values["largest_buffers"]),
        }
        return Compiled(**{**values, **lists})

    def __str__(self) -> str:
        gib = 2.0**30
        verdict = "fits" if self.fits else "does not fit"
        text = f"{verdict} {self.topology}: {self.total_bytes / gib:.2f} of {self.limit_bytes / gib:.2f} GiB"
        if self.argument_bytes is None or self.temporary_bytes is None or self.bytes_accessed is None:
            return text
        return (
            f"{text} ({self.argument_bytes / gib:.2f} arguments, {self.temporary_bytes / gib:.2f} temporaries), "
            f"{(self.flops or 0) / 1e12:.1f} TFLOP, {self.bytes_accessed / 1e9:.1f} GB moved, "
            f"compiled in {self.compile_seconds:.0f} s"
        )
