"""Objectives: the losses that a training step minimises, with their parameters and their cost for the planner."""

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
from tpu_kit.model.loop.layer_inputs import PREFIX_COLUMNS
from tpu_kit.training.losses.loss import IGNORE, Likelihood, SourcedLikelihood, chunked, rows_in_chunks, shift_labels

ROW = {"input_ids": torch.int64, "labels": torch.int64, "position_ids": torch.int64, "segment_ids": torch.int32}
"""The (B, S) tensors of every batch, as `PackedDataset.tensors` returns them."""


class Sums(NamedTuple):
    """Sums over one batch of this replica: fp32 scalars on the batch's device.

    Attributes:
        loss: the summed loss, with its graph.
        weight: the batch's part of the loss's divisor, such as its number of tokens with loss; the step sums it over
            replicas and passes.
        extra: one sum for each name in `Objective.extra`, without a graph; see `Objective.means`.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    extra: tuple[torch.Tensor, ...] = ()


class Frozen(NamedTuple):
    """Another model that an objective runs forward: its name in plans, and the number of (T, H) arrays it keeps."""

    name: str
    model: ModelConfig
    kept: int


class Cost(NamedTuple):
    """The memory and compute that an objective adds to a step with the supervised loss.

    Attributes:
        params: number of parameters of `model.objective`.
        saved: shapes of the fp32 tensors that it saves for the backward pass.
        output_products: number of multiplications of all tokens with the output layer.
        forwards: further forward passes of the model itself, without gradients.
        frozen: other models in memory; the loss computes their logits chunk by chunk.
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
        divisor: the name in `extra` by which logs divide the other sums; None divides them by the weight.
        columns: name -> (numbers per token, dtype) of the batch's further tensors, of shape (B, S * numbers).
        trains_model: whether the model's own parameters get gradients, or only `model.objective`.
        measures_held_out: whether evaluations also report the `extra` sums.
        shares_prompts: whether documents of a row see a common prefix if `attention.sees_all`; see `batch_columns`.
        one_by_one: whether the planner's estimate without a layer loop (remat=none) was compared with the TPU compiler;
            otherwise `auto` does not choose remat=none.
    """

    extra: tuple[str, ...] = ()
    divisor: str | None = None
    columns: Mapping[str, tuple[int, torch.dtype]] = MappingProxyType({})
    trains_model = True
    measures_held_out = False
    shares_prompts = False
    one_by_one = False

    def batch_columns(self, sees_all: bool) -> dict[str, tuple[int, torch.dtype]]:
        """Returns all tensors of a batch in the form of `columns`; `sees_all` is `attention.sees_all` of the model."""
        shared = PREFIX_COLUMNS if self.shares_prompts and sees_all else {}
        return {name: (1, dtype) for name, dtype in ROW.items()} | {**self.columns, **shared}

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns the means that logs show, by name: `extra` sums of some updates over the divisor, nan if it is 0."""
        others = {name: total for name, total in sums.items() if name != self.divisor}
        divisor = sums[self.divisor] if self.divisor else weight
        return {name: total / divisor if divisor else math.nan for name, total in others.items()}

    def check(self) -> None:  # noqa: B027  optional
        """Checks, before the launch, that the loss supports the run's model and data; raises ValueError if not."""

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:  # noqa: B027  optional
        """Adds the loss's modules to a loaded model: a frozen `model.teacher`, a trained `model.objective`.

        Checkpoints include the parameters of `model.objective`. A `states_head.StatesHead` is also saved beside the
        adapter, and applied when the adapter generates.

        Args:
            model: as `trainable.load_model` returns it.
            load: returns a frozen base model, on the CPU or without weights.
        """

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """Returns the cost beyond the supervised loss, for `tokens` tokens of a batch on a device; none by default."""
        return Cost()

    @abc.abstractmethod
    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """Computes the sums of one batch.

        Args:
            model: as `trainable.load_model` returns it, on the batch's device.
            batch: the (B, S) tensors of `ROW`, and the tensors of `columns`.
        """


class SupervisedObjective(Objective):
    """The negative log-likelihood of the labels, in nats, with label smoothing in training only.

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
        """Computes the sums from the last hidden states, (B, S, H); `model` only tells whether it trains.

        `batch` must have "labels", not shifted, and "segment_ids"; `head` is the output layer.
        """
        labels = shift_labels(batch["labels"], batch["segment_ids"])
        (hidden, labels), chunk = rows_in_chunks(self._optim.loss_chunk, [hidden, labels])
        likelihood = Likelihood(head, self._optim.label_smoothing if model.training else 0.0)
        labels = labels.flatten()
        (loss,) = chunked(likelihood, hidden.flatten(0, 1), head, [labels], chunk)
        return Sums(loss, (labels != IGNORE).sum().float())


class MixObjective(SupervisedObjective):
    """The supervised loss of a mix of sources; logs show every source's loss without label smoothing, `loss/NAME`.

    Training batches have the source number of each token, from 1. An evaluation batch has rows of a single source.
    """

    columns = MappingProxyType({"sources": (1, torch.int32)})

    def __init__(self, optim: OptimConfig, names: Sequence[str]) -> None:
        super().__init__(optim)
        self._names = tuple(names)
        self.extra = (*(f"loss/{name}" for name in names), *(f"tokens/{name}" for name in names))

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns "loss/NAME" -> mean over a source's tokens; sources without a token in these updates are left out."""
        counts = {name: sums[f"tokens/{name}"] for name in self._names}
        return {f"loss/{name}": sums[f"loss/{name}"] / count for name, count in counts.items() if count}

    def of_states(
        self, model: torch.nn.Module, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], head: models.OutputHead
    ) -> Sums:
        """Computes the sums as `SupervisedObjective.of_states`; `extra` has every source's loss, then its tokens.

        Without "sources" in the batch, as in evaluation, `extra` is empty.
        """
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
    """A user's function with the arguments and result of `Objective.__call__`."""

    def __init__(self, function: Callable[[torch.nn.Module, Mapping[str, torch.Tensor]], Sums]) -> None:
        self._function = function

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        return self._function(model, batch)


def objective_of(config: TrainConfig) -> Objective:
    """Returns the objective of a run: distillation with a teacher, else `optim.objective`.

    For supervised it is `MixObjective` if data.source is a list, else `SupervisedObjective`. `optim.objective` may name
    a function (model, batch) -> Sums, or a subclass of `Objective`, which is constructed with the configuration. Raises
    ValueError if it cannot be imported, takes other arguments, or is another class.
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
        raise ValueError(f"optim.objective: {takes} must take the arguments {wanted}; change it") from error
    objective = target(config) if is_class else FunctionObjective(target)
    if not isinstance(objective, Objective):
        raise ValueError(f"optim.objective={name} is a class, but not a subclass of Objective; derive it from that")
    return objective
