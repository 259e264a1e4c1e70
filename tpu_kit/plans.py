"""`python -m tpu_kit plan`: reads the arguments, prints the plans."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tpu_kit.config import ConfigError, TrainConfig, batch_arithmetic, load_config
from tpu_kit.planner import Plan, plan
from tpu_kit.roofline import factors
from tpu_kit.timeplan import SPOT_HOURS_BETWEEN_INTERRUPTIONS

GIB = 2**30
MOST_SETTINGS = 8

USAGE = (
    "Exit codes: 0 the plans are printed (of what does not fit, too), 2 bad arguments.\n\n"
    "  --chip NAME[,NAME...]  chips (v5e), slices (v5litepod-8) or topologies (v5e:2x4) to plan for; default v5e\n"
    "  --exact                ask the real TPU compiler; some minutes for each chip\n"
    "  --json                 print a list with one object per chip, and nothing else\n\n"
    "batch_size and remat are kept where they are given and chosen where not. The rest is as for `train`, whose\n"
    "--help lists the parameters. A folder with only a config.json is a model."
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        ConfigError: the arguments or the configuration are wrong.
    """
    chips, exact, as_json, rest = _read(arguments)
    paths = [one for one in rest if "=" not in one]
    if len(paths) > 1:
        raise ConfigError([f"{', '.join(paths)}: one configuration file at most; the others are key=value"])
    config = load_config(paths[0] if paths else None, [one for one in rest if one not in paths])
    try:
        found = plan(config, chips, exact)
    except ConfigError:
        raise
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for one in found:
        if one.note:
            print(f"{one.where.name}: {one.note}", file=sys.stderr)
    print(json.dumps([one.to_dict() for one in found], indent=2) if as_json else report(config, found))
    return 0


def _read(arguments: Sequence[str]) -> tuple[list[str], bool, bool, list[str]]:
    chips: list[str] = []
    exact = as_json = False
    rest: list[str] = []
    left = list(arguments)
    while left:
        one = left.pop(0)
        if one == "--chip" or one.startswith("--chip="):
            value = one.partition("=")[2] if "=" in one else (left.pop(0) if left else "")
            names = [name.strip() for name in value.split(",") if name.strip()]
            if not names or names[0].startswith("--"):
                raise ConfigError(["--chip: name at least one chip after it, such as --chip v5e,v6e"])
            chips += names
        elif one == "--exact":
            exact = True
        elif one == "--json":
            as_json = True
        elif one.startswith("--"):
            raise ConfigError([f"{one}: no such option; there are --chip, --exact, --json"])
        else:
            rest.append(one)
    return chips or ["v5e"], exact, as_json, rest


def report(config: TrainConfig, plans: Sequence[Plan]) -> str:
    """The plans as text: a table over the slices, then for each its memory, its settings, its time and advice."""
    head = ("slice", "fits", "peak GiB", "of", "rows", "passes", "remat", "s/step", "tokens/s", "hours", "$", "$ spot")
    rows: list[tuple[str, ...]] = [head]
    for one in plans:
        values = one.to_dict()
        cost = values["cost"]
        rows.append((
            one.where.name, "yes" if one.fits else "NO", f"{one.peak_bytes / GIB:.2f}", f"{one.where.limit / GIB:.2f}",
            str(values["batch_size"]), str(values["gradient_accumulation"]), values["remat"],
            _number(values["step_seconds"], ".3f"), _number(values["tokens_per_second"], ",.0f"),
            _number(values["run_hours"], ".3g"), _number(cost["on_demand"]), _number(cost["spot"]),
        ))  # fmt: skip
    wide = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in rows]
    lines += ["", f"model {config.model.name}, {config.data.max_length} tokens a row"]
    for one in plans:
        lines += ["", *_details(one)]
    assumed = ", ".join(f"{name} {value:g}" for name, value in factors().items())
    lines += ["", f"Time is a roofline and was not measured; assumed: {assumed}."]
    unknown = {one.unknown: None for one in plans if one.updates is None}
    lines += [f"No hours and no cost, as the number of updates is not known: {reason}." for reason in unknown]
    return "\n".join(lines)


