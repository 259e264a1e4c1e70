"""Objectives: the losses that a training step minimises, and what they add to the model."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ModelConfig, OptimConfig, TrainConfig
from tpu_kit.config.named_values import imported
from tpu_kit.config.registry import OBJECTIVES
from tpu_kit.model import causal_lm as models
from tpu_kit.training.losses.loss import IGNORE, Likelihood, SourcedLikelihood, chunked, rows_in_chunks, shift_labels

ROW = {"input_ids": torch.int64, "labels": torch.int64, "position_ids": torch.int64, "segment_ids": torch.int32}
"""The tensors of every batch, (B, S) each; as in `PackedDataset.tensors`."""


class Sums(NamedTuple):
    """Sums over one batch of this replica: fp32 scalars on the batch's device.

    Attributes:
        loss: the summed loss, with its graph.
        weight: the divisor of the loss, such as the number of tokens with loss, summed over replicas and passes.
        extra: one sum for each name in `Objective.extra`, without a graph; logs show it divided by the weight, or by
            the sum that `Objective.divisor` names.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    extra: tuple[torch.Tensor, ...] = ()


class Frozen(NamedTuple):
    """Another model that an objective runs forward: its name in plans, and its arrays of (T, H) kept for the loss."""

    name: str
    model: ModelConfig
    kept: int


class Cost(NamedTuple):
    """What an objective adds to a step with the supervised loss.

    Attributes:
        params: number of parameters of `model.objective`.
        saved: shapes of the fp32 tensors that it saves for the backward pass.
        output_products: products of all tokens with the output layer.
        forwards: forward passes of the frozen model.
        frozen: other models in memory, of whose logits the loss has a chunk at a time.
    """

    params: int = 0
    saved: tuple[tuple[int, ...], ...] = ()
    output_products: int = 0
    forwards: int = 0
    frozen: tuple[Frozen, ...] = ()


class Objective(abc.ABC):
    """A loss summed over a batch. It is a part of the step's program, so it must not read tensors on the host.

    Attributes:
        extra: names of further sums for the log.
        divisor: the one of these by which logs divide the others; None for the weight.
        columns: name -> (numbers for each token, dtype) of tensors that the batch has besides, (B, S * numbers) each.
        trains_model: whether the model's own parameters get gradients, or `model.objective` alone.
        measures_held_out: whether evaluations report the `extra` sums, too.
        shares_prompts: whether documents of a row see a common prefix, in models where `attention.sees_all` holds; then
            a batch has the column prefix_ids.
        one_by_one: whether a step with layers one by one (remat=none) was compared with the TPU compiler; else `auto`
            does not choose it.
    """

    extra: tuple[str, ...] = ()
    divisor: str | None = None
    columns: Mapping[str, tuple[int, torch.dtype]] = MappingProxyType({})
    trains_model = True
    measures_held_out = False
    shares_prompts = False
    one_by_one = False

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns what logs show of the `extra` sums of some updates, of this weight; nan where nothing was summed."""
        others = {name: total for name, total in sums.items() if name != self.divisor}
        divisor = sums[self.divisor] if self.divisor else weight
        return {name: total / divisor if divisor else math.nan for name, total in others.items()}

    def check(self) -> None:  # noqa: B027  optional
        """Checks before the launch that the run's model and data suit the loss; raises ValueError if they do not."""

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:  # noqa: B027  optional
        """Adds what the loss needs to a loaded model: a frozen `model.teacher`, parameters to train `model.objective`.

        Checkpoints have the parameters. A `states_head.StatesHead` is also saved beside the adapter, and applied where
        the adapter generates.

        Args:
            model: as `trainable.load_model` returns it.
            load: returns a frozen base model, on the CPU or without weights.
        """

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """Returns what the plan adds for this objective, for the tokens of a batch on one device."""
        return Cost()

    @abc.abstractmethod
    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """Computes the sums of one batch.

        Args:
            model: as `trainable.load_model` returns it, on the batch's device.
            batch: input_ids, labels, position_ids and segment_ids, (B, S) each.
        """


