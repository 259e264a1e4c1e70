"""The tensors of a model by its shape alone: what is stored, what is trained, what is updated together; their bytes.

As `shapes`, without torch and without weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpu_kit.config.loader import LoraConfig, TrainConfig
from tpu_kit.models.architecture import ALONE, Shape

LANES, ROWS, VECTOR = 128, 8, 1024
BLOCK = 256
"""Numbers that share a scale where an optimizer keeps 8 bits of each; see `optimizer`."""


def padded(shape: Sequence[int], size: float, *, free: bool = False) -> int:
    """Bytes of an array in HBM, its tiles filled up.

    An array lies in tiles of 8 rows of 128 for every dtype (bf16 as T(8,128)(2,1), int8 as T(8,128)(4,1): rows are
    interleaved within a tile), fewer rows where the array has fewer; a vector in tiles of 1024.

    Args:
        shape: its axes.
        size: bytes of an element.
        free: whether the compiler may lay out the last two axes the other way round, as it may of arguments.
    """
    if not shape:
        return 512
    if len(shape) == 1:
        return math.ceil(-(-shape[0] // VECTOR) * VECTOR * size)

    def lay(rows: int, lanes: int) -> int:
        tile = min(ROWS, 1 << (rows - 1).bit_length())
        return -(-rows // tile) * tile * -(-lanes // LANES) * LANES

    orders = [lay(shape[-2], shape[-1])] + ([lay(shape[-1], shape[-2])] if free else [])
    return math.ceil(math.prod(shape[:-2]) * min(orders) * size)


def trained_tensors(shape: Shape, lora: LoraConfig) -> list[tuple[int, ...]]:
    """The trained tensors, layers stacked: adapters (layers, r, in), (layers, out, r), DoRA's (layers, out); or all."""
    if lora.r:
        found: list[tuple[int, ...]] = []
        for linear, count in shape.adapted(lora):
            found += [(count, lora.r, linear.inputs), (count, linear.outputs, lora.r)]
            found += [(count, linear.outputs)] if lora.dora else []
        return found
    return weight_tensors(shape)


def update_groups(shape: Shape, lora: LoraConfig, *, scanned: bool) -> list[list[tuple[int, ...]]]:
    """The trained tensors in the groups in which they are updated: the small ones together, each large one alone.

    Args:
        shape: of the model.
        lora: what is trained.
        scanned: whether layers are stacked: the stacks of a block's layers are tensors, otherwise each layer's are.
    """
    small, groups = [], []
    for tensor in trained_tensors(shape, lora):
        parts = [tensor]
        if len(tensor) == 3:
            turns = [turns for period, turns in shape.runs() for _ in range(period)] if scanned else [1] * tensor[0]
            parts = [(count, *tensor[1:]) for count in turns]
        for part in parts:
            if math.prod(part) < ALONE:
                small.append(part)
            else:
                groups.append([part])
    return [small, *groups] if small else groups


def trained_count(shape: Shape, lora: LoraConfig) -> int:
    """Number of trained parameters."""
    return sum(math.prod(tensor) for tensor in trained_tensors(shape, lora))


def weight_tensors(shape: Shape) -> list[tuple[int, ...]]:
    """The shapes of a model's weights, layers stacked."""
    return _other_tensors(shape) + [(shape.layers, linear.outputs, linear.inputs) for linear in shape.linears]


def _other_tensors(shape: Shape) -> list[tuple[int, ...]]:
    """All but the matrices of linear layers, which alone are quantised."""
    embedding = (shape.vocabulary, shape.hidden)
    found: list[tuple[int, ...]] = [embedding] if shape.tied else [embedding, embedding]
    found += [(shape.vocabulary,)] if shape.known.head_bias else []
    found += [(shape.layers, linear.outputs) for linear in shape.linears if linear.bias]
    return found + [(shape.layers, size) for size in shape.norms] + [(size,) for size in shape.last_norms]


def stored_tensors(shape: Shape, config: TrainConfig) -> list[tuple[tuple[int, ...], int]]:
    """What base weights are stored as: shapes and bytes of an element, layers stacked.

    fp32 where they are trained, else model.base_dtype. Of linear layers in int8 with a scale for each output, in int4
    two in a byte, a step and an offset for each group of inputs (`quantization.Scheme.stored` has (2, groups): as
    arguments the two lie together, or groups would be filled up to a tile); these and the rest in bf16.
    """
    dtype = config.model.base_dtype if config.lora.r else "fp32"
    if dtype in ("fp32", "bf16"):
        return [(tensor, 4 if dtype == "fp32" else 2) for tensor in weight_tensors(shape)]
    found: list[tuple[tuple[int, ...], int]] = [(tensor, 2) for tensor in _other_tensors(shape)]
    for one in shape.linears:
        layers, groups = shape.layers, one.inputs // config.model.quant_group
        if dtype == "int8":
            found += [((layers, one.outputs, one.inputs), 1), ((layers, one.outputs), 2)]
        else:
            found += [((layers, one.inputs // 2, one.outputs), 1), ((layers, groups, 2, one.outputs), 2)]
    return found


def group_bytes(group: Sequence[tuple[int, ...]], block: int = 1) -> int:
    """Bytes of a group's fp32 tensor of `update_groups`: a large one in its own shape, or a vector of others.

    Args:
        group: shapes of its tensors.
        block: numbers in a block of the optimizer, to which the rows of a vector are filled up.
    """
    if len(group) == 1 and math.prod(group[0]) >= ALONE:
        return padded(group[0], 4, free=True)
    return padded((sum(blocks(one, block) for one in group) * block,), 4)


def blocks(tensor: Sequence[int], block: int) -> int:
    """Blocks of a trained tensor: each row, or column where those are longer, begins one (`optimizer.Slot`)."""
    turned = len(tensor) > 1 and tensor[-1] < LANES <= tensor[-2]
    width = tensor[-2] if turned else tensor[-1]
    return math.prod(tensor) // width * -(-width // block)
