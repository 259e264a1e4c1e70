"""Which backend runs, and the interface of a replica: its implementations are in `backends`.

`detect` decides in the calling process and initialises nothing. In a replica, `current()` is what the training step
talks to: its rank, its device, cutting the lazy graph, the one collective, and reading the device.
"""

from __future__ import annotations

import importlib.util
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tpu_kit.config.loader import LaunchConfig, TrainConfig
from tpu_kit.hardware.machine import Machine, check_replicas

if TYPE_CHECKING:
    import torch

DeviceType = Literal["tpu", "cuda", "cpu", "xla-cpu"]

REHEARSAL_REPLICAS = 4  # of xla-cpu, where nothing else says how many
_PJRT = {"TPU": "tpu", "CPU": "xla-cpu"}
_local = threading.local()  # the replicas of XLA:CPU are threads of one process


@dataclass(frozen=True)
class Backend:
    """Where a launch runs.

    Attributes:
        device_type: what the replicas compute on.
        num_replicas: how many; None where only the TPU runtime knows (all its devices).
        reason: why this one was taken.
    """

    device_type: DeviceType
    num_replicas: int | None
    reason: str

    def __str__(self) -> str:
        count = "all devices" if self.num_replicas is None else f"{self.num_replicas} replica(s)"
        return f"device_type={self.device_type}, {count}: {self.reason}"


def detect(launch: LaunchConfig | None = None, at: Machine | None = None) -> Backend:
    """Decides where to run, without initialising a device or asking the network.

    `auto` takes what PJRT_DEVICE names, else the TPU, else CUDA, else the CPU.

    Args:
        launch: the wishes; all automatic by default.
        at: the machine to look at; this one by default.

    Raises:
        ValueError: the device that was asked for is not there, or PJRT_DEVICE or the number of replicas contradict it.
    """
    launch, at = launch or LaunchConfig(), at or Machine()
    wish, pjrt = launch.device_type, at.environ.get("PJRT_DEVICE", "").upper()
    if wish == "auto":
        device_type, reason = _choose(pjrt, at)
    else:
        device_type, reason = wish, "as asked for"
        if wish != (pjrt_wish := _PJRT.get(pjrt, wish)) and (wish, pjrt_wish) != ("cpu", "xla-cpu"):
            raise ValueError(
                f"launch.device_type={wish}, but the environment says PJRT_DEVICE={pjrt}, which is {pjrt_wish}. Unset "
                f"PJRT_DEVICE, or set launch.device_type={pjrt_wish}"
            )
    _require(device_type, at)
    return Backend(device_type, _replicas(device_type, launch.num_replicas, at), reason)


def _choose(pjrt: str, at: Machine) -> tuple[DeviceType, str]:
    if pjrt in _PJRT:
        return _PJRT[pjrt], f"the environment says PJRT_DEVICE={pjrt}"  # type: ignore[return-value]
    has_xla = at.version("torch_xla") is not None
    if at.tpus() and has_xla:
        return "tpu", f"{len(at.tpus())} x TPU {at.tpus()[0]} found"
    no_tpu = "a TPU was found, but torch_xla is not installed" if at.tpus() else "no TPU was found"
    if count := _gpus():
        return "cuda", f"{no_tpu}; {count} GPU(s) found"
    return "cpu", f"{no_tpu}, and no GPU; launch.device_type=xla-cpu rehearses the TPU's path here"


def _require(device_type: str, at: Machine) -> None:
    if device_type in ("tpu", "xla-cpu") and at.version("torch_xla") is None:
        raise ValueError(
            f"launch.device_type={device_type} needs torch_xla, which is not installed here. Install it with\n"
            "  pip install -r requirements-tpu.txt\nor use launch.device_type=auto with PJRT_DEVICE unset"
        )
    if device_type == "tpu" and not at.tpus() and not at.nodes():
        raise ValueError(
            "launch.device_type=tpu, but this machine has no TPU. On Colab: Runtime > Change runtime type; on Kaggle: "
            "Settings > Accelerator. launch.device_type=xla-cpu rehearses the same code on this CPU"
        )
    if device_type == "cuda" and not _gpus():
        raise ValueError(
            "launch.device_type=cuda, but PyTorch sees no GPU here (nvidia-smi tells whether the driver does). Use "
            "launch.device_type=auto, or install a PyTorch built for CUDA"
        )


