"""The loss of reinforcement learning: the clipped surrogate of GRPO and its variants, on packed completions.

Names, loss and gradients follow TRL's `GRPOTrainer`, with one difference. Sums are over the whole update, so the loss
depends on neither the rows of a pass nor the number of replicas, and bnpo equals dapo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.batching import Documents, PackedDataset
from tpu_kit.model import causal_lm as models
from tpu_kit.training.losses.loss import IGNORE, Likelihood, chunked, rows_in_chunks, shift_labels, token_logprobs
from tpu_kit.training.losses.segment_sums import sum_by_segment
from tpu_kit.training.objectives import Cost, Objective, Sums

GAP = 0.1
"""Logs count the tokens whose log-probabilities differ more than this between sampler and trainer, in nats."""


class PolicyObjective(Objective):
    """The surrogate loss of sampled completions; only tokens of completions have labels.

    A batch has fp32 (B, S) columns, with values at the position that predicts the token: advantages; share, 1 / tokens
    of the completion; weight, a part of the loss's divisor; sampler_logps, log-probabilities at sampling. With several
    updates per rollout it has old_logps, log-probabilities before the rollout's first update. With entropy_coef it has
    bonus, the weight of the token's entropy. Logs show means over tokens: entropy, shares clipped below and above, KL
    divergence from the reference, |trainer's - sampler's log-probability|, and the share above `GAP`.
    """

    extra = ("tokens", "entropy", "clip_low", "clip_high", "kl", "sampler_gap", "sampler_gap_outside")
    divisor = "tokens"
    shares_prompts = True
    one_by_one = True

    def __init__(self, config: TrainConfig) -> None:
        self._rl, self._chunk = config.rl, config.optim.loss_chunk
        names = ["advantages", "share", "weight", "sampler_logps"]
        names += ["old_logps"] if config.rl.updates_per_rollout > 1 else []
        names += ["bonus"] if config.rl.entropy_coef else []
        self.columns = {name: (1, torch.float32) for name in names}
        self.correction = config.rl.importance_sampling_correction
        if self.correction == "auto":  # sampler and trainer agree in fp32, but not with rounded weights
            self.correction = "off" if config.model.base_dtype == "fp32" else "sequence_mask"

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """See `Objective.cost`: log-probabilities before the loss, and with beta the reference's forward pass."""
        return Cost(output_products=1, forwards=int(bool(self._rl.beta)))

    def logprobs(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computes the labels' log-probabilities without a gradient, (B, S), at positions that predict them; else 0."""
        with torch.no_grad():
            labels = shift_labels(batch["labels"], batch["segment_ids"])
            hidden = models.hidden_states(model, batch)
            return token_logprobs(hidden, self._head(model), labels, self._chunk)[0]

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        head, labels = self._head(model), shift_labels(batch["labels"], batch["segment_ids"])
        reference = None
        if self._rl.beta:
            with model.disable_adapter():  # type: ignore[operator]  # PEFT's; mypy takes it for a tensor
                reference = self.logprobs(model, batch)
        hidden = models.hidden_states(model, batch)
        logps, entropy = token_logprobs(hidden, head, labels, self._chunk)
        mask = (labels != IGNORE).to(logps.dtype)
        with torch.enable_grad():  # only for the gradient of the loss with respect to the log-probabilities
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
        likelihood = Likelihood(head)
        (weighted,) = chunked(likelihood, hidden.flatten(0, 1), head, inputs, chunk)
        gap = (logps.detach() - batch["sampler_logps"]).abs() * mask
        extra = (mask, entropy * mask, *(part * mask for part in parts), gap, (gap > GAP).float())
        # The value of the loss, with the gradient of the weighted sum of log-probabilities.
        loss = loss.detach() + (weighted - weighted.detach())
        return Sums(loss, batch["weight"].sum(), tuple(part.detach().sum().float() for part in extra))

    def _head(self, model: torch.nn.Module) -> models.OutputHead:
        """Returns the output layer with logits divided by `sampling_temperature`."""
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
        """Returns the losses of tokens with the KL term, and (clipped below, clipped above, KL divergence), all (B, S).

        `mask` is 1 at tokens with loss, 0 elsewhere; the results are not masked. Without `reference` the KL term is 0.
        """
        rl, advantages, segments = self._rl, batch["advantages"], batch["segment_ids"]
        old = batch["old_logps"] if "old_logps" in batch else logps.detach()
        log_ratio = (logps - old) * mask
        if rl.importance_sampling_level == "sequence":
            log_ratio = sum_by_segment(log_ratio * batch["share"], segments)
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
        """Computes importance weights (B, S), capped or 0 above the cap, from log-probabilities, trainer - sampler."""
        level, _, bound = self.correction.partition("_")
        ratio = (sum_by_segment(difference, segments) if level == "sequence" else difference).exp()
        cap = self._rl.importance_sampling_cap
        return ratio.clamp(max=cap) if bound == "truncate" else torch.where(ratio <= cap, ratio, 0.0)


@dataclass(frozen=True)
class Sampled:
    """A completion of a prompt.

    Attributes:
        row: number of the data set row.
        prompt: token ids.
        tokens: ids of the completion, with its end token.
        logprobs: log-probabilities of the tokens at sampling, in nats.
        advantage: the completion's advantage over its group; 0 without rewards.
        learns: whether its tokens have loss.
    """

    row: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    learns: bool = True


def pack(
    sampled: Sequence[Sampled], config: TrainConfig, pad_id: int = 0, share_prompts: bool = False
) -> PackedDataset | None:
    """Packs prompts and completions into rows of `data.max_length` tokens, with the columns of the objective.

    With `rl.drops_flat_groups`, completions with advantage 0 or without loss are left out, and their part of the
    divisor is spread over the others. Returns None if no completion is left. The column old_logps is not set. With
    distill.on_policy there are no columns of the objective, and advantages do not matter.

    Without `share_prompts` every completion is a document that begins with its own prompt. With it, the completions of
    a prompt in a row follow one copy of the prompt. A completion is then a document that begins with the prompt's last
    token, which predicts the next; its prefix is the prompt without that token. Padding has the token `pad_id`.
    """
    rl, scored = config.rl, config.distill.on_policy  # a teacher scores every completion
    kept = [each for each in sampled if ((each.advantage or scored) and each.learns) or not rl.drops_flat_groups]
    if not kept:
        return None
    groups = _in_one_row(kept, config.data.max_length) if share_prompts else [[each] for each in kept]
    weights = [_weight(each, config) for each in sampled]
    whole = sum(weights) / max(1e-9, sum(_weight(each, config) for each in kept))
    # The entropy is a mean over tokens with loss, whatever the loss's divisor.
    bonus = rl.entropy_coef * sum(weights) / max(1, sum(each.learns * len(each.tokens) for each in sampled))

    def of_tokens(each: Sampled) -> dict[str, Sequence[float]]:
        """Returns the objective's columns for the tokens of a completion."""
        size = len(each.tokens)
        columns: dict[str, Sequence[float]] = {
            "advantages": [each.advantage] * size,
            "share": [1 / size] * size,
            "weight": [whole * _weight(each, config) / size] * size,
            "sampler_logps": each.logprobs,
        }
        return columns | ({"bonus": [bonus * each.learns] * size} if rl.entropy_coef else {})

    columns = _columns(groups, of_tokens)
    documents = Documents(
        columns.pop("ids"), columns.pop("loss"),
        np.array([len(group[0].prompt) - 1 + sum(1 + len(each.tokens) for each in group) for group in groups]),
        np.array([group[0].row for group in groups]),
    )  # fmt: skip
    rows = PackedDataset(documents, config.data.max_length, packing=config.data.packing, pad_id=pad_id)
    if not scored:
        rows.columns = {
            name: rows.column(values) for name, values in columns.items() if share_prompts or name not in _OF_PREFIXES
        }
    return rows


_OF_PREFIXES = {"position_ids": np.int64, "prefix_ids": np.int32, "segment_ids": np.int32}
"""The columns that let a group's completions attend to their prompt; see `layer_inputs.Visibility`."""
_DTYPES = {"ids": np.int32, "loss": np.bool_, **_OF_PREFIXES}


def _columns(
    groups: Sequence[Sequence[Sampled]], of_tokens: Callable[[Sampled], Mapping[str, Sequence[float]]]
) -> dict[str, np.ndarray]:
    """Joins columns of documents, (tokens,): for every group its prompt without the last token, then completions.

    Returns ids, loss, the columns in `_OF_PREFIXES`, and the columns of `of_tokens`. The values of `of_tokens` for a
    completion's tokens are at the positions that predict these tokens; other positions have 0.
    """
    documents: list[tuple[int, dict[str, Any]]] = []
    for number, group in enumerate(groups, 1):
        *context, last = group[0].prompt
        before = len(context)
        here = {"ids": context, "loss": False, "position_ids": range(before), "prefix_ids": number}
        documents.append((before, here | dict.fromkeys(of_tokens(group[0]), 0.0)))
        for each in group:
            size = 1 + len(each.tokens)
            here = {"ids": [last, *each.tokens], "loss": [False, *[each.learns] * len(each.tokens)]}
            here |= {"position_ids": range(before, before + size), "prefix_ids": -number}
            # Values are at the positions that predict the tokens.
            documents.append((size, here | {name: [*values, 0.0] for name, values in of_tokens(each).items()}))
    columns = {
        name: np.concatenate([np.broadcast_to(values[name], size) for size, values in documents])
        for name in documents[0][1]
    }
    columns["segment_ids"] = np.repeat(np.arange(1, len(documents) + 1), [size for size, _ in documents])
    return {name: values.astype(_DTYPES.get(name, np.float32)) for name, values in columns.items()}


def _in_one_row(sampled: Sequence[Sampled], length: int) -> list[list[Sampled]]:
    """Groups adjacent completions of equal prompts, in groups that fit into rows of `length` tokens together."""
    groups, free = list[list[Sampled]](), 0
    for each in sampled:
        size = 1 + len(each.tokens)
        if groups and each.prompt == groups[-1][-1].prompt and size <= free:
            groups[-1].append(each)
        else:
            size += len(each.prompt) - 1
            free = free if size <= free else length
            groups.append([each])
        free -= size
    return groups


def _weight(sampled: Sampled, config: TrainConfig) -> float:
    """Returns a completion's part of the loss's divisor: its tokens, or 0 if it does not learn.

    It is 1 if rl.loss_type is grpo, and rl.max_completion_length with dr_grpo.
    """
    if config.rl.loss_type == "grpo":
        return 1.0
    return float(
        config.rl.max_completion_length if config.rl.loss_type == "dr_grpo" else sampled.learns * len(sampled.tokens)
    )
