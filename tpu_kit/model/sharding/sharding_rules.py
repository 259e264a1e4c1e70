"""Sharding rules: map names and shapes of a model's tensors to partition specs on a mesh, without torch.

    linear layer                     spec of (outputs, inputs)       gathered for the product
    column: other outputs than H     ((model, fsdp), None)           (model, None)
    row: H outputs                   (fsdp, model)                   (None, model)

H is the hidden size. A spec is for the tensor of a single layer; a stack of layers has a leading dimension, which is
not sharded. tpu_kit/model/README.md gives the reasons for the rules. `partition` shards tensors by these rules, and the
planner computes the bytes of the shards.
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
"""Linear layers that read the input of a decoder layer; they are column layers even with H outputs."""
_LAST = ("o_proj", "dense", "out_proj")
"""Row layers whose adapters may have H inputs."""
_ROWS: Spec = (("model", "fsdp"), None)
_COLUMNS: Spec = (None, ("model", "fsdp"))

_TABLES = re.compile(
    r"\.(position_embedding_table|pos_embedding|pos_embed\.weight|patch_embed\.proj\.weight|patch_embedding\.weight)$"
)
"""Position tables and patch convolutions of vision towers."""
_SHARE = 1000  # a matrix with more than 1 / 1000 of the parameters may not stay unsharded
_LAYER = re.compile(r".*\blayers\.(runs\.\d+\.layers\.)?\d+\.")
# The suffix of a name after the path of a linear layer or an embedding.
_PARTS = re.compile(r"\.(base_layer|lora_\w+|token_adapter|modules_to_save|original_module)\..*|\.[^.]*$")


class Embedding(NamedTuple):
    """The sizes that rules need: H, whether input and output embedding are tied, and a teacher's sizes or None."""

    hidden: int = 0
    tied: bool = False
    teacher: Embedding | None = None


@dataclass(frozen=True)
class Tensor:
    """A tensor to be sharded.

    Attributes:
        name: name in the model, or in a layer.
        shape: shape of the whole tensor; (G, ...) for a stack of G layers.
        size: bytes of an element.
        stacked: whether the tensor is a stack.
        packed: whether the tensor holds int4 weights: (I / 2, O), two inputs in a byte.
        trained: whether the tensor is trained.
    """

    name: str
    shape: tuple[int, ...]
    size: float
    stacked: bool = False
    packed: bool = False
    trained: bool = False


@dataclass(frozen=True)
class Placed:
    """The placement of a tensor: a row of the table of a model's tensors.

    Attributes:
        name: name of the parameter or buffer.
        shape: shape of the whole tensor.
        spec: partition spec.
        bytes: bytes of a device's shard, summed over the layers that share the row.
        whole: bytes of the whole tensor, summed likewise.
    """

    name: str
    shape: tuple[int, ...]
    spec: Spec
    bytes: int
    whole: int


def is_column(path: str, outputs: int, inputs: int, hidden: int) -> bool:
    """Returns whether "model" shards a linear layer by its outputs instead of its inputs.

    Args:
        path: path of the layer.
        outputs: number of outputs; 0 if unknown, as for an adapter's A.
        inputs: number of inputs.
        hidden: H.
    """
    leaf = path.rpartition(".")[2]
    return leaf in FIRST or (leaf not in _LAST and (outputs != hidden if outputs else inputs == hidden))


def spec_of(tensor: Tensor, embedding: Embedding, mesh: Mesh) -> Spec:
    """Returns the spec of a model's tensor on a mesh: for each dimension, also a stack's, mesh axes or None.

    Axes that do not divide their dimension become None. Norms, biases and the leading dimension of a stack stay whole,
    without a rule also routers. The first of `mesh.rules` that matches the name takes precedence over the derived spec.
    If no axis of a derived matrix divides its dimension, as in an output head with an odd vocabulary, both dimensions
    swap their axes.

    Args:
        tensor: the tensor.
        embedding: sizes of the model.
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
    """Returns whether the axes of a rule shard a tensor of this shape, in any dimension."""
    return mesh.shard_shape(mesh.fitted(rule, shape), shape) != shape


def _derived(tensor: Tensor, shape: tuple[int, ...], embedding: Embedding) -> Spec:
    """Derives the spec of a single layer's tensor from its shape; () outside of linear layers and embeddings."""
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
    if "lora_A" in name:  # (r, I); the model axis shards I if it shards the base weight's inputs
        return (None, "fsdp") if is_column(path, 0, shape[1], embedding.hidden) else _COLUMNS
    if "lora_B" in name:  # (O, r)
        return _ROWS if is_column(path, shape[0], 0, embedding.hidden) else ("fsdp", None)
    outputs, inputs = (shape[-1], 0) if tensor.packed or scale else shape
    column = is_column(path, outputs, inputs, embedding.hidden)
    if tensor.packed or scale:  # scales are sharded like the outputs of their weight
        return (None,) * (len(shape) - 1) + (_ROWS[0] if column else "fsdp",)
    return _ROWS if column else ("fsdp", "model")


