"""What tests of the profiler run in replicas: the recording of a run in which something is slow or wrong."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from dataclasses import replace
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
_prefetch, _step, _log = trainer.prefetch, trainer.train_step, trainer.Trainer._log


def _busy() -> None:
    """Computes for DELAY seconds."""
    factor, end = torch.ones(256, 256), time.perf_counter() + DELAY
    while time.perf_counter() < end:
        factor.matmul(factor)


def slow_input(config: TrainConfig) -> None:
    def slow(items: Any) -> Iterator[Any]:
        for item in _prefetch(items):
            time.sleep(DELAY)
            yield item

    with mock.patch.object(trainer, "prefetch", slow):
        record(config)


def slow_host(config: TrainConfig) -> None:
    def slow(loop: Any) -> None:
        time.sleep(DELAY)
        _log(loop)

    with mock.patch.object(trainer.Trainer, "_log", slow):
        record(config)


def slow_tracing(config: TrainConfig) -> None:
    _record_with(config, lambda *_: time.sleep(DELAY))


def slow_device(config: TrainConfig) -> None:
    _record_with(config, lambda *_: _busy())


def slow_rank(config: TrainConfig) -> None:
    _record_with(config, lambda *_: time.sleep(DELAY * runtime.current().rank))


def reads(config: TrainConfig) -> None:
    _record_with(config, lambda model, state, *_: state.applied.item())


def recompiles(config: TrainConfig) -> None:
    sizes = iter(range(3, 1000))

    def extra(model: Any, state: Any, *_: Any) -> None:
        state.usual.add_(torch.zeros(next(sizes), device=state.usual.device).sum())

    _record_with(config, extra)


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


def step_times(config: TrainConfig) -> list[float]:
    """Processor time of each step, seconds, with the recorder where run_name says so."""
    begun: list[float] = []
    with mock.patch.object(trainer, "train_step", lambda *args: begun.append(time.process_time()) or _step(*args)):
        if config.run_name == "recorded":
            record(config)
        else:
            with sft.trainer(config) as (loop, agreement, _):
                loop.checkpoints, loop.prepared = None, replace(loop.prepared, eval=None)
                loop.run(agreement)
                loop.peaks.end()
    return [after - before for before, after in pairwise(begun)]


def _record_with(config: TrainConfig, extra: Any) -> None:
    def step(*args: Any) -> None:
        extra(*args)
        _step(*args)

    with mock.patch.object(trainer, "train_step", step):
        record(config)
