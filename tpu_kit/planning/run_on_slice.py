"""A run on a slice, with its memory and time by formula, or by the compiler; and which variations of it fit."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import BatchPlan, LoraConfig, TrainConfig, batch_arithmetic
from tpu_kit.config.mesh import Mesh
from tpu_kit.config.resuming import ANEW, changes
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.distributed.detection import seen_on
from tpu_kit.machine.chips import CHIPS, GIB
from tpu_kit.machine.slices import RESERVE, TargetSlice
from tpu_kit.model.shape import Shape, undivided
from tpu_kit.planning.compiler.compile_check import Compiled, compile_programs
from tpu_kit.planning.cost import StepTime, predict_time
from tpu_kit.planning.memory.argument_memory import VECTOR
from tpu_kit.planning.memory.memory_estimate import Memory, estimate
from tpu_kit.planning.rollouts import cache_bytes, program_rows, update_plan, whole_prompts
from tpu_kit.planning.run_cost import compile_seconds

EXACT_RESERVE = 0.01
"""Share of a device's memory that a compiled setting leaves free, for what a run holds beside the step, such as the
next batch."""
_RANKS = 4096


@dataclass(frozen=True)
class Setting:
    """A run on a slice, with the memory of one device and the time of an update.

    Attributes:
        config: the run.
        shape: of its model.
        where: the slice, with the run's replicas or its mesh.
        compiled: the compiler's figures of each program; empty where it was not asked.
        waits: an update's part of the seconds by which it compiles longer than another candidate, at one start.
    """

    config: TrainConfig
    shape: Shape
    where: TargetSlice
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    waits: float = 0.0

    def compile(self) -> Setting:
        """The setting with the compiler's figures; raises `CompilerUnavailable`."""
        return replace(self, compiled=compile_programs(self.config, self.where.topology, self.where.devices))

    @cached_property
    def memory(self) -> Memory:
        """The memory by formula; raises ValueError as `estimate`."""
        config, where = seen_on(self.where.device_type, self.config), self.where
        return estimate(config, num_replicas=where.replicas, shape=self.shape, mesh=where.mesh)

    @cached_property
    def peaks(self) -> dict[str, int]:
        """Bytes in each program by the compiler, if it was asked."""
        return {row["program"]: row["compiler_bytes"] for row in program_rows(self.memory.programs, self.compiled)}

    @property
    def largest(self) -> str:
        """The compiled program that takes most."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Bytes of the device while `largest` runs."""
        return self.peaks[self.largest] if self.compiled else self.memory.total_bytes

    @cached_property
    def parts(self) -> dict[str, int]:
        """The bytes of the peak by name."""
        if not self.compiled:
            return dict(self.memory.parts)
        most = self.compiled[self.largest]
        beside = next(one.beside for one in self.memory.programs if one.name == self.largest)
        arguments, new = most.argument_bytes or 0, (most.output_bytes or 0) - (most.aliased_bytes or 0)
        rest = most.total_bytes - arguments - new - (most.code_bytes or 0)  # not reported if the step does not fit
        codes = sum(one.code_bytes or 0 for one in self.compiled.values())
        return {**beside, "arguments": arguments, "temporaries": rest, "code": codes, "unaliased_outputs": new}

    @property
    def compiling(self) -> float:
        """Seconds to trace and compile the programs on this machine; estimated where the compiler was not asked."""
        if made := self.compiled.values():
            return sum(one.trace_seconds + one.compile_seconds for one in made)
        return compile_seconds(self.config, self.shape, self.update.gradient_accumulation)

    @property
    def source(self) -> str:
        """Of the memory figures, "formula" or "compiler"."""
        return "compiler" if self.compiled else "formula"

    @property
    def free(self) -> float:
        """The share of the memory that must be left free."""
        return EXACT_RESERVE if self.compiled else self.where.free

    @property
    def fits(self) -> bool:
        """Whether the peak leaves `free` of the memory."""
        budget = self.where.limit * (1 - self.free)
        return self.peak_bytes <= budget and all(one.fits for one in self.compiled.values())

    @property
    def bound(self) -> float:
        """Bytes by formula up to which a variation fits, corrected by the compiler's figure if it was asked."""
        held, budget = self.memory.argument_bytes, self.where.limit * (1 - self.free)
        scale = (self.memory.total_bytes - held) / max(1, self.peak_bytes - held)
        return held + (budget - held) * scale if self.compiled else budget

    @cached_property
    def update(self) -> BatchPlan:
        """The rows of an update."""
        return update_plan(self.config, self.where.replicas)

    @cached_property
    def time(self) -> StepTime:
        """The time of a step."""
        return predict_time(self.config, self.shape, self.where, self.compiled)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.update.tokens_per_update / self.time.seconds

    @property
    def pace(self) -> float:
        """Tokens a second of the run, in which it `waits` for the compiler."""
        return self.update.tokens_per_update / (self.time.seconds + self.waits)

    def changed(self, name: str, value: Any) -> Setting:
        """The setting with another parameter, by formula; rows of a pass then determine those of an update."""
        section, _, leaf = name.partition(".")
        if leaf == "batch_size":
            config = with_rows(self.config, value)
        else:
            config = replace(self.config, **{section: replace(getattr(self.config, section), **{leaf: value})})
        return Setting(config, self.shape, self.where)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Bisects for the largest number from 1 to `most` that fits; all below it must fit. 0 if 1 does not."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def with_rows(config: TrainConfig, rows: int, **changes: Any) -> TrainConfig:
    """The run with so many rows in a pass, which determine those of an update if no changes of `optim` say them."""
    values = {"global_batch_size": None, **changes, "batch_size": rows}
    return replace(config, optim=replace(config.optim, **values))


