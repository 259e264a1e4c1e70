"""Profiles a run: measured in a short run of its real step, or predicted from its compiled program.

from tpu_kit import load_config, profile
print(profile(load_config("embedded-cot")))              # on this machine
print(profile(load_config("my.yaml"), chip="v5e"))       # of a TPU that is not here
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import BatchPlan, ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.runtime import MemoryBudget
from tpu_kit.hardware.chips import Chip
from tpu_kit.models.architecture import Shape, read_shape
from tpu_kit.planning.compile_check import Compiled, compile_step
from tpu_kit.planning.cost import HBM_EFFICIENCY, MXU_EFFICIENCY, Work, step_time, work
from tpu_kit.planning.planner import plan
from tpu_kit.profiling import report
from tpu_kit.profiling.advice import Advice, advise, changed, pass_work, settled
from tpu_kit.profiling.recorder import LEAST_BYTES, SHORT, WARM_UP, Recording, record, window
from tpu_kit.profiling.timeline import BUCKETS, Trace, read_trace
from tpu_kit.recipes.sft import check_run
from tpu_kit.storage.output_location import make_output_folder, resolve_output_dir

MOST_STEPS = 200


@dataclass(frozen=True)
class Cost:
    """What an operation costs in a step.

    Attributes:
        name: of the operation.
        source: file and line or scope; empty where it is not known.
        kind: of the work.
        seconds: of a step on one device.
        roofline: time at the chip's peaks over `seconds`; None where either is not known.
    """

    name: str
    source: str
    kind: str
    seconds: float
    roofline: float | None = None


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time and the memory of a step go.

    Attributes:
        config: the run, with a number for every "auto".
        device: what it ran on, or would.
        room: the memory of a replica; None where it is not known.
        shape: of the model; None where the formula does not know it.
        replicas: shards of the batch.
        chips: number of chips; of replicas without a known chip.
        split: seconds of a step, by `timeline.BUCKETS`.
        costs: of the operations, the largest first.
        memory: bytes of a device at the peak, by class.
        recordings: of the replicas; empty if predicted.
        trace: of rank 0; None if predicted.
        compiled: the program, if predicted.
        prepare_seconds: time to prepare the data.
        folder: with the trace; None if predicted.
    """

    config: TrainConfig
    device: str
    room: MemoryBudget | None
    shape: Shape | None
    replicas: int
    chips: int
    split: Mapping[str, float]
    costs: tuple[Cost, ...]
    memory: Mapping[str, int]
    recordings: tuple[Recording, ...] = ()
    trace: Trace | None = None
    compiled: Compiled | None = None
    prepare_seconds: float = 0.0
    folder: Path | None = None

    @property
    def chip(self) -> Chip | None:
        """The chip, where it is known."""
        return self.room.chip if self.room else None

    @property
    def batch(self) -> BatchPlan:
        """The batch of an update."""
        return batch_arithmetic(self.config, self.replicas)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.split.values())

    @property
    def first(self) -> Recording:
        """The recording of the first replica; an empty one if the profile is predicted."""
        return self.recordings[0] if self.recordings else Recording(0, "tpu")

    def share(self, bucket: str) -> float:
        """The share of a step in a bucket."""
        return self.split[bucket] / self.seconds

    @cached_property
    def products(self) -> float:
        """The share of matrix products in the time of the operations."""
        times = [(one.kind == "matrix product", one.seconds) for one in self.costs if one.kind != "collective"]
        return sum(taken for is_product, taken in times if is_product) / (sum(taken for _, taken in times) or 1.0)

    @cached_property
    def update(self) -> float:
        """The share of a step after its backward passes; 0 where the trace does not tell."""
        return self.trace.update() if self.trace else 0.0

    @cached_property
    def per_call(self) -> float:
        """The share of the passes' device compute that does not depend on the size of tensors, by steps of short rows.

        It is 0 where these were not timed.
        """
        first, busy = self.first, self.split["device compute"] * (1 - self.update)
        if not first.short_seconds or not busy or self.shape is None:
            return 0.0
        short = changed(self.config, {"data.max_length": self.config.data.max_length // SHORT})
        grows = (first.seconds - first.short_seconds) / (1 - pass_work(self, short)[1])
        return min(1.0, max(0.0, 1 - grows / busy))

    @cached_property
    def advice(self) -> list[Advice]:
        """What to change, the largest gain first."""
        return advise(self)

    def __str__(self) -> str:
        return report.to_text(self)

    def _repr_html_(self) -> str:
        return report.to_html(self)


def profile(config: TrainConfig, steps: int = 20, chip: str | None = None) -> Profile:
    """Profiles a run.

    Args:
        config: the run.
        steps: number of steps to trace.
        chip: a TPU to predict for, as `slices.find_slice` takes it; None runs the step on this machine.

    Returns:
        The profile. If it was measured, `<output_dir>/profile` has the trace, report.html and the recordings.

    Raises:
        ConfigError: `steps` is not 1 to 200.
        ValueError: as `train`; there is no room for a trace; the run was over before the window.
        CompilerUnavailable: with `chip`, where the TPU compiler is not installed.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ConfigError([f"steps={steps}: must be 1 to {MOST_STEPS}, so that the trace stays readable"])
    return _predicted(config, chip) if chip else _measured(config, steps)


def _measured(config: TrainConfig, steps: int) -> Profile:
    config = resolve_output_dir(replace(config, checkpoint=replace(config.checkpoint, resume="never")))
    folder = make_output_folder(config) / "profile"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if (free := shutil.disk_usage(folder).free) < LEAST_BYTES:
        raise ValueError(
            f"no room for a trace: {folder} has {free >> 20} MiB free, and a trace may take {LEAST_BYTES >> 20}; set "
            "output_dir to another disk"
        )
    began = time.monotonic()
    _, outlook = check_run(config)
    prepared = time.monotonic() - began
    launch(record, _short(outlook.config, folder, steps), sharded=True)
    files = sorted(folder.glob("recording-*.json"))
    recordings = tuple(Recording(**json.loads(file.read_text())) for file in files)
    if not recordings or not all(one.steps for one in recordings):
        raise ValueError(
            f"the run was over before the window of {steps} steps, which begins after {WARM_UP}: it ended early, as "
            "told above; profile it again"
        )
    trace = read_trace(folder, steps)
    room, shape = outlook.room, outlook.shape
    replicas = room.replicas if room else len(recordings)
    found = Profile(
        config=settled(outlook.config, replicas), room=room, shape=shape,
        device=room.name if room else recordings[0].device_type,
        replicas=replicas, chips=room.where.chips if room and room.where else replicas,
        split=trace.split(recordings[0].seconds),
        costs=_traced(trace, room.chip if room else None), memory=outlook.memory.parts if outlook.memory else {},
        recordings=recordings, trace=trace, prepare_seconds=prepared, folder=folder,
    )  # fmt: skip
    (folder / "report.html").write_text(report.page(found))
    return found


def _short(config: TrainConfig, folder: Path, steps: int) -> TrainConfig:
    """The run with the steps of the window alone: no evaluation, no trackers, and its own folder."""
    return replace(
        config, output_dir=str(folder),
        optim=replace(config.optim, max_steps=window(steps), eval_steps=None, early_stop_patience=None),
        checkpoint=replace(config.checkpoint, save_steps=10**7, save_minutes=None, budget_minutes=None),
        tracking=replace(config.tracking, wandb="off", tensorboard=False, generate_rows=0, eval_generate_rows=0),
    )  # fmt: skip


def _traced(trace: Trace, chip: Chip | None) -> tuple[Cost, ...]:
    devices = len({one.device for one in trace.events if one.device}) or 1
    rows: dict[tuple[str, str, str], list[float]] = {}
    for one in trace.events:
        if one.kind != "phase":
            row = rows.setdefault((re.sub(r"(\.\d+|\.clone)+$", "", one.name), one.source, one.kind), [0.0, 0.0, 0.0])
            for place, value in enumerate((one.end - one.start, one.flops, one.bytes)):
                row[place] += value / devices / trace.steps
    found = [
        Cost(*key, spent, _ideal(flops, moved, chip) / spent if chip and flops + moved else None)
        for key, (spent, flops, moved) in rows.items()
        if spent
    ]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _ideal(flops: float, moved: float, chip: Chip, mxu: float = 1.0, hbm: float = 1.0) -> float:
    """Seconds of some work at shares of the peaks of one device."""
    peak, bandwidth = (chip.bf16_flops or 1e30) / chip.devices_per_chip, chip.hbm_bandwidth / chip.devices_per_chip
    return max(flops / (peak * mxu), moved / (bandwidth * hbm))


def _predicted(config: TrainConfig, chip: str) -> Profile:
    (found,) = plan(config, [chip])
    config, where = found.config, found.where
    if where.topology is None:
        raise ValueError(f"the TPU compiler cannot compile for {where.name}; name another chip, such as v5e")
    compiled = compile_step(config, where.topology, num_replicas=where.devices)
    if not compiled.fits or compiled.flops is None or compiled.hbm_bytes is None:
        raise ValueError(f"there is no step to profile: {compiled}. `plan {chip}` tells what to change")
    shape = read_shape(config.model)
    own = work(config, shape, batch_arithmetic(config, where.replicas))
    moved = tuple(one.transfer for one in compiled.collectives) if where.mesh else ()
    done = Work(compiled.flops, compiled.hbm_bytes, own.reduced, moved)
    predicted = step_time(done, where.chip, where.replicas, where.calibration.time)
    busy = max(predicted.compute, predicted.memory)
    split = dict.fromkeys(BUCKETS, 0.0) | {
        "device compute": busy, "exposed collectives": predicted.all_reduce, "host tracing": predicted.host,
    }  # fmt: skip
    costs = [
        Cost(one.operation.rpartition("xla__scan/call/")[2] or one.kind, one.source, one.kind, seconds,
             _ideal(one.flops, one.bytes, where.chip) / seconds)
        for one in compiled.operations
        if (seconds := _ideal(one.flops, one.bytes, where.chip, MXU_EFFICIENCY, HBM_EFFICIENCY))
    ]  # fmt: skip
    room = MemoryBudget(where.name, "tpu", where.replicas, where.limit, where.free, where)
    memory: dict[str, Any] = {
        "arguments": compiled.argument_bytes, "temporaries": compiled.temporary_bytes, "code": compiled.code_bytes,
    }  # fmt: skip
    return Profile(
        config=settled(config, where.replicas), device=where.name, room=room, shape=shape,
        replicas=where.replicas, chips=where.chips,
        split=split, costs=tuple(sorted(costs, key=lambda one: -one.seconds)), memory=memory, compiled=compiled,
    )  # fmt: skip
