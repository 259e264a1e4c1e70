"""Opens TorchTPU's device "tpu", of which each process has one chip, and reads its counters."""

from __future__ import annotations

import os
from typing import Any

import torch

from tpu_kit.torch_tpu.environment import other_plugin


def open_device() -> torch.device:
    """Registers the device in this process, and returns it.

    A first tensor on a machine without a chip would abort the process: `detection.detect` looks for one before.
    """
    plugin = other_plugin()
    import torch_tpu._loader as loader

    if plugin:  # `load` does nothing without a chip
        os.environ["TPU_LIBRARY_PATH"] = plugin  # the import has set libtpu's
        loader._init_device("tpu")
    else:
        loader.load()
    return torch.device("tpu", 0)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on TorchTPU's device, and its programs may hold kernels for a TPU."""
    return tensor.device.type == "tpu" and not other_plugin()


def compile_count() -> int:
    """Number of programs that this process has compiled, of single operations too."""
    return int(_tpu()._get_cache_stats().num_compilations)


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Peak of the memory in use and its size, bytes; None where the plugin does not tell."""
    if other_plugin():  # that for the CPU tells nothing, in four lines on stderr each time
        return None, None
    accelerator: Any = torch.accelerator  # of torch 2.13
    _, total = accelerator.get_memory_info(device)
    return (accelerator.max_memory_allocated(device), total) if total else (None, None)


def _tpu() -> Any:
    return torch.tpu  # type: ignore[attr-defined]  # torch_tpu adds it
