"""Which settings fit a chip, which of them is fastest, how long the run takes and what it costs.

    from tpu_kit.planner import plan
    for found in plan(config, ["v5e", "v6e"]):
        print(found)

Memory is by `memory.estimate`, time by `roofline`, both by formula; with `exact` the pick is compiled by the real TPU
compiler (`compiler`). A batch size or remat that was set is kept; what was left open is chosen: of the settings that
leave a reserve, the one with most tokens a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tpu_kit.advice import Advice, advise, largest, reserve
from tpu_kit.compiled import Compiled
from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.memory import estimate
from tpu_kit.roofline import StepTime, Work, step_time, work
from tpu_kit.shapes import Shape, UnknownFamilyError, read_shape
from tpu_kit.slices import Where, find_slice
from tpu_kit.timeplan import TimePlan, time_plan

EXACT_RESERVE = 0.01
"""The same of a pick that the compiler verified: for what a run holds beside the step, such as the next batch."""
TIE = 0.02
"""Settings whose speeds differ by less are as fast: of them one of few passes is picked, which compiles sooner."""
NO_KERNELS = ("v2", "v3")
"""Chips for which the compiler refuses them: "Unsupported matmul RHS type on target"."""
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
        time: of a step.
        run: of the run.
        checkpoint_bytes: size of a checkpoint.
        advice: where nothing fits, what to change; and the reverse: the largest batch, sequence and rank that fit.
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
    time: StepTime
    run: TimePlan
    checkpoint_bytes: int | None
    advice: Advice | None
    compiled: Compiled | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The object of `plan --json`."""
        batch = batch_arithmetic(self.config, self.where.replicas)
        tokens = batch.tokens_per_update / self.time.seconds
        found: dict[str, Any] = {
            "chip": self.where.chip.name, "chips": self.where.chips, "replicas": self.where.replicas,
            "slice": self.where.name, "global_batch_size": batch.global_batch_size, "fits": self.fits,
            "peak_bytes": self.peak_bytes, "limit_bytes": self.where.limit, "parts": self.parts, "source": self.source,
            "batch_size": batch.batch_size, "gradient_accumulation": batch.gradient_accumulation,
            "remat": self.config.optim.remat, "step_seconds": self.time.seconds, "tokens_per_second": tokens,
            "run_hours": self.run.run_hours, "cost": {"on_demand": self.run.on_demand, "spot": self.run.spot},
            "checkpoint_bytes": self.checkpoint_bytes, "checkpoint_interval_seconds": self.run.save_interval_seconds,
            "sessions": self.run.sessions, "advice": self.advice.to_dict() if self.advice else None,
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
        exact: whether to ask the TPU compiler, which takes a minute or some for each chip.

    Raises:
        ValueError: of `slices.find_slice`, `shapes.read_shape` or `memory.estimate`; the global batch cannot be split.
    """
    places = [find_slice(name, config.launch.num_replicas) for name in chips]
    try:
        shape = read_shape(config.model)
    except UnknownFamilyError:
        if not exact:
            raise
        return [_by_compiler_alone(config, where) for where in places]
    found = [_by_formula(config, shape, where) for where in places]
    return [_verified(one, shape) for one in found] if exact else found


def choose_batch(config: TrainConfig, chip: str, replicas: int) -> int:
    """The rows per replica in a pass that `optim.batch_size=auto` stands for, by formula.

    Raises:
        ValueError: as `plan`; or not one row fits, with what to change.
    """
    optim = replace(config.optim, batch_size="auto")
    config = replace(config, optim=optim, sources=dict(config.sources) | {"optim.remat": "code"})
    where = find_slice(chip, replicas)
    best = _by_formula(config, read_shape(config.model), where)
    if not best.fits:
        raise ValueError(f"not one row fits {where.name}: {best.advice}")
    chosen = best.config.optim.batch_size
    assert isinstance(chosen, int)
    return chosen


# ------------------------------------------------------------------------------------------------------ by the formula


def _batches(config: TrainConfig, replicas: int, most: Callable[[], int]) -> Iterator[tuple[int, int | None]]:
    """(rows per replica in a pass, rows per update) to look at; `most` says how many rows fit."""
    optim = config.optim
    whole = optim.global_batch_size
    if isinstance(optim.batch_size, int) and "optim.batch_size" in config.sources:
        yield optim.batch_size, whole
        return
    if whole is None and isinstance(optim.batch_size, int):
        whole = optim.batch_size * replicas * optim.gradient_accumulation
    if whole is None:  # auto, and nothing said of the update: what fits
        limit = max(1, most())
        yield from ((1 << i, None) for i in range(limit.bit_length()))
        return
    if whole % replicas:
        raise ValueError(
            f"optim.global_batch_size={whole} cannot be split over {replicas} replicas; use "
            f"{whole // replicas * replicas or replicas} or {(whole // replicas + 1) * replicas}"
        )
    each = whole // replicas
    yield from ((rows, whole) for rows in range(1, min(each, max(1, most())) + 1) if each % rows == 0)


def _settings(config: TrainConfig, shape: Shape, where: Where) -> list[Setting]:
    found = []
    remats: tuple[Literal["full", "none"], ...] = ("full", "none")
    if "optim.remat" in config.sources:
        remats = (config.optim.remat,)
    for remat in remats:
        scan = "auto" if remat == "none" and config.optim.scan_layers == "on" else config.optim.scan_layers
        base = replace(config, optim=replace(config.optim, remat=remat, scan_layers=scan))
        for rows, whole in _batches(base, where.replicas, lambda base=base: _most(base, shape, where)):  # type: ignore[misc]
            if rows * config.data.max_length >= MOST_TOKENS:
                raise ValueError(
                    f"optim.batch_size={rows} x data.max_length={config.data.max_length}: a pass of 2**31 tokens or "
                    "more is beyond any chip; give the rows of one replica in one pass, such as 8"
                )
            passes = config.optim.gradient_accumulation if whole is None else 1
            optim = replace(base.optim, batch_size=rows, global_batch_size=whole, gradient_accumulation=passes)
            one = replace(base, optim=optim)
            peak = estimate(one, num_replicas=where.replicas, shape=shape).total_bytes
            found.append(Setting(one, where.replicas, peak, _time(one, shape, where)))
    return found


def _most(config: TrainConfig, shape: Shape, where: Where) -> int:
    """The most rows whose peak leaves the reserve, 0 if not one."""
    limit = where.limit * (1 - reserve(config))

    def fits(rows: int) -> bool:
        optim = replace(config.optim, batch_size=rows, global_batch_size=None)
        return estimate(replace(config, optim=optim), num_replicas=where.replicas, shape=shape).total_bytes <= limit

    return largest(fits, MOST_TOKENS // config.data.max_length)


def _time(config: TrainConfig, shape: Shape, where: Where) -> StepTime:
    done = work(config, shape, batch_arithmetic(config, where.replicas))
    return step_time(done, where.chip, where.replicas)


def _speed(setting: Setting) -> float:
    """Rows a second; the passes are in the time."""
    return batch_arithmetic(setting.config, setting.replicas).global_batch_size / setting.time.seconds


def _ease(setting: Setting) -> tuple[int, int]:
    return batch_arithmetic(setting.config, setting.replicas).gradient_accumulation, setting.peak


def _by_formula(config: TrainConfig, shape: Shape, where: Where) -> Plan:
    note = ""
    if where.chip.name in NO_KERNELS and config.model.attention != "sdpa":
        note = f"planned with model.attention=sdpa: the attention kernels do not compile for {where.chip.name}"
        config = replace(config, model=replace(config.model, attention="sdpa"))
    settings = sorted(_settings(config, shape, where), key=lambda one: (-_speed(one), one.peak))
    limit = where.limit * (1 - reserve(config))
    fitting = [one for one in settings if one.peak <= limit]
    near = [one for one in fitting if _speed(one) > (1 - TIE) * _speed(fitting[0])]
    picked = min(near, key=_ease) if near else min(settings, key=lambda one: one.peak)
    memory = estimate(picked.config, num_replicas=where.replicas, shape=shape)
    held = memory.parts["optimizer"] + memory.parts["ema"] + 4 * memory.trained
    return Plan(
        where=where, config=picked.config, settings=tuple(settings), fits=bool(fitting), peak_bytes=memory.total_bytes,
        parts=dict(memory.parts), source="formula", time=picked.time, checkpoint_bytes=held,
        run=time_plan(where.chip, where.chips, where.name, picked.time.seconds, config.optim.max_steps, held),
        advice=advise(picked.config, shape, where.replicas, limit, bool(fitting)), note=note,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------- by the compiler


def _verified(found: Plan, shape: Shape) -> Plan:
    """The pick as the compiler sees it; if it does not fit, the next smaller one that the compiler says fits.

    Few compiles: mostly the pick at full effort alone; else a bisection of the smaller ones at low effort, and the full
    effort for what that found.
    """
    from tpu_kit.compiler import CompilerUnavailable

    limit = found.where.limit * (1 - EXACT_RESERVE)
    try:
        compiled = _compile(found.config, found.where, "full")
        if compiled.total_bytes > limit:
            below = sorted((one for one in found.settings if one.peak < found.peak_bytes), key=lambda one: one.peak)
            place = largest(
                lambda n: _compile(below[n - 1].config, found.where, "low").total_bytes <= limit, len(below)
            )
            for one in reversed(below[:place]):
                again = _compile(one.config, found.where, "full")
                if again.total_bytes <= limit:
                    found, compiled = replace(found, config=one.config), again
                    break
    except CompilerUnavailable as error:
        return replace(found, note=f"by formula, as the compiler cannot be asked: {error}")
    return _with(found, compiled, shape)


def _compile(config: TrainConfig, where: Where, effort: Any) -> Compiled:
    from tpu_kit.compiler import CompilerUnavailable, compile_step

    if where.topology is None:
        raise CompilerUnavailable(f"the compiler knows no topology of {where.name}")
    return compile_step(config, where.topology, num_replicas=where.replicas, effort=effort)


def _with(found: Plan, compiled: Compiled, shape: Shape | None) -> Plan:
    where, config = found.where, found.config
    batch = batch_arithmetic(config, where.replicas)
    if compiled.flops is not None and compiled.bytes_accessed is not None:
        own = work(config, shape, batch) if shape else Work(0.0, 0.0, 0.0)
        # Splash attention reports no FLOPs, so that the formula's count may be the larger one.
        done = Work(max(compiled.flops, own.flops), compiled.bytes_accessed, own.reduced)
        time = step_time(done, where.chip, where.replicas)
    else:
        time = found.time
    parts = {
        "arguments": compiled.argument_bytes or 0, "temporaries": compiled.temporary_bytes or 0,
        "code": compiled.code_bytes or 0,
        "unaliased_outputs": (compiled.output_bytes or 0) - (compiled.aliased_bytes or 0),
    }  # fmt: skip
    run = time_plan(
        where.chip, where.chips, where.name, time.seconds, config.optim.max_steps, found.checkpoint_bytes or 0.0
    )
    return replace(
        found, fits=compiled.fits and compiled.total_bytes <= where.limit * (1 - EXACT_RESERVE), time=time, run=run,
        peak_bytes=compiled.total_bytes, parts=parts, source="compiler", compiled=compiled,
    )  # fmt: skip


def _by_compiler_alone(config: TrainConfig, where: Where) -> Plan:
    """A model that the formula does not know, with the batch size that was given."""
    compiled = _compile(config, where, "full")
    nothing = StepTime(0.0, 0.0, 0.0)
    run = time_plan(where.chip, where.chips, where.name, 1.0, None, 0.0)
    empty = Plan(where, config, (), False, 0, {}, "compiler", nothing, run, None, None)
    return _with(empty, compiled, None)
