"""Formats plans as the text of `python -m tpu_kit plan`, and picks a plan for notebook 3."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tpu_kit.config import text_tables
from tpu_kit.config.loader import TrainConfig, batch_arithmetic
from tpu_kit.machine.chips import GIB, KAGGLE_HOURS_PER_SESSION, KAGGLE_HOURS_PER_WEEK, MIB
from tpu_kit.machine.slices import find_slice
from tpu_kit.machine.upload_rate import upload_rate
from tpu_kit.model.families.input_work import inputs_of
from tpu_kit.planning.cost import factors, input_work, link_seconds, step_time
from tpu_kit.planning.memory.argument_memory import item_bytes, padded
from tpu_kit.planning.mesh_choice import largest_models
from tpu_kit.planning.planner import Plan
from tpu_kit.planning.program_peaks import program_rows
from tpu_kit.planning.run_cost import BESIDE_COMPILING, SPOT_HOURS_BETWEEN_INTERRUPTIONS
from tpu_kit.torch_tpu.environment import NAME
from tpu_kit.training.losses.rollout_programs import program_count, rollout_of
from tpu_kit.xla.splash_blocks import PARTIAL_BYTES, partial_bytes

MOST_SETTINGS = 8
_FACTORS = ("batch_size", "replicas", "gradient_accumulation")


def plan_row(one: Plan) -> dict[str, object]:
    """Returns a row of the table of slices by column: whether the run fits, memory, settings, time and cost.

    The columns are "slice", "chips" (a number), "fits" ("yes" or "no"), "GiB of a device", "rows x replicas x passes",
    "remat", "s/step", "tokens/s", "hours", "cost" and "by". Time and cost are "-" if the run does not fit, or if they
    are not known.
    """
    values = one.to_dict()
    fitting = values if one.fits else dict.fromkeys(("step_seconds", "tokens_per_second", "run_hours"))
    return {
        "slice": _name(one), "chips": one.where.chips, "fits": "yes" if one.fits else "no",
        "GiB of a device": f"{one.peak_bytes / GIB:.2f} of {one.where.limit / GIB:.2f}",
        "rows x replicas x passes": " x ".join(str(values[name]) for name in _FACTORS),
        "remat": values["remat"], "s/step": _number(fitting["step_seconds"], ".3f"),
        "tokens/s": _number(fitting["tokens_per_second"], ",.0f"), "hours": _number(fitting["run_hours"], ".3g"),
        "cost": _cost(one) if one.fits else "-", "by": one.source,
    }  # fmt: skip


def _name(one: Plan) -> str:
    """Returns the name of a plan's slice, with the free service that offers it in brackets."""
    return f"{one.where.name} ({one.where.service})" if one.where.service else one.where.name


def _cost(one: Plan) -> str:
    """Returns dollars, with the price on spot machines in brackets, or the terms of a free service; "-" if unknown."""
    if one.where.service == "Kaggle":
        return f"free, {KAGGLE_HOURS_PER_WEEK} h a week in sessions of {KAGGLE_HOURS_PER_SESSION} h"
    if one.where.service:
        return "free, in sessions that may end at any time"
    if one.run.on_demand is None:
        return "-"
    return f"${one.run.on_demand:.2f}" + ("" if one.run.spot is None else f" (${one.run.spot:.2f} on spot)")


def format_plans(config: TrainConfig, plans: Sequence[Plan], given: Sequence[str] = (), details: bool = False) -> str:
    """Formats the plans: the verdict on the plan that `pick` returns, and a table of the slices.

    If that plan fits, the command to train with is added, otherwise the changes that save memory.

    Args:
        config: the run.
        plans: the plan of each slice.
        given: the file and the settings of the command line, which the printed command repeats; the plan's batch_size,
            remat and mesh replace settings of these names.
        details: whether to add memory, settings, time and advice for each slice.
    """
    best = pick(plans)
    lines = [_verdict(best), "", text_tables.to_text([plan_row(one) for one in plans], ">")]
    if best.fits:
        chosen: dict[str, object] = {"batch_size": best.update.batch_size, "remat": best.config.optim.remat}
        chosen |= {"mesh": best.where.mesh} if best.where.mesh else {}
        if config.launch.device_type == NAME and best.where.replicas > 1:  # one chip trains by default
            chosen["num_replicas"] = best.where.replicas
        left = [text for text in given if text.partition("=")[0].rpartition(".")[2] not in chosen]
        command = shlex.join([*left, *(f"{name}={value}" for name, value in chosen.items())])
        train = f"To train there: python -m tpu_kit {best.config.recipe} {command}"
        lines[1:1] = [*_inputs(best), train, *_upload(best)]
    else:
        lines += ["", *(line.removeprefix("  ") for line in _changes(best))]
    for reason, known in {one.unknown: one.updates is not None for one in plans if one.unknown}.items():
        lines.append(f"{'Hours and cost' if known else 'No hours and no cost'}: {reason}.")
    if not details:
        return "\n".join([*lines, "", "Memory by part, other settings, limits and assumptions: --details"])
    lines += ["", f"model {config.model.name}, {config.data.max_length} tokens a row"]
    for one in plans:
        lines += ["", *_details(one)]
    assumed = ", ".join(f"{name} {value:g}" for name, value in factors().items())
    return "\n".join([*lines, "", f"Time is estimated{_measured(plans)}; assumed: {assumed}."])


