"""Error correction: a head on the last hidden states, trained beside the adapters or alone.

For a last hidden state h with root mean square s, the head computes

    f = silu(A h / s + a),   p(r | h) = sum_k w_k(f) N(r; m_k(f), diag(d_k(f))^2),   h' = h + tanh(g) s U [f, E[r | h]]

p is a mixture-density network (Bishop, 1994, Neural Computing Research Group report NCRG/94/004). It models the
residual r = -dL/dh, where L is the label's negative log-likelihood: for a plain output layer with rows e_v,
r = e_label - sum_v p_v e_v. In gradient boosting (Friedman, 2001, The Annals of Statistics 29(5)), r is the target of
the next learner, here the head. Its density is estimated in a fixed random projection, scaled by the root mean square
of the embeddings; a trained projection would shrink r to raise its density. The gate g starts at 0 (as in Flamingo,
Alayrac et al., arXiv:2204.14198), so an untrained head changes nothing.

The head passes no gradient to h, so the adapters learn as without a head, except that gradients are clipped together.
An evaluation without the head therefore shows the head's gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.model.states_head import StatesHead
from tpu_kit.training.losses.loss import IGNORE, shift_labels
from tpu_kit.training.objectives import Cost, Objective, Sums, SupervisedObjective

_LEAST = 1e-2  # smallest standard deviation: keeps the density finite for residuals near 0


class Mixture(NamedTuple):
    """Mixtures of K Gaussians with diagonal covariances in D dimensions, one mixture per token.

    Attributes:
        log_weights: (..., K) logarithms of the mixture weights.
        means: (..., K, D).
        deviations: (..., K, D) standard deviations.
    """

    log_weights: torch.Tensor
    means: torch.Tensor
    deviations: torch.Tensor

    def mean(self) -> torch.Tensor:
        """Returns the expectation, (..., D)."""
        return (self.log_weights.exp()[..., None] * self.means).sum(-2)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the logarithm of the density at `value`, (..., D): (...) nats."""
        apart = (value[..., None, :] - self.means) / self.deviations
        each = -(apart.square() / 2 + self.deviations.log() + math.log(2 * math.pi) / 2).sum(-1)
        return torch.logsumexp(self.log_weights + each, dim=-1)


class ErrorCorrection(StatesHead):
    """The head; parameters and computation are in fp32.

    Args:
        hidden_size: the model's hidden size H.
        width: number of features in the head's hidden layer f.
        components: number K of Gaussians.
        size: number D of dimensions of the projected residual.
    """

    name = "error_correction"

    def __init__(self, hidden_size: int, width: int = 128, components: int = 4, size: int = 16) -> None:
        super().__init__()
        self.settings = {"hidden_size": hidden_size, "width": width, "components": components, "size": size}
        self.trunk = torch.nn.Linear(hidden_size, width, dtype=torch.float32)
        self.mixture = torch.nn.Linear(width, components * (1 + 2 * size), dtype=torch.float32)
        self.output = torch.nn.Linear(width + size, hidden_size, bias=False, dtype=torch.float32)
        self.gate = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, Mixture]:
        """Returns (corrected states, mixtures) for last hidden states h, (..., H), on their device.

        Corrected states are (..., H) in the dtype of `hidden`. The mixtures, in fp32, are the estimated density of
        -dL/dh in D random projections (`projection`), where L is the negative log-likelihood of the label.
        """
        states = hidden.float()
        scale = (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        features = F.silu(_linear(self.trunk, states / scale))
        count, size = self.settings["components"], self.settings["size"]
        weights, rest = _linear(self.mixture, features).split([count, 2 * count * size], dim=-1)
        means, raw = rest.unflatten(-1, (count, 2 * size)).split(size, dim=-1)
        estimate = Mixture(F.log_softmax(weights, dim=-1), means, F.softplus(raw) + _LEAST)
        correction = _linear(self.output, torch.cat([features, estimate.mean()], dim=-1))
        return (states + torch.tanh(self.gate.float()) * scale * correction).to(hidden.dtype), estimate

    def correct(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `StatesHead.correct`."""
        return self(hidden)[0]


def _linear(layer: torch.nn.Linear, states: torch.Tensor) -> torch.Tensor:
    """Applies a linear layer to fp32 states with its weights in fp32."""
    return F.linear(states, layer.weight.float(), None if layer.bias is None else layer.bias.float())


class ErrorCorrectionObjective(Objective):
    """The sum of three negative log-likelihoods: labels without head, labels with head, residual per dimension.

    Logs have the three parts (`extra`). In evaluation, the loss is only the labels' with the head. With
    error-correction-alone, the adapters are not trained.
    """

    extra = ("nll", "nll_corrected", "nll_residual")

    def __init__(self, config: TrainConfig) -> None:
        self._seed, self.trains_model = config.optim.seed, not config.optim.objective.endswith("-alone")
        self._supervised = SupervisedObjective(config.optim)

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:
        """Sets `model.objective` to an `ErrorCorrection` head that changes nothing before training.

        Its parameters and its buffer `projection`, (D, H) fp32, are random by `optim.seed`; the global random state
        does not change. The buffer is not saved. `load` is not used.
        """
        weight = models.output_embedding(model).weight.detach()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            head = ErrorCorrection(weight.shape[1])
            projection = torch.randn(head.settings["size"], weight.shape[1], dtype=torch.float32)
        length = torch.linalg.vector_norm(weight, dtype=torch.float32) / weight.shape[0] ** 0.5  # of an embedding
        head.register_buffer("projection", projection / length, persistent=False)
        model.objective = head

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """See `Objective.cost`; the extra products are the logits of h' and the gradient of L with respect to h."""
        with torch.device("meta"):
            head = ErrorCorrection(hidden_size)
        gaussians = (tokens, head.settings["components"], head.settings["size"])
        return Cost(sum(param.numel() for param in head.parameters()), (gaussians,) * 6, output_products=2)

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        learns = model.training and self.trains_model
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
        better = supervised.of_states(model, corrected, batch, own.detached()).loss
        labels = shift_labels(batch["labels"], batch["segment_ids"])
        density = torch.where(labels != IGNORE, estimate.log_prob(residual), 0.0).sum() / residual.shape[-1]
        return Sums(nll + better - density, tokens, (nll.detach(), better.detach(), -density.detach()))
