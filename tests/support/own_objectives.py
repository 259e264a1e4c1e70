"""Objectives as a user writes them: correct ones, and one for each mistake that the kit reports."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.model.states_head import StatesHead
from tpu_kit.training.objectives import Objective, Sums, SupervisedObjective

_calls = 0


class Hanging(SupervisedObjective):
    """The default loss; on the host of TPU_KIT_TEST_HANG the 8th batch never returns."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config.optim)
        self._batches = 0

    def __call__(self, model: Any, batch: Any) -> Sums:
        self._batches += 1
        if self._batches == 8 and os.environ["TPU_KIT_TEST_HANG"] == os.environ["TPU_KIT_HOST_INDEX"]:
            self.hang_here()
        return super().__call__(model, batch)

    def hang_here(self) -> None:
        time.sleep(1e6)


class ComputingForEver(Hanging):
    """Like `Hanging`, but it uses the processor."""

    def hang_here(self) -> None:
        while True:
            pass


class ChangesWeights(SupervisedObjective):
    """The default loss, with different weights on each host."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config.optim)

    def attach(self, model: Any, load_frozen: Any) -> None:
        for parameter in model.parameters():
            parameter.data += int(os.environ["TPU_KIT_HOST_INDEX"])


def _loss(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = models.output_embedding(model).logits(models.hidden_states(model, batch))
    return logits, torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def squared(model: Any, batch: Any) -> Sums:
    logits, labels = _loss(model, batch)
    return Sums(logits.square().mean(-1).sum(), (labels != -100).sum().float())


def weightless(model: Any, batch: Any) -> Sums:
    loss, weight = squared(model, batch)[:2]
    return Sums(loss, weight * 0)


def calls(model: Any, batch: Any) -> Sums:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def reads(model: Any, batch: Any) -> Sums:
    logits, labels = _loss(model, batch)
    if logits.mean() > 0:
        logits = -logits
    return Sums(logits.sum(), (labels != -100).sum().float())


def picks(model: Any, batch: Any) -> Sums:
    logits, labels = _loss(model, batch)
    chosen = logits[labels != -100]
    return Sums(chosen.sum(), (labels != -100).sum().float())


def grows(model: Any, batch: Any) -> Sums:
    global _calls
    _calls += 1
    logits, labels = _loss(model, batch)
    part = logits[:, : 4 + _calls]
    return Sums(part.sum(), (labels != -100).sum().float())


def fails(model: Any, batch: Any) -> Sums:
    raise KeyError("weights")


def alone(model: Any) -> None: ...


def a_tensor(model: Any, batch: Any) -> torch.Tensor:
    return _loss(model, batch)[0].sum()


def detached(model: Any, batch: Any) -> Sums:
    return Sums(_loss(model, batch)[0].sum().detach(), batch["labels"].sum().float())


def by_token(model: Any, batch: Any) -> Sums:
    logits, labels = _loss(model, batch)
    return Sums(logits.mean(-1), (labels != -100).float())


def in_fp64(model: Any, batch: Any) -> Sums:
    return Sums(_loss(model, batch)[0].double().sum(), (batch["labels"] != -100).sum().float())


class NoObjective:
    def __init__(self, config: Any) -> None: ...


class WithScale(Objective):
    """Trains a scale beside the model, and logs it."""

    extra = ("scale_sum",)

    def __init__(self, config: Any) -> None:
        self._supervised = SupervisedObjective(config.optim)

    def attach(self, model: torch.nn.Module, load: Any) -> None:
        model.objective = torch.nn.ParameterDict({"scale": torch.nn.Parameter(torch.ones(1))})

    def __call__(self, model: Any, batch: Any) -> Sums:
        found = self._supervised(model, batch)
        scale = model.objective["scale"].sum()
        return Sums(found.loss * scale, found.weight, (scale.detach() * found.weight,))


class Shift(StatesHead):
    """Adds a vector to the last hidden states."""

    name = "own_shift"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.settings = {"hidden_size": hidden_size}
        self.shift = torch.nn.Parameter(torch.zeros(hidden_size))

    def correct(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.shift.to(hidden.dtype)


class WithShift(Objective):
    """Trains a head beside the model on the likelihood of the labels."""

    def __init__(self, config: TrainConfig) -> None:
        self._supervised = SupervisedObjective(config.optim)

    def attach(self, model: Any, load: Any) -> None:
        model.objective = Shift(models.text_config(model).hidden_size)

    def __call__(self, model: Any, batch: Any) -> Sums:
        states = model.objective.correct(models.hidden_states(model, batch))
        return self._supervised.of_states(model, states, batch, models.output_embedding(model))
