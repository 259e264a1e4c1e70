"""Shards the tensors of a program over a device mesh (SPMD), with private interfaces of torch_xla and JAX.

A program is written for whole tensors. `constrain` sets the sharding of a tensor in it, and the compiler adds the
collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from tpu_kit.config.mesh import BATCH, Mesh, Spec
from tpu_kit.distributed.replica.mesh import active_mesh

PER_HEAD: Spec = (BATCH, ("model", "context"), None, None)
"""The spec of queries, keys and values, (B, heads, S, D), in training."""
PER_TOKEN: Spec = (BATCH, "model", "context", None)
"""The same if the mesh does not divide the key-value heads: a device has queries of its own tokens, and all keys."""
in_place: ContextVar[bool] = ContextVar("in_place", default=False)
"""Whether matrix products use weights and activations as sharded by `decode_sharding`, without gathering weights."""


def token_shards() -> int:
    """Returns the shards of a row's tokens: the context axis, or 1 if `in_place`, which torch.compile cannot read."""
    return active_mesh().context if active_mesh().context > 1 and not in_place.get() else 1


def training_spec(kv_heads: int) -> Spec:
    """Returns the spec of queries in training: `PER_HEAD` if the mesh divides the key-value heads, else `PER_TOKEN`."""
    return PER_HEAD if active_mesh().exchanges(kv_heads) else PER_TOKEN


def spec_of_keys(spec: Spec) -> Spec:
    """Returns the spec of keys and values that belongs to the spec of queries."""
    return (*spec[:2], None, None) if spec == PER_TOKEN else spec


def query_shards(spec: Spec) -> int:
    """Returns over how many devices a row's queries are divided: the context axis for `PER_TOKEN`, else 1."""
    return active_mesh().context if spec == PER_TOKEN else 1


def constrain(tensor: torch.Tensor, spec: Spec, gradient: Spec | None = None, *, uneven: bool = False) -> torch.Tensor:
    """Tells the compiler how a tensor is sharded, by returning a tensor with the same values and this sharding.

    If the active mesh is a single device, the tensor is not on torch_xla's device, or it is int64, returns it itself.
    Axes that do not divide their dimension are removed from `spec`; if `uneven` is true, they stay, and the compiler
    pads the last shards. The tensor's gradient is sharded by `gradient`, by default by `spec`.
    """
    mesh = active_mesh()
    if mesh.size == 1 or tensor.device.type != "xla" or tensor.dtype == torch.int64:  # jax would make int64 int32
        return tensor
    spec = spec if uneven else mesh.fitted(spec, tensor.shape)
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return _constrained(tensor, spec)
    back = spec if gradient is None else mesh.fitted(gradient, tensor.shape)
    return _Constrain.apply(tensor, spec, back)


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
    computation = requires_jax(_constraint)(active_mesh(), tuple(tensor.shape), kind, spec)
    return torch_xla._XLAC._xla_user_computation("xla::constrain", [tensor], computation)[0]


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

    # libtpu and torch_xla read the older sharding format, which jax writes without Shardy.
    jax.config.update("jax_use_shardy_partitioner", False)
    abstract = AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes))
    return NamedSharding(abstract, PartitionSpec(*spec))


def sharded_kernel(function: Callable[..., Any], inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Callable[..., Any]:
    """Returns a JAX function of whole arrays that runs `function` on every device of the active mesh with its shards.

    On a mesh of a single device it returns `function` itself. `function` returns a tuple. `inputs` has a spec for each
    argument, `outputs` for each result; the axes must divide the dimensions.
    """
    mesh = active_mesh()
    if mesh.size == 1:
        return function
    import jax
    from jax.sharding import PartitionSpec

    specs = [tuple(PartitionSpec(*spec) for spec in each) for each in (inputs, outputs)]
    return jax.shard_map(
        function, mesh=_sharding(mesh, ()).mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
    )


def hlo_sharding(mesh: Mesh, spec: Spec) -> str:
    """Returns a sharding as HLO text, for a parameter's attribute; turns JAX's Shardy off in this process."""
    return str(_sharding(mesh, spec)._to_xla_hlo_sharding(len(spec)))
