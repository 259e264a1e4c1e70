"""Computes the updates, hours and dollars of a run, and the interval between checkpoints on spot machines.

Rows are counted if the data is on this machine; without a tokenizer they are estimated.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tpu_kit.config.loader import ConfigError, TrainConfig, batch_arithmetic
from tpu_kit.config.sections.data import GENERATED
from tpu_kit.machine.chips import (
    FREE_SLICES,
    KAGGLE_HOURS_PER_SESSION,
    KAGGLE_HOURS_PER_WEEK,
    KAGGLE_OUTPUT_BYTES,
    MIB,
    Chip,
)

if TYPE_CHECKING:
    from tpu_kit.model.shape import Shape

MOST_BYTES = 32 * MIB
"""Largest data of which the rows are counted: tokenizing more takes longer than about ten seconds."""
CHARACTERS_PER_TOKEN = 4
"""For English text: an assumption for models whose tokenizer is not on this machine."""
SPOT_HOURS_BETWEEN_INTERRUPTIONS = 6.0
"""Mean time between interruptions of a spot TPU: an assumption, because Google publishes none. Young's interval is
proportional to its square root."""
SAVE_BYTES_PER_SECOND = 200e6
"""Speed of writing a checkpoint from the device to a disk or bucket: an assumption."""
SAVE_SECONDS = 2.0
"""Time of an empty checkpoint: an assumption."""
BESIDE_COMPILING = 120.0
"""Seconds from an interruption to the first new step, without compiling: an assumption."""
COMPILING, LAYER_COMPILING = 45.0, 20.0
"""Seconds to compile a step, and additional seconds for each layer of a pass in the program; measured with 0.5B and 1B
models on two shared cores."""
SAMPLING_COMPILING = 1.8
"""Factor for a run that samples: prefill and decode programs take a fifth of a step each."""


@dataclass(frozen=True)
class Count:
    """A number of packed rows, prompts or updates (None: not known); `reason` has its assumption, or why it is None."""

    count: int | None
    reason: str = ""


def count_rows(config: TrainConfig) -> Count:
    """Counts the packed training rows of an epoch, or the prompts of a run that samples, by preparing the data.

    If the tokenizer is not on this machine, packed rows are estimated, and `reason` says so. The count is None, with
    the reason, if the data is not on this machine, has more than `MOST_BYTES`, or is refused.
    """
    if config.data.source == "synthetic":
        from tpu_kit.data.rows.sources import synthetic_rows

        return Count(synthetic_rows(config.data.split))
    if reason := _costly(config):
        return Count(None, reason)
    if not _has_tokenizer(config):
        return _count_by_characters(config)
    # Imported here, because they load torch, transformers and datasets.
    from tpu_kit.data.prepare import prepare, units_of
    from tpu_kit.model.weights.source import load_tokenizer

    data = config.data
    elsewhere = data.eval_source or data.eval_split or data.source in GENERATED
    data = replace(data, eval_source=None, eval_split=None, eval_rows=0 if elsewhere else data.eval_rows)
    try:
        prepared = prepare(data, load_tokenizer(config.model), **units_of(config))
        return Count(len(prepared.tasks.numbers) if prepared.tasks else len(prepared.train))
    except ValueError as error:  # the run raises it, too
        return Count(None, str(error))


def filled_batch(config: TrainConfig, replicas: int, rows: int | None) -> tuple[TrainConfig, list[str]]:
    """Lowers the default optim.batch_size if `rows` packed rows do not fill an update; returns the run and notes.

    Nothing changes if the rows fill an update, `rows` is None, or the run samples; the notes are then empty, else one
    text. Raises ConfigError if the rows do not fill an update, and the user set the batch or its passes, or rows <
    replicas. `replicas` counts the batch's shards on a mesh.
    """
    batch = batch_arithmetic(config, replicas)
    if rows is None or config.free_passes or rows >= batch.global_batch_size:
        return config, []
    from tpu_kit.data.batching import too_few_rows  # it loads torch

    given = {"optim.batch_size", "optim.global_batch_size", "optim.gradient_accumulation"} & set(config.sources)
    if given or rows < replicas:
        raise ConfigError([too_few_rows(rows, batch)])
    fewer = rows // replicas
    note = f"optim.batch_size lowered from {batch.batch_size} to {fewer}: the data has {rows} packed rows"
    return replace(config, optim=replace(config.optim, batch_size=fewer)), [note]


def count_updates(config: TrainConfig, replicas: int, rows: Count) -> Count:
    """Counts the updates of a run with a numeric batch size: `optim.max_steps`, or by `rows` if it is not set.

    The count is None, with the reason, if the rows are too few or not known. `replicas` counts the batch's shards on a
    mesh.
    """
    if config.optim.max_steps is not None:
        return Count(config.optim.max_steps)
    if rows.count is None:
        return rows
    from tpu_kit.training.losses.sampled_updates import planned_updates

    batch = batch_arithmetic(config, replicas)
    try:
        return Count(sum(1 for _ in planned_updates(rows.count, batch, config)), rows.reason)
    except ValueError as error:
        return Count(None, str(error))


def _costly(config: TrainConfig) -> str:
    """Returns why the rows are not counted; empty if they can be counted."""
    size, known = 0, "; set optim.max_steps"
    for source in (str(one.source) for one in config.data.by_source if one.source not in GENERATED):
        if "://" in source:
            return f"data.source={source} is in an object store, which a plan does not read{known}"
        files = [Path(name) for name in glob.glob(source)]
        files = [file for path in files for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
        if not files:
            return f"data.source={source} is not on this machine{known}"
        if (size := size + sum(file.stat().st_size for file in files)) > MOST_BYTES:
            return f"data.source={source} has {size / MIB:.0f} MiB, too much to tokenize for a plan{known}"
    return ""


def _count_by_characters(config: TrainConfig) -> Count:
    """Estimates the packed rows or, if the run samples or does not pack, counts the rows, without a tokenizer."""
    from tpu_kit.data.held_out import held_out_rows
    from tpu_kit.data.rows.records import LOCATION
    from tpu_kit.data.rows.sources import load_rows

    data = config.data
    try:
        sources = [load_rows(str(one.source), one.split, skip=True) for one in data.by_source]
    except ValueError as error:  # the run raises it too
        return Count(None, str(error))
    elsewhere, every = data.eval_source or data.eval_split or data.source in GENERATED, sum(map(len, sources))
    left = 1.0 if elsewhere else max(1, every - held_out_rows(data, every)) / every
    copies = [one.copies for one in data.mix] or [1.0]
    if config.free_passes or not data.packing:
        return Count(max(1, round(left * sum(len(rows) * often for rows, often in zip(sources, copies, strict=True)))))
    tokens = (
        left
        / CHARACTERS_PER_TOKEN
        * sum(
            often * sum(map(_characters, rows.select_columns([name for name in rows.column_names if name != LOCATION])))
            for rows, often in zip(sources, copies, strict=True)
        )
    )
    reason = f"rows are estimated with {CHARACTERS_PER_TOKEN} characters a token, because its tokenizer is not here"
    return Count(max(1, math.ceil(tokens / data.max_length)), f"model.name={config.model.name}: {reason}")


def _characters(value: object) -> int:
    """Counts the characters of all texts in a row or a nested value."""
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    if isinstance(value, list):
        return sum(map(_characters, value))
    return len(value) if isinstance(value, str) else 0


def _has_tokenizer(config: TrainConfig) -> bool:
    """Whether the model's tokenizer is on this machine and loads quickly, which excludes GGUF files."""
    model = config.model
    if model.name == "embedded":
        return True
    if model.gguf_file:  # its tokenizer is converted at each load, which is slow
        return False
    folder = Path(model.name).expanduser()
    if folder.is_dir():
        return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(model.name, "tokenizer.json", revision=model.revision), str)
    except HFValidationError:  # neither a folder nor a valid name on the hub
        return False


