"""Rollouts: sampled completions with their advantages, as packed rows for `policy.PolicyObjective`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tpu_kit.config.loader import TrainConfig
from tpu_kit.data.batching import Documents, PackedDataset


@dataclass(frozen=True)
class Sampled:
    """A completion of a prompt.

    Attributes:
        row: number of the data set row.
        prompt: token ids.
        tokens: ids of the completion, with the one that ended it.
        logprobs: of the tokens when they were sampled, in nats.
        advantage: how much better it is than its group.
        learns: whether its tokens carry loss.
    """

    row: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    learns: bool = True


def pack(sampled: Sequence[Sampled], config: TrainConfig, pad_id: int = 0) -> PackedDataset | None:
    """Packs completions behind their prompts into rows of `data.max_length` with the columns of the objective.

    Completions that change nothing are left out with `rl.drop_zero_advantage`, and their part of the divisor is spread
    over the others. Returns None if none is left.
    """
    rl = config.rl
    kept = [each for each in sampled if (each.advantage and each.learns) or not rl.drops_flat_groups]
    if not kept:
        return None
    whole = sum(_weight(each, config) for each in sampled) / max(1e-9, sum(_weight(each, config) for each in kept))
    documents = Documents(
        np.concatenate([[*each.prompt, *each.tokens] for each in kept]).astype(np.int32),
        np.concatenate([[False] * len(each.prompt) + [each.learns] * len(each.tokens) for each in kept]),
        np.array([len(each.prompt) + len(each.tokens) for each in kept]),
        np.array([each.row for each in kept]),
    )
    rows = PackedDataset(documents, config.data.max_length, packing=config.data.packing, pad_id=pad_id)
    values = {
        "advantages": [[each.advantage] * len(each.tokens) for each in kept],
        "share": [[1 / len(each.tokens)] * len(each.tokens) for each in kept],
        "weight": [[whole * _weight(each, config) / len(each.tokens)] * len(each.tokens) for each in kept],
        "sampler_logps": [each.logprobs for each in kept],
    }
    # At the positions that predict the tokens.
    before = [[0.0] * (len(each.prompt) - 1) for each in kept]
    rows.columns = {
        name: rows.column(
            np.concatenate([[*b, *a, 0.0] for b, a in zip(before, column, strict=True)], dtype=np.float32)
        )
        for name, column in values.items()
    }
    return rows


def _weight(sampled: Sampled, config: TrainConfig) -> float:
    """Returns a completion's part of the divisor of the loss."""
    if config.rl.loss_type == "grpo":
        return 1.0
    return float(
        config.rl.max_completion_length if config.rl.loss_type == "dr_grpo" else sampled.learns * len(sampled.tokens)
    )
