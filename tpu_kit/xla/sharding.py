"""Shards the tensors of a program over a device mesh (SPMD), by private interfaces of torch_xla and JAX.

A program is written for whole tensors. `constrain` says in it how a tensor is to be sharded, and the compiler adds the
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
"""Likewise if the mesh does not divide the key-value heads: a device has queries of its tokens, and all keys."""
in_place: ContextVar[bool] = ContextVar("in_place", default=False)
"""Whether products take a layer's weights and activations as they are, as `decode_sharding` shards them."""


def token_shards() -> int:
    """Returns the number of shards of a row's tokens; `in_place`, which torch.compile cannot read, is read last."""
    return active_mesh().context if active_mesh().context > 1 and not in_place.get() else 1


def training_spec(kv_heads: int) -> Spec:
    """Returns the spec of queries in training: `PER_HEAD` if the mesh's axes divide the key-value heads."""
    return PER_HEAD if active_mesh().exchanges(kv_heads) else PER_TOKEN


def spec_of_keys(spec: Spec) -> Spec:
    """Returns the spec of keys and values for that of queries."""
    return (*spec[:2], None, None) if spec == PER_TOKEN else spec


def query_shards(spec: Spec) -> int:
    """Returns the number of devices that share the queries of a row."""
    return active_mesh().context if spec == PER_TOKEN else 1


def constrain(tensor: torch.Tensor, spec: Spec, gradient: Spec | None = None, *, uneven: bool = False) -> torch.Tensor:
    """Tells the compiler how a tensor is sharded; for one device it returns the tensor.

    Axes that do not divide their dimension are left out; if `uneven`, they stay, and the compiler pads the last shards.
    Its gradient is sharded by `gradient`, by default by `spec`.
    """
    mesh = active_mesh()
    if mesh.size == 1 or tensor.device.type != "xla" or tensor.dtype == torch.int64:  # which jax would make int32
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

    # libtpu and torch_xla read the older form of shardings, which jax writes without Shardy.
    jax.config.update("jax_use_shardy_partitioner", False)
    abstract = AbstractMesh(tuple(mesh.sizes.values()), tuple(mesh.sizes))
    return NamedSharding(abstract, PartitionSpec(*spec))


def sharded_kernel(function: Callable[..., Any], inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Callable[..., Any]:
    """Returns a function of JAX arrays that each device runs on its shards; for one device, the function itself."""
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
    """Returns a sharding as an attribute of a program's parameter."""
    return str(_sharding(mesh, spec)._to_xla_hlo_sharding(len(spec)))
