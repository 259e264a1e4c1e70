"""Tensors that are alive at once in a layer, by its trace on "meta"."""

from __future__ import annotations

import pytest
import torch

from tpu_kit.model.meta_model import TOKENS, Trace, attend

HIDDEN, WIDE = 8, 24


def traced(function: torch.nn.Module) -> Trace:
    hidden = torch.empty(1, TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.enable_grad(), Trace() as trace:
        output = function(hidden)
        trace.turn()
        torch.autograd.grad(output, [hidden, *function.parameters()], torch.empty_like(output))
    return trace


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"gate": (HIDDEN, WIDE), "up": (HIDDEN, WIDE), "down": (WIDE, HIDDEN)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(*size, bias=False, dtype=torch.bfloat16, device="meta"))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden))
        return hidden + product


def test_a_gated_mlp_has_four_wide_arrays_at_once() -> None:
    """Gate, up, the gradient of their product, and the gradient of gate or up: activation functions are fused."""
    _, backward, saved = traced(Gated()).alive({WIDE})
    assert max(within for _, within in backward) == 4 * WIDE * 2
    assert saved == (2 * HIDDEN + 3 * WIDE) * 2  # the input, the last product, gate, up and their product


def test_heads_are_padded_for_the_kernel() -> None:
    class Attention(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            states = hidden.view(1, TOKENS, 2, 4).transpose(1, 2)
            return attend(states * 2, states, states).transpose(1, 2).reshape(hidden.shape)

    _, _, saved = traced(Attention()).alive(set())
    assert saved >= 3 * 2 * 128 * 2  # queries, keys and output: two heads of 4, over 128 lanes
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key-value heads"):
        attend(torch.empty(1, 3, 2, 4), torch.empty(1, 2, 2, 4), torch.empty(1, 2, 2, 4))
