"""Which settings fit a chip, which of them is fastest, how long the run takes and what it costs.

    from tpu_kit.planner import plan
    for found in plan(config, ["v5e", "v6e"]):
        print(found)

Memory is by `memory.estimate`, time by `roofline`, both by formula; with `exact` the pick is compiled by the real TPU
compiler (`exact`). A batch size or remat that was set is kept; what was left open is chosen: of the settings that
leave a reserve, the one with most tokens a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tpu_kit.advice import RESERVE, Advice, Inference, advise, inference, largest, reserve
from tpu_kit.chips import NO_KERNELS
from tpu_kit.compiled import Compiled
from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.epochs import Rows, count_rows, count_updates
from tpu_kit.memory import estimate
from tpu_kit.parameters import MOST_ROWS
from tpu_kit.roofline import StepTime, step_time, work
from tpu_kit.shapes import Shape, UnknownFamilyError, read_shape
from tpu_kit.slices import Where, find_slice
from tpu_kit.timeplan import TimePlan, time_plan

TIE = 0.02
"""Settings whose speeds differ by less are as fast: of them one of few passes is picked, which compiles sooner."""
LEAST_UPDATES = 20
"""Updates that an epoch has at least where `batch_size=auto` may choose the rows of one: with fewer, a small data set
would hardly be learned from."""
MOST_TOKENS = 2**31
"""Tokens of a pass at which indices overflow."""


@dataclass(frozen=True)
class Setting:
    """One way to run: its configuration, and what the formula says of it."""

    config: TrainConfig
    replicas: int
    peak: int
    time: StepTime


@dataclass(frozen=True)
class Plan:
    """What a run is on a slice.

    Attributes:
        where: the slice.
        config: the run with the settings picked.
        settings: all settings that were looked at, fastest first.
        fits: whether the pick leaves the reserve.
        peak_bytes: the pick's peak on one device.
        parts: of it, bytes by name.
        source: who says so, "formula" or "compiler".
        time: of a step; None of a model that the formula does not know, where it does not fit.
        run: of the run; None there, too.
        checkpoint_bytes: size of a checkpoint.
        advice: where nothing fits, what to change; and the reverse: the largest batch, sequence and rank that fit.
        inference: how long a context the model can have there.
        updates: of the run; None where they are not known, for `unknown`.
        unknown: why they are not; empty where they are.
        compiled: what the compiler says, if it was asked.
        note: what the user did not ask for: another attention, or the formula in the compiler's place.
    """

    where: Where
    config: TrainConfig
    settings: tuple[Setting, ...]
    fits: bool
    peak_bytes: int
    parts: dict[str, int]
    source: str
    time: StepTime | None
    run: TimePlan | None
    checkpoint_bytes: int | None
    advice: Advice | None
    inference: Inference | None = None
    updates: int | None = None
    unknown: str = ""
    compiled: Compiled | None = None
    note: str = ""

    @property
    def free(self) -> float:
        """The share of the device's memory that the pick had to leave."""
        from tpu_kit.exact import EXACT_RESERVE

        return EXACT_RESERVE if self.source == "compiler" else max(self.where.free, reserve(self.config))

    def to_dict(self) -> dict[str, Any]:
        """The object of `plan --json`."""
        batch = batch_arithmetic(self.config, self.where.replicas)
        seconds = self.time.seconds if self.time else None
        run = self.run
        found: dict[str, Any] = {
            "chip": self.where.chip.name, "chips": self.where.chips, "replicas": self.where.replicas,
            "slice": self.where.name, "global_batch_size": batch.global_batch_size, "fits": self.fits,
            "peak_bytes": self.peak_bytes, "limit_bytes": self.where.limit, "parts": self.parts, "source": self.source,
            "batch_size": batch.batch_size, "gradient_accumulation": batch.gradient_accumulation,
            "remat": self.config.optim.remat, "step_seconds": seconds,
            "tokens_per_second": batch.tokens_per_update / seconds if seconds else None,
            "run_hours": run.run_hours if run else None,
            "cost": {"on_demand": run.on_demand if run else None, "spot": run.spot if run else None},
            "updates": self.updates, "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_interval_seconds": run.save_interval_seconds if run else None,
            "sessions": run.sessions if run else {}, "advice": self.advice.to_dict() if self.advice else None,
            "inference": self.inference.to_dict() if self.inference else None,
        }  # fmt: skip
        if self.compiled is not None:
            values = self.compiled.to_dict()
            found |= {name: values[name] for name in _COMPILED}
        return found


