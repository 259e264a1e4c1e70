"""Rows of many lengths in few shapes: the widths that batches are padded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NARROWEST = 64  # the others are twice the one before


@dataclass(frozen=True)
class Batch:
    """What a batch begins with, on the host.

    Attributes:
        ids: (B, P) int64, the prompts without their last token, filled up behind.
        lengths: (B,) int64, their lengths, 0 or more.
        last: (B,) int64, the last tokens.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor

    @property
    def full(self) -> bool:
        """Whether no prompt is shorter than the batch is wide."""
        return bool((self.lengths == self.ids.shape[1]).all())


def widths_to(most: int) -> list[int]:
    """64, 128 and so on; the last is no wider than `most` tokens need, in steps of 64."""
    widths = [_NARROWEST]
    while widths[-1] < most:
        widths.append(min(2 * widths[-1], -(-most // _NARROWEST) * _NARROWEST))
    return widths


def fitting(length: int, widths: Sequence[int]) -> int:
    """The first of the widths that holds so many tokens; beyond them, the last one doubled until it does."""
    width = next((width for width in widths if width >= length), widths[-1])
    while width < length:
        width *= 2
    return width


def filled(rows: Sequence[Sequence[int]], width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (count, width) int64, filled up with zeros behind and below, and the rows' lengths (count,)."""
    ids, lengths = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths[place] = len(row)
    return ids, lengths
