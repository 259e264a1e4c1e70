"""Proposes the next setting that fits when memory runs out; the training stays the same, so the run can resume."""

from __future__ import annotations

import re
from typing import Any

from tpu_kit.config.loader import TrainConfig, batch_arithmetic, flatten
from tpu_kit.config.resuming import changes
from tpu_kit.distributed.launch import LaunchError
from tpu_kit.machine.chips import GIB
from tpu_kit.planning.ladder import differences, options, same_training, told
from tpu_kit.planning.preflight import Preflight
from tpu_kit.planning.run_on_slice import can_block
from tpu_kit.training.checkpoint.manager import list_checkpoints
from tpu_kit.xla.hlo import parse_out_of_memory

SMALLER = 0.8
"""Largest predicted peak of the next setting, as a share of the failed setting's, if the real peak is not known."""

_DEVICE = re.compile(
    r"RESOURCE_EXHAUSTED:.*(memory|allocat|reserve)|CUDA out of memory|\bOutOfMemoryError\b", re.IGNORECASE
)
_KERNEL = "memory space vmem"  # a kernel needs more vector memory than the chip has: a smaller batch does not help
_HOST = re.compile(
    r"\bMemoryError\b|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|bad_alloc|was ended by SIGKILL"
)


class OutOfMemory(LaunchError):
    """A run had too little memory.

    Attributes:
        overrides: new values of parameters, by name without the section, with which the run takes less memory and
            continues (`next_setting`); empty if none are known, or if a host of TPUs or GPUs lacks memory.
    """

    def __init__(self, message: str, overrides: dict[str, Any], rank: int | None = None, traceback: str = "") -> None:
        super().__init__(message, rank, traceback)
        self.overrides = overrides


def out_of_memory(error: BaseException, outlook: Preflight) -> OutOfMemory | None:
    """Returns the error to raise in place of an out-of-memory error; None for other errors.

    Lack of a TPU's VMEM is another error. If a host of TPUs or GPUs lacks memory, `OutOfMemory.overrides` is empty.
    Otherwise it has `next_setting`, and resume="auto" if checkpoint.resume is "never" and a checkpoint of this training
    exists.
    """
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
            "The host ran out of memory, not the device: batch settings do not help. Use fewer replicas "
            f"(launch.num_replicas){'' if outlook.config.free_passes else keeps}, so that the run can resume; or "
            "a host with more memory"
        )
        return OutOfMemory(f"{text.rstrip()}\n\n{advice}", {}, *ending)
    used = parse_out_of_memory(text)
    overrides, why = next_setting(outlook, used["used_bytes"] if used else None)
    saved = _saved(outlook.config) if overrides else None
    if saved is not None and outlook.config.checkpoint.resume == "never":  # the next run must resume
        overrides["resume"] = "auto"
    advice = _advice(overrides, why, saved) if overrides else _another(outlook)
    return OutOfMemory(f"{text.rstrip()}\n\n{advice}", overrides, *ending)


def suggestion(outlook: Preflight) -> str:
    """Returns a warning, with changes that save memory, for a run predicted not to fit; empty for other runs.

    The changes are `next_setting` or, if it has none, changes for a new training. A run whose memory is not known has
    no warning.
    """
    if outlook.fits is not False:
        return ""
    overrides, why = next_setting(outlook)
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    more = f"The same training takes less memory with {pairs}. {why}" if overrides else _another(outlook)
    return f"warning: the run may run out of memory. {more}"


def next_setting(outlook: Preflight, used: int | None = None) -> tuple[dict[str, Any], str]:
    """Chooses parameters to change so that the same training takes less memory.

    If the device's speed is known, it takes the fastest candidate of `same_training` that fits, or the candidate with
    the least memory if none fits. Otherwise it takes the first that fits, or the first of all. Without a prediction for
    the run, it takes the first.

    Args:
        outlook: the prediction for the run before its launch.
        used: bytes of a device that the failed run requested, which correct the predictions; None if not known.

    Returns:
        New values by name without the section, and a text about the prediction; ({}, "") if no change helps.
    """
    config, room, setting = outlook.config, outlook.room, outlook.setting
    replicas, blocks = room.replicas if room else config.launch.num_replicas or 1, False
    if setting is not None and (setting.where.device_type == "tpu" or config.optim.batch_size == 1):
        blocks = can_block(config, setting.shape)  # on other devices fewer rows come first
    candidates = list(same_training(config, replicas, blocks))
    if not candidates:
        return {}, ""
    if setting is None:
        return _changes(config, candidates[0]), "Its memory cannot be predicted here"
    where, before = setting.where, setting.memory.total_bytes
    used = used or (setting.peak_bytes if setting.compiled else None)
    factor = max(1.0, used / before) if used else 1.0
    bound = where.budget / factor if used else min(where.budget, SMALLER * before)
    settings, ranks = [setting.of(one) for one in candidates], where.chip.bf16_flops is not None
    if ranks and min(one.peak_bytes for one in settings) >= before:  # such as a rollout's peak, which has no passes
        return {}, ""
    fitting = [one for one in settings if one.peak_bytes <= bound]
    if not ranks:  # the device's speed is not known
        best = next(iter(fitting), settings[0])
    elif fitting:
        best = min(fitting, key=lambda one: one.time.seconds)
    else:
        best = min(settings, key=lambda one: one.peak_bytes)
    why = f"Predicted memory: {best.peak_bytes * factor / GIB:.2f} of {where.limit / GIB:.2f} GiB, before the change "
    why += f"{before / GIB:.2f}" + (f"; {used / GIB:.2f} were requested" if used else "")
    return _changes(config, best.config), why if fitting else f"It may still be too much. {why}"


def _changes(config: TrainConfig, best: TrainConfig) -> dict[str, Any]:
    """Returns the values of `best` that differ from `config`, by parameter name without the section."""
    return {name.rpartition(".")[2]: value for name, value in differences(config, best).items()}


def _saved(config: TrainConfig) -> int | None:
    """Returns the step of the newest checkpoint; None if it is missing, cannot be read, or is of another training."""
    try:
        found = list_checkpoints(config.checkpoints_place)[0]
        stored = found[-1].document("config") if found else None
    except (OSError, ValueError):  # an object store does not answer, or a file is damaged; the run raises this, too
        return None
    if stored is None:
        return None
    return None if changes(flatten(stored), config.flat_values())[1] else found[-1].step


def _another(outlook: Preflight) -> str:
    """Returns the advice if no setting of the same training helps: changes for a new training, or to run `plan`."""
    text = "No other setting of the same training takes less memory"
    if outlook.setting is None or not (changes := told([*options(outlook.setting)])):
        return f"{text}; `python -m tpu_kit plan` shows the memory of other settings"
    return f"{text}. A new training takes less, with these changes one after the other: {'; '.join(changes)}"


def _advice(overrides: dict[str, Any], why: str, saved: int | None) -> str:
    """Describes how to start again with `overrides`; `saved` is the step to resume from, None for a new start."""
    goes_on = "it starts anew, because nothing was saved yet" if saved is None else f"the run resumes from step {saved}"
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    lines = "\n".join(f"  {name} = {value!r}" for name, value in overrides.items())
    return (
        f"Out of memory. The next setting that fits is\n  {pairs}\n{why}. An update keeps its rows, and "
        f"{goes_on}.\nAppend these settings to the same command; in a notebook, add to the parameters cell\n{lines}\n"
        "and run it and the cells after it again"
    )
