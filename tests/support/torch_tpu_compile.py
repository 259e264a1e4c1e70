"""Lowers the training step without weights, as torch_xla traces it, for torch_tpu's compiler.

python -m tests.support.torch_tpu_compile xla FILE key=value ...   with torch_xla: writes its program
python -m tests.support.torch_tpu_compile compile FILE             with torch_tpu's libtpu: prints its memory
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tpu_kit.config.loader import load_config

STABLEHLO = "1.9.0"  # written by jaxlib 0.7.1, readable by jaxlib 0.10.2


def write_torch_xla(file: str, *changes: str) -> None:
    """Writes the step with its donated parameters, in a form that other versions of jaxlib can read."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    from tpu_kit.planning.compiler.trace import trace_step
    from tpu_kit.xla import compiler

    program = compiler._stablehlo(trace_step(load_config(None, changes), 1))
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        Path(file).write_bytes(stablehlo.serialize_portable_artifact(module, STABLEHLO))


def compile_file(file: str) -> None:
    """Prints the program's memory on a v5e chip, by part, in bytes."""
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax.experimental import topologies
    from jaxlib import xla_client
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    bounds = [1, 1, 1]
    (device,) = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=bounds
    ).devices
    with mlir.make_ir_context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, Path(file).read_bytes())
        module = ir.Module.parse(module) if isinstance(module, bytes) else module
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
        )
        options.executable_build_options.use_shardy_partitioner = False
        done = device.client.compile(module, xla_client.DeviceList((device,)), options)
    stats = done.get_compiled_memory_stats()
    parts = {name: getattr(stats, f"{name}_size_in_bytes")
             for name in ("argument", "output", "alias", "temp", "generated_code")}  # fmt: skip
    print("found", json.dumps({"total": sum(parts.values()) - 2 * parts["alias"], **parts}), flush=True)


if __name__ == "__main__":
    {"xla": write_torch_xla, "compile": compile_file}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # libtpu sometimes hangs at exit
