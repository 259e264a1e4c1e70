"""What a replica does on its device, and which replica a thread is."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tpu_kit.config.mesh import Spec

if TYPE_CHECKING:
    import torch

    from tpu_kit.distributed.replica.mesh import Box

DeviceType = Literal["tpu", "torch-tpu", "cuda", "cpu", "xla-cpu"]

# New objects after which the kit's processes look for garbage. Python's 700 take a quarter of the time in which torch,
# torch_xla and transformers are imported, whose millions of objects stay.
GC_THRESHOLD = 50_000
_local = threading.local()  # the replicas of XLA:CPU are threads of one process
M = TypeVar("M", bound="torch.nn.Module")
T = TypeVar("T")


class Outdated(ValueError):
    """Raised in a replica: what the launch was planned for has changed meanwhile; plan again, and launch anew."""


class Shared:
    """What the replicas of one process, which are its threads, load once."""

    def __init__(self) -> None:
        self._lock, self._loaded = threading.Lock(), list[Any]()

    def load(self, load: Callable[[], tuple[M, T]]) -> tuple[M, T]:
        """Returns a copy of the model, because moving a shared one to its device would take it from the others."""
        with self._lock:
            if not self._loaded:
                self._loaded.append(load())
        model, rest = self._loaded[0]
        return copy.deepcopy(model), rest


class Runtime:
    """What one replica does on one of PyTorch's own devices; `backends` has what differs on a GPU and on torch_xla's.

    Attributes:
        device_type: "tpu", "torch-tpu", "cuda", "cpu" or "xla-cpu".
        is_xla: whether tensors are lazy: nothing runs before `sync`.
        has_programs: whether XLA compiles a program for each shape, so that batches are padded to a few shapes.
        traces_steps: whether a step must be traced as one program, because its operations run one by one otherwise.
        rank: number of this replica.
        world_size: number of replicas.
        local_device: the device of this replica.
        num_hosts: number of hosts of the run, with as many replicas each.
        local_rank: number of this replica among the replicas of its host.
        num_devices: number of devices that work on an update.
        data_size: number of shards into which the rows of a batch are divided.
        shares_state: whether each host holds, and saves, a part of the training state alone.
        shared: with the other replicas of this process; None where it has no others.
    """

    device_type: DeviceType
    is_xla = has_programs = traces_steps = False
    shared: Shared | None = None

    def __init__(self, rank: int, world_size: int, local_device: torch.device, num_hosts: int = 1) -> None:
        self.rank, self.world_size, self.local_device, self.num_hosts = rank, world_size, local_device, num_hosts
        self.local_rank = rank % (world_size // num_hosts)
        self.num_devices = self.data_size = world_size
        self.shares_state = False

    @property
    def data_shards(self) -> list[int]:
        """The shards whose rows this process sends."""
        return [self.rank]

    def sync(self) -> None:
        """Cuts the lazy graph and starts it; all replicas must call it. Nothing where tensors are not lazy."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums fp32 tensors over the replicas, in place, in one collective; on XLA a part of the graph."""
        if self.world_size == 1:
            return
        import torch
        import torch.distributed as dist

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.local_device)  # NCCL takes no CPU tensor
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def to_device(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Starts to copy CPU tensors to the device and returns the copies."""
        return [{k: v.to(self.local_device, non_blocking=True) for k, v in batch.items()} for batch in batches]

    def put(self, tensors: Sequence[torch.Tensor], spec: Spec | None = None) -> list[torch.Tensor]:
        """Copies CPU tensors to the device; on a mesh sharded by `spec`, by default not at all."""
        return list(self.to_device([{str(number): one for number, one in enumerate(tensors)}])[0].values())

    def seed(self, number: int) -> None:
        """Seeds the random numbers of this replica's device."""
        import torch

        torch.manual_seed(number)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to the CPU; nothing else reads the device.

        On XLA the tensors must come out of a `sync`, or they compile here.
        """
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[Box, torch.Tensor]]]:
        """Reads the parts of tensors that this process saves; all processes together save each part once."""
        return [[(tuple(map(slice, one.shape)), one)] for one in self.to_host(tensors)]

    def barrier(self) -> None:
        """Waits for all replicas, on the host."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def exchange(self, mine: T) -> list[T]:
        """Returns what each replica gives, by rank: values for JSON, whose floats keep every bit; on the host.

        All replicas must call it. Replicas that are threads get the others' own objects; from other processes tuples
        come as lists.
        """
        if self.world_size == 1:
            return [mine]
        from tpu_kit.distributed.replica.exchange import between_processes

        return between_processes(mine, self.local_device)

    def memory(self) -> tuple[int | None, int | None]:
        """Peak of the device memory in use and its size, bytes; None on XLA:CPU and the CPU, which do not count it."""
        return None, None

    def counters(self) -> dict[str, int]:
        """Counts of this process since its start, none on a CPU.

        Compiles; on XLA also executions, host reads and CPU fallbacks.
        """
        return {}


def load_once(rt: Runtime, load: Callable[[], tuple[M, T]]) -> tuple[M, T]:
    """Loads a model and what goes with it; once where the replicas are threads of one process."""
    return load() if rt.shared is None else rt.shared.load(load)


def current() -> Runtime:
    """The runtime of the replica that calls; raises RuntimeError outside of a launch."""
    runtime = getattr(_local, "runtime", None)
    if runtime is None:
        text = "there is no replica here: run the function with tpu_kit.distributed.launch.launch(fn, config)"
        raise RuntimeError(text)
    return runtime


def enter(runtime: Runtime | None) -> None:
    """Makes `runtime` the current one of this thread; called by launch alone."""
    _local.runtime = runtime
