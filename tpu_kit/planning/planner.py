"""Plans a run for TPUs: which settings fit a chip, which are fastest, how long the run takes and what it costs.

A batch size or remat that the user set is kept. Of those left open the planner takes the setting with the most tokens
per second that leaves a reserve of memory, by formula. With `exact`, the TPU compiler compiles it, and a smaller one if
that does not fit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from tpu_kit.config.conflicts import check_remat
from tpu_kit.config.loader import BatchPlan, ConfigError, TrainConfig, as_trained, batch_arithmetic
from tpu_kit.config.mesh import mesh_size
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.hardware.slices import TargetSlice, find_slice
from tpu_kit.models.architecture import Shape
from tpu_kit.models.shape_cache import read_shape
from tpu_kit.models.sharding_rules import Placed
from tpu_kit.planning.advice import Advice, Inference, advise, inference, largest, with_rows
from tpu_kit.planning.argument_memory import table
from tpu_kit.planning.compile_check import Compiled, CompilerUnavailable, compile_programs
from tpu_kit.planning.cost import Collective, StepTime, compiled_time, predict_time, predicted_collectives
from tpu_kit.planning.memory_estimate import Memory, estimate_on
from tpu_kit.planning.mesh_choice import placed
from tpu_kit.planning.rollouts import ProgramPeak, program_rows, update_plan, warnings_of
from tpu_kit.planning.run_cost import Count, TimePlan, count_rows, count_updates, time_plan

TIE = 0.02
"""Settings whose speeds differ by less count as equally fast: the one with fewest passes is picked, as it compiles
sooner."""
LEAST_UPDATES = 20
"""The least updates of an epoch where `batch_size=auto` chooses the rows of an update: with fewer, a small data set is
hardly learned."""
MOST_TOKENS = 2**31
"""Tokens of a pass at which indices overflow."""
EXACT_RESERVE = 0.01
"""Share of a device's memory that a compiled pick leaves free, for what a run holds beside the step, such as the next
batch."""
_COMPILED = (
    "argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops", "bytes_accessed",
    "compile_seconds", "program",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One candidate configuration, with its update, and its peak (bytes) and time by formula."""

    config: TrainConfig
    update: BatchPlan
    peak: int
    time: StepTime

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.update.tokens_per_update / self.time.seconds


@dataclass(frozen=True)
class Plan:
    """The plan of a run on a slice.

    Attributes:
        where: the slice.
        config: the run with the picked settings.
        settings: all candidates, fastest first.
        fits: whether the pick leaves the reserve.
        peak_bytes: the pick's peak on one device, of which `parts` has the bytes by name.
        source: of the memory figures, "formula" or "compiler".
        time: of a step.
        run: time and cost of the run.
        checkpoint_bytes: size of a checkpoint.
        advice: the largest batch, sequence and rank that fit; and what to change if nothing fits.
        inference: the longest context for generation.
        updates: number of updates; None where it is not known, for the reason `unknown`.
        compiled: the compiler's figures of each program, with `exact`.
        note: changes that the user did not ask for, and why there is a mesh or none.
        tensors: where each of the model's tensors lies on the mesh; empty without one.
        collectives: those of a step on the mesh.
        programs: the "step", or those of a run that samples, by formula.
    """

    where: TargetSlice
    config: TrainConfig
    settings: tuple[Setting, ...]
    fits: bool
    peak_bytes: int
    parts: dict[str, int]
    source: str
    time: StepTime
    run: TimePlan
    checkpoint_bytes: int
    advice: Advice
    inference: Inference
    updates: int | None = None
    unknown: str = ""
    compiled: Mapping[str, Compiled] = field(default_factory=dict)
    note: str = ""
    tensors: tuple[Placed, ...] = ()
    collectives: tuple[Collective, ...] = ()
    programs: tuple[ProgramPeak, ...] = ()

    @property
    def free(self) -> float:
        """The share of the device's memory that the pick must leave free."""
        return EXACT_RESERVE if self.source == "compiler" else self.where.free

    def to_dict(self) -> dict[str, Any]:
        """The object of `plan --json`."""
        batch, run = update_plan(self.config, self.where.replicas), self.run
        values: dict[str, Any] = {
            "chip": self.where.chip.name, "chips": self.where.chips, "replicas": self.where.replicas,
            "slice": self.where.name, "mesh": str(self.where.mesh) if self.where.mesh else None,
            "collectives": [asdict(one) for one in self.collectives],
            "global_batch_size": batch.global_batch_size, "fits": self.fits,
            "peak_bytes": self.peak_bytes, "limit_bytes": self.where.limit, "parts": self.parts, "source": self.source,
            "batch_size": batch.batch_size, "gradient_accumulation": batch.gradient_accumulation,
            "remat": self.config.optim.remat, "step_seconds": self.time.seconds,
            "tokens_per_second": batch.tokens_per_update / self.time.seconds, "run_hours": run.run_hours,
            "cost": {"on_demand": run.on_demand, "spot": run.spot}, "updates": self.updates,
            "checkpoint_bytes": self.checkpoint_bytes, "checkpoint_interval_seconds": run.save_interval_seconds,
            "sessions": run.sessions, "advice": asdict(self.advice),
            "inference": asdict(self.inference),
        }  # fmt: skip
        if step := self.compiled.get("step"):
            values |= {name: getattr(step, name) for name in _COMPILED}
        if self.config.on_policy:
            rows = program_rows(self.programs, self.compiled)
            values |= {"rollout_seconds": self.time.rollout, "programs": rows}
        return values


