from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from tpu_kit.config.loader import BatchPlan, DataConfig, OptimConfig
from tpu_kit.data.batching import Update, learning_rate, permutation, rows_of, shard_rows, updates


def plan(batch_size: int = 2, passes: int = 1, replicas: int = 1) -> BatchPlan:
    return BatchPlan(batch_size, passes, replicas, batch_size * passes * replicas, 0)


def rates(optim: OptimConfig, total: int) -> list[float]:
    return [learning_rate(step, total, optim) for step in range(1, total + 1)]


def stepped(scheduler: Any, total: int) -> list[float]:
    found = []
    for _ in range(total):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_rates_are_those_of_transformers(schedule: str, warmup: int) -> None:
    optim = OptimConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    theirs = get_scheduler(name, optimizer(3e-4), num_warmup_steps=warmup, num_training_steps=40)
    assert rates(optim, 40) == pytest.approx(stepped(theirs, 40), rel=1e-9, abs=1e-15)


def test_the_cosine_ends_at_the_smallest_share_asked_for() -> None:
    optim = OptimConfig(learning_rate=1e-3, warmup_steps=4, min_learning_rate_ratio=0.1)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer(1e-3), 4, 30, min_lr_rate=0.1)
    assert rates(optim, 30) == pytest.approx(stepped(theirs, 30), rel=1e-9)
    assert min(rates(optim, 30)[5:]) >= 1e-4


def test_the_linear_decay_ends_at_the_smallest_share_asked_for() -> None:
    optim = OptimConfig(learning_rate=1.0, schedule="linear", min_learning_rate_ratio=0.5)
    assert rates(optim, 4) == pytest.approx([1.0, 0.875, 0.75, 0.625])


def test_warmup_as_a_share_of_the_run() -> None:
    by_ratio = OptimConfig(learning_rate=1.0, warmup_ratio=0.2)
    assert rates(by_ratio, 20) == rates(OptimConfig(learning_rate=1.0, warmup_steps=4), 20)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
def test_the_rate_grows_with_the_batch_by_the_rule(rule: str, factor: float) -> None:
    optim = OptimConfig(
        learning_rate=0.01, warmup_steps=3, batch_growth_factor=4, batch_growth_steps=5, batch_growth_lr=rule
    )
    for step in (2, 3, 9):  # in warm-up and after it
        assert learning_rate(step, 20, optim, growth=4.0) == pytest.approx(factor * learning_rate(step, 20, optim))


@pytest.mark.parametrize(
    ("rows", "epochs", "count"),
    [
        (100, 1.0, 12),  # 8 rows per update; the last 4 rows are left out
        (96, 1.0, 12),
        (100, 2.0, 24),
        (100, 0.5, 6),
        (96, 0.5, 6),
        (96, 1.5, 18),
        (8, 1.0, 1),
        (100, 0.001, 1),  # always at least one update
    ],
)
def test_epochs(rows: int, epochs: float, count: int) -> None:
    assert len(list(updates(rows, plan(2, 2, 2), OptimConfig(epochs=epochs)))) == count


def test_the_end_of_an_epoch_is_left_out_and_the_next_begins_at_its_first_row() -> None:
    found = list(updates(10, plan(2, 1, 2), OptimConfig(max_steps=5)))
    assert found == [
        Update(1, 0, 0, 1, 4), Update(2, 0, 4, 1, 4),
        Update(3, 1, 0, 1, 4), Update(4, 1, 4, 1, 4),
        Update(5, 2, 0, 1, 4),
    ]  # fmt: skip


def test_max_steps_wins_over_epochs() -> None:
    assert len(list(updates(16, plan(2), OptimConfig(max_steps=3, epochs=1.0)))) == 3
    assert len(list(updates(16, plan(2), OptimConfig(max_steps=50, epochs=1.0)))) == 50


def test_the_batch_grows_in_passes_up_to_the_largest() -> None:
    optim = OptimConfig(max_steps=12, batch_growth_factor=2, batch_growth_steps=3, batch_growth_max=12)
    found = list(updates(1000, plan(2, 1, 2), optim))
    # At most 12 rows: 3 passes of 4 rows.
    assert [update.passes for update in found] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3]
    assert all(update.rows == 4 * update.passes for update in found)
    # For all sizes, each row is used exactly once.
    assert [update.first_row for update in found[1:]] == [update.first_row + update.rows for update in found[:-1]]


def test_growth_by_a_factor_that_is_not_whole() -> None:
    optim = OptimConfig(max_steps=8, batch_growth_factor=1.5, batch_growth_steps=2)
    assert [update.passes for update in updates(1000, plan(2, 2), optim)] == [2, 2, 3, 3, 4, 4, 6, 6]


def test_growth_that_reached_its_largest_goes_on_for_ever() -> None:
    optim = OptimConfig(max_steps=1100, batch_growth_factor=2.0, batch_growth_steps=1, batch_growth_max=8)
    assert list(updates(64, plan(2), optim))[-1].passes == 4


