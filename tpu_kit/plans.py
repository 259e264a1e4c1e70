"""`python -m tpu_kit plan`: reads the arguments, prints the plans."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tpu_kit.advice import reserve
from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.planner import EXACT_RESERVE, Plan, plan
from tpu_kit.roofline import factors
from tpu_kit.timeplan import SPOT_HOURS_BETWEEN_INTERRUPTIONS

GIB = 2**30
MOST_SETTINGS = 8

USAGE = (
    "Exit codes: 0 the plans are printed (of what does not fit, too), 2 bad arguments.\n\n"
    "  --chip NAME[,NAME...]  chips (v5e), slices (v5litepod-8) or topologies (v5e:2x4) to plan for; default v5e\n"
    "  --exact                ask the real TPU compiler; a minute or more for each chip\n"
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
            f"{values['step_seconds']:.3f}", f"{values['tokens_per_second']:,.0f}",
            _number(values["run_hours"]), _number(cost["on_demand"]), _number(cost["spot"]),
        ))  # fmt: skip
    wide = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(size) for cell, size in zip(row, wide, strict=True)) for row in rows]
    lines += ["", f"model {config.model.name}, {config.data.max_length} tokens a row"]
    for one in plans:
        lines += ["", *_details(one)]
    assumed = ", ".join(f"{name} {value:g}" for name, value in factors().items())
    lines += ["", f"Time is a roofline and was not measured; assumed: {assumed}."]
    if any(one.run.run_hours is None for one in plans):
        lines.append("Hours need optim.max_steps: how many rows the data has is not known here.")
    return "\n".join(lines)


def _details(one: Plan) -> list[str]:
    free = reserve(one.config) if one.source == "formula" else EXACT_RESERVE
    lines = [f"{one.where.name}: {one.where.replicas} replicas, by the {one.source}, {free:.0%} kept free"]
    lines += [f"  {name:<18} {size / GIB:8.3f} GiB" for name, size in one.parts.items() if size >= 2**19]
    for setting in one.settings[:MOST_SETTINGS] if len(one.settings) > 1 else ():
        optim = setting.config.optim
        lines.append(
            f"  batch_size={optim.batch_size} remat={optim.remat}: {setting.peak / GIB:.2f} GiB, "
            f"{setting.time.seconds:.3f} s"
        )
    run = one.run
    lines.append(
        f"  on spot save every {run.save_interval_seconds / 60:.0f} min ({run.save_steps} updates): sqrt(2 x "
        f"{run.save_seconds:.1f} s a checkpoint x {SPOT_HOURS_BETWEEN_INTERRUPTIONS:g} h between interruptions), Young "
        "1974; the mean time is an assumption"
    )
    if one.checkpoint_bytes is not None:
        lines.append(f"  checkpoint {one.checkpoint_bytes / 2**20:,.0f} MiB")
    lines += [f"  {sentence}" for sentence in run.sessions.values()]
    if one.advice is None:
        return lines
    if one.advice.knobs:
        lines.append("  does not fit; in the order of least harm, each on top of those before:")
        lines += [f"    {text}" for text in str(one.advice).split("; ")]
    else:
        rank = "" if one.advice.largest_rank is None else f", the largest rank {one.advice.largest_rank}"
        lines.append(
            f"  one by one: the largest batch_size that fits is {one.advice.largest_batch}, the longest max_length "
            f"{one.advice.longest_sequence}{rank}"
        )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
