"""Gathers values from all replicas: in memory between threads, with a process group between processes.

The processes of a TPU's chips join a process group on the CPU at their first exchange.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def between_processes(mine: T, device: torch.device) -> list[T]:
    """Gathers a value from every process of torch's default process group; returns copies of the values by rank.

    All processes must call it.

    Args:
        mine: a JSON value; tuples become lists, also in this process's own value.
        device: device on which the group's collectives need tensors: the CPU for gloo, this process's GPU for NCCL.
    """
    import torch
    import torch.distributed as dist

    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    lengths = [int(one) for one in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    padded = padded.to(device)
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [json.loads(part[:length].cpu().numpy().tobytes()) for part, length in zip(parts, lengths, strict=True)]


class ProcessGroup:
    """Exchanges values between the processes of a TPU's chips, whose threads are replicas.

    With several processes, every process gets copies of all values, which its threads share. A single process needs no
    group, and its threads get the same objects.

    Args:
        connect: joins the process group on the CPU, given the number of this process and the number of processes.
    """

    def __init__(self, connect: Callable[[int, int], None]) -> None:
        self._connect, self._lock = connect, threading.Lock()
        self._arrived: threading.Barrier | None = None
        self._read: threading.Barrier | None = None
        self._given: dict[int, Any] = {}  # values of this process's threads, by rank
        self._all: list[Any] = []  # values of all replicas, by rank

    def __reduce__(self) -> tuple[type[ProcessGroup], tuple[Callable[[int, int], None]]]:
        return type(self), (self._connect,)

    def exchange(self, rank: int, mine: T, threads: int, process: int, processes: int) -> list[T]:
        """Gathers a value from every replica; returns the values by rank, in a list that this process's threads share.

        All replicas must call it, with equal `threads` and `processes`. The first call joins the group.

        Args:
            rank: number of this replica in the run.
            mine: as in `between_processes`.
            threads: number of replicas per process.
            process: number of this process, from 0.
            processes: number of processes.
        """
        with self._lock:
            self._arrived = self._arrived or threading.Barrier(threads, lambda: self._join(process, processes))
            self._read = self._read or threading.Barrier(threads)
            self._given[rank] = mine
        self._arrived.wait()
        found = self._all
        self._read.wait()  # before the next exchange replaces `_all`
        return found

    def _join(self, process: int, processes: int) -> None:
        """Puts the values of all processes' threads into `_all`; runs in one thread while the others wait."""
        given, self._given = self._given, {}
        together = [[*given.items()]]
        if processes > 1:
            import torch
            import torch.distributed as dist

            if not dist.is_initialized():
                self._connect(process, processes)
            together = between_processes(together[0], torch.device("cpu"))
        self._all = [value for _, value in sorted(chain(*together), key=itemgetter(0))]
