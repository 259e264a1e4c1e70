"""Advantages: how much better each completion is than the others of its group."""

from __future__ import annotations

from typing import Literal

import torch

_EPSILON = 1e-4  # added to the standard deviation, as TRL does


def advantages_of(rewards: torch.Tensor, scale: Literal["group", "batch", "none"]) -> torch.Tensor:
    """Computes the advantages of completions.

    Args:
        rewards: (P, G) fp32, of G completions of each prompt; NaN where none was judged.
        scale: divide by the standard deviation (of n - 1) of the group or of all rewards, or do not divide.

    Returns:
        (P, G) fp32: reward - mean of the group, scaled; 0 for a completion that was not judged, and where a group has
        fewer than two.
    """
    centred = rewards - torch.nanmean(rewards, -1, keepdim=True)
    if scale != "none":
        centred = centred / (deviation(rewards if scale == "group" else rewards.reshape(1, -1)) + _EPSILON)
    return torch.nan_to_num(centred)


def deviation(rewards: torch.Tensor) -> torch.Tensor:
    """Computes the standard deviation of each row without its NaN, (P, 1); NaN for a row of fewer than two numbers."""
    judged = ~torch.isnan(rewards)
    count = judged.sum(-1, keepdim=True)
    square = torch.nan_to_num(rewards - torch.nanmean(rewards, -1, keepdim=True)).square().sum(-1, keepdim=True)
    return torch.where(count > 1, (square / (count - 1).clamp(min=1)).sqrt(), torch.nan)
