"""Rehearses a mesh's step on several hosts: torch_xla traces the step, jaxlib's processes run it over gloo.

    python -m tests.support.slice_program trace FOLDER MESH
    python -m tests.support.slice_program run FOLDER HOST HOSTS PORT

torch_xla connects no processes on the CPU. `trace` writes the program. `run` is a host: its devices get the shards that
`distributed.replica.mesh.cut` assigns, and it writes the parts of the results that it holds.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

DEVICES = 8
SETTINGS = [
    "model.name=embedded", "base_dtype=fp32", "lora.r=4", "max_length=32", "loss_chunk=16", "batch_size=1",
    "gradient_accumulation=2", "model.attention=sdpa", "ema_decay=0.9", "max_grad_norm=0.5", "eval_generate_rows=0",
]  # fmt: skip


def trace(folder: Path, mesh: str) -> None:
    import torch_xla
    from safetensors.torch import save_file

    from tpu_kit.config.loader import load_config
    from tpu_kit.planning.compiler.trace import trace_step
    from tpu_kit.xla import traced_program
    from tpu_kit.xla.compiler import _stablehlo

    specs: list[Any] = []
    inputs: list[torch.Tensor] = []
    as_hlo, nodes = traced_program.hlo_sharding, torch_xla._XLAC._get_tensors_xla_device_data_node
    traced_program.hlo_sharding = lambda mesh, spec: (specs.append(spec), as_hlo(mesh, spec))[1]
    torch_xla._XLAC._get_tensors_xla_device_data_node = lambda outputs: (found := nodes(outputs), inputs.__setitem__(
        slice(None), found[1]))[0]  # fmt: skip
    traced = trace_step(load_config(None, [*SETTINGS, f"mesh={mesh}"]), DEVICES)
    assert traced.mesh.size > 1 and any(axis for spec in specs for axis in spec)
    constants = {str(at): inputs[at].cpu() for at, name in enumerate(traced.arguments) if not name}
    assert all(one.ndim == 0 for one in constants.values()), "an argument without a name has no sharding"
    save_file(constants, folder / "constants.safetensors")
    (folder / "program.mlir").write_bytes(_stablehlo(traced))
    about = {"mesh": traced.mesh.sizes, "arguments": list(zip(traced.arguments, specs, strict=True))}
    (folder / "program.json").write_text(json.dumps(about))


def value(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Makes an argument of the step from its name; equal on every host."""
    made = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if name.startswith("control"):
        return torch.tensor([1e-2, 0.0, 1.0])
    if name.startswith(("batch.input_ids", "batch.labels")):
        return torch.randint(1, 200, shape, generator=made)
    if name.startswith("batch.position_ids"):
        return torch.arange(shape[1]).repeat(shape[0], 1)
    if name.startswith("batch.segment_ids"):
        return torch.ones(shape, dtype=torch.int32)
    found = 0.05 * torch.randn(shape, generator=made)
    return found.abs() if name.endswith(".second") or "norm" in name or not shape else found


def joined(folder: Path, hosts: int) -> list[torch.Tensor]:
    """Assembles the results of `run`; the copies of a part on several devices must be equal."""
    from safetensors.torch import load_file

    found: dict[int, torch.Tensor] = {}
    for host in range(hosts):
        for key, part in load_file(folder / f"host-{host}-of-{hosts}.safetensors").items():
            number, shape, box = json.loads(key)
            whole = found.setdefault(number, torch.full(shape, torch.nan))
            place = whole[tuple(slice(*one) for one in box)] if box else whole
            assert bool(place.isnan().all()) or torch.equal(place, part), (number, box, host)
            place.copy_(part)
    assert not any(bool(one.isnan().any()) for one in found.values())
    return [found[number] for number in range(len(found))]


def run(folder: Path, host: int, hosts: int, port: int) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES // hosts}"
    import jax
    import numpy as np
    from jax._src import compiler, xla_bridge
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jax._src.sharding_impls import GSPMDSharding
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxlib import xla_client
    from safetensors.torch import load_file, save_file

    from tpu_kit.config.mesh import Mesh
    from tpu_kit.distributed.replica.mesh import cut

    jax.config.update("jax_use_shardy_partitioner", False)
    jax.config.update("jax_enable_x64", True)
    if hosts > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", hosts, host)
    devices = jax.devices()
    mine = [devices.index(one) for one in jax.local_devices()]
    about = json.loads((folder / "program.json").read_text())
    mesh = Mesh(**about["mesh"])
    placed = jax.sharding.Mesh(np.array(devices).reshape(tuple(mesh.sizes.values())), tuple(mesh.sizes))
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "program.mlir").read_bytes())
        main = next(one for one in module.body.operations if one.name.value == "main")
        inputs = [tuple(ir.RankedTensorType(one).shape) for one in main.type.inputs]
        results = [tuple(ir.RankedTensorType(one).shape) for one in main.type.results]
        bytecode = mlir.module_to_bytecode(module)
    numbers = np.array([one.id for one in devices]).reshape(1, DEVICES)
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=DEVICES, use_spmd_partitioning=True, device_assignment=numbers
    )
    options.executable_build_options.use_shardy_partitioner = False
    options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    backend = xla_bridge.get_backend()
    done = backend.compile_and_load(bytecode, xla_client.DeviceList(tuple(backend.devices())), options)
    arguments, constants = [], load_file(folder / "constants.safetensors")
    for number, ((name, spec), shape) in enumerate(zip(about["arguments"], inputs, strict=True)):
        spec = tuple(tuple(axes) if isinstance(axes, list) else axes for axes in spec)
        sharding = NamedSharding(placed, PartitionSpec(*spec))
        whole = value(f"{name} {number}", shape) if name else constants[str(number)]
        if hosts == 1:
            arguments.append(jax.device_put(whole.numpy(), sharding))  # placed by jax, for comparison
            continue
        shards = cut(whole, mesh, spec, mine)
        there = [jax.device_put(one.numpy(), devices[at]) for one, at in zip(shards, mine, strict=True)]
        arguments.append(jax.make_array_from_single_device_arrays(shape, sharding, there))
    outputs = done.execute_sharded(arguments).disassemble_into_single_device_arrays()
    written = {}
    for number, (parts, shape, sharding) in enumerate(zip(outputs, results, done.get_output_shardings(), strict=True)):
        known = GSPMDSharding(tuple(devices), xla_client.HloSharding.from_proto(sharding))
        whole = jax.make_array_from_single_device_arrays(shape, known, parts)
        for one in whole.addressable_shards:
            box = [at.indices(size)[:2] for at, size in zip(one.index, shape, strict=True)]
            written[json.dumps([number, shape, box])] = torch.from_numpy(np.array(one.data))
    save_file(written, folder / f"host-{host}-of-{hosts}.safetensors")
    os._exit(0)


if __name__ == "__main__":
    what, folder, *rest = sys.argv[1:]
    if what == "trace":
        trace(Path(folder), *rest)
    else:
        run(Path(folder), *map(int, rest))
