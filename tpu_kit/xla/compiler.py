"""Compiles traced programs for a TPU, which the machine need not have, with libtpu's compile-only client."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.xla import hlo
from tpu_kit.xla.traced_program import Program

# Multiplies gathered weights instead of looping over their shards: with the loops, a step compiles for minutes.
_SPMD_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_RESULT_LAYOUTS = "mhlo.xla_entry_computation_result_layout"
LOW_EFFORT = -1.0  # value of XLA's exec_time_optimization_effort, whose default is 0


def _hlo() -> Any:
    """Returns jaxlib's module with the HLO classes, which is a separate module from 0.10 on."""
    from jaxlib import xla_client

    return getattr(xla_client, "hlo", xla_client._xla)


def _given(stablehlo: bytes) -> Any:
    """Returns the client's input: the bytes of a module, or the parsed module from jaxlib 0.10 on."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import xla_client

    return ir.Module.parse(stablehlo, mlir.make_ir_context()) if hasattr(xla_client, "hlo") else stablehlo


def program_of(stablehlo: str, donated: tuple[int, ...], arguments: tuple[str, ...], argument_bytes: int) -> Program:
    """Makes a `Program` without shardings, for a single device or replicas, from the text of a StableHLO module.

    `donated`, `arguments` and `argument_bytes` are its fields. `active_mesh()` must have the size 1.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir
    from jaxlib import xla_client

    with mlir.make_ir_context():
        module = mlir.module_to_bytecode(ir.Module.parse(stablehlo))
    convert = xla_client._xla.mlir.mlir_module_to_xla_computation
    lowered = convert(module, use_tuple_args=False, return_tuple=True).as_serialized_hlo_module_proto()
    return Program(lowered, donated, arguments, argument_bytes, active_mesh(), ())


def fingerprint(program: Program) -> str:
    """Returns a hash, 32 hex digits, of a program's operations and `donated`, if sharded also `shardings` and `mesh`.

    It does not depend on metadata, such as source lines and module paths, nor on `arguments`.
    """
    module = _hlo().HloModule.from_serialized_hlo_module_proto(program.hlo)
    options = _hlo().HloPrintOptions()
    options.print_metadata, options.print_large_constants = False, True
    text = module.to_string(options) + repr(program.donated)
    if program.shardings:
        text += repr((program.shardings, program.mesh))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compile_program(
    program: Program,
    request: dict[str, Any],
    also: Callable[..., dict[str, Any]] = lambda module, instructions: {},
    seconds: Callable[[hlo.Cost], float] = lambda one: 0.0,
) -> dict[str, Any]:
    """Compiles a program for the topology in `request`; returns its figures per device.

    Args:
        program: the program to compile.
        request: num_replicas (devices), topology (a dict of the fields of `chips.Topology`) and effort ("low"; other
            texts mean normal); other keys are ignored.
        also: takes the compiled `hlo.Module` and the list of its instructions' `hlo.Cost`; returns additional fields.
        seconds: returns the seconds of one execution of an instruction, from its costs.

    Returns:
        compile_seconds and the fields of `compiled_figures`. If the program needs too much memory: compile_seconds,
        argument_bytes (unpadded) and out_of_memory, a dict: `text`, the error, and as `hlo.parse_out_of_memory`.

    Raises:
        ValueError: the compiler refuses the program for a reason other than memory.
        RuntimeError: libtpu does not know the topology.
    """
    import numpy as np
    from jax._src import compiler
    from jaxlib import xla_client

    count = request["num_replicas"]
    devices = _devices(request["topology"])[:count]
    numbers = np.array([device.id for device in devices])  # not 0, 1, ... with several slices
    replicas, shards = (count, 1) if program.mesh.size == 1 else (1, count)
    options = compiler.get_compile_options(
        num_replicas=replicas, num_partitions=shards, device_assignment=numbers.reshape(replicas, shards),
        env_options_overrides=_SPMD_OPTIONS if program.mesh.size > 1 else None,
    )  # fmt: skip
    if program.mesh.size > 1:
        options.executable_build_options.allow_spmd_sharding_propagation_to_output = [True]
    options.executable_build_options.use_shardy_partitioner = False
    if request["effort"] == "low":
        options.executable_build_options.exec_time_optimization_effort = LOW_EFFORT
    stablehlo = _given(_stablehlo(program))
    start = time.monotonic()
    try:
        done = devices[0].client.compile(stablehlo, xla_client.DeviceList(tuple(devices)), options)
    except Exception as error:
        text = str(error)
        memory = hlo.parse_out_of_memory(text)
        if memory is None:
            raise ValueError(f"the TPU compiler refuses the program: {text[:2000]}") from error
        return {
            "compile_seconds": time.monotonic() - start,
            "argument_bytes": program.argument_bytes // program.mesh.size,
            "out_of_memory": {**memory, "text": text},
        }
    taken = time.monotonic() - start
    once = done.cost_analysis()
    once = once[0] if isinstance(once, list) else once
    text = done.hlo_modules()[0].to_string()
    figures = compiled_figures(text, done.get_compiled_memory_stats(), once["bytes accessed"], also, seconds)
    return {"compile_seconds": taken, **figures}


