"""The KV cache: heads side by side, and slots that are written with their neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.child_processes import run_loaded
from tpu_kit.generation.kv_cache import _attend_one, side_by_side


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"s_aux": torch.randn(12)}], ids=["plain", "cap", "sinks"])
@pytest.mark.parametrize("count", [2, 4])
def test_heads_side_by_side_are_attended_to_as_heads_apart(options: dict[str, Any], count: int) -> None:
    torch.manual_seed(0)
    rows, heads, slots, size = 3, 4, 10, 8
    query, mask = torch.randn(rows, 12, 1, size), torch.rand(rows, 1, 1, slots) < 0.7
    key, value = torch.randn(2, rows, heads, slots, size)

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        settings = {"softcap": None, "s_aux": None} | options
        return _attend_one(query, key, value, mask, None, plain=False, **settings).reshape(rows, 12, size)

    beside = [side_by_side(each, count) for each in (key, value)]
    assert beside[0].shape == (rows, heads // count, slots, count * size)
    torch.testing.assert_close(attend(*beside), attend(key, value), rtol=1e-5, atol=1e-6)


WRITES = """
import torch, torch_xla
from tpu_kit.xla.slot_writes import write_slot

device = torch_xla.device()
for slots in (4, 16, 37):
    stack = torch.randn(3, 2, 1, slots, 8)
    for slot in {0, 1, slots // 2, slots - 2, slots - 1}:
        for count in {1, 2} & {1, slots - slot}:
            new = torch.randn(2, 1, count, 8)
            expected = stack.clone()
            expected[1, :, :, slot : slot + count] = new
            given = [each.to(device) for each in (stack.clone(), new, torch.tensor(1), torch.tensor([slot]))]
            assert torch.equal(write_slot(*given).cpu(), expected), (slots, slot, count)
print("equal")
"""


def test_a_slot_is_written_anywhere_and_its_neighbours_stay() -> None:
    assert run_loaded(WRITES).stdout.endswith("equal\n")
