"""Sharding of the tensors of one program over a device mesh (SPMD): the private calls of torch_xla and jax for it.

A program is written for whole tensors. `constrain` says in it how a tensor is to be sharded, and the compiler adds the
collectives. At run time one process drives all devices: `put` gives each its shard of a tensor, `read` joins them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

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


def constrain(tensor: torch.Tensor, spec: Spec, gradient: Spec | None = None) -> torch.Tensor:
    """Tells the compiler how a tensor is sharded; without a mesh it returns the tensor.

    Axes that do not divide their dimension are left out.

    Args:
        tensor: any tensor of the program.
        spec: for each dimension.
        gradient: of the tensor's gradient; `spec` by default.
    """
    if _mesh is None or tensor.device.type != "xla" or tensor.dtype == torch.int64:  # which jax would make int32
        return tensor
    spec = _mesh.fitted(spec, tensor.shape)
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return _constrained(tensor, spec)
    back = spec if gradient is None else _mesh.fitted(gradient, tensor.shape)
    found: torch.Tensor = _Constrain.apply(tensor, spec, back)
    return found


class _Constrain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, spec: Spec, back: Spec) -> torch.Tensor:
        ctx.back = back
        return _constrained(tensor, spec)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _constrained(upstream, ctx.back), None, None


def _constrained(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    import torch_xla
    from torch_xla._internal.jax_workarounds import requires_jax

    kind = str(tensor.dtype).removeprefix("torch.")
    computation = requires_jax(_constraint)(_mesh, tuple(tensor.shape), kind, spec)
    found: torch.Tensor = torch_xla._XLAC._xla_user_computation("xla::constrain", [tensor], computation)[0]
    return found


@functools.cache
def _constraint(mesh: Mesh, shape: tuple[int, ...], dtype: str, spec: Spec) -> Any:
    import jax
    from torch_xla.core.xla_builder import computation_from_module_proto

    def constraint(tensor: Any) -> Any:
        return (jax.lax.with_sharding_constraint(tensor, _sharding(mesh, spec)),)

    traced = jax.jit(constraint, keep_unused=True).trace(jax.ShapeDtypeStruct(shape, dtype))
    lowered = traced.lower(lowering_platforms=("cpu",))
    return computation_from_module_proto("constrain", lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())


def _sharding(mesh: Mesh, spec: Spec) -> Any:
    import jax
    from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

    # libtpu and torch_xla read the older form of shardings, which jax writes without Shardy.
    jax.config.update("jax_use_shardy_partitioner", False)
    abstract = AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes))
    return NamedSharding(abstract, PartitionSpec(*spec))


def sharded_kernel(function: Callable[..., Any], inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Callable[..., Any]:
    """A function of jax arrays that each device runs on its shards, as a kernel needs it; itself without a mesh."""
    if _mesh is None:
        return function
    import jax
    from jax.sharding import PartitionSpec

    mesh = _sharding(_mesh, ()).mesh
    given, found = (tuple(PartitionSpec(*spec) for spec in each) for each in (inputs, outputs))
    mapped: Callable[..., Any] = jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=found, check_vma=False)
    return mapped


def hlo_sharding(mesh: Mesh, spec: Spec) -> str:
    """A sharding as an attribute of a program's parameter."""
    return str(_sharding(mesh, spec)._to_xla_hlo_sharding(len(spec)))


# ------------------------------------------------------------------------------------------------------- at run time


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


def read(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor of the devices, on the CPU; nothing is compiled."""
    import torch_xla

    shards = torch_xla._XLAC._get_local_shards([tensor])[0]
    places = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    seen = set()
    for (shard, _), (_, box) in zip(shards, places, strict=True):
        if (key := repr(box)) not in seen:
            seen.add(key)
            part = whole if box is Ellipsis else whole[tuple(box)]
            part.copy_(shard[tuple(map(slice, part.shape))])
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
