"""Estimates the memory of a training step from the model's config.json, and advises what to change if it is too much.

It needs no weights, no compiler and no torch, and takes less than a second.

    from tpu_kit.planning.memory_estimate import estimate
    print(estimate(config))

A step needs arguments (weights, state, batch) + temporaries + code; donated state is written in place, so it counts
once. The temporaries are taken at the moment when most are alive: at the "start", in the "loss", the "backward" pass or
the "update"; `activation_memory` derives them. This module derives the arguments and the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import ANEW, LoraConfig, TrainConfig, batch_arithmetic, is_another
from tpu_kit.config.mesh import Mesh
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.hardware.chips import CHIPS, GIB, Chip
from tpu_kit.hardware.slices import TargetSlice
from tpu_kit.models.architecture import FEW_TILES, Shape
from tpu_kit.models.shape_cache import read_shape
from tpu_kit.planning.activation_memory import PeakActivationModel
from tpu_kit.planning.argument_memory import is_matrix, padded, shards, teacher_shape, teacher_tensors
from tpu_kit.planning.mesh_memory import MESH_CODE, MeshActivationModel
from tpu_kit.planning.rollouts import (
    ProgramPeak,
    RolloutTemporaries,
    cache_bytes,
    generation_code,
    rollout_of,
    update_plan,
    whole_prompts,
)

LOOP_CODE = 26 * 2**20
"""Code of a program of loops for each layer in it (one, or those of a block) and each pass: 20 to 31 MiB."""
TILE_CODE = 10 * 2**20
"""Code of each tile of an MLP beyond two, where tiles are no loop; where a norm follows, some is computed twice."""
INT4_CODE = 14 * 2**20
"""Code for each layer in a loop beyond that, where weights are unpacked from int4."""
SMALLEST_CODE = 7 * 2**20
"""Code beside the layers' of an unrolled program; and of a program of loops of next to nothing."""
FLAT_CODE = 22 * 2**20
"""Code of each unrolled layer."""
RESERVE = 0.08
"""Share of a device's usable memory that a pick by formula leaves free: more than the largest underestimate for the
steps that were compiled (tests/recorded_memory.json)."""
PASSES_RESERVE = 0.10
"""The same with gradient accumulation, with which few steps were compiled."""
_RANKS = 4096


@dataclass(frozen=True)
class Memory:
    """The memory of a step on one device.

    Attributes:
        parts: bytes by name at the peak: base_weights, teacher_weights, adapters, optimizer, ema, batch,
            objective, objective_saved, saved_activations, mask, gradients, weight_copies, layer, attention,
            loss_chunk, teacher, all_reduce, update, heap, code.
        argument_bytes: weights, state and batch.
        temporary_bytes: buffers that live only within the step.
        code_bytes: the program.
        moment: the moment of the peak: "start", "loss", "backward" or "update".
        trained: number of trained parameters.
        scanned: whether layers run as a loop.
        programs: of reinforcement learning, whose largest peak this is; else none.
    """

    parts: Mapping[str, int]
    argument_bytes: int
    temporary_bytes: int
    code_bytes: int
    moment: str
    trained: int
    scanned: bool
    programs: tuple[ProgramPeak, ...] = ()

    @property
    def total_bytes(self) -> int:
        """The peak."""
        return self.argument_bytes + self.temporary_bytes + self.code_bytes

    def __str__(self) -> str:
        lines = [f"{name:<18} {size / GIB:8.3f} GiB" for name, size in self.parts.items() if size]
        return "\n".join([*lines, f"{'peak':<18} {self.total_bytes / GIB:8.3f} GiB ({self.moment})"])


def estimate(
    config: TrainConfig,
    *,
    num_replicas: int = 1,
    shape: Shape | None = None,
    chip: Chip | None = None,
    mesh: Mesh | None = None,
) -> Memory:
    """Estimates the memory of a training step on a TPU.

    Args:
        config: the run; its model is read by `shape_cache.read_shape`.
        num_replicas: data-parallel replicas; each holds everything. Not used with a mesh.
        shape: the model's shape, if it was read before.
        chip: the TPU; without it the vector memory of v5e is assumed.
        mesh: the devices over which the model is sharded; None for replicas.

    Raises:
        ValueError: as `shape_cache.read_shape` and `batch_arithmetic`; a sequence longer than the model's positions.
    """
    shape = shape or read_shape(config.model)
    if config.data.max_length > shape.positions:
        raise ValueError(
            f"data.max_length={config.data.max_length} is longer than the {shape.positions} positions of the model; "
            f"set it to {shape.positions} or less"
        )
    kind = _Rounds if config.on_policy else _Step
    return kind(config, shape, num_replicas, chip, mesh).memory()


