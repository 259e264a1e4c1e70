"""Reads the configuration that a command names, from a file or a run's folder, and chooses the command's adapter."""

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
"""Value of `adapter` that means the adapter of the given run."""


def names_run(place: str) -> bool:
    """Whether a command's argument is a run: a URL, a folder, or a config.yaml beside an adapter or checkpoints.

    False for a folder with the name of a shipped configuration: the name means the configuration.
    """
    if is_url(place):
        return True
    path = Path(place).expanduser()
    if os.path.isdir(os.path.expanduser(place)):  # Path.is_dir raises for a text that cannot be a path
        return not (CONFIGS / f"{place}.yaml").is_file()
    return path.name == CONFIG and any((path.parent / name).is_dir() for name in (ADAPTER, CHECKPOINTS))


def run_config(run: Run, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a run's configuration; sets `output_dir` to its folder unless overrides set output_dir or run_name.

    Raises:
        ConfigError: as `load_config`; or the run has no configuration.
        ValueError: the object store cannot be read.
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
    """Returns the configuration that a command names, and its adapter; None as adapter means the base model.

    Args:
        place: a configuration file, the name of a shipped configuration, or a run. None means the run of `adapter`, or
            the default values if that is AUTO, None or outside of a run.
        overrides: `key=value` texts.
        adapter: a place as in `find_run`, returned unchanged and unchecked; None for the base model. AUTO means the
            adapter of the run `place`, or None if that has none or is no run.
        answers: whether the command samples answers. With AUTO, it then prints on stderr which adapter the run has.
        command: the command's name, see `load_config`.

    Raises:
        ValueError: as `load_config` and `find_run`.
    """
    run = find_run(place) if place is not None and names_run(place) else None
    if place is None and adapter not in (AUTO, None):
        with contextlib.suppress(ValueError):  # raised again when the adapter is read
            of_adapter = find_run(adapter)
            run = of_adapter if CONFIG in names_in(of_adapter.folder) else None
    config = run_config(run, overrides) if run else load_config(place, overrides, command=command)
    if adapter != AUTO:
        return config, adapter
    if run and answers:
        none = f"the base model only: {run.folder} has no adapter, {unfinished(run.folder)}"
        print(f"answers          {run.adapter or none}", file=sys.stderr, flush=True)
    return config, run.adapter if run else None