def compiled_figures(
    text: str,
    stats: Any,
    accessed_once: float,
    also: Callable[..., dict[str, Any]],
    seconds: Callable[[hlo.Cost], float] = lambda one: 0.0,
) -> dict[str, Any]:
    """Reads the figures of a compiled program, ours or another trainer's.

    Args:
        text: the text of the program, XLA's `HloModule.to_string()`.
        stats: XLA's memory statistics of the program.
        accessed_once: bytes accessed according to the TPU compiler's analysis, which counts a loop as one trip.
        also: takes the `hlo.Module` and the list of its instructions' `hlo.Cost`; returns additional fields.
        seconds: returns the seconds of one execution of an instruction, from its costs.

    Returns:
        One dict with figures of one device: argument_bytes, output_bytes, aliased_bytes, temporary_bytes, code_bytes,
        loop_trips (`Module.trips`), collectives (`Module.collectives`), and the fields of `also` and of `hlo.costs`.
    """
    from jaxlib import xla_client

    module, client = hlo.Module(text), xla_client.make_cpu_client()

    def analyse(text: str) -> Any:
        return xla_client._xla.hlo_module_cost_analysis(client, _hlo().hlo_module_from_text(text))

    instructions = hlo.instruction_costs(module, analyse)
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "loop_trips": module.trips,
        "collectives": module.collectives(),
        **also(module, instructions),
        **hlo.costs(module, instructions, analyse, accessed_once, seconds),
    }


def _devices(topology: dict[str, Any]) -> Any:
    """Returns the devices of a topology, which need not exist, from libtpu's compile-only client.

    `topology` has the fields of `chips.Topology`.
    """
    from jax.experimental import topologies

    config = {"chip_config_name": topology["chip_config_name"]} if topology["chip_config_name"] else {}
    config |= {"num_slices": topology["slices"]} if topology["slices"] > 1 else {}
    bounds = list(topology["chips_per_host_bounds"])
    return topologies.get_topology_desc(
        platform="tpu", topology_name=topology["name"], chips_per_host_bounds=bounds, **config
    ).devices


def _stablehlo(program: Program) -> bytes:
    """Returns the program as StableHLO bytecode, with its donated parameters and shardings marked."""
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
        # If a result is transposed, the conversion sets the layouts of all results, which libtpu 0.0.17 refuses:
        # "Malformed shape proto: element_type TUPLE should not have a layout". Without them, it uses the default.
        if _RESULT_LAYOUTS in module.operation.attributes:
            del module.operation.attributes[_RESULT_LAYOUTS]
        return mlir.module_to_bytecode(module)