_BYTES = {"gguf-q8_0": 34 / 32, "adapter": 4.0}  # for each parameter in an export without 16-bit weights


def _upload(best: Plan) -> list[str]:
    """Returns a line with the size and upload time of the files for `hub.model_id`; empty without it."""
    if best.config.hub.model_id is None:
        return []
    rate = upload_rate()
    counts = {"adapter": best.memory.trained, "gguf-lora": best.memory.trained}
    sizes = {name: counts.get(name, best.shape.parameters) * _BYTES.get(name, 2.0) for name in best.config.hub_formats}
    if best.config.hub.strategy == "checkpoint":
        sizes["each checkpoint"] = best.checkpoint_bytes
    each = (
        f"{name} {size / MIB:,.0f} MiB in {size / rate.bytes_per_second / 60:,.1f} minutes"
        for name, size in sizes.items()
    )
    return [
        f"To push to {best.config.hub.model_id}: {', '.join(each)}, at {rate.bytes_per_second / 1e6:,.3g} MB/s "
        f"({rate.source})"
    ]


def _inputs(best: Plan) -> list[str]:
    """Returns a line with the tokens, memory and time of a non-text input such as a picture; empty for text."""
    config, inputs = best.config, inputs_of(best.config)
    if inputs is None:
        return []
    size = item_bytes(config.model.base_dtype)
    time = step_time(input_work(config, inputs, 1), best.where.chip)
    batch = sum(padded((1, *shape), dtype.itemsize, free=True) for shape, dtype in inputs.columns.values())
    memory = (batch + inputs.work_bytes(1, size)) / inputs.room
    return [
        f"{inputs.kind} takes {inputs.tokens} tokens at most, {memory / MIB:,.1f} MiB for its features, and "
        f"{1e3 * time.device:,.2g} ms in addition to its tokens; a row has room for {inputs.room}"
    ]


def _verdict(best: Plan) -> str:
    """Returns the first line of a report: the run, whether it fits the slice, and its memory, duration and cost."""
    run, config = best.run, best.config
    trained = f"LoRA r={config.lora.r}" if config.lora.r else "all weights"
    what = f"{config.model.name}, {trained}, rows of {config.data.max_length:,} tokens"
    memory = f"{best.peak_bytes / GIB:.2f} of {best.where.limit / GIB:.2f} GiB"
    if not best.fits:
        return f"{what}: does not fit {_name(best)}: {memory}"
    hours = "" if run.run_hours is None else f", {_duration(run.run_hours)}, {_cost(best)}"
    return f"{what}: fits {_name(best)}: {memory}{hours}"


def _duration(hours: float) -> str:
    """Formats hours as hours, or as minutes below 2 hours."""
    return f"{hours:.1f} hours" if hours >= 2 else f"{hours * 60:.0f} minutes" if hours >= 0.05 else "3 minutes at most"


def largest(names: Sequence[str]) -> str:
    """Formats a table of `largest_models` for each name; raises ValueError as `find_slice`."""
    lines = []
    for where in [find_slice(name, None) for name in names]:
        title = f"{where.name}: the largest models by formula, LoRA r=16, rows of 1,024 tokens"
        lines += [title, text_tables.to_text(largest_models(where))]
    return "\n".join(lines)


def _measured(plans: Sequence[Plan]) -> str:
    """Returns the part of a sentence that names the slices whose times are scaled by measurements."""
    names = [one.where.name for one in plans if one.time.measured is not None]
    return f", scaled by measurements of this machine for {', '.join(names)}" if names else " and was not measured"


