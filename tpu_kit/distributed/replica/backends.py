"""Implements `runtime.Runtime` per device type. torch_xla's tensors are lazy: `sync` runs the graph as a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.distributed.hosts import ONE, Hosts
from tpu_kit.distributed.replica.exchange import ProcessGroup, between_processes
from tpu_kit.distributed.replica.mesh import Box, local_devices, pieces, put, put_rows, read, row_shards
from tpu_kit.distributed.replica.runtime import DeviceType, Runtime, Shared
from tpu_kit.torch_tpu import device as torch_tpu

T = TypeVar("T")


class CpuRuntime(Runtime):
    """A replica on the CPU."""

    device_type = "cpu"


class CudaRuntime(Runtime):
    """A replica on a GPU."""

    device_type = "cuda"

    def memory(self) -> tuple[int | None, int | None]:
        """Returns the peak of the bytes that PyTorch has allocated on this GPU, and the GPU's total bytes."""
        return torch.cuda.max_memory_allocated(self.local_device), torch.cuda.mem_get_info(self.local_device)[1]

    def counters(self) -> dict[str, int]:
        """Returns {"compiles": N}: the programs that torch.compile has made in this process."""
        from torch._dynamo.utils import counters

        return {"compiles": int(counters["stats"]["unique_graphs"])}


class TorchTpuRuntime(Runtime):
    """A replica on a TPU with TorchTPU, in its own process. Tensors are not lazy."""

    device_type = "torch-tpu"
    has_programs = traces_steps = True

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums fp32 tensors over the replicas, in place, in one collective; with a single replica does nothing.

        All replicas must call it. The tensors are all on the CPU, where gloo sums them at once, or all on the device,
        where the function that is being traced gets the collective.
        """
        if self.world_size == 1:
            return
        import torch.distributed as dist
        import torch.distributed._functional_collectives as collectives

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if flat.device.type == "cpu":
            dist.all_reduce(flat)
        else:
            assert dist.group.WORLD is not None, "the launcher made it"
            flat = collectives.wait_tensor(collectives.all_reduce(flat, "sum", dist.group.WORLD))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def exchange(self, mine: T) -> list[T]:
        """Gathers a JSON value from every replica, which must all call it, on the CPU; returns the values by rank."""
        return [mine] if self.world_size == 1 else between_processes(mine, torch.device("cpu"))

    def barrier(self) -> None:
        """Waits for all replicas, on the host."""
        self.exchange(None)

    def memory(self) -> tuple[int | None, int | None]:
        """Returns peak use and size of the chip's memory in bytes; (None, None) if the plugin has no figures."""
        return torch_tpu.memory(self.local_device)

    def counters(self) -> dict[str, int]:
        """Returns {"compiles": N}: the programs that XLA has compiled in this process, also of single operations."""
        return {"compiles": torch_tpu.compile_count()}


