"""Proposes the next setting that fits when memory runs out: of the same training, so that the run can resume."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tpu_kit.config.loader import BatchPlan, TrainConfig, batch_arithmetic, flatten
from tpu_kit.config.resuming import ANEW, changes
from tpu_kit.distributed.launch import LaunchError
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.batch_choice import newest
from tpu_kit.planning.planner import Remat
from tpu_kit.planning.preflight import Preflight
from tpu_kit.planning.run_on_slice import can_block
from tpu_kit.xla.hlo import parse_out_of_memory

SMALLER = 0.8
"""Share of the failed setting's predicted peak that the next one may have, where its real peak is not known: chosen."""

_DEVICE = re.compile(
    r"RESOURCE_EXHAUSTED:.*(memory|allocat|reserve)|CUDA out of memory|\bOutOfMemoryError\b", re.IGNORECASE
)
_KERNEL = "memory space vmem"  # a kernel needs more vector memory than the chip has: a smaller batch does not help
_HOST = re.compile(
    r"\bMemoryError\b|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|bad_alloc|was ended by SIGKILL"
)
_NO_MORE = (
    "No setting of the batch helps any more. Another training would take less: a smaller data.max_length, lora.r or "
    "model, model.base_dtype=int8, or with grpo rl.prompts_per_update; `python -m tpu_kit plan` says how much. It "
    f"cannot go on from a checkpoint of this run: give it {ANEW}"
)
_NAMES = ("batch_size", "global_batch_size", "gradient_accumulation", "remat", "loss_chunk", "mlp_tile")


class OutOfMemory(LaunchError):
    """A run had too little memory.

    Attributes:
        overrides: the parameters to change, by name, so that the run is predicted to fit; empty if none are known.
    """

    def __init__(self, message: str, overrides: dict[str, Any], rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message, rank, traceback)
        self.overrides = overrides


def out_of_memory(error: BaseException, outlook: Preflight) -> OutOfMemory | None:
    """Makes the error to raise instead of one of the launch about memory; None for any other error."""
    text = str(error) if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
    device, host = _DEVICE.search(text), _HOST.search(text)
    if _KERNEL in text or not (device or host):
        return None
    ending = getattr(error, "rank", None), getattr(error, "traceback", "")
    own = outlook.room is not None and outlook.room.device_type in ("tpu", "cuda")
    if own and not device:
        assert outlook.room is not None
        rows = batch_arithmetic(outlook.config, outlook.room.replicas).global_batch_size
        keeps = f" with global_batch_size={rows} gradient_accumulation=1, which keeps the rows of an update"
        advice = (
            "The host ran out of memory, not the device: other settings of the batch do not help. Use fewer replicas "
            f"(launch.num_replicas){'' if outlook.config.on_policy else keeps}, so that the run goes on; or "
            "a host with more memory"
        )
        return OutOfMemory(f"{text.rstrip()}\n\n{advice}", {}, *ending)
    used = parse_out_of_memory(text)
    overrides, why = next_setting(outlook, used["used_bytes"] if used else None)
    saved = _saved(outlook.config) if overrides else None
    if saved is not None and outlook.config.checkpoint.resume == "never":  # the next run must resume
        overrides["resume"] = "auto"
    return OutOfMemory(f"{text.rstrip()}\n\n{_advice(overrides, why, saved)}", overrides, *ending)


def suggestion(outlook: Preflight) -> str:
    """The warning before a run that is predicted not to fit; empty for any other."""
    if outlook.fits is not False:
        return ""
    overrides, why = next_setting(outlook)
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    more = f"The same training takes less with {pairs}. {why}" if overrides else _NO_MORE
    return f"warning: it may run out of memory. {more}"