class SupervisedObjective(Objective):
    """The negative log-likelihood of the labels, in nats, with label smoothing in training alone.

    Each token with a label has weight 1.
    """

    one_by_one = True

    def __init__(self, optim: OptimConfig) -> None:
        self._optim = optim

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        return self.of_states(model, models.hidden_states(model, batch), batch, models.output_embedding(model))

    def of_states(
        self, model: torch.nn.Module, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], head: models.OutputHead
    ) -> Sums:
        """Computes the sums from last hidden states, (B, S, H)."""
        labels = shift_labels(batch["labels"], batch["segment_ids"])
        (hidden, labels), chunk = rows_in_chunks(self._optim.loss_chunk, [hidden, labels])
        likelihood = Likelihood(head, self._optim.label_smoothing if model.training else 0.0)
        labels = labels.flatten()
        (loss,) = chunked(likelihood, hidden.flatten(0, 1), head, [labels], chunk)
        return Sums(loss, (labels != IGNORE).sum().float())


class MixObjective(SupervisedObjective):
    """The supervised loss of a mix, whose logs show the loss of each source, `loss/NAME`.

    Batches that are trained have the source of each token, from 1 on; those that are evaluated are of one source each.
    """

    columns = MappingProxyType({"sources": (1, torch.int32)})

    def __init__(self, optim: OptimConfig, names: Sequence[str]) -> None:
        super().__init__(optim)
        self._names = tuple(names)
        self.extra = (*(f"loss/{name}" for name in names), *(f"tokens/{name}" for name in names))

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """See `Objective.means`; sources that the updates had no token of are left out."""
        counts = {name: sums[f"tokens/{name}"] for name in self._names}
        return {f"loss/{name}": sums[f"loss/{name}"] / count for name, count in counts.items() if count}

    def of_states(
        self, model: torch.nn.Module, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], head: models.OutputHead
    ) -> Sums:
        """See `SupervisedObjective.of_states`."""
        if "sources" not in batch:
            return super().of_states(model, hidden, batch, head)
        labels, count = shift_labels(batch["labels"], batch["segment_ids"]), len(self._names)
        (hidden, labels, sources), chunk = rows_in_chunks(self._optim.loss_chunk, [hidden, labels, batch["sources"]])
        likelihood = SourcedLikelihood(head, self._optim.label_smoothing if model.training else 0.0, count)
        inputs = [labels.flatten(), sources.flatten()]
        loss, *losses = chunked(likelihood, hidden.flatten(0, 1), head, inputs, chunk, sums=1 + count)
        carries = inputs[0] != IGNORE
        counts = [(carries & (inputs[1] == number)).sum().float() for number in range(1, count + 1)]
        return Sums(loss, carries.sum().float(), (*(one.detach() for one in losses), *counts))


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
    path = OBJECTIVES.get(name, name)
    if config.distill.teacher is not None:
        path = "tpu_kit.training.losses.distillation:DistillationObjective"
    elif name == "supervised":
        names = config.data.source_names
        return MixObjective(config.optim, names) if names else SupervisedObjective(config.optim)
    try:
        target = imported(path)
    except ValueError as error:
        raise ValueError(f"optim.objective={name}: {error}") from error
    is_class = isinstance(target, type)
    arguments, wanted = ((config,), "(config)") if is_class else ((None, None), "(model, batch)")
    try:
        inspect.signature(target).bind(*arguments)
    except TypeError as error:
        takes = f"{name}{inspect.signature(target)}"
        raise ValueError(f"optim.objective: {takes} is not called with these arguments; write {wanted}") from error
    objective = target(config) if is_class else FunctionObjective(target)
    if not isinstance(objective, Objective):
        raise ValueError(f"optim.objective={name} is a class, but no subclass of Objective; derive it from that")
    return objective
