"""Advises what to change if a run does not fit, and finds the largest settings that fit, by the memory formula."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import ANEW, LoraConfig, TrainConfig, batch_arithmetic, is_another
from tpu_kit.config.mesh import Mesh
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.hardware.chips import CHIPS, GIB
from tpu_kit.hardware.slices import RESERVE, TargetSlice
from tpu_kit.models.architecture import Shape, undivided
from tpu_kit.planning.argument_memory import VECTOR
from tpu_kit.planning.memory_estimate import estimate, estimate_on
from tpu_kit.planning.rollouts import cache_bytes, whole_prompts

_RANKS = 4096


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


def inference(config: TrainConfig, shape: Shape, where: TargetSlice) -> Inference:
    """Estimates generation on a slice: weights in the dtype of frozen ones, a cache in the compute dtype."""
    frozen = config if config.lora.r else replace(config, lora=LoraConfig(), data=replace(config.data, max_length=128))
    parts = estimate_on(with_rows(frozen, 1), shape, where).parts
    weights = parts["base_weights"] + (parts["adapters"] if config.lora.r else 0)
    each = cache_bytes(config, shape, where.mesh.data if where.mesh else 1, VECTOR, where.mesh) // VECTOR
    return Inference(weights, each, max(0, min(shape.positions, int((where.budget - weights) // each))))


def advise(config: TrainConfig, shape: Shape, where: TargetSlice, limit: float, fits: bool) -> Advice:
    """Finds the largest settings within `limit` bytes of a device, and what to change if the run does not fit."""

    def peak(changed: TrainConfig) -> int:
        return estimate_on(changed, shape, where).total_bytes

    def within(section: str, name: str, value: Any) -> bool:
        try:
            return peak(_with(config, f"{section}.{name}", value)) <= limit
        except ConfigError:  # rows shorter than a completion
            return True

    most = min(MOST_ROWS, 2**31 // config.data.max_length)
    rank = largest(lambda r: within("lora", "r", r), _RANKS) if config.lora.r and not config.lora.adapter else None
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
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def with_rows(config: TrainConfig, rows: int, **changes: Any) -> TrainConfig:
    """The run with so many rows in a pass, which determine those of an update if no changes of `optim` say them."""
    values = {"global_batch_size": None, **changes, "batch_size": rows}
    return replace(config, optim=replace(config.optim, **values))


def _with(config: TrainConfig, name: str, value: Any) -> TrainConfig:
    section, _, leaf = name.partition(".")
    if leaf == "batch_size":
        return with_rows(config, value)
    return replace(config, **{section: replace(getattr(config, section), **{leaf: value})})


def _knobs(
    config: TrainConfig, shape: Shape, replicas: int, peak: Callable[[TrainConfig], int], limit: float
) -> Iterator[MemoryOption]:
    """The changes that help, each added to those before, until the run fits; without those that it fits without."""
    found = list[tuple[str, Any, str]]()

    def with_all(changes: Iterable[tuple[str, Any, str]]) -> TrainConfig:
        return reduce(lambda now, one: _with(now, *one[:2]), changes, config)

    for name, value, harm in _changes(config, shape):
        now = with_all(found)
        if peak(now) <= limit:
            break
        if name in ("optim.batch_size", "rl.prompts_per_update"):
            rows = now[name]
            assert isinstance(rows, int)
            value = largest(lambda n: peak(_with(now, name, n)) <= limit, rows - 1) or 1  # noqa: B023  called at once
            each = whole_prompts(now, replicas) if name == "rl.prompts_per_update" else 1
            value = value // each * each or value
        with contextlib.suppress(ConfigError):  # not on a mesh
            if peak(_with(now, name, value)) < peak(now):
                found.append((name, value, harm))
    for one in found[-2::-1] if peak(with_all(found)) <= limit else ():  # the last is needed
        others = [each for each in found if each is not one]
        if peak(with_all(others)) <= limit:
            found = others
    now = config
    for name, value, harm in found:
        changed = _with(now, name, value)
        size, anew, now = peak(changed), is_another(now, changed, replicas), changed
        harm = f"{harm}, another training" if anew else f"the same training, {harm}"
        yield MemoryOption(f"{name}={value}", harm, anew, size, size <= limit)


def _changes(config: TrainConfig, shape: Shape) -> Iterator[tuple[str, Any, str]]:
    """Names, values and harms of the changes that may help, in the order of least harm."""
    optim, model, lora, learns = config.optim, config.model, config.lora, config.on_policy
    uneven = undivided(shape.widths, model.quant_group)
    lengths = [(length < config.data.max_length, "data.max_length", length, "shorter rows")
               for length in (2048, 1024, 512, 256)]  # fmt: skip
    changes: list[tuple[Any, str, Any, str]] = [
        (model.attention != "auto", "model.attention", "auto", "no slower"),
        (optim.loss_chunk > 256, "optim.loss_chunk", 256, "no slower"),
        (optim.remat != "full", "optim.remat", "full", "a third more FLOPs"),
        (optim.mlp_tile is None or optim.mlp_tile > 512, "optim.mlp_tile", 512, "slower"),
        (optim.loss_chunk > 64, "optim.loss_chunk", 64, "slower"),
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


def _smallest_slice(config: TrainConfig, shape: Shape, where: TargetSlice, peak: int) -> str | None:
    """The cheapest slice on which the run fits: with `peak` bytes a device, or sharded over all of its devices."""
    found = []
    passes = batch_arithmetic(config, where.replicas).gradient_accumulation
    each = replace(config, optim=replace(config.optim, global_batch_size=None, gradient_accumulation=passes))
    for chip in CHIPS.values():
        if chip.accelerator_prefix is None or chip.usable_hbm_bytes is None:
            continue
        limit = chip.usable_hbm_bytes * (1 - RESERVE)
        alone = where.mesh is None and peak <= limit
        for count in chip.slice_sizes:
            devices = count * chip.devices_per_chip
            if not alone:
                if devices == 1 or not can_shard(config):
                    continue
                if estimate(each, shape=shape, chip=chip, mesh=Mesh(fsdp=devices)).total_bytes > limit:
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
