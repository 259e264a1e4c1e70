"""The loss of reinforcement learning: the clipped surrogate of GRPO and its variants, on packed rows.

The names are those of TRL's `GRPOTrainer`, whose loss and gradients these are, with one difference: sums are over the
whole update, so the loss depends on neither the rows of a pass nor the number of replicas (and bnpo equals dapo).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu_kit.config.loader import ModelConfig, TrainConfig
from tpu_kit.models import causal_lm as models
from tpu_kit.training.loss import IGNORE, Likelihood, chunked, rows_in_chunks, shift_labels, token_logprobs
from tpu_kit.training.objectives import Cost, Objective, Sums

GAP = 0.1
"""A difference, in nats, between the sampler's and the trainer's log-probability of a token that is counted."""


class PolicyObjective(Objective):
    """The surrogate loss of sampled completions, with labels at their tokens alone.

    A batch has these columns, fp32 (B, S), at the position that predicts the token: advantages; share, 1 / tokens of
    the completion; weight, the token's part of the loss's divisor; sampler_logps, log-probabilities when it was
    sampled; with several updates of one rollout old_logps, those before the first of them; and with entropy_coef bonus,
    the weight of the token's entropy.
    """

    extra = ("tokens", "entropy", "clip_low", "clip_high", "kl", "sampler_gap", "sampler_gap_outside")
    divisor = "tokens"

    def __init__(self, config: TrainConfig) -> None:
        self._rl, self._chunk = config.rl, config.optim.loss_chunk
        names = ["advantages", "share", "weight", "sampler_logps"]
        names += ["old_logps"] if config.rl.updates_per_rollout > 1 else []
        names += ["bonus"] if config.rl.entropy_coef else []
        self.columns = {name: (1, torch.float32) for name in names}
        self.correction = config.rl.importance_sampling_correction
        if self.correction == "auto":  # sampler and trainer compute alike in fp32; rounded, their programs differ
            self.correction = "off" if config.model.base_dtype == "fp32" else "sequence_mask"

    def attach(self, model: torch.nn.Module, load: Callable[[ModelConfig], Any]) -> None:
        """Adds nothing; with beta the model without its adapter is the reference."""
        if self._rl.beta and not hasattr(model, "disable_adapter"):
            raise ValueError(
                "rl.beta compares with the model without its adapter, and lora.r=0 has none; set rl.beta=0"
            )

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """See `Objective.cost`: the log-probabilities are computed before the loss, and with beta the reference's."""
        return Cost(output_products=1, forwards=int(bool(self._rl.beta)))

    def logprobs(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computes the log-probabilities of the labels without a gradient, (B, S) at the position that predicts."""
        with torch.no_grad():
            labels = shift_labels(batch["labels"], batch["segment_ids"])
            hidden = models.hidden_states(model, batch)
            return token_logprobs(hidden, self._head(model), labels, self._chunk)[0]

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        head, labels = self._head(model), shift_labels(batch["labels"], batch["segment_ids"])
        reference = None
        if self._rl.beta:
            with model.disable_adapter():  # type: ignore[operator]  # of PEFT; mypy takes it for a tensor
                reference = self.logprobs(model, batch)
        hidden = models.hidden_states(model, batch)
        logps, entropy = token_logprobs(hidden, head, labels, self._chunk)
        mask = (labels != IGNORE).to(logps.dtype)
        with torch.enable_grad():  # of a vector: the gradient of the loss with respect to the log-probabilities
            logps.requires_grad_()
            losses, parts = self._surrogate(logps, mask, batch, reference)
            per_token = batch["share"] if self._rl.loss_type == "grpo" else torch.ones_like(mask)
            loss = (losses * mask * per_token).sum()
            (slope,) = torch.autograd.grad(loss, logps)
        weights = [-slope]
        if self._rl.entropy_coef:
            loss = loss - (batch["bonus"] * entropy).sum()
            weights.append(batch["bonus"])
        (hidden, labels, *weights), chunk = rows_in_chunks(self._chunk, [hidden, labels, *weights])
        inputs = [each.flatten() for each in (labels, *weights)]
        likelihood = Likelihood(head, weighted=True, bonus=len(weights) > 1)
        (weighted,) = chunked(likelihood, hidden.flatten(0, 1), head, inputs, chunk)
        gap = (logps.detach() - batch["sampler_logps"]).abs() * mask
        extra = (mask, entropy * mask, *(part * mask for part in parts), gap, (gap > GAP).float())
        # The value of the loss, with the gradient of the weighted sum of log-probabilities.
        loss = loss.detach() + (weighted - weighted.detach())
        return Sums(loss, batch["weight"].sum(), tuple(part.detach().sum().float() for part in extra))

    def _head(self, model: torch.nn.Module) -> models.OutputHead:
        """The output layer whose logits are divided by the temperature of the samples."""
        head, temperature = models.output_embedding(model), self._rl.sampling_temperature
        softcap = head.softcap and head.softcap / temperature
        return head._replace(scale=head.scale / temperature, softcap=softcap)

    def _surrogate(
        self,
        logps: torch.Tensor,
        mask: torch.Tensor,
        batch: Mapping[str, torch.Tensor],
        reference: torch.Tensor | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Computes the loss of each token, (B, S), and of each whether it is clipped below, above, and its KL."""
        rl, advantages, segments = self._rl, batch["advantages"], batch["segment_ids"]
        old = batch["old_logps"] if "old_logps" in batch else logps.detach()
        log_ratio = (logps - old) * mask
        if rl.importance_sampling_level == "sequence":
            log_ratio = sum_by_document(log_ratio * batch["share"], segments)
        ratio = log_ratio.exp()
        low, high = (ratio < 1 - rl.epsilon) & (advantages < 0), ratio > 1 + rl.epsilon_high
        if rl.loss_type == "cispo":
            losses = -ratio.clamp(max=rl.epsilon_high).detach() * advantages * logps
            low, high = torch.zeros_like(low), ratio > rl.epsilon_high
        else:
            clipped = ratio.clamp(1 - rl.epsilon, 1 + rl.epsilon_high)
            bounded = ratio if rl.delta is None else ratio.clamp(max=rl.delta)
            losses = -torch.minimum(bounded * advantages, clipped * advantages)
        if self.correction != "off":
            losses = losses * self._correction((old - batch["sampler_logps"]) * mask, segments)
        kl = torch.zeros_like(losses)
        if reference is not None:
            away = reference - logps
            kl = away.exp() - away - 1
            kl = kl * ratio if rl.use_bias_correction_kl else kl
            losses = losses + rl.beta * kl
        return losses, (low, high & (advantages > 0), kl)

    def _correction(self, difference: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Computes importance weights for the difference between trainer and sampler, (B, S)."""
        level, _, bound = self.correction.partition("_")
        ratio = (sum_by_document(difference, segments) if level == "sequence" else difference).exp()
        cap = self._rl.importance_sampling_cap
        return ratio.clamp(max=cap) if bound == "truncate" else torch.where(ratio <= cap, ratio, 0.0)


def sum_by_document(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at each position of packed rows (B, S) the sum over the positions of its document."""
    same = segments[:, :, None] == segments[:, None, :]
    return torch.where(same, values[:, None, :], 0.0).sum(-1)
