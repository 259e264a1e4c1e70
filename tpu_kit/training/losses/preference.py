"""Losses of pairs of a chosen and a rejected reply: DPO and its family, on packed units of `data.pairs`.

Names and formulas follow TRL 1.16: `DPOTrainer`, for simpo `CPOTrainer` (without the likelihood that it weights with
`cpo_alpha`), for orpo `ORPOTrainer`, for kto `KTOTrainer`. Sums are over the whole update, so the loss depends on
neither the rows of a pass nor the number of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tpu_kit.config.loader import TrainConfig
from tpu_kit.config.sections.preference import PreferenceConfig
from tpu_kit.model import causal_lm as models
from tpu_kit.training.losses.loss import Likelihood, chunked, rows_in_chunks, shift_labels, token_logprobs
from tpu_kit.training.losses.segment_sums import last_of_segments, running_sum
from tpu_kit.training.objectives import Cost, Objective, Sums

_ELSEWHERE = -1.0
"""A placeholder log-probability at positions without a pair: at 0 the odds and their gradients would be infinite."""
_MOST_EXPONENT = 80.0  # its exponential is finite in fp32


class Scores(NamedTuple):
    """The numbers of all pairs, fp32 tensors of equal shape.

    Attributes:
        chosen: log-probability of the chosen reply, summed over its tokens.
        rejected: log-probability of the rejected reply.
        chosen_ratio: `chosen` minus the reference's log-probability.
        rejected_ratio: `rejected` minus the reference's log-probability.
        chosen_tokens: number of tokens of the chosen reply.
        rejected_tokens: number of tokens of the rejected reply.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_ratio: torch.Tensor
    rejected_ratio: torch.Tensor
    chosen_tokens: torch.Tensor
    rejected_tokens: torch.Tensor


def _score(ratio: torch.Tensor, preference: PreferenceConfig) -> torch.Tensor:
    """Computes f' of `preference.f_divergence`, up to a constant, from a log ratio (Wang et al., arXiv:2309.16240).

    For reverse_kl it returns `ratio`.
    """
    kind, alpha = preference.f_divergence, preference.f_alpha - 1.0
    if kind == "forward_kl":
        return 1 - torch.exp(-ratio)
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(ratio)
    if kind == "alpha_divergence" and abs(alpha) >= 1e-6:
        return (torch.exp((alpha * ratio).clamp(max=_MOST_EXPONENT)) - 1.0) / alpha
    return ratio


def _delta(scores: Scores, preference: PreferenceConfig) -> torch.Tensor:
    """Computes the difference of the `_score`s of every pair, chosen - rejected."""
    return _score(scores.chosen_ratio, preference) - _score(scores.rejected_ratio, preference)


def _mean_delta(scores: Scores, preference: PreferenceConfig) -> torch.Tensor:
    """Computes the difference of the scores per token, chosen - rejected."""
    chosen = _score(scores.chosen_ratio, preference) / scores.chosen_tokens
    return chosen - _score(scores.rejected_ratio, preference) / scores.rejected_tokens


