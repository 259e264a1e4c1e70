"""How the tensors of a model are sharded over a mesh: rules from names to partition specs.

    name glob                        spec                            gathered for the product
    *q_proj*weight, gate, up, ...    ((model, fsdp), None)           (model, None)
    *o_proj*weight, *down_proj*...   (fsdp, model)                   (None, model)

A spec is for the tensor of a single layer; a stack of layers has one more dimension in front, which is not sharded. A
tensor is stored in shards over "fsdp" and "model". When its layer runs, it is gathered over "fsdp" and stays sharded
over "model", which shards the matrix product itself. tpu_kit/models/README.md has the reason for each rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tpu_kit.config.mesh import BATCH, Spec
from tpu_kit.distributed.mesh import current_mesh, put, put_stack
from tpu_kit.hardware.chips import GIB
from tpu_kit.xla.sharding import constrain

_COLUMN = ("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1")
_ROW = ("o_proj", "down_proj", "dense", "fc2")
_ROWS: Spec = (("model", "fsdp"), None)

RULES: Mapping[str, Spec] = {
    # Adapters: A is (r, I), B is (O, r); the side of the base weight that is sharded over the model axis is theirs too.
    **{f"*.{name}.lora_A.*": (None, "fsdp") for name in _COLUMN},
    **{f"*.{name}.lora_B.*": _ROWS for name in _COLUMN},
    **{f"*.{name}.lora_A.*": (None, ("model", "fsdp")) for name in _ROW},
    **{f"*.{name}.lora_B.*": ("fsdp", None) for name in _ROW},
    **{f"*.{name}.*weight": _ROWS for name in _COLUMN},
    **{f"*.{name}.*weight": ("fsdp", "model") for name in _ROW},
    "*embed_tokens.weight": (None, ("model", "fsdp")),
    "*lm_head.weight": _ROWS,
    # Steps and offsets of integers follow the rows of their weight.
    **{f"*.{name}.*scale": (("model", "fsdp"),) for name in _COLUMN},
    **{f"*.{name}.*scale": ("fsdp",) for name in _ROW},
}
"""Spec of a layer's tensor by the glob of its name; the first that matches counts."""

PARTS = WeakTensorKeyDictionary()
"""For each stack on "meta" that `to_mesh` has still to move, the list of its layers' CPU tensors."""

_LARGE = 2**20  # bytes: a larger tensor that no rule matches is an error


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: a row of the table of a model's tensors.

    Attributes:
        name: the parameter's or buffer's.
        shape: of the whole tensor.
        spec: its sharding.
        bytes: of one device's shard.
    """

    name: str
    shape: tuple[int, ...]
    spec: Spec
    bytes: int


def spec_of(name: str, tensor: torch.Tensor, stacked: bool = False, tied: bool = False) -> Spec:
    """The spec of a parameter or buffer of a model.

    Args:
        name: its name in the model.
        tensor: the tensor, or one of its shape and dtype.
        stacked: whether it is a stack of layers' tensors, (G, ...).
        tied: whether the embedding is the output head, too.
    """
    dims = tensor.ndim - stacked
    if tied and name.endswith("embed_tokens.weight"):
        name = name.replace("embed_tokens", "lm_head")
    rule = _rule(name)
    if rule is None or dims < 1 or name.endswith("bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]:
        return (None,) * tensor.ndim
    if tensor.dtype == torch.uint8:  # int4: (I / 2, O), two inputs in a byte
        rule = (None, rule[0])
    if name.endswith("scale") and dims == 3:  # int4: (2, I / G, O)
        rule = (None, None, rule[0])
    if dims != len(rule):
        return (None,) * tensor.ndim
    return (None,) * stacked + rule


@cache  # asked for each tensor whenever a step is traced
def _rule(name: str) -> Spec | None:
    return next((spec for glob, spec in RULES.items() if fnmatchcase(f".{name}", glob)), None)


def gathered(spec: Spec) -> Spec:
    """The spec of a tensor that is gathered for its product: without fsdp."""
    found: list[str | tuple[str, ...] | None] = []
    for axes in spec:
        names = tuple(name for name in ((axes,) if isinstance(axes, str) else axes or ()) if name != "fsdp")
        found.append(names or None)
    return tuple(found)


def gather_layer(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The tensors of one layer as its products take them; without a mesh they are returned as they are.

    Args:
        tensors: by name in the layer.
        dtype: of the products; trained matrices in fp32 are cast to it before they are gathered.
    """
    if current_mesh() is None:
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        spec = spec_of(name, tensor)
        if any("fsdp" in (axes or ()) for axes in spec):
            if dtype is not None and tensor.dtype == torch.float32 and tensor.ndim == 2:
                tensor = tensor.to(dtype)
            tensor = constrain(tensor, gathered(spec), spec)
        found[name] = tensor
    return found