def _details(one: Plan) -> list[str]:
    """Returns the lines of `plan --details` for a slice."""
    spread = f"a mesh of {one.where.devices} devices" if one.where.mesh else f"{one.where.replicas} replicas"
    lines = [f"{one.where.name}: {spread}, by the {one.source}, {one.free:.0%} kept free"]
    if one.where.mesh:
        tables_of = [tensor_rows(one, least=MIB), collective_rows(one)]
        blocks = [mesh_lines(one), *(text_tables.to_text(rows).splitlines() for rows in tables_of if rows)]
        lines += [f"  {line}" for block in blocks for line in block]
    lines += [f"  {name:<18} {size / GIB:8.3f} GiB" for name, size in one.parts.items() if size >= 2**19]
    if one.several:
        lines += [f"  {line}" for line in rollout_lines(one)]
    lines += [f"  {line}" for line in (*_backward_pass(one), *_blocks(one))]
    known = one.where.calibration
    if known.memory is not None:
        lines.append(
            f"  peak {one.peak_bytes / GIB:.2f} GiB predicted, {known.memory * one.peak_bytes / GIB:.2f} as measured on"
            f" this machine, of {one.where.bytes / GIB:.2f}"
        )
    if one.time.measured is not None:
        lines.append(f"  step {one.time.predicted:.3f} s predicted, {one.time.seconds:.3f} as measured on this machine")
    for setting in one.settings[:MOST_SETTINGS] if len(one.settings) > 1 else ():
        text = f"batch_size={setting.config.optim.batch_size} remat={setting.config.optim.remat}"
        lines.append(f"  {text}: {setting.peak_bytes / GIB:.2f} GiB, {setting.time.seconds:.3f} s")
    lines.append(
        f"  on spot save every {one.run.save_interval_seconds / 60:.0f} min ({one.run.save_steps} updates): sqrt(2 x "
        f"{one.run.save_seconds:.1f} s a checkpoint x {SPOT_HOURS_BETWEEN_INTERRUPTIONS:g} h between interruptions), "
        "Young 1974; the mean time is an assumption"
    )
    lines += [f"  {sentence}" for sentence in one.run.sessions.values()]
    took = f"{one.compiling / 60:.1f} min on this machine"
    if not one.compiled:
        took = f"{one.compiling / 60:.1f} min by formula, and {BESIDE_COMPILING / 60:g} for all else are an assumption"
    lines.append(f"  each start compiles the {'programs' if one.several else 'step'}: {took}")
    if one.updates is not None:
        lines.append(f"  {one.updates:,} updates")
    return [*lines, f"  checkpoint {one.checkpoint_bytes / MIB:,.0f} MiB", *limits(one)]


def _backward_pass(one: Plan) -> list[str]:
    """Returns a line about attention's unfused backward pass; empty if the kernel is fused or not used."""
    config, parts = one.config, one.where.mesh.model * one.where.mesh.context if one.where.mesh else 1
    if one.where.device_type != "tpu" or config.model.attention == "sdpa":
        return []
    size, length, rows = item_bytes(config.model.base_dtype), config.data.max_length, one.update.batch_size
    written = max(partial_bytes(rows, each.heads / parts, length, each.head_dim, size) for each in one.shape.kinds)
    if written <= PARTIAL_BYTES:
        return []
    return [
        f"attention's backward pass is two kernels: a fused one would write {written / GIB:.2f} GiB, a gradient of the "
        "queries for each block of keys"
    ]


def _blocks(one: Plan) -> list[str]:
    """Describes the inputs that remat=blocks keeps and the layers that it runs again; empty for other values."""
    if one.config.optim.remat != "blocks":
        return []
    shape, loops = one.shape, one.shape.blocks
    kept, again = sum(loop.turns for loop in loops), max(loop.period for loop in loops)
    return [
        f"remat=blocks keeps {kept} inputs of blocks and {again} inputs of layers in a block, in place of "
        f"{shape.layers}; {shape.recomputed_twice * shape.layers:.0f} of {shape.layers} layers run forward once more"
    ]


