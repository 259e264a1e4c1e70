"""Reads the configuration of a run where it lies, and chooses the adapter that answers a command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tpu_kit.config.fields import ConfigError
from tpu_kit.config.loader import CONFIGS, load_config, read_yaml
from tpu_kit.config.schema import TrainConfig
from tpu_kit.machine.storage.object_store import at_hand, is_url
from tpu_kit.machine.storage.run_folder import ADAPTER, CHECKPOINTS, CONFIG, Run, find_run, names_in, unfinished

AUTO = "auto"
"""In place of an adapter: that of the run whose configuration is given."""


def names_run(place: str) -> bool:
    """Whether the argument of a command names a run and not a configuration file."""
    if is_url(place):
        return True
    path = Path(place).expanduser()
    if os.path.isdir(os.path.expanduser(place)):  # False too of what is no path
        return not (CONFIGS / f"{place}.yaml").is_file()
    return path.name == CONFIG and any((path.parent / name).is_dir() for name in (ADAPTER, CHECKPOINTS))


def run_config(run: Run, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads the configuration of a run, which goes on where it lies, unless its name or its place is overridden.

    Raises:
        ConfigError: as `load_config`; or the run has no configuration.
    """
    with at_hand(run.folder, CONFIG) as folder:
        if not (folder / CONFIG).is_file():
            raise ConfigError([f"{run.folder} has no {CONFIG}: name a configuration, or the folder that a run wrote"])
        stored = read_yaml(folder / CONFIG)
    config = load_config({**stored, "output_dir": None}, overrides)
    moved = {"output_dir", "run_name"} & {name for name, source in config.sources.items() if source == "command line"}
    return config if moved else replace(config, output_dir=str(run.folder))


def read_command(
    place: str | None,
    overrides: Sequence[str] = (),
    adapter: str | None = AUTO,
    *,
    answers: bool = True,
    command: str = "",
) -> tuple[TrainConfig, Path | str | None]:
    """Reads the configuration that a command names, and which adapter answers; None is the base model.

    Args:
        place: a configuration file, the name of a shipped one, or a run; None takes that of the adapter's run.
        overrides: `key=value` texts.
        adapter: a place as `find_run` takes it; AUTO, or None for the base model.
        answers: whether the command has an adapter answer; then a note on stderr says which one AUTO is.
        command: its name, see `load_config`.

    Raises:
        ValueError: as `load_config` and `find_run`.
    """
    run = find_run(place) if place is not None and names_run(place) else None
    if place is None and adapter not in (AUTO, None):
        with contextlib.suppress(ValueError):  # told when the adapter is read
            of_adapter = find_run(adapter)
            run = of_adapter if CONFIG in names_in(of_adapter.folder) else None
    config = run_config(run, overrides) if run else load_config(place, overrides, command=command)
    if adapter != AUTO:
        return config, adapter
    if run and answers:
        none = f"the base model only: {run.folder} has no adapter, {unfinished(run.folder)}"
        print(f"answers          {run.adapter or none}", file=sys.stderr, flush=True)
    return config, run.adapter if run else None
