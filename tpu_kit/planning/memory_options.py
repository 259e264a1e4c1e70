"""What to change when nothing fits, in the order of least harm; and how far one can go when it does. By formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpu_kit.config.loader import ANEW, LoraConfig, TrainConfig, is_another
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.hardware.chips import CHIPS, GIB
from tpu_kit.hardware.slices import TargetSlice
from tpu_kit.models.architecture import Shape
from tpu_kit.planning.memory_estimate import estimate

RESERVE = 0.08
"""Share of a device's usable memory that a pick by formula leaves: more than the formula was too low by on any step
that was compiled (tests/recorded_memory.json)."""
PASSES_RESERVE = 0.10
"""The same with gradient accumulation, of which two were: 2 % too low at most."""
_RANKS = 4096


@dataclass(frozen=True)
class MemoryOption:
    """A change, such as "optim.loss_chunk=128", what it costs, and the peak with it and all those before it.

    Attributes:
        change: as it is given on the command line.
        harm: what it costs.
        anew: whether a run that has begun cannot go on with it.
        peak_bytes: see above.
        fits: whether it does then.
    """

    change: str
    harm: str
    anew: bool
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Advice:
    """What to change, and how far one can go.

    Attributes:
        knobs: where nothing fits, changes in the order of least harm, each on top of those before; none where it fits.
        smallest_slice: where nothing fits, the cheapest slice that the run as it is would fit on.
        largest_batch: rows of a replica in a pass that fit, 0 for none.
        longest_sequence: tokens of a row that fit with the rows as they are, a multiple of 128; 0 for none.
        largest_rank: the largest rank that fits, None without adapters.
    """

    knobs: tuple[MemoryOption, ...]
    smallest_slice: str | None
    largest_batch: int
    longest_sequence: int
    largest_rank: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{knob.change} ({knob.harm}): {knob.peak_bytes / GIB:.2f} GiB{', fits' if knob.fits else ''}"
            for knob in self.knobs
        ]
        if any(knob.anew for knob in self.knobs):
            lines.append(f"another training cannot go on from a checkpoint of this run: give it {ANEW}")
        return "; ".join([*lines, f"as it is it fits {self.smallest_slice or 'no slice that is known'}"])


@dataclass(frozen=True)
class Inference:
    """How far the model gets on one device when it answers.

    Attributes:
        weight_bytes: base weights, and adapters beside them.
        cache_bytes_per_token: keys and values of a token of one row, over all layers.
        longest_context: tokens of one row, prompt and reply together, whose cache has room beside the weights; at most
            the model's positions. A prompt so long needs its scores besides, while it is read.
    """

    weight_bytes: int
    cache_bytes_per_token: int
    longest_context: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def inference(config: TrainConfig, shape: Shape, limit: float) -> Inference:
    """What generation takes of `limit` bytes: weights in the type of frozen ones, and a cache in that of products."""
    frozen = config if config.lora.r else replace(config, lora=LoraConfig(), data=replace(config.data, max_length=128))
    parts = estimate(
        replace(frozen, optim=replace(frozen.optim, batch_size=1, global_batch_size=None)), shape=shape
    ).parts
    weights = parts["base_weights"] + (parts["adapters"] if config.lora.r else 0)
    element = 4 if config.model.base_dtype == "fp32" else 2
    each = 2 * shape.layers * shape.kv_heads * shape.head_dim * element
    return Inference(weights, each, max(0, min(shape.positions, int((limit - weights) // each))))


def reserve(config: TrainConfig) -> float:
    """The share of a device's memory that a pick by formula leaves."""
    passes = config.optim.gradient_accumulation > 1 or config.optim.global_batch_size is not None
    return PASSES_RESERVE if passes else RESERVE


