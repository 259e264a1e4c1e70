"""Starts the mesh of a process that drives several devices, and copies tensors to its devices and back.

`put` gives each device its shard of a tensor, `read` joins the shards. Both take torch_xla's private functions for
shards: the public ones compile a program, or hold the whole tensor on the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from tpu_kit.config.mesh import Mesh, Spec

_mesh: Mesh | None = None  # of the process: autograd runs the backward pass in threads of its own


def current_mesh() -> Mesh | None:
    """The mesh of this process; None where a program is for one device."""
    return _mesh


@contextlib.contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """Makes `mesh` the one of this process."""
    global _mesh
    before, _mesh = _mesh, mesh
    try:
        yield
    finally:
        _mesh = before


def start(mesh: Mesh) -> None:
    """Lets this process drive all devices as `mesh`, before it touches one; for as long as it lives."""
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    global _mesh
    xr.use_spmd()
    there = xr.global_runtime_device_count()
    assert there == mesh.size, f"a mesh of {mesh.size} devices on {there}"
    xs.set_global_mesh(xs.Mesh(np.arange(mesh.size), tuple(mesh.sizes.values()), tuple(mesh.sizes)))
    _mesh = mesh


def put(tensor: torch.Tensor, spec: Spec, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Moves a CPU tensor to the devices, to each its shard; nothing is compiled.

    Args:
        tensor: the whole tensor.
        spec: its sharding; axes that do not divide their dimension are left out.
        dtype: on the devices; its own by default.
    """
    assert _mesh is not None
    spec, tensor = _mesh.fitted(spec, tensor.shape), tensor.detach()
    places = boxes(_mesh, spec, tensor.shape)
    distinct = {str(box): box for box in places}
    shards = {key: tensor[box].to(dtype or tensor.dtype).contiguous() for key, box in distinct.items()}
    return _of_shards([shards[str(box)] for box in places], spec, tensor.shape)


def put_stack(parts: list[torch.Tensor], spec: Spec, dtype: torch.dtype) -> torch.Tensor:
    """Moves the stack of CPU tensors to the devices; the host never holds it besides its shards.

    Args:
        parts: the tensors of one shape; the list is empty afterwards.
        spec: of the stack, its first dimension whole.
        dtype: on the devices.
    """
    assert _mesh is not None
    shape = torch.Size([len(parts), *parts[0].shape])
    spec = _mesh.fitted(spec, shape)
    places = boxes(_mesh, spec, shape)
    distinct = {str(box): box for box in places}
    shards = {
        key: torch.empty([len(parts), *(one.stop - one.start for one in box[1:])], dtype=dtype)
        for key, box in distinct.items()
    }
    for row in range(len(parts)):
        part = parts.pop(0)
        for key, box in distinct.items():
            shards[key][row] = part[box[1:]]
    return _of_shards([shards[str(box)] for box in places], spec, shape)


def _of_shards(shards: list[torch.Tensor], spec: Spec, shape: torch.Size) -> torch.Tensor:
    import torch_xla
    import torch_xla.distributed.spmd as xs

    sharding = xs.get_global_mesh().get_op_sharding(spec)
    found: torch.Tensor = torch_xla._XLAC._global_tensor_from_cpu_shards(shards, sharding, shape)
    return found


def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies whole tensors of the devices to the CPU; nothing is compiled.

    Of a sharded tensor all programs that were started are awaited; of another one the program that computes it.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    sharded = ["devices=" in torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in tensors]
    if any(sharded):
        xm.wait_device_ops()
    return [_joined(one) if parts else one.cpu() for one, parts in zip(tensors, sharded, strict=True)]


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    import torch_xla

    shards = torch_xla._XLAC._get_local_shards([tensor])[0]
    places = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    done = set()
    for (shard, _), (_, box) in zip(shards, places, strict=True):
        if (place := repr(box)) not in done:
            done.add(place)
            part = whole if box is Ellipsis else whole[tuple(box)]
            part.copy_(shard[tuple(map(slice, part.shape))])  # without the padding of a shard
    return whole


def boxes(mesh: Mesh, spec: Spec, shape: Sequence[int]) -> list[tuple[slice, ...]]:
    """The part of a tensor that each device holds, by the device's number."""
    sizes = mesh.shard_shape(spec, shape)
    found = []
    for device in range(mesh.size):
        at = mesh.coordinates(device)
        box = []
        for axes, size in zip(spec, sizes, strict=True):
            place = 0
            for name in (axes,) if isinstance(axes, str) else axes or ():
                place = place * mesh.sizes[name] + at[name]
            box.append(slice(place * size, (place + 1) * size))
        found.append(tuple(box))
    return found