def estimate_on(config: TrainConfig, shape: Shape, where: TargetSlice) -> Memory:
    """As `estimate`, on a slice with its replicas or its mesh."""
    return estimate(config, num_replicas=where.replicas, shape=shape, chip=where.chip, mesh=where.mesh)


class _Step:
    """Arguments, temporaries and code."""

    def __init__(
        self, config: TrainConfig, shape: Shape, num_replicas: int, chip: Chip | None, mesh: Mesh | None
    ) -> None:
        self.config, self.shape = config, shape
        self.alive = (
            PeakActivationModel(config, shape, num_replicas, chip)
            if mesh is None
            else MeshActivationModel(config, shape, mesh, chip)
        )
        self.mesh, self.replicas = mesh, num_replicas

    # ------------------------------------------------------------------------------------------------------ arguments

    def arguments(self) -> dict[str, int]:
        """The buffers before the step: weights, adapters, optimizer, average, batches; of a mesh a device's shards.

        Moments and the average are fp32, in the layout of the groups of parameters: AdamW has 8 bytes a parameter,
        Adafactor a number for each row and column. A batch is three int64 and one int32 array of (B, S) for each pass.
        """
        alive, config = self.alive, self.config
        every = list(zip(alive.tensors, alive.parts, strict=True))
        sizes = {one.name: padded(part, one.size, free=True) for one, part in every}
        adapters = sum(sizes[one.name] for one in alive.tensors if one.trained) if config.lora.r else 0
        teacher, state = teacher_tensors(config), sum(map(alive.group_bytes, alive.groups))
        shape = teacher_shape(config)
        parts = shards(teacher, self.mesh, shape.embedding) if shape else []
        columns = [(1, 8), (1, 8), (1, 8), (1, 4)]
        if config.distill.files:
            columns += [(config.distill.top_k, 4), (config.distill.top_k + 1, 4)]
        if alive.objective:
            columns += [(width, 4) for width, _ in alive.objective.columns.values()]
        rows = sum(padded((alive.rows, alive.length * width), size) for width, size in columns)
        return {
            "base_weights": sum(sizes.values()) - adapters,
            "teacher_weights": sum(padded(part, one.size, free=True) for one, part in zip(teacher, parts, strict=True)),
            "adapters": adapters,
            "optimizer": 2 * state if config.optim.optimizer == "adamw" else self._factored(),
            "ema": state if config.optim.ema_decay else 0,
            "batch": rows * alive.passes,
            "objective": alive.objective_state(),
        }  # fmt: skip

    def _factored(self) -> int:
        """Adafactor's numbers of rows and columns, which each device of a mesh holds whole."""
        size, vectors = 0, 0
        for one, part in zip(self.alive.tensors, self.alive.parts, strict=True):
            if one.trained and is_matrix(one):
                shape = one.shape
                size += padded((math.prod(shape[:-1]),), 4) + padded((math.prod(shape) // shape[-2],), 4)
            elif one.trained:
                vectors += math.prod(part)
        return size + padded((vectors,), 4)

    def code(self) -> int:
        """The program's own size; see `LOOP_CODE`."""
        passes, layers = self.alive.passes, self.shape.layers
        if not self.alive.scanned:
            return SMALLEST_CODE + passes * layers * FLAT_CODE
        if max(kind.parameters for kind in self.shape.kinds) < 2**21:
            return SMALLEST_CODE * passes
        twice = self.alive.tiled and any(kind.norm_follows for kind in self.shape.kinds)
        tiles = self.alive.tiles + twice  # the first products twice
        more = max(0, tiles - 2) if self.alive.tiles <= FEW_TILES else 0
        layer = LOOP_CODE + TILE_CODE * more + INT4_CODE * (self.config.model.base_dtype == "int4")
        collectives = MESH_CODE if isinstance(self.alive, MeshActivationModel) else 0
        return layer * sum(period for period, _ in self.shape.runs) * passes + collectives

    def memory(self) -> Memory:
        """The estimate."""
        arguments = self.arguments()
        moment, beyond = self.alive.reported()
        temporaries = {name: math.ceil(size) for name, size in {**moment.parts, "heap": beyond}.items()}
        parts = {**arguments, **temporaries, "code": self.code()}
        total = sum(temporaries.values())
        return Memory(
            parts, sum(arguments.values()), total, self.code(), moment.name, self.alive.trained, self.alive.scanned
        )


class _Rounds(_Step):
    """The programs of a rollout and of an update that is two programs, and what lies beside each of them."""

    def memory(self) -> Memory:
        """The estimate, of the program with the largest peak."""
        programs = tuple(self.programs())
        codes = sum(one.code for one in programs)
        most = max(programs, key=lambda one: one.total - one.code)
        held = {**most.beside, **most.arguments, **({"sample_cache": most.results} if most.results else {})}
        parts = {"optimizer": 0, "ema": 0, **held, **most.temporaries, "code": codes}
        size = sum(most.temporaries.values())
        return Memory(
            parts, sum(held.values()), size, codes, f"{most.name}{most.moment and f', {most.moment}'}",
            self.alive.trained, self.alive.scanned, programs,
        )  # fmt: skip

    def programs(self) -> Iterator[ProgramPeak]:
        """The programs. The cache of the samples is there from "samples" to the last "decode"; an update follows."""
        config, mesh = self.config, self.mesh
        rollout = rollout_of(config, 1 if mesh else self.replicas)
        prompts, samples = (
            cache_bytes(config, self.shape, rows, rollout.slots, mesh) for rows in (rollout.prompts, rollout.samples)
        )
        lasting = self.arguments()
        batch = lasting.pop("batch")
        lasting = {name: size for name, size in lasting.items() if size}
        lasting |= {"gradient_buffer": self.gradient_buffer(), "prompt_cache": prompts}
        model, cache = ("base_weights", "adapters"), "sample_cache" if rollout.copies else "prompt_cache"
        trained = ("adapters",) if config.lora.r else ("base_weights",)
        state = ("optimizer", "ema", "gradient_buffer")

        def made(name: str, reads: Sequence[str], temporaries: Mapping[str, float], code: int, **more: Any) -> Any:
            there = lasting | more.pop("also", {})
            arguments = {part: size for part, size in there.items() if part in reads}
            beside = {part: size for part, size in there.items() if part not in reads}
            sizes = {part: math.ceil(size) for part, size in temporaries.items() if size}
            return ProgramPeak(name, arguments, more.pop("results", 0), sizes, code, beside, **more)

        lives, widest = RolloutTemporaries(self.alive, config, self.shape, mesh), rollout.widths[-1]
        cached, code = {cache: samples}, generation_code(self.shape)
        yield made("prefill", (*model, "prompt_cache"), lives.prefill(rollout.prompts, widest), code)
        if rollout.copies:
            yield made("samples", ("prompt_cache",), {"cache_copy": prompts}, 0, results=samples)
        yield made("decode", (*model, cache), lives.decode(rollout.samples, samples), code, also=cached)
        moment, beyond = self.alive.reported(update=False)
        passes = update_plan(config, self.alive.batches).gradient_accumulation
        reads, sent = (*model, "teacher_weights", "gradient_buffer", "batch"), {"batch": batch * passes}
        parts = {**moment.parts, "heap": beyond}
        yield made("accumulate", reads, parts, self.code(), also=sent, moment=moment.name)
        moment, beyond = self.alive.reported(update=True)
        parts = {**moment.parts, "gradients": 0.0, "heap": max(0.0, beyond - moment.parts["gradients"])}
        if mesh is None and self.replicas > 1:  # before and after the all-reduce, which takes them as they are written
            pairs = zip(self.alive.tensors, self.alive.parts, strict=True)
            parts["all_reduce"] += 2.0 * sum(padded(part, 4) for one, part in pairs if one.trained)
        yield made("apply", (*trained, *state), parts, SMALLEST_CODE, also=sent)

    def gradient_buffer(self) -> int:
        """The buffer of the gradients, fp32, in the parameters' own shapes."""
        pairs = zip(self.alive.tensors, self.alive.parts, strict=True)
        return sum(padded(part, 4, free=True) for one, part in pairs if one.trained)


@dataclass(frozen=True)
class MemoryOption:
    """A change that takes less memory.

    Attributes:
        change: as on the command line, such as "optim.loss_chunk=128".
        harm: its cost.
        anew: whether a run that has begun cannot continue with it.
        peak_bytes: the peak with this change and all before it.
        fits: whether that peak fits.
    """

    change: str
    harm: str
    anew: bool
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """What to change if a run does not fit, and the largest settings that fit.

    Attributes:
        knobs: if nothing fits, changes in the order of least harm, each added to those before; empty if it fits.
        smallest_slice: if nothing fits, the cheapest slice on which the unchanged run fits.
        largest_batch: rows of a replica in a pass that fit, 0 for none.
        longest_sequence: tokens of a row that fit with these rows, a multiple of 128; 0 for none.
        largest_rank: the largest rank that fits, None without adapters.
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
    """The memory of generation on one device.

    Attributes:
        weight_bytes: base weights and adapters.
        cache_bytes_per_token: keys and values of a token of one row, over all layers.
        longest_context: tokens of one row, prompt and reply together, whose cache fits beside the weights; at most the
            model's positions. While a prompt is read, its scores come on top.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    longest_context: int


def inference(config: TrainConfig, shape: Shape, limit: float) -> Inference:
    """Estimates generation in `limit` bytes: weights in the dtype of frozen ones, a cache in the compute dtype."""
    frozen = config if config.lora.r else replace(config, lora=LoraConfig(), data=replace(config.data, max_length=128))
    parts = estimate(
        replace(frozen, optim=replace(frozen.optim, batch_size=1, global_batch_size=None)), shape=shape
    ).parts
    weights = parts["base_weights"] + (parts["adapters"] if config.lora.r else 0)
    element = 4 if config.model.base_dtype == "fp32" else 2
    each = 2 * element * sum(count * kind.cached_heads * kind.head_dim for kind, count in shape.counted)
    return Inference(weights, each, max(0, min(shape.positions, int((limit - weights) // each))))


def reserve(config: TrainConfig) -> float:
    """The share of a device's memory that a pick by formula leaves free."""
    passes = config.optim.gradient_accumulation > 1 or config.optim.global_batch_size is not None
    return PASSES_RESERVE if passes else RESERVE


def advise(config: TrainConfig, shape: Shape, where: TargetSlice, limit: float, fits: bool) -> Advice:
    """Finds the largest settings that fit, and what to change if the run does not.

    Args:
        config: the run, its batch size a number.
        shape: of its model.
        where: its chip and its data-parallel replicas.
        limit: bytes of a device that it may take.
        fits: whether the run fits.
    """

    def peak(changed: TrainConfig) -> int:
        return estimate_on(changed, shape, where).total_bytes

    def within(section: str, name: str, value: Any) -> bool:
        try:
            return peak(_with(config, f"{section}.{name}", value)) <= limit
        except ConfigError:  # rows shorter than a completion
            return True

    most = min(MOST_ROWS, 2**31 // config.data.max_length)
    rank = largest(lambda r: within("lora", "r", r), _RANKS) if config.lora.r else None
    length = largest(lambda blocks: within("data", "max_length", 128 * blocks), shape.positions // 128)
    return Advice(
        knobs=() if fits else tuple(_knobs(config, shape, where.replicas, peak, limit)),
        smallest_slice=None if fits else _smallest_slice(config, shape, where, peak(config)),
        largest_batch=largest(lambda rows: within("optim", "batch_size", rows), most),
        longest_sequence=128 * length,
        largest_rank=rank,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Bisects for the largest number from 1 to `most` that fits; all below it must fit. 0 if 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    section, _, leaf = name.partition(".")
    changes = {leaf: value}
    if leaf == "batch_size":  # it determines the rows of an update
        changes["global_batch_size"] = None
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def _knobs(
    config: TrainConfig, shape: Shape, replicas: int, peak: Callable[[TrainConfig], int], limit: float
) -> Iterator[MemoryOption]:
    """The changes that help, each added to those before, until the run fits."""
    now, before = config, peak(config)
    for name, value, harm in _changes(config, shape):
        rows = now.optim.batch_size
        if name in ("optim.batch_size", "rl.prompts_per_update"):
            rows = rows if name == "optim.batch_size" else now.rl.prompts_per_update
            assert isinstance(rows, int)
            value = largest(lambda n: peak(_with(now, name, n)) <= limit, rows - 1) or 1  # noqa: B023  called at once
            each = whole_prompts(now, replicas) if name == "rl.prompts_per_update" else 1
            value = value // each * each or value
        try:
            changed = _with(now, name, value)
        except ConfigError:  # not on a mesh
            continue
        size = peak(changed)
        if size >= before:
            continue
        anew = is_another(now, changed, replicas)
        now, before = changed, size
        harm = f"{harm}, another training" if anew else f"the same training, {harm}"
        yield MemoryOption(f"{name}={value}", harm, anew, size, size <= limit)
        if size <= limit:
            return


def _changes(config: TrainConfig, shape: Shape) -> Iterator[tuple[str, Any, str]]:
    optim, model, lora = config.optim, config.model, config.lora
    free, slower = "no slower", "slower"
    if model.attention != "auto":
        yield "model.attention", "auto", free
    if optim.loss_chunk > 256:
        yield "optim.loss_chunk", 256, free
    if optim.remat != "full":
        yield "optim.remat", "full", "a third more FLOPs"
    if optim.mlp_tile is None or optim.mlp_tile > 512:
        yield "optim.mlp_tile", 512, slower
    if optim.loss_chunk > 64:
        yield "optim.loss_chunk", 64, slower
    learns = config.on_policy
    yield "optim.batch_size", 1, "more passes" if learns else "fewer rows an update"
    if learns and config.rl.steps_per_generation > 1:
        yield "rl.steps_per_generation", 1, "fewer prompts a rollout"
    if learns:
        yield "rl.prompts_per_update", 1, "fewer prompts an update"
    if model.base_dtype == "fp32":
        yield "model.base_dtype", "bf16", "base weights and products in bf16"
    if optim.optimizer == "adamw":
        yield "optim.optimizer", "adafactor", "hardly any moments"
    if optim.ema_decay:
        yield "optim.ema_decay", 0.0, "no average of the weights"
    if not lora.r:
        yield "lora.r", 16, "adapters in place of all weights"
    if lora.r > 8:
        yield "lora.r", 8, "smaller adapters"
    for length in (2048, 1024):
        if length < config.data.max_length:
            yield "data.max_length", length, "shorter rows"
    if lora.r and model.base_dtype in ("bf16", "fp32"):  # without adapters all weights are trained
        yield "model.base_dtype", "int8", "base weights in int8, products in bf16"
    if lora.r and model.base_dtype != "int4" and all(one.inputs // 2 % model.quant_group == 0 for one in shape.linears):
        yield "model.base_dtype", "int4", "base weights in int4, products in bf16"
    for length in (512, 256):
        if length < config.data.max_length:
            yield "data.max_length", length, "shorter rows"


def _smallest_slice(config: TrainConfig, shape: Shape, where: TargetSlice, peak: int) -> str | None:
    """The cheapest slice on which the run fits: with `peak` bytes a device, or sharded over all of its devices."""
    found, free = [], reserve(config)
    passes = batch_arithmetic(config, where.replicas).gradient_accumulation
    each = replace(config, optim=replace(config.optim, global_batch_size=None, gradient_accumulation=passes))
    for chip in CHIPS.values():
        if chip.accelerator_prefix is None or chip.usable_hbm_bytes is None:
            continue
        limit = chip.usable_hbm_bytes * (1 - free)
        for count in chip.slice_sizes:
            devices = count * chip.devices_per_chip
            alone = where.mesh is None and peak <= limit
            if not alone:
                mesh = Mesh(fsdp=devices)
                if devices == 1 or not can_shard(config):
                    continue
                if estimate(each, shape=shape, chip=chip, mesh=mesh).total_bytes > limit:
                    continue
            price = chip.price.on_demand * count if chip.price else float("inf")
            name = chip.slice_name(count) + ("" if alone else f" with mesh=fsdp={devices}")
            found.append((price, count, name))
            break
    return min(found)[2] if found else None


def can_shard(config: TrainConfig) -> bool:
    """Whether the run can be sharded over a mesh: its layers run as a loop, and its settings allow it."""
    try:
        replace(config, launch=replace(config.launch, mesh="fsdp=-1", num_replicas=None))
    except ConfigError:
        return False
    return True