class _XlaRuntime(Runtime):
    """A replica whose tensors are a lazy graph of torch_xla until `sync`."""

    is_xla = has_programs = True

    def sync(self) -> None:
        import torch_xla

        torch_xla.sync()

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.world_size > 1:
            import torch_xla.core.xla_model as xm

            xm.all_reduce("sum", list(tensors))

    def to_device(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        import torch_xla.core.xla_model as xm

        return xm.send_cpu_data_to_device(batches, self.local_device)

    def seed(self, number: int) -> None:
        """Seeds this thread's device: threads of XLA:CPU have separate random numbers."""
        import torch_xla

        torch_xla.manual_seed(number, self.local_device)

    def counters(self) -> dict[str, int]:
        import torch_xla.debug.metrics as metrics

        def timed(name: str) -> int:
            data: Any = metrics.metric_data(name)
            return int(data[0]) if data else 0

        counted = {name: int(metrics.counter_value(name) or 0) for name in metrics.counter_names()}
        return {
            "compiles": counted.get("UncachedCompile", 0),
            "executions": timed("ExecuteTime") + timed("ExecuteReplicatedTime"),
            "device_reads": timed("TransferFromDeviceTime"),
            "host_syncs": counted.get("aten::_local_scalar_dense", 0),
            "fallbacks": sum(n for name, n in counted.items() if name.startswith("aten::")),
        }


class TpuRuntime(_XlaRuntime):
    """A replica on a TPU device, in its own process or in a thread of its chip's process."""

    device_type = "tpu"

    def __init__(
        self, rank: int, world_size: int, local_device: torch.device, group: ProcessGroup | None = None
    ) -> None:
        super().__init__(rank, world_size, local_device)
        self._group = group

    def exchange(self, mine: T) -> list[T]:
        """Gathers a JSON value from every replica, on the host; returns the values by rank. All must call it.

        If a single process has all replicas, they get the same objects. Otherwise every process gets copies, which its
        threads share and in which tuples are lists.
        """
        if self.world_size == 1:
            return [mine]
        import torch_xla.runtime as xr

        assert self._group is not None, "several replicas get it from the launcher"
        return self._group.exchange(
            self.rank, mine, xr.addressable_device_count(), xr.process_index(), xr.process_count()
        )

    def barrier(self) -> None:
        """Waits for all replicas, on the host."""
        if self.world_size > 1:
            import torch_xla.core.xla_model as xm

            xm.rendezvous("tpu_kit")

    def memory(self) -> tuple[int | None, int | None]:
        """Returns peak use (without a peak, present use) and size of the device's memory, in bytes."""
        import torch_xla.core.xla_model as xm

        memory = xm.get_memory_info(self.local_device)
        return memory.get("peak_bytes_used", memory["bytes_used"]), memory["bytes_limit"]


class SimulatedRuntime(_XlaRuntime):
    """A replica on XLA:CPU, a thread of a process that simulates a TPU host; see `cpu_simulation`."""

    device_type = "xla-cpu"

    def __init__(self, rank: int, world_size: int, local_device: torch.device, shared: Shared | None = None) -> None:
        super().__init__(rank, world_size, local_device)
        self.shared = shared

    def barrier(self) -> None:
        """Waits for all replicas; raises MeetingError if a replica failed or does not come in launch.hang_timeout."""
        if self.world_size > 1:
            from tpu_kit.distributed.replica import cpu_simulation

            cpu_simulation.meet(self.rank)

    def exchange(self, mine: T) -> list[T]:
        """Gathers a value of any type from every replica, without a copy; returns the values by rank.

        All replicas must call it. Raises MeetingError if a replica failed or does not come in launch.hang_timeout.
        """
        if self.world_size == 1:
            return [mine]
        from tpu_kit.distributed.replica import cpu_simulation

        return cpu_simulation.gather(self.rank, mine)


class MeshRuntime(_XlaRuntime):
    """A process that drives the devices of a mesh on its host; programs contain their collectives (SPMD).

    `mesh` has the devices of all hosts. If there are several hosts, they have joined a process group on the CPU.
    """

    def __init__(self, device_type: DeviceType, mesh: Mesh, local_device: torch.device, hosts: Hosts = ONE) -> None:
        super().__init__(hosts.index, hosts.count, local_device, hosts.count)
        self.device_type, self.mesh = device_type, mesh
        self.devices = local_devices()
        self.num_devices, self.data_size = mesh.size, mesh.batch_shards
        self.shares_state = hosts.count > 1

    @property
    def data_shards(self) -> list[int]:
        """Numbers of the batch shards on this process's devices, sorted; hosts along a model axis have the same."""
        return sorted(set(row_shards(self.mesh, self.devices)))

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sums CPU tensors over the hosts, in place; skips device tensors, as programs already sum over all rows."""
        for tensor in tensors:
            if self.num_hosts > 1 and tensor.device.type == "cpu":
                import torch.distributed as dist

                dist.all_reduce(tensor)

    def to_device(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Sends devices their rows of tensors with two or more dimensions, see `put_rows`; replicates other tensors."""
        return [{name: put_rows(one) if one.ndim >= 2 else put(one, (None,) * one.ndim) for name, one in batch.items()}
                for batch in batches]  # fmt: skip

    def put(self, tensors: Sequence[torch.Tensor], spec: Spec | None = None) -> list[torch.Tensor]:
        """Copies CPU tensors to the devices, all sharded by `spec`, or replicated if it is None; see `mesh.put`."""
        return [put(one, spec or (None,) * one.ndim) for one in tensors]

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies whole tensors to the CPU; this process must hold all their shards; see `mesh.read`."""
        return read([tensor.detach() for tensor in tensors])

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[Box, torch.Tensor]]]:
        """Returns for every tensor the (box, CPU values) that this process saves; no other process saves them."""
        return pieces([tensor.detach() for tensor in tensors], self.devices)

    def exchange(self, mine: T) -> list[T]:
        """Returns [mine], as a single process drives all devices; asserts that there is one host."""
        assert self.num_hosts == 1, "runs that sample are refused on several hosts"
        return [mine]

    def barrier(self) -> None:
        """Waits for the processes of the other hosts, if there are any."""
        if self.num_hosts > 1:
            import torch.distributed as dist

            dist.barrier()
