"""How likely the tokens of given rows are, without ever holding all their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tpu_kit.model import output_embedding
from tpu_kit.padding import filled, fitting
from tpu_kit.runtime import Runtime

if TYPE_CHECKING:
    from tpu_kit.decoding import Decoder

_AT_ONCE = 64  # positions of a row whose logits exist at a time
_RATED = 4096  # tokens of a batch, at most


class Rating(NamedTuple):
    """How likely the tokens of a row are, from the second on.

    Attributes:
        logprobs: their log-probabilities after those before them, in nats.
        likeliest: whether each was the likeliest.
    """

    logprobs: list[float]
    likeliest: list[bool]


class Rater:
    """Rates rows of token ids, in batches of few shapes.

    Args:
        decoder: the model.
        rt: the replica.
        widths: the widths that rows are padded to on XLA; wider ones are twice the one before.
        batch_size: the most rows of a batch.
        positions: the most tokens of a row.
    """

    def __init__(self, decoder: Decoder, rt: Runtime, widths: Sequence[int], batch_size: int, positions: float) -> None:
        self._decoder, self._rt, self._widths = decoder, rt, widths
        self._batch_size, self._positions = batch_size, positions

    def rate(self, rows: Sequence[Sequence[int]]) -> list[Rating]:
        """How likely the tokens of each row are.

        Raises:
            ValueError: a row has fewer than two tokens, or more than the model has positions.
        """
        found = self._run(rows, 0, 1)
        return [found[row] for row in range(len(rows))]

    def share(self, rows: Sequence[Sequence[int]]) -> dict[int, Rating]:
        """This replica's part of `rate`: number of the row -> rating. Every replica must call it with the same rows."""
        return self._run(rows, self._rt.rank, self._rt.world_size)

    def _run(self, rows: Sequence[Sequence[int]], rank: int, world: int) -> dict[int, Rating]:
        for number, length in enumerate(map(len, rows)):
            if not 2 <= length <= self._positions:
                raise ValueError(f"row {number} has {length} tokens; it must have 2 to {self._positions:g}")
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]), reverse=True)
        found: dict[int, Rating] = {}
        start = 0
        with self._decoder.ready():
            while start < len(order):
                longest = len(rows[order[start]])
                width = fitting(longest, self._widths) if self._rt.is_xla else longest
                size = 1 if len(rows) == 1 else max(1, min(self._batch_size, _RATED // width))
                # Every replica takes part in every round, if only with a batch of nothing: see rehearsal.py.
                mine = order[start : start + size * world][rank::world]
                start += size * world
                if not mine and not self._rt.is_xla:
                    break
                ids, _ = filled([rows[row] for row in mine], width, size if self._rt.is_xla else len(mine))
                logprobs, likeliest = self._decoder.score(ids)
                for place, row in enumerate(mine):
                    end = len(rows[row]) - 1
                    found[row] = Rating(logprobs[place, :end].tolist(), likeliest[place, :end].bool().tolist())
        return found


def token_scores(model: torch.nn.Module, causal: Any, ids: torch.Tensor, device_type: str) -> torch.Tensor:
    """How likely each next token of some rows is.

    Args:
        model: what `decoding.Decoder` was given, in its care.
        causal: the model of transformers in it.
        ids: (B, W) int64, filled up behind, on the device.
        device_type: "tpu", "xla-cpu", "cuda" or "cpu".

    Returns:
        (2, B, W) fp32: at i the log-probability, in nats, of token i + 1 after those up to i; and 1 where it is the
        likeliest. At the last place there is nothing to be read.

    Raises:
        ValueError: the output head is not a plain linear layer.
    """
    head = output_embedding(model)
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
    output = causal.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False, device_type=device_type)
    wanted = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    parts = []
    for hidden, targets in zip(output.last_hidden_state.split(_AT_ONCE, 1), wanted.split(_AT_ONCE, 1), strict=True):
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float() * head.scale
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
        chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        likeliest = (logits.argmax(-1) == targets).float()
        parts.append(torch.stack([chosen - torch.logsumexp(logits, -1), likeliest]))
    return torch.cat(parts, -1)
