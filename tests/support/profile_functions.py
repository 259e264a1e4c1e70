"""Functions that tests of the profiler run in replicas: they record runs in which something is slow or wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica import runtime
from tpu_kit.extras.profile.recorder import record
from tpu_kit.recipes.replica import trainer as replica_trainer
from tpu_kit.training import trainer, update_sources

DELAY = 0.05
PLANTED = "planted delay in "
"""The prefix of the delays' names in a trace."""
_prefetch, _step, _log = update_sources.prefetch, trainer.train_step, trainer.Trainer._log


def _delay(bucket: str) -> None:
    with torch.profiler.record_function(PLANTED + bucket):
        time.sleep(DELAY)


def _compute(bucket: str) -> None:
    factor, end = torch.ones(1024, 1024), time.perf_counter() + DELAY
    with torch.profiler.record_function(PLANTED + bucket):
        while time.perf_counter() < end:
            factor.matmul(factor)


def slow_everywhere(config: TrainConfig, **given: Any) -> None:
    """Adds a delay to each part of a step."""

    def slow_input(items: Any) -> Iterator[Any]:
        for item in _prefetch(items):
            _delay("input wait")
            yield item

    def slow_host(loop: Any) -> None:
        _delay("host code")
        _log(loop)

    def slow_step(*_: Any) -> None:
        _delay("host tracing")
        _compute("device compute")

    with (
        mock.patch.object(update_sources, "prefetch", slow_input),
        mock.patch.object(trainer.Trainer, "_log", slow_host),
    ):
        _record_with(config, given, slow_step)


def slow_rank(config: TrainConfig, **given: Any) -> None:
    _record_with(config, given, lambda *_: time.sleep(DELAY * runtime.current().rank))


def recompiles(config: TrainConfig, **given: Any) -> None:
    sizes = iter(range(3, 1000))

    def extra(model: Any, state: Any, *_: Any) -> None:
        state.applied.add_(torch.zeros(next(sizes), device=state.applied.device).sum())

    _record_with(config, given, extra)


def stops(config: TrainConfig, **given: Any) -> None:
    def stop(guard: Any, step: int) -> bool:
        return step < 4

    with mock.patch("tpu_kit.distributed.preemption.PreemptionGuard.should_run", stop):
        record(config, **given)


def step_seconds(runs: Sequence[TrainConfig], rounds: int, config: TrainConfig) -> Any:
    """Trains runs in turn in one replica, without saving or evaluating, and measures the processor time of their steps.

    Args:
        runs: The runs; a run named "recorded" is recorded.
        rounds: How often each run is trained.
        config: The launch's configuration.

    Returns:
        For each run, the seconds of the steps of each turn.
    """
    found: list[list[list[float]]] = [[] for _ in runs]
    for _ in range(rounds):
        for place, one in enumerate(runs):
            begun: list[float] = []
            step = partial(_timed_step, begun)
            with mock.patch.object(trainer, "train_step", step):
                if one.run_name == "recorded":
                    record(one)
                else:
                    with replica_trainer(one) as (loop, agreement):
                        loop.checkpoints, loop.prepared = None, replace(loop.prepared, eval=None)
                        loop.run(agreement)
            found[place].append([after - before for before, after in pairwise(begun)])
    return found


def _timed_step(begun: list[float], *args: Any) -> None:
    begun.append(time.process_time())
    _step(*args)


def _record_with(config: TrainConfig, given: Any, extra: Any) -> None:
    def step(*args: Any) -> None:
        extra(*args)
        _step(*args)

    with mock.patch.object(trainer, "train_step", step):
        record(config, **given)
