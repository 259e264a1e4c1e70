"""A plan as the TPU compiler sees it: the pick compiled, and where that does not fit, another one that does.

`planner` asks for it with `exact`. As the compiler is slow, it is asked for little: the pick, the largest batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpu_kit.advice import RESERVE, advise, inference
from tpu_kit.compiled import Compiled, Effort
from tpu_kit.config import TrainConfig, batch_arithmetic
from tpu_kit.epochs import Rows, count_updates
from tpu_kit.memory import estimate
from tpu_kit.planner import MOST_TOKENS, Plan, Setting
from tpu_kit.roofline import Work, step_time, work
from tpu_kit.shapes import Shape
from tpu_kit.slices import Where
from tpu_kit.timeplan import time_plan

EXACT_RESERVE = 0.01
"""Share of a device's memory that a verified pick leaves: for what a run holds beside the step, such as the next
batch."""


def verified(found: Plan, shape: Shape, rows: Rows) -> Plan:
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
            for one in reversed(below[: _most(below, found.where, limit)]):
                again = _compile(one.config, found.where, "full")
                if again.total_bytes <= limit:
                    found, compiled = replace(found, config=one.config), again
                    break
    except CompilerUnavailable as error:
        note = f"by formula, as the compiler cannot be asked: {error}"
        return replace(found, note="; ".join(filter(None, [found.note, note])))
    return _with(found, compiled, shape, rows)


def _most(settings: Sequence[Setting], where: Where, limit: float) -> int:
    """How many of the settings, the smallest first, fit by a compiler that makes little effort: by bisection."""
    low, high = 0, len(settings) + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = _compile(settings[middle - 1].config, where, "low").total_bytes <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def with_largest_batch(found: Plan) -> Plan:
    """The plan with the largest batch that was compiled and fits.

    Of three: the pick, what the formula names, and where the line through both meets the limit. All at full effort, as
    near the limit a few per cent decide.
    """
    picked, where, config = found.config.optim.batch_size, found.where, found.config
    if found.compiled is None or found.advice is None:
        return found
    assert isinstance(picked, int)
    limit, guess = where.limit * (1 - EXACT_RESERVE), found.advice.largest_batch
    totals = {picked: found.compiled.total_bytes}
    for _ in range(2):
        if guess < 1 or guess in totals:
            break
        optim = replace(config.optim, batch_size=guess, global_batch_size=None)
        totals[guess] = _compile(replace(config, optim=optim), where, "full").total_bytes
        each = max(1.0, (totals[guess] - totals[picked]) / (guess - picked))
        guess = min(picked + int((limit - totals[picked]) // each), MOST_TOKENS // config.data.max_length)
    most = max((rows for rows, total in totals.items() if total <= limit), default=0)
    return replace(found, advice=replace(found.advice, largest_batch=most))


def by_compiler_alone(config: TrainConfig, where: Where, rows: Rows) -> Plan:
    """The plan of a model that the formula does not know, with the batch size that was given.

    Raises:
        CompilerUnavailable: there is no compiler either.
    """
    compiled = _compile(config, where, "full")
    return _with(Plan(where, config, (), False, 0, {}, "compiler", None, None, None, None), compiled, None, rows)


def _compile(config: TrainConfig, where: Where, effort: Effort) -> Compiled:
    from tpu_kit.compiler import CompilerUnavailable, compile_step

    if where.topology is None:
        raise CompilerUnavailable(f"the compiler knows no topology of {where.name}")
    return compile_step(config, where.topology, num_replicas=where.replicas, effort=effort)


def _with(found: Plan, compiled: Compiled, shape: Shape | None, rows: Rows) -> Plan:
    where, config, time = found.where, found.config, found.time
    if compiled.flops is not None and compiled.bytes_accessed is not None:
        own = work(config, shape, batch_arithmetic(config, where.replicas)) if shape else Work(0.0, 0.0, 0.0)
        # Splash attention reports no FLOPs, so that the formula's count may be the larger one.
        done = Work(max(compiled.flops, own.flops), compiled.bytes_accessed, own.reduced)
        time = step_time(done, where.chip, where.replicas)
    # The pick may be another one than the formula's, with other rows in an update.
    updates, unknown = count_updates(config, where.replicas, rows)
    saved = found.checkpoint_bytes or 0.0
    limit = where.limit * (1 - EXACT_RESERVE)
    fits = compiled.fits and compiled.total_bytes <= limit
    if shape is not None:
        # What would fit besides is the formula's to say, put right by what the compiler says of the pick.
        formula = estimate(config, num_replicas=where.replicas, shape=shape, chip=where.chip)
        held = compiled.argument_bytes or 0
        scale = (formula.total_bytes - formula.argument_bytes) / max(1, compiled.total_bytes - held)
        room = formula.argument_bytes + (limit - held) * scale
        found = replace(
            found,
            advice=advise(config, shape, where, room, fits),
            inference=inference(config, shape, where.limit * (1 - RESERVE)),
        )
    return replace(
        found, updates=updates, unknown=unknown, fits=fits, time=time, peak_bytes=compiled.total_bytes,
        run=time_plan(where.chip, where.chips, where.name, time.seconds, updates, saved) if time else None,
        parts=_parts(compiled), source="compiler", compiled=compiled,
    )  # fmt: skip


def _parts(compiled: Compiled) -> dict[str, int]:
    arguments, code = compiled.argument_bytes or 0, compiled.code_bytes or 0
    new = (compiled.output_bytes or 0) - (compiled.aliased_bytes or 0)
    rest = compiled.total_bytes - arguments - code - new  # of what does not fit, the compiler does not say it
    return {"arguments": arguments, "temporaries": rest, "code": code, "unaliased_outputs": new}