def by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Shards hidden states or labels, (B, ...), by rows."""
    return constrain(tensor, (BATCH, *[None] * (tensor.ndim - 1)))


def tiles(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Splits (B, S, ...) into (count, B, S / count, ...): each tile has tokens of every row, so of every shard."""
    found = tensor.unflatten(1, (count, -1)).transpose(0, 1)
    return constrain(found, (None, BATCH, *[None] * (found.ndim - 2)))


def move(tensor: torch.Tensor, device: torch.device, spec: Spec | None = None, copy: bool = False) -> torch.Tensor:
    """Moves a tensor to a device, or to the devices of the mesh.

    Args:
        tensor: on the CPU or on the device.
        device: the device, which stands for all of a mesh.
        spec: how it is sharded on a mesh; not at all by default.
        copy: whether a tensor that is there is copied.
    """
    if current_mesh() is None or device.type != "xla":
        return tensor.to(device, copy=copy)
    spec = spec or (None,) * tensor.ndim
    return put(tensor, spec) if tensor.device.type == "cpu" else constrain(tensor.clone(), spec)


def to_mesh(model: torch.nn.Module, stacks: Iterable[str]) -> torch.nn.Module:
    """Moves a model from the CPU to the devices of the mesh, in place: to each its shards, tensor by tensor.

    Args:
        model: its layers run as a loop.
        stacks: how the names of stacked tensors begin.

    Raises:
        ValueError: as `check_rules`.
    """
    stacks = tuple(stacks)
    rows = check_rules(model, stacks)
    held_bytes, most = sum(row.bytes for row in rows), rows[0]
    print(
        f"sharded          {held_bytes / GIB:.2f} GiB a device; most for {most.name} {most.shape}, {most.spec}",
        flush=True,
    )
    tied = is_tied(model)
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
                spec, dtype = spec_of(name, tensor, name.startswith(stacks), tied), _dtype(tensor)
                parts = PARTS.pop(tensor, None)
                new = put(tensor, spec, dtype) if parts is None else put_stack(parts, spec, dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
                if id(tensor) in shared:
                    placed[id(tensor)] = tensor, new
                held[leaf] = new
    return model


def _dtype(tensor: torch.Tensor) -> torch.dtype:
    """What a tensor has on the devices: trained weights are in fp32, also those that files hold in bf16."""
    return torch.float32 if tensor.requires_grad else tensor.dtype


def _shared(model: torch.nn.Module) -> set[int]:
    """The ids of tensors that several modules hold."""
    every = [id(tensor) for module in model.modules() for held in (module._parameters, module._buffers)
             for tensor in held.values() if tensor is not None]  # fmt: skip
    return {one for one, count in Counter(every).items() if count > 1}


def check_rules(model: torch.nn.Module, stacks: Iterable[str]) -> list[Placed]:
    """The table of a model's tensors on the mesh of this process, largest shard first.

    Raises:
        ValueError: tensors above 1 MiB match no rule.
    """
    mesh = current_mesh()
    assert mesh is not None
    prefixes, tied = tuple(stacks), is_tied(model)
    rows, seen, missed = [], set(), []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        spec = mesh.fitted(spec_of(name, tensor, name.startswith(prefixes), tied), tensor.shape)
        shard = mesh.shard_shape(spec, tensor.shape)
        size = torch.Size(shard).numel() * _dtype(tensor).itemsize
        if _rule(name) is None and tensor.nbytes > _LARGE and tensor.ndim > 1:
            missed.append(name)
        rows.append(Placed(name, tuple(tensor.shape), spec, size))
    if missed:
        raise ValueError(
            f"launch.mesh={mesh}: no sharding rule matches {', '.join(missed[:5])}"
            f"{f' and {len(missed) - 5} more' if len(missed) > 5 else ''}; train this model without a mesh"
        )
    return sorted(rows, key=lambda row: -row.bytes)


def is_tied(model: torch.nn.Module) -> bool:
    """Whether a model's input embedding is its output head."""
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    head = causal.get_output_embeddings()
    return head is not None and head.weight is causal.get_input_embeddings().weight
