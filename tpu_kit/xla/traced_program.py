"""Programs traced by torch_xla: placeholders, inputs and replaced buffers of a graph, and whether it is for a TPU."""

from __future__ import annotations

import contextlib
import functools
import sys
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
from tpu_kit.torch_tpu import device as torch_tpu
from tpu_kit.torch_tpu.environment import other_plugin
from tpu_kit.xla.sharding import hlo_sharding


@dataclass(frozen=True)
class Program:
    """A traced step.

    Attributes:
        hlo: the serialised HLO module.
        mesh: the devices that run it together; size 1 for a single device or independent replicas.
        shardings: the sharding of each parameter, in HLO's format; empty for a single device.
        donated: numbers of the parameters whose buffers the step replaces. torch_xla passes them to the compiler as
            "buffer donors", so that new values overwrite old values.
        arguments: the name of each parameter's tensor; "" for constants of the step.
        argument_bytes: total size of the arguments, without padding to the TPU's tiles.
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
    """Makes a tensor on the XLA device with a shape but without memory."""
    from torch_xla.core.xla_builder import create_placeholder_tensor

    return create_placeholder_tensor(shape, dtype)


def tensor_number(tensor: torch.Tensor) -> int:
    """Returns the id with which torch_xla identifies the buffers that a step replaces."""
    import torch_xla

    return torch_xla._XLAC._xla_get_tensor_id(tensor)


def is_input(tensor: torch.Tensor, number: int) -> bool:
    """Whether a tensor of torch_xla is an input of the graph, not computed in it, with the id `number`.

    A tensor gets another id (`tensor_number`) when it is changed in place.
    """
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
    """Lowers the graph of `outputs` as torch_xla does when it cuts the graph; sorts the list `outputs`.

    The program's results are in the sorted order, by `tensor_number`.

    Args:
        outputs: all tensors that the step computes and that are alive after it.
        replaced: ids (`tensor_number`) of the tensors whose buffers get new values; they become `Program.donated`.
        names: names of the inputs, by id; inputs without a name get "".
        specs: on a mesh, the specs of sharded inputs by name, without axes that do not divide; other inputs are
            replicated on all devices.
    """
    import torch_xla

    xla = torch_xla._XLAC
    outputs.sort(key=tensor_number)  # the order of torch_xla when it cuts the graph
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
    """Adds hooks that put module paths into the metadata of a model's forward and recomputed backward operations.

    A path has the names of the modules that run, such as self_attn; "layers-3" stands for layers.3. The hooks stay.
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
    """Dispatch mode that refuses operations without a kernel in torch_xla, before they run.

    torch_xla would copy their inputs to the host and compute there. Within a trace, tensors have no values, and
    torch_xla aborts the process. This mode changes a program's source lines, so without it, it is compiled again.

    Under a mode, torch skips functionalization, which torch_xla needs for new tensors: without it, a write to a view of
    a new tensor is lost. The mode therefore enables it for operations without an XLA input.

    Raises:
        ValueError: an operation has no kernel; the text names it and the Python line that calls it.
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
    """Whether an operation, such as "aten::mm", runs on XLA: it has a kernel, or is composed of operations that do."""
    compositions = ("ExplicitAutograd", "ExplicitAutogradNonFunctional", "ImplicitAutograd")
    keys = ("XLA", "BackendSelect", *(f"Composite{kind}" for kind in compositions))
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def _on_xla(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


# ---------------------------------------------------------------------------------------------------- kernels of a TPU

_lowering_for_tpu = False


@contextlib.contextmanager
def lowering_for_tpu() -> Iterator[None]:
    """Context manager in which a process on XLA:CPU traces TPU kernels; only the TPU compiler can use the program."""
    global _lowering_for_tpu
    _lowering_for_tpu = True
    try:
        yield
    finally:
        _lowering_for_tpu = False


def is_lowering_for_tpu() -> bool:
    """Returns whether `lowering_for_tpu` is active."""
    return _lowering_for_tpu


def has_kernels() -> bool:
    """Returns whether torch_xla programs can contain TPU kernels: on a TPU, or in `lowering_for_tpu`."""
    return _lowering_for_tpu or on_tpu()


def kernels_on(device_type: str) -> bool:
    """Returns whether programs of a run with this `launch.device_type` can contain TPU kernels."""
    return device_type == "tpu" or (device_type == "torch-tpu" and not other_plugin())


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether the program of a tensor can contain TPU kernels."""
    if tensor.device.type == "xla":
        return has_kernels()
    return torch_tpu.has_kernels(tensor) or (_lowering_for_tpu and tensor.device.type == "tpu")


def on_tpu() -> bool:
    """Returns whether torch_xla's device is a TPU."""
    import torch_xla.runtime as xr

    return bool(xr.device_type() == "TPU")
