"""Plans a run for TPUs: the settings that fit a chip, the fastest of them, and the run's duration and cost.

A batch size or remat that the user set is kept. For open settings, the planner takes the values with the most tokens
per second that leave a reserve of memory, by formula. With `exact`, the TPU compiler compiles this setting, and smaller
settings until one fits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tpu_kit.config.loader import ConfigError, TrainConfig, as_trained, batch_arithmetic
from tpu_kit.config.schema import MOST_ROWS
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.slices import TargetSlice
from tpu_kit.model.shape import Shape
from tpu_kit.model.shape_cache import read_shape
from tpu_kit.model.sharding.sharding_rules import Placed
from tpu_kit.planning.compiler.compile_check import CompilerUnavailable, CompileTimeout
from tpu_kit.planning.cost import Collective, predicted_collectives
from tpu_kit.planning.ladder import MOST_TOKENS, Advice, advise, batches, options, remats, told
from tpu_kit.planning.memory.argument_memory import table
from tpu_kit.planning.mesh_choice import find_places, placed
from tpu_kit.planning.program_peaks import program_rows
from tpu_kit.planning.run_cost import Count, TimePlan, count_rows, count_updates, filled_batch, time_plan
from tpu_kit.planning.run_on_slice import Inference, Setting, inference, with_rows
from tpu_kit.torch_tpu.limits import run_limits
from tpu_kit.training.losses.rollout_programs import check_sampling, warnings_of

TIE = 0.05
"""Settings whose speeds differ by less count as equally fast, because the compiler's cost model cannot tell them apart.
The planner then prefers the fewest passes, which compile faster, and then the most rows in an update."""
MOST_UNTIMED_ROWS = 8
"""Largest `batch_size=auto` on a CPU, where more rows are not faster, and on a GPU of unknown speed."""
_COMPILED = (
    "argument_bytes", "temporary_bytes", "output_bytes", "aliased_bytes", "code_bytes", "flops", "bytes_accessed",
    "compile_seconds", "program",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Plan(Setting):
    """The plan of a run on a slice: the picked setting, with the compiler's figures if it was asked.

    Attributes:
        settings: all candidates by formula, fastest first.
        run: time and cost of the run.
        checkpoint_bytes: size of a checkpoint: optimizer state, average, and trained weights in fp32.
        advice: the largest batch, sequence and rank that fit, and changes if the run does not fit.
        inference: the longest context for generation.
        updates: number of updates; None if it is not known.
        unknown: why `updates` is None, or the assumption of its number; empty without an assumption.
        note: changes that the user did not ask for, the reason for a mesh or replicas, and `unverified`.
        tensors: the placement of the model's tensors on the mesh; empty without a mesh.
        collectives: the collectives of a step on the mesh, by the compiler if it was asked; empty without a mesh.
    """

    settings: tuple[Setting, ...]
    run: TimePlan
    checkpoint_bytes: int
    advice: Advice
    inference: Inference
    updates: int | None
    unknown: str
    note: str
    tensors: tuple[Placed, ...]
    collectives: tuple[Collective, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `plan --json` prints: slice, batch, memory, time, cost and advice as JSON values.

        The keys are "chip", "chips", "replicas", "slice", "mesh", "collectives", "global_batch_size", "fits",
        "peak_bytes", "limit_bytes", "parts", "source", "batch_size", "gradient_accumulation", "remat", "step_seconds",
        "tokens_per_second", "run_hours", "cost" ("on_demand" and "spot" in dollars), "updates", "checkpoint_bytes",
        "checkpoint_interval_seconds", "sessions", "advice" and "inference". If the compiler compiled a step, figures of
        `Compiled` are added by its names, such as "flops". If the run samples, "rollout_seconds" and "programs" are
        added. Unknown values are None.
        """
        batch, run = self.update, self.run
        values: dict[str, Any] = {
            "chip": self.where.chip.name, "chips": self.where.chips, "replicas": self.where.replicas,
            "slice": self.where.name, "mesh": str(self.where.mesh) if self.where.mesh else None,
            "collectives": [asdict(one) for one in self.collectives],
            "global_batch_size": batch.global_batch_size, "fits": self.fits,
            "peak_bytes": self.peak_bytes, "limit_bytes": self.where.limit, "parts": self.parts, "source": self.source,
            "batch_size": batch.batch_size, "gradient_accumulation": batch.gradient_accumulation,
            "remat": self.config.optim.remat, "step_seconds": self.time.seconds,
            "tokens_per_second": self.speed, "run_hours": run.run_hours,
            "cost": {"on_demand": run.on_demand, "spot": run.spot}, "updates": self.updates,
            "checkpoint_bytes": self.checkpoint_bytes, "checkpoint_interval_seconds": run.save_interval_seconds,
            "sessions": run.sessions, "advice": asdict(self.advice),
            "inference": asdict(self.inference),
        }  # fmt: skip
        if step := self.compiled.get("step"):
            values |= {name: getattr(step, name) for name in _COMPILED}
        if self.several:
            rows = program_rows(self.memory.programs, self.compiled)
            values |= {"rollout_seconds": self.time.rollout, "programs": rows}
        return values


