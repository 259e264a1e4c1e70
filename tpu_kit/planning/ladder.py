"""Lists the changes that save memory, the least harmful first.

`plan` goes down the list until a run fits, and prints the changes (`advise`). After an out-of-memory error, `train`
takes the fastest run of the list's first part, which leaves the training unchanged (`same_training`). `auto` chooses
among the list's values for `optim.remat` and for the rows of a pass (`REMATS`, `row_splits`).
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.config.mesh import Mesh
from tpu_kit.config.resuming import ANEW, changes
from tpu_kit.config.schema import LEAST_UPDATES, MOST_ROWS
from tpu_kit.machine.chips import CHIPS, GIB
from tpu_kit.machine.slices import RESERVE, TargetSlice
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.model.shape import Shape, undivided
from tpu_kit.planning.memory.activation_memory import objective_beside
from tpu_kit.planning.memory.memory_estimate import estimate
from tpu_kit.planning.run_cost import Count
from tpu_kit.planning.run_on_slice import Setting, can_block, can_shard, largest, with_rows, with_value
from tpu_kit.training.losses.rollout_programs import smaller

MOST_TOKENS = 2**31
"""Number of tokens in a pass at which indices overflow."""
Remat = Literal["auto", "none", "outputs", "full", "blocks"]
REMATS: tuple[Remat, ...] = ("none", "outputs", "full", "blocks")
"""The values of `optim.remat`, fastest first."""
_RANKS = 4096


class Rung(NamedTuple):
    """A parameter by dotted name, its values that take less memory (least harmful first), and their `harm` as text.

    `values` may be empty. With `more_passes`, fewer rows in a pass make more passes; otherwise an update gets fewer.
    """

    name: str
    values: Sequence[Any]
    harm: str
    more_passes: bool = False

    def changed(self, config: TrainConfig, value: Any, replicas: int) -> TrainConfig:
        """Returns a copy of the run with this value of the parameter; raises ConfigError if the run does not allow it.

        For optim.batch_size, an update keeps its rows on `replicas` replicas if `more_passes` is set. Otherwise, and in
        a run that samples, optim.global_batch_size becomes None.
        """
        if self.name != "optim.batch_size":
            return with_value(config, self.name, value)
        if self.more_passes and not config.free_passes:
            whole = batch_arithmetic(config, replicas).global_batch_size
            return with_rows(config, value, global_batch_size=whole, gradient_accumulation=1)
        return with_rows(config, value)


def of_same_training(config: TrainConfig, replicas: int, blocks: bool = False) -> Iterator[Rung]:
    """Yields the first part of the ladder, with which a run can resume; some rungs may have no values.

    `replicas` are the run's replicas, or the batch's shards on a mesh. If `blocks` is true (`can_block`), the last rung
    has remat=blocks, else no value.
    """
    optim = config.optim
    rows = batch_arithmetic(config, replicas).batch_size
    # Growth of the batch rounds the number of passes down, so other passes could change the updates.
    fewer = [] if optim.batch_growth_steps else row_splits(config, replicas, rows - 1)
    remats = REMATS[REMATS.index(optim.remat) + 1 : -1] if optim.remat in REMATS else ()
    yield Rung("model.attention", ["auto"] if config.model.attention != "auto" else [], "no slower")
    yield Rung("optim.batch_size", fewer, "more passes", more_passes=True)
    yield Rung("optim.loss_chunk", [256] if optim.loss_chunk > 256 else [], "no slower")
    yield Rung("optim.remat", remats, "up to a third more FLOPs")
    yield Rung("optim.mlp_tile", [512] if optim.mlp_tile is None or optim.mlp_tile > 512 else [], "slower")
    yield Rung("optim.loss_chunk", [64] if optim.loss_chunk > 64 else [], "slower")
    yield Rung("optim.remat", ["blocks"] if blocks and optim.remat != "blocks" else [], "a fifth more FLOPs")


def of_another_training(config: TrainConfig, shape: Shape, replicas: int) -> Iterator[Rung]:
    """Yields the second part of the ladder, whose changes need a new run; some rungs may have no values.

    `replicas` are the run's replicas, or the batch's shards on a mesh; `shape` tells whether int4 is possible.
    """
    optim, model, lora = config.optim, config.model, config.lora
    if config.free_passes:
        yield from (Rung(*one) for one in smaller(config, replicas))
    else:
        rows = batch_arithmetic(config, replicas).batch_size
        yield Rung("optim.batch_size", range(max(1, rows - 1), 0, -1), "fewer rows an update")
    yield Rung("model.base_dtype", ["bf16"] if model.base_dtype == "fp32" else [], "base weights and products in bf16")
    yield Rung("optim.optimizer", ["adafactor"] if optim.optimizer == "adamw" else [], "almost no memory for moments")
    yield Rung("optim.ema_decay", [0.0] if optim.ema_decay else [], "no average of the weights")
    yield Rung("lora.r", [] if lora.r else [16], "adapters in place of all weights")
    yield Rung("lora.r", [8] if lora.r > 8 and not lora.adapter else [], "smaller adapters")
    lengths = [length for length in (2048, 1024, 512, 256) if length < config.data.max_length]
    yield Rung("data.max_length", [length for length in lengths if length >= 1024], "shorter rows")
    if lora.r:  # full fine-tuning does not quantize
        whole_dtype, packs = model.base_dtype in ("bf16", "fp32"), not undivided(shape.widths, model.quant_group)
        yield Rung("model.base_dtype", ["int8"] if whole_dtype else [], "base weights in int8, products in bf16")
        int4 = ["int4"] if model.base_dtype != "int4" and packs else []
        yield Rung("model.base_dtype", int4, "base weights in int4, products in bf16")
    yield Rung("data.max_length", [length for length in lengths if length < 1024], "shorter rows")


def row_splits(config: TrainConfig, replicas: int, most: int) -> list[int]:
    """Returns numbers of rows of a replica in a pass, at most `most`, that keep the rows of an update; largest first.

    A run that samples allows any number of passes, so it has all numbers.
    """
    if config.free_passes:
        return list(range(most, 0, -1))
    each = batch_arithmetic(config, replicas).global_batch_size // replicas
    return [rows for rows in range(min(each, most), 0, -1) if each % rows == 0]


def remats(config: TrainConfig, where: TargetSlice, shape: Shape) -> Sequence[Remat]:
    """Returns the candidates for `optim.remat`, fastest first; "blocks" is only used if no other value fits.

    A given value is the only candidate. For "auto" on other devices than TPUs, it is "full". On a mesh, they are "full"
    and, if `can_block`, "blocks". On replicas they are "none", "outputs", "full" and, if `can_block`, "blocks"; "none"
    only for adapters on decoders with usual layers, on which the formula was compared.
    """
    optim, lora = config.optim, config.lora
    if optim.remat != "auto":
        return [optim.remat]
    if where.device_type != "tpu":
        return ["full"]
    blocks: list[Remat] = ["blocks"] if can_block(config, shape) else []
    if where.mesh is not None:
        return ["full", *blocks]
    usual = not any(kind.experts or kind.state for kind in shape.kinds) and lora.r and not lora.dropout
    objective = objective_beside(config)
    alone = optim.scan_layers == "auto" and inputs_of(config) is None and (not objective or objective.one_by_one)
    none: list[Remat] = ["none"] if usual and alone else []
    return [*none, "outputs", "full", *blocks]


def batches(base: Setting, rows: Count, limit: int) -> Iterator[tuple[int, int | None]]:
    """Yields candidates (rows of a replica in a pass, rows of an update); None: rows x replicas x passes of an update.

    If the rows of an update are open, rows in a pass are powers of two, the smallest first. Otherwise they are the
    divisors of a replica's rows of an update or, in a run that samples, all numbers; the largest first. The
    divisors raise ConfigError if the replicas do not divide optim.global_batch_size. Raises ValueError as `estimate`.

    Args:
        base: the run on the slice. A batch size in `config.sources` is the only candidate, even if it does not fit.
        rows: rows of the data; if known, open rows of an update leave at least `LEAST_UPDATES` updates an epoch, except
            in a run that samples.
        limit: most rows in a pass. Numbers of rows that do not fit by formula are left out, except 1.
    """
    config, optim, replicas = base.config, base.config.optim, base.where.replicas
    whole = optim.global_batch_size
    if isinstance(optim.batch_size, int) and "optim.batch_size" in config.sources:
        yield optim.batch_size, whole
        return
    limit = min(limit, MOST_TOKENS // config.data.max_length)
    limit = largest(lambda number: base.changed("optim.batch_size", number).fits, limit)
    if whole is None and isinstance(optim.batch_size, int) and not config.free_passes:
        whole = optim.batch_size * replicas * optim.gradient_accumulation
    if whole is None:  # auto, and the update may have any number of rows
        if rows.count is not None and not config.free_passes:
            limit = min(limit, rows.count // (LEAST_UPDATES * replicas * optim.gradient_accumulation))
        yield from ((1 << i, None) for i in range(max(1, limit).bit_length()))
        return
    one = with_rows(config, 1, global_batch_size=whole, gradient_accumulation=1)
    yield from ((rows, whole) for rows in row_splits(one, replicas, max(1, limit)))


def same_training(config: TrainConfig, replicas: int, blocks: bool = False) -> Iterator[TrainConfig]:
    """Yields the changed run with every combination of `of_same_training`, the least harmful first, fitting or not.

    `replicas` and `blocks` are as in `of_same_training`. A combination changes any number of the parameters; the
    unchanged run is left out.
    """
    rungs = of_same_training(config, replicas, blocks)
    steps = [[(rung, None), *((rung, value) for value in rung.values)] for rung in rungs]
    for choice in itertools.product(*reversed(steps)):
        changed = config
        for rung, value in reversed(choice):
            if value is not None and (rung.name != "optim.loss_chunk" or value < changed.optim.loss_chunk):
                changed = rung.changed(changed, value, replicas)
        if changed != config:
            yield changed


def differences(before: TrainConfig, now: TrainConfig) -> dict[str, Any]:
    """Returns the new values of the parameters that differ, by dotted name."""
    values, new = before.flat_values(), now.flat_values()
    return {name: new[name] for name in new if values.get(name) != new[name]}


def is_another(before: TrainConfig, now: TrainConfig, replicas: int) -> bool:
    """Returns whether a run cannot resume with the other configuration on the same number of replicas."""
    rows = [batch_arithmetic(config, replicas).global_batch_size for config in (before, now)]
    return rows[0] != rows[1] or bool(changes(before.flat_values(), now.flat_values())[1])


# ------------------------------------------------------------------------------------------------ the ladder of a plan


@dataclass(frozen=True)
class MemoryOption:
    """A change that takes less memory.

    Attributes:
        change: as on the command line, such as "optim.loss_chunk=128"; `harm` describes its cost.
        anew: whether a run that has started cannot resume with it.
        peak_bytes: the peak by formula with this change and all changes before it; `fits`, whether it fits.
    """

    change: str
    harm: str
    anew: bool
    peak_bytes: int
    fits: bool

    def __str__(self) -> str:
        return f"{self.change} ({self.harm}): {self.peak_bytes / GIB:.2f} GiB{', fits' if self.fits else ''}"


@dataclass(frozen=True)
class Advice:
    """Changes for a run that does not fit, and the largest values that fit, varied one at a time; 0 if none does.

    Attributes:
        knobs: changes, the least harmful first, each added to the changes before it; empty if the run fits.
        smallest_slice: name of the cheapest slice on which the unchanged run fits, with the mesh if it needs one; None
            if the run fits here, or nowhere.
        largest_batch: rows of a replica in a pass; by `plan` with the compiler, of a compiled setting.
        longest_sequence: tokens of a row, a multiple of 128.
        largest_rank: LoRA rank; None for full fine-tuning, and with lora.adapter, which gives the rank.
    """

    knobs: tuple[MemoryOption, ...]
    smallest_slice: str | None
    largest_batch: int
    longest_sequence: int
    largest_rank: int | None

    def __str__(self) -> str:
        place = self.smallest_slice or "no known slice"
        return "; ".join([*told(self.knobs), f"the unchanged run fits {place}; all by formula"])


def told(options: Sequence[MemoryOption]) -> list[str]:
    """Returns a text per change, and a last text on how to start a new run if a change needs it."""
    lines = [str(one) for one in options]
    if any(one.anew for one in options):
        lines.append(f"a new training cannot resume from the checkpoints of this run: give it {ANEW}")
    return lines


def advise(one: Setting) -> Advice:
    """Finds by formula the largest values that fit and, if the run does not fit, changes that save memory.

    Every largest value is for the unchanged run `one`, in which only this parameter varies.
    """

    def most(name: str, limit: int, each: int = 1) -> int:
        def within(number: int) -> bool:
            try:
                return one.changed(name, each * number).memory.total_bytes <= one.bound
            except ConfigError:  # rows shorter than a completion
                return True

        return each * largest(within, limit)

    lora = one.config.lora
    return Advice(
        knobs=() if one.fits else tuple(options(one)),
        smallest_slice=None if one.fits else _smallest_slice(one),
        largest_batch=most("optim.batch_size", min(MOST_ROWS, 2**31 // one.config.data.max_length)),
        longest_sequence=most("data.max_length", one.shape.positions // 128, 128),
        largest_rank=most("lora.r", _RANKS) if lora.r and not lora.adapter else None,
    )


def options(one: Setting) -> Iterator[MemoryOption]:
    """Yields the changes with which the run fits, the least harmful first; none if it fits unchanged.

    Every change is added to the changes before it. If all changes are too few, it yields all that save memory.
    """
    replicas, found = one.where.replicas, list[tuple[Rung, Any]]()

    def after(taken: Sequence[tuple[Rung, Any]]) -> Setting:
        config = one.config
        for rung, value in taken:
            config = rung.changed(config, value, replicas)
        return one.of(config)

    def fits(taken: Sequence[tuple[Rung, Any]]) -> bool:
        return after(taken).peak_bytes <= one.bound

    def least_harm(before: Sequence[tuple[Rung, Any]], rung: Rung, later: Sequence[tuple[Rung, Any]] = ()) -> Any:
        """Returns the rung's first value with which the run fits, between these changes, or its last value."""
        number = bisect_left(rung.values, True, key=lambda value: fits([*before, (rung, value), *later]))
        return rung.values[min(number, len(rung.values) - 1)]

    blocks = can_block(one.config, one.shape)
    rungs = [*of_same_training(one.config, replicas, blocks), *of_another_training(one.config, one.shape, replicas)]
    for rung in (rung for rung in rungs if rung.values):
        if fits(found):
            break
        with contextlib.suppress(ConfigError):  # a mesh does not allow it
            added = [*found, (rung, least_harm(found, rung))]
            if after(added).peak_bytes < after(found).peak_bytes:
                found = added
    for number in reversed(range(len(found))) if fits(found) else ():
        before, (rung, _), later = found[:number], found[number], found[number + 1 :]
        kept = [] if fits([*before, *later]) else [(rung, least_harm(before, rung, later))]
        found = [*before, *kept, *later]
    now = one.config
    for number, (rung, value) in enumerate(found, 1):
        last, now = now, after(found[:number]).config
        anew = is_another(last, now, replicas)
        new = {rung.name: value, **differences(last, now)}.items()
        change = " ".join(f"{name}={'null' if value is None else value}" for name, value in new)
        harm = f"{rung.harm}, a new training" if anew else f"the same training, {rung.harm}"
        yield MemoryOption(change, harm, anew, after(found[:number]).peak_bytes, fits(found[:number]))


def _smallest_slice(one: Setting) -> str | None:
    """Returns the name of the cheapest slice on which the run fits, with the mesh if it needs one; None if none."""
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