def advise(config: TrainConfig, shape: Shape, where: TargetSlice, limit: float, fits: bool) -> Advice:
    """The advice for a run whose settings were picked.

    Args:
        config: the run, its batch size a number.
        shape: of its model.
        where: its chip and its data-parallel replicas.
        limit: bytes of a device that it may take.
        fits: whether it does.
    """

    def peak(changed: TrainConfig) -> int:
        return estimate(changed, num_replicas=where.replicas, shape=shape, chip=where.chip).total_bytes

    def within(section: str, name: str, value: Any) -> bool:
        return peak(_with(config, f"{section}.{name}", value)) <= limit

    most = min(MOST_ROWS, 2**31 // config.data.max_length)
    rank = largest(lambda r: within("lora", "r", r), _RANKS) if config.lora.r else None
    length = largest(lambda blocks: within("data", "max_length", 128 * blocks), shape.positions // 128)
    return Advice(
        knobs=() if fits else tuple(_knobs(config, shape, where.replicas, peak, limit)),
        smallest_slice=None if fits else _smallest_slice(peak(config), reserve(config)),
        largest_batch=largest(lambda rows: within("optim", "batch_size", rows), most),
        longest_sequence=128 * length,
        largest_rank=rank,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` that fits, where all below it do; 0 if 1 does not."""
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
    if leaf == "batch_size":  # the rows of an update follow
        changes["global_batch_size"] = None
    return replace(config, **{section: replace(getattr(config, section), **changes)})


def _knobs(
    config: TrainConfig, shape: Shape, replicas: int, peak: Callable[[TrainConfig], int], limit: float
) -> Iterator[MemoryOption]:
    """The changes that help, one on top of the other, until it fits."""
    now, before = config, peak(config)
    for name, value, harm in _changes(config, shape):
        rows = now.optim.batch_size
        if name == "optim.batch_size":
            assert isinstance(rows, int)
            value = largest(lambda n: peak(_with(now, name, n)) <= limit, rows - 1) or 1  # noqa: B023  it is called at once
        changed = _with(now, name, value)
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
    if optim.remat == "none":
        yield "optim.remat", "outputs", "hardly slower"
    if optim.remat != "full":
        yield "optim.remat", "full", "a third more FLOPs"
    if optim.mlp_tile is None or optim.mlp_tile > 512:
        yield "optim.mlp_tile", 512, slower
    if optim.loss_chunk > 64:
        yield "optim.loss_chunk", 64, slower
    yield "optim.batch_size", 1, "fewer rows an update"
    if model.base_dtype == "fp32":
        yield "model.base_dtype", "bf16", "base weights and products in bf16"
    if optim.optimizer == "adamw":
        yield "optim.optimizer", "adamw8bit", "moments in 8 bits"
    if optim.ema_decay:
        yield "optim.ema_decay", 0.0, "no average of the weights"
    if not lora.r:
        yield "lora.r", 16, "adapters in place of all weights"
    if lora.r > 8:
        yield "lora.r", 8, "smaller adapters"
    for length in (2048, 1024):
        if length < config.data.max_length:
            yield "data.max_length", length, "shorter rows"
    if lora.r and model.base_dtype in ("bf16", "fp32"):  # of what is trained, no weights are frozen
        yield "model.base_dtype", "int8", "base weights in int8, products in bf16"
    if lora.r and model.base_dtype != "int4" and all(one.inputs // 2 % model.quant_group == 0 for one in shape.linears):
        yield "model.base_dtype", "int4", "base weights in int4, products in bf16"
    for length in (512, 256):
        if length < config.data.max_length:
            yield "data.max_length", length, "shorter rows"


def _smallest_slice(peak: int, free: float) -> str | None:
    """The cheapest slice whose devices have room for `peak` and the reserve."""
    found = []
    for chip in CHIPS.values():
        if chip.accelerator_prefix is None or chip.usable_hbm_bytes is None:
            continue
        if peak > chip.usable_hbm_bytes * (1 - free):
            continue
        count = chip.slice_sizes[0]
        price = chip.price.on_demand * count if chip.price else float("inf")
        found.append((price, chip.slice_name(count)))
    return min(found)[1] if found else None
