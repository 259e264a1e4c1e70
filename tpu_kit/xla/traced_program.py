"""Programs that torch_xla traces: placeholders, what a graph reads and replaces, and whether it is for a TPU."""

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


# ---------------------------------------------------------------------------------------------------- kernels of a TPU

_lowering_for_tpu = False


@contextlib.contextmanager
def lowering_for_tpu() -> Iterator[None]:
    """Lets a process on XLA:CPU trace kernels into a program for the TPU compiler, which cannot run on the CPU."""
    global _lowering_for_tpu
    _lowering_for_tpu = True
    try:
        yield
    finally:
        _lowering_for_tpu = False


def is_lowering_for_tpu() -> bool:
    """Returns whether `lowering_for_tpu` is open."""
    return _lowering_for_tpu


def has_kernels() -> bool:
    """Returns whether a program on XLA can have the kernels of a TPU: on a TPU, or in `lowering_for_tpu`."""
    return _lowering_for_tpu or on_tpu()


def kernels_on(device_type: str) -> bool:
    """Returns whether programs of a run with this `launch.device_type` can have the kernels of a TPU."""
    return device_type == "tpu" or (device_type == "torch-tpu" and not other_plugin())


def runs_kernels(tensor: torch.Tensor) -> bool:
    """Returns whether the program of a tensor can have the kernels of a TPU."""
    if tensor.device.type == "xla":
        return has_kernels()
    return torch_tpu.has_kernels(tensor) or (_lowering_for_tpu and tensor.device.type == "tpu")


def on_tpu() -> bool:
    """Returns whether the device of torch_xla is a TPU."""
    import torch_xla.runtime as xr

    return bool(xr.device_type() == "TPU")
