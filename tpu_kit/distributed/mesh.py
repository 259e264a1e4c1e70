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


def put(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Moves a CPU tensor to the devices, to each its shard; nothing is compiled.

    Args:
        tensor: the whole tensor.
        spec: its sharding; axes that do not divide their dimension are left out.
    """
    import torch_xla
    import torch_xla.distributed.spmd as xs

    assert _mesh is not None
    spec = _mesh.fitted(spec, tensor.shape)
    tensor = tensor.detach()
    shards = [tensor[box].contiguous() for box in boxes(_mesh, spec, tensor.shape)]
    sharding = xs.get_global_mesh().get_op_sharding(spec)
    found: torch.Tensor = torch_xla._XLAC._global_tensor_from_cpu_shards(shards, sharding, tensor.shape)
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