def _sigmoid(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes the loss of DPO itself: -log sigmoid(beta * `_delta`), per pair as all these losses."""
    return -F.logsigmoid(p.pref_beta * _delta(scores, p))


def _hinge(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes max(0, 1 - beta * `_delta`)."""
    return torch.relu(1 - p.pref_beta * _delta(scores, p))


def _ipo(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes IPO's loss: (`_mean_delta` - 1 / (2 * beta)) ** 2."""
    return (_mean_delta(scores, p) - 1 / (2 * p.pref_beta)) ** 2


def _robust(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes DPO's loss, corrected for a share `pref_smoothing` of pairs with swapped labels."""
    logits, wrong = p.pref_beta * _delta(scores, p), p.pref_smoothing
    return (wrong * F.logsigmoid(-logits) - (1 - wrong) * F.logsigmoid(logits)) / (1 - 2 * wrong)


def _exo_pair(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes EXO's loss: the divergence KL(p, q) of p = sigmoid(beta * `_delta`) from q = 1 - `pref_smoothing`."""
    logits, wrong = p.pref_beta * _delta(scores, p), p.pref_smoothing
    won = torch.sigmoid(logits) * (F.logsigmoid(logits) - math.log1p(-wrong))
    return won + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - math.log(wrong))


def _nca_pair(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes NCA's loss from the rewards, beta * ratio: raises the chosen, and bounds both."""
    chosen, rejected = p.pref_beta * scores.chosen_ratio, p.pref_beta * scores.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco_pair(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes BCO's loss, without a shift: -log sigmoid(chosen reward) - log sigmoid(-rejected reward)."""
    return -F.logsigmoid(p.pref_beta * scores.chosen_ratio) - F.logsigmoid(-p.pref_beta * scores.rejected_ratio)


def _sppo_hard(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes SPPO's loss: squared distances of the ratios from 1 / (2 * beta) and -1 / (2 * beta)."""
    half = 0.5 / p.pref_beta
    return (scores.chosen_ratio - half) ** 2 + (scores.rejected_ratio + half) ** 2


def _apo_zero(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes APO-zero's loss, which raises the chosen reward and lowers the rejected reward."""
    return 1 - torch.sigmoid(p.pref_beta * scores.chosen_ratio) + torch.sigmoid(p.pref_beta * scores.rejected_ratio)


def _apo_down(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes APO-down's loss, which lowers the chosen reward, and the rejected reward by more."""
    apart = scores.chosen_ratio - scores.rejected_ratio
    return torch.sigmoid(p.pref_beta * scores.chosen_ratio) + 1 - torch.sigmoid(p.pref_beta * apart)


def _discopop(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes DiscoPOP's loss: the logistic loss, and for pairs with a larger margin the exponential loss."""
    logits = p.pref_beta * _delta(scores, p)
    share = torch.sigmoid(logits / p.discopop_tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _sigmoid_norm(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes DPO's loss with `_mean_delta`: -log sigmoid(beta * `_mean_delta`)."""
    return -F.logsigmoid(p.pref_beta * _mean_delta(scores, p))


def _simpo(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes SimPO's loss from mean log-probabilities of tokens, with the margin `simpo_gamma`."""
    apart = scores.chosen / scores.chosen_tokens - scores.rejected / scores.rejected_tokens
    logits, wrong = p.pref_beta * apart - p.simpo_gamma, p.pref_smoothing
    return -(1 - wrong) * F.logsigmoid(logits) - wrong * F.logsigmoid(-logits)


def _orpo(scores: Scores, p: PreferenceConfig) -> torch.Tensor:
    """Computes beta times ORPO's odds-ratio loss from mean log-probabilities of tokens, without its likelihood."""
    chosen, rejected = scores.chosen / scores.chosen_tokens, scores.rejected / scores.rejected_tokens
    return -p.pref_beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """Computes log(p / (1 - p)) from log p, with the accurate form of log(1 - p) for this p (Maechler, 2012)."""
    near_one = log_p >= -math.log(2)
    small = torch.where(near_one, log_p, _ELSEWHERE)
    large = torch.where(near_one, _ELSEWHERE, log_p)
    return log_p - torch.where(near_one, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))


LOSSES: Mapping[str, Callable[[Scores, PreferenceConfig], torch.Tensor]] = {
    "sigmoid": _sigmoid, "hinge": _hinge, "ipo": _ipo, "robust": _robust, "exo_pair": _exo_pair,
    "nca_pair": _nca_pair, "bco_pair": _bco_pair, "sppo_hard": _sppo_hard, "apo_zero": _apo_zero,
    "apo_down": _apo_down, "discopop": _discopop, "sigmoid_norm": _sigmoid_norm, "simpo": _simpo, "orpo": _orpo,
}  # fmt: skip
"""The losses of pairs, by name. sft and orpo's likelihood are sums over tokens instead; kto has no pairs."""


_OF_LABELS = ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected")


def _kto(ratio: torch.Tensor, kl: torch.Tensor, desirable: torch.Tensor, beta: float) -> torch.Tensor:
    """Computes KTO's loss of labelled replies (arXiv:2402.01306, equation 7) times |desirable|; bad if negative."""
    away = torch.where(desirable > 0, ratio - kl, kl - ratio)
    return desirable.abs() * (1 - torch.sigmoid(beta * away))


class PreferenceObjective(Objective):
    """The losses of `preference.losses`: means over pairs; sft and orpo's likelihood are means over tokens.

    A batch has the columns of `data.pairs.PairColumns`. Logs show means over pairs: the rewards of both replies, their
    margin, the share of pairs with a larger chosen reward, and the log-probabilities. A reward is `pref_beta` times the
    difference of log-probabilities from the reference; without a reference, times the mean log-probability of a token.
    With a reference, logs also show token_margins, the margin if rewards are divided by the replies' tokens, and
    reference_gap, the mean of |log-probability - reference's| per token. With kto, chosen and rejected are means over
    good and bad replies, and kl is the estimated divergence.
    """

    extra: tuple[str, ...] = (
        "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected",
        "token_margins", "reference_gap",
    )  # fmt: skip
    measures_held_out = True

    def __init__(self, config: TrainConfig) -> None:
        self._preference, self._chunk = config.preference, config.optim.loss_chunk
        floats = ("sign", "reference", "token_share")
        self.columns = {"pairs": (1, torch.int32), **{name: (1, torch.float32) for name in floats}}
        self.shares_prompts = "orpo" not in config.preference.losses
        self._in_step = config.preference.compares and config.preference.reference == "step"
        if config.preference.labelled:
            self.columns |= {"desirable": (1, torch.float32), "kl": (1, torch.float32)}
            self.extra = (*_OF_LABELS, "good", "bad", "reference_gap", "kl")
        elif not config.preference.compares:
            self.extra = self.extra[:-2]

    def means(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Returns the means that logs show, by name, from the `extra` sums of updates and `weight`, the pairs' number.

        Means over no pairs are NaN. For labelled replies `weight` is the number of replies; chosen is a mean over good
        replies, and rejected a mean over bad replies. A kind without replies is left out, and then also the margin.
        """
        if not self._preference.labelled:
            return super().means(sums, weight)
        counts = {"chosen": sums["good"], "rejected": sums["bad"]}
        found = {name: sums[name] / count for name in _OF_LABELS if (count := counts[name.partition("/")[2]])}
        if all(counts.values()):
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        return found | {name: sums[name] / weight if weight else math.nan for name in ("reference_gap", "kl")}

    def cost(self, tokens: int, hidden_size: int) -> Cost:
        """See `Objective.cost`: log-probabilities before the loss; a forward pass for reference=step or kto."""
        return Cost(output_products=1, forwards=int(self._in_step or self._preference.labelled))

    def logprobs(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computes the log-probabilities of both replies without a gradient.

        Returns:
            (3, B, S) on the device: the chosen reply's sum, the rejected reply's sum, and the log-probability of every
            single token, at the position that predicts it. The sums are at the last position of their pair, and weight
            tokens with |sign| of the batch. For labelled replies, the second is the mismatched reply's sum.
        """
        with torch.no_grad():
            labels = shift_labels(batch["labels"], batch["segment_ids"])
            hidden = models.hidden_states(model, batch)
            logps, _ = token_logprobs(hidden, models.output_embedding(model), labels, self._chunk)
            return torch.cat([running_sum(torch.stack(_sides(logps, batch["sign"])), batch["pairs"]), logps[None]])

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> Sums:
        """See `Objective.__call__`."""
        head, labels = models.output_embedding(model), shift_labels(batch["labels"], batch["segment_ids"])
        reference = None
        if self._in_step:
            with model.disable_adapter():  # type: ignore[operator]  # PEFT's; mypy takes it for a tensor
                reference = self.logprobs(model, batch)[:2]
        hidden = models.hidden_states(model, batch)
        logps, _ = token_logprobs(hidden, head, labels, self._chunk)
        learns = torch.is_grad_enabled()
        logps.requires_grad_(learns)
        loss, parts, count = self._loss(logps, batch, reference)
        if learns:
            (slope,) = torch.autograd.grad(loss, logps)
            (hidden, labels, slope), chunk = rows_in_chunks(self._chunk, [hidden, labels, slope])
            inputs = [labels.flatten(), -slope.flatten()]
            (weighted,) = chunked(Likelihood(head), hidden.flatten(0, 1), head, inputs, chunk)
            # The value of the loss, with the gradient of the weighted sum of log-probabilities.
            loss = loss.detach() + (weighted - weighted.detach())
        return Sums(loss, count, tuple(part.detach() for part in parts))

    def _loss(
        self, logps: torch.Tensor, batch: Mapping[str, torch.Tensor], reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
        """Computes the summed loss, the sums of `extra`, in order, and the number of pairs.

        `reference` is (2, B, S), as the first two of `logprobs`; if it is None, the batch has the reference.
        """
        preference, pairs, sign = self._preference, batch["pairs"], batch["sign"]
        last = last_of_segments(pairs)  # the position of every pair where running sums are complete
        count = last.sum().to(torch.float32)
        tokens = [(sign > 0).to(sign.dtype), (sign < 0).to(sign.dtype)]
        if reference is None and preference.compares:
            reference = running_sum(torch.stack([batch["reference"] * side for side in tokens]), pairs)
        sums = running_sum(torch.stack([*_sides(logps, sign), *tokens]), pairs)
        sums = torch.cat([sums, torch.zeros_like(sums[:2]) if reference is None else reference])
        each = [torch.where(last, one, _ELSEWHERE) for one in sums]
        chosen, rejected, chosen_tokens, rejected_tokens, *others = each
        scores = Scores(chosen, rejected, chosen - others[0], rejected - others[1], chosen_tokens, rejected_tokens)

        if preference.labelled:
            desirable, kl = (torch.where(last, batch[name], 0.0) for name in ("desirable", "kl"))
            losses = _kto(scores.chosen_ratio, kl, desirable, preference.pref_beta)
            loss = torch.where(last, losses, 0.0).sum()
            return loss, self._by_label(scores, last, desirable, kl), count

        loss = logps.new_zeros(())
        for name, weight in preference.weights.items():
            if name in LOSSES:
                loss = loss + weight * torch.where(last, LOSSES[name](scores, preference), 0.0).sum()
            if name in ("sft", "orpo"):
                loss = loss - weight * (batch["token_share"] * logps).sum()
        return loss, self._measured(scores, last), count

    def _measured(self, scores: Scores, last: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Computes the sums of `extra` over pairs, in order; `last` is true at the ends of pairs, where scores are."""
        beta = self._preference.pref_beta
        if self._preference.compares:
            rewards = [beta * scores.chosen_ratio, beta * scores.rejected_ratio]
        else:
            rewards = [
                beta * scores.chosen / scores.chosen_tokens,
                beta * scores.rejected / scores.rejected_tokens,
            ]
        each = [*rewards, rewards[0] - rewards[1], (rewards[0] > rewards[1]).float()]
        each += [scores.chosen, scores.rejected]
        if self._preference.compares:
            gap = scores.chosen_ratio.abs() + scores.rejected_ratio.abs()
            each.append(rewards[0] / scores.chosen_tokens - rewards[1] / scores.rejected_tokens)
            each.append(gap / (scores.chosen_tokens + scores.rejected_tokens))
        return tuple(torch.where(last, one, 0.0).sum().float() for one in each)

    def _by_label(
        self, scores: Scores, last: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Computes the sums of `extra` over labelled replies, in order; `last` is true at their ends, where scores are.

        `desirable` is above 0 for good replies, below 0 for bad replies.
        """
        good, bad = last & (desirable > 0), last & (desirable < 0)
        reward, gap = self._preference.pref_beta * scores.chosen_ratio, scores.chosen_ratio.abs() / scores.chosen_tokens
        each = [(reward, good), (reward, bad), (scores.chosen, good), (scores.chosen, bad)]
        ones = torch.ones_like(reward)
        each += [(ones, good), (ones, bad), (gap, last), (kl, last)]
        return tuple(torch.where(mask, one, 0.0).sum().float() for one, mask in each)


def _sides(logps: torch.Tensor, sign: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weighted log-probabilities of chosen tokens, 0 elsewhere, and of rejected tokens, 0 elsewhere."""
    return logps * sign.clamp(min=0), logps * (-sign).clamp(min=0)
