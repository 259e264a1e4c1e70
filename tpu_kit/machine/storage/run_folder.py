"""Finds the run and the adapter of a path: a run's folder, its config.yaml, its adapter or a checkpoint.

A path may be a URL of an object store. The error for any other path lists the files there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tpu_kit.machine.storage.object_store import ObjectFolder, at_hand, is_url, join, parent

CONFIG, ADAPTER, CHECKPOINTS = "config.yaml", "adapter", "checkpoints"
_WEIGHTS = {"adapter_config.json", "adapter_model.safetensors", "config.json", "tokenizer_config.json"}
_SHOWN = 8  # names in an error


class Run(NamedTuple):
    """The folder of a run and its adapter.

    Attributes:
        folder: the run's folder, a Path or a URL; for an adapter outside of a run, its parent folder.
        adapter: folder of the trained weights; None if the run has no adapter yet.
    """

    folder: Path | str
    adapter: Path | str | None


def find_run(place: Path | str) -> Run:
    """Finds the run that a path or a URL belongs to.

    If `place` is itself an adapter, a model or a checkpoint, it is the `adapter` of the result.

    Args:
        place: a run's folder, its config.yaml, the folder of an adapter or of a whole model, or a checkpoint.

    Raises:
        ValueError: `place` is none of these, or the object store cannot be read.
    """
    here: Path | str = str(place).rstrip("/") if is_url(place) else Path(place).expanduser()
    if _name(here) == CONFIG:
        here = parent(here)
    names = names_in(here)
    if not names and (is_url(here) or not Path(here).is_dir()):
        raise ValueError(f"there is no adapter folder {here}, and no run; {_near(parent(here))}")
    if names & _WEIGHTS:
        above = parent(here)
        return Run(parent(above) if _name(above) == CHECKPOINTS else above, here)
    if CONFIG in names or {f"{ADAPTER}/", f"{CHECKPOINTS}/"} & names:
        return Run(here, join(here, ADAPTER) if f"{ADAPTER}/" in names else None)
    raise ValueError(
        f"{here} has no adapter_config.json and no {CONFIG}, so it is neither a run nor an adapter; {_near(here)}"
    )


def adapter_of(place: Path | str) -> Path | str:
    """Finds the adapter of a path or URL; raises ValueError as `find_run`, or if the run has no adapter yet."""
    run = find_run(place)
    if run.adapter is None:
        raise ValueError(f"there is no adapter in {run.folder}: {unfinished(run.folder)}")
    return run.adapter


@contextlib.contextmanager
def adapter_at_hand(place: Path | str | None) -> Iterator[Path | None]:
    """Yields the local folder of the adapter that `adapter_of` finds; yields None if `place` is None.

    If the adapter is at a URL, the folder is a copy, which is deleted when the block ends. Raises ValueError as
    `find_run`, or if the run has no adapter yet.
    """
    if place is None:
        yield None
        return
    with at_hand(adapter_of(place)) as folder:
        yield folder


def unfinished(run: Path | str) -> str:
    """Returns advice for a run without an adapter: continue it, or use its newest checkpoint, if it is local."""
    steps = [] if is_url(run) else sorted(Path(run).glob(f"{CHECKPOINTS}/step-*[0-9a-f]"))
    newest = f", or give its newest checkpoint, {steps[-1]}" if steps else ""
    return f"the run has not ended: continue it{newest}"


def _name(place: Path | str) -> str:
    """Returns the last part of a path or URL."""
    return str(place).rpartition("/")[2]


def names_in(place: Path | str) -> set[str]:
    """Returns the names in a local folder, empty if it does not exist, or at a URL; folder names end in "/".

    Raises ValueError if the object store cannot be read.
    """
    if is_url(place):
        try:
            found = ObjectFolder(str(place)).list()
        except OSError as error:
            raise ValueError(str(error)) from error
        return {head + slash for head, slash, _ in (name.partition("/") for name in found)}
    path = Path(place)
    return {each.name + "/" * each.is_dir() for each in path.iterdir()} if path.is_dir() else set()


def _near(place: Path | str) -> str:
    """Returns advice for an error text: the runs in a folder, or else its entries."""
    if is_url(place):
        names = sorted(names_in(place))
    elif not Path(place).is_dir():
        return "give the folder that training wrote"
    else:
        if runs := sorted(path.parent.name for path in Path(place).glob(f"*/{CONFIG}")):
            return f"{place} holds the runs {', '.join(runs)}"
        if (Path(place) / CHECKPOINTS).is_dir():
            return unfinished(place)
        names = sorted(names_in(place))
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return f"{place} holds {shown or 'nothing'}; give the folder that training wrote"