@dataclass(frozen=True)
class MemoryOption:
    """A change that takes less memory.

    Attributes:
        change: as on the command line, such as "optim.loss_chunk=128"; and its cost, `harm`.
        anew: whether a run that has begun cannot continue with it.
        peak_bytes: the peak with this change and all before it; and whether that `fits`.
    """

    change: str
    harm: str
    anew: bool
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """What to change if a run does not fit, and the largest settings that fit, one by one; 0 for none.

    Attributes:
        knobs: if it does not fit, changes in the order of least harm, each added to those before.
        smallest_slice: if it does not fit, the cheapest slice on which the unchanged run fits.
        largest_batch: rows of a replica in a pass.
        longest_sequence: tokens of a row, a multiple of 128.
        largest_rank: None without adapters, and where one is trained on, whose rank is given.
    """

    knobs: tuple[MemoryOption, ...]
    smallest_slice: str | None
    largest_batch: int
    longest_sequence: int
    largest_rank: int | None

    def __str__(self) -> str:
        lines = [
            f"{knob.change} ({knob.harm}): {knob.peak_bytes / GIB:.2f} GiB{', fits' if knob.fits else ''}"
            for knob in self.knobs
        ]
        if any(knob.anew for knob in self.knobs):
            lines.append(f"another training cannot go on from a checkpoint of this run: give it {ANEW}")
        return "; ".join([*lines, f"unchanged it fits {self.smallest_slice or 'no known slice'}"])