def next_setting(outlook: Preflight, used: int | None = None) -> tuple[dict[str, Any], str]:
    """Chooses the parameters to change, by name, and describes the prediction; no parameters if none helps.

    It takes the fastest setting that fits if the device's speed is known, else the first of `_candidates`; if none is
    predicted to fit, the one that takes least. `used` bytes, if they are known, correct the predictions.
    """
    config, room, setting = outlook.config, outlook.room, outlook.setting
    replicas = room.replicas if room else config.launch.num_replicas or 1
    batch = batch_arithmetic(config, replicas)
    blocks = False
    if setting is not None and (setting.where.device_type == "tpu" or batch.batch_size == 1):  # else fewer rows first
        blocks = can_block(config, setting.shape)
    candidates = list(_candidates(config, batch, blocks))
    if not candidates:
        return {}, ""
    if setting is None:
        return _changes(config, candidates[0]), "Its memory cannot be predicted here"
    where, before = setting.where, setting.peak_bytes
    factor = max(1.0, used / before) if used else 1.0
    bound = where.budget / factor if used else min(where.budget, SMALLER * before)
    settings = [replace(setting, config=one) for one in candidates]
    if config.on_policy and min(one.peak_bytes for one in settings) >= before:  # a rollout has no passes
        return {}, ""
    fitting = [one for one in settings if one.peak_bytes <= bound]
    if where.chip.bf16_flops is None:  # the formula is made for TPUs, and cannot rank
        best = next(iter(fitting), settings[0])
    elif fitting:
        best = min(fitting, key=lambda one: one.time.seconds)
    else:
        best = min(settings, key=lambda one: one.peak_bytes)
    why = f"Predicted is {best.peak_bytes * factor / GIB:.2f} of {where.limit / GIB:.2f} GiB; before it was "
    why += f"{before / GIB:.2f}" + (f", and {used / GIB:.2f} were wanted" if used else "")
    return _changes(config, best.config), why if fitting else f"It may still be too much. {why}"


def _candidates(config: TrainConfig, batch: BatchPlan, blocks: bool) -> Iterator[TrainConfig]:
    """Settings of the same training that take less memory, in the order of least harm; with `blocks` also in blocks."""
    learns = config.on_policy  # from all that was sampled, in any number of passes
    whole = None if learns else batch.global_batch_size
    optim = replace(config.optim, global_batch_size=whole, gradient_accumulation=1)
    each = batch.global_batch_size // batch.num_replicas
    # Batch growth rounds the number of passes down, so that other passes may make other updates.
    most = 0 if optim.batch_growth_steps is not None else batch.batch_size - 1
    smaller = [n for n in range(most, 0, -1) if learns or each % n == 0]
    last: list[Remat] = ["blocks"] if blocks or optim.remat == "blocks" else []
    remats: list[Remat] = ["none", "outputs", "full", *last]
    for remat in remats[remats.index(optim.remat) :]:
        for rows in smaller if remat == config.optim.remat else [batch.batch_size, *smaller]:
            yield replace(config, optim=replace(optim, batch_size=rows, remat=remat))
    chunk, tile = min(optim.loss_chunk, 64), min(optim.mlp_tile or 512, 512)
    if (chunk, tile) != (optim.loss_chunk, optim.mlp_tile):
        rows = (smaller or [batch.batch_size])[-1]
        yield replace(config, optim=replace(optim, batch_size=rows, remat=remats[-1], loss_chunk=chunk, mlp_tile=tile))


def _changes(config: TrainConfig, best: TrainConfig) -> dict[str, Any]:
    changed = {name: getattr(best.optim, name) for name in _NAMES}
    return {name: value for name, value in changed.items() if value != getattr(config.optim, name)}


def _saved(config: TrainConfig) -> int | None:
    """The step of the checkpoint that the run resumes from; None if it has saved nothing yet."""
    if found := newest(config):
        checkpoint, stored = found
        return None if changes(flatten(stored), config.flat_values())[1] else checkpoint.step
    return None


def _advice(overrides: dict[str, Any], why: str, saved: int | None) -> str:
    if not overrides:
        return _NO_MORE
    goes_on = "it begins anew, as nothing was saved yet" if saved is None else f"the run goes on from step {saved}"
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    lines = "\n".join(f"  {name} = {value!r}" for name, value in overrides.items())
    return (
        f"Out of memory. The next setting that fits is\n  {pairs}\n{why}. An update has the same rows as before, and "
        f"{goes_on}.\nRun the same command with that at its end; in a notebook add to the parameters cell\n{lines}\n"
        "and run it again, with the cells after it"
    )
