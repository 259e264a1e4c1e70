"""Proposes the next setting that fits when memory runs out: of the same training, so that the run can resume."""

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
"""Share of the failed setting's predicted peak that the next one may have, where its real peak is not known: chosen."""

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
            f"(launch.num_replicas){'' if outlook.config.free_passes else keeps}, so that the run goes on; or "
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
    """The warning before a run that is predicted not to fit; empty for any other."""
    if outlook.fits is not False:
        return ""
    overrides, why = next_setting(outlook)
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    more = f"The same training takes less with {pairs}. {why}" if overrides else _another(outlook)
    return f"warning: it may run out of memory. {more}"


def next_setting(outlook: Preflight, used: int | None = None) -> tuple[dict[str, Any], str]:
    """Chooses the parameters to change, by name, and describes the prediction; no parameters if none helps.

    It takes the fastest setting that fits if the device's speed is known, else the first of `_candidates`; if none is
    predicted to fit, the one that takes least. `used` bytes, if they are known, correct the predictions.
    """
    config, room, setting = outlook.config, outlook.room, outlook.setting
    replicas, blocks = room.replicas if room else config.launch.num_replicas or 1, False
    if setting is not None and (setting.where.device_type == "tpu" or config.optim.batch_size == 1):
        blocks = can_block(config, setting.shape)  # elsewhere fewer rows come first
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
    if ranks and min(one.peak_bytes for one in settings) >= before:  # such as that of samples, which have no passes
        return {}, ""
    fitting = [one for one in settings if one.peak_bytes <= bound]
    if not ranks:  # the speed is not known
        best = next(iter(fitting), settings[0])
    elif fitting:
        best = min(fitting, key=lambda one: one.time.seconds)
    else:
        best = min(settings, key=lambda one: one.peak_bytes)
    why = f"Predicted is {best.peak_bytes * factor / GIB:.2f} of {where.limit / GIB:.2f} GiB; before it was "
    why += f"{before / GIB:.2f}" + (f", and {used / GIB:.2f} were wanted" if used else "")
    return _changes(config, best.config), why if fitting else f"It may still be too much. {why}"


def _changes(config: TrainConfig, best: TrainConfig) -> dict[str, Any]:
    return {name.rpartition(".")[2]: value for name, value in differences(config, best).items()}


def _saved(config: TrainConfig) -> int | None:
    """The step of the checkpoint that the run resumes from; None if it has saved nothing yet."""
    try:
        found = list_checkpoints(config.checkpoints_place)[0]
        stored = found[-1].document("config") if found else None
    except (OSError, ValueError):  # an object store does not answer, or a file is damaged: the run raises it too
        return None
    if stored is None:
        return None
    return None if changes(flatten(stored), config.flat_values())[1] else found[-1].step


def _another(outlook: Preflight) -> str:
    """Names the changes that make another training, where no other setting of the same one helps."""
    text = "No setting of the same training helps any more"
    if outlook.setting is None or not (changes := told([*options(outlook.setting)])):
        return f"{text}; `python -m tpu_kit plan` says how much another one takes"
    return f"{text}. Another one takes less, with each of these on top of those before: {'; '.join(changes)}"


def _advice(overrides: dict[str, Any], why: str, saved: int | None) -> str:
    goes_on = "it begins anew, as nothing was saved yet" if saved is None else f"the run goes on from step {saved}"
    pairs = " ".join(f"{name}={value}" for name, value in overrides.items())
    lines = "\n".join(f"  {name} = {value!r}" for name, value in overrides.items())
    return (
        f"Out of memory. The next setting that fits is\n  {pairs}\n{why}. An update has the same rows as before, and "
        f"{goes_on}.\nRun the same command with that at its end; in a notebook add to the parameters cell\n{lines}\n"
        "and run it again, with the cells after it"
    )
