"""The training step without weights, as programs of both backends for one compiler of libtpu.

python -m tests.support.torch_tpu_compile xla FILE MODEL key=value ...       with torch_xla: writes its program
python -m tests.support.torch_tpu_compile tpu MODEL key=value ...            with torch_tpu: the shim writes its own
python -m tests.support.torch_tpu_compile compile FILE ...                   with torch_tpu's libtpu: prints memory
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu_kit.config.loader import TrainConfig, load_config

STABLEHLO = "1.9.0"  # which jaxlib 0.7.1 writes and jaxlib 0.10.2 reads


def configured(model: str, changes: Sequence[str]) -> TrainConfig:
    return load_config(None, [f"model.name={model}", "lora.r=16", "batch_size=4", "max_length=1024", *changes])


def write_torch_xla(file: str, model: str, *changes: str) -> None:
    """Writes the step as torch_xla traces it, with its donated parameters, for any jaxlib."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    from tpu_kit.planning.compiler.trace import trace_step
    from tpu_kit.xla import compiler

    program = compiler._stablehlo(trace_step(configured(model, changes), 1))
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        Path(file).write_bytes(stablehlo.serialize_portable_artifact(module, STABLEHLO))


def trace_torch_tpu(model: str, *changes: str) -> None:
    """Traces the step and hands it to the compiler; the plugin for the CPU refuses its kernels, but has written it."""
    import torch
    import torch._dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map

    from tpu_kit.distributed.replica.backends import TorchTpuRuntime
    from tpu_kit.model import trainable
    from tpu_kit.model.meta_model import empty_model
    from tpu_kit.planning.compiler.trace import ROW
    from tpu_kit.torch_tpu.device import open_device
    from tpu_kit.torch_tpu.program import Programs
    from tpu_kit.training.objectives import objective_of
    from tpu_kit.training.step import TracedSteps, prepare_model
    from tpu_kit.xla.traced_program import lowering_for_tpu

    open_device()
    (torch.ones(2, device="tpu") + 1).cpu()  # the first program, in place of those with kernels
    os.environ["SHIM_FALLBACK"] = str(next(Path(os.environ["SHIM_DUMP"]).glob("0001.*")))
    config, made = configured(model, changes), dict[int, Any]()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            with mode:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="tpu")
            made[id(tensor)] = tensor, new
        return made[id(tensor)][1]

    class FakePrograms(Programs):
        def run(self, name: str, fn: Any, donated: int, *trees: Any) -> Any:
            return super().run(name, fn, donated, *tree_map(fake, trees))

    with lowering_for_tpu(), torch.device("meta"):
        one = trainable.adapt(empty_model(config), config.lora, config.model.base_dtype).train()
        objective, rt = objective_of(config), TorchTpuRuntime(0, 1, torch.device("meta"))
        steps = TracedSteps(one, prepare_model(one, config, rt), objective, config.optim, rt)
        steps._programs = FakePrograms()
        shape = config.optim.batch_size, config.data.max_length
        batch = {name: torch.empty(shape, dtype=dtype) for name, dtype in ROW.items()}
        with contextlib.suppress(NotImplementedError):  # tensors without values cannot be executed
            steps.train_step([batch], torch.empty(3))


def compile_files(*files: str) -> None:
    """Prints the memory of each program on one chip of v5e, by parts, bytes."""
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
    figures = []
    for file in files:
        with mlir.make_ir_context() as context:
            stablehlo.register_dialect(context)
            module = stablehlo.deserialize_portable_artifact(context, Path(file).read_bytes())
            module = ir.Module.parse(module) if isinstance(module, bytes) else module
            text = str(module)
            options = compiler.get_compile_options(
                num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
            )
            options.executable_build_options.use_shardy_partitioner = False
            done = device.client.compile(module, xla_client.DeviceList((device,)), options)
        stats = done.get_compiled_memory_stats()
        parts = {name: getattr(stats, f"{name}_size_in_bytes")
                 for name in ("argument", "output", "alias", "temp", "generated_code")}  # fmt: skip
        total = sum(parts.values()) - 2 * parts["alias"]
        figures.append({"total": total, **parts, "loops": text.count("stablehlo.while"),
                        "kernels": text.count("@tpu_custom_call")})  # fmt: skip
    print("found", json.dumps(figures), flush=True)


if __name__ == "__main__":
    {"xla": write_torch_xla, "tpu": trace_torch_tpu, "compile": compile_files}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # libtpu sometimes hangs at exit
