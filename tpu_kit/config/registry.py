"""Maps the commands, objectives and public names of the kit to their code, as "module:name".

A new entry needs its code and a line here. Entries are imported on first use. The rest of the kit knows the folders of
`tpu_kit.extras` only by these lines, so an installation may leave out a folder: its names are then neither listed nor
accepted.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

COMMANDS = {
    "checkpoints": "tpu_kit.recipes.commands:checkpoints",
    "distill": "tpu_kit.recipes.commands:distill",
    "doctor": "tpu_kit.notebook.commands:doctor",
    "dpo": "tpu_kit.recipes.commands:dpo",
    "evaluate": "tpu_kit.recipes.evaluation.command:evaluate",
    "export": "tpu_kit.recipes.commands:export",
    "generate": "tpu_kit.recipes.commands:generate",
    "grpo": "tpu_kit.recipes.commands:grpo",
    "notebooks": "tpu_kit.notebook.commands:notebooks",
    "plan": "tpu_kit.recipes.commands:plan",
    "pod": "tpu_kit.extras.pods.command:pod",
    "profile": "tpu_kit.extras.profile.command:profile",
    "search": "tpu_kit.extras.tree_search.command:search",
    "train": "tpu_kit.recipes.commands:train",
    "verify": "tpu_kit.notebook.commands:verify",
}
"""The `config.commands.Command` of `python -m tpu_kit NAME`, by NAME."""

OBJECTIVES = {
    "supervised": "tpu_kit.training.objectives:SupervisedObjective",
    "error-correction": "tpu_kit.extras.error_correction.head:ErrorCorrectionObjective",
    "error-correction-alone": "tpu_kit.extras.error_correction.head:ErrorCorrectionObjective",
    "policy": "tpu_kit.training.losses.policy_gradient:PolicyObjective",
    "preference": "tpu_kit.training.losses.preference:PreferenceObjective",
}
"""The objective class by the value of `optim.objective`, which also takes module:function and module:class."""

NAMES = {
    "ConfigError": "tpu_kit.config.loader:ConfigError",
    "SearchOptions": "tpu_kit.extras.tree_search.options:SearchOptions",
    "TrainConfig": "tpu_kit.config.loader:TrainConfig",
    "TrainResult": "tpu_kit.recipes.result:TrainResult",
    "batch_arithmetic": "tpu_kit.config.loader:batch_arithmetic",
    "describe": "tpu_kit.config.loader:describe",
    "dpo": "tpu_kit.recipes.preference:dpo",
    "evaluate": "tpu_kit.generation.evaluation.evaluate:evaluate",
    "evaluate_adapter": "tpu_kit.generation.evaluation.evaluate:evaluate_adapter",
    "export": "tpu_kit.exporting.export:export",
    "generate": "tpu_kit.generation.answers:generate",
    "grpo": "tpu_kit.recipes.grpo:grpo",
    "launch": "tpu_kit.distributed.launch:launch",
    "load_config": "tpu_kit.config.loader:load_config",
    "plan": "tpu_kit.planning.planner:plan",
    "profile": "tpu_kit.extras.profile.profile:profile",
    "think": "tpu_kit.extras.tree_search.search:think",
    "train": "tpu_kit.recipes.sft:train",
}
"""The public names, `tpu_kit.NAME`."""


def absence(place: str) -> str:
    """Returns why the module of "module:name" is not installed, as text; "" if it is, or is outside tpu_kit.extras."""
    module, _, _ = place.partition(":")
    folder, _, _ = module.rpartition(".")
    if not folder.startswith("tpu_kit.extras."):
        return ""
    try:
        if importlib.util.find_spec(module) is not None:
            return ""
    except ModuleNotFoundError:  # there is no such folder
        pass
    return f"not in this installation, which lacks {folder}; install the whole package to have it"


def installed(places: Mapping[str, str]) -> dict[str, str]:
    """Returns the entries of `places` that are in this installation: all but absent extras; does not load them."""
    return {name: place for name, place in places.items() if not absence(place)}


def load(place: str) -> Any:
    """Imports and returns the object of an entry, "module:name"; raises ImportError or AttributeError."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
