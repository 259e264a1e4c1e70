"""Sums over the segments of packed rows, in a number of operations that grows with the row as n log n.

XLA has no fast scatter on a TPU, and a comparison of all pairs of positions would take B x S x S numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def running_sum(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at each position the sum from the begin of its segment; differentiable.

    A sum doubles its reach in each round (Hillis and Steele, 1986) and stops where the segment does, so no number of
    another segment is added and subtracted again.

    Args:
        values: (..., B, S) floats.
        segments: (B, S) integers; the positions of a segment follow one another.
    """
    reach = 1
    while reach < values.shape[-1]:
        # Segments are whole stretches: if the position `reach` before has the same number, so have all between.
        same = segments[:, reach:] == segments[:, :-reach]
        values = values + F.pad(torch.where(same, values[..., :-reach], 0.0), (reach, 0))
        reach *= 2
    return values


def sum_by_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at each position the sum over all positions of its segment; the arguments are those of `running_sum`."""
    before, after = running_sum(values, segments), running_sum(values.flip(-1), segments.flip(-1)).flip(-1)
    return before + after - values


def last_of_segments(segments: torch.Tensor) -> torch.Tensor:
    """Returns the mask of the last position of each segment but those of number 0, (B, S)."""
    return (segments > 0) & (segments != F.pad(segments[:, 1:], (0, 1)))
