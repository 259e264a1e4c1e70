"""How the tensors of a model are sharded over a mesh: rules from names to partition specs, without torch.

    name glob                        spec                            gathered for the product
    *q_proj*weight, gate, up, ...    ((model, fsdp), None)           (model, None)
    *o_proj*weight, *down_proj*...   (fsdp, model)                   (None, model)

A spec is for the tensor of a single layer; a stack of layers has one more dimension in front, which is not sharded.
tpu_kit/models/README.md has the reason for each rule. `partition` shards tensors by these rules, and the planner
computes the bytes of each shard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache

from tpu_kit.config.mesh import BATCH, Mesh, Spec

FIRST = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""Linear layers that read the input of a decoder's layer."""
COLUMN = (*FIRST, "gate_proj", "up_proj", "gate_up_proj", "fc1")
ROW = ("o_proj", "down_proj", "dense", "fc2")
"""Linear layers that "model" shards by their outputs, and by their inputs."""
_ROWS: Spec = (("model", "fsdp"), None)

RULES: Mapping[str, Spec] = {
    "*.experts.*": ("fsdp",),  # (E, ...): by expert
    "*gate.weight": (None, None),  # of a router, or of shared experts
    "*.router.*": (None, None),
    "*.objective.*": (None, None),  # what an objective trains beside the model
    # Adapters: A is (r, I), B is (O, r); the side of the base weight that is sharded over the model axis is theirs too.
    **{f"*.{name}.lora_A.*": (None, "fsdp") for name in COLUMN},
    **{f"*.{name}.lora_B.*": _ROWS for name in COLUMN},
    **{f"*.{name}.lora_A.*": (None, ("model", "fsdp")) for name in ROW},
    **{f"*.{name}.lora_B.*": ("fsdp", None) for name in ROW},
    **{f"*.{name}.*weight": _ROWS for name in COLUMN},
    **{f"*.{name}.*weight": ("fsdp", "model") for name in ROW},
    "*embed_tokens.weight": (None, ("model", "fsdp")),
    "*lm_head.weight": _ROWS,
    # Steps and offsets of integers follow the rows of their weight.
    **{f"*.{name}.*scale": (("model", "fsdp"),) for name in COLUMN},
    **{f"*.{name}.*scale": ("fsdp",) for name in ROW},
}
"""Spec of a layer's tensor by the glob of its name; the first that matches counts."""

_LARGE = 2**20  # bytes: a larger tensor that no rule matches is an error
_LAYER = re.compile(r".*\blayers\.(runs\.\d+\.layers\.)?\d+\.")


@dataclass(frozen=True)
class Tensor:
    """A tensor to be sharded.

    Attributes:
        name: in the model, or in one of its layers.
        shape: of the whole tensor; (G, ...) of a stack of layers' tensors.
        size: bytes of an element.
        stacked: whether it is a stack.
        packed: whether it holds int4 weights: (I / 2, O), two inputs in a byte.
        trained: whether it is trained.
    """

    name: str
    shape: tuple[int, ...]
    size: float
    stacked: bool = False
    packed: bool = False
    trained: bool = False


