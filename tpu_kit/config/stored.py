"""What makes a run another one: which parameters may change when it goes on from a checkpoint, and which may not.

Reads a configuration that a run has stored, whichever version of the kit wrote it.

A user's file with an unknown parameter is an error, because the name may be misspelled. A run's config.yaml, and the
config.json of a checkpoint, name every parameter that the kit had when it wrote them: an unknown one was renamed or
removed since, and a missing one was added since. The tables below say what each of them means today.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_kit.config.fields import show
from tpu_kit.config.loader import TrainConfig, batch_arithmetic, load_config, read_yaml
from tpu_kit.config.schema import parameters

RENAMED: dict[str, tuple[str, str]] = {}
"""Earlier dotted name -> (the version of tpu_kit that renamed it, the name it has today)."""

REMOVED: dict[str, tuple[str, Any]] = {}
"""Dotted name -> (the version of tpu_kit that removed it, the value that the kit acts as ever since)."""

ADDED: dict[str, tuple[str, Any]] = {
    "data.on_bad_row": ("0.1.0", "stop"),
    "tracking.wandb_adapter": ("0.1.0", False),
}
"""Dotted name -> (the version of tpu_kit that added it, the value that runs of earlier versions are to have)."""


def migrate(stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translates a stored configuration into the parameters of today.

    Args:
        stored: sections with their parameters, as `TrainConfig.to_dict` gave them at the time.

    Returns:
        Plain values by dotted name, of parameters that exist; and a text for each value that could not be used.
    """
    known, found, notes = parameters(), {name: value for name, (_, value) in ADDED.items()}, []
    for name, value in flatten(stored).items():
        now = RENAMED[name][1] if name in RENAMED else name
        if now in known:
            found[now] = value
        elif now not in REMOVED:
            notes.append(f"{name}={show(value)} is left out: this tpu_kit has no such parameter")
        elif value != REMOVED[now][1]:
            version, meant = REMOVED[now]
            notes.append(f"{name}={show(value)} is left out: tpu_kit {version} removed it, and acts as {show(meant)}")
    return found, notes


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """The values of sections by dotted name; those of no section keep their names."""
    found: dict[str, Any] = {}
    for section, values in nested.items():
        if isinstance(values, Mapping):
            found |= {f"{section}.{leaf}": value for leaf, value in values.items()}
        else:
            found[section] = values
    return found


def stored_values(path: Path) -> dict[str, Any]:
    """The values of a run's config.yaml by dotted name, for `load_config`; prints on stderr what could not be used.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    found, notes = migrate(read_yaml(path))
    for note in notes:
        print(f"note: {path}: {note}", file=sys.stderr, flush=True)
    return found


def load_stored(path: Path) -> TrainConfig:
    """The configuration of a run's config.yaml; raises ConfigError as `load_config`."""
    return load_config(stored_values(path))


# How long to train, when to look, where and in what order of computation to run. How rows are split over replicas and
# passes is compared by the global batch, and the data by its hash.
FREE = {
    "optim.max_steps", "optim.epochs", "optim.eval_steps", "optim.early_stop_patience", "optim.batch_size",
    "optim.gradient_accumulation", "optim.global_batch_size", "optim.on_nan", "optim.loss_chunk", "optim.remat",
    "optim.scan_layers", "optim.max_loss_rise", "optim.mlp_tile", "model.attention", "model.quant_cache",
    "data.num_proc", "output_dir", "run_name",
}  # fmt: skip
FREE_SECTIONS = ("checkpoint", "launch", "tracking")

ANEW = "another output_dir, or checkpoint.resume=never (which moves the old checkpoints aside)"
"""How a run starts anew where another one has been."""


def plain(config: TrainConfig) -> dict[str, Any]:
    """Every parameter by dotted name, as JSON has its value."""
    return flatten(config.to_dict())


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters that differ: those that may, and those that make it another run.

    Args:
        before: plain values by dotted name. A parameter that it lacks is not compared.
        now: the same, of every parameter.
    """
    differ = [name for name in now if name in before and before[name] != now[name]]
    free = [name for name in differ if name in FREE or name.partition(".")[0] in FREE_SECTIONS]
    return free, [name for name in differ if name not in free]


def is_another(before: TrainConfig, now: TrainConfig, replicas: int) -> bool:
    """Whether a run of the one configuration cannot go on with the other, on as many replicas."""
    rows = [batch_arithmetic(config, replicas).global_batch_size for config in (before, now)]
    return rows[0] != rows[1] or bool(changes(plain(before), plain(now))[1])
