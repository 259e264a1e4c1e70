"""The process group "tpu_dist" of a run on several chips, with one chip per process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from tpu_kit.torch_tpu.environment import ELSEWHERE, NAME

if TYPE_CHECKING:
    import torch.distributed as dist

GROUP = "cpu:gloo,tpu:tpu_dist"
"""Backends for `init_process_group`; CPU tensors use gloo. With another backend, such as "fake", the collectives of a
traced function are silently left out of its program."""

_SUM = re.compile(r'stablehlo\.all_reduce"?\(.*?replica_groups = dense<([^>]*)>', re.DOTALL)


def prepare_launch(replicas: int) -> None:
    """Sets torch_tpu's environment variables for all processes of a host; the launcher calls it before they start."""
    from torch_tpu._internal.distributed.distributed import set_tpu_launch_env

    set_tpu_launch_env(nproc_per_node=replicas)


def take_chip(rank: int, replicas: int) -> None:
    """Sets the environment variables from which torch_tpu assigns this process a chip; called before its import.

    torch_tpu also requires a master address, at which nothing listens: the replicas meet at the kit's own store.
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": replicas, "MASTER_PORT": 1}
    os.environ.update({name: str(number) for name, number in numbers.items()}, MASTER_ADDR="localhost")


def join_alone(replicas: int) -> None:
    """Joins torch's default process group as rank 0 of `replicas`, without the others, to compile programs only.

    Call it within `without_chip.topology_as_device`. It sets environment variables, such as RANK, which stay.
    """
    import torch.distributed as dist

    take_chip(0, replicas)
    addresses = ",".join(f"localhost:{number}" for number in range(1, replicas + 1))
    os.environ.update(TORCH_TPU_TOPOLOGY=f"{replicas},1,1", TORCH_TPU_SLICEBUILDER_ADDRESSES=addresses)
    dist.init_process_group("tpu_dist", store=_answering_store(replicas), rank=0, world_size=replicas)


def _answering_store(replicas: int) -> dist.Store:
    """Returns a store that answers for the other replicas with the device of rank 0.

    torch_tpu gathers entries "LENGTH:LENGTH:world_topo:RANKDEVICE,X,Y,...". The first length is of everything after it,
    the second of "world_topo:RANK"; the device follows without a separator.
    """
    import torch.distributed as dist

    class Store(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self._device = ""

        def set(self, key: str, value: Any) -> None:
            if ":node:" in key:
                self._device = bytes(value).decode().partition("world_topo:0")[2].partition(",")[2]

        def add(self, key: str, value: int) -> int:
            return replicas  # the number of replicas that have added an entry

        def wait(self, keys: list[str], *_: object) -> None:
            """Returns at once."""

        def multi_get(self, keys: list[str]) -> list[bytes]:
            entries = []
            for rank, _ in enumerate(keys):
                name = f"world_topo:{rank}"
                entry = f"{len(name)}:{name}{rank},{self._device}"
                entries.append(f"{len(entry)}:{entry}".encode())
            return entries

    return Store()


def check_all_reduces(text: str, replicas: int) -> None:
    """Checks that the program of a step has exactly one all-reduce over all replicas, or none for one replica.

    Args:
        text: the text of the program's StableHLO module.
        replicas: number of replicas.

    Raises:
        ValueError: the program has other all-reduces or too few, so that the replicas would drift apart.
    """
    groups = [[group.count(",") + 1 for group in re.findall(r"\[([^\[\]]*)\]", found)] for found in _SUM.findall(text)]
    if groups != ([[replicas]] if replicas > 1 else []):
        raise ValueError(
            f"launch.num_replicas={replicas}: the compiled step has {len(groups)} all-reduces, over groups of {groups} "
            f"replicas, but needs one over {replicas}; otherwise the replicas would drift apart. torch_tpu leaves out "
            "all-reduces of other process groups than its own. Set launch.num_replicas=1, with which "
            f"launch.device_type={NAME} needs none, or {ELSEWHERE}"
        )