def _replicas(device_type: str, asked: int | None, at: Machine) -> int | None:
    if device_type == "xla-cpu":
        return asked or _count(at.environ, "CPU_NUM_DEVICES") or REHEARSAL_REPLICAS
    if device_type == "cpu":
        return asked or 1
    if device_type == "cuda":
        there = _gpus()
        if (asked or 1) > there:
            raise ValueError(f"launch.num_replicas={asked}, but there are {there} GPU(s); use {there} or leave it out")
        return asked or there
    if asked not in (None, 1):
        check = check_replicas(at, TrainConfig(launch=LaunchConfig(device_type="tpu", num_replicas=asked)))
        if check.status == "failure":
            raise ValueError(f"{check.found}; use {check.fix}")
        return None
    return asked


def _count(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise ValueError(f"the environment says {name}={text!r}; it must be a number of replicas, 1 or more")
    return int(text)


def _gpus() -> int:
    """GPUs that PyTorch can use; counted through NVML, which opens no CUDA context in this process."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


class Runtime(ABC):
    """What one replica does on its device; a class for each kind of device is in `backends`.

    Args:
        rank: number of this replica.
        world_size: number of replicas.
        local_device: the device of this replica.

    Attributes:
        device_type: "tpu", "cuda", "cpu" or "xla-cpu".
        is_xla: whether tensors are lazy: nothing runs before `sync`.
    """

    device_type: DeviceType
    is_xla = False

    def __init__(self, rank: int, world_size: int, local_device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_device = local_device

    @property
    def local_rank(self) -> int:
        """Number of this replica among those of its host."""
        return self.rank

    @property
    def data_rank(self) -> int:
        """Number of this replica among those that have different rows."""
        return self.rank

    @property
    def data_size(self) -> int:
        """Number of replicas that have different rows; the batch is divided among them."""
        return self.world_size

    @abstractmethod
    def sync(self) -> None:
        """Cuts the lazy graph and starts it; all replicas must come here."""

    @abstractmethod
    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums fp32 tensors over the replicas, in place, in one collective."""

    def reduce_gradients(self, gradients: Sequence[torch.Tensor], sums: torch.Tensor) -> None:
        """Sums gradients, and the sums of the loss, over the replicas that have different rows, in one collective."""
        self.all_reduce([*gradients, sums])

    @abstractmethod
    def place_batch(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Starts to copy CPU tensors to the device and returns those there."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Sets the random numbers of this replica's device from here on."""

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reads the device: the one way to do so. On XLA tensors must come out of a `sync`, or they compile here.

        The result is a copy on every device: what is kept or written later must not change as training goes on.
        """
        return [tensor.detach().cpu() for tensor in tensors]

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all replicas, on the host."""

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes of device memory: the most that was in use so far, and what there is; None where nobody counts.

        That is XLA:CPU, and the CPU, whose memory is the host's.
        """
        return None, None

    def counters(self) -> dict[str, int]:
        """Counts of this process since its start: compiles, executions, host reads and CPU fallbacks; empty off XLA."""
        return {}


def current() -> Runtime:
    """The runtime of the replica that calls.

    Raises:
        RuntimeError: outside of a launch.
    """
    runtime = getattr(_local, "runtime", None)
    if runtime is None:
        raise RuntimeError(
            "there is no replica here: run the function with tpu_kit.distributed.launch.launch(fn, config)"
        )
    return runtime


def enter(runtime: Runtime | None) -> None:
    """Makes `runtime` the current one of this thread; called by launch alone."""
    _local.runtime = runtime
