"""Starts the mesh of a process that drives several devices, and copies tensors to its devices and back.

`put` sends devices their shards of a tensor, `read` joins the shards. Both use torch_xla's private functions for
shards, because the public functions compile a program or need memory for the whole tensor on the device. On a slice of
several hosts, a process copies only the shards of its own devices: `_global_tensor_from_cpu_shards` takes a shard per
local device, in the order of `_xla_get_runtime_devices` (torch_xla 2.9, init_python_bindings.cpp).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch

from tpu_kit.config.mesh import BATCH, Mesh, Spec

Box = tuple[slice, ...]
"""A part of a tensor, as a slice per dimension."""
_mesh = Mesh()  # global, not thread-local, because autograd runs the backward pass in its own threads


def active_mesh() -> Mesh:
    """Returns the mesh over which this process's programs are sharded; its size is 1 for a single device."""
    return _mesh


@contextlib.contextmanager
def use_mesh(mesh: Mesh) -> Iterator[None]:
    """Context manager that sets this process's `active_mesh` for the block, then restores it; opens no device."""
    global _mesh
    before, _mesh = _mesh, mesh
    try:
        yield
    finally:
        _mesh = before


def start(mesh: Mesh) -> None:
    """Turns SPMD on with `mesh` as the active mesh until this process ends; call it before any use of a device.

    `mesh` has the devices of all hosts, with the runtime's numbers: by slice, then by position in the slice.

    Raises:
        ValueError: the mesh and the runtime have different numbers of devices.
    """
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    global _mesh
    xr.use_spmd()
    if (there := xr.global_runtime_device_count()) != mesh.size:
        raise ValueError(
            f"launch.mesh={mesh} is a mesh of {mesh.size} devices, and the runtime has {there}: on a slice start all "
            "hosts, and set TPU_WORKER_HOSTNAMES or TPU_KIT_HOSTS to all of them"
        )
    xs.set_global_mesh(xs.Mesh(np.arange(mesh.size), tuple(mesh.sizes.values()), tuple(mesh.sizes)))
    _mesh = mesh