@dataclass(frozen=True)
class TimePlan:
    """The time of a run, and its cost.

    Attributes:
        run_hours: hours of training alone; None if the number of updates is not known.
        on_demand: dollars; None without a price or hours, or if a service gives the slice away.
        spot: dollars, with interruptions and checkpoints; None likewise.
        save_seconds: time to write a checkpoint.
        save_interval_seconds: time between checkpoints with the smallest loss on spot; `save_steps` in updates.
        sessions: service that offers this slice free of charge -> a sentence on the sessions; empty without hours.
    """

    run_hours: float | None
    on_demand: float | None
    spot: float | None
    save_seconds: float
    save_interval_seconds: float
    save_steps: int
    sessions: dict[str, str]


def time_plan(
    chip: Chip, chips: int, slice_name: str, step_seconds: float, updates: int | None, checkpoint_bytes: float,
    service: str = "", compiling: float = 0.0,
) -> TimePlan:  # fmt: skip
    """Plans time and cost of `updates` (None: not known) of `step_seconds` on `chips` chips in all slices.

    If `service` is a name such as "Kaggle", it gives the chips away, so there is no cost; with "" they are paid for.
    `sessions` has only services that `FREE_SLICES` lists with `slice_name`: `service`, or with "" all. Each start
    compiles for `compiling` seconds, which count only in the spot price.

    The interval between checkpoints, sqrt(2 x checkpoint time x mean time between failures), is from J. W. Young, "A
    first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. With an interval t and a mean time
    M between failures, the share (checkpoint time) / t is spent on saving, and failures lose the share t / (2 M).
    """
    save = SAVE_SECONDS + checkpoint_bytes / SAVE_BYTES_PER_SECOND
    failures = SPOT_HOURS_BETWEEN_INTERRUPTIONS * 3600
    interval = math.sqrt(2 * save * failures)
    lost = save / interval + interval / (2 * failures) + (BESIDE_COMPILING + compiling) / failures
    hours, on_demand, spot, sessions = None, None, None, {}
    if updates is not None:
        hours = updates * step_seconds / 3600
        free = [each for each, names in FREE_SLICES.items() if slice_name in names and service in ("", each)]
        sessions = {each: _sessions(each, hours, checkpoint_bytes) for each in free}
        if chip.price is not None and not service:
            on_demand = hours * chips * chip.price.on_demand
            spot = chip.price.spot and hours * chips * (1 + lost) * chip.price.spot
    return TimePlan(hours, on_demand, spot, save, interval, max(1, round(interval / step_seconds)), sessions)