def rollout_lines(one: Plan) -> list[str]:
    """Returns lines for a run that samples: a device's memory by program, and the time of a rollout and an update.

    The plan of another run raises AssertionError.
    """
    replicas = 1 if one.where.mesh else one.where.replicas
    rollout = rollout_of(one.config, replicas)
    assert rollout is not None, "a run that samples"
    made, names = program_rows(one.memory.programs, one.compiled), ("formula_bytes", "compiler_bytes")
    rows: list[dict[str, object]] = [
        {"program": row["program"], **{f"GiB by {name[:-6]}": _number(row[name] and row[name] / GIB) for name in names},
         "fits": "yes" if row[names[bool(one.compiled)]] <= one.where.limit * (1 - one.free) else "no"}
        for row in made
    ]  # fmt: skip
    count = program_count(one.config, replicas)
    each = ", ".join(f"{number} {name}" for name, number in count.items() if number)
    repeats = rollout.updates
    share = f" (for {repeats} updates)" if repeats > 1 else ""
    return [
        *text_tables.to_text(rows, ">").splitlines(), f"up to {sum(count.values())} programs: {each}",
        f"a rollout of {'the mesh' if one.where.mesh else 'a replica'} reads {rollout.prompts} prompts of up to "
        f"{rollout.widths[-1]} tokens and decodes {rollout.samples} completions of up to {rollout.tokens}, in a cache "
        f"of {rollout.slots:,} slots",
        f"at the longest prompts and completions: rollout {one.time.rollout * repeats:.2f} s{share}, update "
        f"{one.time.predicted - one.time.rollout:.2f} s in {one.update.gradient_accumulation} passes",
    ]  # fmt: skip


def tensor_rows(one: Plan, least: int = 0) -> list[dict[str, object]]:
    """Returns a table of the tensors on the mesh, largest shard first; the last row sums shards below `least` bytes.

    The columns are "tensor", "shape", "spec", "MiB a device" and "share" of the whole, as texts; empty without a mesh.
    """
    rows: list[dict[str, object]] = []
    for row in (placed for placed in one.tensors if placed.bytes >= least):
        spec = ", ".join("+".join([axes] if isinstance(axes, str) else axes or ["-"]) for axes in row.spec)
        share = f"1/{round(row.whole / row.bytes)}" if row.bytes < row.whole else "whole"
        rows.append({"tensor": row.name, "shape": " x ".join(map(str, row.shape)), "spec": spec,
                     "MiB a device": f"{row.bytes / MIB:,.1f}", "share": share})  # fmt: skip
    if small := [placed.bytes for placed in one.tensors if placed.bytes < least]:
        rows.append({"tensor": f"{len(small)} smaller tensors", "shape": "", "spec": "",
                     "MiB a device": f"{sum(small) / MIB:,.1f}", "share": ""})  # fmt: skip
    return rows


def collective_rows(one: Plan) -> list[dict[str, object]]:
    """Returns a table of a step's collectives on the mesh, a row per kind; empty without a mesh.

    The columns are "collective", "count" (a number), "GiB sent a device", "synchronous" (its share of the bytes) and "s
    predicted".
    """
    return [
        {"collective": each.kind, "count": each.count, "GiB sent a device": f"{each.moved / GIB:.3f}",
         "synchronous": f"{each.synchronous / max(1.0, each.moved):.0%}",
         "s predicted": f"{link_seconds([each], one.where.chip):.4f}"}
        for each in one.collectives
    ]  # fmt: skip


def mesh_lines(one: Plan) -> list[str]:
    """Describes the devices of the mesh, and the time of collectives and computation; empty without a mesh."""
    if one.where.mesh is None:
        return []
    links, busy = link_seconds(one.collectives, one.where.chip), one.time.device
    return [
        f"mesh {one.where.mesh}: devices {one.where.mesh.layout()}; rows divided by {one.where.replicas}",
        f"collectives take {links:.2f} s and computation {busy:.2f} s; {one.time.all_reduce:.2f} s of collectives are "
        f"not hidden, {one.time.all_reduce / one.time.predicted:.0%} of a step",
    ]


def limits(one: Plan) -> list[str]:
    """Returns lines: changes that save memory, only if the run does not fit; then two lines on the unchanged run.

    They tell the largest batch_size, max_length and rank with which it fits, varied one at a time; and the memory and
    the longest context of generation.
    """
    lines, advice, config = [] if one.fits else _changes(one), one.advice, one.config
    rank = "" if advice.largest_rank is None else f", the largest rank {advice.largest_rank}"
    kept = f"batch_size={one.update.batch_size}, max_length={config.data.max_length}, r={config.lora.r}, "
    kept += f"remat={config.optim.remat}, base_dtype={config.model.base_dtype}"
    most = f"the largest batch_size that fits is {advice.largest_batch}, the"
    if one.compiled:
        most = f"the largest batch_size that was compiled and fits is {advice.largest_batch or 'none'}; by formula, the"
    lines.append(f"  varied one at a time (else {kept}): {most} longest max_length {advice.longest_sequence}{rank}")
    found = one.inference
    lines.append(
        f"  generation: {found.weight_bytes / GIB:.2f} GiB of weights, {found.cache_bytes_per_token / 2**10:,.1f} "
        f"KiB of KV cache a token; the longest context of one row is {found.longest_context:,} tokens"
    )
    return lines


