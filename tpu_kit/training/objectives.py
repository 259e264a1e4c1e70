"""Objectives: the losses that a training step minimises."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tpu_kit.config.loader import ModelConfig, OptimConfig
from tpu_kit.models import causal_lm as models
from tpu_kit.training.loss import chunked_nll, rows_in_chunks, shift_labels


class Sums(NamedTuple):
    """Sums over one batch of this replica: fp32 scalars on the batch's device.

    Attributes:
        loss: the summed loss, with its graph.
        weight: the divisor of the loss, such as the number of tokens with loss, summed over replicas and passes.
        extra: one sum for each name in `Objective.extra`, without a graph; logs show it divided by the weight.
    """

    loss: torch.Tensor
    weight: torch.Tensor
    extra: tuple[torch.Tensor, ...] = ()


class Objective(abc.ABC):
    """A loss summed over a batch. It is a part of the step's program, so it must not read tensors on the host.

    Attributes:
        extra: names of further sums for the log.
        columns: name -> (numbers for each token, dtype) of tensors that the batch has besides, (B, S * numbers) each.
    """

    extra: tuple[str, ...] = ()
    columns: Mapping[str, tuple[int, torch.dtype]] = MappingProxyType({})

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:  # noqa: B027  optional
        """Adds what the loss needs to a loaded model: a frozen `model.teacher`, parameters to train `model.objective`.

        Args:
            model: as `causal_lm.load_model` returns it.
            load: returns a frozen base model, on the CPU or without weights.
        """

    @abc.abstractmethod
    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """Computes the sums of one batch.

        Args:
            model: as `causal_lm.load_model` returns it, on the batch's device.
            batch: input_ids, labels, position_ids and segment_ids, (B, S) each.
        """


class SupervisedObjective(Objective):
    """The negative log-likelihood of the labels, in nats; each token with a label has weight 1.

    Args:
        optim: the chunk of the loss, and the label smoothing, which applies only in training.
    """

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
        hidden, smoothing = hidden.flatten(0, 1), self._optim.label_smoothing if model.training else 0.0
        found = chunked_nll(
            hidden, head.weight, labels.flatten(), chunk, head.softcap, smoothing, head.bias, head.scale
        )
        return Sums(*found)
