"""How the tensors of a model are sharded over a mesh: rules from names and shapes to partition specs, without torch.

    linear layer                     spec of (outputs, inputs)       gathered for the product
    column: other outputs than H     ((model, fsdp), None)           (model, None)
    row: H outputs                   (fsdp, model)                   (None, model)

H is the size of the hidden states. A spec is for the tensor of a single layer; a stack of layers has one more dimension
in front, which is not sharded. tpu_kit/model/README.md has the reason for each rule. `partition` shards tensors by
these rules, and the planner computes the bytes of each shard.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from tpu_kit.config.mesh import BATCH, Mesh, Spec

FIRST = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""Linear layers that read the input of a decoder's layer; as many outputs as H do not make them row layers."""
_LAST = ("o_proj", "dense", "out_proj")
"""Row layers whose adapters may have H inputs."""
_ROWS: Spec = (("model", "fsdp"), None)
_COLUMNS: Spec = (None, ("model", "fsdp"))

_TABLES = re.compile(
    r"\.(position_embedding_table|pos_embedding|pos_embed\.weight|patch_embed\.proj\.weight|patch_embedding\.weight)$"
)
"""Tables of positions, and the convolution over pixels, of the towers for images."""
_SHARE = 1000  # of all parameters: a matrix with more than one part of so many may not stay unsharded
_LAYER = re.compile(r".*\blayers\.(runs\.\d+\.layers\.)?\d+\.")
# The end of a name, after the path of a linear layer or an embedding.
_PARTS = re.compile(r"\.(base_layer|lora_\w+|token_adapter|modules_to_save|original_module)\..*|\.[^.]*$")


class Embedding(NamedTuple):
    """What rules need to know of a model: H, whether its input embedding is its output head, too, and of a teacher."""

    hidden: int = 0
    tied: bool = False
    teacher: Embedding | None = None


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


def is_column(path: str, outputs: int, inputs: int, hidden: int) -> bool:
    """Whether "model" shards a linear layer by its outputs, and not by its inputs.

    Args:
        path: of the layer.
        outputs: their number; 0 if it is unknown, as for an adapter's A.
        inputs: their number.
        hidden: H.
    """
    leaf = path.rpartition(".")[2]
    return leaf in FIRST or (leaf not in _LAST and (outputs != hidden if outputs else inputs == hidden))


def spec_of(tensor: Tensor, embedding: Embedding, mesh: Mesh) -> Spec:
    """The spec of a model's tensor on a mesh, without axes that do not divide their dimension.

    If none divides its dimension of a matrix, as in an output head with an odd vocabulary, the two dimensions exchange
    their axes.

    Args:
        tensor: the tensor.
        embedding: the model's.
        mesh: the mesh, with the user's rules.
    """
    whole, shape = (None,) * len(tensor.shape), tensor.shape[tensor.stacked :]
    if is_small(tensor.name) or not shape:
        return whole
    rule = _chosen(tensor.name, mesh.rules)
    scale = tensor.name.endswith("scale")
    if rule is None:
        rule = mesh.over_weights(_derived(tensor, shape, embedding))
        if len(rule) == len(shape) == 2 and not _shards(mesh, rule, shape) and _shards(mesh, rule[::-1], shape):
            rule = rule[::-1]
    elif tensor.packed and len(shape) == 2:
        rule = mesh.over_weights((None, rule[0]))
    elif scale and len(shape) == 3:  # int4: (2, I / G, O)
        rule = mesh.over_weights((None, None, rule[0]))
    else:
        rule = mesh.over_weights(rule)
    if len(rule) > len(shape):  # a vector beside a matrix, such as DoRA's magnitudes
        return whole
    spec = (None,) * tensor.stacked + rule + (None,) * (len(shape) - len(rule))
    return mesh.fitted(spec, tensor.shape)


def _shards(mesh: Mesh, rule: Spec, shape: tuple[int, ...]) -> bool:
    """Whether axes of a rule shard a tensor of its dimensions."""
    return mesh.shard_shape(mesh.fitted(rule, shape), shape) != shape


