"""What the notebooks call: parameters, secrets, and, under this one name, the displays of `displays` and `watch`."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tpu_kit.cells import explain_missing_names, parameters
from tpu_kit.config import ConfigError, TrainConfig, load_config
from tpu_kit.displays import (
    show_answers,
    show_checks,
    show_comparison,
    show_config,
    show_cores,
    show_example,
    show_lengths,
    show_table,
    show_tree,
    show_verdict,
)
from tpu_kit.fields import closest
from tpu_kit.migration import stored_values
from tpu_kit.persistence import fetch_run, find_place
from tpu_kit.watch import check_run, live, show_curves, show_run

__all__ = [
    "check_run",
    "config",
    "live",
    "parameters",
    "run_config",
    "secrets",
    "show_answers",
    "show_checks",
    "show_comparison",
    "show_config",
    "show_cores",
    "show_curves",
    "show_example",
    "show_lengths",
    "show_run",
    "show_table",
    "show_tree",
    "show_verdict",
]

# A kernel must not touch the TPU, which torch-tpu, where it is installed, would open when torch is imported.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
# Only what takes longer gets a bar of tqdm's, here and in the processes that a cell starts: each state is kept.
os.environ.setdefault("TQDM_DELAY", "5")
# Progress bars here are plain text, which a kernel without widgets need not warn of.
warnings.filterwarnings("ignore", message="IProgress not found")
explain_missing_names()
# Of the processes that a cell starts: what libraries say to one another's authors is kept in the notebook for good.
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")


def config(
    namespace: Mapping[str, Any], path: str | Path | Mapping[str, Any] | None = None, also: Collection[str] = ()
) -> TrainConfig:
    """Build the configuration from the notebook's parameters, named by the leaf names of TrainConfig.

    Args:
        namespace: ``globals()`` of the notebook; see `parameters`.
        path: YAML file, shipped config, or values of a file to start from.
        also: parameters that the notebook itself uses and the configuration does not know.

    Raises:
        ConfigError: all that is wrong at once: names that are no parameter (with the nearest that are) and values
            that do not fit.
    """
    given = {name: value for name, value in parameters(namespace).items() if name not in also}
    try:
        found = load_config(path, parameters=given)
    except ConfigError as error:
        known = {name: near[0] for name in given if (near := closest(name, also, 0.8))}
        problems = [
            f"{name}: this notebook has no such parameter; did you mean {known[name]}?" if name in known else problem
            for problem in error.problems
            for name in [problem.partition(":")[0]]
        ]
        raise ConfigError(problems) from None
    # Here, so that the notebook looks for the run's files where `train` will put them.
    place = find_place(found)
    why = {} if place.output_dir == found.output_dir else {"output_dir": place.reason}
    return replace(found, output_dir=place.output_dir, sources={**found.sources, **why})


def run_config(namespace: Mapping[str, Any], also: Collection[str] = ()) -> TrainConfig:
    """Read the configuration of a run that was trained, found by its `run_name` (or `output_dir`).

    Args:
        namespace: as in `config`; further parameters override what the run was trained with, such as `num_replicas`.
        also: as in `config`.

    Raises:
        ConfigError: there is no such run, with the names of those there are; or as in `config`.
    """
    names = ("run_name", "output_dir")
    given = {name: value for name, value in parameters(namespace).items() if name in names}
    wanted = load_config(parameters=given)
    place = find_place(wanted)
    fetch_run(place, wanted.run_name)
    folder = replace(wanted, output_dir=place.output_dir).output_path
    if not (folder / "config.yaml").is_file():
        others = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/config.yaml"))) or "none yet"
        raise ConfigError(
            [
                f"run_name: there is no run in {folder}: run 4-train-cot-sft.ipynb first, mount the Drive that has it "
                "(Colab), add the output that has it as an input (Kaggle), or set output_dir to it. Runs beside it: "
                f"{others}"
            ]
        )
    return config(namespace, stored_values(folder / "config.yaml"), [*also])


def secrets(*names: str) -> dict[str, str]:
    """Put secrets into the environment of this process and its children; says where each was found, never its value.

    Looked for in the environment, then Colab's secrets, then Kaggle's; the first wins. A secret that the service does
    not grant to this notebook counts as not found.

    Args:
        names: such as "WANDB_API_KEY" or "HF_TOKEN".

    Returns:
        For each name "environment", "Colab secrets", "Kaggle secrets" or "not found".
    """
    return {name: _find_secret(name) for name in names}


def _find_secret(name: str) -> str:
    if os.environ.get(name):
        return "environment"
    for source, read in (("Colab secrets", _colab_secret), ("Kaggle secrets", _kaggle_secret)):
        # Each service has errors of its own for "no such secret" and "not granted"; elsewhere the import fails.
        with contextlib.suppress(Exception):
            if value := read(name):
                os.environ[name] = value
                return source
    return "not found"


def _colab_secret(name: str) -> str:
    return importlib.import_module("google.colab.userdata").get(name)


def _kaggle_secret(name: str) -> str:
    return importlib.import_module("kaggle_secrets").UserSecretsClient().get_secret(name)