def test_few_kinds_of_batches_are_compiled() -> None:
    optim = OptimConfig(max_steps=400, batch_growth_factor=2, batch_growth_steps=100, batch_growth_max=64)
    assert {update.passes for update in updates(4096, plan(4, 1, 4), optim)} == {1, 2, 4}


def test_less_data_than_one_update_takes() -> None:
    with pytest.raises(ValueError, match=r"one global batch: it has 7 packed rows, .*takes 8 .*batch_size 2 x"):
        list(updates(7, plan(2, 2, 2), OptimConfig()))


def test_a_batch_that_grows_over_the_data_is_found_before_the_first_step() -> None:
    optim = OptimConfig(max_steps=10, batch_growth_factor=2, batch_growth_steps=2)
    with pytest.raises(ValueError, match=r"it has 10 packed rows, .*takes 16"):
        list(updates(10, plan(2), optim))


def test_the_shape_of_the_cosine() -> None:
    optim = OptimConfig(learning_rate=2.0)
    assert learning_rate(6, 10, optim) == pytest.approx(1.0)  # halfway
    assert learning_rate(1, 10, optim) == 2.0
    assert math.isclose(learning_rate(10, 10, optim), 1 + math.cos(0.9 * math.pi))


# --------------------------------------------------------------------------------------------- rows and their replicas


def dealt(rows: int, replicas: int, batch: int, passes: int, **growth: Any) -> list[list[list[int]]]:
    """The rows of each update of an epoch, by replica."""
    split, data = plan(batch, passes, replicas), DataConfig(seed=5)
    found = []
    for update in updates(rows, split, OptimConfig(epochs=1.0, **growth)):
        own = [shard_rows(rows_of(update, rows, data), update, split, rank) for rank in range(replicas)]
        assert all(part.shape == (update.passes, batch) for part in own)
        found.append([part.flatten().tolist() for part in own])
    return found


def test_the_rows_of_an_update_do_not_depend_on_the_replicas() -> None:
    whole = [sorted(update[0]) for update in dealt(37, 1, 8, 1)]
    assert len(whole) == 4  # five of 37 rows wait for the next epoch
    for split in [(2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 1, 4), (1, 1, 8), (4, 1, 2)]:
        assert [sorted(row for part in update for row in part) for update in dealt(37, *split)] == whole


def test_replicas_share_no_row_and_each_comes_once_in_an_epoch() -> None:
    rows = [row for update in dealt(37, 4, 2, 1) for part in update for row in part]
    assert len(rows) == len(set(rows)) == 32


def test_a_batch_that_grows_goes_on_in_the_same_order() -> None:
    order = permutation(37, 5, 0).tolist()
    found = [row for update in dealt(37, 1, 2, 1, batch_growth_factor=2, batch_growth_steps=3) for row in update[0]]
    assert found == order[: len(found)] and len(found) > 24


def test_each_epoch_and_seed_has_its_own_order_unless_it_is_kept() -> None:
    first, second = Update(1, 0, 0, 1, 8), Update(5, 1, 0, 1, 8)
    assert rows_of(first, 37, DataConfig()).tolist() != rows_of(second, 37, DataConfig()).tolist()
    assert rows_of(first, 37, DataConfig()).tolist() != rows_of(first, 37, DataConfig(seed=1)).tolist()
    assert rows_of(second, 37, DataConfig(shuffle=False)).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("rows", "seed", "epoch", "digest"),
    [
        (1_000_000, 0, 0, "4149ef279e5ee30c9b7174dec2e939e3"),
        (1_000_000, 0, 1, "59115c60d3e8de28bcf65e37f506b4bf"),
        (12_345, 7, 3, "f72f6f3730319d22fcf12517459f124d"),
        (50, 2**32 - 1, 9, "ae2cec57bf85eb54157741ed6ab991e7"),
    ],
)
def test_the_order_is_that_of_earlier_versions(rows: int, seed: int, epoch: int, digest: str) -> None:
    """Their checkpoint stores the number of updates, not the rows of the updates."""
    order = rows_of(Update(1, epoch, 0, 1, rows), rows, DataConfig(seed=seed))
    assert hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=16).hexdigest() == digest


def test_the_order_of_an_epoch_is_computed_once() -> None:
    permutation.cache_clear()
    data, found = DataConfig(seed=11), []
    for update in updates(1001, plan(10), OptimConfig(epochs=3.0)):
        found.append(rows_of(update, 1001, data))
    assert permutation.cache_info().misses == 3 and len(found) == 300
    assert found[150].tolist() == permutation(1001, 11, 1)[500:510].tolist()
    with pytest.raises(ValueError, match="read-only"):
        found[0][0] = 1  # the rows of a whole epoch would differ
    assert permutation.cache_info().currsize == 2
