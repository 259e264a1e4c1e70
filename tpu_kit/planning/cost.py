"""How long a run takes, what it costs, in how many sessions, and how often to save on machines that are taken away.

Lists of prices and of what notebook services give are in `chips`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpu_kit.hardware.chips import FREE_SLICES, KAGGLE_HOURS_PER_SESSION, KAGGLE_HOURS_PER_WEEK, Chip

SPOT_HOURS_BETWEEN_INTERRUPTIONS = 6.0
"""Mean time between interruptions of a spot TPU: an assumption, as Google publishes none. Young's interval goes with
its square root, so that a factor of four is a factor of two."""
SAVE_BYTES_PER_SECOND = 200e6
"""From the device to a disk or bucket: an assumption."""
SAVE_SECONDS = 2.0
"""Of a checkpoint of no size: an assumption."""
RESTART_SECONDS = 300.0
"""From an interruption to the first new step, compiling included: an assumption."""


@dataclass(frozen=True)
class TimePlan:
    """The time of a run.

    Attributes:
        run_hours: of training alone; None if the number of updates is not known.
        on_demand: dollars, and `spot`, interruptions included; None without a price or hours.
        spot: see above.
        spot_hours: run_hours with what interruptions and checkpoints cost.
        save_seconds: time of one checkpoint.
        save_interval_seconds: between checkpoints, that which loses least on spot.
        save_steps: the same in updates.
        sessions: by service that gives this slice away, the sentence on how many sessions it takes.
    """

    run_hours: float | None
    on_demand: float | None
    spot: float | None
    spot_hours: float | None
    save_seconds: float
    save_interval_seconds: float
    save_steps: int
    sessions: dict[str, str]


def young_interval(save_seconds: float, seconds_between_failures: float) -> float:
    """The seconds between checkpoints that lose least: sqrt(2 x cost of a checkpoint x mean time between failures).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. Of an interval t a
    share cost / t is spent saving, and on a failure half of it is lost, t / (2 M); the sum is least at this t.
    """
    return math.sqrt(2 * save_seconds * seconds_between_failures)


def time_plan(
    chip: Chip, chips: int, slice_name: str, step_seconds: float, updates: int | None, checkpoint_bytes: float
) -> TimePlan:
    """The time plan of a run of so many updates.

    Args:
        chip: what it runs on.
        chips: how many are paid.
        slice_name: the slice's name, such as "v5litepod-8".
        step_seconds: time of an update.
        updates: number of updates, None if not known.
        checkpoint_bytes: size of a checkpoint.
    """
    save = SAVE_SECONDS + checkpoint_bytes / SAVE_BYTES_PER_SECOND
    failures = SPOT_HOURS_BETWEEN_INTERRUPTIONS * 3600
    interval = young_interval(save, failures)
    hours = None if updates is None else updates * step_seconds / 3600
    lost = save / interval + interval / (2 * failures) + RESTART_SECONDS / failures
    spot_hours = None if hours is None else hours * (1 + lost)
    price = chip.price
    return TimePlan(
        run_hours=hours,
        on_demand=None if hours is None or price is None else hours * chips * price.on_demand,
        spot=None if spot_hours is None or price is None or price.spot is None else spot_hours * chips * price.spot,
        spot_hours=spot_hours,
        save_seconds=save,
        save_interval_seconds=interval,
        save_steps=max(1, round(interval / step_seconds)),
        sessions={
            service: _sessions(service, hours)
            for service, names in FREE_SLICES.items()
            if slice_name in names and hours is not None
        },
    )


def _sessions(service: str, hours: float) -> str:
    if service != "Kaggle":
        return f"{hours:.1f} h on {service}, which ends a session when it likes: save often"
    count, weeks = math.ceil(hours / KAGGLE_HOURS_PER_SESSION), math.ceil(hours / KAGGLE_HOURS_PER_WEEK)
    minutes = KAGGLE_HOURS_PER_SESSION * 60 - 20
    return (
        f"{count} session{'s' if count > 1 else ''} of {KAGGLE_HOURS_PER_SESSION} h on Kaggle, over {weeks} "
        f"week{'s' if weeks > 1 else ''} of {KAGGLE_HOURS_PER_WEEK} h; checkpoint.budget_minutes={minutes} ends each"
        " in time"
    )