@dataclass(frozen=True)
class Inference:
    """The memory of generation on one device, for one row, or one of each data shard of a mesh.

    Attributes:
        weight_bytes: base weights and adapters.
        cache_bytes_per_token: keys and values of a token, over all layers.
        longest_context: tokens of prompt and reply, at most the model's positions, whose cache fits beside the weights.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    longest_context: int


def inference(one: Setting) -> Inference:
    """Estimates generation on a slice: weights in the dtype of frozen ones, a cache in the compute dtype."""
    config, shape, where = one.config, one.shape, one.where
    frozen = config if config.lora.r else replace(config, lora=LoraConfig(), data=replace(config.data, max_length=128))
    parts = Setting(with_rows(frozen, 1), shape, where).memory.parts
    weights = parts["base_weights"] + (parts["adapters"] if config.lora.r else 0)
    each = cache_bytes(config, shape, where.mesh.data if where.mesh else 1, VECTOR, where.mesh) // VECTOR
    return Inference(weights, each, max(0, min(shape.positions, int((where.budget - weights) // each))))


def advise(one: Setting) -> Advice:
    """Finds the largest settings that fit, and what to change if the run does not."""

    def most(name: str, limit: int, each: int = 1) -> int:
        def within(number: int) -> bool:
            try:
                return one.changed(name, each * number).memory.total_bytes <= one.bound
            except ConfigError:  # rows shorter than a completion
                return True

        return each * largest(within, limit)

    lora = one.config.lora
    return Advice(
        knobs=() if one.fits else tuple(_knobs(one)),
        smallest_slice=None if one.fits else _smallest_slice(one),
        largest_batch=most("optim.batch_size", min(MOST_ROWS, 2**31 // one.config.data.max_length)),
        longest_sequence=most("data.max_length", one.shape.positions // 128, 128),
        largest_rank=most("lora.r", _RANKS) if lora.r and not lora.adapter else None,
    )


def _knobs(one: Setting) -> Iterator[MemoryOption]:
    """The changes that help, each added to those before, until the run fits; without those that it fits without."""
    found, replicas = list[tuple[str, Any, str]](), one.where.replicas

    def with_all(changes: Iterable[tuple[str, Any, str]]) -> Setting:
        return reduce(lambda now, each: now.changed(*each[:2]), changes, Setting(one.config, one.shape, one.where))

    def fits(changed: Setting) -> bool:
        return changed.peak_bytes <= one.bound

    for name, value, harm in _changes(one.config, one.shape):
        now = with_all(found)
        if fits(now):
            break
        if name in ("optim.batch_size", "rl.prompts_per_update"):
            rows = now.config[name]
            assert isinstance(rows, int)
            value = largest(lambda n: fits(now.changed(name, n)), rows - 1) or 1  # noqa: B023  called at once
            whole = whole_prompts(now.config, replicas) if name == "rl.prompts_per_update" else 1
            value = value // whole * whole or value
        with contextlib.suppress(ConfigError):  # not on a mesh
            if now.changed(name, value).peak_bytes < now.peak_bytes:
                found.append((name, value, harm))
    for each in found[-2::-1] if fits(with_all(found)) else ():  # the last is needed
        others = [other for other in found if other is not each]
        if fits(with_all(others)):
            found = others
    now = with_all([])
    for name, value, harm in found:
        before, now = now, now.changed(name, value)
        anew = is_another(before.config, now.config, replicas)
        harm = f"{harm}, another training" if anew else f"the same training, {harm}"
        yield MemoryOption(f"{name}={value}", harm, anew, now.peak_bytes, fits(now))


def is_another(before: TrainConfig, now: TrainConfig, replicas: int) -> bool:
    """Returns whether a run of one configuration cannot resume with the other, on as many replicas."""
    rows = [batch_arithmetic(config, replicas).global_batch_size for config in (before, now)]
    return rows[0] != rows[1] or bool(changes(before.flat_values(), now.flat_values())[1])


def _changes(config: TrainConfig, shape: Shape) -> Iterator[tuple[str, Any, str]]:
    """Names, values and harms of the changes that may help, in the order of least harm."""
    optim, model, lora, learns = config.optim, config.model, config.lora, config.on_policy
    uneven = undivided(shape.widths, model.quant_group)
    lengths = [(length < config.data.max_length, "data.max_length", length, "shorter rows")
               for length in (2048, 1024, 512, 256)]  # fmt: skip
    changes: list[tuple[Any, str, Any, str]] = [
        (model.attention != "auto", "model.attention", "auto", "no slower"),
        (optim.loss_chunk > 256, "optim.loss_chunk", 256, "no slower"),
        (not optim.recomputes, "optim.remat", "full", "a third more FLOPs"),
        (optim.mlp_tile is None or optim.mlp_tile > 512, "optim.mlp_tile", 512, "slower"),
        (optim.loss_chunk > 64, "optim.loss_chunk", 64, "slower"),
        (optim.remat != "blocks" and can_block(config, shape), "optim.remat", "blocks", "a fifth more FLOPs"),
        (True, "optim.batch_size", 1, "more passes" if learns else "fewer rows an update"),
        (learns and config.rl.steps_per_generation > 1, "rl.steps_per_generation", 1, "fewer prompts a rollout"),
        (learns, "rl.prompts_per_update", 1, "fewer prompts an update"),
        (model.base_dtype == "fp32", "model.base_dtype", "bf16", "base weights and products in bf16"),
        (optim.optimizer == "adamw", "optim.optimizer", "adafactor", "hardly any moments"),
        (optim.ema_decay, "optim.ema_decay", 0.0, "no average of the weights"),
        (not lora.r, "lora.r", 16, "adapters in place of all weights"),
        (lora.r > 8 and not lora.adapter, "lora.r", 8, "smaller adapters"),
        *lengths[:2],
        # Without adapters all weights are trained.
        (lora.r and model.base_dtype in ("bf16", "fp32"), "model.base_dtype", "int8",
         "base weights in int8, products in bf16"),
        (lora.r and model.base_dtype != "int4" and not uneven, "model.base_dtype", "int4",
         "base weights in int4, products in bf16"),
        *lengths[2:],
    ]  # fmt: skip
    return ((name, value, harm) for wanted, name, value, harm in changes if wanted)


def _smallest_slice(one: Setting) -> str | None:
    """The cheapest slice on which the run fits: as it is on each device, or sharded over all of its devices."""
    found, where, peak = [], one.where, one.memory.total_bytes
    passes = batch_arithmetic(one.config, where.replicas).gradient_accumulation
    optim = replace(one.config.optim, global_batch_size=None, gradient_accumulation=passes)
    each = replace(one.config, optim=optim)
    for chip in CHIPS.values():
        if chip.accelerator_prefix is None or chip.usable_hbm_bytes is None:
            continue
        limit = chip.usable_hbm_bytes * (1 - RESERVE)
        alone = where.mesh is None and peak <= limit
        for count in chip.slice_sizes:
            devices = count * chip.devices_per_chip
            if not alone:
                if devices == 1 or not can_shard(each):
                    continue
                if estimate(each, shape=one.shape, mesh=Mesh(fsdp=devices)).total_bytes > limit:
                    continue
            price = chip.price.on_demand * count if chip.price else float("inf")
            name = chip.slice_name(count) + ("" if alone else f" with mesh=fsdp={devices}")
            found.append((price, count, name))
            break
    return min(found)[2] if found else None


def can_block(config: TrainConfig, shape: Shape) -> bool:
    """Whether the layers of a run have blocks of which optim.remat=blocks keeps the input alone."""
    return config.optim.scan_layers != "off" and shape.recomputed_twice > 0


def can_shard(config: TrainConfig) -> bool:
    """Whether the run can be sharded over a mesh: its layers run as a loop, and its settings allow it."""
    try:
        replace(config, launch=replace(config.launch, mesh="fsdp=-1", num_replicas=None))
    except ConfigError:
        return False
    return True
