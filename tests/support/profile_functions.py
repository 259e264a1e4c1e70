"""What tests of the profiler run in replicas: the recording of a run in which something is slow or wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed import runtime
from tpu_kit.profiling.recorder import record
from tpu_kit.recipes import sft
from tpu_kit.storage import atomic
from tpu_kit.training import trainer

DELAY = 0.05
PLANTED = "planted delay"
"""Name of the delays in a trace."""
_prefetch, _step, _log = trainer.prefetch, trainer.train_step, trainer.Trainer._log


def _delay() -> None:
    with torch.profiler.record_function(PLANTED):
        time.sleep(DELAY)


def _compute() -> None:
    factor, end = torch.ones(512, 512), time.perf_counter() + DELAY
    with torch.profiler.record_function(PLANTED):
        while time.perf_counter() < end:
            factor.matmul(factor)


def slow_input(config: TrainConfig) -> None:
    def slow(items: Any) -> Iterator[Any]:
        for item in _prefetch(items):
            _delay()
            yield item

    with mock.patch.object(trainer, "prefetch", slow):
        record(config)


def slow_host(config: TrainConfig) -> None:
    def slow(loop: Any) -> None:
        _delay()
        _log(loop)

    with mock.patch.object(trainer.Trainer, "_log", slow):
        record(config)


def slow_tracing(config: TrainConfig) -> None:
    _record_with(config, lambda *_: _delay())


def slow_device(config: TrainConfig) -> None:
    _record_with(config, lambda *_: _compute())


def slow_rank(config: TrainConfig) -> None:
    _record_with(config, lambda *_: time.sleep(DELAY * runtime.current().rank))


def reads(config: TrainConfig) -> None:
    _record_with(config, lambda model, state, *_: state.applied.item())


def recompiles(config: TrainConfig) -> None:
    sizes = iter(range(3, 1000))

    def extra(model: Any, state: Any, *_: Any) -> None:
        state.usual.add_(torch.zeros(next(sizes), device=state.usual.device).sum())

    _record_with(config, extra)


def slow_preparation(config: TrainConfig) -> Any:
    time.sleep(60)
    return sft.check_run(config)


def stops(config: TrainConfig) -> None:
    def stop(guard: Any, step: int) -> bool:
        return step < 4

    with mock.patch("tpu_kit.distributed.preemption.PreemptionGuard.should_run", stop):
        record(config)


def fills_the_disk(config: TrainConfig) -> None:
    write = atomic.write_text

    def refused(path: Any, *args: Any, **options: Any) -> None:
        if "recording" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *args, **options)

    with mock.patch.object(atomic, "write_text", refused):
        record(config)


def step_seconds(runs: Sequence[TrainConfig], rounds: int, config: TrainConfig) -> Any:
    """Trains runs in turn, in one replica, without results, and takes the processor time of their steps.

    Args:
        runs: the runs; a run named "recorded" has the recorder.
        rounds: number of turns of each.
        config: of the launch.

    Returns:
        For each run, the seconds of the steps of each turn; and the share of its rows that holds tokens.
    """
    found: list[list[list[float]]] = [[] for _ in runs]
    fill = [1.0 for _ in runs]
    for _ in range(rounds):
        for place, one in enumerate(runs):
            begun: list[float] = []
            step = partial(_timed_step, begun)
            with mock.patch.object(trainer, "train_step", step):
                if one.run_name == "recorded":
                    record(one)
                else:
                    with sft.trainer(one) as (loop, agreement, _):
                        loop.checkpoints, loop.prepared = None, replace(loop.prepared, eval=None)
                        loop.run(agreement)
                        loop.peaks.end()
                        fill[place] = loop.prepared.train.fill()
            found[place].append([after - before for before, after in pairwise(begun)])
    return found, fill


def _timed_step(begun: list[float], *args: Any) -> None:
    begun.append(time.process_time())
    _step(*args)


def _record_with(config: TrainConfig, extra: Any) -> None:
    def step(*args: Any) -> None:
        extra(*args)
        _step(*args)

    with mock.patch.object(trainer, "train_step", step):
        record(config)