def plan(config: TrainConfig, chips: Sequence[str] = ("v5e",), exact: bool = False) -> list[Plan]:
    """Makes a plan for each chip; with a warning where the run cannot be split over one, if it can over another.

    Args:
        config: the run; one of `grpo` if it sets a parameter of `rl`.
        chips: names as `slices.find_slice` takes them.
        exact: whether to run the TPU compiler, which takes some minutes for each chip.

    Raises:
        ValueError: of `slices.find_slice`, `shape_cache.read_shape` or `memory_estimate.estimate`; or the global batch
            cannot be split over any of them; or as `check_remat`.
    """
    config = as_trained(config)
    check_remat(config, "tpu")
    launch = config.launch
    if launch.mesh in (None, "auto"):
        places = [find_slice(name, launch.num_replicas) for name in chips]
    else:  # a chip alone means the smallest slice with room for the mesh
        size = mesh_size(launch.mesh)
        places = [find_slice(name, None if re.search(r"[-_:]\d", name) else size) for name in chips]
    shape = read_shape(config.model)
    rows = Count(None) if config.optim.max_steps else count_rows(config)
    found, refused = [], list[str]()
    for where in places:
        try:
            found.append(_planned(config, shape, where, rows, exact))
        except ConfigError as error:
            refused += [f"{where.name}: {problem}" for problem in error.problems]
    if not found:
        raise ConfigError(refused)
    print(*(f"warning: {problem}\n" for problem in refused), sep="", end="", file=sys.stderr)
    return found


def _planned(config: TrainConfig, shape: Shape, where: TargetSlice, rows: Count, exact: bool) -> Plan:
    chosen, on, note = placed(config, shape, where, one_row="optim.batch_size" not in config.sources)
    one = by_formula(chosen, shape, on, rows)
    if exact:
        one = with_largest_batch(verified(one, shape, rows))
    notes = (note, *warnings_of(one.config, 1 if on.mesh else on.replicas), one.note)
    return replace(one, note=_joined(*notes))


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def best_batch(config: TrainConfig, where: TargetSlice, exact: bool = False, rows: Count | None = None) -> Plan:
    """Chooses the batch for `optim.batch_size=auto`: the fastest that fits; only the batch changes.

    Args:
        config: the run.
        where: the slice.
        exact: whether the TPU compiler verifies the formula's pick.
        rows: of the data, where they were counted; see `LEAST_UPDATES`.

    Raises:
        ValueError: as `plan`; or not one row fits, with what to change.
    """
    optim, rows = replace(config.optim, batch_size="auto"), rows or Count(None)
    config = replace(config, optim=optim, sources=dict(config.sources) | {"optim.remat": "code"})
    shape = read_shape(config.model)
    best = by_formula(config, shape, where, rows)
    if exact:
        best = verified(best, shape, rows)
    if not best.fits:
        passes = batch_arithmetic(best.config, where.replicas).gradient_accumulation
        several = f" in each of the {passes:,} passes of an update" if passes > 1 else ""
        raise ValueError(f"not one row{several} fits {where.name}: {best.advice}")
    return best


# ------------------------------------------------------------------------------------------------------ by the formula


