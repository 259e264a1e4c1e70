"""Texts about the held-out loss of a run: the loss before training, and a warning if it did not fall."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tpu_kit.config.schema import LEAST_UPDATES

BEFORE_TRAINING = "start"
"""The `kind` of the record in metrics.jsonl with the held-out loss before the first update."""
MORE_UPDATES = "raise optim.max_steps or optim.epochs, or lower optim.batch_size or data.max_length"


def describe_start(loss: float, vocabulary: int | None) -> str:
    """Describes the held-out loss before training, beside a uniform guess if the vocabulary's size is given."""
    beside = f"; {math.log(vocabulary):.4g} is a uniform guess among {vocabulary:,} tokens" if vocabulary else ""
    return f"held-out loss    {loss:.4g} before training{beside}"


def not_learned(records: Iterable[Mapping[str, Any]], final: Mapping[str, float], updates: int) -> str:
    """Says that a run seems to have learned nothing, with advice; empty if its held-out loss fell, or is unknown.

    If the loss is a likelihood of tokens, it must also be below a uniform guess.

    Args:
        records: records of metrics.jsonl. The record of kind "start" has the loss before; without it that is unknown.
        final: metrics of the resulting weights, as `recipes.replica.fine_tune` returns them.
        updates: number of updates of the run.
    """
    start = next((record for record in records if record["kind"] == BEFORE_TRAINING), None)
    if start is None or start["loss"] is None or "eval_loss" not in final:
        return ""
    before, after, uniform = start["loss"], final["eval_loss"], start["uniform"]
    fell, knows = after < before, uniform is None or after < uniform  # both False for NaN
    if fell and knows:
        return ""
    text = f"the held-out loss {'fell only' if fell else 'did not fall'} from {before:.4g} to {after:.4g}"
    text += "" if knows else f"; a uniform guess has {uniform:.4g}, so the model answers such rows at random"
    if not fell or final["skipped_updates"] > updates / 4:
        return f"{text}. Try a third of optim.learning_rate"
    if updates < LEAST_UPDATES:
        return f"{text}. {updates} updates are few: {MORE_UPDATES}"
    return f"{text}. Try three times optim.learning_rate, more updates, or another model"
