"""Finds tokens of a run's rows that the base model was never trained on, by the rows of its output layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tpu_kit.data.chat.new_tokens import occurrences
from tpu_kit.data.prepare import Prepared

_SAME = 0.99  # cosine of equal rows of the output layer; 29 of SmolLM2's 49,152 rows have an equal among 1,024 others
_NEIGHBOURS, _REFERENCES = 2, 1024
_LEAST_SHARE = 0.01  # share of the tokens with loss
_SHOWN = 5  # tokens in the text


def untrained_tokens(weight: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    """Returns the tokens of `ids`, in order, whose rows of the output layer seem untrained, (M,).

    Tokens that never occur in the training data get the same gradients, so their rows end nearly equal (Land and
    Bartolo, "Fishing for Magikarp", arXiv:2405.05417). A row seems untrained if it nearly equals two of up to 1,024
    others, spread over the vocabulary.

    Args:
        weight: weight of the output layer, (V, H), of any float dtype, on the CPU.
        ids: tokens to check, (N,) integers.
    """

    def directions(rows: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.normalize(weight.detach()[torch.from_numpy(rows)].float(), dim=1)

    others = np.linspace(0, len(weight) - 1, min(_REFERENCES, len(weight))).astype(np.int64)
    near = directions(ids) @ directions(others).T >= _SAME
    near &= torch.from_numpy(ids[:, None] != others)
    return ids[near.sum(1).numpy() >= _NEIGHBOURS]


def describe_untrained(prepared: Prepared, weight: torch.Tensor, frozen: bool, learned: Sequence[int] = ()) -> str:
    """Describes the share of training tokens with loss that the base was never trained on; empty below 1 %.

    Empty also for random tokens and reinforcement learning. Ignores the tokenizer's added tokens: an instruction-tuned
    model knows them although their rows hardly changed.

    Args:
        prepared: the data.
        weight: weight of the base's output layer, (V, H), on the CPU.
        frozen: whether the output layer stays as it is, as under adapters of other layers; the text then advises
            lora.tokens.
        learned: ids of the tokens whose rows are trained nevertheless; they do not count.
    """
    if prepared.encoder is None or prepared.tasks:
        return ""
    documents, tokenizer = prepared.train.documents, prepared.encoder.tokenizer
    counts = occurrences(documents, with_loss=True)
    ids = np.flatnonzero(counts)
    counts = counts[ids]
    known = [*tokenizer.added_tokens_decoder, *learned]
    found = np.isin(ids, untrained_tokens(weight, ids)) & ~np.isin(ids, known)
    if (share := counts[found].sum() / max(1, counts.sum())) < _LEAST_SHARE:
        return ""
    order = np.argsort(-counts[found], kind="stable")
    names = ", ".join(repr(tokenizer.decode([number])) for number in ids[found][order][:_SHOWN])
    more = f" and {found.sum() - _SHOWN} more" if found.sum() > _SHOWN else ""
    advice = "Remove them from the rows, or take another model"
    if frozen:
        advice = f"Adapters do not train its output layer. {advice}, or name these tokens in lora.tokens"
    return f"{share:.0%} of the tokens with loss are {names}{more}, which the base model was never trained on. {advice}"
