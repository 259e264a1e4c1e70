"""Defines a replica's operations on its device, and finds the replica of a thread."""

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

# New objects between two garbage collections in the kit's processes. Python's default of 700 takes a quarter of the
# import time of torch, torch_xla and transformers, which make millions of permanent objects.
GC_THRESHOLD = 50_000
_local = threading.local()  # the replicas of XLA:CPU are threads of one process
M = TypeVar("M", bound="torch.nn.Module")
T = TypeVar("T")


class Outdated(ValueError):
    """Raised in a replica if facts have changed since the launch was planned: plan and launch again."""


class Shared:
    """A model that replicas load once, because they are threads of the same process."""

    def __init__(self) -> None:
        self._lock, self._loaded = threading.Lock(), list[Any]()

    def load(self, load: Callable[[], tuple[M, T]]) -> tuple[M, T]:
        """Calls `load`, which returns (model, rest), unless an earlier call succeeded; returns (deep copy, rest).

        Every call gets its own copy of the model; `rest` is the same object in all calls. Threads wait for a `load`
        that runs; its error is raised in its own thread, and the next thread tries again.
        """
        with self._lock:
            if not self._loaded:
                self._loaded.append(load())
        model, rest = self._loaded[0]
        return copy.deepcopy(model), rest


class Runtime:
    """A replica's device and collectives, with PyTorch's operations; subclasses in `backends` are for GPUs and XLA.

    Attributes:
        device_type: "tpu", "torch-tpu", "cuda", "cpu" or "xla-cpu".
        is_xla: whether tensors are lazy: nothing runs before `sync`.
        has_programs: whether XLA compiles a program per shape, so that batches are padded to a few shapes.
        traces_steps: whether a step must be traced as a program, because its operations otherwise run one at a time.
        rank: number of this replica.
        world_size: number of replicas.
        local_device: the device of this replica.
        num_hosts: number of hosts of the run, which have equal numbers of replicas.
        local_rank: number of this replica on its host.
        num_devices: number of devices that compute an update.
        data_size: number of shards into which the rows of a batch are divided.
        shares_state: whether a host holds and saves only a part of the training state.
        shared: model shared with the other replicas of this process; None if there are none.
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
        """Numbers of the batch shards whose rows this process sends to its devices."""
        return [self.rank]

    def sync(self) -> None:
        """Ends the lazy graph and starts it; all replicas must call it. Does nothing if tensors are not lazy."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums fp32 tensors over the replicas, in place, in one collective; with a single replica does nothing.

        All replicas must call it. A replica on a GPU takes tensors that are all on the CPU or all on the GPU. On
        XLA they are on the device, and the sum is a part of the lazy graph. A mesh sums only CPU tensors, over hosts.
        """
        if self.world_size == 1:
            return
        import torch
        import torch.distributed as dist

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(self.local_device)  # NCCL needs GPU tensors
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def to_device(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Starts to copy batches of CPU tensors to the device; returns the copies in the same structure."""
        return [{k: v.to(self.local_device, non_blocking=True) for k, v in batch.items()} for batch in batches]

    def put(self, tensors: Sequence[torch.Tensor], spec: Spec | None = None) -> list[torch.Tensor]:
        """Copies CPU tensors to the device; on a mesh sharded by `spec`, or replicated if it is None."""
        return list(self.to_device([{str(number): one for number, one in enumerate(tensors)}])[0].values())

    def seed(self, number: int) -> None:
        """Seeds the random numbers of this replica's device."""
        import torch

        torch.manual_seed(number)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors to the CPU. All reads of the device go through this method.

        On XLA call `sync` after the computation of the tensors; otherwise this call compiles it.
        """
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[Box, torch.Tensor]]]:
        """Returns for every tensor its parts on this process as (box, CPU values); without a mesh the whole tensor."""
        return [[(tuple(map(slice, one.shape)), one)] for one in self.to_host(tensors)]

    def barrier(self) -> None:
        """Waits for all replicas, on the host."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def exchange(self, mine: T) -> list[T]:
        """Gathers a JSON value from every replica, on the host; returns the values by rank, with floats exact.

        All replicas must call it. If all replicas are threads of a single process, they get the same objects.
        Otherwise the values are copies, in which tuples are lists.
        """
        if self.world_size == 1:
            return [mine]
        from tpu_kit.distributed.replica.exchange import between_processes

        return between_processes(mine, self.local_device)

    def memory(self) -> tuple[int | None, int | None]:
        """Returns peak use and size of the device memory in bytes; (None, None) on XLA:CPU and CPU."""
        return None, None

    def counters(self) -> dict[str, int]:
        """Returns counts since the start of this process: "compiles"; empty on a CPU.

        On torch_xla also "executions", "device_reads", "host_syncs" (reads of single values) and "fallbacks", the
        operations that ran on the CPU, host_syncs included.
        """
        return {}


def load_once(rt: Runtime, load: Callable[[], tuple[M, T]]) -> tuple[M, T]:
    """Returns the result of `load`, a model and its companions; threads call it once and copy the model."""
    return load() if rt.shared is None else rt.shared.load(load)


def current() -> Runtime:
    """Returns the runtime of the calling replica; raises RuntimeError outside of a launch."""
    runtime = getattr(_local, "runtime", None)
    if runtime is None:
        text = "there is no replica here: run the function with tpu_kit.distributed.launch.launch(fn, config)"
        raise RuntimeError(text)
    return runtime


def enter(runtime: Runtime | None) -> None:
    """Sets this thread's runtime, or with None ends it; only `launch` and `worker` call this."""
    _local.runtime = runtime
