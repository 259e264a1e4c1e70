"""Profiles a run: measures a short run of its real step, or predicts from the compiled program."""

from __future__ import annotations

import json
import re
import shutil
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

from tpu_kit.config.hub import HubConfig
from tpu_kit.config.loader import ConfigError, TrainConfig, as_trained
from tpu_kit.distributed.launch import launch
from tpu_kit.extras.profile.recorder import WARM_UP, Recording, record, window
from tpu_kit.extras.profile.report import Cost, Profile
from tpu_kit.extras.profile.timeline import BUCKETS, Trace, read_trace
from tpu_kit.machine.storage.output_location import make_output_folder, resolve_output_dir
from tpu_kit.planning.compiler.compile_check import compile_step
from tpu_kit.planning.cost import timed, work
from tpu_kit.planning.planner import plan
from tpu_kit.recipes.run_data import for_replicas
from tpu_kit.recipes.run_plan import plan_run
from tpu_kit.torch_tpu.environment import check_command

MOST_STEPS = 200


def profile(config: TrainConfig, steps: int = 20, chip: str | None = None) -> Profile:
    """Profiles a run, measured on this machine or predicted for a TPU.

    Args:
        config: the run.
        steps: number of steps to trace, 1 to 200.
        chip: a TPU to predict for, in the form of `slices.find_slice`; None runs the step on this machine.

    Returns:
        The profile. If it was measured, `<output_dir>/profile` has the trace, profile.png and the recordings; its
        former contents are deleted.

    Raises:
        ConfigError: `steps` is out of range.
        ValueError: as `train`; the run ended before the traced steps; or the step does not fit `chip`.
        CompilerUnavailable: `chip` is given, but the TPU compiler is not installed.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError([f"steps={steps}: must be 1 to {MOST_STEPS}, so that the trace stays readable"])
    config = as_trained(config)
    return _predicted(config, chip) if chip else _measured(config, steps)


def _measured(config: TrainConfig, steps: int) -> Profile:
    """Runs the step in every replica without checkpoints, and reads the trace of `steps` steps.

    Replaces the folder `<output_dir>/profile`. Raises ValueError as `profile`, also if the run ended too early.
    """
    fresh = replace(config.checkpoint, resume="never", source=None)
    config = resolve_output_dir(replace(config, checkpoint=fresh, hub=HubConfig()))  # it pushes nothing
    folder = make_output_folder(config) / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plan, prepared = plan_run(_short(config, folder, steps))
    check_command("profile", plan.backend.device_type)
    with for_replicas(plan, prepared) as data:
        launch(partial(record, plan=plan, data=data), plan.config, sharded=True, backend=plan.backend)
    recordings = tuple(Recording(**json.loads(file.read_text())) for file in sorted(folder.glob("recording-*.json")))
    if not recordings or not all(one.steps for one in recordings):
        raise ValueError(
            f"the run ended before the {steps} traced steps, which begin after step {WARM_UP}: the messages above say "
            "why; profile it again"
        )
    trace, room = read_trace(folder, steps), plan.outlook.room if plan.outlook else None
    result = Profile(
        config=plan.config, device=room.name if room else recordings[0].device_type,
        replicas=room.replicas if room else len(recordings),
        split=trace.split(), costs=_costs(trace), recordings=recordings, trace=trace,
        folder=folder,
    )  # fmt: skip
    (folder / "profile.png").write_bytes(result._repr_png_())
    return result


def _short(config: TrainConfig, folder: Path, steps: int) -> TrainConfig:
    """Returns `config` for `window(steps)` updates into `folder`, without evaluations, trackers and checkpoints."""
    return replace(
        config, output_dir=str(folder),
        optim=replace(config.optim, max_steps=window(steps), eval_steps=None, early_stop_patience=None),
        checkpoint=replace(config.checkpoint, save_steps=10**7, save_minutes=None, budget_minutes=None),
        tracking=replace(config.tracking, wandb="off", tensorboard=False, generate_rows=0, eval_generate_rows=0),
    )  # fmt: skip


def _costs(trace: Trace) -> tuple[Cost, ...]:
    """Returns the seconds per step and device of operations, added by name (without number), source and kind."""
    devices = len({one.device for one in trace.events if one.device}) or 1
    spent: dict[tuple[str, str, str], float] = defaultdict(float)
    for one in trace.events:
        if one.kind != "phase":
            name = re.sub(r"(\.\d+|\.clone)+$", "", one.name)
            spent[name, one.source, one.kind] += (one.end - one.start) / devices / trace.steps
    return tuple(Cost(*key, seconds) for key, seconds in spent.items())


def _predicted(config: TrainConfig, chip: str) -> Profile:
    """Compiles the step for a chip, and returns the compiler's predicted times.

    `chip` is as in `slices.find_slice`. Raises ValueError if the compiler does not know the chip or the step does not
    fit, CompilerUnavailable if the compiler is not installed.
    """
    (planned,) = plan(config, [chip])
    config, where = planned.config, planned.where
    if where.topology is None:
        raise ValueError(f"the TPU compiler cannot compile for {where.name}; name another chip, such as v5e")
    part = "accumulate" if config.on_policy else "step"
    compiled = compile_step(config, where.topology, num_replicas=where.devices, part=part)
    if not compiled.fits:
        raise ValueError(f"there is no step to profile: {compiled}. `plan {chip}` advises a change")
    moved = compiled.collectives if where.mesh else work(config, planned.shape, planned.update).collectives
    time = timed(sum(compiled.estimated.values()), 0.0, moved, where.chip, where.calibration.time)
    split = dict.fromkeys(BUCKETS, 0.0) | {
        "device compute": time.device, "exposed collectives": time.all_reduce,
        "host tracing": time.host,
    }  # fmt: skip
    costs = tuple(
        Cost(one.operation.rpartition("xla__scan/call/")[2] or one.kind, one.source, one.kind, one.seconds)
        for one in compiled.operations
    )
    return Profile(
        config=config, device=where.name, replicas=where.replicas, split=split, costs=costs, compiled=compiled
    )
