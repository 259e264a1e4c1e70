"""Simulated hosts of a slice: each process computes on all virtual devices of a mesh, and saves its own part.

    TPU_KIT_TEST_HOST=INDEX,COUNT,PORT[,STEP] python -m tests.support.slice_hosts NAME=VALUE ...

torch_xla connects no processes on the CPU, so each host sends all rows and computes the same results. Everything else
is as on a slice: the hosts agree through gloo, and each host writes the shards of its devices. At STEP the host is
killed before it writes its part.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from tpu_kit.config.loader import TrainConfig, load_config
from tpu_kit.distributed.hosts import Hosts
from tpu_kit.distributed.launch import launch
from tpu_kit.distributed.replica import runtime, worker
from tpu_kit.distributed.replica.backends import MeshRuntime
from tpu_kit.recipes import sft
from tpu_kit.training.checkpoint.local_store import FolderStore

DEVICES = {2: ([0, 1, 4, 5], [2, 3, 6, 7]), 4: ([0, 1], [2, 3], [4, 5], [6, 7])}


class SimulatedHost(MeshRuntime):
    @property
    def data_shards(self) -> list[int]:
        return list(range(self.mesh.batch_shards))


def fine_tune(config: TrainConfig) -> Any:
    index, count, port, *step = map(int, os.environ["TPU_KIT_TEST_HOST"].split(","))
    base = runtime.current()
    assert isinstance(base, MeshRuntime)
    hosts = Hosts(index, tuple(f"machine-{i}" for i in range(count)), f"127.0.0.1:{port}")
    worker._connect("gloo", hosts.address, index, count)
    host = SimulatedHost(base.device_type, base.mesh, base.local_device, hosts)
    host.devices = DEVICES[count][index]
    runtime.enter(host)
    write = FolderStore.write_part

    def dies(*given: Any) -> None:
        if [given[1]] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*given)

    FolderStore.write_part = dies
    return sft.fine_tune(config)


def main(*settings: str) -> None:
    config = load_config(None, settings)
    config.output_path.mkdir(parents=True, exist_ok=True)
    result = launch(fine_tune, config, sharded=True)
    print(result.status, result.step, result.adapter_dir, flush=True)


if __name__ == "__main__":
    from tests.support import slice_hosts  # functions of __main__ cannot be pickled for the mesh's process

    slice_hosts.main(*sys.argv[1:])
