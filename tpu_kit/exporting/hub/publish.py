"""Pushes the result of a run to the hub by the section `hub`; recipes call it before and after training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.preemption import stop_name, stops_raise
from tpu_kit.exporting.hub.repository import HubRepository, Pushed
from tpu_kit.exporting.options import ExportOptions

_OPTION = "hub.model_id"


def repository_of(config: TrainConfig) -> HubRepository:
    """Returns the repository that a run pushes to; not to be used if `hub.model_id` is null."""
    hub = config.hub
    return HubRepository(hub.model_id or "", hub.private, hub.revision, _OPTION)


def hub_problems(config: TrainConfig) -> list[str]:
    """Returns the problems that would prevent a push, empty if nothing is pushed; one process calls it before launch.

    They are the errors of `ExportOptions` and `HubRepository.check` as texts. It asks the hub about the token and the
    repository, and changes nothing there.
    """
    if config.hub.model_id is None:
        return []
    problems = []
    for check in (lambda: _options(config), repository_of(config).check):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems


def describe_push(config: TrainConfig) -> str:
    """Returns a line with the push's address, visibility and formats; empty if nothing is pushed. It asks nobody."""
    if config.hub.model_id is None:
        return ""
    kind = "private if it is new" if config.hub.private else "public if it is new"
    during = "; the newest checkpoint during training" if config.hub.strategy == "checkpoint" else ""
    formats = ", ".join(config.hub_formats)
    return f"pushes to        {repository_of(config).url} ({kind}): {formats}, once compared with the model{during}"


def push_result(config: TrainConfig, folder: Path) -> Pushed | None:
    """Exports the run in `folder` in all of `config.hub_formats`, pushes it as a single commit, and prints the exports.

    `hub.model_id` must be set. A failure or a stop signal does not end the run: the function prints a warning to
    stderr, with the command that repeats the push, and returns None.
    """
    from tpu_kit.exporting.export import export_all  # it loads transformers, which the checks above do not need

    try:
        with stops_raise():
            done = export_all(folder, _options(config), _OPTION)
    except (KeyboardInterrupt, SystemExit) as error:
        _warn(config, folder, f"{_OPTION}={config.hub.model_id}: {stop_name(error) or 'an end'} was received")
        return None
    except Exception as error:  # whatever it is, it must not end a run that has its result
        known = isinstance(error, ValueError)
        _warn(config, folder, str(error) if known else f"{_OPTION}: {type(error).__name__}: {error}")
        return None
    for one in done:
        print(one, flush=True)
    return done[-1].pushed


def _warn(config: TrainConfig, folder: Path, problem: str) -> None:
    """Prints a warning about a failed push, with the command that repeats it."""
    there = repository_of(config).url
    text = f"warning: {problem}. Unless {there} has it, nothing was pushed; the result is complete in {folder}. "
    print(text + "To push it: " + repeat_command(config, folder), file=sys.stderr, flush=True)


def repeat_command(config: TrainConfig, folder: Path) -> str:
    """Returns the shell command that exports and pushes the run in `folder`; `hub.model_id` must be set."""
    hub = config.hub
    pairs = [f"format={format}" for format in config.hub_formats] + [f"push={hub.model_id}"]
    pairs += [] if hub.private else ["private=false"]
    pairs += [f"revision={hub.revision}"] if hub.revision else []
    return shlex.join(["python", "-m", "tpu_kit", "export", str(folder), *pairs])


def _options(config: TrainConfig) -> ExportOptions:
    """Returns the options of the run's export; raises ValueError as `ExportOptions`."""
    hub = config.hub
    return ExportOptions(config.hub_formats, push=hub.model_id, private=hub.private, revision=hub.revision)