def compile_seconds(config: TrainConfig, shape: Shape, passes: int) -> float:
    """Estimates the seconds to compile a step with `passes` passes, or the programs of a run that samples.

    The programs do not depend on `passes`. The estimate is for two CPU cores.
    """
    looped = config.optim.remat != "none" and config.optim.scan_layers != "off"
    layers = shape.program_layers if looped else shape.layers
    if config.free_passes:  # all passes of an update run the same program
        return SAMPLING_COMPILING * (COMPILING + layers * LAYER_COMPILING)
    return COMPILING + passes * layers * LAYER_COMPILING


def _sessions(service: str, hours: float, checkpoint_bytes: float) -> str:
    """Describes the sessions of a free service that a run of `hours` takes, and the limits of the service."""
    if service != "Kaggle":
        return f"{hours:.1f} h on {service}, which may end a session at any time: save often"
    count, weeks = math.ceil(hours / KAGGLE_HOURS_PER_SESSION), math.ceil(hours / KAGGLE_HOURS_PER_WEEK)
    minutes, too_large = KAGGLE_HOURS_PER_SESSION * 60 - 20, ""
    if 2 * checkpoint_bytes > KAGGLE_OUTPUT_BYTES:  # both exist while the new checkpoint replaces the old
        too_large = (
            f"; /kaggle/working keeps {KAGGLE_OUTPUT_BYTES / 1e9:.0f} GB, and two checkpoints take "
            f"{2 * checkpoint_bytes / 1e9:.1f}: use output_dir=gs://..."
        )
    return (
        f"{count} session{'s' if count > 1 else ''} of {KAGGLE_HOURS_PER_SESSION} h on Kaggle, over {weeks} "
        f"week{'s' if weeks > 1 else ''} of {KAGGLE_HOURS_PER_WEEK} h; checkpoint.budget_minutes={minutes} ends each"
        f" session in time{too_large}"
    )
