"""A run on a slice, with its memory and time by formula or by the compiler, and the variations that fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import BatchPlan, LoraConfig, TrainConfig
from tpu_kit.distributed.detection import seen_on
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.model.shape import Shape
from tpu_kit.planning.compiler.compile_check import Compiled, compile_programs
from tpu_kit.planning.cost import StepTime, predict_time
from tpu_kit.planning.memory.argument_memory import VECTOR
from tpu_kit.planning.memory.memory_estimate import Memory, estimate
from tpu_kit.planning.program_peaks import cache_bytes, program_rows
from tpu_kit.planning.run_cost import compile_seconds
from tpu_kit.training.losses.rollout_programs import update_plan

EXACT_RESERVE = 0.01
"""Share of a device's memory that a compiled setting leaves free for buffers outside the step, such as the next
batch."""


@dataclass(frozen=True)
class Setting:
    """A run on a slice, with the memory of one device and the time of an update.

    Attributes:
        config: the run.
        shape: the model's shape.
        where: the slice, with the run's replicas or its mesh.
        compiled: the compiler's figures for each program by name; empty if the compiler was not asked.
        waits: additional compile seconds compared with the fastest-compiling candidate, divided by the updates.
        unverified: why the compiler was asked but gave no answer for this setting; empty otherwise.
    """

    config: TrainConfig
    shape: Shape
    where: TargetSlice
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    waits: float = 0.0
    unverified: str = ""

    def compile(self, seconds: float | None = None) -> Setting:
        """Returns a copy with the compiler's figures; `seconds` limits all programs; raises as `compile_programs`."""
        made = compile_programs(self.config, self.where.topology, self.where.devices, seconds=seconds)
        return replace(self, compiled=made)

    @cached_property
    def memory(self) -> Memory:
        """Memory by formula; raises ValueError as `estimate`."""
        config, where = seen_on(self.where.device_type, self.config), self.where
        return estimate(config, num_replicas=where.replicas, shape=self.shape, mesh=where.mesh)

    @property
    def several(self) -> bool:
        """Whether the run samples, and therefore has several programs."""
        return len(self.memory.programs) > 1

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Bytes of the device in every compiled program, by the compiler; empty if it was not asked."""
        rows = program_rows(self.memory.programs, self.compiled)
        return {row["program"]: row["compiler_bytes"] for row in rows if row["compiler_bytes"] is not None}

    @property
    def largest(self) -> str:
        """Name of the compiled program with the largest peak; only if the compiler was asked."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the device: of the `largest` compiled program, else by formula."""
        return self.peaks[self.largest] if self.compiled else self.memory.total_bytes

    @cached_property
    def parts(self) -> dict[str, int]:
        """Bytes of a device at the peak by name: `Memory.parts`, or figures of the compiler for the `largest` program.

        By the compiler, they are "arguments", "temporaries", "code" (of all programs) and "unaliased_outputs", and the
        buffers beside the program by their own names.
        """
        if not self.compiled:
            return dict(self.memory.parts)
        most = self.compiled[self.largest]
        beside = next(one.beside for one in self.memory.programs if one.name == self.largest)
        arguments, new = most.argument_bytes or 0, (most.output_bytes or 0) - (most.aliased_bytes or 0)
        rest = most.total_bytes - arguments - new - (most.code_bytes or 0)  # not reported if the program does not fit
        codes = sum(one.code_bytes or 0 for one in self.compiled.values())
        return {**beside, "arguments": arguments, "temporaries": rest, "code": codes, "unaliased_outputs": new}

    @property
    def compiling(self) -> float:
        """Seconds to trace and compile the programs on this machine; estimated if the compiler was not asked."""
        if made := self.compiled.values():
            return sum(one.trace_seconds + one.compile_seconds for one in made)
        return compile_seconds(self.config, self.shape, self.update.gradient_accumulation)

    @property
    def source(self) -> str:
        """Source of the memory figures: "formula" or "compiler"."""
        return "compiler" if self.compiled else "formula"

    @property
    def free(self) -> float:
        """Share of `where.limit` that must stay free: `EXACT_RESERVE` with compiler figures, else `where.free`."""
        return EXACT_RESERVE if self.compiled else self.where.free

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the share `free` of the memory, and the compiler found that all programs fit."""
        budget = self.where.limit * (1 - self.free)
        return self.peak_bytes <= budget and all(one.fits for one in self.compiled.values())

    @property
    def bound(self) -> float:
        """Most bytes by formula (`memory.total_bytes`) with which a variation fits, corrected by compiler figures."""
        held, budget = self.memory.argument_bytes, self.where.limit * (1 - self.free)
        scale = (self.memory.total_bytes - held) / max(1, self.peak_bytes - held)
        return held + (budget - held) * scale if self.compiled else budget

    @cached_property
    def update(self) -> BatchPlan:
        """Rows and passes of an update; if the run samples, with the longest prompts and completions."""
        return update_plan(self.config, self.where.replicas)

    @cached_property
    def time(self) -> StepTime:
        """Predicted time of an update with its share of a rollout; raises ValueError if the chip's speed is unknown."""
        return predict_time(self.config, self.shape, self.where, self.compiled)

    @property
    def speed(self) -> float:
        """Tokens per second of all replicas, including padding; in a run that samples, of the longest completions."""
        return self.update.tokens_per_update / self.time.seconds

    @property
    def pace(self) -> float:
        """Like `speed`, with the additional compile time `waits` in the time of an update."""
        return self.update.tokens_per_update / (self.time.seconds + self.waits)

    def changed(self, name: str, value: Any) -> Setting:
        """Returns the setting by formula with `with_rows` for optim.batch_size, `with_value` for other parameters."""
        return self.of(
            with_rows(self.config, value) if name == "optim.batch_size" else with_value(self.config, name, value)
        )

    def of(self, config: TrainConfig) -> Setting:
        """Returns the setting of another run of the same model on the slice, without the compiler's figures."""
        return Setting(config, self.shape, self.where)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Bisects for the largest number from 1 to `most` that fits, or 0. All smaller numbers must fit."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def with_rows(config: TrainConfig, rows: int, **changes: Any) -> TrainConfig:
    """Returns the run with optim.batch_size=`rows` and these `changes` to `optim`.

    Unless `changes` set optim.global_batch_size, it becomes None, so an update has `rows` x replicas x passes.
    """
    values = {"global_batch_size": None, **changes, "batch_size": rows}
    return replace(config, optim=replace(config.optim, **values))