def local_devices() -> list[int]:
    """Returns the numbers of the devices that this process drives, in the runtime's order; on a slice the host's."""
    import torch_xla

    return [_number(name) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def _number(name: str) -> int:
    """Returns 3 for the device name "TPU:3"."""
    return int(name.rpartition(":")[2])  # a name such as "TPU:3"


def put(tensor: torch.Tensor, spec: Spec, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copies a CPU tensor to the devices as `dtype`, sharded by `spec` without axes that do not divide."""
    spec, tensor = _mesh.fitted(spec, tensor.shape), tensor.detach()
    return _of_shards(cut(tensor, _mesh, spec, local_devices(), dtype), spec, tensor.shape)


def cut(
    tensor: torch.Tensor, mesh: Mesh, spec: Spec, devices: Sequence[int], dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """Returns the shards of a CPU tensor for `devices`, in their order; equal shards are one tensor, maybe a view."""
    places = boxes(mesh, spec, tensor.shape, devices)
    distinct = {str(box): box for box in places}
    shards = {key: tensor[box].to(dtype or tensor.dtype).contiguous() for key, box in distinct.items()}
    return [shards[str(box)] for box in places]


def row_shards(mesh: Mesh, devices: Sequence[int]) -> list[int]:
    """Returns the numbers of the batch shards on `devices`, in their order."""
    return [box[0].start for box in boxes(mesh, (BATCH,), (mesh.batch_shards,), devices)]


def put_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Copies this process's rows of a batch to its devices; returns the batch of all processes, sharded by rows.

    `tensor` (B, S, ...), on the CPU, has the rows of the N batch shards on this process's devices: B / N rows of the
    shard with the lowest number, then of the next. The result has B / N rows of every shard of the mesh. If N does not
    divide B, the result is `tensor` itself, replicated on all devices.
    """
    shards = row_shards(_mesh, local_devices())
    held = sorted(set(shards))
    if len(tensor) % len(held):
        return put(tensor, (None,) * tensor.ndim)
    size = len(tensor) // len(held)
    parts = dict(zip(held, (one.contiguous() for one in tensor.split(size)), strict=True))
    shape = torch.Size([size * _mesh.batch_shards, *tensor.shape[1:]])
    return _of_shards([parts[one] for one in shards], (BATCH, *[None] * (tensor.ndim - 1)), shape)


def put_stack(parts: list[torch.Tensor], spec: Spec, dtype: torch.dtype) -> torch.Tensor:
    """Stacks CPU tensors, converted to `dtype`, and returns the stack on the devices; the host makes only its shards.

    Empties the list `parts`, whose tensors have the same shape. `spec` is for the stack, with None for the first
    dimension; axes that do not divide their dimension are left out.
    """
    shape = torch.Size([len(parts), *parts[0].shape])
    spec = _mesh.fitted(spec, shape)
    places = boxes(_mesh, spec, shape, local_devices())
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
    """Makes a device tensor of `shape`, sharded by `spec`, from a CPU shard per local device, in their order."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    sharding = xs.get_global_mesh().get_op_sharding(spec)
    return torch_xla._XLAC._global_tensor_from_cpu_shards(shards, sharding, shape)


def read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies whole tensors, of which this process must hold all shards, from the devices to the CPU, without compiling.

    If any tensor is sharded, waits for all programs that were started; else for the programs that compute the tensors.
    """
    return [_joined(one) if parts else one.cpu() for one, parts in zip(tensors, _sharded(tensors), strict=True)]


def pieces(tensors: Sequence[torch.Tensor], devices: Collection[int]) -> list[list[tuple[Box, torch.Tensor]]]:
    """Returns for every device tensor its parts that belong to `devices`, as (box, CPU values); [] if there are none.

    `devices` are numbers of this process's devices. A part belongs to a single device of the mesh: if several devices
    have the same shard, to the first. Tensors that are not sharded belong to device 0.
    """
    found: list[list[tuple[Box, torch.Tensor]]] = []
    for tensor, parts in zip(tensors, _sharded(tensors), strict=True):
        whole = tuple(slice(0, size) for size in tensor.shape)
        if not parts:
            found.append([(whole, tensor.cpu())] if 0 in devices else [])
        else:
            found.append([(box, part) for device, replica, box, part in _shards(tensor)
                          if replica == 0 and device in devices])  # fmt: skip
    return found


def _sharded(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor is sharded; if any is, waits until all programs have ended."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    found = ["devices=" in torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in tensors]
    if any(found):
        xm.wait_device_ops()
    return found


def _joined(tensor: torch.Tensor) -> torch.Tensor:
    """Joins the shards of a tensor on the CPU; asserts that this process holds all of them."""
    whole, done = torch.empty(tensor.shape, dtype=tensor.dtype), dict[str, int]()
    for _, _, box, part in _shards(tensor):
        if str(box) not in done:
            done[str(box)] = part.numel()
            whole[box].copy_(part)
    assert sum(done.values()) == whole.numel(), f"other hosts hold parts of a tensor of {tuple(tensor.shape)}"
    return whole


def _shards(tensor: torch.Tensor) -> Iterator[tuple[int, int, Box, torch.Tensor]]:
    """Yields the device number, the replica number of its shard, the box and the values, for this process's devices."""
    import torch_xla

    shards = torch_xla._XLAC._get_local_shards([tensor])[0]
    places = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
    for (shard, name), (replica, box) in zip(shards, places, strict=True):
        box = tuple(map(slice, [0] * tensor.ndim, tensor.shape)) if box is Ellipsis else tuple(box)
        sizes = [one.stop - one.start for one in box]
        yield _number(name), replica, box, shard[tuple(map(slice, sizes))]  # without the padding of a shard


def boxes(mesh: Mesh, spec: Spec, shape: Sequence[int], devices: Sequence[int] | None = None) -> list[Box]:
    """Returns the boxes of a tensor that `devices` hold, one per device in their order; None means all of `mesh`.

    `shape` is the shape of the whole tensor. The axes in `spec` must divide it (`Mesh.fitted`), which is not checked.
    """
    sizes = mesh.shard_shape(spec, shape)
    found = []
    for device in range(mesh.size) if devices is None else devices:
        at = mesh.coordinates(device)
        box = []
        for axes, size in zip(spec, sizes, strict=True):
            place = 0
            for name in (axes,) if isinstance(axes, str) else axes or ():
                place = place * mesh.sizes[name] + at[name]
            box.append(slice(place * size, (place + 1) * size))
        found.append(tuple(box))
    return found