def _stays_whole(name: str) -> bool:
    """Returns whether a name belongs to a router, a tower's table, trained rows or an objective: all small."""
    if ".trainable_tokens_" in name:
        return True
    leaf = _PARTS.sub("", name).rpartition(".")[2]
    if leaf in ("gate", "router") or ".router." in name or ".objective." in name:
        return True
    return bool(_TABLES.search(name))


def cache_spec(mesh: Mesh, shape: Sequence[int]) -> Spec:
    """Returns the spec of keys and values (B, heads, S, D), and of queries, in generation.

    Shards the rows over "data" and the heads over the axes that share the weights if these divide the number of heads.
    Otherwise shards the rows over the batch axes, and the heads over "model", as far as they divide.
    """
    shared = mesh.over_weights(_ROWS)[0]
    by_heads = shape[1] % mesh.shards(shared) == 0
    return mesh.fitted(("data", shared, None, None) if by_heads else (BATCH, "model", None, None), shape)


@cache  # called for every tensor whenever a step is traced
def _chosen(name: str, rules: tuple[tuple[str, Spec], ...]) -> Spec | None:
    """Returns the spec of the user's first rule that matches a tensor's name, or None."""
    return next((spec for glob, spec in rules if matches(glob, name)), None)


def is_small(name: str) -> bool:
    """Returns whether a tensor's name belongs to a norm or a bias, which are not sharded."""
    return name.endswith("bias") or "norm" in name.rpartition(".")[0].rpartition(".")[2]


def matches(glob: str, name: str) -> bool:
    """Returns whether a rule's glob matches a tensor's name as `shown`, with or without a leading dot."""
    name = shown(name)
    return fnmatchcase(f".{name}", glob) or fnmatchcase(name, glob)


def shown(name: str) -> str:
    """Returns a tensor's name in the table, such as "layers.*.mlp.up_proj.weight" for all layers."""
    return _LAYER.sub("layers.*.", name).removeprefix("base_model.model.")


def place(mesh: Mesh, tensors: Iterable[Tensor], embedding: Embedding) -> list[Placed]:
    """Returns the table of a model's tensors on a mesh, largest shard first.

    Tensors share a row if name as `shown`, spec and shape are equal; a row sums their bytes.

    Raises:
        ValueError: a user's rule matches no tensor, or has more dimensions than a matching tensor. The mesh shards
            weights, but a matrix with more than a thousandth of the parameters would be whole on every device.
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
                    f"{tensor.shape[tensor.stacked :]} has {dims}; give an entry for each dimension"
                )
    specs = [spec_of(tensor, embedding, mesh) for tensor in tensors]
    most = sum(math.prod(tensor.shape) for tensor in tensors) / _SHARE
    missed = [  # without depthwise convolutions (channels, 1, taps), which are small
        tensor for tensor, spec in zip(tensors, specs, strict=True)
        if not any(spec) and len(sizes := tensor.shape[tensor.stacked :]) > 1 and math.prod(tensor.shape) > most
        and not (len(sizes) == 3 and sizes[1] == 1)
        and _chosen(tensor.name, mesh.rules) is None and not is_small(tensor.name) and not _stays_whole(tensor.name)
    ]  # fmt: skip
    if missed and mesh.shards(mesh.over_weights(_ROWS)[0]) > 1:
        names = list(dict.fromkeys(shown(one.name) for one in missed))
        raise ValueError(
            f"launch.mesh={mesh}: {_some(names)} would not be sharded: no axis divides it, or it is not in a "
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
    """Advises how to shard a tensor: by a rule for the largest dimension that an axis divides, or by another mesh."""
    shape = tensor.shape[tensor.stacked :]
    rules = [
        (size, shards, ",".join(axis if place == each else "None" for each in range(len(shape))))
        for place, size in enumerate(shape) for axis in ("model", "fsdp")
        if (shards := mesh.shards(mesh.over_weights((axis,))[0])) > 1 and size % shards == 0
    ]  # fmt: skip
    if not rules:
        return f"Use sizes of fsdp and model whose product divides a dimension of {' x '.join(map(str, shape))}"
    name = ".".join(shown(tensor.name).split(".")[-2:])
    return f'Add rules with launch.mesh_rules, such as {{"*{name}": "{max(rules)[2]}"}}'


def _some(names: list[str]) -> str:
    """Joins the first five names, and counts the others."""
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