def _derived(tensor: Tensor, shape: tuple[int, ...], embedding: Embedding) -> Spec:
    """The spec of a tensor of a single layer by its shape; () of one that no linear layer or embedding has."""
    name, path = tensor.name, _PARTS.sub("", tensor.name)
    if name.startswith("teacher.") and embedding.teacher is not None:
        embedding = embedding.teacher
    leaf = path.rpartition(".")[2]
    scale = name.endswith("scale")
    if ".experts." in name:  # (E, ...)
        return ("fsdp",)
    if _stays_whole(name) or (len(shape) != 2 and not scale):
        return ()
    if "lora_embedding_A" in name:  # (r, V)
        return _COLUMNS
    if "lora_embedding_B" in name:  # (H, r)
        return _ROWS
    if "embed" in leaf and not (embedding.tied and leaf == "embed_tokens"):
        return _COLUMNS
    if "lora_A" in name:  # (r, I); the side of the base weight that is sharded over the model axis is the adapter's too
        return (None, "fsdp") if is_column(path, 0, shape[1], embedding.hidden) else _COLUMNS
    if "lora_B" in name:  # (O, r)
        return _ROWS if is_column(path, shape[0], 0, embedding.hidden) else ("fsdp", None)
    outputs, inputs = (shape[-1], 0) if tensor.packed or scale else shape
    column = is_column(path, outputs, inputs, embedding.hidden)
    if tensor.packed or scale:  # steps and offsets of integers follow the rows of their weight
        return (None,) * (len(shape) - 1) + (_ROWS[0] if column else "fsdp",)
    return _ROWS if column else ("fsdp", "model")


def _stays_whole(name: str) -> bool:
    """Whether the name is a router's, a tower's table, a trained row's or an objective's: all are small."""
    if ".trainable_tokens_" in name:
        return True
    leaf = _PARTS.sub("", name).rpartition(".")[2]
    if leaf in ("gate", "router") or ".router." in name or ".objective." in name:
        return True
    return bool(_TABLES.search(name))


def cache_spec(mesh: Mesh, shape: Sequence[int]) -> Spec:
    """The sharding of keys and values (B, heads, S, D), and of queries, in generation.

    Over the heads, if their number divides by the devices that share the weights; else over the rows, if that number
    divides, and over the model axis.
    """
    shared = mesh.over_weights(_ROWS)[0]
    by_heads = shape[1] % mesh.shards(shared) == 0
    return mesh.fitted(("data", shared, None, None) if by_heads else (BATCH, "model", None, None), shape)


@cache  # asked for each tensor whenever a step is traced
def _chosen(name: str, rules: tuple[tuple[str, Spec], ...]) -> Spec | None:
    return next((spec for glob, spec in rules if matches(glob, name)), None)


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


def place(mesh: Mesh, tensors: Iterable[Tensor], embedding: Embedding) -> list[Placed]:
    """The table of a model's tensors on a mesh, largest shard first; equal tensors of several stacks are one row.

    Raises:
        ValueError: a rule of the user's matches no tensor or has more dimensions than one; or a matrix with more than a
            thousandth of the parameters would not be sharded.
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
    specs = [spec_of(tensor, embedding, mesh) for tensor in tensors]
    most = sum(math.prod(tensor.shape) for tensor in tensors) / _SHARE
    missed = [  # but not depthwise convolutions, (channels, 1, taps), of which each layer has few
        tensor for tensor, spec in zip(tensors, specs, strict=True)
        if not any(spec) and len(sizes := tensor.shape[tensor.stacked :]) > 1 and math.prod(tensor.shape) > most
        and not (len(sizes) == 3 and sizes[1] == 1)
        and _chosen(tensor.name, mesh.rules) is None and not is_small(tensor.name) and not _stays_whole(tensor.name)
    ]  # fmt: skip
    if missed and mesh.shards(mesh.over_weights(_ROWS)[0]) > 1:
        names = list(dict.fromkeys(shown(one.name) for one in missed))
        raise ValueError(
            f"launch.mesh={mesh}: {_some(names)} would not be sharded: no axis divides it, or it is in no "
            f"linear layer. {_advice(mesh, missed[0])}, or train this model without a mesh"
        )
    found: dict[tuple[str, Spec, tuple[int, ...]], Placed] = {}
    for tensor, spec in zip(tensors, specs, strict=True):
        size = int(math.prod(mesh.shard_shape(spec, tensor.shape)) * tensor.size)
        key = shown(tensor.name), spec, tensor.shape
        before = found.get(key, Placed(key[0], tensor.shape, spec, 0, 0))
        whole = int(math.prod(tensor.shape) * tensor.size)
        found[key] = Placed(key[0], tensor.shape, spec, before.bytes + size, before.whole + whole)
    return sorted(found.values(), key=lambda row: -row.bytes)


def _advice(mesh: Mesh, tensor: Tensor) -> str:
    """What shards a tensor: a rule for the largest dimension that an axis divides, or else another mesh."""
    shape = tensor.shape[tensor.stacked :]
    rules = [
        (size, shards, ",".join(axis if place == each else "None" for each in range(len(shape))))
        for place, size in enumerate(shape) for axis in ("model", "fsdp")
        if (shards := mesh.shards(mesh.over_weights((axis,))[0])) > 1 and size % shards == 0
    ]  # fmt: skip
    if not rules:
        return f"Use sizes of fsdp and model whose product divides one of {' x '.join(map(str, shape))}"
    name = ".".join(shown(tensor.name).split(".")[-2:])
    return f'Add rules with launch.mesh_rules, such as {{"*{name}": "{max(rules)[2]}"}}'


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
