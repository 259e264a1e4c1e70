"""The program that torch_xla has traced: its inputs, which of them it replaces, and its HLO."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tpu_kit.config.mesh import Mesh, Spec
from tpu_kit.xla.sharding import current_mesh, hlo_sharding


@dataclass(frozen=True)
class Program:
    """A traced step.

    Attributes:
        hlo: the serialised HLO module.
        donated: numbers of the parameters whose buffers the step replaces. torch_xla gives these to the compiler when
            the step is cut ("buffer donors"), so that the new values are written over the old ones.
        arguments: for each parameter of the program the tensor it is, "" for numbers that the step itself holds.
        argument_bytes: their sizes together, without the padding of the TPU's tiles.
        mesh: the devices that run it together; None for one device, or replicas of it.
        shardings: of each parameter, in HLO's form; empty without a mesh.
    """

    hlo: bytes
    donated: tuple[int, ...]
    arguments: tuple[str, ...]
    argument_bytes: int
    mesh: Mesh | None = None
    shardings: tuple[str, ...] = ()


def device() -> torch.device:
    """The XLA device of this process."""
    import torch_xla

    found: torch.device = torch_xla.device()
    return found


def placeholder(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the XLA device that has a shape and no bytes."""
    from torch_xla.core.xla_builder import create_placeholder_tensor

    placeholder: torch.Tensor = create_placeholder_tensor(shape, dtype)
    return placeholder


def tensor_number(tensor: torch.Tensor) -> int:
    """torch_xla's number of a tensor, by which it finds out at the cut what has replaced what."""
    import torch_xla

    number: int = torch_xla._XLAC._xla_get_tensor_id(tensor)
    return number


def is_input(tensor: torch.Tensor, number: int) -> bool:
    """Whether a tensor is what it was when it had this number: not changed in place since."""
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
    """Lowers what computes `outputs`, as torch_xla does where it cuts.

    Args:
        outputs: all that is alive after the step, and has been computed in it.
        replaced: numbers of the tensors whose buffers new values take.
        names: of the inputs, by number.
        specs: by name of the input, on a mesh; those that are left out are whole on each device.
    """
    import torch_xla

    xla = torch_xla._XLAC
    outputs.sort(key=tensor_number)  # as torch_xla orders them at a cut
    numbers, tensors = xla._get_tensors_xla_device_data_node(outputs)
    hlo = xla._get_xla_tensors_hlo_proto(outputs)
    arguments = tuple(names.get(number, "") for number in numbers)
    mesh = current_mesh()
    shardings: tuple[str, ...] = ()
    if mesh is not None:
        known = specs or {}
        shardings = tuple(
            hlo_sharding(mesh, mesh.fitted(known.get(name, (None,) * one.ndim), one.shape))
            for name, one in zip(arguments, tensors, strict=True)
        )
    return Program(
        mesh=mesh,
        shardings=shardings,
        hlo=hlo,
        donated=tuple(place for place, number in enumerate(numbers) if number in replaced),
        arguments=arguments,
        argument_bytes=sum(tensor.nbytes for tensor in tensors),
    )


def name_operations(model: torch.nn.Module) -> None:
    """Lets the operations of the forward pass carry the path of their module; the program itself stays the same.

    Those of the backward pass have no name but the operation's, except where a layer is computed again.
    """
    import torch_xla

    push = torch_xla._XLAC.profiler.scope_pusher
    open_scopes: list[Any] = []  # a scope lasts as long as what `push` returns

    def enter(name: str, *_: Any) -> None:
        open_scopes.append(push(name))

    def leave(*_: Any) -> None:
        open_scopes.pop()

    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if name.isdigit():  # a list of layers is not called itself
            name = f"{parent.rpartition('.')[2]}-{name}"
        if name:
            module.register_forward_pre_hook(functools.partial(enter, name))
            module.register_forward_hook(leave)