_COMPILED = (
    "argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops", "bytes_accessed",
    "compile_seconds", "collectives", "largest_buffers", "program",
)  # fmt: skip


def plan(config: TrainConfig, chips: Sequence[str] = ("v5e",), exact: bool = False) -> list[Plan]:
    """A plan for each chip.

    Args:
        config: the run, with `launch.num_replicas`, and the rows of an update in `optim.global_batch_size`.
        chips: names as `slices.find_slice` takes them.
        exact: whether to ask the TPU compiler, which takes some minutes for each chip.

    Raises:
        ValueError: of `slices.find_slice`, `shapes.read_shape` or `memory.estimate`; the global batch cannot be split.
    """
    from tpu_kit.exact import by_compiler_alone, verified, with_largest_batch

    places = [find_slice(name, config.launch.num_replicas) for name in chips]
    try:
        shape: Shape | None = read_shape(config.model)
    except UnknownFamilyError:
        if not exact:
            raise
        shape = None
    rows = Rows(None) if config.optim.max_steps else count_rows(config)
    if shape is None:
        return [by_compiler_alone(config, where, rows) for where in places]
    found = [by_formula(config, shape, where, rows) for where in places]
    return [with_largest_batch(verified(one, shape, rows)) for one in found] if exact else found


def choose_batch(config: TrainConfig, chip: str, replicas: int, exact: bool = False, rows: Rows | None = None) -> int:
    """The rows per replica in a pass that `optim.batch_size=auto` stands for: of those that fit, the fastest.

    Args:
        config: the run.
        chip: a name as `slices.find_slice` takes it.
        replicas: of the model.
        exact: whether the TPU compiler is to verify what the formula picks.
        rows: of the data, where they were counted; see `LEAST_UPDATES`.

    Raises:
        ValueError: as `plan`; or not one row fits, with what to change.
    """
    found = best_batch(config, find_slice(chip, replicas), exact, rows)
    assert isinstance(found.config.optim.batch_size, int)
    return found.config.optim.batch_size


def best_batch(config: TrainConfig, where: Where, exact: bool = False, rows: Rows | None = None) -> Plan:
    """The same for a place that is known already, as a plan; all but the batch is left as it is."""
    optim = replace(config.optim, batch_size="auto")
    config = replace(config, optim=optim, sources=dict(config.sources) | {"optim.remat": "code"})
    shape = read_shape(config.model)
    best = by_formula(config, shape, where, rows or Rows(None))
    if exact:
        from tpu_kit.exact import verified

        best = verified(best, shape, rows or Rows(None))
    if not best.fits:
        raise ValueError(f"not one row fits {where.name}: {best.advice}")
    return best


# ------------------------------------------------------------------------------------------------------ by the formula


