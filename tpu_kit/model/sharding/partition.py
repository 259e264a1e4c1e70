"""Shards the tensors of a model over a mesh, by the rules of `sharding_rules`.

A tensor is stored in shards over "fsdp" and "model". When its layer runs, the tensor is gathered over "fsdp" and stays
sharded over "model", which shards the matrix product.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tpu_kit.config.mesh import BATCH, Spec
from tpu_kit.distributed.replica.mesh import active_mesh, put, put_stack
from tpu_kit.machine.chips import GIB
from tpu_kit.model.base_model import base_model, is_tied, matrix_of
from tpu_kit.model.sharding import sharding_rules
from tpu_kit.model.sharding.sharding_rules import Embedding, Placed, Tensor
from tpu_kit.xla.sharding import constrain, in_place, token_shards


def spec_of(name: str, tensor: torch.Tensor, embedding: Embedding, stacked: bool = False) -> Spec:
    """Like `sharding_rules.spec_of`, on the mesh of this process, for a parameter or buffer or a tensor like it."""
    return sharding_rules.spec_of(_described(name, tensor, stacked), embedding, active_mesh())


def _described(name: str, tensor: torch.Tensor, stacked: bool) -> Tensor:
    """Describes a tensor for the rules; uint8 means packed int4."""
    packed = tensor.dtype == torch.uint8
    return Tensor(name, tuple(tensor.shape), _dtype(tensor).itemsize, stacked, packed, tensor.requires_grad)


def gathered(spec: Spec) -> Spec:
    """Returns the spec of a tensor gathered for its product: `spec` without the axes of `Mesh.weights`."""
    weights = active_mesh().weights
    found: list[str | tuple[str, ...] | None] = []
    for axes in spec:
        names = tuple(name for name in ((axes,) if isinstance(axes, str) else axes or ()) if name not in weights)
        found.append(names or None)
    return tuple(found)


def gather_layer(
    tensors: Mapping[str, torch.Tensor], hidden: int, dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer, by name, gathered over the axes of `Mesh.weights` for its products.

    On a single device, or with `xla.sharding.in_place`, returns them unchanged. Tensors without these axes stay, too.

    Args:
        tensors: tensors by name in the layer.
        hidden: hidden size.
        dtype: dtype of the products; fp32 matrices are cast to it before they are gathered. None casts nothing.
    """
    if active_mesh().size == 1 or in_place.get():
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        spec = spec_of(f"layers.0.{name}", tensor, Embedding(hidden))
        if spec != gathered(spec):
            if dtype is not None and tensor.dtype == torch.float32 and tensor.ndim == 2:
                tensor = tensor.to(dtype)
            tensor = constrain(tensor, gathered(spec), spec)
        found[name] = tensor
    return found


def gathered_early(tensors: Mapping[str, torch.Tensor], alone: bool = True) -> list[list[str]]:
    """Returns names of frozen weights to gather an iteration early, in groups for `gather_alike`; [] without shards.

    These are floating-point weights of queries, keys and values, in groups of equal shapes. If the layer is `alone` in
    its iteration, weights of experts are groups of their own. With `in_place`, the result is [], too.

    Other layers' integers have a half or a quarter of the bytes, and the compiler hides their gathers anyway. With two
    layers per iteration (gpt-oss-20b in int8, broadcast biases), early gathers of the first layer's experts hide fewer
    bytes: 14.1 of 40.2 GiB instead of 22.1 of 38.6.
    """
    groups: dict[torch.Size | str, list[str]] = {}
    mesh = active_mesh()
    if mesh.shards(mesh.weights) == 1 or in_place.get():
        return []
    for name, tensor in tensors.items():
        first = name.endswith(".weight") and "lora_" not in name and set(name.split(".")) & set(sharding_rules.FIRST)
        if tensor.requires_grad:
            continue
        if ".experts." in name and not sharding_rules.is_small(name):
            groups |= {name: [name]} if alone else {}
        elif first and tensor.is_floating_point():
            groups.setdefault(tensor.shape, []).append(name)
    return list(groups.values())


