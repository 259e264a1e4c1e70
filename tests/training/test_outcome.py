"""The advice for a run whose held-out loss did not fall."""

from __future__ import annotations

import math
import re

import pytest

from tpu_kit.training.outcome import not_learned

LOWER = "Try a third of optim.learning_rate"


@pytest.mark.parametrize(
    ("before", "after", "updates", "skipped", "expected"),
    [
        (3.0, 2.0, 100, 0, ""),
        (8.2, 13.7, 100, 0, f"did not fall from 8.2 to 13.7; a uniform guess has 6.46, so .* at random. {LOWER}"),
        (3.0, math.nan, 100, 0, f"did not fall from 3 to nan; .*{LOWER}"),
        (3.0, 3.0, 4, 0, f"did not fall from 3 to 3. {LOWER}"),
        (12.0, 11.6, 4, 0, "fell only from 12 to 11.6; a uniform .* 4 updates are few: raise optim.max_steps or"),
        (12.0, 11.6, 100, 0, "fell only from .* Try three times optim.learning_rate, more updates, or another model"),
        (12.0, 11.6, 8, 6, f"fell only from .* {LOWER}"),
    ],
)
def test_why_nothing_was_learned(before: float, after: float, updates: int, skipped: int, expected: str) -> None:
    start = {"kind": "start", "loss": before, "uniform": 6.46}
    final = {"eval_loss": after, "skipped_updates": float(skipped)}
    said = not_learned([start, {"kind": "train"}], final, updates)
    assert bool(said) == bool(expected) and re.search(expected, said), said


def test_nothing_is_said_without_held_out_rows_or_of_another_loss() -> None:
    final = {"eval_loss": 9.0, "skipped_updates": 0.0}
    assert not not_learned([], final, 9)
    assert not not_learned([{"kind": "start", "loss": 1.0, "uniform": None}], {}, 9)
    assert not not_learned([{"kind": "start", "loss": 10.0, "uniform": None}], final, 9)
