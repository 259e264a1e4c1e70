"""Selects the objective of a run: supervised, distillation, error correction, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.evaluation.verifiers import imported
from tpu_kit.training.distillation import DistillationObjective
from tpu_kit.training.error_correction import ErrorCorrectionObjective
from tpu_kit.training.objectives import Objective, Sums, SupervisedObjective


class FunctionObjective(Objective):
    """The user's function of a model and a batch, as in `Objective.__call__`."""

    def __init__(self, function: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], Sums]) -> None:
        self._function = function

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        return self._function(model, batch)


def objective_of(config: TrainConfig) -> Objective:
    """Returns the objective of a run.

    `optim.objective` may name a function (model, batch) -> Sums, or a subclass of `Objective`, which is called with the
    configuration. Raises ValueError if it cannot be imported, or takes other arguments.
    """
    name = config.optim.objective
    if config.distill.teacher is not None:
        return DistillationObjective(config)
    if name == "supervised":
        return SupervisedObjective(config.optim)
    if ":" not in name:
        return ErrorCorrectionObjective(config)
    try:
        found = imported(name)
    except ValueError as error:
        raise ValueError(f"optim.objective={name}: {error}") from error
    is_class = isinstance(found, type)
    given, wanted = ((config,), "(config)") if is_class else ((None, None), "(model, batch)")
    try:
        inspect.signature(found).bind(*given)
    except TypeError as error:
        takes = f"{name}{inspect.signature(found)}"
        raise ValueError(f"optim.objective: {takes} is not called with these arguments; write {wanted}") from error
    made = found(config) if is_class else FunctionObjective(found)
    if not isinstance(made, Objective):
        raise ValueError(f"optim.objective={name} is a class, but no subclass of Objective; derive it from that")
    return made