def gather_alike(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Gathers n tensors of a layer with the shape and sharding rule of `name` as a single tensor (n, ...)."""
    spec = (None, *spec_of(f"layers.0.{name}", tensors[0], Embedding()))
    return constrain(constrain(torch.stack(tensors), spec), gathered(spec))


@contextlib.contextmanager
def last_product(layer: torch.nn.Module | None, hidden: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Yields a list that gets the detached input of the layer's last product when the layer runs within the context.

    The list stays empty without `layer`, and for a product in the loop of a tiled MLP. `hidden` has the shape (..., H)
    of the product's result. Early gathers for the next iteration depend on this input. Otherwise, the compiler would
    start them at the beginning of the iteration, before the iteration's own gathers.
    """
    found: list[torch.Tensor] = []

    def collect(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].shape[:-1] == hidden.shape[:-1]:
            found.append(given[0].detach())

    if layer is None:
        yield found
        return
    last = layer
    for name, part in layer.named_modules():
        if "lora_" not in name and getattr(part, "out_features", None) == hidden.shape[-1]:
            last = part
    with last.register_forward_pre_hook(collect):
        yield found


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns hidden states (B, S, H) sharded by rows and tokens; with `in_place`, returns them unchanged."""
    return tensor if in_place.get() else constrain(tensor, (BATCH, "context", None))


@contextlib.contextmanager
def embedding_by_columns(model: Any) -> Iterator[None]:
    """Returns a context in which a trained embedding's output is sharded by columns, and by rows only over "data".

    Without it, the compiler may make the table's whole gradient on every device if data is above 1 (2 GiB in fp32 for
    an 8B model). The context does nothing if data is 1, or if the table is frozen or not sharded by columns. `model`
    has no PEFT wrapper.
    """
    embedding, columns = model.get_input_embeddings(), None
    weight = matrix_of(embedding).weight
    if active_mesh().data > 1 and weight.requires_grad:
        columns = spec_of("model.embed_tokens.weight", weight, embedding_of(model))[1]
    if columns is None:  # also for a tied table, which is sharded by rows
        yield
        return
    with embedding.register_forward_hook(lambda *given: constrain(given[-1], ("data", None, columns))):
        yield


def tiles(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Splits (B, S, ...) into tiles (count, B, S / count, ...), all of which have tokens of every shard."""
    found = tensor.unflatten(1, (token_shards(), count, -1)).movedim(2, 0).flatten(2, 3)
    return constrain(found, (None, BATCH, "context", *[None] * (found.ndim - 3)))


def untiled(tensor: torch.Tensor) -> torch.Tensor:
    """Inverts `tiles`: converts (count, B, S / count, ...) to (B, S, ...)."""
    found = tensor.unflatten(2, (token_shards(), -1)).movedim(0, 2).flatten(1, 3)
    return constrain(found, (BATCH, "context", *[None] * (found.ndim - 2)))


