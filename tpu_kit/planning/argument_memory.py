"""The tensors of a training step's arguments: their names, shapes, dtypes and bytes in a TPU's memory.

They are those of the model, of its adapters and of a teacher, as `layer_scan` stacks the layers and `quantization`
stores integers. On a mesh a device has the shards by the rules of `models.sharding_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import permutations
from typing import NamedTuple

from tpu_kit.config.loader import LoraConfig, ModelConfig, TrainConfig
from tpu_kit.config.mesh import Mesh
from tpu_kit.models.architecture import Experts, Linear, Shape, scale_groups
from tpu_kit.models.shape_cache import read_shape
from tpu_kit.models.sharding_rules import Embedding, Placed, Tensor, place, spec_of

LANES, ROWS, VECTOR = 128, 8, 1024


def padded(shape: Sequence[int], size: float, *, free: bool = False) -> int:
    """Bytes of an array in HBM, with the padding of its tiles.

    An array lies in tiles of 8 rows of 128 for every dtype (bf16 as T(8,128)(2,1), int8 as T(8,128)(4,1): rows are
    interleaved within a tile), fewer rows where the array has fewer; a vector in tiles of 1024.

    Args:
        shape: its axes.
        size: bytes of an element.
        free: whether the compiler may exchange the last two axes in the layout, as it may for arguments; of four axes
            the last three.
    """
    if not shape:
        return 512
    if len(shape) == 1:
        return math.ceil(-(-shape[0] // VECTOR) * VECTOR * size)

    def lay(rows: int, lanes: int) -> int:
        tile = min(ROWS, 1 << (rows - 1).bit_length())
        return -(-rows // tile) * tile * -(-lanes // LANES) * LANES

    if not free:
        return math.ceil(math.prod(shape[:-2]) * lay(*shape[-2:]) * size)
    last = shape[-3:] if len(shape) > 3 else shape[-2:]
    rest = math.prod(shape[: -len(last)])
    least = min(math.prod(order[:-2]) * lay(*order[-2:]) for order in permutations(last))
    return math.ceil(rest * least * size)


class _Stored(NamedTuple):
    """How the base weights are stored: bytes of an element, the dtype, and the inputs of a group of int4."""

    size: int
    dtype: str
    group: int


def model_tensors(shape: Shape, config: TrainConfig, *, scanned: bool = True) -> tuple[Tensor, ...]:
    """Returns all parameters and buffers of a run's model, under their names in it.

    Weights are fp32 where they are trained, else in model.base_dtype, adapters fp32. int8 has a scale for each output
    of a linear layer; int4 has two weights in a byte, and a step and an offset for each group of inputs. Scales and
    all other weights are bf16 then.

    Args:
        shape: of the model.
        config: the run.
        scanned: whether the layers of a loop are stacked.
    """
    dtype = config.model.base_dtype if config.lora.r else "fp32"
    stored = _Stored(4 if dtype == "fp32" else 2, dtype, config.model.quant_group)
    return _model_tensors(shape, config.lora, stored, scanned)


@lru_cache(64)  # a plan estimates many settings of one model
def _model_tensors(shape: Shape, lora: LoraConfig, stored: _Stored, scanned: bool) -> tuple[Tensor, ...]:
    shape.check_targets(lora)
    start, whole = "base_model.model." if lora.r else "", not lora.r
    quantized = {f"{one.path}.weight" for one in shape.linears_outside} | {
        f"{one.path}.bias" for one in shape.linears_outside
    }
    tensors = [
        Tensor(start + name, sizes, stored.size, trained=whole)
        for name, sizes in shape.outside if name not in quantized
    ]  # fmt: skip
    for one in shape.linears_outside:
        share = float(shape.has_adapter(lora, None, one))
        tensors += _linear_tensors(start + one.path, one, (), share, lora, stored)
    for path, layers in shape.stacks(scanned=scanned):
        kind, stack = shape.kinds[shape.order[layers[0]]], (len(layers),) if scanned else ()
        tensors += [
            Tensor(f"{start}{path}.{name}", (*stack, *sizes), stored.size, scanned, trained=whole)
            for name, sizes in kind.others
        ]
        for each in kind.experts:
            tensors += _expert_tensors(f"{start}{path}.{each.path}", each, stack, lora, stored)
        for one in kind.linears:
            share = sum(shape.has_adapter(lora, layer, one) for layer in layers) / len(layers)
            tensors += _linear_tensors(f"{start}{path}.{one.path}", one, stack, share, lora, stored)
    return tuple(tensors)


def _expert_tensors(
    path: str, mixture: Experts, stack: tuple[int, ...], lora: LoraConfig, stored: _Stored
) -> list[Tensor]:
    """Returns the tensors of a layer's experts; PEFT's wrappers of their weights are nested, the first one within."""
    base, stacked = path + ".base_layer" * (len(mixture.linears) if lora.experts else 0), bool(stack)
    tensors: list[Tensor] = []
    for number, one in enumerate(mixture.linears, 1):
        names = [f"{base}.{one.path}{end}" for end in ("", "_scale", "_bias")]
        tensors += _weight_tensors(names, one, (*stack, mixture.count), stacked, stored, not lora.r, True)
        wrapper, rank = path + ".base_layer" * (len(mixture.linears) - number), lora.experts * mixture.count
        sizes = {"lora_A": (rank, one.inputs), "lora_B": (one.outputs, rank)}  # by 2 % less where experts are padded
        tensors += [
            Tensor(f"{wrapper}.{name}.default.weight", (*stack, *each), 4, stacked, False, True)
            for name, each in sizes.items() if rank
        ]  # fmt: skip
    return tensors


def _linear_tensors(
    path: str, one: Linear, stack: tuple[int, ...], share: float, lora: LoraConfig, stored: _Stored
) -> list[Tensor]:
    """Returns the tensors of a linear layer; `share` is the share of the stacked layers that have adapters."""
    base, stacked = f"{path}.base_layer" if share else path, bool(stack)
    names = [f"{base}.{leaf}" for leaf in ("weight", "scale", "bias")]
    tensors = _weight_tensors(names, one, stack, stacked, stored, not lora.r)
    if share:
        some = tuple(max(1, round(size * share)) for size in stack)
        adapters: dict[str, tuple[int, ...]] = {
            "lora_A.default.weight": (lora.r, one.inputs),
            "lora_B.default.weight": (one.outputs, lora.r),
        }
        adapters |= {"lora_magnitude_vector.default.weight": (one.outputs,)} if lora.dora else {}
        tensors += [
            Tensor(f"{path}.{name}", (*some, *sizes), 4, stacked, False, True) for name, sizes in adapters.items()
        ]
    return tensors


def _weight_tensors(
    names: Sequence[str], one: Linear, stack: tuple[int, ...], stacked: bool, stored: _Stored, trained: bool,
    experts: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Returns weight, scales and bias of a linear layer, or of a product of experts, under these names."""

    def tensor(number: int, sizes: Sequence[int], size: float, packed: bool = False) -> Tensor:
        return Tensor(names[number], (*stack, *sizes), size, stacked, packed, trained)

    if stored.dtype == "int8":
        tensors = [tensor(0, (one.outputs, one.inputs), 1), tensor(1, (one.outputs,), 2)]
    elif stored.dtype == "int4":
        groups = scale_groups(one.inputs, stored.group) if experts else one.inputs // stored.group
        steps = tensor(1, (2, groups, one.outputs), 2)
        tensors = [tensor(0, (one.inputs // 2, one.outputs), 1, True), steps]
    else:
        tensors = [tensor(0, (one.outputs, one.inputs), stored.size)]
    return tensors + ([tensor(2, (one.outputs,), stored.size)] if one.bias else [])


def is_matrix(tensor: Tensor) -> bool:
    """Whether a tensor, or each of a stack, has two axes or more."""
    return len(tensor.shape) - tensor.stacked > 1


def trained_count(shape: Shape, config: TrainConfig) -> int:
    """Returns the number of trained parameters."""
    return sum(math.prod(one.shape) for one in model_tensors(shape, config) if one.trained)


@cache
def shape_of(model: ModelConfig) -> Shape:
    """As `read_shape`, once in a process."""
    return read_shape(model)


def teacher_shape(config: TrainConfig) -> Shape | None:
    """Returns the shape of a teacher in memory; None without one."""
    return None if config.teacher is None or config.distill.files else shape_of(config.teacher)


def teacher_tensors(config: TrainConfig) -> list[Tensor]:
    """Returns the stored weights of a teacher in memory; none without one."""
    shape, model = teacher_shape(config), config.teacher
    if shape is None or model is None:
        return []
    tensors = model_tensors(shape, replace(config, model=model, lora=LoraConfig()))
    return [one for one in tensors if not one.trained]


def table(shape: Shape, config: TrainConfig, mesh: Mesh) -> list[Placed]:
    """Returns the table of a model's tensors on a mesh, largest shard first.

    Raises:
        ValueError: as `sharding_rules.place`.
    """
    return place(mesh, model_tensors(shape, config), shape.embedding)


def shards(tensors: Sequence[Tensor], mesh: Mesh | None, embedding: Embedding) -> list[tuple[int, ...]]:
    """Returns the shapes of a device's shards; without a mesh of the whole tensors."""
    if mesh is None:
        return [one.shape for one in tensors]
    specs = (mesh.fitted(spec_of(one, embedding, mesh.rules), one.shape) for one in tensors)
    return [mesh.shard_shape(spec, one.shape) for spec, one in zip(specs, tensors, strict=True)]