def batches(
    config: TrainConfig, replicas: int, rows: Count, most: Callable[[], int]
) -> Iterator[tuple[int, int | None]]:
    """Candidates (rows per replica in a pass, rows per update); `most` returns the number of rows that fit.

    Raises:
        ValueError: the rows of an update cannot be split over the replicas.
    """
    optim = config.optim
    whole = optim.global_batch_size
    if isinstance(optim.batch_size, int) and "optim.batch_size" in config.sources:
        yield optim.batch_size, whole
        return
    if whole is None and isinstance(optim.batch_size, int) and not config.on_policy:
        whole = optim.batch_size * replicas * optim.gradient_accumulation
    if whole is None:  # auto, with any number of rows in an update: all that fit
        limit = most()
        if rows.count is not None and not config.on_policy:
            limit = min(limit, rows.count // (LEAST_UPDATES * replicas * optim.gradient_accumulation))
        yield from ((1 << i, None) for i in range(max(1, limit).bit_length()))
        return
    one = replace(optim, batch_size=1, global_batch_size=whole, gradient_accumulation=1)
    each = batch_arithmetic(replace(config, optim=one), replicas).gradient_accumulation
    yield from ((n, whole) for n in range(1, min(each, max(1, most())) + 1) if each % n == 0)


def _settings(config: TrainConfig, shape: Shape, where: TargetSlice, known: Count) -> list[Setting]:
    found, limit = [], where.budget
    remats: tuple[Literal["full", "outputs", "none"], ...] = ("full", "outputs") if where.mesh is None else ("full",)
    if "optim.remat" in config.sources:
        remats = (config.optim.remat,)
    for remat in remats:
        base = replace(config, optim=replace(config.optim, remat=remat))

        def fits(rows: int, base: TrainConfig = base) -> bool:
            return estimate_on(with_rows(base, rows), shape, where).total_bytes <= limit

        most = partial(largest, fits, min(MOST_ROWS, MOST_TOKENS // config.data.max_length))
        for rows, whole in batches(base, where.replicas, known, most):
            if rows * config.data.max_length >= MOST_TOKENS:
                raise ValueError(
                    f"optim.batch_size={rows} x data.max_length={config.data.max_length}: a pass of 2**31 tokens or "
                    "more is beyond any chip; give the rows of one replica in one pass, such as 8"
                )
            passes = config.optim.gradient_accumulation if whole is None else 1
            one = with_rows(base, rows, global_batch_size=whole, gradient_accumulation=passes)
            peak = estimate_on(one, shape, where).total_bytes
            found.append(Setting(one, update_plan(one, where.replicas), peak, predict_time(one, shape, where)))
    return found


def by_formula(config: TrainConfig, shape: Shape, where: TargetSlice, rows: Count) -> Plan:
    """Makes the plan for one slice by formula."""
    config, notes = where.calibration.apply(config)
    settings = sorted(_settings(config, shape, where, rows), key=lambda one: (-one.speed, one.peak))
    limit, mesh = where.budget, where.mesh
    fitting = [one for one in settings if one.peak <= limit]
    near = [one for one in fitting if one.speed > (1 - TIE) * fitting[0].speed]
    if near:
        picked = min(near, key=lambda one: (one.update.gradient_accumulation, one.peak))
    else:
        picked = min(settings, key=lambda one: one.peak)
    memory = estimate_on(picked.config, shape, where)
    state = memory.parts.get("optimizer", 0) + memory.parts.get("ema", 0)
    held = state * (mesh.fsdp * mesh.model if mesh else 1) + 4 * memory.trained
    updates = count_updates(picked.config, where.replicas, rows)
    moved = predicted_collectives(picked.config, shape, picked.update, mesh, where.slices) if mesh else ()
    return Plan(
        where=where, config=picked.config, settings=tuple(settings), fits=bool(fitting), peak_bytes=memory.total_bytes,
        parts=dict(memory.parts), source="formula", time=picked.time, checkpoint_bytes=held,
        run=time_plan(where.chip, where.chips, where.name, picked.time.seconds, updates.count, held),
        advice=advise(picked.config, shape, where, limit, bool(fitting)),
        note=_joined(*notes, *where.calibration.notes),
        inference=inference(config, shape, where),
        updates=updates.count, unknown=updates.reason, programs=memory.programs, collectives=tuple(moved),
        tensors=tuple(table(shape, picked.config, mesh)) if mesh else (),
    )  # fmt: skip


def verified(found: Plan, shape: Shape, rows: Count) -> Plan:
    """Compiles the pick; if it does not fit, finds the next smaller setting that does.

    Of a run that samples, a smaller batch changes only "accumulate".
    """
    below = sorted((one for one in found.settings if one.peak < found.peak_bytes), key=lambda one: -one.peak)
    answers = list[CompiledSetting]()
    try:
        for config in [found.config, *(one.config for one in below)]:
            answers.append(CompiledSetting.of(config, shape, found.where))
            if answers[-1].fits or answers[-1].largest not in ("step", "accumulate"):
                break
        else:
            answers = answers[:1]
    except CompilerUnavailable as error:
        return replace(found, note=_joined(found.note, f"by formula, as the compiler cannot run: {error}"))
    return _with(found, answers[-1], shape, rows)


@dataclass(frozen=True)
class CompiledSetting:
    """The compiler's answer for a setting: its programs, bytes of a device in each, and the one that takes most."""

    config: TrainConfig
    memory: Memory
    compiled: Mapping[str, Compiled]
    peaks: Mapping[str, int]
    largest: str
    fits: bool

    @staticmethod
    def of(config: TrainConfig, shape: Shape, where: TargetSlice) -> CompiledSetting:
        """Compiles the programs of a run; raises `CompilerUnavailable`."""
        compiled, memory = compile_programs(config, where.topology, where.devices), estimate_on(config, shape, where)
        peaks = {row["program"]: row["compiler_bytes"] for row in program_rows(memory.programs, compiled)}
        most = max(peaks, key=peaks.__getitem__)
        fits = all(one.fits for one in compiled.values()) and peaks[most] <= where.limit * (1 - EXACT_RESERVE)
        return CompiledSetting(config, memory, compiled, peaks, most, fits)


def _with(found: Plan, answer: CompiledSetting, shape: Shape, rows: Count) -> Plan:
    """The plan with the compiler's figures; the setting may differ from the formula's pick."""
    where, config, compiled, memory = found.where, answer.config, answer.compiled, answer.memory
    time, peak = compiled_time(config, shape, where, compiled), answer.peaks[answer.largest]
    updates = count_updates(config, where.replicas, rows)
    # The formula tells what else would fit, corrected by the compiler's figure for the pick.
    held, limit = memory.argument_bytes, where.limit * (1 - EXACT_RESERVE)
    room = held + (limit - held) * (memory.total_bytes - held) / max(1, peak - held)
    beside = next(one.beside for one in memory.programs if one.name == answer.largest)
    codes = sum(one.code_bytes or 0 for one in compiled.values())
    step = compiled.get("step")
    return replace(
        found, config=config, programs=memory.programs, compiled=compiled, source="compiler", fits=answer.fits,
        peak_bytes=peak, parts={**beside, **_parts(compiled[answer.largest]), "code": codes}, time=time,
        collectives=step.collectives if step and step.fits and where.mesh else found.collectives,
        updates=updates.count, unknown=updates.reason, advice=advise(config, shape, where, room, answer.fits),
        run=time_plan(where.chip, where.chips, where.name, time.seconds, updates.count, found.checkpoint_bytes),
    )  # fmt: skip


def with_largest_batch(found: Plan) -> Plan:
    """Sets `advice.largest_batch` to the largest batch that was compiled and fits.

    It compiles the formula's largest batch, then that at which the line through both meets the limit.
    """
    picked, where, config = found.config.optim.batch_size, found.where, found.config
    if "step" not in found.compiled:
        return found
    assert isinstance(picked, int)
    limit, guess = where.limit * (1 - EXACT_RESERVE), found.advice.largest_batch
    totals = {picked: found.compiled["step"].total_bytes}
    for _ in range(2):
        if guess < 1 or guess in totals:
            break
        larger = compile_programs(with_rows(config, guess), where.topology, where.devices)
        totals[guess] = larger["step"].total_bytes
        each = max(1.0, (totals[guess] - totals[picked]) / (guess - picked))
        guess = min(picked + int((limit - totals[picked]) // each), MOST_TOKENS // config.data.max_length)
    most = max((rows for rows, total in totals.items() if total <= limit), default=0)
    return replace(found, advice=replace(found.advice, largest_batch=most))


def _parts(compiled: Compiled) -> dict[str, int]:
    arguments, code = compiled.argument_bytes or 0, compiled.code_bytes or 0
    new = (compiled.output_bytes or 0) - (compiled.aliased_bytes or 0)
    rest = compiled.total_bytes - arguments - code - new  # the compiler does not report it for a step that does not fit
    return {"arguments": arguments, "temporaries": rest, "code": code, "unaliased_outputs": new}