def flat_tiles(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Splits (B, S, ...) into tiles (count, B * S / count, ...) in which a shard's tokens are adjacent."""
    found = tiles(tensor, count).unflatten(1, (active_mesh().batch_shards, -1)).unflatten(3, (token_shards(), -1))
    found = found.transpose(2, 3).flatten(1, 4)
    return constrain(found, (None, (*BATCH, "context"), *[None] * (found.ndim - 2)))


def unflattened(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Inverts `flat_tiles` for B = `rows`: converts (count, B * S / count) to (B, S)."""
    shards = active_mesh().batch_shards
    found = tensor.unflatten(1, (shards, token_shards(), rows // shards, -1))
    return untiled(found.transpose(2, 3).flatten(1, 2).flatten(2, 3))


def move(tensor: torch.Tensor, device: torch.device, spec: Spec | None = None, copy: bool = False) -> torch.Tensor:
    """Moves a tensor to a device, or to the devices of the mesh.

    Args:
        tensor: tensor on the CPU or on the device.
        device: the device; on a mesh it represents all devices.
        spec: sharding on a mesh; None: not sharded.
        copy: whether to copy a tensor that is already on the device.
    """
    if active_mesh().size == 1 or device.type != "xla":
        return tensor.to(device, copy=copy)
    spec = spec or (None,) * tensor.ndim
    return put(tensor, spec) if tensor.device.type == "cpu" else constrain(tensor.clone(), spec)


def stack_layers(
    layer: torch.nn.Module, others: list[torch.nn.Module], names: Iterable[str]
) -> dict[str, list[torch.Tensor]]:
    """Replaces the named tensors of a layer by stacks (G, ...) of the tensors of G layers: `layer`, then `others`.

    In `others`, they become None: a tensor is freed after its copy, so that the host never holds the stack and all its
    parts.

    Returns:
        On a mesh of several devices, stacks of CPU tensors are on "meta", and the result is name -> these CPU tensors,
        in order, which `to_mesh` copies to shards. Otherwise the result is {}.
    """
    kept: dict[str, list[torch.Tensor]] = {}
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    for name in names:
        owner, _, leaf = name.rpartition(".")
        modules = [each.get_submodule(owner) for each in (layer, *others)]
        first = getattr(layer.get_submodule(owner), leaf)
        later = active_mesh().size > 1 and first.device.type == "cpu"
        device = "meta" if later else first.device
        stacked = torch.empty((len(modules), *first.shape), dtype=first.dtype, device=device)
        parts = []
        for place, module in enumerate(modules):
            part = getattr(module, leaf).detach()
            if later:
                parts.append(part)
            else:
                stacked[place] = part
            del part
            setattr(module, leaf, None)
        if trim is not None:
            trim(0)  # otherwise glibc keeps freed pieces below 32 MiB
        if isinstance(first, torch.nn.Parameter):
            stacked = torch.nn.Parameter(stacked, requires_grad=first.requires_grad)
        if later:
            kept[name] = parts
        setattr(modules[0], leaf, stacked)
    return kept


def to_mesh(
    model: torch.nn.Module, stacks: Iterable[str], stacked: Mapping[str, list[torch.Tensor]]
) -> torch.nn.Module:
    """Moves a model from the CPU to the mesh in shards, in place, and returns it; prints a line on bytes per device.

    Trained weights become fp32, and shared tensors stay shared.

    Args:
        model: a model whose layers run as a loop.
        stacks: prefixes of the names of stacked tensors.
        stacked: the CPU tensors of stacks on "meta", by name; these lists are empty afterwards.

    Raises:
        ValueError: from `check_rules`.
    """
    stacks = tuple(stacks)
    rows = check_rules(model, stacks)
    held_bytes, most = sum(row.bytes for row in rows), rows[0]
    print(
        f"sharded          {held_bytes / GIB:.2f} GiB per device; most for {most.name} {most.shape}, {most.spec}",
        flush=True,
    )
    whole = embedding_of(model)
    placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    shared = _shared(model)
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) in placed:
                    held[leaf] = placed[id(tensor)][1]
                    continue
                name = f"{path}.{leaf}" if path else leaf
                spec, dtype = spec_of(name, tensor, whole, name.startswith(stacks)), _dtype(tensor)
                new = put_stack(stacked[name], spec, dtype) if name in stacked else put(tensor, spec, dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                if id(tensor) in shared:
                    placed[id(tensor)] = tensor, new
                held[leaf] = new
    return model


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns a tensor's dtype on the devices: fp32 for trained weights, even if files have bf16."""
    return torch.float32 if tensor.requires_grad else tensor.dtype


def _shared(model: torch.nn.Module) -> set[int]:
    """Returns the `id` of every tensor that a model holds in several places."""
    every = [id(tensor) for module in model.modules() for held in (module._parameters, module._buffers)
             for tensor in held.values() if tensor is not None]  # fmt: skip
    return {one for one, count in Counter(every).items() if count > 1}


def check_rules(model: torch.nn.Module, stacks: Iterable[str]) -> list[Placed]:
    """Returns the table of `sharding_rules.place` for a model's parameters and buffers on the mesh of this process.

    `stacks` are prefixes of the names of stacked tensors. Raises ValueError as `place` does.
    """
    prefixes = tuple(stacks)
    named: dict[int, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        named.setdefault(id(tensor), _described(name, tensor, name.startswith(prefixes)))
    return sharding_rules.place(active_mesh(), named.values(), embedding_of(model))


def embedding_of(model: torch.nn.Module) -> Embedding:
    """Returns the sizes that sharding rules need, for a model, and for its teacher if it has one."""
    causal: Any = base_model(model)
    weight = matrix_of(causal.get_input_embeddings()).weight
    hidden = getattr(causal.config.get_text_config(), "hidden_size", weight.shape[1])
    teacher = getattr(model, "teacher", None)
    return Embedding(hidden, is_tied(causal), teacher and embedding_of(teacher))
