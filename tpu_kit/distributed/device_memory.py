"""How much memory each replica of a run has on this machine, told without touching a device."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace

from tpu_kit.config.loader import TrainConfig
from tpu_kit.distributed import runtime
from tpu_kit.hardware import chips
from tpu_kit.hardware.calibration import Calibration, load
from tpu_kit.hardware.chips import Chip
from tpu_kit.hardware.host import PROCESS_BYTES, free_memory
from tpu_kit.hardware.machine import Machine
from tpu_kit.hardware.slices import TargetSlice, find_slice

GPU_FREE = 0.3
"""Share of a GPU's memory that a pick leaves: the formula is that of a TPU's compiler, and a GPU's allocator has holes,
a context and libraries besides. Not measured."""
HOST_FREE = 0.5
"""The same of host memory, which is not the run's alone."""
MOST_ROWS = 8
"""Rows of a pass that `batch_size=auto` takes at most on a CPU, where more are no faster, or a GPU of unknown speed."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of one replica.

    Attributes:
        name: of what it runs on, such as "v5litepod-8".
        device_type: as `runtime.Backend` has it.
        replicas: of the model.
        limit: bytes of each replica.
        free: the least share of them that a pick leaves.
        where: the same for the planner; None where nothing is known of its speed.
    """

    name: str
    device_type: str
    replicas: int
    limit: int
    free: float = 0.0
    where: TargetSlice | None = None

    @property
    def chip(self) -> Chip | None:
        """What each replica runs on, where it is known."""
        return self.where.chip if self.where else None

    @property
    def calibration(self) -> Calibration:
        """What `verify` found on such devices of this machine."""
        return self.where.calibration if self.where else load(self.device_type)

    def seen(self, config: TrainConfig) -> TrainConfig:
        """The run as the formula is to see it here; see `seen_on`."""
        return seen_on(self.device_type, config)


def seen_on(device_type: str, config: TrainConfig) -> TrainConfig:
    """The run as the formula is to see it: what a TPU does by `auto`, another device does otherwise.

    Layers are no loop; attention on a GPU is a kernel that keeps no scores, on a CPU sdpa with all of them.
    """
    if device_type == "tpu":
        return config
    model, optim = config.model, config.optim
    if model.attention == "auto":
        model = replace(model, attention="splash" if device_type == "cuda" else "sdpa")
    if optim.scan_layers == "auto":
        optim = replace(optim, scan_layers="off")
    return replace(config, model=model, optim=optim)


def device_memory_budget(config: TrainConfig, at: Machine | None = None) -> MemoryBudget | None:
    """What each replica will have; None where the machine does not tell.

    Raises:
        ValueError: as `runtime.detect`.
    """
    at = at or Machine()
    backend = runtime.detect(config.launch, at)
    if backend.device_type == "tpu":
        found = at.tpus()
        if not found:  # device files alone, of a chip that is not known
            return None
        replicas = backend.num_replicas or len(found) * chips.chip(found[0]).devices_per_chip
        where = find_slice(found[0], replicas)
        return MemoryBudget(where.name, "tpu", replicas, where.limit, where=where)
    replicas = backend.num_replicas or 1
    if backend.device_type == "cuda":
        return _gpu(replicas, at)
    memory = free_memory(at)
    if memory is None:
        return None
    processes = 1 if backend.device_type == "xla-cpu" else replicas
    each = max(0, int((memory - processes * PROCESS_BYTES) / replicas))
    return MemoryBudget("this host", backend.device_type, replicas, each, HOST_FREE)


def _gpu(replicas: int, at: Machine) -> MemoryBudget | None:
    """The first GPU that may be used, by nvidia-smi: PyTorch would open a context in this process to tell."""
    visible = (at.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "-i", visible]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        name, _, mebibytes = printed.strip().splitlines()[0].rpartition(", ")
        size = int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    try:
        kind: Chip | None = chips.chip(name)
    except ValueError:
        kind = None
    where = None
    if kind is not None and kind.bf16_flops is not None:
        where = TargetSlice(kind, name, replicas, replicas, None, size, GPU_FREE)
    return MemoryBudget(name, "cuda", replicas, size, GPU_FREE, where)
