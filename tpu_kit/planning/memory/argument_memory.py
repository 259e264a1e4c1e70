"""Lists the tensors of a training step's arguments: names, shapes, dtypes and bytes in a TPU's memory.

They belong to the model, its adapters and other models, stacked as in `layer_scan` and quantized as in `quantization`.
On a mesh a device holds the shards that `model.sharding.sharding_rules` assigns to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import permutations

from tpu_kit.config.loader import LoraConfig, ModelConfig, TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.model.shape import Experts, Linear, Shape, scale_groups
from tpu_kit.model.shape_cache import shape_of
from tpu_kit.model.sharding.sharding_rules import Embedding, Placed, Tensor, place, spec_of

LANES, ROWS, VECTOR = 128, 8, 1024


def item_bytes(dtype: str) -> int:
    """Returns the bytes of an element in the compute dtype of model.base_dtype: 4 for "fp32", else 2 (bf16)."""
    return 4 if dtype == "fp32" else 2


def padded(shape: Sequence[int], size: float, *, free: bool = False) -> int:
    """Returns the bytes of an array in HBM, with the padding of its tiles.

    Every dtype uses tiles of 8 x 128 elements, with fewer rows if the array has fewer. In bf16, T(8,128)(2,1), and
    int8, T(8,128)(4,1), rows are interleaved within a tile. Vectors use tiles of 1024 elements. A scalar has 512 bytes.

    Args:
        shape: sizes of the axes.
        size: bytes of an element.
        free: whether the compiler may permute the last two axes in the layout, as for arguments; the last three if the
            array has four or more axes.
    """
    if not shape:
        return 512
    if len(shape) == 1:
        return math.ceil(-(-shape[0] // VECTOR) * VECTOR * size)

    def laid(*axes: int) -> int:
        *rest, rows, lanes = axes
        tile = min(ROWS, 1 << (rows - 1).bit_length())
        return math.prod(rest) * -(-rows // tile) * tile * -(-lanes // LANES) * LANES

    last = shape[-3:] if free and len(shape) > 3 else shape[-2:]
    least = min(laid(*order) for order in (permutations(last) if free else [last]))
    return math.ceil(math.prod(shape[: -len(last)]) * least * size)


@dataclass(frozen=True)
class _Stack:
    """A stack of layers, and the storage of its tensors: bytes of an element, dtype, and inputs of an int4 group."""

    lora: LoraConfig
    size: int
    dtype: str
    group: int
    axes: tuple[int, ...] = ()
    """(layers,) for a stack, () for a single layer."""

    def tensor(self, name: str, sizes: Sequence[int], size: float, *, packed: bool = False, trained: bool) -> Tensor:
        """Returns a tensor with the axes of the stack before `sizes`; `size` is the bytes of an element."""
        return Tensor(name, (*self.axes, *sizes), size, bool(self.axes), packed, trained)

    def linear(self, path: str, one: Linear, share: float) -> list[Tensor]:
        """Returns a linear layer's tensors with its adapters; `share` of the stacked layers have adapters."""
        base = f"{path}.base_layer" if share else path
        tensors = self.weight([f"{base}.{leaf}" for leaf in ("weight", "scale", "bias")], one)
        some = replace(self, axes=tuple(max(1, round(size * share)) for size in self.axes))
        return tensors + some.adapters(path, one, self.lora.r if share else 0, self.lora.dora)

    def experts(self, path: str, mixture: Experts) -> list[Tensor]:
        """Returns the tensors of a layer's experts; PEFT nests the wrappers of their weights, the first innermost."""
        rank, count = self.lora.experts * mixture.count, len(mixture.linears)
        base, each = path + ".base_layer" * (count if rank else 0), replace(self, axes=(*self.axes, mixture.count))
        tensors: list[Tensor] = []
        for number, one in enumerate(mixture.linears, 1):
            names = [f"{base}.{one.path}{end}" for end in ("", "_scale", "_bias")]
            tensors += [replace(tensor, stacked=bool(self.axes)) for tensor in each.weight(names, one, True)]
            tensors += self.adapters(path + ".base_layer" * (count - number), one, rank)  # padding adds 2 %
        return tensors

    def adapters(self, path: str, one: Linear, rank: int, dora: bool = False) -> list[Tensor]:
        """Returns the adapter's tensors for a linear layer or a product of experts; none for rank 0."""
        sizes: dict[str, tuple[int, ...]] = {"lora_A": (rank, one.inputs), "lora_B": (one.outputs, rank)}
        sizes |= {"lora_magnitude_vector": (one.outputs,)} if dora else {}
        names = {f"{path}.{name}.default.weight": size for name, size in sizes.items() if rank}
        return [self.tensor(name, size, 4, trained=True) for name, size in names.items()]

    def weight(self, names: Sequence[str], one: Linear, experts: bool = False) -> list[Tensor]:
        """Returns weight, scales (int8 and int4 alone) and bias (if any) of a linear layer or a product of experts.

        `names` has the three names in this order. If `experts`, it is a product of experts, whose int4 scales may be
        padded.
        """
        make, (name, scale, bias) = partial(self.tensor, trained=not self.lora.r), names
        if self.dtype == "int8":
            tensors = [make(name, (one.outputs, one.inputs), 1), make(scale, (one.outputs,), 2)]
        elif self.dtype == "int4":
            groups = scale_groups(one.inputs, self.group) if experts else one.inputs // self.group
            packed = make(name, (one.inputs // 2, one.outputs), 1, packed=True)
            tensors = [packed, make(scale, (2, groups, one.outputs), 2)]
        else:
            tensors = [make(name, (one.outputs, one.inputs), self.size)]
        return tensors + ([make(bias, (one.outputs,), self.size)] if one.bias else [])


def model_tensors(shape: Shape, config: TrainConfig, *, scanned: bool = True) -> tuple[Tensor, ...]:
    """Returns all parameters and buffers of a run's model; if `scanned`, the layers of a loop are stacked.

    Trained weights and adapters are fp32, frozen weights are in model.base_dtype. int8 has a scale for each output of a
    linear layer. int4 has two weights in a byte, and a scale and an offset for each group of inputs. With int8 and
    int4, scales and all other weights are bf16. Raises ValueError as `Shape.check_targets`.
    """
    dtype = config.model.base_dtype if config.lora.r else "fp32"
    return _model_tensors(shape, _Stack(config.lora, item_bytes(dtype), dtype, config.model.quant_group), scanned)


@lru_cache(64)  # a plan estimates many settings of a model
def _model_tensors(shape: Shape, alone: _Stack, scanned: bool) -> tuple[Tensor, ...]:
    """Returns the tensors of `model_tensors`, with its `scanned`; `alone` makes tensors that are not stacked."""
    lora = alone.lora
    shape.check_targets(lora)
    start, whole = "base_model.model." if lora.r else "", not lora.r
    quantized = {f"{one.path}.{leaf}" for one in shape.linears_outside for leaf in ("weight", "bias")}
    outside = [(name, sizes) for name, sizes in shape.outside if name not in quantized]
    tensors = [alone.tensor(start + name, sizes, alone.size, trained=whole) for name, sizes in outside]
    if lora.r:
        tensors = _with_embeddings(shape, alone, start, tensors)
    for one in shape.linears_outside:
        tensors += alone.linear(start + one.path, one, float(shape.has_adapter(lora, None, one)))
    for one in shape.adapted_projector(lora):
        tensors += alone.adapters(start + one.path, one, lora.r, lora.dora)
    for path, layers in shape.stacks(scanned=scanned):
        kind, stack = shape.kinds[shape.order[layers[0]]], replace(alone, axes=(len(layers),) if scanned else ())
        place = f"{start}{path}"
        tensors += [stack.tensor(f"{place}.{name}", sizes, stack.size, trained=whole) for name, sizes in kind.others]
        for each in kind.experts:
            tensors += stack.experts(f"{place}.{each.path}", each)
        for one in kind.linears:
            share = sum(shape.has_adapter(lora, layer, one) for layer in layers) / len(layers)
            tensors += stack.linear(f"{place}.{one.path}", one, share)
    return tuple(tensors)


def _with_embeddings(shape: Shape, alone: _Stack, start: str, tensors: list[Tensor]) -> list[Tensor]:
    """Returns `tensors` with the trained tensors of the embeddings, and with PEFT's names for the frozen matrices.

    PEFT inserts base_layer (adapters), original_module (lora.full) or token_adapter.base_layer (lora.tokens). Until the
    data is read, lora.tokens=added counts one row. `alone` makes tensors without a stack; `start` begins their names.
    """
    lora, where = alone.lora, {f"{start}{path}": path for path in shape.ends}
    first, second = where
    adapted = [path for path in where if shape.is_target(lora, where[path])]
    if not (adapted or lora.full or lora.tokens):
        return tensors
    named = {one.name: one for one in tensors}
    size = named[f"{first}.weight"].shape
    added = list[Tensor]()

    def wrap(path: str, wrapper: str) -> None:
        for leaf in ("weight", "bias"):
            if (one := named.get(f"{path}.{leaf}")) is not None:
                named[one.name] = replace(one, name=f"{path}.{wrapper}.{leaf}")

    for path in adapted:
        wrap(path, "base_layer")
        if path == second:
            added += alone.adapters(path, Linear(where[path], size[1], size[0], False), lora.r)
            continue
        for leaf, sizes in (("A", (lora.r, size[0])), ("B", (size[1], lora.r))):
            added.append(alone.tensor(f"{path}.lora_embedding_{leaf}.default", sizes, 4, trained=True))
    full = [path for path in where if any(f".{path}".endswith(f".{one}") for one in lora.full or ())]
    if full and shape.tied:
        full = [first]  # the output embedding is the same tensor
    for path in [first, second] if full and shape.tied else full:
        wrap(path, "original_module")
    added += [alone.tensor(f"{path}.modules_to_save.default.weight", size, 4, trained=True) for path in full]
    if lora.tokens:
        rows = (len(lora.token_names) or 1, size[1])
        for path in [first] if shape.tied else [first, second]:
            wrap(path, "token_adapter.base_layer")
            added.append(alone.tensor(f"{path}.token_adapter.trainable_tokens_delta.default", rows, 4, trained=True))
            added.append(
                alone.tensor(f"{path}.token_adapter.trainable_tokens_original.default", rows, 4, trained=False)
            )
    return [*named.values(), *added]


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor has two axes or more, without the axis of its stack."""
    return len(tensor.shape) - tensor.stacked > 1


def trained_count(shape: Shape, config: TrainConfig) -> int:
    """Returns the number of trained parameters."""
    return sum(math.prod(one.shape) for one in model_tensors(shape, config) if one.trained)


def frozen_bytes(model: ModelConfig, config: TrainConfig, mesh: Mesh | None) -> int:
    """Returns the padded bytes of another model's frozen weights, in its base_dtype, on a device of the run `config`.

    With a mesh they are a device's shards, without it (None) all weights. Raises ValueError as `shape_of`.
    """
    shape = shape_of(model)
    tensors = model_tensors(shape, replace(config, model=model, lora=LoraConfig()))
    stored = [one for one in tensors if not one.trained]
    parts = shards(stored, mesh, shape.embedding)
    return sum(padded(part, one.size, free=True) for one, part in zip(stored, parts, strict=True))


def table(shape: Shape, config: TrainConfig, mesh: Mesh) -> list[Placed]:
    """Returns the placement of a run's tensors on a mesh, largest shard first; raises as `sharding_rules.place`."""
    return place(mesh, model_tensors(shape, config), shape.embedding)


def shards(tensors: Sequence[Tensor], mesh: Mesh | None, embedding: Embedding) -> list[tuple[int, ...]]:
    """Returns the shapes of the shards on a device; without a mesh the full shapes."""
    if mesh is None:
        return [one.shape for one in tensors]
    return [mesh.shard_shape(spec_of(one, embedding, mesh), one.shape) for one in tensors]