@dataclass(frozen=True)
class Placed:
    """Where a tensor lies: a row of the table of a model's tensors.

    Attributes:
        name: the parameter's or buffer's.
        shape: of the whole tensor.
        spec: its sharding.
        bytes: of one device's shard.
        whole: bytes of the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    spec: Spec
    bytes: int
    whole: int


def spec_of(tensor: Tensor, tied: bool = False, rules: tuple[tuple[str, Spec], ...] = ()) -> Spec:
    """The spec of a model's tensor.

    Args:
        tensor: the tensor.
        tied: whether the embedding is the output head, too.
        rules: the user's.
    """
    dims, whole = len(tensor.shape) - tensor.stacked, (None,) * len(tensor.shape)
    rule = _rule(tensor.name, tied, rules)
    if rule is None or dims < 1:
        return whole
    if tensor.packed and dims == 2:
        rule = (None, rule[0])
    if tensor.name.endswith("scale") and dims == 3:  # int4: (2, I / G, O)
        rule = (None, None, rule[0])
    if len(rule) > dims:  # a vector beside a matrix, such as DoRA's magnitudes
        return whole
    return (None,) * tensor.stacked + rule + (None,) * (dims - len(rule))


def cache_spec(mesh: Mesh, shape: Sequence[int]) -> Spec:
    """The sharding of keys and values (B, heads, S, D), and of queries, in generation.

    Over the heads, if their number divides by the devices that share the weights; else over the rows, if that number
    divides, and over the model axis.
    """
    by_heads = shape[1] % mesh.shards(_ROWS[0]) == 0
    return mesh.fitted(("data", _ROWS[0], None, None) if by_heads else (BATCH, "model", None, None), shape)


@cache  # asked for each tensor whenever a step is traced
def _rule(name: str, tied: bool, rules: tuple[tuple[str, Spec], ...]) -> Spec | None:
    if is_small(name):
        return None
    if tied and name.endswith("embed_tokens.weight"):
        name = name.replace("embed_tokens", "lm_head")
    return next((spec for glob, spec in (*rules, *RULES.items()) if matches(glob, name)), None)


def is_small(name: str) -> bool:
    """Whether the name is a norm's or a bias's, which are not sharded."""
    return name.endswith("bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]


def matches(glob: str, name: str) -> bool:
    """Whether a rule's glob matches a tensor by its name in the table."""
    name = shown(name)
    return fnmatchcase(f".{name}", glob) or fnmatchcase(name, glob)


def shown(name: str) -> str:
    """The name of a tensor in the table, such as "layers.*.mlp.up_proj.weight" for all layers' tensors."""
    return _LAYER.sub("layers.*.", name).removeprefix("base_model.model.")


def place(mesh: Mesh, tensors: Iterable[Tensor], tied: bool) -> list[Placed]:
    """The table of a model's tensors on a mesh, largest shard first; equal tensors of several stacks are one row.

    Raises:
        ValueError: a rule of the user's matches no tensor or has more dimensions than one; or tensors above 1 MiB match
            no rule.
    """
    tensors = list(tensors)
    names = list(dict.fromkeys(shown(tensor.name) for tensor in tensors if not is_small(tensor.name)))
    for glob, rule in mesh.rules:
        if not any(matches(glob, name) for name in names):
            raise ValueError(f"launch.mesh_rules: {glob} matches no tensor; the names are {_some(names)}")
        for tensor in tensors:
            dims = len(tensor.shape) - tensor.stacked
            if matches(glob, tensor.name) and not is_small(tensor.name) and len(rule) > dims:
                raise ValueError(
                    f"launch.mesh_rules: {glob} has {len(rule)} dimensions, and {shown(tensor.name)} of shape "
                    f"{tensor.shape[tensor.stacked :]} has {dims}; give an entry for each of its dimensions"
                )
    missed = [
        tensor.name for tensor in tensors
        if _rule(tensor.name, tied, mesh.rules) is None and len(tensor.shape) > 1
        and math.prod(tensor.shape) * tensor.size > _LARGE
    ]  # fmt: skip
    if missed := [name for name in missed if not is_small(name)]:
        raise ValueError(
            f"launch.mesh={mesh}: no sharding rule matches {_some(missed)}; add rules with launch.mesh_rules, such as "
            f'{{"*{missed[0].rpartition(".")[2]}": "fsdp,None"}}, or train this model without a mesh'
        )
    found: dict[tuple[str, Spec, tuple[int, ...]], Placed] = {}
    for tensor in tensors:
        spec = mesh.fitted(spec_of(tensor, tied, mesh.rules), tensor.shape)
        size = int(math.prod(mesh.shard_shape(spec, tensor.shape)) * tensor.size)
        key = shown(tensor.name), spec, tensor.shape
        before = found.get(key, Placed(key[0], tensor.shape, spec, 0, 0))
        whole = int(math.prod(tensor.shape) * tensor.size)
        found[key] = Placed(key[0], tensor.shape, spec, before.bytes + size, before.whole + whole)
    return sorted(found.values(), key=lambda row: -row.bytes)


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