def plan(config: TrainConfig, chips: Sequence[str] = ("v5e",), exact: bool = False) -> list[Plan]:
    """Makes a plan for each slice, also if the run does not fit; leaves out, with a warning, slices with a ConfigError.

    Without optim.max_steps it prepares the data to count the rows. The warning is printed to stderr.

    Args:
        config: the run; planned as `grpo` if it sets a parameter of `rl`, as `dpo` if it sets one of `preference`.
        chips: names for `slices.find_slice`, or of services with free slices: kaggle, colab.
        exact: whether to run the TPU compiler, which takes some minutes for each chip.

    Raises:
        ValueError: as `slices.find_slice`, `shape_cache.read_shape`, `memory_estimate.estimate`, `run_limits`,
            `check_sampling`, `check_objective` and `placed`; or all slices have a ConfigError, such as an indivisible
            batch.
        RuntimeError: as `compile_step`, only if `exact` is true.
    """
    config = as_trained(config)
    if problems := run_limits(config):
        raise ConfigError(problems)
    check_sampling(config)
    if ":" in config.optim.objective:  # the user's own; the check loads torch
        from tpu_kit.training.losses.objective_check import check_objective

        check_objective(config)
    places = find_places(config.launch, chips)
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
    """Makes the plan for one slice; raises ConfigError and ValueError as `plan`."""
    config, where, meshed = placed(config, shape, where, one_row="optim.batch_size" not in config.sources)
    config, notes = where.calibration.apply(config)
    if config.optim.batch_size != "auto" and not rows.reason:  # a reason means that the rows are not counted exactly
        config, lowered = filled_batch(config, where.replicas, rows.count)
        notes = [*notes, *lowered]
    settings = candidates(config, shape, where, rows)
    picked = verified(settings) if exact else fastest(settings)
    config, memory, mesh = picked.config, picked.memory, where.mesh
    advice = advise(picked)
    if "step" in picked.compiled:
        advice = replace(advice, largest_batch=_largest_batch(picked, advice.largest_batch))
    state = memory.parts.get("optimizer", 0) + memory.parts.get("ema", 0)
    held = state * (mesh.weight_shards * mesh.model if mesh else 1) + 4 * memory.trained
    updates = count_updates(config, where.replicas, rows)
    moved = tuple(predicted_collectives(config, shape, picked.update, mesh, where.slices)) if mesh else ()
    if mesh and (step := picked.compiled.get("step")) and step.fits:
        moved = step.collectives
    notes = [meshed, *warnings_of(config, 1 if mesh else where.replicas), *notes, *where.calibration.notes]
    return Plan(
        config=config, shape=shape, where=where, compiled=picked.compiled, waits=picked.waits, settings=tuple(settings),
        advice=advice,
        run=time_plan(
            where.chip, where.chips, where.name, picked.time.seconds, updates.count, held, where.service,
            picked.compiling,
        ),
        checkpoint_bytes=held, inference=inference(picked), updates=updates.count, unknown=updates.reason,
        note="; ".join(filter(None, [*notes, picked.unverified])),
        tensors=tuple(table(shape, config, mesh)) if mesh else (), collectives=moved,
    )  # fmt: skip