def _details(one: Plan) -> list[str]:
    lines = [f"{one.where.name}: {one.where.replicas} replicas, by the {one.source}, {one.free:.0%} kept free"]
    lines += [f"  {name:<18} {size / GIB:8.3f} GiB" for name, size in one.parts.items() if size >= 2**19]
    for setting in one.settings[:MOST_SETTINGS] if len(one.settings) > 1 else ():
        optim = setting.config.optim
        lines.append(
            f"  batch_size={optim.batch_size} remat={optim.remat}: {setting.peak / GIB:.2f} GiB, "
            f"{setting.time.seconds:.3f} s"
        )
    if run := one.run:
        lines.append(
            f"  on spot save every {run.save_interval_seconds / 60:.0f} min ({run.save_steps} updates): sqrt(2 x "
            f"{run.save_seconds:.1f} s a checkpoint x {SPOT_HOURS_BETWEEN_INTERRUPTIONS:g} h between interruptions), "
            "Young 1974; the mean time is an assumption"
        )
        lines += [f"  {sentence}" for sentence in run.sessions.values()]
    if one.updates is not None:
        lines.append(f"  {one.updates:,} updates")
    if one.checkpoint_bytes is not None:
        lines.append(f"  checkpoint {one.checkpoint_bytes / 2**20:,.0f} MiB")
    if one.advice is not None:
        lines += limits(one)
    return lines


def limits(one: Plan) -> list[str]:
    """How far the model gets on a slice, training and answering; and where the run does not fit, what to change."""
    lines, advice = [], one.advice
    assert advice is not None
    if not one.fits:
        lines.append("  does not fit; in the order of least harm, each on top of those before:")
        lines += [f"    {text}" for text in str(advice).split("; ")]
    rank = "" if advice.largest_rank is None else f", the largest rank {advice.largest_rank}"
    lines.append(
        f"  one by one: the largest batch_size that fits is {advice.largest_batch}, the longest max_length "
        f"{advice.longest_sequence}{rank}"
    )
    if found := one.inference:
        lines.append(
            f"  answering: {found.weight_bytes / GIB:.2f} GiB of weights, {found.cache_bytes_per_token / 2**10:,.1f} "
            f"KiB of cache a token; the longest context of one row is {found.longest_context:,} tokens"
        )
    return lines


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def pick(plans: Sequence[Plan]) -> Plan:
    """The plan to take: of those that fit the cheapest, without prices the fastest; else the one nearest to fitting."""
    fitting = [one for one in plans if one.fits]
    if not fitting:
        return min(plans, key=lambda one: one.peak_bytes / one.where.limit)
    return min(fitting, key=lambda one: (_dollars(one) or float("inf"), one.time.seconds if one.time else float("inf")))


def why(plans: Sequence[Plan]) -> str:
    """Which plan `pick` takes and why, how far one can go with it, and how to go on."""
    best = pick(plans)
    if not best.fits:
        return "\n".join([f"Nothing fits as it is; nearest is {best.where.name}.", *limits(best)])
    left = (best.where.limit - best.peak_bytes) / GIB
    lines = [f"{best.where.name}: {best.peak_bytes / GIB:.2f} of {best.where.limit / GIB:.2f} GiB, {left:.2f} left."]
    if best.run is not None and best.run.on_demand is not None:
        lines.append(
            f"The cheapest that fits: {best.run.run_hours:.3g} hours, ${best.run.on_demand:.2f} on demand"
            + ("." if best.run.spot is None else f", ${best.run.spot:.2f} on spot, interruptions included.")
        )
        fastest = min((one for one in plans if one.fits and one.run), key=lambda one: one.run.run_hours or float("inf"))  # type: ignore[union-attr]
        if fastest is not best and fastest.run and fastest.run.run_hours is not None:
            cost = _number(fastest.run.on_demand)
            lines.append(f"The fastest is {fastest.where.name}: {fastest.run.run_hours:.3g} hours, ${cost} on demand.")
    elif best.run is not None and best.run.run_hours is not None:
        lines.append(f"It takes {best.run.run_hours:.3g} hours; its price is not known.")
    elif best.unknown:
        lines.append(f"No hours and no cost, as the number of updates is not known: {best.unknown}.")
    if best.run is not None:
        lines += best.run.sessions.values()
        lines.append(f"On spot save every {best.run.save_interval_seconds / 60:.0f} minutes.")
    return "\n".join([*lines, *(line.strip() for line in limits(best))])


def next_parameters(plan: Plan) -> str:
    """The pick as lines for a notebook's parameters cell."""
    optim, run = plan.config.optim, plan.run
    values: dict[str, object] = {
        "name": plan.config.model.name, "max_length": plan.config.data.max_length, "batch_size": optim.batch_size,
        "global_batch_size": batch_arithmetic(plan.config, plan.where.replicas).global_batch_size,
        "remat": optim.remat, "max_steps": optim.max_steps,
        "save_minutes": max(1, round(run.save_interval_seconds / 60)) if run else None,
    }  # fmt: skip
    return "\n".join(f"{name} = {value!r}" for name, value in values.items() if value is not None)


def _dollars(one: Plan) -> float | None:
    """For the run, or where its length is not known, for a million tokens."""
    if one.run is not None and one.run.on_demand is not None:
        return one.run.on_demand
    price, rate = one.where.chip.price, one.to_dict()["tokens_per_second"]
    return None if price is None or not rate else price.on_demand * one.where.chips / 3600 / rate * 1e6