def with_value(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    """Returns the run with another value of a parameter such as "lora.r"; raises ConfigError if it is not allowed."""
    section, _, leaf = name.partition(".")
    return replace(config, **{section: replace(getattr(config, section), **{leaf: value})})


@dataclass(frozen=True)
class Inference:
    """The memory of generation on one device for one row, or on a mesh for one row of every data shard.

    Attributes:
        weight_bytes: bytes of base weights and adapters.
        cache_bytes_per_token: bytes of a token's keys and values in all layers.
        longest_context: most tokens of prompt and reply whose KV cache fits, at most the model's positions; 0 if none.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    longest_context: int


def inference(one: Setting) -> Inference:
    """Estimates generation on a slice: weights in the dtype of frozen weights, KV cache in the compute dtype."""
    config, shape, where = one.config, one.shape, one.where
    frozen = config if config.lora.r else replace(config, lora=LoraConfig(), data=replace(config.data, max_length=128))
    parts = Setting(with_rows(frozen, 1), shape, where).memory.parts
    weights = parts["base_weights"] + (parts["adapters"] if config.lora.r else 0)
    each = cache_bytes(config, shape, where.mesh.data if where.mesh else 1, VECTOR, where.mesh) // VECTOR
    return Inference(weights, each, max(0, min(shape.positions, int((where.budget - weights) // each))))


def can_block(config: TrainConfig, shape: Shape) -> bool:
    """Whether run and model allow optim.remat=blocks, which keeps only the inputs of blocks of several layers."""
    return shape.recomputed_twice > 0 and _allows(config, "optim", remat="blocks")


def can_shard(config: TrainConfig) -> bool:
    """Whether the settings of the run allow a mesh, which needs layers that run as a loop."""
    return _allows(config, "launch", mesh="fsdp=-1", num_replicas=None)


def _allows(config: TrainConfig, section: str, **changes: Any) -> bool:
    """Whether the configuration accepts these values of a section's parameters."""
    try:
        replace(config, **{section: replace(getattr(config, section), **changes)})
    except ConfigError:
        return False
    return True
