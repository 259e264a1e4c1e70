"""The checks of `verify` with an injected fault, on few shapes; the tests run them in replicas."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica import runtime
from tpu_kit.distributed.replica.runtime import Runtime
from tpu_kit.model import splash_attention
from tpu_kit.notebook import smoke_test


def _short(*names: str) -> None:
    smoke_test.LENGTH = 128
    smoke_test.CASES = {name: smoke_test.CASES[name] for name in names}


def lost_sum(config: TrainConfig) -> Any:
    """Replicas that do not see each other: a sum returns each replica's own number."""
    type(runtime.current()).all_reduce = lambda self, tensors: None  # type: ignore[method-assign]
    return smoke_test.measure_cores(config)


def wrong_mask(config: TrainConfig) -> Any:
    """A splash kernel that ignores the boundaries between documents."""
    right = splash_attention.splash_kernel

    def wrong(query: Any, key: Any, value: Any, segments: torch.Tensor, settings: Any) -> torch.Tensor:
        return right(query, key, value, torch.ones_like(segments), settings)

    _short("segments")
    splash_attention.splash_kernel = wrong
    return smoke_test.compare_kernel(config)


def wrong_gradient(config: TrainConfig) -> Any:
    """A splash kernel with right outputs and wrong gradients."""
    right = splash_attention.splash_kernel

    def wrong(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        output = right(query, *rest)
        return 1.1 * output - 0.1 * output.detach()

    _short("segments")
    splash_attention.splash_kernel = wrong
    return smoke_test.compare_kernel(config)


def dies(config: TrainConfig) -> None:
    """A compiler that crashes the process."""
    print("splash, head size 64", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def computes_for_ever(config: TrainConfig) -> None:
    """A step that never ends."""
    while True:
        time.sleep(0.001)


def wrong_loop(config: TrainConfig) -> Any:
    """Loops that drop a part of each layer's output; unrolled layers are right."""
    from tpu_kit.model.loop import layer_scan

    right = layer_scan._Block._layer

    def wrong(self: Any, index: int, hidden: torch.Tensor, *rest: Any) -> Any:
        output, written = right(self, index, hidden, *rest)
        return (output - 0.5 * hidden if self.turns > 1 else output), written

    layer_scan._Block._layer = wrong  # type: ignore[method-assign]
    return smoke_test.compare_step(config)


def wrong_norm(config: TrainConfig) -> Any:
    """A device on which every step is wrong, in loops and unrolled."""
    right = smoke_test._step

    def wrong(config: TrainConfig, rt: Runtime, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
        loss, norm = right(config, rt, batch)
        return (loss, 1.2 * norm) if rt.is_xla else (loss, norm)

    smoke_test._step = wrong
    return smoke_test.compare_step(config)


def wrong_tokens(config: TrainConfig) -> Any:
    """A device that generates a wrong token."""
    right = smoke_test._complete

    def wrong(config: TrainConfig, rt: Runtime) -> list[list[int]]:
        found = right(config, rt)
        if rt.is_xla:
            found[1][1] = 40
        return found

    smoke_test._complete = wrong
    return smoke_test.compare_tokens(config)


def lost_checkpoint(config: TrainConfig) -> dict[str, Any]:
    """A small run that finds no checkpoint, and prints a line that does not belong in the table."""
    print("the checkpoint is damaged")
    return {"first_loss": 3.0, "last_loss": 2.0, "size": 0, "resumed": 0, "updates": 8, "tokens": 32}


def no_steps(config: TrainConfig) -> None:
    """A step that fails, in a process that prints a secret."""
    print(f"the token is {os.environ['HF_TOKEN']}", flush=True)
    raise RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 2.00G")
