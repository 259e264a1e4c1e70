"""Error correction: the loss of a head on the last hidden states, trained beside the adapters or alone.

The residual of a token is r = -dL/dh, for the negative log-likelihood L of the label and the last hidden state h: for
a plain output layer with rows e_v it is e_label - sum_v p_v e_v. It is the target of the next learner in gradient
boosting (Friedman, 2001, The Annals of Statistics 29(5)), which the head is. Its density is estimated in a fixed random
projection, scaled by the root mean square of the embeddings; a trained projection would shrink r to raise its density.

The head reads h without a gradient to the model, so the adapters learn as without a head (only the clipping of
gradients is common), and an evaluation without the head measures what the head is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.models import causal_lm as models
from tpu_kit.models.error_correction import ErrorCorrection
from tpu_kit.training.loss import IGNORE, shift_labels
from tpu_kit.training.objectives import Objective, Sums, SupervisedObjective


class ErrorCorrectionObjective(Objective):
    """The negative log-likelihoods of the labels without and with the head, and that of the residual per dimension.

    In evaluation it is the likelihood with the head. With error-correction-alone the adapters stay as they are.
    """

    extra = ("nll", "nll_corrected", "nll_residual")

    def __init__(self, config: TrainConfig) -> None:
        self._seed, self._alone = config.optim.seed, config.optim.objective.endswith("-alone")
        self._supervised = SupervisedObjective(config.optim)

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:
        """Adds the head, whose output layer is closed, and the projection of residuals, which is not saved."""
        weight = models.output_embedding(model).weight.detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            head = ErrorCorrection(weight.shape[1])
            projection = torch.randn(head.settings["size"], weight.shape[1], dtype=torch.float32)
        length = torch.linalg.vector_norm(weight, dtype=torch.float32) / weight.shape[0] ** 0.5  # of an embedding
        head.register_buffer("projection", projection / length, persistent=False)
        model.objective = head

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        learns = model.training and not self._alone
        with torch.set_grad_enabled(learns):
            hidden = models.hidden_states(model, batch)
        corrected, estimate = model.get_submodule("objective")(hidden.detach())
        own, supervised = models.output_embedding(model), self._supervised
        if not model.training:
            return supervised.of_states(model, corrected, batch, own)
        hidden = hidden if learns else hidden.requires_grad_()
        nll, tokens, _ = supervised.of_states(model, hidden, batch, own)
        (slope,) = torch.autograd.grad(nll, hidden, retain_graph=True)
        residual = F.linear(-slope.float(), model.get_buffer("objective.projection"))
        fixed = own._replace(weight=own.weight.detach(), bias=None if own.bias is None else own.bias.detach())
        better = supervised.of_states(model, corrected, batch, fixed).loss
        labels = shift_labels(batch["labels"], batch["segment_ids"])
        density = torch.where(labels != IGNORE, estimate.log_prob(residual), 0.0).sum() / residual.shape[-1]
        return Sums(nll + better - density, tokens, (nll.detach(), better.detach(), -density.detach()))
