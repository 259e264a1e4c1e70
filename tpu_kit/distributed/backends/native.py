"""Replicas on PyTorch's own devices: tensors are computed at once, and torch.distributed connects processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpu_kit.distributed.runtime import Runtime


class _NativeRuntime(Runtime):
    def sync(self) -> None:
        """Does nothing: tensors are not lazy."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Runtime.all_reduce`."""
        if self.world_size == 1:
            return
        import torch.distributed as dist

        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def place_batch(self, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """See `Runtime.place_batch`."""
        return [{k: v.to(self.local_device, non_blocking=True) for k, v in batch.items()} for batch in batches]

    def seed(self, number: int) -> None:
        """See `Runtime.seed`."""
        torch.manual_seed(number)

    def barrier(self) -> None:
        """See `Runtime.barrier`."""
        if self.world_size > 1:
            import torch.distributed as dist

            dist.barrier()


class CpuRuntime(_NativeRuntime):
    """A replica on the CPU."""

    device_type = "cpu"

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Runtime.to_host`."""
        return [tensor.detach().clone() for tensor in tensors]


class CudaRuntime(_NativeRuntime):
    """A replica on a GPU."""

    device_type = "cuda"

    def memory(self) -> tuple[int | None, int | None]:
        """See `Runtime.memory`."""
        return torch.cuda.max_memory_allocated(self.local_device), torch.cuda.mem_get_info(self.local_device)[1]
