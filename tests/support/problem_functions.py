"""Common mistakes of PyTorch users on TPUs, made on purpose in a replica; for tests/data/test_problems.py."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.support import training_functions
from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed.replica import runtime
from tpu_kit.model import causal_lm as models
from tpu_kit.recipes import sft
from tpu_kit.training import step, trainer
from tpu_kit.training.metrics import RecompileMonitor
from tpu_kit.training.state import TrainState, restore


def provoke(config: TrainConfig) -> dict[str, Any]:
    """On one replica on XLA: the error of each mistake, warnings about slowness, and the bytes on the device."""
    device = runtime.current().local_device
    weight = torch.ones(4, device=device, requires_grad=True)
    weight.grad = torch.ones(4, device=device)

    def save_from_the_device() -> None:
        from safetensors.torch import save_file

        save_file({"weight": weight.detach()}, str(config.output_path / "weights.safetensors"))

    config.output_path.mkdir(parents=True, exist_ok=True)
    return {
        "checkpointing": error_of(lambda: checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()),
        "fused": error_of(lambda: torch.optim.AdamW([weight], fused=True).step()),
        "saving": error_of(save_from_the_device),
        "slow": noticed(slow=True),
        "quick": noticed(slow=False),
        "fresh": bytes_of(resumed=False),
        "resumed": bytes_of(resumed=True),
    }


def error_of(mistake: Callable[[], Any]) -> str:
    try:
        mistake()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def noticed(slow: bool) -> list[str]:
    """Returns the warnings for five logs of two steps; if `slow`, each step has a new shape and reads its result."""
    rt, watch, told = runtime.current(), RecompileMonitor(), []
    for log in range(5):
        before = rt.counters()
        for number in range(2):
            x = torch.ones(3 + (2 * log + number) * slow).to(rt.local_device) * 1.5
            if slow:
                x.sum().item()
            rt.sync()
        told += watch.notice(before, rt.counters(), 2)
    return told


def bytes_of(resumed: bool) -> int:
    """Returns the bytes of all tensors that a training state adds to the device."""
    rt = runtime.current()
    gc.collect()
    before = on_device()
    model, saved = training_functions.tiny(), None
    if resumed:
        first = models.to_device(training_functions.tiny(), rt.local_device)
        saved = TrainState(first, rt.local_device, training_functions.OPTIM).to_host(rt)
        del first
        restore(model, saved)
    models.to_device(model, rt.local_device)
    state = TrainState(model, rt.local_device, training_functions.OPTIM, saved)
    rt.sync()
    gc.collect()
    assert state.params
    return on_device() - before


def on_device() -> int:
    kinds = (torch.Tensor, torch.nn.Parameter)
    found = [one for one in gc.get_objects() if type(one) in kinds and one.device.type == "xla"]
    return sum(one.numel() * one.element_size() for one in found)


def checkpointed(config: TrainConfig) -> None:
    """A user's function that recomputes by torch's checkpointing."""
    weight = torch.ones(4, device=runtime.current().local_device, requires_grad=True)
    checkpoint(torch.exp, weight, use_reentrant=False).sum().backward()


def slowed(config: TrainConfig) -> None:
    """`sft.fine_tune` with a step that reads from the device, from a tensor that is longer each time."""
    numbers = itertools.count()

    def slow_step(model: torch.nn.Module, state: TrainState, batches: Any, control: torch.Tensor, *rest: Any) -> None:
        torch.ones(2 + next(numbers), device=control.device).sum().item()
        step.train_step(model, state, batches, control, *rest)

    trainer.train_step = slow_step
    sft.fine_tune(config)
