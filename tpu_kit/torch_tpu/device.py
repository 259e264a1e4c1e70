"""Opens TorchTPU's device "tpu", one chip per process, and reads its counters."""

from __future__ import annotations

import os
from typing import Any

import torch

from tpu_kit.torch_tpu.environment import other_plugin


def open_device() -> torch.device:
    """Registers TorchTPU's device, of libtpu or the plugin in TPU_LIBRARY_PATH, in this process; returns it: "tpu:0".

    Without a chip, the first tensor would abort the process; `detection.detect` therefore looks for a chip first.
    """
    plugin = other_plugin()
    import torch_tpu._loader as loader

    if plugin:  # `load` does nothing without a chip
        os.environ["TPU_LIBRARY_PATH"] = plugin  # the import has set it to libtpu
        loader._init_device("tpu")
    else:
        loader.load()
    return torch.device("tpu", 0)


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on TorchTPU's device and its programs can contain TPU kernels."""
    return tensor.device.type == "tpu" and not other_plugin()


def compile_count() -> int:
    """Returns the number of programs that this process has compiled, including programs of single operations."""
    return int(_tpu()._get_cache_stats().num_compilations)


def memory(device: torch.device) -> tuple[int | None, int | None]:
    """Returns (peak memory in use, memory size) in bytes; (None, None) if the plugin does not report them."""
    if other_plugin():  # the plugin for the CPU reports nothing and prints four lines on stderr per call
        return None, None
    accelerator: Any = torch.accelerator  # torch 2.13
    _, total = accelerator.get_memory_info(device)
    return (accelerator.max_memory_allocated(device), total) if total else (None, None)


def _tpu() -> Any:
    return torch.tpu  # type: ignore[attr-defined]  # torch_tpu adds it
