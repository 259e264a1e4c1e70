"""Replicas on torch_xla's devices: tensors are lazy, and a cut of the graph runs it as one program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpu_kit.distributed.runtime import Runtime

if TYPE_CHECKING:
    import torch


class _XlaRuntime(Runtime):
    is_xla = True

    def sync(self) -> None:
        """See `Runtime.sync`."""
        import torch_xla

        torch_xla.sync()

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Runtime.all_reduce`; a part of the graph."""
        if self.world_size > 1:
            import torch_xla.core.xla_model as xm

            xm.all_reduce("sum", list(tensors))

    def place_batch(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """See `Runtime.place_batch`."""
        import torch_xla.core.xla_model as xm

        sent: list[dict[str, torch.Tensor]] = xm.send_cpu_data_to_device(batches, self.local_device)
        return sent

    def seed(self, number: int) -> None:
        """See `Runtime.seed`; threads of XLA:CPU have random numbers of their own."""
        import torch_xla

        torch_xla.manual_seed(number, self.local_device)

    def counters(self) -> dict[str, int]:
        """See `Runtime.counters`."""
        import torch_xla.debug.metrics as metrics

        def timed(name: str) -> int:
            data: Any = metrics.metric_data(name)
            return int(data[0]) if data else 0

        counted = {name: int(metrics.counter_value(name) or 0) for name in metrics.counter_names()}
        return {
            "compiles": counted.get("UncachedCompile", 0),
            "executions": timed("ExecuteTime"),
            "device_reads": timed("TransferFromDeviceTime"),
            "host_syncs": counted.get("aten::_local_scalar_dense", 0),
            "fallbacks": sum(n for name, n in counted.items() if name.startswith("aten::")),
        }


class TpuRuntime(_XlaRuntime):
    """A replica on a TPU device, in a process of its own or a thread of its chip's process."""

    device_type = "tpu"

    @property
    def local_rank(self) -> int:
        """See `Runtime.local_rank`."""
        import torch_xla.runtime as xr

        ordinal: int = xr.local_ordinal()
        return ordinal

    def barrier(self) -> None:
        """See `Runtime.barrier`."""
        if self.world_size > 1:
            import torch_xla.core.xla_model as xm

            xm.rendezvous("tpu_kit")

    def memory(self) -> tuple[int | None, int | None]:
        """See `Runtime.memory`."""
        import torch_xla.core.xla_model as xm

        memory = xm.get_memory_info(self.local_device)
        return memory.get("peak_bytes_used", memory["bytes_used"]), memory["bytes_limit"]


class SimulatedRuntime(_XlaRuntime):
    """A replica on XLA:CPU, a thread of one process: the simulation of a TPU host; see `cpu_simulation`."""

    device_type = "xla-cpu"

    def barrier(self) -> None:
        """See `Runtime.barrier`."""
        if self.world_size > 1:
            from tpu_kit.distributed.backends import cpu_simulation

            cpu_simulation.meet(self.rank)
