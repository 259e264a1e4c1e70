"""The TPU compiler for a TPU that is not there: libtpu's compile-only client, reached through jaxlib."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from tpu_kit.xla import hlo, hlo_memory
from tpu_kit.xla.program import Program

# Products of sharded weights as gathers and one product: as loops over the shards a step compiles for minutes.
_SPMD_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
LOW_EFFORT = -1.0  # of XLA's exec_time_optimization_effort, whose default is 0


def fingerprint(program: Program) -> str:
    """A hash of the program and its donated buffers, without the names and source lines in it."""
    from jaxlib import xla_client

    module = xla_client._xla.HloModule.from_serialized_hlo_module_proto(program.hlo)
    options = xla_client._xla.HloPrintOptions()
    options.print_metadata, options.print_large_constants = False, True
    text = module.to_string(options) + repr(program.donated)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compile_program(program: Program, request: dict[str, Any]) -> dict[str, Any]:
    """Compiles for the topology of `request` and returns what the compiler says, as `compile_check.Compiled` has it.

    Raises:
        ValueError: the compiler refuses the program for another reason than memory, or knows no such topology.
    """
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    count = request["num_replicas"]
    devices = _devices(request["topology"])[:count]
    if program.mesh is None:
        options = compiler.get_compile_options(
            num_replicas=count, num_partitions=1, device_assignment=np.arange(count).reshape(count, 1)
        )
    else:
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=count, device_assignment=np.arange(count).reshape(1, count),
            use_spmd_partitioning=True, env_options_overrides=_SPMD_OPTIONS,
        )  # fmt: skip
        options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    options.executable_build_options.use_shardy_partitioner = False
    if request["effort"] == "low":
        options.executable_build_options.exec_time_optimization_effort = LOW_EFFORT
    module = _stablehlo(program)
    start = time.monotonic()
    try:
        done = devices[0].client.compile(module, xla_client.DeviceList(tuple(devices)), options)
    except Exception as error:
        text = str(error)
        memory = hlo_memory.parse_out_of_memory(text)
        if memory is None:
            raise ValueError(f"the TPU compiler refuses the program: {text[:2000]}") from error
        return {
            "compile_seconds": time.monotonic() - start,
            "argument_bytes": program.argument_bytes // (count if program.mesh else 1),
            "out_of_memory": memory,
            "out_of_memory_text": text,
        }
    seconds = time.monotonic() - start
    stats = done.get_compiled_memory_stats()
    compiled = hlo.Module(done.hlo_modules()[0].to_string())
    cost = done.cost_analysis()
    return {
        "compile_seconds": seconds,
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "peak_bytes": stats.peak_memory_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        **_costs(compiled, cost[0] if isinstance(cost, list) else cost),
        "collectives": compiled.collectives(),
        "largest_buffers": hlo_memory.at_peak(compiled, program.arguments)[1],
    }


def _devices(topology: dict[str, Any]) -> Any:
    from jax.experimental import topologies

    config = {"chip_config_name": topology["chip_config_name"]} if topology["chip_config_name"] else {}
    bounds = list(topology["chips_per_host_bounds"])
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology["name"], chips_per_host_bounds=bounds, **config
    )
    return description.devices


def _stablehlo(program: Program) -> bytes:
    """The program in the form the client takes, its donated parameters marked."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import xla_client

    computation = xla_client.XlaComputation(program.hlo)
    with mlir.make_ir_context():
        module = ir.Module.parse(xla_client._xla.mlir.xla_computation_to_mlir_module(computation))
        main = next(operation for operation in module.body.operations if operation.name.value == "main")
        attributes = [{named.name: named.attr for named in argument} for argument in main.arg_attrs]
        assert len(attributes) == len(program.arguments), (len(attributes), len(program.arguments))
        for number, sharding in enumerate(program.shardings):
            attributes[number]["mhlo.sharding"] = ir.StringAttr.get(sharding)
        for number in program.donated:
            attributes[number]["jax.buffer_donor"] = ir.BoolAttr.get(True)
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(named) for named in attributes])
        bytecode: bytes = mlir.module_to_bytecode(module)
        return bytecode


def _costs(module: hlo.Module, once: dict[str, float]) -> dict[str, Any]:
    """FLOPs and bytes of a step. The compiler's own analysis counts the body of a loop once; here it counts each trip.

    What one trip costs is asked of XLA's generic cost analysis, which agrees with the TPU's on FLOPs, except for
    kernels (their own estimate is added), but not on bytes, as it knows no tiles: its share of the whole is used.
    """
    from jaxlib import xla_client

    client = xla_client.make_cpu_client()

    def analyse(text: str) -> dict[str, float]:
        parsed = xla_client._xla.hlo_module_from_text(text)
        cost: dict[str, float] = xla_client._xla.hlo_module_cost_analysis(client, parsed)
        return cost

    total, single = hlo.count_trips(module, analyse)
    return {
        "flops": once["flops"] + total.flops - single.flops + hlo.splash_flops(module),
        "bytes_accessed": once["bytes accessed"] * total.bytes / single.bytes,
        "hbm_bytes": hlo.hbm_bytes(module),
        "loop_trips": module.trips(),
    }
