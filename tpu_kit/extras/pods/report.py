"""Writes the files of a job, and formats its hosts, estimated cost and commands as text."""

from __future__ import annotations

from pathlib import Path

from tpu_kit.extras.pods.engines import ENGINES, published
from tpu_kit.extras.pods.slice_job import SliceJob
from tpu_kit.machine.chips import GIB
from tpu_kit.machine.storage.atomic import write_text


def write(job: SliceJob, engine: str, folder: Path) -> str:
    """Writes a checked job's files and commands.txt to a folder, which is created if missing; starts nothing.

    `engine` is a name in `ENGINES`. Files of the same names are replaced. commands.txt has a line per command: its
    purpose and its text. Returns the text that `python -m tpu_kit pod` prints: the slice, estimates of price, hours
    and memory, the kit's commit, the files, and the commands. Raises ValueError if a file cannot be written.
    """
    files, commands = ENGINES[engine](job, folder)
    width = max(map(len, commands)) + 2
    lines = "\n".join(f"{name:<{width}}{command}" for name, command in commands.items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
        write_text(folder / "commands.txt", f"{lines}\n")
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from error
    capacity = ("Spot" if job.spot else "on demand") + (f" in {job.zone}" if job.zone else "")
    size = (
        f"{job.slice}: {job.topology.chips} chips of {job.chip.name}, {job.shape}, on {job.topology.hosts} hosts of "
        f"{job.topology.chips_per_host}; {capacity}; image {job.image}"
    )
    written = ", ".join([*files, "commands.txt"])
    kit = f"kit: {published()}"
    return "\n".join([size, *_cost(job), kit, f"wrote {written} to {folder}; nothing was started", lines])


def _cost(job: SliceJob) -> list[str]:
    """Returns lines with the price of an hour, and the run's hours, price and memory, or why they are unknown."""
    from tpu_kit.planning.planner import plan  # loads much

    rate, listed = job.rate, job.chip.price
    where = job.region or "us-central"
    kind = f"Spot price of {where}, which changes daily" if job.spot else f"list price of {where}"
    an_hour = f"estimate: ${rate * job.topology.chips:.2f} an hour ({kind})" if rate else "estimate: no known price"
    try:
        (found,) = plan(job.config, [job.slice])
    except ValueError as error:
        return [f"{an_hour}; not known for the run: {error}"]
    memory = f"it takes {found.peak_bytes / GIB:.2f} of {found.where.limit / GIB:.2f} GiB of a device"
    if not found.fits:
        return [an_hour, f"estimate: DOES NOT FIT: {memory}; before you launch: {found.advice}"]
    if found.run is None or found.run.run_hours is None:
        return [f"{an_hour}; not known for the run: {found.unknown}; {memory}"]
    dollars, of_planner = (found.run.spot, listed and listed.spot) if job.spot else (
        found.run.on_demand, listed and listed.on_demand)  # fmt: skip
    dollars = dollars * rate / of_planner if dollars is not None and rate and of_planner else None
    cost = "" if dollars is None else f" and ${dollars:.2f}" + (" with interruptions" if job.spot else "")
    return [f"{an_hour}; {found.run.run_hours:.3g} hours{cost} for the run; {memory}"]
