"""Programs that torch_xla traces, and their compilation for a TPU that the machine need not have.

The compiler is the compile-only client of libtpu, called through jaxlib.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.distributed.replica.mesh import active_mesh
from tpu_kit.xla import hlo
from tpu_kit.xla.sharding import hlo_sharding

# Products of sharded weights as gathers and one product: as loops over the shards a step compiles for minutes.
_SPMD_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_RESULT_LAYOUTS = "mhlo.xla_entry_computation_result_layout"
LOW_EFFORT = -1.0  # of XLA's exec_time_optimization_effort, whose default is 0


@dataclass(frozen=True)
class Program:
    """A traced step.

    Attributes:
        hlo: the serialised HLO module.
        mesh: the devices that run it together; of size 1 for one device, or replicas of it.
        shardings: of each parameter, in HLO's form; empty for one device.
        donated: numbers of the parameters whose buffers the step replaces. torch_xla passes them to the compiler as
            "buffer donors", so that new values overwrite old ones.
        arguments: for each parameter of the program the name of its tensor; "" for constants of the step.
        argument_bytes: sum of their sizes, without the padding of the TPU's tiles.
    """

    hlo: bytes
    donated: tuple[int, ...]
    arguments: tuple[str, ...]
    argument_bytes: int
    mesh: Mesh
    shardings: tuple[str, ...]


def device() -> torch.device:
    """Returns the XLA device of this process."""
    import torch_xla

    return torch_xla.device()


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor on the XLA device that has a shape but no memory."""
    from torch_xla.core.xla_builder import create_placeholder_tensor

    return create_placeholder_tensor(shape, dtype)


def tensor_number(tensor: torch.Tensor) -> int:
    """Returns the number by which torch_xla finds the buffers that a step replaces."""
    import torch_xla

    return torch_xla._XLAC._xla_get_tensor_id(tensor)


def is_input(tensor: torch.Tensor, number: int) -> bool:
    """Whether a tensor has not been changed in place since it had this number."""
    import torch_xla

    if tensor_number(tensor) != number:
        return False
    inputs, _ = torch_xla._XLAC._get_tensors_xla_device_data_node([tensor])
    return list(inputs) == [number]


def lower(
    outputs: list[torch.Tensor],
    replaced: set[int],
    names: dict[int, str],
    specs: Mapping[str, Spec] | None = None,
) -> Program:
    """Lowers the graph of `outputs` as torch_xla does when it cuts the graph.

    Args:
        outputs: all tensors that the step computes and that are alive after it.
        replaced: numbers of the tensors whose buffers get new values.
        names: of the inputs, by number.
        specs: by name of the input, on a mesh; those that are left out are whole on each device.
    """
    import torch_xla

    xla = torch_xla._XLAC
    outputs.sort(key=tensor_number)  # as torch_xla orders them at a cut
    numbers, tensors = xla._get_tensors_xla_device_data_node(outputs)
    lowered = xla._get_xla_tensors_hlo_proto(outputs)
    arguments = tuple(names.get(number, "") for number in numbers)
    mesh = active_mesh()
    shardings = tuple(
        hlo_sharding(mesh, mesh.fitted((specs or {}).get(name, (None,) * tensor.ndim), tensor.shape))
        for name, tensor in zip(arguments, tensors, strict=True)
        if mesh.size > 1
    )
    donated = tuple(index for index, number in enumerate(numbers) if number in replaced)
    return Program(lowered, donated, arguments, sum(tensor.nbytes for tensor in tensors), mesh, shardings)


def name_operations(model: torch.nn.Module) -> None:
    """Adds the path of their module to the metadata of forward operations; the program stays the same.

    Operations of the backward pass get it only where a layer is recomputed.
    """
    import torch_xla

    push = torch_xla._XLAC.profiler.scope_pusher
    open_scopes: list[Any] = []  # a scope ends when the object that `push` returned is deleted

    def enter(name: str, *_: Any) -> None:
        open_scopes.append(push(name))

    def leave(*_: Any) -> None:
        open_scopes.pop()

    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if name.isdigit():  # a list of layers has no forward pass
            name = f"{parent.rpartition('.')[2]}-{name}"
        if name:
            module.register_forward_pre_hook(functools.partial(enter, name))
            module.register_forward_hook(leave)


