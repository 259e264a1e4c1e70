"""Compiles a graph of torch_xla for a v5e chip, which need not be present; for scripts in child processes."""

from __future__ import annotations

from typing import Any

import torch

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip


def compile_graph(outputs: list[torch.Tensor]) -> Any:
    """Compiles the graph of `outputs` at low effort; returns jaxlib's executable."""
    from jax._src import compiler
    from jax.experimental import topologies
    from jaxlib import xla_client

    from tpu_kit.xla import traced_program
    from tpu_kit.xla.compiler import _stablehlo

    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1]
    )  # fmt: skip
    module = _stablehlo(traced_program.lower(outputs, set(), {}))
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    options.executable_build_options.exec_time_optimization_effort = -1.0
    devices = tuple(topology.devices)
    return devices[0].client.compile(module, xla_client.DeviceList(devices), options)