def _batches(
    config: TrainConfig, replicas: int, rows: Rows, most: Callable[[], int]
) -> Iterator[tuple[int, int | None]]:
    """(rows per replica in a pass, rows per update) to look at; `most` says how many rows fit."""
    optim = config.optim
    whole = optim.global_batch_size
    if isinstance(optim.batch_size, int) and "optim.batch_size" in config.sources:
        yield optim.batch_size, whole
        return
    if whole is None and isinstance(optim.batch_size, int):
        whole = optim.batch_size * replicas * optim.gradient_accumulation
    if whole is None:  # auto, and nothing said of the update: what fits
        limit = most()
        if rows.count is not None:
            limit = min(limit, rows.count // (LEAST_UPDATES * replicas * optim.gradient_accumulation))
        limit = max(1, limit)
        yield from ((1 << i, None) for i in range(limit.bit_length()))
        return
    if whole % replicas:
        raise ValueError(
            f"optim.global_batch_size={whole} cannot be split over {replicas} replicas; use "
            f"{whole // replicas * replicas or replicas} or {(whole // replicas + 1) * replicas}"
        )
    each = whole // replicas
    yield from ((n, whole) for n in range(1, min(each, max(1, most())) + 1) if each % n == 0)


def _settings(config: TrainConfig, shape: Shape, where: Where, known: Rows) -> list[Setting]:
    found = []
    remats: tuple[Literal["full", "outputs", "none"], ...] = ("full", "outputs", "none")
    if config.optim.scan_layers == "off" or not shape.known.scans:
        remats = ("full", "none")  # on a TPU a loop alone keeps outputs
    if "optim.remat" in config.sources:
        remats = (config.optim.remat,)
    for remat in remats:
        scan = "auto" if remat == "none" and config.optim.scan_layers == "on" else config.optim.scan_layers
        base = replace(config, optim=replace(config.optim, remat=remat, scan_layers=scan))
        most = partial(_most, base, shape, where)
        for rows, whole in _batches(base, where.replicas, known, most):
            if rows * config.data.max_length >= MOST_TOKENS:
                raise ValueError(
                    f"optim.batch_size={rows} x data.max_length={config.data.max_length}: a pass of 2**31 tokens or "
                    "more is beyond any chip; give the rows of one replica in one pass, such as 8"
                )
            passes = config.optim.gradient_accumulation if whole is None else 1
            optim = replace(base.optim, batch_size=rows, global_batch_size=whole, gradient_accumulation=passes)
            one = replace(base, optim=optim)
            peak = estimate(one, num_replicas=where.replicas, shape=shape, chip=where.chip).total_bytes
            found.append(Setting(one, where.replicas, peak, _time(one, shape, where)))
    return found


def _most(config: TrainConfig, shape: Shape, where: Where) -> int:
    """The most rows whose peak leaves the reserve, 0 if not one."""
    limit = where.limit * (1 - max(where.free, reserve(config)))

    def fits(rows: int) -> bool:
        optim = replace(config.optim, batch_size=rows, global_batch_size=None)
        one = replace(config, optim=optim)
        return estimate(one, num_replicas=where.replicas, shape=shape, chip=where.chip).total_bytes <= limit

    return largest(fits, min(MOST_ROWS, MOST_TOKENS // config.data.max_length))


def _time(config: TrainConfig, shape: Shape, where: Where) -> StepTime:
    done = work(config, shape, batch_arithmetic(config, where.replicas))
    return step_time(done, where.chip, where.replicas)


def _speed(setting: Setting) -> float:
    """Rows a second; the passes are in the time."""
    return batch_arithmetic(setting.config, setting.replicas).global_batch_size / setting.time.seconds


def _ease(setting: Setting) -> tuple[int, int]:
    return batch_arithmetic(setting.config, setting.replicas).gradient_accumulation, setting.peak


def by_formula(config: TrainConfig, shape: Shape, where: Where, rows: Rows) -> Plan:
    """The plan for one place, of a model whose shape was read and data whose rows were counted or not."""
    note = ""
    if where.chip.name in NO_KERNELS and config.model.attention != "sdpa":
        note = f"planned with model.attention=sdpa: the attention kernels do not compile for {where.chip.name}"
        config = replace(config, model=replace(config.model, attention="sdpa"))
    settings = sorted(_settings(config, shape, where, rows), key=lambda one: (-_speed(one), one.peak))
    limit = where.limit * (1 - max(where.free, reserve(config)))
    fitting = [one for one in settings if one.peak <= limit]
    near = [one for one in fitting if _speed(one) > (1 - TIE) * _speed(fitting[0])]
    picked = min(near, key=_ease) if near else min(settings, key=lambda one: one.peak)
    memory = estimate(picked.config, num_replicas=where.replicas, shape=shape, chip=where.chip)
    held = memory.parts["optimizer"] + memory.parts["ema"] + 4 * memory.trained
    updates, unknown = count_updates(picked.config, where.replicas, rows)
    return Plan(
        where=where, config=picked.config, settings=tuple(settings), fits=bool(fitting), peak_bytes=memory.total_bytes,
        parts=dict(memory.parts), source="formula", time=picked.time, checkpoint_bytes=held,
        run=time_plan(where.chip, where.chips, where.name, picked.time.seconds, updates, held),
        advice=advise(picked.config, shape, where, limit, bool(fitting)), note=note,
        inference=inference(config, shape, where.limit * (1 - RESERVE)), updates=updates, unknown=unknown,
    )  # fmt: skip