class refusing(TorchDispatchMode):
    """Refuses the operations for which torch_xla has no kernel, before they run.

    It would copy their inputs to the host and compute there. Within a trace tensors have no values, and torch_xla ends
    the process. Traced with this mode, a program has other source lines, and is compiled again without it.

    Below a mode, torch leaves out functionalization, which torch_xla gives to each new tensor: without it, a write into
    a view of one is lost. So it is switched on again where no input has it.

    Raises:
        ValueError: there is such an operation; the text names it and the line of Python that calls it.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes = not any(_on_xla(one) for one in tree_flatten((args, kwargs))[0])
        if not makes and not _has_kernel(func.name()):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.startswith(str(Path(torch.__file__).parent)):
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "its code"
            raise ValueError(
                f"XLA has no {func.name()}, which {place} calls; use launch.device_type=cuda or cpu, or another model"
            )
        with _functionalized() if makes else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _functionalized() -> Iterator[None]:
    key = torch._C.DispatchKey.Functionalize
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


@functools.cache
def _has_kernel(name: str) -> bool:
    """Whether an operation, such as "aten::mm", runs on XLA: by a kernel of its own, or as a composition of others."""
    compositions = ("ExplicitAutograd", "ExplicitAutogradNonFunctional", "ImplicitAutograd")
    keys = ("XLA", "BackendSelect", *(f"Composite{kind}" for kind in compositions))
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _on_xla(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


# ----------------------------------------------------------------------------------------------------- TPU compiler


def fingerprint(program: Program) -> str:
    """Hashes the program and its donated buffers, without names and source lines."""
    from jaxlib import xla_client

    module = xla_client._xla.HloModule.from_serialized_hlo_module_proto(program.hlo)
    options = xla_client._xla.HloPrintOptions()
    options.print_metadata, options.print_large_constants = False, True
    text = module.to_string(options) + repr(program.donated)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def compile_program(program: Program, request: dict[str, Any]) -> dict[str, Any]:
    """Compiles for the topology of `request` and returns the fields of `compile_check.Compiled`.

    Raises:
        ValueError: the compiler refuses the program for another reason than memory, or does not know the topology.
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
    stablehlo = _stablehlo(program)
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
    seconds = time.monotonic() - start
    stats = done.get_compiled_memory_stats()
    module = hlo.Module(done.hlo_modules()[0].to_string())
    client = xla_client.make_cpu_client()

    def analyse(text: str) -> Any:
        return xla_client._xla.hlo_module_cost_analysis(client, xla_client._xla.hlo_module_from_text(text))

    once = done.cost_analysis()
    once = once[0] if isinstance(once, list) else once
    return {
        "compile_seconds": seconds,
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "aliased_bytes": stats.alias_size_in_bytes,
        "temporary_bytes": stats.temp_size_in_bytes,
        "code_bytes": stats.generated_code_size_in_bytes,
        "loop_trips": module.trips,
        "collectives": module.collectives(),
        **hlo.costs(module, analyse, once["bytes accessed"]),
    }


def _devices(topology: dict[str, Any]) -> Any:
    from jax.experimental import topologies

    config = {"chip_config_name": topology["chip_config_name"]} if topology["chip_config_name"] else {}
    config |= {"num_slices": topology["slices"]} if topology["slices"] > 1 else {}
    bounds = list(topology["chips_per_host_bounds"])
    return topologies.get_topology_desc(
        platform="tpu", topology_name=topology["name"], chips_per_host_bounds=bounds, **config
    ).devices


def _stablehlo(program: Program) -> bytes:
    """Converts the program for the client, and marks its donated parameters."""
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
        # The conversion names the layouts of all results where one is transposed, and libtpu 0.0.17 then says
        # "Malformed shape proto: element_type TUPLE should not have a layout". Without them, the default is used.
        if _RESULT_LAYOUTS in module.operation.attributes:
            del module.operation.attributes[_RESULT_LAYOUTS]
        return mlir.module_to_bytecode(module)