def best_setting(
    config: TrainConfig,
    where: TargetSlice,
    exact: bool = False,
    rows: Count | None = None,
    asks: Callable[[Setting], float] = lambda best: 0.0,
) -> Setting:
    """Chooses open values of `optim.batch_size` and `optim.remat`: the fastest setting that fits, see `fastest`.

    Args:
        config: the run; a number in optim.batch_size is kept, even the default, and even if it does not fit.
        where: the slice, or this machine; with unknown speed, an open batch size is at most `MOST_UNTIMED_ROWS`.
        exact: whether the TPU compiler verifies the formula's pick (`verified`); never with unknown speed.
        rows: the rows of the data, if they were counted; `auto` leaves at least `LEAST_UPDATES` updates.
        asks: without `exact`, is called with the formula's pick, and returns the seconds that the compiler has to
            verify it; 0 does not ask it.

    Raises:
        ValueError: as `read_shape`, `candidates` and, with `exact`, `verified`; or not even one row fits with
            optim.batch_size=auto, with changes that help.
        RuntimeError: as `verified`, only with `exact`.
    """
    config = replace(config, sources=dict(config.sources) | {"optim.batch_size": "code"})
    settings = candidates(config, read_shape(config.model), where, rows or Count(None))
    known, best = where.chip.bf16_flops is not None, fastest(settings)
    if known and (exact or (seconds := asks(best))):
        best = verified(settings, None if exact else seconds)
    if config.optim.batch_size == "auto" and not best.fits:
        advice: Any = "; ".join(told([*options(best)])) or "use fewer replicas or passes, or a smaller model"
        passes = max(batch_arithmetic(one.config, where.replicas).gradient_accumulation for one in settings)
        each = f" in each of {passes:,} passes" if passes > 1 else ""
        raise ValueError(
            f"optim.batch_size=auto: not one row of data.max_length={config.data.max_length}{each} fits "
            f"{where.limit / GIB:.2f} GiB for each of {where.replicas} replicas on {where.name}: "
            f"{advise(best) if known else advice}"
        )
    return best


def candidates(config: TrainConfig, shape: Shape, where: TargetSlice, rows: Count) -> list[Setting]:
    """Returns the settings for a slice, by formula, the fastest first; with unknown speed, the most rows first.

    They are all values of `batches` for all values of `remats`, fitting or not; "blocks" is added only if no other
    setting fits.

    Raises:
        ValueError: the rows of an update cannot be split over the replicas, a pass has too many tokens, or as
            `estimate`.
    """
    found, known = list[Setting](), where.chip.bf16_flops is not None
    for remat in remats(config, where, shape):
        if remat == "blocks" != config.optim.remat and any(one.fits for one in found):
            continue  # recomputing blocks is slower
        base = Setting(replace(config, optim=replace(config.optim, remat=remat)), shape, where)
        for number, whole in batches(base, rows, MOST_ROWS if known else MOST_UNTIMED_ROWS):
            if number * config.data.max_length >= MOST_TOKENS:
                raise ValueError(
                    f"optim.batch_size={number} x data.max_length={config.data.max_length}: a pass of 2**31 tokens or "
                    "more is beyond any chip; give the rows of one replica in one pass, such as 8"
                )
            passes = config.optim.gradient_accumulation if whole is None else 1
            one = with_rows(base.config, number, global_batch_size=whole, gradient_accumulation=passes)
            found.append(replace(base, config=one))
    least = min(one.compiling for one in found)
    found = [replace(one, waits=_wait(one, one.compiling - least, rows, config.optim.remat)) for one in found]
    return sorted(found, key=lambda one: (-one.pace if known else -one.update.batch_size, one.peak_bytes))