def _changes(one: Plan) -> list[str]:
    """Returns indented lines with the changes for a run that does not fit, or that no change makes it fit."""
    knobs = one.advice.knobs
    if knobs and knobs[-1].fits:
        head = "  changes by formula, the least harmful first, each added to the changes before it:"
    elif knobs:
        sizes = f"{knobs[-1].peak_bytes / GIB:.2f} GiB, of {one.where.limit / GIB:.2f}"
        head = f"  {len(knobs)} changes together are not enough by formula; with them the run takes {sizes}:"
    else:
        head = "  no change makes it fit by formula:"
    return [head, *(f"    {text}" for text in str(one.advice).split("; "))]


def _number(value: float | None, form: str = ".2f") -> str:
    """Formats a number; "-" for None."""
    return "-" if value is None else format(value, form)


def pick(plans: Sequence[Plan]) -> Plan:
    """Picks the cheapest plan that fits (free slices first), without prices the fastest; if none fits, the nearest."""
    fitting = [one for one in plans if one.fits]
    if not fitting:
        return min(plans, key=lambda one: one.peak_bytes / one.where.limit)
    return min(fitting, key=lambda one: (_dollars(one), one.time.seconds))


def why(plans: Sequence[Plan]) -> str:
    """Explains the plan that `pick` returns: memory, hours and cost, the fastest plan if it is another, and `limits`.

    If no plan fits, the text has only the name of this plan's slice and the `limits` of this plan.
    """
    best = pick(plans)
    run = best.run
    if not best.fits:
        return "\n".join([f"The run fits no slice; nearest is {best.where.name}.", *limits(best)])
    left = (best.where.limit - best.peak_bytes) / GIB
    lines = [f"{best.where.name}: {best.peak_bytes / GIB:.2f} of {best.where.limit / GIB:.2f} GiB, {left:.2f} left."]
    if run.on_demand is not None:
        spot = "" if run.spot is None else f", ${run.spot:.2f} on spot, interruptions included"
        lines.append(f"The cheapest that fits: {run.run_hours:.3g} hours, ${run.on_demand:.2f} on demand{spot}.")
        fastest = min((one for one in plans if one.fits), key=lambda one: one.run.run_hours or float("inf"))
        if fastest is not best and fastest.run.run_hours is not None:
            cost = _number(fastest.run.on_demand)
            lines.append(f"The fastest is {fastest.where.name}: {fastest.run.run_hours:.3g} hours, ${cost} on demand.")
    elif run.run_hours is not None:
        lines.append(
            f"It takes {run.run_hours:.3g} hours; {_cost(best) if best.where.service else 'its price is not known'}."
        )
    elif best.unknown:
        lines.append(f"No hours and no cost, because the number of updates is not known: {best.unknown}.")
    lines += [*run.sessions.values(), f"On spot save every {run.save_interval_seconds / 60:.0f} minutes."]
    return "\n".join([*lines, *(line.strip() for line in limits(best))])


def next_parameters(plan: Plan) -> str:
    """Formats a plan as lines `name = value` for a notebook's parameters cell; a comment if it does not fit."""
    if not plan.fits:
        return f"# the run fits no slice; nearest is {plan.where.name}: make the changes above and plan again"
    optim, run, batch = plan.config.optim, plan.run, batch_arithmetic(plan.config, plan.where.replicas)
    values: dict[str, object] = {
        "name": plan.config.model.name, "max_length": plan.config.data.max_length, "batch_size": optim.batch_size,
        "global_batch_size": None if plan.config.free_passes else batch.global_batch_size,  # passes are free
        "mesh": str(plan.where.mesh) if plan.where.mesh else None, "remat": optim.remat, "max_steps": optim.max_steps,
        "save_minutes": max(1, round(run.save_interval_seconds / 60)),
    }  # fmt: skip
    return "\n".join(f"{name} = {value!r}" for name, value in values.items() if value is not None)


def _dollars(one: Plan) -> float:
    """Returns dollars of the run or, if its length is unknown, of 1e6 tokens; 0 if free, infinite without a price."""
    if one.where.service:
        return 0.0
    if one.run.on_demand is not None:
        return one.run.on_demand
    price = one.where.chip.price
    return price.on_demand * one.where.chips / 3600 / one.speed * 1e6 if price else float("inf")
