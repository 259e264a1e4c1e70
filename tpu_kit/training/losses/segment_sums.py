"""Sums over the segments of packed rows, in O(S log S) operations for rows of S tokens.

XLA has no fast scatter on a TPU, and comparing all pairs of positions would take B x S x S numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def running_sum(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at every position the sum of `values` from its segment's start up to it, (..., B, S); differentiable.

    Every round doubles the range of the sums (Hillis and Steele, 1986). Values of other segments are never added, so
    they cause no rounding error.

    Args:
        values: (..., B, S) floats.
        segments: (B, S) integers; the positions of a segment are contiguous.
    """
    reach = 1
    while reach < values.shape[-1]:
        # Segments are contiguous: if the position `reach` before has the same number, so have all between.
        same = segments[:, reach:] == segments[:, :-reach]
        values = values + F.pad(torch.where(same, values[..., :-reach], 0.0), (reach, 0))
        reach *= 2
    return values


def sum_by_segment(values: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Returns at every position the sum over its whole segment; takes the arguments of `running_sum`."""
    before, after = running_sum(values, segments), running_sum(values.flip(-1), segments.flip(-1)).flip(-1)
    return before + after - values


def last_of_segments(segments: torch.Tensor) -> torch.Tensor:
    """Returns a (B, S) mask of the last position of every segment with a number above 0."""
    return (segments > 0) & (segments != F.pad(segments[:, 1:], (0, 1)))
