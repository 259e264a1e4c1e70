"""Sums over the segments of packed rows, in a number of operations that grows with the row as n log n.

XLA has no fast scatter on a TPU, and a comparison of all pairs of positions would take B x S x S numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def sum_by_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at each position the sum over the positions of its segment; differentiable.

    Sums from the left and from the right double their reach in each round (Hillis and Steele, 1986), and stop where the
    segment does, so no number of another segment is added and subtracted again.

    Args:
        values: (..., B, S) floats.
        segments: (B, S) integers; the positions of a segment follow one another.
    """
    left, right, reach, length = values, values, 1, values.shape[-1]
    while reach < length:
        # Segments are whole stretches: if the position `reach` before has the same number, so have all between.
        same = segments[:, reach:] == segments[:, :-reach]
        left = left + F.pad(torch.where(same, left[..., :-reach], 0.0), (reach, 0))
        right = right + F.pad(torch.where(same, right[..., reach:], 0.0), (0, reach))
        reach *= 2
    return left + right - values