def _wait(one: Setting, longer: float, rows: Count, asked: str) -> float:
    """Returns the additional compile seconds `longer` divided by the number of updates of the setting `one`.

    If that number is not known, returns 0; but infinity if `asked`, the run's `optim.remat`, is "auto" and the setting
    has remat=none.
    """
    if not longer:
        return 0.0
    if updates := count_updates(one.config, one.where.replicas, rows).count:
        return longer / updates
    return math.inf if (asked, one.config.optim.remat) == ("auto", "none") else 0.0


def fastest(settings: Sequence[Setting]) -> Setting:
    """Picks a setting of `candidates`, which are sorted: the fastest that fits; if none fits, the least memory.

    Among settings that are equally fast (`TIE`) it takes the fewest passes, then the most rows of an update, then the
    least memory. At unknown speed it takes the most rows that fit.
    """
    fitting = [one for one in settings if one.fits]
    if not fitting:
        return min(settings, key=lambda one: one.peak_bytes)
    if fitting[0].where.chip.bf16_flops is None:
        return fitting[0]
    near = [one for one in fitting if one.pace >= (1 - TIE) * fitting[0].pace]
    return min(near, key=lambda one: (one.update.gradient_accumulation, -one.update.global_batch_size, one.peak_bytes))


def verified(settings: Sequence[Setting], seconds: float | None = None) -> Setting:
    """Compiles the fastest setting; if it does not fit, compiles smaller settings until one fits.

    In a run that samples, a smaller batch changes only "accumulate", so it stops if another program is the largest.

    Args:
        settings: as returned by `candidates`.
        seconds: time limit for all compiles. After it, the fastest setting that fits by the formula, corrected by the
            compiled settings, is returned; errors of the compiler are noted and not raised. None: no limit.

    Returns:
        The last compiled setting or, if none fits, the compiled setting with the least memory. If the compiler is not
        available or gave no answer, a setting by formula with the reason in `unverified`.

    Raises:
        RuntimeError, ValueError: as `compile_step`, only if `seconds` is None.
    """
    first, answers = fastest(settings), list[Setting]()
    below = sorted((one for one in settings if one.peak_bytes < first.peak_bytes), key=lambda one: -one.peak_bytes)
    end = math.inf if seconds is None else time.monotonic() + seconds
    try:
        for one in [first, *below]:
            answers.append(one.compile(None if seconds is None else max(0.0, end - time.monotonic())))
            if answers[-1].fits or answers[-1].largest not in ("step", "accumulate"):
                return answers[-1]
    except CompilerUnavailable as error:
        return replace(first, unverified=f"by formula, because the compiler cannot run: {error}")
    except (RuntimeError, ValueError) as error:
        if seconds is None:
            raise
        reason = str(error).strip().splitlines()[0][:200]
        if isinstance(error, CompileTimeout):
            reason = f"no answer in {seconds:g} s"
        if not answers:
            return replace(first, unverified=f"by formula, because the compiler did not decide: {reason}")
        least = min(answer.bound for answer in answers)
        rest = [one for one in below if one.peak_bytes <= least] or below[-1:] or [first]
        text = f"by the compiler, {len(answers)} larger settings do not fit; for this setting: {reason}"
        return replace(fastest(rest), unverified=text)
    return min(answers, key=lambda one: one.peak_bytes)


def _largest_batch(picked: Setting, guess: int) -> int:
    """Returns the largest compiled optim.batch_size that fits; 0 if none fits. Raises as `compile_step`.

    It compiles the formula's largest batch `guess`. Then it compiles the batch at which the line through both figures
    meets the limit, at most twice the compiled rows. Near the limit the compiler saves memory, so the line may fall.
    """
    rows, limit = picked.update.batch_size, picked.where.limit * (1 - picked.free)
    made = {rows: picked}
    for _ in range(2):
        if guess < 1 or guess in made:
            break
        made[guess] = picked.changed("optim.batch_size", guess).compile()
        each = (made[guess].peak_bytes - picked.peak_bytes) / (guess - rows)
        if each <= 0:
            break
        guess = min(rows + int((limit - picked.peak_bytes) // each), 2 * max(made))
    return max((number for number, one in made.items() if one.fits), default=0)
